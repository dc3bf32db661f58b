package bench

import (
	"fmt"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// receives are those of one receive queue: a flow's, or the session's if they are shared.
type receives struct {
	s     *Session
	index int // of the queue, which a WRID names
	depth int
	queue interface {
		PostRecvList([]verbs.RecvWR) (int, error)
	}
	// spent wait to be posted again.
	spent []verbs.RecvWR
}

func (s *Session) newReceives(index, depth int) *receives {
	return &receives{s: s, index: index, depth: depth, spent: make([]verbs.RecvWR, 0, s.p.repost())}
}

// place is where the message of a receive goes: head, which is not the message's, and size.
func (r *receives) place(n uint64) (off, head, size int) {
	p := &r.s.p
	head = p.head()
	return p.slot(p.RxDepth, r.index, n) * (head + p.Size), head, p.Size
}

// all are the receives as first posted.
func (r *receives) all() []verbs.RecvWR {
	wrs := make([]verbs.RecvWR, r.depth)
	for i := range wrs {
		off, head, size := r.place(uint64(i))
		wrs[i] = verbs.RecvWR{WRID: wrid(kindRecv, r.index, uint64(i)), SGList: r.s.exposed.SGL(off, head+size)}
	}
	return wrs
}

// consumed looks at a message, gathers its receive, and posts what is gathered when it is
// worth a call.
func (r *receives) consumed(wc *verbs.WC) error {
	s, ph := r.s, &r.s.phase
	n := wc.WRID & seqMask
	off, head, size := r.place(n)
	switch got := int(wc.ByteLen) - head; {
	case got == ph.size:
		s.received++
		if !ph.measured {
			// Measured messages are not looked at: reading them would be measured too.
			if err := s.look(s.exposed.Bytes()[off+head:][:got]); err != nil {
				return err
			}
		}
	case s.p.reliable():
		return fmt.Errorf("received a message of %d bytes, sent were %d", got, ph.size)
		// Else it may come so late that it has been given up.
	}
	i := len(r.spent)
	r.spent = r.spent[:i+1]
	wr := &r.spent[i]
	if wr.SGList == nil {
		wr.SGList = make([]verbs.SGE, 1) // once
	}
	wr.WRID = wrid(kindRecv, r.index, n)
	wr.SGList[0] = s.exposed.SGE(off, head+size)
	if len(r.spent) < cap(r.spent) {
		return nil
	}
	_, err := r.queue.PostRecvList(r.spent)
	r.spent = r.spent[:0]
	if err != nil {
		return fmt.Errorf("posting receives: %w", err)
	}
	return nil
}

// look checks a message that was received in a warm-up, at once if nothing else can be written
// there, else when nothing is under way any more, if that can be known.
func (s *Session) look(message []byte) error {
	switch {
	case s.p.exclusive():
		return verify(message)
	case s.p.reliable():
		s.phase.last = message
	}
	return nil
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
