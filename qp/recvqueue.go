package qp

import (
	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// RecvWQE is a work queue entry of a receive queue. It holds no pointers; its SGEs live in
// the queue's array at the same position.
type RecvWQE struct {
	WRID uint64
	// Length is the room of all SGEs together; it may exceed 32 bits.
	Length uint64
	NumSGE uint8
}

// RecvQueue is the receive queue: the same word, re-check and cut as the send queue, or a
// post that races with the move to ERR would never be flushed.
//
// Post and InUse may be called by any goroutine, everything else by the wire's owner only.
type RecvQueue struct {
	wqes   []RecvWQE
	sges   []verbs.SGE
	maxSGE int
	gate
}

// recvRefuse are the states in which posting a receive is an error.
var recvRefuse = states(verbs.QPReset)

// recvNoRing are the states in which a posted receive waits for a message.
var recvNoRing = ^states(verbs.QPErr)

func newRecvQueue(qpCap verbs.QPCap, start uint64) *RecvQueue {
	q := &RecvQueue{maxSGE: qpCap.MaxRecvSGE}
	q.init(qpCap.MaxRecvWR, start)
	q.wqes = make([]RecvWQE, q.depth)
	q.sges = make([]verbs.SGE, int(q.depth)*q.maxSGE)
	return q
}

// Post puts a chain of receive requests into the queue and returns how many were taken; see
// SendQueue.Post. ring is true when the queue pair is in ERR, so that the wire flushes what
// was just posted, or has begun another life meanwhile.
func (q *RecvQueue) Post(wrs []verbs.RecvWR) (n int, ring bool, err error) {
	valid := 0
	for valid < len(wrs) {
		if len(wrs[valid].SGList) > q.maxSGE {
			err = verbs.ErrTooManySGE
			break
		}
		valid++
	}
	if valid == 0 {
		if err != nil && recvRefuse.has(q.stateNow()) {
			err = verbs.ErrBadState
		}
		return 0, false, err
	}
	pos, took, full := q.reserve(uint64(valid), recvRefuse)
	if full != nil {
		return 0, false, full
	}
	for i := range took {
		q.write(pos+i, &wrs[i])
	}
	q.publish(pos, took)
	if int(took) < valid {
		err = verbs.ErrQueueFull
	}
	return int(took), q.mustRing(pos, recvNoRing), err
}

func (q *RecvQueue) write(pos uint64, wr *verbs.RecvWR) {
	i := pos & q.mask
	writeRecv(&q.wqes[i], q.sges[int(i)*q.maxSGE:], wr)
}

// writeRecv fills a slot and its SGEs.
func writeRecv(w *RecvWQE, sges []verbs.SGE, wr *verbs.RecvWR) {
	w.WRID, w.NumSGE = wr.WRID, uint8(len(wr.SGList))
	yield.Point()
	n := uint64(0)
	for j := range wr.SGList {
		sges[j] = wr.SGList[j]
		n += uint64(wr.SGList[j].Length)
	}
	w.Length = n
}

// InUse returns how many slots are taken. Any goroutine.
func (q *RecvQueue) InUse() int { return q.inUse() }

// Depth returns the number of slots.
func (q *RecvQueue) Depth() int { return int(q.depth) }

func (q *RecvQueue) move(to verbs.QPState) {
	reserved := q.setState(to)
	if to == verbs.QPReset {
		q.reset(reserved)
	}
}

// next says what to do with the oldest entry: FateSend stands for "use it for a message".
func (q *RecvQueue) next() (pos uint64, fate Fate) {
	if !q.readable() {
		return q.taken, FateWait
	}
	if q.taken < q.resetCut {
		return q.taken, FateForget
	}
	switch q.state {
	case verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPSQE:
		return q.taken, FateSend
	case verbs.QPErr:
		return q.taken, FateFlush
	}
	return q.taken, FateWait
}

func (q *RecvQueue) take() { q.taken++ }

func (q *RecvQueue) retire(n uint64) {
	q.free(n)
	if q.retired.Load() > q.taken {
		panic("BUG: qp: a receive slot retired that was never taken")
	}
}

func (q *RecvQueue) at(pos uint64) *RecvWQE { return &q.wqes[pos&q.mask] }

func (q *RecvQueue) sgList(pos uint64) []verbs.SGE {
	i := int(pos & q.mask)
	return q.sges[i*q.maxSGE:][:q.wqes[i].NumSGE]
}
