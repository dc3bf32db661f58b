package ring

import (
	"fmt"
	"runtime"
	"testing"
)

// starts are where positions begin in the tests: at zero and just below the two wraps that
// a counter of the wrong width, or a comparison by size, would trip over.
var starts = []uint64{0, 1<<32 - 3, 1<<64 - 3}

// entry checks itself: every word follows from who made it and its number.
type entry struct {
	who, seq uint64
	words    [5]uint64
	sum      uint64
}

func makeEntry(who, seq uint64) (e entry) {
	e.who, e.seq, e.sum = who, seq, who^seq
	for i := range e.words {
		e.words[i] = (seq + uint64(i) + 1) * 0x9e3779b97f4a7c15
		e.sum ^= e.words[i]
	}
	return e
}

// check returns an error when the entry is not what makeEntry made.
func (e *entry) check() error {
	if want := makeEntry(e.who, e.seq); *e != want {
		return fmt.Errorf("torn entry %d of producer %d: got %x, want %x", e.seq, e.who, *e, want)
	}
	return nil
}

// rounds shortens a count for slow builds.
func rounds(t *testing.T, n int) int {
	t.Helper()
	if testing.Short() || raceEnabled {
		n /= 8
	}
	return n
}

// withProcs runs f with each number of processors.
func withProcs(t *testing.T, f func(t *testing.T)) {
	for _, n := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("procs=%d", n), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(n))
			f(t)
		})
	}
}
