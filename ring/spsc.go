package ring

import (
	"reflect"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// SPSC is a bounded ring with one producer and one consumer. Make it with NewSPSC.
type SPSC[T any] struct {
	// Set at construction, then read only.
	buf   []T
	mask  uint64
	scrub bool // T has pointers: zero what is taken
	_     pad
	// tail is the end of what is published. Written by the producer.
	tail atomic.Uint64
	_    pad
	// The producer's own: next is the end of what is reserved, headSeen the last head it saw.
	next     uint64
	headSeen uint64
	_        pad
	// head is the oldest entry not yet taken. Written by the consumer.
	head atomic.Uint64
	_    pad
	// tailSeen is the consumer's own: the last tail it saw.
	tailSeen uint64
	_        pad
}

// NewSPSC makes an empty ring for at least capacity entries: rounded up to a power of two,
// at least 1. It is the only call that allocates.
func NewSPSC[T any](capacity int) *SPSC[T] { return newSPSC[T](capacity, 0) }

// newSPSC begins at position start, for tests of the wrap.
func newSPSC[T any](capacity int, start uint64) *SPSC[T] {
	n := RoundUp(capacity)
	r := &SPSC[T]{
		buf: make([]T, n), mask: uint64(n - 1), scrub: hasPointers(reflect.TypeFor[T]()),
		next: start, headSeen: start, tailSeen: start,
	}
	r.tail.Store(start)
	r.head.Store(start)
	return r
}

// Reserve returns the next free slot for the caller to fill, or nil when the ring is full.
// The slot stays invisible to the consumer until Commit. It holds what an earlier lap left
// there, or zero if T has pointers: write all of it. Producer only.
func (r *SPSC[T]) Reserve() *T {
	if r.next-r.headSeen > r.mask {
		r.headSeen = r.head.Load()
		if r.next-r.headSeen > r.mask {
			return nil
		}
	}
	slot := &r.buf[r.next&r.mask]
	r.next++
	return slot
}

// Commit publishes every slot reserved so far with one store. Producer only.
func (r *SPSC[T]) Commit() {
	yield.Point()
	if r.next != r.tail.Load() {
		r.tail.Store(r.next)
	}
}

// Pending returns how many slots are reserved and not yet committed. Producer only.
func (r *SPSC[T]) Pending() int { return int(r.next - r.tail.Load()) }

// Push appends v and commits it, with any slots reserved before; false when the ring is
// full, and then nothing is committed. Producer only.
func (r *SPSC[T]) Push(v T) bool {
	slot := r.Reserve()
	if slot == nil {
		return false
	}
	*slot = v
	yield.Point()
	r.tail.Store(r.next)
	return true
}

// Free returns how many slots Reserve would give now; the consumer may add to them at any
// time. It reads the consumer's index: ask once a batch, not once an entry. Producer only.
func (r *SPSC[T]) Free() int {
	r.headSeen = r.head.Load()
	return len(r.buf) - int(r.next-r.headSeen)
}

// Peek returns the oldest entry in place, or nil when the ring is empty. It is valid until
// Advance. Consumer only.
func (r *SPSC[T]) Peek() *T { return r.PeekAt(0) }

// PeekAt returns the i-th oldest entry in place, i from 0, or nil when there are not that
// many. It is valid until Advance. Consumer only.
func (r *SPSC[T]) PeekAt(i int) *T {
	head := r.head.Load()
	if !r.has(head, uint64(i)+1) {
		return nil
	}
	return &r.buf[(head+uint64(i))&r.mask]
}

// has reports whether at least n entries from head are published.
func (r *SPSC[T]) has(head, n uint64) bool {
	if r.tailSeen-head < n {
		r.tailSeen = r.tail.Load()
		yield.Point()
		return r.tailSeen-head >= n
	}
	return true
}

// Advance drops the n oldest entries, which must have been published: those that Peek and
// PeekAt showed. Their slots go back to the producer. Consumer only.
func (r *SPSC[T]) Advance(n int) {
	head := r.head.Load()
	if n < 0 || !r.has(head, uint64(n)) {
		panic("BUG: ring: advanced past what was published")
	}
	if n == 0 {
		return
	}
	if r.scrub {
		for i := range uint64(n) {
			clear(r.buf[(head+i)&r.mask:][:1])
		}
	}
	yield.Point()
	r.head.Store(head + uint64(n))
}

// Pop takes the oldest entry; false when the ring is empty. Consumer only.
func (r *SPSC[T]) Pop() (v T, ok bool) {
	head := r.head.Load()
	if !r.has(head, 1) {
		return v, false
	}
	slot := &r.buf[head&r.mask]
	v = *slot
	if r.scrub {
		clear(r.buf[head&r.mask:][:1])
	}
	yield.Point()
	r.head.Store(head + 1)
	return v, true
}

// PopBatch takes up to len(dst) entries, oldest first, and returns how many. Their slots go
// back with one store. Consumer only.
func (r *SPSC[T]) PopBatch(dst []T) int {
	head := r.head.Load()
	if !r.has(head, uint64(len(dst))) && r.tailSeen == head {
		return 0
	}
	n := min(len(dst), int(r.tailSeen-head))
	if n == 0 {
		return 0
	}
	drain(dst[:n], r.buf, head&r.mask, r.scrub)
	yield.Point()
	r.head.Store(head + uint64(n))
	return n
}

// drain copies len(dst) entries of buf from index at, around its end, and zeroes them if scrub.
func drain[T any](dst, buf []T, at uint64, scrub bool) {
	first := buf[at:]
	if len(first) > len(dst) {
		first = first[:len(dst)]
	}
	copy(dst, first)
	rest := buf[:len(dst)-len(first)]
	copy(dst[len(first):], rest)
	if scrub {
		clear(first)
		clear(rest)
	}
}

// Len returns the number of published entries, between 0 and Cap. It is exact for the
// producer and the consumer until the other moves, an estimate for others. Any goroutine.
func (r *SPSC[T]) Len() int {
	head := r.head.Load() // before tail: see the package comment
	yield.Point()
	return int(min(r.tail.Load()-head, r.mask+1))
}

// Empty reports whether there was a moment during the call in which nothing was published;
// false means that there was one in which something was. Any goroutine.
func (r *SPSC[T]) Empty() bool {
	head := r.head.Load()
	yield.Point()
	return r.tail.Load() == head
}

// Cap returns the capacity. Any goroutine.
func (r *SPSC[T]) Cap() int { return len(r.buf) }
