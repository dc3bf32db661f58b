package qp

import "github.com/doorbell-rdma/doorbell/verbs"

// serviceBudget bounds the queue entries that one Service call disposes of.
const serviceBudget = 64

// sendWCOpcodes say what a send WQE's completion is called.
var sendWCOpcodes = [...]verbs.WCOpcode{
	verbs.RDMAWrite: verbs.WCRDMAWrite, verbs.RDMAWriteWithImm: verbs.WCRDMAWrite,
	verbs.Send: verbs.WCSend, verbs.SendWithImm: verbs.WCSend, verbs.SendWithInv: verbs.WCSend,
	verbs.RDMARead: verbs.WCRDMARead, verbs.AtomicCmpAndSwp: verbs.WCCompSwap,
	verbs.AtomicFetchAdd: verbs.WCFetchAdd, verbs.LocalInv: verbs.WCLocalInv, verbs.BindMW: verbs.WCBindMW,
}

// complete adds the completion of the send WQE at pos; false when its CQ is full.
func (q *QP) complete(pos uint64, st verbs.WCStatus) bool {
	w := q.sq.at(pos)
	wc := verbs.WC{WRID: w.WRID, QPN: q.num, Status: st, Opcode: sendWCOpcodes[w.Opcode]}
	if isRead(w.Opcode) {
		wc.ByteLen = w.Length
	}
	return q.sendCQ.add(&wc, q.env)
}

// cqOverrun is what follows a completion without room: the CQ takes no more, and the queue
// pair fails (IBTA Vol 1, 11.6.3.2).
func (q *QP) cqOverrun(now verbs.Instant) {
	q.noteOverrun()
	q.selfErr(now, EvQPFatal)
}

// noteOverrun raises EvCQErr for each of the queue pair's lanes that has lost a completion,
// once in the lane's life.
func (q *QP) noteOverrun() {
	for _, c := range [...]*CQ{q.sendCQ, q.recvCQ} {
		if c.full && !c.reported {
			c.reported = true
			q.env.Counters.CQOverruns.Add(1)
			q.events |= EvCQErr
		}
	}
}

// failOldest completes the oldest started WQE with its own status, signaled or not, and
// moves the queue pair to where the others flush: to ERR, or to SQE if it is unreliable.
func (q *QP) failOldest(now verbs.Instant, st verbs.WCStatus) {
	if q.state == verbs.QPErr || q.drained() {
		return
	}
	pos := q.sq.retired.Load()
	ok := q.complete(pos, st)
	q.sq.retire(1)
	if q.req.cur == pos {
		q.req.cur++
	}
	if !ok {
		q.cqOverrun(now)
		return
	}
	q.sendFailed(now)
}

// failAt fails the WQE that holds sequence number a. Those before it are done, but for READs
// and atomics whose answers are missing: the responder is in ERR and will not repeat them,
// so they flush first, for completions keep their order.
func (q *QP) failAt(now verbs.Instant, a uint64, st verbs.WCStatus) {
	q.ackTo(now, a)
	if q.state == verbs.QPErr {
		return
	}
	for !q.drained() {
		pos := q.sq.retired.Load()
		if q.spanAt(pos).end() > a {
			q.failOldest(now, st)
			return
		}
		q.flushSend(pos)
		q.sq.retire(1)
	}
}

// selfErr moves the queue pair to ERR for a reason of its own. The deadline in the past makes
// the wire come back: for Service, which flushes.
func (q *QP) selfErr(now verbs.Instant, ev EventSet) {
	if q.state == verbs.QPErr {
		return
	}
	q.events |= ev | EvToErr
	q.enterErr(now)
}

// enterErr stops both halves. What they hold is flushed by Service; a NAK that says why is
// still sent.
func (q *QP) enterErr(now verbs.Instant) {
	if q.state == verbs.QPErr {
		return
	}
	q.unsend()
	q.req.idle()
	if !q.resp.fatal {
		q.resp.silence()
	}
	q.moveTo(verbs.QPErr)
	q.deadline = now
}

// Service disposes of queue entries that are to be flushed or forgotten, and does local
// operations. It is bounded; more says that it should be called again.
func (q *QP) Service(now verbs.Instant) (more bool) {
	budget := serviceBudget
	budget = q.serviceSends(now, budget)
	budget = q.serviceRecvs(now, budget)
	q.noteLastWQE(now)
	return budget <= 0
}

func (q *QP) serviceSends(now verbs.Instant, budget int) int {
	if q.state == verbs.QPErr {
		for budget > 0 && !q.drained() {
			q.flushSend(q.sq.retired.Load())
			q.sq.retire(1)
			budget--
		}
		q.req.cur = q.sq.taken
	}
	// Entries not started come after those that are, also when they leave.
	for budget > 0 && q.drained() {
		pos, fate := q.sq.next()
		switch {
		case fate == FateFlush:
			q.sq.take()
			q.flushSend(pos)
			q.sq.retire(1)
		case fate == FateForget:
			q.sq.take()
			q.sq.retire(1)
		case fate == FateSend && isLocal(q.sq.at(pos).Opcode):
			q.doLocal(now, pos)
			if q.state == verbs.QPErr {
				return budget - 1
			}
		default:
			return budget
		}
		q.req.cur = q.sq.taken
		budget--
	}
	return budget
}

// doLocal does the local operation at pos, which is the oldest entry: everything before it
// has completed (IBTA Vol 1, 10.8.3.3).
func (q *QP) doLocal(now verbs.Instant, pos uint64) {
	w := q.sq.at(pos)
	q.begin(0)
	st := verbs.WCSuccess
	ok := false
	if w.Opcode == verbs.BindMW {
		ok = q.bind(pos, w)
	} else {
		ok = q.env.Mem.Invalidate(q.pd, q.num, w.RKey)
	}
	if !ok {
		// IBTA Vol 1, 11.6.2: one status for all operations that manage memory.
		st = verbs.MWBindErr
	}
	if st != verbs.WCSuccess {
		q.failOldest(now, st)
		return
	}
	ok = w.Flags&verbs.Signaled == 0 || q.complete(pos, st)
	q.sq.retire(1)
	if !ok {
		q.cqOverrun(now)
	}
}

// bind does the BIND_MW at pos; false when it is refused.
func (q *QP) bind(pos uint64, w *SendWQE) bool {
	b := Bind{RKey: w.RKey, Access: w.BindAccess}
	if sges := q.sq.sgList(pos); len(sges) > 0 {
		b.LKey, b.Addr, b.Length = sges[0].LKey, sges[0].Addr, sges[0].Length
	}
	return q.env.Mem.Bind(q.pd, q.num, &b)
}

func (q *QP) serviceRecvs(now verbs.Instant, budget int) int {
	if q.state == verbs.QPErr && q.rq.retired.Load() != q.rq.taken {
		// The message that ERR cut short.
		q.flushRecv(q.rq.retired.Load())
		q.rq.retire(1)
		q.resp.mode = betweenMessages
		budget--
	}
	for budget > 0 {
		pos, fate := q.rq.next()
		if fate != FateFlush && fate != FateForget {
			return budget
		}
		q.rq.take()
		if fate == FateFlush {
			q.flushRecv(pos)
		}
		q.rq.retire(1)
		budget--
	}
	return budget
}

// flushSend and flushRecv complete an entry that never took place. When the CQ is full there
// is nothing more to be done about it.
func (q *QP) flushSend(pos uint64) {
	q.env.Counters.Flushed.Add(1)
	if !q.complete(pos, verbs.WRFlushErr) {
		q.noteOverrun()
	}
}

func (q *QP) flushRecv(pos uint64) {
	q.env.Counters.Flushed.Add(1)
	wc := verbs.WC{WRID: q.rq.at(pos).WRID, QPN: q.num, Status: verbs.WRFlushErr, Opcode: verbs.WCRecv}
	if !q.recvCQ.add(&wc, q.env) {
		q.noteOverrun()
	}
}
