package qp

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/ring"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// The queue word. One atomic word per queue holds the queue pair's state in its low bits
// and, above them, how many slots were ever reserved:
//
//	63                                   3 2     0
//	+-------------------------------------+-------+
//	| reserved: positions, never restart  | state |
//	+-------------------------------------+-------+
//
// Posters add to the count, the wire's owner swaps the state, both by compare-and-swap on
// the same word: so a post and a transition cannot miss each other, and every position
// lies clearly before or after each transition.
const (
	stateBits = 3
	stateMask = 1<<stateBits - 1
)

const _ = uint(stateMask + 1 - verbs.QPStates) // the states fit

// stateSet is a set of states, a bit each.
type stateSet uint8

func states(ss ...verbs.QPState) (set stateSet) {
	for _, s := range ss {
		set |= 1 << s
	}
	return set
}

func (set stateSet) has(s verbs.QPState) bool { return set>>s&1 != 0 }

// gate is the half of a work queue that posters and the wire share: the queue word, the
// count of retired slots and the slots' sequence numbers. The entries themselves live in
// arrays of the queue that embeds it, at its end: what is before the gate is only read, as the
// gate's own first fields are.
//
//	retired <= taken <= reserved <= retired + depth
//
// Slots below retired are free, those up to taken belong to the wire, those up to reserved
// to their posters until the slot's sequence is published, then to the queue.
//
// Positions count up from the queue's start and never come around: at 100 million posts a
// second their 61 bits last 700 years.
type gate struct {
	// Set when the queue is made, then only read.

	slots ring.Slots
	depth uint64
	mask  uint64
	_     [128]byte

	// ctl is the queue word, written by posters and by the wire's owner.
	ctl atomic.Uint64
	_   [120]byte

	// What follows is written by the wire's owner and read by posters.

	// retired tells them where there is room.
	retired atomic.Uint64
	// sealed ends the part of the queue whose fate was sealed by leaving a life: positions
	// below resetCut are forgotten, the others below sealed flushed, whatever the state is
	// when their slow poster publishes them at last. resetCut <= sealed.
	sealed atomic.Uint64
	_      [112]byte

	// What follows belongs to the owner of the wire.

	state    verbs.QPState // the same as in ctl
	taken    uint64        // next position to look at
	resetCut uint64
}

func (g *gate) init(depth int, start uint64) {
	n := ring.RoundUp(depth)
	g.slots = ring.NewSlots(n)
	g.depth, g.mask = uint64(n), uint64(n-1)
	g.ctl.Store(start << stateBits)
	g.retired.Store(start)
	g.sealed.Store(start)
	g.taken, g.resetCut = start, start
}

// reserve takes up to n slots in a row for the caller, unless the state is one of refuse.
// took is less than n when the queue has no more room; err is ErrQueueFull when it has none.
func (g *gate) reserve(n uint64, refuse stateSet) (pos, took uint64, err error) {
	for {
		c := g.ctl.Load()
		if refuse.has(verbs.QPState(c & stateMask)) {
			return 0, 0, verbs.ErrBadState
		}
		pos = c >> stateBits
		// retired may have passed pos since ctl was read; then the room is overstated and
		// the swap below fails, because retired never passes reserved.
		took = min(n, g.depth-(pos-g.retired.Load()))
		if took == 0 {
			return 0, 0, verbs.ErrQueueFull
		}
		yield.Point()
		if g.ctl.CompareAndSwap(c, c+took<<stateBits) {
			return pos, took, nil
		}
	}
}

// publish makes n slots from pos readable for the wire. The first goes last: the wire takes
// slots in order, so a chain becomes visible whole.
func (g *gate) publish(pos, n uint64) {
	for i := n; i > 0; i-- {
		yield.Point()
		g.slots.Publish(pos + i - 1)
	}
	yield.Point()
}

// mustRing says whether the poster of pos has to ring the doorbell; to be asked after publish,
// for the wire may have stopped at the slot while it was unpublished, and then nobody but
// its poster can ring. While the gate is closed there is no need to, except for the slot of
// an earlier life, which waits for nothing.
func (g *gate) mustRing(pos uint64, closed stateSet) bool {
	return !closed.has(g.stateNow()) || pos < g.sealed.Load()
}

// stateNow returns the state for anyone.
func (g *gate) stateNow() verbs.QPState { return verbs.QPState(g.ctl.Load() & stateMask) }

// setState moves the queue to a state in one atomic step and returns how many positions had
// been reserved by then: posts before the step lie below, posts after it at or above.
func (g *gate) setState(to verbs.QPState) (reserved uint64) {
	for {
		c := g.ctl.Load()
		yield.Point()
		if g.ctl.CompareAndSwap(c, c&^stateMask|uint64(to)) {
			g.state = to
			return c >> stateBits
		}
	}
}

// reset seals what was reserved before the move to RESET: to be forgotten. All that is
// published is forgotten here and now, what the wire has taken too; its slots are free when
// the move returns. What slow posters still hold follows as next finds it.
func (g *gate) reset(reserved uint64) {
	g.resetCut = reserved
	g.sealed.Store(reserved)
	for g.taken < reserved && g.readable() {
		g.taken++
	}
	g.free(g.taken - g.retired.Load())
}

// readable reports whether the slot at taken was published.
func (g *gate) readable() bool { return g.slots.Readable(g.taken) }

// free gives n slots back to the posters, oldest first.
func (g *gate) free(n uint64) { g.retired.Store(g.retired.Load() + n) }

// inUse returns how many slots are taken by anyone; any goroutine.
func (g *gate) inUse() int {
	r := g.retired.Load()
	return int(min(g.ctl.Load()>>stateBits-r, g.depth))
}
