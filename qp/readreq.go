package qp

import (
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// nextReadRequest sends a READ or atomic request.
//
// A long READ goes out as several requests of readChunk response packets each: the responses
// are not acknowledged, so asking for less at a time is the only way to keep a peer from
// flooding our socket, and it bounds how far the PSNs jump. On the wire each is a READ of
// its own, and counts against MaxQPRdAtomic.
func (q *QP) nextReadRequest(now verbs.Instant, out *Out, w *SendWQE, fresh bool) Next {
	r := &q.req
	if len(r.reads) == 0 {
		if q.attr.MaxQPRdAtomic == 0 {
			if fresh {
				q.begin(1)
			}
			q.failLocal(now, verbs.LocQPOpErr)
			return NextNothing
		}
		r.reads = make([]uint64, q.attr.MaxQPRdAtomic)
	}
	if r.readN >= uint32(len(r.reads)) {
		return NextNothing
	}
	first, n := r.nxt, uint32(1)
	if !fresh {
		s := q.spanAt(r.cur)
		first, n = s.first, s.n
	} else if w.Opcode == verbs.RDMARead {
		n = q.packets(w.Length)
	}
	i := uint32(r.nxt - first)
	// Requests end at multiples of the chunk, whatever was lost: one that is sent again for
	// a missing tail is a part of the one that the responder remembers.
	k := min(n-i, r.readChunk-i%r.readChunk)
	cost := q.win.cost(0)
	if !q.mayFly(cost) && q.mustWait(cost) {
		return q.blocked(cost)
	}
	if w.Opcode == verbs.RDMARead {
		if !q.mayRead(now, k) {
			return NextBlocked
		}
		q.win.chargeReads(k, q.mtu)
		r.inbound += k
	}
	if fresh {
		q.begin(n)
	}

	p := &out.Packet
	switch w.Opcode {
	case verbs.RDMARead:
		q.header(p, roce.RCReadRequest, psnOf(r.nxt))
		off := i << q.mtuShift
		p.RETH = roce.RETH{
			VA: w.RemoteAddr + uint64(off), RKey: w.RKey, DMALen: min(w.Length-off, k<<q.mtuShift),
		}
	case verbs.AtomicCmpAndSwp:
		q.header(p, roce.RCCmpSwap, psnOf(r.nxt))
		p.Atomic = roce.AtomicETH{VA: w.RemoteAddr, RKey: w.RKey, SwapAdd: w.Swap, Compare: w.CompareAdd}
	default:
		q.header(p, roce.RCFetchAdd, psnOf(r.nxt))
		p.Atomic = roce.AtomicETH{VA: w.RemoteAddr, RKey: w.RKey, SwapAdd: w.CompareAdd}
	}
	p.AckReq = true
	r.pushRead(r.nxt + uint64(k))
	q.sent(now, k, cost, true)
	if i+k == n {
		r.cur++
	}
	return NextPacket
}

// mayRead reports whether k more response packets may be asked for. A READ that has waited
// for longer than a retransmission takes goes out all the same: what fills our buffer's
// account may belong to a queue pair whose peer is gone.
func (q *QP) mayRead(now verbs.Instant, k uint32) bool {
	r := &q.req
	if q.win.readRoom(k, q.mtu) || r.readWait <= now {
		if r.readWait != verbs.Never {
			r.readWait = verbs.Never
			q.setDeadline()
		}
		return true
	}
	q.win.refuseReads(k, q.mtu)
	if r.readWait == verbs.Never {
		r.readWait = now.Add(q.win.rto(0))
		q.setDeadline()
	}
	return false
}

// waitedEnough is a readWait that has passed: it wants no timer any more.
const waitedEnough verbs.Instant = -1 << 63

// pushRead notes a READ or atomic request in flight, by its end.
func (r *requester) pushRead(end uint64) {
	i := r.readHead + r.readN
	if i >= uint32(len(r.reads)) {
		i -= uint32(len(r.reads))
	}
	r.reads[i] = end
	r.readN++
}

// popReads forgets those that are answered whole.
func (r *requester) popReads() {
	for r.readN > 0 && r.reads[r.readHead] <= r.una {
		r.readN--
		if r.readHead++; r.readHead == uint32(len(r.reads)) {
			r.readHead = 0
		}
	}
}
