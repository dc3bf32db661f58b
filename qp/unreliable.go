package qp

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// What UC and UD have in common. Nothing is acknowledged, so nothing is ever in flight: the
// requester's una, nxt and max are one number, no timer runs, and no window is charged. A
// send is complete, and its slot free, once the wire says of its last packet that it was Sent;
// therefore each packet is Unstable, for the program may have its memory back before the link
// has taken it.

// AddressHandles is how a queue pair asks its wire about address handles. Only the wire's
// owner calls it.
type AddressHandles interface {
	// AddressHandle returns the largest message in bytes that the handle's path carries;
	// false when there is no such handle in this protection domain.
	AddressHandle(pd PD, ah verbs.AH) (mtu uint32, ok bool)
}

// nextUnreliable cuts the next packet of a UC or UD queue pair.
func (q *QP) nextUnreliable(now verbs.Instant, out *Out) Next {
	r := &q.req
	// Local operations are done on the way: everything before them is complete. Those beyond
	// a whole queue of them were posted meanwhile, and their posters ring.
	for range q.sq.Depth() {
		fresh := r.cur == q.sq.taken
		if fresh {
			if _, fate := q.sq.next(); fate != FateSend {
				return NextNothing
			}
		}
		w := q.sq.at(r.cur)
		switch {
		case isLocal(w.Opcode):
			q.doLocal(now, r.cur)
			r.cur = q.sq.taken
		case q.typ == verbs.UD:
			return q.nextDatagram(now, out, w, fresh)
		default:
			return q.nextUC(now, out, w, fresh)
		}
	}
	return NextNothing
}

// departed moves past the packet at nxt; the last one completes its message.
func (q *QP) departed(now verbs.Instant) {
	r := &q.req
	r.nxt++
	r.una, r.max, r.asked = r.nxt, r.nxt, r.nxt
	if r.nxt != q.spanAt(r.cur).end() {
		return
	}
	w := q.sq.at(r.cur)
	ok := w.Flags&verbs.Signaled == 0 || q.complete(r.cur, verbs.WCSuccess)
	r.cur++
	q.sq.retire(1)
	if !ok {
		q.cqOverrun(now)
		return
	}
	q.checkDrained()
}

// failUnreliable completes the WQE at cur with a status of its own, of which packets may have
// left already. fresh says that none has.
func (q *QP) failUnreliable(now verbs.Instant, st verbs.WCStatus, fresh bool) Next {
	if fresh {
		q.begin(1)
	}
	q.failOldest(now, st)
	return NextNothing
}

// sendFailed is what follows a send that failed: a reliable queue pair is of no more use; of
// an unreliable one only the send queue is, until the program moves it back to RTS (IBTA
// Vol 1, 10.3.1.6). The deadline in the past makes the wire come back: for Service, which
// flushes.
func (q *QP) sendFailed(now verbs.Instant) {
	if q.typ == verbs.RC {
		q.selfErr(now, 0)
		return
	}
	q.moveTo(verbs.QPSQE)
	q.deadline = now
}

// received completes the oldest receive with success: it is taken only now that its message
// is whole, so that a message that does not get that far leaves it to the next one.
func (q *QP) received(now verbs.Instant, wc *verbs.WC) {
	pos := q.rq.taken
	q.rq.take()
	wc.WRID, wc.QPN = q.rq.at(pos).WRID, q.num
	ok := q.recvCQ.add(wc, q.env)
	q.rq.retire(1)
	if !ok {
		q.cqOverrun(now)
	}
}

// spoiled completes the oldest receive with an error of its own, memory that cannot be
// written, and ends the queue pair: the program's mistake, not the peer's.
func (q *QP) spoiled(now verbs.Instant, st verbs.WCStatus) {
	pos := q.rq.taken
	q.rq.take()
	q.failRecv(pos, st)
	q.selfErr(now, 0)
}

// abandon drops the packet at hand and the message it belongs to, and counts why. The receive
// that the message was placed in, if any, was never taken.
func (q *QP) abandon(why *atomic.Uint64) {
	why.Add(1)
	q.resp.mode = betweenMessages
}

// markWC copies to a completion what the last packet of a message says beside its data.
func markWC(wc *verbs.WC, p *roce.Packet) {
	if p.Opcode.HasImm() {
		wc.ImmData = p.Imm
		wc.Flags |= verbs.WithImm
	}
	if p.Solicited {
		wc.Flags |= verbs.WithSolicited
	}
}
