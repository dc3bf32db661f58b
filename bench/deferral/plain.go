package deferral

import (
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/ring"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// plainQueue is a send queue without a gate, to see what one costs: many posters reserve
// slots by a counter, write, publish and ring. It checks and writes what qp.SendQueue checks
// and writes for a SEND of memory, and knows no states, no inline data and no lives.
type plainQueue struct {
	slots    ring.Slots
	depth    uint64
	_        [128]byte
	reserved atomic.Uint64
	_        [128]byte
	retired  atomic.Uint64
	_        [128]byte
	marked   atomic.Bool
	wqes     []qp.SendWQE
	sges     []verbs.SGE
}

func newPlainQueue(depth int) *plainQueue {
	return &plainQueue{
		slots: ring.NewSlots(depth), depth: uint64(depth), wqes: make([]qp.SendWQE, depth), sges: make([]verbs.SGE, depth),
	}
}

// post is qp.SendQueue.Post and wire.Wire.Ring without the gate.
func (q *plainQueue) post(wrs []verbs.SendWR) (n int, err error) {
	for i := range wrs {
		if err := q.check(&wrs[i]); err != nil {
			return 0, err
		}
	}
	pos, took, err := q.reserve(uint64(len(wrs)))
	if err != nil {
		return 0, err
	}
	for i := range took {
		q.write(pos+i, &wrs[i])
	}
	for i := took; i > 0; i-- {
		q.slots.Publish(pos + i - 1)
	}
	if !q.marked.Load() {
		q.marked.CompareAndSwap(false, true)
	}
	return int(took), nil
}

func (q *plainQueue) check(wr *verbs.SendWR) error {
	if wr.Opcode != verbs.Send {
		return verbs.ErrBadOpcode
	}
	if len(wr.SGList) != 1 {
		return verbs.ErrTooManySGE
	}
	if wr.SGList[0].Length > verbs.MaxMessage {
		return verbs.ErrTooLong
	}
	if wr.InlineData != nil || wr.Flags&verbs.Inline != 0 {
		return verbs.ErrBadWR
	}
	return nil
}

func (q *plainQueue) reserve(n uint64) (pos, took uint64, err error) {
	for {
		pos = q.reserved.Load()
		took = min(n, q.depth-(pos-q.retired.Load()))
		if took == 0 {
			return 0, 0, verbs.ErrQueueFull
		}
		if q.reserved.CompareAndSwap(pos, pos+took) {
			return pos, took, nil
		}
	}
}

func (q *plainQueue) write(pos uint64, wr *verbs.SendWR) {
	i := pos & (q.depth - 1)
	w := &q.wqes[i]
	w.WRID, w.RemoteAddr, w.CompareAdd, w.Swap = wr.WRID, wr.RemoteAddr, wr.CompareAdd, wr.Swap
	w.RKey, w.ImmData = wr.RKey, wr.ImmData
	w.AH, w.RemoteQPN, w.RemoteQKey = wr.AH, wr.RemoteQPN, wr.RemoteQKey
	w.Opcode, w.Flags, w.NumSGE = wr.Opcode, wr.Flags, uint8(len(wr.SGList))
	q.sges[i] = wr.SGList[0]
	w.Length = wr.SGList[0].Length
}

// posts fills the queue, one WQE a post, and empties it.
func (q *plainQueue) posts(wr *verbs.SendWR) (int, time.Duration) {
	wrs := [1]verbs.SendWR{*wr}
	q.marked.Store(true)
	start := time.Now()
	for range q.depth {
		if _, err := q.post(wrs[:]); err != nil {
			check(err)
		}
	}
	d := time.Since(start)
	q.retired.Store(q.reserved.Load())
	return int(q.depth), d
}
