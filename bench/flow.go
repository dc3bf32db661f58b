package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// flow is one data connection, or over UD a queue pair and its counterpart: what was posted on
// it, what has completed.
type flow struct {
	s     *Session
	index int
	qp    *transport.QP
	psn   verbs.PSN     // the first one sent
	peer  queue         // the other end
	ah    *transport.AH // of the other end, over UD
	recvs *receives     // nil if there are none

	// Sends, numbered from 1 since the session began.
	posted, completed uint64
	base              uint64 // posted when the phase began
	target            uint64 // how many to post
	unsignaled        int    // sends since the last signaled one
	ready             bool   // there may be room for more
	wrs               []verbs.SendWR
}

// newFlow makes the bookkeeping of a data connection; its queue pair comes later.
func (s *Session) newFlow(index int) *flow {
	f := &flow{s: s, index: index}
	switch {
	case s.shared != nil:
		f.recvs = s.shared
	case s.receives():
		f.recvs = s.newReceives(index, s.p.RxDepth)
	}
	return f
}

// opcode is what a side's requests are.
func (p *Params) opcode() verbs.Opcode {
	switch p.Test.Verb() {
	case VerbWrite:
		return verbs.RDMAWrite
	case VerbRead:
		return verbs.RDMARead
	case VerbAtomic:
		if p.Swap {
			return verbs.AtomicCmpAndSwp
		}
		return verbs.AtomicFetchAdd
	}
	return verbs.Send
}

// cap is the size of a data queue pair on both sides.
func (p *Params) cap() verbs.QPCap {
	inline := p.Inline
	if inline == 0 {
		inline = -1
	}
	return verbs.QPCap{
		MaxSendWR: p.sendDepth(), MaxRecvWR: max(p.recvDepth(), 1), MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: inline,
	}
}

// param is what a data connection takes on both sides.
func (s *Session) param(f *flow) transport.ConnParam {
	p := transport.ConnParam{
		Type: s.p.Type, SendCQ: s.cq, RecvCQ: s.cq, SRQ: s.srq, MTU: s.p.MTU, Cap: s.p.cap(),
		ResponderResources: s.p.Outs, InitiatorDepth: s.p.Outs,
	}
	if f.recvs != nil && s.srq == nil {
		p.Recv = f.recvs.all()
	}
	return p
}

// attach gives the flow its queue pair.
func (f *flow) attach(qp *transport.QP) error {
	f.qp = qp
	if f.recvs != nil && f.s.srq == nil {
		f.recvs.queue = qp
	}
	a, err := qp.Attr()
	f.psn = a.SQPSN
	return err
}

// qkey is the Q_Key of our UD queue pairs, perftest's.
const qkey = 0x11111111

// openUD makes a queue pair for datagrams, ready to receive and, once it has met the other
// end, to send.
func (f *flow) openUD() error {
	s := f.s
	qp, err := s.dev.PD().CreateQP(transport.QPConfig{Type: verbs.UD, SendCQ: s.cq, RecvCQ: s.cq, SRQ: s.srq, Cap: s.p.cap()})
	if err != nil {
		return err
	}
	f.qp = qp
	for _, a := range []verbs.QPAttr{
		{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey, State: verbs.QPInit, Port: 1, QKey: qkey},
		{Mask: verbs.AttrState, State: verbs.QPRTR},
		{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS, SQPSN: verbs.PSN(rand.Uint32()) & verbs.PSNMask},
	} {
		if err := qp.Modify(a); err != nil {
			return err
		}
		if a.State == verbs.QPInit && f.recvs != nil && s.srq == nil {
			if _, err := qp.PostRecvList(f.recvs.all()); err != nil {
				return err
			}
		}
	}
	return f.attach(qp)
}

// own is what the peer must know.
func (f *flow) own() queue {
	q := queue{qpn: f.qp.Num(), qkey: qkey}
	if f.s.exposed != nil {
		q.memory = f.s.exposed.Remote()
	}
	return q
}

// meet takes in what the peer says about its end. Requests can be posted now.
func (f *flow) meet(peer queue) error {
	s := f.s
	f.peer = peer
	if !s.posts() {
		return nil
	}
	if need := s.p.localLen(); s.p.Test.Verb() != VerbSend && int64(peer.memory.Length) < int64(need) {
		return fmt.Errorf("the peer's memory has %d bytes, the test takes %d", peer.memory.Length, need)
	}
	if s.p.Type == verbs.UD {
		ah, err := s.dev.PD().CreateAH(verbs.AV{Remote: s.ctrl.RemoteAddr(), Local: s.ctrl.LocalAddr().Addr()})
		if err != nil {
			return err
		}
		f.ah = ah
	}
	f.wrs = make([]verbs.SendWR, min(s.p.PostList, s.p.window()))
	for i := range f.wrs {
		wr := verbs.SendWR{Opcode: s.p.opcode(), SGList: make([]verbs.SGE, 1), RKey: peer.memory.RKey}
		if wr.Opcode == verbs.AtomicFetchAdd {
			wr.CompareAdd = 1
		}
		if f.ah != nil {
			wr.AH, wr.RemoteQPN, wr.RemoteQKey = f.ah.Handle(), peer.qpn, peer.qkey
		}
		f.wrs[i] = wr
	}
	return nil
}

func (f *flow) close() {
	if f.qp != nil {
		_ = f.qp.Close() // the peer may have been faster
	}
	if f.ah != nil {
		_ = f.ah.Close() // it was open
	}
}

// push posts as many sends as target and window allow.
func (f *flow) push(size int) error {
	f.ready = false
	p := &f.s.p
	window, mod := uint64(p.window()), min(p.CQMod, p.window())
	for f.posted < f.target && f.posted-f.completed < window {
		n := int(min(uint64(len(f.wrs)), window-(f.posted-f.completed), f.target-f.posted))
		unsignaled := f.unsignaled
		for i := range f.wrs[:n] {
			seq := f.posted + uint64(i) + 1
			wr := &f.wrs[i]
			wr.Flags = 0
			// The last send of a run is signaled whatever the moderation, and of as many sends
			// as fit into the window one is: else the run would never end.
			if unsignaled++; unsignaled >= mod || seq == f.target {
				wr.Flags, unsignaled = verbs.Signaled, 0
			}
			f.aim(wr, seq, size)
		}
		k, err := f.qp.PostSendList(f.wrs[:n])
		f.posted += uint64(k)
		f.unsignaled = unsignaled
		if err != nil {
			return f.postFailed(err)
		}
	}
	return nil
}

// aim makes a request that of a number: what it names here, and what it reaches there.
func (f *flow) aim(wr *verbs.SendWR, seq uint64, size int) {
	wr.WRID = wrid(kindSend, f.index, seq)
	wr.SGList, wr.InlineData = wr.SGList[:0], nil
	if size == 0 {
		return
	}
	// Each run begins at the front, so that what one message of it did is known to be there.
	p := &f.s.p
	off := p.slot(p.TxDepth, f.index, seq-f.base-1) * p.Size
	wr.RemoteAddr = f.peer.memory.Addr + uint64(off)
	if size <= p.Inline {
		wr.InlineData = f.s.local.Bytes()[off : off+size]
		return
	}
	wr.SGList = wr.SGList[:1]
	wr.SGList[0] = f.s.local.SGE(off, size)
}

func (f *flow) postFailed(err error) error {
	if errors.Is(err, transport.ErrQueueFull) {
		return fmt.Errorf("BUG: bench: %d sends without completion fill a queue of %d: %w", f.posted-f.completed, f.qp.Cap().MaxSendWR, err)
	}
	return fmt.Errorf("posting sends: %w", err)
}
