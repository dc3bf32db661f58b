package wire

import "github.com/doorbell-rdma/doorbell/verbs"

// appeal is the short while between a peer's DREQ and the flush of a reliable queue pair that has
// requests without an acknowledgement. Who reads the last message and closes at once sends its
// acknowledgement before the DREQ, but that may be lost; then the peer's remains still have it,
// and a program learns that its message arrived, and not that it was flushed. The standard would flush
// at once (IBTA Vol 1, 12.9.7.1); a peer that answers nothing costs a few round trips.
//
// The DREP does not wait, nor does the program's own end of the connection; EventDisconnected
// does, so that what was acknowledged is complete by then.
type appeal struct {
	until   verbs.Instant // 0: there is none
	end     uint64        // see qp.QP.Appeal
	private []byte        // of the DREQ
}

// appeals begins one for a connection that its peer has ended; false when there is nothing to ask.
func (w *Wire) appeals(now verbs.Instant, c *Conn, private []byte) bool {
	q := c.qp
	if q == nil || c.params.Raw {
		return false
	}
	end, wait, ok := q.q.Appeal(now)
	if !ok {
		return false
	}
	c.state = connDown
	q.appeal = appeal{until: now.Add(wait), end: end, private: private}
	w.timers.update(q, q.appeal.until)
	w.after(q)
	return true
}

// hear ends an appeal that was heard, or that nobody needs any more, with the next step: what
// this one has completed is visible by then.
func (w *Wire) hear(now verbs.Instant, q *QP) {
	if q.appeal.until > now && q.q.Heard(q.appeal.end) {
		q.appeal.until = now
		w.timers.update(q, now)
	}
}

// endAppeal does what the DREQ would have done at once.
func (w *Wire) endAppeal(now verbs.Instant, q *QP) {
	private := q.appeal.private
	q.appeal = appeal{}
	if c := q.conn; c != nil {
		w.down(now, c, verbs.EventDisconnected, private)
	}
}

// deadline is when a queue pair must be looked at.
func (q *QP) deadline() verbs.Instant {
	d := q.q.Deadline()
	if q.appeal.until != 0 {
		d = min(d, q.appeal.until)
	}
	return d
}
