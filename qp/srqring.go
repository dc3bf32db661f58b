package qp

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/ring"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// srqRing is where the receives of an SRQ lie. A queue has one, and for a while after each
// Resize the ones before it: they form a chain, which posters enter at its newest ring and
// takers at the oldest that still holds something.
//
//	                 next               next
//	[ sealed, w w ] ------> [ sealed, w ] ------> [ w w w . . . ]
//	  ^ takers                                      ^ posters
//
// Positions run on through the chain: a ring holds those from where the one before it was
// sealed to where it is sealed itself. So one count of what was taken serves them all.
type srqRing struct {
	// Set when the ring is made, then only read.

	slots ring.Slots
	wqes  []RecvWQE
	sges  []verbs.SGE
	depth uint64
	mask  uint64
	_     [128]byte

	// reserved ends the positions that posters ever took, twice their count; the lowest bit
	// says that there will be no more here. Both are in one word, so a post and the seal cannot
	// miss each other.
	reserved atomic.Uint64
	// next is set before the seal and not changed after it.
	next atomic.Pointer[srqRing]
	_    [128]byte
}

const srqSealed = 1

func newSRQRing(depth, maxSGE int) *srqRing {
	n := ring.RoundUp(depth)
	return &srqRing{
		slots: ring.NewSlots(n), wqes: make([]RecvWQE, n), sges: make([]verbs.SGE, n*maxSGE),
		depth: uint64(n), mask: uint64(n - 1),
	}
}

// end returns the position behind the last that was reserved, and whether that is final. Any
// goroutine.
func (r *srqRing) end() (pos uint64, sealed bool) {
	w := r.reserved.Load()
	return w >> 1, w&srqSealed != 0
}

// drained reports that the ring ends at or before pos and will not grow. Any goroutine.
func (r *srqRing) drained(pos uint64) bool {
	end, sealed := r.end()
	return sealed && end <= pos
}

// newest returns the ring that posts go to, and its end: exact at a moment during the call.
func (s *SRQ) newest() (r *srqRing, end uint64) {
	for r = s.tail.Load(); ; r = r.next.Load() {
		// Sealed: the resizer has not got round to moving the tail.
		if end, sealed := r.end(); !sealed {
			return r, end
		}
	}
}

// oldest returns the ring that holds the position to be taken next, or will hold it.
func (s *SRQ) oldest(taken uint64) *srqRing {
	r := s.head.Load()
	for r.drained(taken) {
		r = r.next.Load()
		// Two who are here at once may set it back to a ring that is drained: the next one
		// passes it again.
		s.head.Store(r)
	}
	return r
}

// srqRings bounds the chain: how often a queue may be resized before what it held at the first
// time was taken.
const srqRings = 8

// ErrResizes: a shared receive queue was resized too often before what it held was taken.
var ErrResizes = errors.New("qp: shared receive queue resized too often before what it held was taken")

// Resize gives the queue room for depth receives, rounded up to a power of two, while it is in
// use. What it holds stays, in its order, and keeps its old memory until it was taken. It fails,
// and then changes nothing, with an error that wraps verbs.ErrBadAttr when depth is out of
// range or less than the limit, verbs.ErrQueueFull when more receives are outstanding than would
// fit, and with ErrResizes when the queue was resized srqRings-1 times before what it held
// at the first was taken.
//
// Any goroutine, but only one at a time, and none that calls SetLimit meanwhile.
func (s *SRQ) Resize(depth int) error {
	c, err := resolveCap(verbs.QPCap{MaxRecvWR: depth, MaxRecvSGE: s.maxSGE})
	if err != nil {
		return err
	}
	room := ring.RoundUp(c.MaxRecvWR)
	if l := s.limit.Load(); depth == 0 || l > int64(room) {
		return fmt.Errorf("%w: a shared receive queue of %d with a limit of %d", verbs.ErrBadAttr, depth, l)
	}
	old := s.tail.Load() // only we ever seal it
	if uint64(room) == old.depth {
		return nil
	}
	n := 1
	for r := s.oldest(s.taken.Load()); r != old; r = r.next.Load() {
		n++
	}
	if n == srqRings {
		return ErrResizes
	}
	next := newSRQRing(room, s.maxSGE)
	for {
		w := old.reserved.Load()
		yield.Point()
		// taken may have passed what was reserved then: the swap fails.
		if held := int64(w>>1 - s.taken.Load()); held > int64(room) {
			old.next.Store(nil)
			return fmt.Errorf("%w: %d receives are outstanding, want room for %d", verbs.ErrQueueFull, held, room)
		}
		next.reserved.Store(w)
		old.next.Store(next)
		yield.Point()
		// When it succeeds nobody has reserved anything since w was read, so no more are
		// outstanding than were then.
		if old.reserved.CompareAndSwap(w, w|srqSealed) {
			break
		}
	}
	yield.Point()
	s.tail.Store(next)
	return nil
}
