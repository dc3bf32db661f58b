package park

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

func TestSeats(t *testing.T) {
	const limit = 3
	s := NewSeats(limit)
	var wg sync.WaitGroup
	var holders atomic.Int32
	for range 8 {
		wg.Go(func() {
			for range 2000 {
				if !s.TryTake() {
					runtime.Gosched()
					continue
				}
				if n := holders.Add(1); n > limit {
					t.Errorf("%d hold %d seats", n, limit)
				}
				runtime.Gosched()
				holders.Add(-1)
				s.Leave()
			}
		})
	}
	wg.Wait()
	if s.Taken() != 0 {
		t.Errorf("%d seats taken at the end", s.Taken())
	}
	for i := range limit + 1 {
		if got, want := s.TryTake(), i < limit; got != want {
			t.Errorf("seat %d: TryTake = %v, want %v", i, got, want)
		}
	}
	if new(Seats).TryTake() {
		t.Error("the zero value has a seat")
	}
}

// TestSpinners: as many may spin as can run, no more, whatever GOMAXPROCS is set to.
func TestSpinners(t *testing.T) {
	defer refreshSpinners()
	for _, procs := range []int{1, 2, runtime.NumCPU() + 2} {
		func() {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			refreshSpinners()
			want := min(procs, runtime.NumCPU())
			n := 0
			for TrySpin() {
				n++
			}
			if n != want {
				t.Errorf("GOMAXPROCS %d on %d processors: %d may spin, want %d", procs, runtime.NumCPU(), n, want)
			}
			for range n {
				EndSpin()
			}
			if !TrySpin() {
				t.Error("nobody may spin after all have ended")
			}
			EndSpin()
		}()
	}
}

// TestSpinnersFollow: a change of GOMAXPROCS is noticed by those who go on asking.
func TestSpinnersFollow(t *testing.T) {
	defer refreshSpinners()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for range 256 {
		if TrySpin() {
			EndSpin()
		}
	}
	if !TrySpin() {
		t.Fatal("nobody may spin")
	}
	defer EndSpin()
	if TrySpin() {
		t.Error("two may spin on one processor")
		EndSpin()
	}
}

const pauseEnv = "PARK_TEST_PAUSE"

// TestPauseIsSafepoint runs a spin loop on the only processor, with the runtime's signals
// switched off: only a safepoint in Pause lets the other goroutine in to end it.
func TestPauseIsSafepoint(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), pauseEnv+"=1", "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ended") {
		t.Errorf("a loop over Pause is not preempted: %v\n%s", err, out)
	}
}

// spinWithoutSignals is the child of TestPauseIsSafepoint.
func spinWithoutSignals() {
	var flag atomic.Bool
	go flag.Store(true)
	for n := uint64(0); !flag.Load(); n++ {
		if n == 5e9 { // a minute or so: the parent must not wait for ever
			fmt.Println("never preempted")
			os.Exit(1)
		}
		Pause()
	}
	fmt.Println("ended")
}
