package interop

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// end is what programs without a connection manager tell each other about a queue pair, over
// TCP, so that both can move it to RTS.
type end struct {
	qpn  verbs.QPN
	psn  verbs.PSN  // of the first packet that it sends
	gid  netip.Addr // its address; as a GID, IPv4 is mapped into IPv6
	rkey uint32
	addr uint64
	// reads is how many READs and atomics it takes at a time.
	reads int
}

// rawQP is a queue pair that the program drives itself.
type rawQP struct {
	endpoint
	dev  *transport.Device
	typ  verbs.QPType
	cq   *transport.CQ // its own, or nil
	qkey uint32
	ah   *transport.AH // of the peer, for UD
	own  end
}

// rawConfig says what to make.
type rawConfig struct {
	typ    verbs.QPType
	size   verbs.QPCap
	access verbs.Access
	qkey   uint32         // of UD
	cq     *transport.CQ  // nil for one of its own
	srq    *transport.SRQ // nil for receives of its own
}

// rawQKey is the Q_Key of ibv_ud_pingpong and perftest.
const rawQKey = 0x11111111

// grh is how much of a receive buffer lies before the message.
func grh(typ verbs.QPType) int {
	if typ == verbs.UD {
		return transport.GRHLen
	}
	return 0
}

// newRaw makes a queue pair in INIT and the end to tell the peer about.
func newRaw(dev *transport.Device, cfg rawConfig) (*rawQP, error) {
	cq := cfg.cq
	if cq == nil {
		var err error
		if cq, err = dev.CreateCQ(cfg.size.MaxSendWR + cfg.size.MaxRecvWR); err != nil {
			return nil, err
		}
	}
	typ := cfg.typ
	qp, err := dev.PD().CreateQP(transport.QPConfig{Type: typ, SendCQ: cq, RecvCQ: cq, SRQ: cfg.srq, Cap: cfg.size})
	if err != nil {
		if cfg.cq == nil {
			_ = cq.Close() // nothing uses it
		}
		return nil, err
	}
	q := &rawQP{endpoint: endpoint{QP: qp}, dev: dev, typ: typ, qkey: cfg.qkey}
	if cfg.cq == nil {
		q.cq = cq
	}
	a := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort, State: verbs.QPInit, Port: 1}
	if typ == verbs.UD {
		a.Mask |= verbs.AttrQKey
		a.QKey = cfg.qkey
	} else {
		a.Mask |= verbs.AttrAccessFlags
		a.AccessFlags = cfg.access
	}
	if err := qp.Modify(a); err != nil {
		q.close()
		return nil, err
	}
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	q.own = end{qpn: qp.Num(), psn: verbs.PSN(binary.BigEndian.Uint32(b[:])) & verbs.PSNMask, gid: dev.LocalAddr().Addr(), reads: 1}
	return q, nil
}

func (q *rawQP) close() {
	_ = q.QP.Close() // a raw queue pair has nobody to tell
	if q.ah != nil {
		_ = q.ah.Close()
	}
	if q.cq != nil {
		_ = q.cq.Close()
	}
}

// connect moves the queue pair to RTS, with the attributes that ibv_rc_pingpong and perftest
// use. Both must have the same path MTU.
func (q *rawQP) connect(peer end, mtu verbs.MTU) error {
	if err := q.toRTR(peer, mtu); err != nil {
		return err
	}
	return q.toRTS(peer)
}

func (q *rawQP) toRTR(peer end, mtu verbs.MTU) error {
	if q.typ == verbs.UD {
		var err error
		if q.ah, err = q.dev.PD().CreateAH(verbs.AV{Remote: netip.AddrPortFrom(peer.gid.Unmap(), transport.Port), Local: q.own.gid}); err != nil {
			return err
		}
		q.to = datagram{ah: q.ah.Handle(), qpn: peer.qpn, qkey: q.qkey, head: transport.GRHLen}
		return q.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTR})
	}
	a := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN,
		State: verbs.QPRTR, AV: verbs.AV{Remote: netip.AddrPortFrom(peer.gid.Unmap(), transport.Port), Local: q.own.gid},
		PathMTU: mtu, DestQPN: peer.qpn, RQPSN: peer.psn,
	}
	if q.typ == verbs.RC {
		a.Mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer
		a.MaxDestRdAtomic, a.MinRNRTimer = uint8(q.own.reads), 12
	}
	if err := q.Modify(a); err != nil {
		return fmt.Errorf("to RTR: %w", err)
	}
	return nil
}

func (q *rawQP) toRTS(peer end) error {
	a := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS, SQPSN: q.own.psn}
	if q.typ == verbs.RC {
		a.Mask |= verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic
		a.Timeout, a.RetryCnt, a.RNRRetry, a.MaxQPRdAtomic = 14, 7, 7, uint8(min(peer.reads, 128))
	}
	if err := q.Modify(a); err != nil {
		return fmt.Errorf("to RTS: %w", err)
	}
	return nil
}
