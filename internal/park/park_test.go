package park

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// lossRounds is the number of rounds of the tests for lost wake-ups.
var lossRounds = flag.Int("rounds", 1000, "rounds of each test for lost wake-ups")

// hung is how long a sleeper waits in tests before it says that its wake-up was lost. It is
// no measure of speed: nothing that works comes near it.
const hung = 20 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(pauseEnv) != "" {
		spinWithoutSignals()
		return
	}
	goleak.VerifyTestMain(m)
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

// oneWakeRounds looks for a lost wake-up (F01): each round makes one condition true, wakes
// once, and nothing comes after it. await sleeps by its protocol until ready is true and
// returns false when it slept for hung; it is called from one goroutine, wake from another.
// prepare, if any, runs on the sleeper's goroutine first.
func oneWakeRounds(t *testing.T, prepare func(), await func(ready func() bool) bool, wake func()) {
	t.Helper()
	rounds := *lossRounds
	if testing.Short() {
		rounds /= 10
	}
	if runtime.GOMAXPROCS(0) == 1 {
		// A thread that sleeps in a system call keeps the only processor until the
		// runtime's monitor takes it away: slow, not wrong.
		rounds /= 4
	}
	var made, seen atomic.Int64 // the round made true, the round seen
	done := make(chan struct{})
	go func() {
		defer close(done)
		if prepare != nil {
			prepare()
		}
		for i := int64(1); i <= int64(rounds); i++ {
			if !await(func() bool { return made.Load() >= i }) {
				t.Errorf("round %d: made true and woken, still asleep", i)
				seen.Store(-1)
				return
			}
			seen.Store(i)
		}
	}()
	for i := int64(1); i <= int64(rounds) && seen.Load() >= 0; i++ {
		// Sometimes at once, sometimes when the sleeper is about to sleep or asleep.
		switch rand.N(4) {
		case 0:
			for range rand.N(2000) {
				Pause()
			}
		case 1:
			runtime.Gosched()
		}
		made.Store(i)
		wake()
		for s := seen.Load(); s < i && s >= 0; s = seen.Load() {
			runtime.Gosched()
		}
	}
	<-done
}
