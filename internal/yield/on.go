//go:build doorbellyield

package yield

import (
	"math/rand/v2"
	"runtime"
)

// Enabled says whether the build has scheduling points.
const Enabled = true

// Point marks a window in which another goroutine may run: one time in four it yields the
// processor, one time in eight it spins for up to a microsecond or so.
//
// It draws from the runtime's per-thread generator and not from a seeded one of its own: a
// schedule of real threads is not repeatable by seed, and a shared generator would be a
// shared atomic, whose ordering hides exactly the races that the detector should find.
func Point() {
	switch r := rand.Uint32(); {
	case r&3 == 0:
		runtime.Gosched()
	case r&7 == 1:
		for range r >> 8 & 1023 {
			spin()
		}
	}
}

//go:noinline
func spin() {}
