package qp

import (
	"encoding/binary"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// handleResponse is the requester's view of what the peer's responder says.
func (q *QP) handleResponse(now verbs.Instant, p *roce.Packet) {
	r := &q.req
	a := extend(r.una, p.PSN)
	r.heard, q.win.heardAt = true, now
	switch {
	case p.Opcode == roce.RCAck:
		q.handleAck(now, a, p.AETH.Syndrome)
	case a < r.una, a >= r.max:
		// A duplicate, or a ghost: an answer to something never sent.
		q.env.Counters.DroppedOther.Add(1)
	default:
		q.handleData(now, a, p)
	}
}

// handleAck takes in an ACK or a NAK for sequence number a.
func (q *QP) handleAck(now verbs.Instant, a uint64, syndrome uint8) {
	r := &q.req
	c := &q.env.Counters
	// A sequence NAK carries the number that is expected next, which may be one that was
	// never sent; everything else speaks of a packet.
	end := r.max
	if syndrome == roce.NakPSNSeq {
		end++
	}
	if a < r.una || a >= end {
		c.DroppedOther.Add(1)
		return
	}
	switch {
	case roce.IsAck(syndrome):
		if !q.ackTo(now, a+1) {
			q.goBackOnce(now, false)
		}
	case roce.IsRNR(syndrome):
		c.RNRNaksReceived.Add(1)
		q.handleRNR(now, a, roce.RNRTimerOf(syndrome))
	case syndrome == roce.NakPSNSeq:
		c.NaksReceived.Add(1)
		q.goBackOnce(now, q.ackTo(now, a))
	case syndrome == roce.NakInvReq:
		c.NaksReceived.Add(1)
		q.failAt(now, a, verbs.RemInvReqErr)
	case syndrome == roce.NakRemAccess:
		c.NaksReceived.Add(1)
		q.failAt(now, a, verbs.RemAccessErr)
	case syndrome == roce.NakRemOp:
		c.NaksReceived.Add(1)
		q.failAt(now, a, verbs.RemOpErr)
	default:
		c.DroppedOther.Add(1) // a reserved syndrome, or one of RD
	}
}

// handleRNR takes in an RNR NAK: wait as long as it says, then send again from its PSN.
func (q *QP) handleRNR(now verbs.Instant, a uint64, t verbs.RNRTimer) {
	r := &q.req
	if r.rnrWait && a <= r.una {
		return // the same NAK again, while it is being obeyed: it costs no second retry
	}
	all := q.ackTo(now, a)
	if q.state == verbs.QPErr {
		return
	}
	if all {
		if q.attr.RNRRetry != 7 {
			if r.rnrLeft == 0 {
				q.failAt(now, a, verbs.RNRRetryExcErr)
				return
			}
			r.rnrLeft--
		}
		// The peer lives: what it owes us counts from the end of the wait.
		r.retries, r.backoff = 0, 0
	} // else an answer before it was lost, and the request is no further than that
	q.goBack()
	r.probe = false
	r.rnrWait, r.rnrUntil = true, now.Add(t.Duration())
	r.earlyAt, r.ackAt = verbs.Never, verbs.Never
	q.setDeadline()
}

// handleData takes in a READ response packet or an atomic's answer for sequence number a,
// una <= a < max. It acknowledges everything before it.
func (q *QP) handleData(now verbs.Instant, a uint64, p *roce.Packet) {
	r := &q.req
	if !q.ackTo(now, a) {
		// It jumps over an answer that we miss: an implied NAK (IBTA Vol 1, 9.7.5.1.1).
		q.env.Counters.OutOfOrder.Add(1)
		q.goBackOnce(now, false)
		return
	}
	if q.state == verbs.QPErr {
		return
	}
	pos := q.sq.retired.Load()
	if pos == q.sq.taken || r.una != a {
		q.env.Counters.DroppedOther.Add(1)
		return
	}
	w := q.sq.at(pos)
	var st verbs.WCStatus
	if p.Opcode == roce.RCAtomicAck {
		st = q.takeAtomicAck(pos, w, p)
	} else {
		st = q.takeReadResponse(pos, w, a, p)
	}
	if st != verbs.WCSuccess {
		q.failOldest(now, st)
		return
	}
	q.advance(now, a+1)
	q.retireAcked(now)
}

// takeReadResponse places one packet of a READ's data. Its place follows from its PSN; which
// of first, middle, last and only it calls itself depends on the request that it answers,
// the first one or one that was sent again, and is not looked at.
func (q *QP) takeReadResponse(pos uint64, w *SendWQE, a uint64, p *roce.Packet) verbs.WCStatus {
	if w.Opcode != verbs.RDMARead {
		return verbs.BadRespErr
	}
	off := uint32(a-q.spanAt(pos).first) << q.mtuShift
	if len(p.Payload) != int(min(w.Length-off, q.mtu)) {
		return verbs.BadRespErr
	}
	if st := q.scatter(q.sq.sgList(pos), uint64(off), p.Payload); st != verbs.WCSuccess {
		return st
	}
	if q.req.inbound > 0 {
		q.req.inbound--
		q.win.releaseReads(1, q.mtu)
	}
	return verbs.WCSuccess
}

// takeAtomicAck places the value that an atomic found: in host order, as memory holds it.
func (q *QP) takeAtomicAck(pos uint64, w *SendWQE, p *roce.Packet) verbs.WCStatus {
	if w.Opcode != verbs.AtomicCmpAndSwp && w.Opcode != verbs.AtomicFetchAdd {
		return verbs.BadRespErr
	}
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], p.AtomicAck)
	return q.scatter(q.sq.sgList(pos), 0, b[:])
}

// ackTo takes every request below end as done. It stops, and returns false, at a READ or
// atomic below end whose answer has not come: only that answer completes it, so an
// acknowledgement beyond it says that the answer was lost.
func (q *QP) ackTo(now verbs.Instant, end uint64) bool {
	r := &q.req
	if end <= r.una {
		return true
	}
	to, all := r.una, true
	for pos := q.sq.retired.Load(); pos != q.sq.taken && to < end; pos++ {
		s := q.spanAt(pos)
		if isRead(q.sq.at(pos).Opcode) {
			all = false
			break
		}
		to = min(end, s.end())
	}
	if to > r.una {
		q.advance(now, to)
		q.retireAcked(now)
	}
	return all
}

// advance moves una to a number that was acknowledged: progress.
func (q *QP) advance(now verbs.Instant, to uint64) {
	r := &q.req
	if r.probe {
		r.probe = false
		switch {
		case to > r.nxt:
			q.win.needless()
		case to < r.max:
			q.win.needful()
		}
	}
	if r.nxt-r.una > to-r.una {
		// Given back in proportion: O(1) memory, and the last one gives back the rest.
		n := r.charge * int64(to-r.una) / int64(r.nxt-r.una)
		r.charge -= n
		q.win.acked(n)
	} else {
		q.win.acked(r.charge)
		r.charge = 0
		r.nxt = to // beyond it after going back: the first try arrived after all
		r.asked = min(r.asked, to)
	}
	r.una = to
	r.popReads()
	if r.rttOn && to > r.rttSeq {
		r.rttOn = false
		q.win.sample(now, now.Sub(r.rttAt))
	}
	r.retries, r.backoff, r.rnrLeft = 0, 0, q.attr.RNRRetry
	q.rearm(now)
}

// retireAcked completes the WQEs that lie below una, in order.
func (q *QP) retireAcked(now verbs.Instant) {
	r := &q.req
	pos := q.sq.retired.Load()
	n, ok := uint64(0), true
	for ok && pos+n != q.sq.taken && q.spanAt(pos+n).end() <= r.una {
		w := q.sq.at(pos + n)
		if w.Length >= q.mtu && !isRead(w.Opcode) {
			r.fullAcked = true
		}
		if w.Flags&verbs.Signaled != 0 {
			ok = q.complete(pos+n, verbs.WCSuccess)
		}
		n++
	}
	if n == 0 {
		return
	}
	q.sq.retire(n)
	pos += n
	if r.cur < pos {
		r.cur = pos
	}
	if !ok {
		q.cqOverrun(now)
		return
	}
	if r.failed != verbs.WCSuccess {
		switch {
		case r.failedAt == pos:
			q.failOldest(now, r.failed)
			return
		case r.failedAt < pos:
			r.failed = verbs.WCSuccess // an earlier try of it had arrived
		}
	}
	q.checkDrained()
}
