package park

import (
	"runtime"
	"sync/atomic"
)

// Seats are a number of places that only so many may hold at a time: thread sleepers of a
// device, spinners of a process. The zero value has none; make it with NewSeats. Any
// goroutine, on any thread; nothing blocks.
type Seats struct {
	taken, limit atomic.Int32
}

// NewSeats makes n free seats.
func NewSeats(n int) *Seats {
	s := new(Seats)
	s.limit.Store(int32(n))
	return s
}

// TryTake takes a seat if one is free.
func (s *Seats) TryTake() bool {
	for {
		n := s.taken.Load()
		if n >= s.limit.Load() {
			return false
		}
		if s.taken.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Leave gives a seat back that TryTake took.
func (s *Seats) Leave() {
	if s.taken.Add(-1) < 0 {
		panic("BUG: park: a seat left that nobody had taken")
	}
}

// Taken returns how many seats are taken.
func (s *Seats) Taken() int { return int(s.taken.Load()) }

// spinners is the one piece of package state: goroutines that spin, of all devices in the
// process, for they all spin on the same processors.
var spinners struct {
	Seats
	tries atomic.Uint32
}

// TrySpin asks for leave to spin for a while instead of sleeping; call EndSpin afterwards.
// It refuses when as many goroutines of this process spin already as there are processors to
// run them: one more would take the processor from whoever it waits for. (On two processors
// two may spin, the pollers of two devices that talk to each other; four on two processors
// make no progress at all.)
func TrySpin() bool {
	// GOMAXPROCS takes a lock in the runtime, so it is asked only now and then.
	if spinners.tries.Add(1)&255 == 1 {
		refreshSpinners()
	}
	return spinners.TryTake()
}

// EndSpin ends what a TrySpin that said yes began.
func EndSpin() { spinners.Leave() }

// refreshSpinners sets the limit: the processors Go uses, or those there are if fewer.
func refreshSpinners() {
	spinners.limit.Store(int32(min(runtime.NumCPU(), runtime.GOMAXPROCS(0))))
}

// Pause is the body of a spin loop: a few nanoseconds, and a point at which the runtime can
// stop the goroutine. A loop over atomic loads and raw system calls has none of its own, and
// with every processor in such a loop the garbage collector waits for ever.
//
// The runtime's check is in the prologue of a function that has a frame and is not a leaf,
// so neither function may be inlined.
//
//go:noinline
func Pause() { leaf() }

//go:noinline
func leaf() {}
