package linuxpeer

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// End is what programs without a connection manager tell each other about a queue pair, over
// TCP, so that both can move it to RTS.
type End struct {
	QPN  verbs.QPN
	PSN  verbs.PSN  // of the first packet that it sends
	GID  netip.Addr // its address; as a GID, IPv4 is mapped into IPv6
	RKey uint32
	Addr uint64
	// Reads is how many READs and atomics it takes at a time.
	Reads int
}

// RawQP is a queue pair that the program drives itself. One goroutine uses it.
type RawQP struct {
	Endpoint
	// Own is what the peer is told. Its QPN, PSN and GID are as NewRaw made them; the rest
	// is the program's.
	Own End

	dev  *transport.Device
	typ  verbs.QPType
	cq   *transport.CQ // its own, or nil
	qkey uint32
	ah   *transport.AH // of the peer, for UD
}

// RawConfig says what to make.
type RawConfig struct {
	Type   verbs.QPType
	Cap    verbs.QPCap
	Access verbs.Access   // what the peer may do; not of UD
	QKey   uint32         // of UD
	CQ     *transport.CQ  // nil for one of its own
	SRQ    *transport.SRQ // nil for receives of its own
}

// RawQKey is the Q_Key of ibv_ud_pingpong and perftest.
const RawQKey = 0x11111111

// GRH is how much of a receive buffer lies before the message, in bytes.
func GRH(typ verbs.QPType) int {
	if typ == verbs.UD {
		return transport.GRHLen
	}
	return 0
}

// NewRaw makes a queue pair in INIT and the end to tell the peer about. Its GID is the
// device's address: of a device that is bound to all addresses the program must say which.
func NewRaw(dev *transport.Device, cfg RawConfig) (*RawQP, error) {
	q := &RawQP{dev: dev, typ: cfg.Type, qkey: cfg.QKey}
	cq := cfg.CQ
	if cq == nil {
		var err error
		if cq, err = dev.CreateCQ(cfg.Cap.MaxSendWR + cfg.Cap.MaxRecvWR); err != nil {
			return nil, err
		}
		q.cq = cq
	}
	var err error
	q.QP, err = dev.PD().CreateQP(transport.QPConfig{Type: cfg.Type, SendCQ: cq, RecvCQ: cq, SRQ: cfg.SRQ, Cap: cfg.Cap})
	if err != nil {
		q.Close()
		return nil, err
	}
	a := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort, State: verbs.QPInit, Port: 1}
	if cfg.Type == verbs.UD {
		a.Mask |= verbs.AttrQKey
		a.QKey = cfg.QKey
	} else {
		a.Mask |= verbs.AttrAccessFlags
		a.AccessFlags = cfg.Access
	}
	if err := q.Modify(a); err != nil {
		q.Close()
		return nil, err
	}
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	q.Own = End{QPN: q.Num(), PSN: verbs.PSN(binary.BigEndian.Uint32(b[:])) & verbs.PSNMask, GID: dev.LocalAddr().Addr(), Reads: 1}
	q.To.Head = GRH(cfg.Type)
	return q, nil
}

// Close ends the queue pair and what was made for it. The peer is not told: there is no way.
func (q *RawQP) Close() {
	if q.QP != nil {
		_ = q.QP.Close() // it was open
	}
	if q.ah != nil {
		_ = q.ah.Close()
	}
	if q.cq != nil {
		_ = q.cq.Close() // nothing uses it any more
	}
}

// Connect moves the queue pair to RTS, with the attributes that ibv_rc_pingpong and perftest
// use. Both must have the same path MTU.
func (q *RawQP) Connect(peer End, mtu verbs.MTU) error {
	if err := q.ToRTR(peer, mtu); err != nil {
		return err
	}
	return q.ToRTS(peer)
}

// Address lets sends over UD go to a queue pair. It is called once.
func (q *RawQP) Address(av verbs.AV, qpn verbs.QPN, qkey uint32) error {
	ah, err := q.dev.PD().CreateAH(av)
	if err != nil {
		return err
	}
	q.ah = ah
	q.To.AH, q.To.QPN, q.To.QKey = ah.Handle(), qpn, qkey
	return nil
}

// ToRTR is the first half of Connect. Over UD it addresses the peer.
func (q *RawQP) ToRTR(peer End, mtu verbs.MTU) error {
	av := verbs.AV{Remote: netip.AddrPortFrom(peer.GID.Unmap(), transport.Port), Local: q.Own.GID}
	if q.typ == verbs.UD {
		if err := q.Address(av, peer.QPN, q.qkey); err != nil {
			return err
		}
		return q.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTR})
	}
	a := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN,
		State: verbs.QPRTR, AV: av, PathMTU: mtu, DestQPN: peer.QPN, RQPSN: peer.PSN,
	}
	if q.typ == verbs.RC {
		a.Mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer
		a.MaxDestRdAtomic, a.MinRNRTimer = uint8(q.Own.Reads), 12
	}
	if err := q.Modify(a); err != nil {
		return fmt.Errorf("to RTR: %w", err)
	}
	return nil
}

// ToRTS is the second half of Connect.
func (q *RawQP) ToRTS(peer End) error {
	a := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS, SQPSN: q.Own.PSN}
	if q.typ == verbs.RC {
		a.Mask |= verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic
		a.Timeout, a.RetryCnt, a.RNRRetry, a.MaxQPRdAtomic = 14, 7, 7, uint8(min(peer.Reads, 128))
	}
	if err := q.Modify(a); err != nil {
		return fmt.Errorf("to RTS: %w", err)
	}
	return nil
}
