package deferral

import (
	"fmt"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Strategy is how a server sends what it has to send before the RTU.
type Strategy uint8

// The strategies; see the package comment.
const (
	Deferred Strategy = iota
	SideQueue
	EarlyRTS
	Retry
	// NumStrategies is how many there are.
	NumStrategies
)

var strategyNames = [NumStrategies]struct{ letter, name string }{
	{"a", "deferred doorbell"}, {"b", "program-side queue"}, {"c", "RTS before REP"}, {"d", "refused, retried"},
}

// Letter returns a, b, c or d.
func (s Strategy) Letter() string {
	if s < NumStrategies {
		return strategyNames[s].letter
	}
	return fmt.Sprintf("strategy %d", uint8(s))
}

// Name returns the name.
func (s Strategy) Name() string {
	if s < NumStrategies {
		return strategyNames[s].name
	}
	return s.Letter()
}

// String returns the letter and the name.
func (s Strategy) String() string { return s.Letter() + " " + s.Name() }

// accept answers the connection's REQ, and greets at once if the cell has the server do so.
// It runs on the server's thread.
func (s *stage) accept(c *conn) {
	c.accepted = s.now()
	if s.strategy == Deferred {
		s.must(s.b.Wire.Accept(s.now(), c.bc, c.bq, s.param()))
	} else {
		p := s.param()
		p.Raw = true
		s.must(s.b.Wire.Negotiate(c.bc, p))
		s.move(c, verbs.QPRTR)
		if s.strategy == EarlyRTS {
			s.move(c, verbs.QPRTS)
		}
		s.must(s.b.Wire.AcceptRaw(s.now(), c.bc, c.bq, nil))
	}
	if !s.cell.Reply {
		s.speak(c)
	}
}

// speak is the server's wish to send all its messages now.
func (s *stage) speak(c *conn) {
	switch s.strategy {
	case SideQueue:
		if c.bq.State() == verbs.QPRTR {
			c.kept = true
			return
		}
	case Retry:
		if c.bq.State() == verbs.QPRTR {
			// As providers do that look at the state: EINVAL.
			s.tally.Refused++
			poll := s.cell.Poll
			s.at(s.now().Add(poll+s.uniform(poll/10)), func() { s.speak(c) })
			return
		}
	}
	s.post(c)
}

// established is what the server's program does with ESTABLISHED, on its thread.
func (s *stage) established(c *conn) {
	if s.strategy != SideQueue && s.strategy != Retry || c.bq.State() != verbs.QPRTR {
		return
	}
	s.move(c, verbs.QPRTS)
	if c.kept {
		c.kept = false
		s.post(c)
	}
}

// commEst is what it does with COMM_EST: rdma_notify, as careful programs do. The error is
// that of a connection which the RTU has established meanwhile; it is to be ignored.
func (s *stage) commEst(c *conn) { _ = s.b.Wire.Notify(s.now(), c.bc) }

// move is ibv_modify_qp with the attributes that the connection manager knows.
func (s *stage) move(c *conn, to verbs.QPState) {
	attr := c.bc.Attr(to)
	s.must(s.b.Wire.Modify(s.now(), c.bq, &attr))
	if to == verbs.QPRTS {
		c.rts = s.now()
	}
}

// post posts all messages of the server as one chain.
func (s *stage) post(c *conn) {
	if _, err := s.b.Send(c.bq, s.chain...); err != nil {
		s.must(err)
	}
}
