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
	cq  *transport.CQ
	own end
}

// newRaw makes a queue pair in INIT and the end to tell the peer about.
func newRaw(dev *transport.Device, size verbs.QPCap, access verbs.Access) (*rawQP, error) {
	cq, err := dev.CreateCQ(size.MaxSendWR + size.MaxRecvWR)
	if err != nil {
		return nil, err
	}
	qp, err := dev.PD().CreateQP(transport.QPConfig{SendCQ: cq, RecvCQ: cq, Cap: size})
	if err != nil {
		_ = cq.Close() // nothing uses it
		return nil, err
	}
	q := &rawQP{endpoint: endpoint{QP: qp}, cq: cq}
	err = qp.Modify(verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
		State: verbs.QPInit, Port: 1, AccessFlags: access,
	})
	if err != nil {
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
	_ = q.cq.Close()
}

// connect moves the queue pair to RTS, with the attributes that ibv_rc_pingpong and perftest
// use. Both must have the same path MTU.
func (q *rawQP) connect(peer end, mtu verbs.MTU) error {
	err := q.Modify(verbs.QPAttr{
		Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
			verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
		State: verbs.QPRTR, AV: verbs.AV{Remote: netip.AddrPortFrom(peer.gid.Unmap(), transport.Port), Local: q.own.gid},
		PathMTU: mtu, DestQPN: peer.qpn, RQPSN: peer.psn, MaxDestRdAtomic: uint8(q.own.reads), MinRNRTimer: 12,
	})
	if err != nil {
		return fmt.Errorf("to RTR: %w", err)
	}
	err = q.Modify(verbs.QPAttr{
		Mask: verbs.AttrState | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrSQPSN |
			verbs.AttrMaxQPRdAtomic,
		State: verbs.QPRTS, Timeout: 14, RetryCnt: 7, RNRRetry: 7, SQPSN: q.own.psn,
		MaxQPRdAtomic: uint8(min(peer.reads, 128)),
	})
	if err != nil {
		return fmt.Errorf("to RTS: %w", err)
	}
	return nil
}
