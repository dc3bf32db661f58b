package role

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

func TestWord(t *testing.T) {
	var w Word
	if !w.TryTake() || !w.Owned() || w.Drives() != 1 {
		t.Fatal("a free role was not taken")
	}
	if w.TryTakeQuiet() || w.TryBorrow() || w.Pending() {
		t.Fatal("a quiet taker got the role or left a note")
	}
	if w.TryTake() || !w.Pending() {
		t.Fatal("a taker left no note")
	}
	if w.Leave() || !w.Owned() || w.Pending() {
		t.Fatal("left in spite of a note, or the note was not taken")
	}
	if !w.Note() || w.Leave() || !w.Leave() || w.Owned() {
		t.Fatal("Note, Leave, Leave")
	}
	if w.Note() || w.Pending() {
		t.Fatal("a note in a free role")
	}
	if !w.TryBorrow() || w.Drives() != 1 || w.TryInsist() || !w.Pending() {
		t.Fatal("TryBorrow, TryInsist")
	}
	w.Drop()
	if w.Owned() || w.Pending() || !w.TryTakeQuiet() || w.Drives() != 2 {
		t.Fatal("Drop")
	}
	w.Drop()
	for name, f := range map[string]func(){"Leave": func() { w.Leave() }, "Drop": w.Drop} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s of a free role did not panic", name)
				}
			}()
			f()
		}()
	}
}

// Without a thread, and bed as the thread would have left it: who wakes, and how often.
func TestWhoWakes(t *testing.T) {
	for _, c := range []struct {
		name string
		bed  int64
		next verbs.Instant
		do   func(r *rig)
		want uint64
		left int64 // bed afterwards
	}{
		{"ring, asleep", int64(verbs.Never), verbs.Never, func(r *rig) { r.Ring(); r.Ring(); r.Ring() }, 1, awake},
		{"ring, asleep till soon", 5, verbs.Never, func(r *rig) { r.Ring() }, 1, awake},
		{"ring, napping", napping, verbs.Never, func(r *rig) { r.Ring() }, 0, napping},
		{"ring, awake", awake, verbs.Never, func(r *rig) { r.Ring() }, 0, awake},
		{"ring, owned", int64(verbs.Never), verbs.Never, func(r *rig) { r.word.TryBorrow(); r.Ring(); r.word.Leave(); r.word.Leave() }, 0, int64(verbs.Never)},
		{"earlier deadline", 9, 8, func(r *rig) { r.Poll(1); r.Poll(1) }, 1, awake},
		{"same deadline", 8, 8, func(r *rig) { r.Poll(1) }, 0, 8},
		{"later deadline", 7, 8, func(r *rig) { r.Poll(1) }, 0, 7},
		{"no deadline", int64(verbs.Never), verbs.Never, func(r *rig) { r.Poll(1) }, 0, int64(verbs.Never)},
		{"earlier deadline, napping", napping, 8, func(r *rig) { r.Poll(1) }, 0, napping},
		{"inline sets a deadline", int64(verbs.Never), verbs.Never, func(r *rig) { r.TryDrive(func() { r.w.next = 3 }) }, 1, awake},
		{"hand back, napping", napping, verbs.Never, func(r *rig) { r.HandBack(); r.HandBack() }, 1, summoned},
		{"hand back, awake", awake, verbs.Never, func(r *rig) { r.HandBack() }, 0, summoned},
		{"hand back, asleep", 7, verbs.Never, func(r *rig) { r.HandBack() }, 0, 7},
		{"a packet and a small budget", int64(verbs.Never), verbs.Never, func(r *rig) { r.w.endless = true; r.Poll(3) }, 1, awake},
		{"a note and no budget", int64(verbs.Never), verbs.Never, func(r *rig) { r.TryDrive(func() { r.w.endless = true; r.Ring() }) }, 1, awake},
	} {
		r := newRig(t, false)
		r.commands.running.Store(true)
		r.w.next = c.next
		r.bed.Store(c.bed)
		c.do(r)
		if got := r.Counters.Wakes.Load(); got != c.want || r.bed.Load() != c.left {
			t.Errorf("%s: %d wake-ups, bed %d; want %d, %d", c.name, got, r.bed.Load(), c.want, c.left)
		}
		if r.word.Owned() {
			t.Errorf("%s: the role was kept", c.name)
		}
	}
}

func TestBudget(t *testing.T) {
	r := newRig(t, false)
	r.commands.running.Store(true)
	r.w.endless = true
	for _, budget := range []int{-1, 0, 1, 2, 7} {
		r.w.steps = 0
		if !r.Drive(budget) || r.w.steps != max(budget, 1) || r.word.Owned() {
			t.Errorf("budget %d: %d steps", budget, r.w.steps)
		}
	}
	// Somebody who rings at every step does not keep an owner for ever either.
	r.w.endless, r.w.steps = false, 0
	r.word.TryTake()
	r.w.bell.armed.Store(true)
	r.word.Note()
	r.settle(3)
	if r.w.steps != 2 || r.word.Owned() {
		t.Errorf("a note: %d steps, want 2", r.w.steps)
	}
}

// While somebody drives the thread naps, whatever arrives; when nobody does, one nap later
// it sleeps with the socket armed. A waiter that hands back need not wait for the nap.
func TestThreadNapsWhileDriven(t *testing.T) {
	r := newRig(t, true)
	var naps, over atomic.Int64 // naps that began, and those that the test has ended
	r.s.nap = func(token func() bool) {
		for n := naps.Add(1); over.Load() < n && !token(); {
			runtime.Gosched()
		}
		over.Store(naps.Load())
	}
	nap := func(n int64) {
		t.Helper()
		r.until("a nap", func() bool { return naps.Load() == n && r.bed.Load() == napping })
	}
	sleep := func() {
		t.Helper()
		r.until("sleep", func() bool { return r.rest(false) })
	}
	end := func() { over.Add(1) }
	r.run()
	sleep()
	r.Poll(1)
	r.s.deliver() // wakes the thread, which then sees the drive
	nap(1)
	for n := range int64(5) {
		r.Poll(1)
		r.s.deliver()
		if r.s.asleep() || r.w.got.Load() != n+1 {
			t.Fatalf("received %d after %d, or asleep", r.w.got.Load(), n+1)
		}
		end()
		nap(n + 2)
		if r.w.got.Load() != n+2 {
			t.Fatal("the packet was not received between two naps")
		}
	}
	if !r.word.TryBorrow() {
		t.Fatal("the napping thread owns the role")
	}
	end() // it looks, finds the role owned, leaves no note and naps on
	nap(7)
	if !r.word.Leave() {
		r.word.Drop()
		t.Fatal("the napping thread left a note")
	}
	if r.Counters.Wakes.Load() != 0 {
		t.Fatal("woken without need")
	}
	end() // a whole nap without a drive
	sleep()

	r.Poll(1)
	r.s.deliver()
	nap(8)
	r.Poll(1)
	r.HandBack() // the nap goes on until then
	sleep()
	if r.Counters.Wakes.Load() != 1 {
		t.Fatal("HandBack did not wake the thread")
	}
}

func TestCommandsAreBounded(t *testing.T) {
	r := newRig(t, false).run()
	r.until("sleep", func() bool { return r.rest(false) })
	if !r.word.TryTake() {
		t.Fatal("not free")
	}
	var wg sync.WaitGroup
	ran, order := 0, make([]int, 0, 3*maxCommands)
	for i := range 3 * maxCommands {
		wg.Go(func() {
			if err := r.Do(func() { ran++; order = append(order, i) }); err != nil {
				t.Error(err)
			}
		})
	}
	length := func() int {
		r.commands.mu.Lock()
		defer r.commands.mu.Unlock()
		return len(r.commands.list)
	}
	r.until("a full list", func() bool { return length() == maxCommands && r.word.Pending() })
	for range 1000 {
		runtime.Gosched()
	}
	if n := length(); n != maxCommands {
		t.Fatalf("%d commands wait, want at most %d", n, maxCommands)
	}
	r.settle(1)
	wg.Wait()
	if ran != 3*maxCommands || len(order) != ran || r.Counters.Commands.Load() != uint64(ran) {
		t.Errorf("%d of %d commands ran", ran, 3*maxCommands)
	}
}

// Whatever goes on when a role is closed: each command is run or refused and never both, the
// thread ends, and nobody touches the driver or the sleeper afterwards.
func TestClose(t *testing.T) {
	atProcs(t, func(t *testing.T, outer *rig) {
		rng := rand.New(rand.NewPCG(*seedFlag, 3))
		for i := range max(rounds()/20, 100) {
			r := newRig(t, rng.IntN(2) == 0)
			thread := rng.IntN(8) != 0
			if thread {
				r.wg.Go(r.Role.Run)
			}
			var ran, refused, final atomic.Int64
			var start, others sync.WaitGroup
			start.Add(1)
			for k := range 4 {
				rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(k)))
				others.Go(func() {
					start.Wait()
					for range 8 {
						switch rng.IntN(5) {
						case 0:
							switch err := r.Do(func() { r.w.enter(); ran.Add(1); r.w.exit() }); err {
							case nil:
								refused.Add(-1) // so that ran + refused is zero at the end
							case ErrClosed:
							default:
								t.Error(err)
							}
						case 1:
							r.post(rng.IntN(3))
						case 2:
							r.s.deliver()
						case 3:
							r.HandBack()
						case 4:
							r.Poll(1 + rng.IntN(2))
						}
					}
				})
			}
			shut := func() error {
				return r.Close(func() { r.w.enter(); final.Add(1); r.w.exit() })
			}
			var errs [2]error
			others.Go(func() { start.Wait(); errs[1] = shut(); r.dead() })
			start.Done()
			if i%3 > 0 {
				runtime.Gosched()
			}
			errs[0] = shut()
			r.dead()
			others.Wait()
			r.wg.Wait()
			if errors.Is(errs[0], ErrClosed) == errors.Is(errs[1], ErrClosed) || final.Load() != 1 {
				t.Fatalf("two Closes: %v, %v; last ran %d times", errs[0], errs[1], final.Load())
			}
			if ran.Load()+refused.Load() != 0 {
				t.Fatalf("%d commands ran without an answer", ran.Load()+refused.Load())
			}
			if err := r.Do(func() { t.Error("ran after Close") }); err != ErrClosed || !r.Closed() {
				t.Fatal(err)
			}
			if r.Poll(1) || r.Drive(1) || r.TryDrive(func() {}) {
				t.Fatal("the role was taken after Close")
			}
			r.Ring()
			r.HandBack()
			r.Role.Run() // too late: returns
		}
	})
}

// dead makes every later use of the sleeper a panic: a Close has returned.
func (r *rig) dead() {
	r.s.mu.Lock()
	r.s.dead = true
	r.s.mu.Unlock()
}

func TestCloseWithoutThread(t *testing.T) {
	r := newRig(t, false)
	ran := false
	if err := r.Close(func() { ran = true }); err != nil || !ran {
		t.Fatal(err)
	}
	r.Role.Run() // returns
}

// script is a waiter that is ready at some of its polls, and writes down what is asked of it.
type script struct {
	ready []bool
	err   error
	log   string
}

func (s *script) Ready() bool {
	s.log += "r"
	now := s.ready[0]
	s.ready = s.ready[1:]
	return now
}
func (s *script) Arm()        { s.log += "a" }
func (s *script) Disarm()     { s.log += "d" }
func (s *script) Park() error { s.log += "p"; return s.err }

func TestAwait(t *testing.T) {
	over := errors.New("over")
	for _, c := range []struct {
		ready     []bool
		park, err error
		log       string
	}{
		{[]bool{true}, nil, nil, "r"},
		{[]bool{false, true}, nil, nil, "rard"},
		{[]bool{false, false, true}, nil, nil, "rarpr"},
		{[]bool{false, false, false, false, true}, nil, nil, "rarprarpr"},
		{[]bool{true}, over, nil, "r"},
		{[]bool{false, false, true}, over, nil, "rarpdr"}, // a result is preferred
		{[]bool{false, false, false}, over, over, "rarpdr"},
	} {
		s := &script{ready: c.ready, err: c.park}
		if err := Await(s); err != c.err || s.log != c.log {
			t.Errorf("ready %v: %v, %q; want %v, %q", c.ready, err, s.log, c.err, c.log)
		}
	}
}

// Before there is a thread, an owner has nobody to leave a note to, whatever its budget.
func TestNoHandOverWithoutThread(t *testing.T) {
	r := newRig(t, false)
	done := make(chan error)
	r.w.onStep = func() {
		if r.w.steps == 1 {
			go func() { done <- r.Do(func() {}) }()
			r.until("a note", r.word.Pending)
		}
	}
	if !r.Poll(1) || r.w.steps != 2 || r.Counters.Commands.Load() != 1 {
		t.Fatalf("%d steps, %d commands", r.w.steps, r.Counters.Commands.Load())
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// nothing is a driver and sleeper that costs nothing.
type nothing struct{}

func (nothing) Step() bool                  { return false }
func (nothing) Pending() bool               { return false }
func (nothing) NextDeadline() verbs.Instant { return verbs.Never }
func (nothing) Arm()                        {}
func (nothing) Disarm()                     {}
func (nothing) Sleep(verbs.Instant)         {}
func (nothing) Nap(uint64)                  {}
func (nothing) Rouse()                      {}
func (nothing) Doze()                       {}
func (nothing) Hurry()                      {}
func (nothing) Wake()                       {}

func BenchmarkTakeLeave(b *testing.B) {
	b.ReportAllocs()
	var w Word
	for b.Loop() {
		w.TryTake()
		w.Leave()
	}
}

func BenchmarkPoll(b *testing.B) {
	b.ReportAllocs()
	r := New(nothing{}, nothing{})
	for b.Loop() {
		r.Poll(1)
	}
}

func BenchmarkTryDrive(b *testing.B) {
	b.ReportAllocs()
	r := New(nothing{}, nothing{})
	n := 0
	for b.Loop() {
		r.TryDrive(func() { n++ })
	}
}

// BenchmarkRingOwned leaves notes for an owner who takes them: on this goroutine, and on
// another one who drives all the time.
func BenchmarkRingOwned(b *testing.B) {
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		r := New(nothing{}, nothing{})
		r.word.TryTake()
		for b.Loop() {
			r.Ring()
			r.word.Leave() // takes the note
		}
	})
	b.Run("driven", func(b *testing.B) {
		b.ReportAllocs()
		r := New(nothing{}, nothing{})
		var stop atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			for !stop.Load() {
				r.Poll(2)
			}
		})
		for b.Loop() {
			r.Ring()
		}
		stop.Store(true)
		wg.Wait()
	})
}

func BenchmarkRingFree(b *testing.B) {
	b.ReportAllocs()
	r := New(nothing{}, nothing{})
	for b.Loop() {
		r.Ring()
	}
}

func TestDataPathAllocatesNothing(t *testing.T) {
	r := New(nothing{}, nothing{})
	n := 0
	if a := testing.AllocsPerRun(1000, func() {
		r.Poll(2)
		r.Drive(1)
		r.Ring()
		r.HandBack()
		r.TryDrive(func() { n++ })
	}); a != 0 {
		t.Errorf("%v allocations", a)
	}
}
