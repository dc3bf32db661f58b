package ring

import (
	"reflect"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// MPSC is a bounded ring with any number of producers and one consumer. Make it with
// NewMPSC.
//
// It is lock-free, not wait-free: the consumer stops at a slot that was reserved and not
// yet published, until its producer goes on, even if later slots are ready. Whoever wakes
// the consumer must do so after Push has returned.
type MPSC[T any] struct {
	// Set at construction, then read only.
	buf   []T
	mask  uint64
	slots Slots
	scrub bool // T has pointers: zero what is taken
	_     pad
	// reserved is the end of what producers have taken for themselves; retiredSeen is
	// the last value of retired that one of them saw, or an older one. Written by producers.
	reserved    atomic.Uint64
	retiredSeen atomic.Uint64
	_           pad
	// retired is the oldest entry not yet taken. Written by the consumer.
	retired atomic.Uint64
	_       pad
}

// NewMPSC makes an empty ring for at least capacity entries: rounded up to a power of two,
// at least 1. It is the only call that allocates.
func NewMPSC[T any](capacity int) *MPSC[T] { return newMPSC[T](capacity, 0) }

// newMPSC begins at position start, for tests of the wrap.
func newMPSC[T any](capacity int, start uint64) *MPSC[T] {
	n := RoundUp(capacity)
	r := &MPSC[T]{
		buf: make([]T, n), mask: uint64(n - 1), slots: NewSlots(n),
		scrub: hasPointers(reflect.TypeFor[T]()),
	}
	r.reserved.Store(start)
	r.retiredSeen.Store(start)
	r.retired.Store(start)
	return r
}

// Push appends v; false when the ring is full. Any goroutine.
func (r *MPSC[T]) Push(v T) bool {
	pos, n := r.reserve(1)
	if n == 0 {
		return false
	}
	r.buf[pos&r.mask] = v
	yield.Point()
	r.slots.Publish(pos)
	return true
}

// PushBatch appends as many of vs as there is room for, from the first, in a row, and
// returns how many. The consumer sees none of them or all. Any goroutine.
func (r *MPSC[T]) PushBatch(vs []T) int {
	if len(vs) == 0 {
		return 0
	}
	pos, n := r.reserve(uint64(len(vs)))
	for i := range n {
		r.buf[(pos+i)&r.mask] = vs[i]
	}
	for i := n; i > 0; i-- {
		yield.Point()
		r.slots.Publish(pos + i - 1)
	}
	return int(n)
}

// reserve takes up to n ≥ 1 positions in a row for the caller; took is 0 when the ring is full.
func (r *MPSC[T]) reserve(n uint64) (pos, took uint64) {
	for {
		pos = r.reserved.Load()
		took = r.room(pos, r.retiredSeen.Load())
		if took < n {
			retired := r.retired.Load()
			r.retiredSeen.Store(retired)
			if took = r.room(pos, retired); took == 0 {
				return pos, 0
			}
		}
		took = min(took, n)
		yield.Point()
		if r.reserved.CompareAndSwap(pos, pos+took) {
			return pos, took
		}
	}
}

// room returns how many slots are free for a producer that saw these two indexes, which
// were read at different moments. If retired is old, more may seem in use than there are
// slots: no room. If it was read so late that it has passed pos, the answer is more than
// there are, and the producer's compare-and-swap fails, for reserved has moved on too.
func (r *MPSC[T]) room(pos, retired uint64) uint64 {
	return uint64(max(int64(r.mask+1)-int64(pos-retired), 0))
}

// Peek returns the oldest entry in place, or nil when none is published. It is valid until
// Advance. Consumer only.
func (r *MPSC[T]) Peek() *T { return r.PeekAt(0) }

// PeekAt returns the i-th oldest entry in place, i from 0, or nil when it is not published;
// ask for i-1 first. It is valid until Advance. Consumer only.
func (r *MPSC[T]) PeekAt(i int) *T {
	pos := r.retired.Load() + uint64(i)
	if uint64(i) > r.mask || !r.slots.Readable(pos) {
		return nil
	}
	yield.Point()
	return &r.buf[pos&r.mask]
}

// Advance drops the n oldest entries, which must have been published: those that Peek and
// PeekAt showed. Their slots go back to the producers. Consumer only.
func (r *MPSC[T]) Advance(n int) {
	retired := r.retired.Load()
	if n < 0 || uint64(n) > r.mask+1 {
		panic("BUG: ring: advanced past what was published")
	}
	for i := range uint64(n) {
		if !r.slots.Readable(retired + i) {
			panic("BUG: ring: advanced past what was published")
		}
		if r.scrub {
			clear(r.buf[(retired+i)&r.mask:][:1])
		}
	}
	yield.Point()
	r.retired.Store(retired + uint64(n))
}

// Pop takes the oldest entry; false when none is published. Consumer only.
func (r *MPSC[T]) Pop() (v T, ok bool) {
	retired := r.retired.Load()
	if !r.slots.Readable(retired) {
		return v, false
	}
	yield.Point()
	v = r.buf[retired&r.mask]
	if r.scrub {
		clear(r.buf[retired&r.mask:][:1])
	}
	r.retired.Store(retired + 1)
	return v, true
}

// PopBatch takes up to len(dst) entries, oldest first, and returns how many. Their slots go
// back with one store. Consumer only.
func (r *MPSC[T]) PopBatch(dst []T) int {
	retired := r.retired.Load()
	n := 0
	for n < len(dst) && uint64(n) <= r.mask && r.slots.Readable(retired+uint64(n)) {
		n++
	}
	if n == 0 {
		return 0
	}
	yield.Point()
	drain(dst[:n], r.buf, retired&r.mask, r.scrub)
	r.retired.Store(retired + uint64(n))
	return n
}

// Len returns the number of slots in use, between 0 and Cap: published entries and those
// that producers are still writing. Exact for the consumer until a producer moves, an
// estimate for others. Any goroutine.
func (r *MPSC[T]) Len() int {
	retired := r.retired.Load() // before reserved: see the package comment
	yield.Point()
	return int(min(r.reserved.Load()-retired, r.mask+1))
}

// Empty reports whether there was a moment during the call in which the consumer could
// have taken nothing; false means that there was one in which it could. Any goroutine.
func (r *MPSC[T]) Empty() bool {
	retired := r.retired.Load()
	yield.Point()
	// A slot that is not readable says nothing if its position was retired meanwhile, but
	// then it was readable before.
	return !r.slots.Readable(retired) && r.retired.Load() == retired
}

// Cap returns the capacity. Any goroutine.
func (r *MPSC[T]) Cap() int { return len(r.buf) }
