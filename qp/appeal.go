package qp

import (
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Appeal sends what has no acknowledgement again at once, because the peer has hung up and what
// it had done it will still acknowledge, but not for long. ok is false when nothing can be hoped
// for: nothing is under way, or what is oldest is a READ or an atomic, whose answer is gone with the
// peer's memory, or waits for a receive. Otherwise Heard tells when everything up to end was
// acknowledged, and after wait there is no more hope. Owner only.
func (q *QP) Appeal(now verbs.Instant) (end uint64, wait time.Duration, ok bool) {
	r := &q.req
	if q.typ != verbs.RC || q.state != verbs.QPRTS || r.una == r.max || r.rnrWait || isRead(q.sq.at(q.sq.retired.Load()).Opcode) {
		return 0, 0, false
	}
	q.goBack()
	r.wentBack = 0
	r.earlyAt = now.Add(q.win.rto(r.backoff))
	q.setDeadline()
	// The peer's queue pair may be gone only in a while, and repetitions are lost, too: there is
	// time for three or four.
	return r.max, min(appealRounds*q.win.rto(0), appealMost), true
}

const (
	appealRounds = 8
	appealMost   = 100 * time.Millisecond
)

// Heard reports whether the queue pair still waits for nothing before end, see Appeal: it is
// acknowledged, or the queue pair is no longer in RTS. Owner only.
func (q *QP) Heard(end uint64) bool { return q.state != verbs.QPRTS || q.req.una >= end }
