package qp

import (
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Two timers watch over what is in flight. The ack timer is the queue pair's attribute: it
// runs from the last progress, each expiry uses up one of RetryCnt, and after the last one
// the queue pair fails: so it fails only after (RetryCnt+1) timeouts without progress. The
// early timer follows the measured round trip, backs off, and only sends again: a stalled
// scheduler at the peer costs packets, not the connection.

// ackFloor keeps very short ack timeouts from firing at every hiccup: the standard lets the
// real timer take up to four times its nominal value (IBTA Vol 1, 9.7.6.1.3).
const ackFloor = 4 * time.Millisecond

// ackTimeout is the time behind the Timeout attribute; 0 for never.
func (q *QP) ackTimeout() time.Duration {
	d := q.attr.Timeout.Duration()
	if d < ackFloor {
		d = min(4*d, ackFloor)
	}
	return d
}

// armAck starts the timers when a packet leaves, if they do not run, and starts the early
// one anew when the packet asks for an answer.
func (q *QP) armAck(now verbs.Instant, ask bool) {
	r := &q.req
	early := r.earlyAt == verbs.Never || ask
	if early {
		r.earlyAt = now.Add(q.win.rto(r.backoff))
	}
	if r.ackAt == verbs.Never {
		if d := q.ackTimeout(); d != 0 {
			r.ackAt = now.Add(d)
			early = true
		}
	}
	if early {
		q.setDeadline()
	}
}

// rearm starts the timers anew after progress, or stops them when nothing is outstanding.
func (q *QP) rearm(now verbs.Instant) {
	r := &q.req
	r.earlyAt, r.ackAt = verbs.Never, verbs.Never
	if r.una != r.max && !r.rnrWait {
		r.earlyAt = now.Add(q.win.rto(r.backoff))
		if d := q.ackTimeout(); d != 0 {
			r.ackAt = now.Add(d)
		}
	}
	q.setDeadline()
}

// setDeadline follows a change of a timer.
func (q *QP) setDeadline() {
	r := &q.req
	q.deadline = min(r.earlyAt, r.ackAt)
	if r.rnrWait {
		q.deadline = r.rnrUntil
	}
	if r.readWait > waitedEnough {
		q.deadline = min(q.deadline, r.readWait)
	}
}

// HandleTimeout is called when now has reached Deadline.
func (q *QP) HandleTimeout(now verbs.Instant) {
	r := &q.req
	if !answersIn.has(q.state) {
		q.deadline = verbs.Never
		return
	}
	if r.readWait <= now && r.readWait > waitedEnough {
		r.readWait = waitedEnough
	}
	switch {
	case r.rnrWait:
		if now >= r.rnrUntil {
			r.rnrWait = false
			q.rearm(now)
			return
		}
	case now >= r.ackAt:
		q.ackTimedOut(now)
		return
	case now >= r.earlyAt && !q.win.overdue(now, r.askedAt, q.num):
		r.earlyAt = now.Add(q.win.rto(r.backoff))
	case now >= r.earlyAt:
		q.env.Counters.EarlyRetransmits.Add(1)
		q.resend(now)
	}
	q.setDeadline()
}

func (q *QP) ackTimedOut(now verbs.Instant) {
	r := &q.req
	q.env.Counters.Timeouts.Add(1)
	if r.retries >= q.attr.RetryCnt {
		q.failOldest(now, verbs.RetryExcErr)
		return
	}
	r.retries++
	r.ackAt = now.Add(q.ackTimeout())
	q.resend(now)
	q.setDeadline()
}

// resend goes back to the oldest unanswered packet because nothing was heard of it. Only that
// packet goes until the peer answers: when it was only late, its answer is to all that it has.
func (q *QP) resend(now verbs.Instant) {
	r := &q.req
	q.suspectMTU()
	q.win.lost(now, true)
	q.goBack()
	r.wentBack, r.probe = 0, true
	if r.backoff < maxBackoff {
		r.backoff++
	}
	r.earlyAt = now.Add(q.win.rto(r.backoff))
}

// suspectMTU raises EvPathMTU, once a life, when a packet of full size got no answer three
// times from a peer that is alive and that never acknowledged one of full size.
func (q *QP) suspectMTU() {
	r := &q.req
	if r.backoff < 2 || !r.heard || r.fullAcked || r.pathMTURaised {
		return
	}
	pos := q.sq.retired.Load()
	w := q.sq.at(pos)
	if isRead(w.Opcode) || w.Length < q.mtu || r.una != q.spanAt(pos).first {
		return
	}
	r.pathMTURaised = true
	q.events |= EvPathMTU
}

// goBackOnce goes back because the peer said, or implied, that the packet at una is missing.
// It does so once for each una: what was under way meanwhile makes the peer, or its answers,
// say it again, and each repetition would multiply the traffic. If the packet is lost a
// second time the early timer finds out.
//
// sentLost says that what was lost is a packet of ours and not an answer.
func (q *QP) goBackOnce(now verbs.Instant, sentLost bool) {
	r := &q.req
	// In an RNR wait nothing is in flight, so this cannot cut it short.
	if q.state == verbs.QPErr || r.wentBack == r.una+1 || r.nxt == r.una {
		return
	}
	r.wentBack, r.probe = r.una+1, false
	if sentLost {
		q.win.lost(now, false)
	}
	q.goBack()
	r.earlyAt = now.Add(q.win.rto(r.backoff))
	q.setDeadline()
}

// goBack makes una the next packet to send, and takes back what was charged for the packets
// from there on.
func (q *QP) goBack() {
	r := &q.req
	q.unsend()
	r.nxt, r.asked = r.una, r.una
	r.cur = q.sq.retired.Load()
	r.unasked, r.unaskedCost = 0, 0
	r.rttOn = false // Karn: an answer could be to either try
}

// unsend gives back what is charged to the window, in both directions.
func (q *QP) unsend() {
	r := &q.req
	q.win.release(r.charge)
	q.win.releaseReads(r.inbound, q.mtu)
	r.charge, r.inbound = 0, 0
	r.readN, r.readHead = 0, 0
}
