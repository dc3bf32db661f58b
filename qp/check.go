package qp

import (
	"fmt"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// mustHold panics when an invariant is broken.
func (q *QP) mustHold() {
	if err := q.check(); err != nil {
		panic("BUG: qp: " + err.Error())
	}
}

// check returns the first broken invariant. It costs a walk over the started WQEs: tests
// call it after every step, production code never.
func (q *QP) check() error {
	if q.state != q.sq.state || q.state != q.rq.state || q.state != q.State() {
		return fmt.Errorf("states differ: %v, send queue %v, receive queue %v", q.state, q.sq.state, q.rq.state)
	}
	if err := q.req.check(q); err != nil {
		return fmt.Errorf("requester: %w", err)
	}
	if err := q.resp.check(q); err != nil {
		return fmt.Errorf("responder: %w", err)
	}
	if q.win.used < 0 || q.win.inbound < 0 || q.req.charge > q.win.used {
		return fmt.Errorf("window: used %d, inbound %d, ours %d", q.win.used, q.win.inbound, q.req.charge)
	}
	return nil
}

func (r *requester) check(q *QP) error {
	retired, taken := q.sq.retired.Load(), q.sq.taken
	if r.cur < retired || r.cur > taken {
		return fmt.Errorf("position %d is not in %d..%d", r.cur, retired, taken)
	}
	active := answersIn.has(q.state)
	if !active {
		if r.charge != 0 || r.inbound != 0 || r.readN != 0 {
			return fmt.Errorf("in %v with %d bytes, %d responses and %d reads in flight", q.state, r.charge, r.inbound, r.readN)
		}
		return nil
	}
	if r.una > r.nxt || r.nxt > r.max {
		return fmt.Errorf("una %x, nxt %x, max %x", r.una, r.nxt, r.max)
	}
	if (r.charge != 0) != (r.una != r.nxt) {
		return fmt.Errorf("%d bytes charged for [%x,%x)", r.charge, r.una, r.nxt)
	}
	if r.inbound > uint32(r.nxt-r.una) || r.readN > uint32(len(r.reads)) {
		return fmt.Errorf("%d responses and %d reads outstanding in [%x,%x)", r.inbound, r.readN, r.una, r.nxt)
	}
	at := r.una
	for pos := retired; pos != taken; pos++ {
		s := q.spanAt(pos)
		if pos == retired {
			if r.una < s.first || r.una >= s.end() {
				return fmt.Errorf("una %x is not in the oldest WQE's [%x,%x)", r.una, s.first, s.end())
			}
		} else if s.first != at {
			return fmt.Errorf("a gap between WQEs: %x, then %x", at, s.first)
		}
		if pos == r.cur && (r.nxt < s.first || r.nxt >= s.end()) {
			return fmt.Errorf("nxt %x is not in its WQE's [%x,%x)", r.nxt, s.first, s.end())
		}
		at = s.end()
	}
	if retired == taken && r.una != r.max {
		return fmt.Errorf("nothing started, but una %x and max %x", r.una, r.max)
	}
	if r.cur == taken && r.nxt != at {
		return fmt.Errorf("everything started is sent, but nxt is %x, not %x", r.nxt, at)
	}
	return r.checkTimers(q)
}

func (r *requester) checkTimers(q *QP) error {
	running := r.una != r.max && !r.rnrWait
	if (r.earlyAt != verbs.Never) != running {
		return fmt.Errorf("early timer %d with una %x, max %x, RNR wait %v", r.earlyAt, r.una, r.max, r.rnrWait)
	}
	if (r.ackAt != verbs.Never) != (running && q.attr.Timeout != 0) {
		return fmt.Errorf("ack timer %d with una %x, max %x, RNR wait %v", r.ackAt, r.una, r.max, r.rnrWait)
	}
	want := min(r.earlyAt, r.ackAt)
	if r.rnrWait {
		want = r.rnrUntil
	}
	if r.readWait > waitedEnough {
		want = min(want, r.readWait)
	}
	// What sendFailed wants the wire to come back for may outlive SQE.
	if q.deadline > want || q.deadline < want && q.typ == verbs.RC {
		return fmt.Errorf("deadline %d, timers say %d", q.deadline, want)
	}
	return nil
}

func (s *responder) check(q *QP) error {
	held := q.rq.taken - q.rq.retired.Load()
	if want := s.mode == inSend && q.typ == verbs.RC; held > 1 || q.state != verbs.QPErr && (held == 1) != want {
		return fmt.Errorf("%d receives held in mode %d", held, s.mode)
	}
	due := uint32(0)
	for i := range s.res {
		if s.res[i].due {
			due++
		}
	}
	if due != s.resDue || s.resN > uint32(len(s.res)) {
		return fmt.Errorf("%d answers due, counted %d; %d of %d remembered", due, s.resDue, s.resN, len(s.res))
	}
	if s.fatal && q.state != verbs.QPErr {
		return fmt.Errorf("a fatal NAK is due in %v", q.state)
	}
	if q.state == verbs.QPErr && !s.fatal && s.owes() {
		return fmt.Errorf("answers are due in ERR")
	}
	return nil
}
