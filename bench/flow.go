package bench

import (
	"errors"
	"fmt"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// flow is one data connection: what was posted on it, what has completed.
type flow struct {
	s     *Session
	index int
	qp    *transport.QP
	psn   verbs.PSN // the first one sent

	// Sends, numbered from 1 since the session began.
	posted, completed uint64
	target            uint64 // how many to post
	unsignaled        int    // sends since the last signaled one
	ready             bool   // there may be room for more
	wrs               []verbs.SendWR

	// Receives that wait to be posted again.
	spent []verbs.RecvWR
}

// param is what a data connection takes on both sides.
func (s *Session) param(f *flow) transport.ConnParam {
	inline := s.p.Inline
	if inline == 0 {
		inline = -1
	}
	p := transport.ConnParam{
		SendCQ: s.cq, RecvCQ: s.cq, MTU: s.p.MTU,
		Cap: verbs.QPCap{
			MaxSendWR: s.p.TxDepth, MaxRecvWR: s.p.RxDepth, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: inline,
		},
	}
	if s.p.Test.Latency() {
		// Acknowledgements may trail the answers by a few messages.
		p.Cap.MaxSendWR = max(s.p.TxDepth, 64)
	}
	if s.receives() {
		p.Recv = make([]verbs.RecvWR, s.p.RxDepth)
		for i := range p.Recv {
			p.Recv[i] = f.recv(uint64(i))
		}
	}
	return p
}

// newFlow makes the bookkeeping of a data connection; its queue pair comes later.
func (s *Session) newFlow(index int) *flow {
	f := &flow{s: s, index: index, spent: make([]verbs.RecvWR, 0, s.p.repost())}
	if s.sends() {
		f.wrs = make([]verbs.SendWR, min(s.p.PostList, s.p.window()))
		for i := range f.wrs {
			f.wrs[i] = verbs.SendWR{Opcode: verbs.Send, SGList: make([]verbs.SGE, 1)}
		}
	}
	return f
}

// attach gives the flow its queue pair.
func (f *flow) attach(qp *transport.QP) error {
	f.qp = qp
	a, err := qp.Attr()
	f.psn = a.SQPSN
	return err
}

// recv is the receive of a number: its slot in the buffer.
func (f *flow) recv(n uint64) verbs.RecvWR {
	off := f.s.p.slot(f.s.p.RxDepth, f.index, n) * f.s.p.Size
	return verbs.RecvWR{WRID: wrid(kindRecv, f.index, n), SGList: f.s.recvMR.SGL(off, f.s.p.Size)}
}

// consumed looks at a message, gathers its receive, and posts what is gathered when it is
// worth a call.
func (f *flow) consumed(wc *verbs.WC) error {
	n := wc.WRID & seqMask
	off := f.s.p.slot(f.s.p.RxDepth, f.index, n) * f.s.p.Size
	ph := &f.s.phase
	if int(wc.ByteLen) != ph.size {
		return fmt.Errorf("received a message of %d bytes, sent were %d", wc.ByteLen, ph.size)
	}
	if !ph.measured {
		// Measured messages are not looked at: reading them would be measured too.
		ph.last = f.s.recvMR.Bytes()[off : off+ph.size]
		if f.s.p.exclusive() {
			if err := verify(ph.last); err != nil {
				return err
			}
		}
	}
	i := len(f.spent)
	f.spent = f.spent[:i+1]
	wr := &f.spent[i]
	if wr.SGList == nil {
		wr.SGList = make([]verbs.SGE, 1) // once
	}
	wr.WRID = wrid(kindRecv, f.index, n)
	wr.SGList[0] = f.s.recvMR.SGE(off, f.s.p.Size)
	if len(f.spent) < cap(f.spent) {
		return nil
	}
	_, err := f.qp.PostRecvList(f.spent)
	f.spent = f.spent[:0]
	if err != nil {
		return fmt.Errorf("posting receives: %w", err)
	}
	return nil
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
			wr.WRID = wrid(kindSend, f.index, seq)
			wr.Flags = 0
			// The last send of a run is signaled whatever the moderation, and of as many sends
			// as fit into the window one is: else the run would never end.
			if unsignaled++; unsignaled >= mod || seq == f.target {
				wr.Flags, unsignaled = verbs.Signaled, 0
			}
			f.payload(wr, seq, size)
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

// payload points a request at the message of a number.
func (f *flow) payload(wr *verbs.SendWR, seq uint64, size int) {
	if size == 0 {
		wr.SGList, wr.InlineData = wr.SGList[:0], nil
		return
	}
	off := f.s.p.slot(f.s.p.TxDepth, f.index, seq) * f.s.p.Size
	if size <= f.s.p.Inline {
		wr.SGList, wr.InlineData = wr.SGList[:0], f.s.sendMR.Bytes()[off:off+size]
		return
	}
	wr.SGList, wr.InlineData = wr.SGList[:1], nil
	wr.SGList[0] = f.s.sendMR.SGE(off, size)
}

func (f *flow) postFailed(err error) error {
	if errors.Is(err, transport.ErrQueueFull) {
		return fmt.Errorf("BUG: bench: %d sends without completion fill a queue of %d: %w", f.posted-f.completed, f.qp.Cap().MaxSendWR, err)
	}
	return fmt.Errorf("posting sends: %w", err)
}

// verify compares a message with what every message carries.
func verify(b []byte) error {
	for i, c := range b {
		if c != pattern(i) {
			return fmt.Errorf("byte %d of a message is %#02x, sent was %#02x", i, c, pattern(i))
		}
	}
	return nil
}
