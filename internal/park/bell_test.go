package park

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// sleepFunc is one of the two ways to sleep on a bell.
type sleepFunc func(b *Bell, ctx context.Context, t Ticket, timeout time.Duration) error

var sleepFuncs = []struct {
	name  string
	sleep sleepFunc
}{{"channel", (*Bell).Sleep}, {"thread", (*Bell).SleepThread}}

// awaitBell is the waiter's side of the protocol.
func awaitBell(t *testing.T, b *Bell, sleep sleepFunc, ready func() bool) bool {
	for !ready() {
		ticket := b.Arm()
		if ready() {
			b.Disarm()
			return true
		}
		if err := sleep(b, context.Background(), ticket, hung); err != nil {
			t.Error(err)
			return false
		}
	}
	return true
}

// idle checks that nothing is left of the waiters of a bell.
func idle(t *testing.T, b *Bell) {
	t.Helper()
	if b.armed.Load() != 0 || b.parked.Load() != 0 || b.list != nil {
		t.Errorf("left behind: %d armed, %d parked", b.armed.Load(), b.parked.Load())
	}
	n := 0
	for s := b.spare; s != nil; s = s.next {
		if len(s.wake) != 0 || s.listed {
			t.Error("a spare sleeper has a token or is listed")
		}
		n++
	}
	if n != int(b.spares) || n > maxSpare {
		t.Errorf("%d spare sleepers, counted %d", n, b.spares)
	}
}

func TestBellLosesNothing(t *testing.T) {
	for _, f := range sleepFuncs {
		t.Run(f.name, func(t *testing.T) {
			withProcs(t, func(t *testing.T) {
				var b Bell
				oneWakeRounds(t, nil, func(ready func() bool) bool { return awaitBell(t, &b, f.sleep, ready) }, b.Ring)
				idle(t, &b)
			})
			t.Run("via", func(t *testing.T) {
				withProcs(t, func(t *testing.T) {
					var b Bell
					w := NewWaker()
					defer w.Close()
					oneWakeRounds(t, nil, func(ready func() bool) bool { return awaitBell(t, &b, f.sleep, ready) },
						func() { b.RingVia(w) })
					idle(t, &b)
				})
			})
		})
	}
}

// TestBellLeavesRingsToTheHolder: a ringer who finds the list locked goes away, and the
// goroutine that holds it wakes the sleepers.
func TestBellLeavesRingsToTheHolder(t *testing.T) {
	var b Bell
	woken := make(chan error)
	go func() { woken <- b.Sleep(context.Background(), b.Arm(), hung) }()
	for b.parked.Load() == 0 {
		runtime.Gosched()
	}
	b.mu.Lock()
	b.Ring() // must not block
	b.unlock()
	if err := <-woken; err != nil {
		t.Error(err)
	}
	idle(t, &b)
}

// TestBellHolderLooksAgain: one sleeps, another goroutine is just letting go of the list when
// the ring comes, and nothing happens after it.
func TestBellHolderLooksAgain(t *testing.T) {
	withProcs(t, holderLooksAgain)
}

func holderLooksAgain(t *testing.T) {
	var b Bell
	var made, seen, turn atomic.Int64 // rounds; negative at the end
	var wg sync.WaitGroup
	wg.Go(func() {
		for r := int64(1); awaitBell(t, &b, (*Bell).Sleep, func() bool { return made.Load() >= r }); r++ {
			seen.Store(r)
			if r == int64(*lossRounds) {
				return
			}
		}
		seen.Store(-1)
	})
	wg.Go(func() {
		for r := int64(1); r <= int64(*lossRounds); r++ {
			for turn.Load() < r {
				runtime.Gosched()
			}
			b.mu.Lock()
			b.unlock()
		}
	})
	for r := int64(1); r <= int64(*lossRounds); r++ {
		for b.parked.Load() == 0 && seen.Load() >= 0 {
			runtime.Gosched()
		}
		turn.Store(r)
		if rand.N(2) == 0 {
			runtime.Gosched()
		}
		for range rand.N(100) {
			Pause()
		}
		made.Store(r)
		b.Ring()
		for seen.Load() < r && seen.Load() >= 0 {
			runtime.Gosched()
		}
	}
	wg.Wait()
	idle(t, &b)
}

// TestBellChurn is TestBellLosesNothing while others come and go on the same bell and
// hold its list whenever the ring comes.
func TestBellChurn(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		var b Bell
		var stop atomic.Bool
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for !stop.Load() {
					b.Sleep(context.Background(), b.Arm(), time.Microsecond)
				}
			})
		}
		oneWakeRounds(t, nil, func(ready func() bool) bool { return awaitBell(t, &b, (*Bell).Sleep, ready) }, b.Ring)
		stop.Store(true)
		wg.Wait()
		idle(t, &b)
	})
}

// TestBellCrowd: several waiters of both kinds on one bell, several ringers, one ring a
// round; everyone must see every round.
func TestBellCrowd(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		const waiters, ringers = 6, 3
		rounds := int64(*lossRounds / 10)
		var b Bell
		w := NewWaker()
		defer w.Close()
		var made atomic.Int64
		var seen [waiters]atomic.Int64
		var wg sync.WaitGroup
		for i := range waiters {
			sleep := sleepFuncs[i%2].sleep
			wg.Go(func() {
				for r := int64(1); r <= rounds; r++ {
					if !awaitBell(t, &b, sleep, func() bool { return made.Load() >= r }) {
						seen[i].Store(rounds) // do not hold the others up
						return
					}
					seen[i].Store(r)
				}
			})
		}
		for i := range ringers {
			wg.Go(func() {
				// Ringers take turns; each rings its rounds in its own way.
				for r := int64(1 + i); r <= rounds; r += ringers {
					for made.Load() != r-1 || !all(seen[:], r-1) {
						runtime.Gosched()
					}
					made.Store(r)
					if i == 0 {
						b.Ring()
					} else {
						b.RingVia(w)
					}
				}
			})
		}
		wg.Wait()
		idle(t, &b)
	})
}

func all(seen []atomic.Int64, r int64) bool {
	for i := range seen {
		if seen[i].Load() < r {
			return false
		}
	}
	return true
}

// TestBellWakesThousands: one ring wakes everyone, and the bell keeps nothing of them.
func TestBellWakesThousands(t *testing.T) {
	for _, via := range []bool{false, true} {
		var b Bell
		var w *Waker
		if via {
			w = NewWaker()
			defer w.Close()
		}
		var ready atomic.Bool
		var wg sync.WaitGroup
		for range 5000 {
			wg.Go(func() {
				if !awaitBell(t, &b, (*Bell).Sleep, ready.Load) {
					t.Error("not woken")
				}
			})
		}
		for b.parked.Load() != 5000 {
			runtime.Gosched()
		}
		ready.Store(true)
		b.RingVia(w)
		wg.Wait()
		idle(t, &b)
	}
}

func TestBellErrors(t *testing.T) {
	for _, f := range sleepFuncs {
		t.Run(f.name, func(t *testing.T) {
			var b Bell
			live := t.Context()
			dead, cancel := context.WithCancel(live)
			cancel()

			if err := f.sleep(&b, live, b.Arm(), 0); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("Sleep for nothing: %v", err)
			}
			if err := f.sleep(&b, live, b.Arm(), time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("Sleep for a millisecond: %v", err)
			}
			if err := f.sleep(&b, dead, b.Arm(), -1); !errors.Is(err, context.Canceled) {
				t.Errorf("Sleep with a dead context: %v", err)
			}
			past, cancel := context.WithDeadline(live, time.Now().Add(2*time.Millisecond))
			defer cancel()
			if err := f.sleep(&b, past, b.Arm(), -1); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Sleep over a context's deadline: %v", err)
			}
			// A ring beats a dead context and a timeout of nothing.
			for range 100 {
				ticket := b.Arm()
				b.Ring()
				if err := f.sleep(&b, dead, ticket, 0); err != nil {
					t.Fatalf("rung, and yet: %v", err)
				}
			}
			idle(t, &b)
		})
	}
}

// TestBellCancel cancels sleepers who are already asleep, the thread sleepers both before
// and after they have begun to listen to their context.
func TestBellCancel(t *testing.T) {
	for _, f := range sleepFuncs {
		t.Run(f.name, func(t *testing.T) {
			for _, after := range []time.Duration{0, 3 * unheardInTests} {
				var b Bell
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 3)
				for range cap(ended) {
					go func() { ended <- f.sleep(&b, ctx, b.Arm(), -1) }()
				}
				for b.armed.Load() != 3 {
					runtime.Gosched()
				}
				timer := time.NewTimer(after)
				<-timer.C
				cancel()
				lost := time.AfterFunc(hung, b.Ring) // ends the deaf, who then return nil
				for range cap(ended) {
					if err := <-ended; !errors.Is(err, context.Canceled) {
						t.Errorf("cancelled after %v: %v", after, err)
					}
				}
				lost.Stop()
				idle(t, &b)
			}
		})
	}
}

// unheardInTests is how long a thread sleeper may be deaf to its context.
const unheardInTests = time.Millisecond

// TestBellRingsAndCancels lets rings, cancellations and timeouts meet. Whatever wins, the
// rules hold: nil only if rung, and no token is left for a later sleeper.
func TestBellRingsAndCancels(t *testing.T) {
	for _, f := range sleepFuncs {
		t.Run(f.name, func(t *testing.T) {
			var b Bell
			w := NewWaker()
			defer w.Close()
			var stop atomic.Bool
			var ringing, sleeping sync.WaitGroup
			for i := range 2 {
				ringing.Go(func() {
					for !stop.Load() {
						if i == 0 {
							b.Ring()
						} else {
							b.RingVia(w)
						}
						runtime.Gosched()
					}
				})
			}
			for range 4 {
				sleeping.Go(func() {
					for i := range 300 {
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%30)*time.Microsecond)
						ticket := b.Arm()
						err := f.sleep(&b, ctx, ticket, time.Duration(i%20)*time.Microsecond)
						if err == nil && !b.rung(ticket) {
							t.Error("nil without a ring")
						}
						cancel()
					}
				})
			}
			sleeping.Wait()
			stop.Store(true)
			ringing.Wait()
			idle(t, &b)
		})
	}
}

// TestBellTimersStayOut: sleeping and timing out for long does not grow the bell.
func TestBellTimersStayOut(t *testing.T) {
	var b Bell
	for range 100 {
		b.Sleep(t.Context(), b.Arm(), time.Microsecond)
	}
	if b.spares != 1 {
		t.Errorf("one sleeper at a time left %d spares", b.spares)
	}
	idle(t, &b)
}

// TestBellSynctest: channel sleepers hear a bubble's clock, and rings inside it.
func TestBellSynctest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b Bell
		begin := time.Now()
		if err := b.Sleep(t.Context(), b.Arm(), time.Hour); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(begin) != time.Hour {
			t.Errorf("%v after %v, want a timeout after an hour of the bubble's time", err, time.Since(begin))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begin = time.Now()
		if err := b.Sleep(ctx, b.Arm(), -1); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Minute {
			t.Errorf("%v after %v, want the context's end after a minute", err, time.Since(begin))
		}
		go func() {
			time.Sleep(time.Second)
			b.Ring()
		}()
		begin = time.Now()
		if err := b.Sleep(t.Context(), b.Arm(), -1); err != nil || time.Since(begin) != time.Second {
			t.Errorf("%v after %v, want a ring after a second", err, time.Since(begin))
		}
	})
}

func TestBellMisuse(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("Disarm without Arm did not panic")
		}
	}()
	new(Bell).Disarm()
}

// TestWakerClose: bells rung around and after Close are rung, by somebody.
func TestWakerClose(t *testing.T) {
	NewWaker().Close() // never used
	withProcs(t, wakerClose)
}

func wakerClose(t *testing.T) {
	for range *lossRounds {
		w := NewWaker()
		var bells [4]Bell
		var ready [4]atomic.Bool
		var wg sync.WaitGroup
		for i := range bells {
			wg.Go(func() {
				if !awaitBell(t, &bells[i], (*Bell).Sleep, ready[i].Load) {
					t.Errorf("bell %d: not woken", i)
				}
			})
		}
		for i := range bells {
			for bells[i].armed.Load() == 0 {
				runtime.Gosched()
			}
			wg.Go(func() {
				ready[i].Store(true)
				bells[i].RingVia(w)
			})
			if i == len(bells)/2 {
				wg.Go(w.Close)
			}
		}
		wg.Wait()
		w.Close() // again
		for i := range bells {
			idle(t, &bells[i])
		}
	}
}

// TestWakerManyBells: a locked thread rings a hundred bells at once.
func TestWakerManyBells(t *testing.T) {
	w := NewWaker()
	defer w.Close()
	bells := make([]Bell, 100)
	var wg sync.WaitGroup
	for i := range bells {
		wg.Go(func() {
			if err := bells[i].Sleep(context.Background(), bells[i].Arm(), hung); err != nil {
				t.Errorf("bell %d: %v", i, err)
			}
		})
	}
	for i := range bells {
		for bells[i].parked.Load() == 0 {
			runtime.Gosched()
		}
	}
	wg.Go(func() {
		runtime.LockOSThread()
		for i := range bells {
			bells[i].RingVia(w)
		}
	})
	wg.Wait()
}

// TestBellTimeouts: sleepers that come and go hand each other what they sleep on, and each wakes
// up when its own time is over.
func TestBellTimeouts(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		var b Bell
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 5 * *lossRounds {
					if err := b.Sleep(t.Context(), b.Arm(), time.Microsecond); !errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("got %v", err)
						return
					}
				}
			})
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			wg.Wait()
		}()
		select {
		case <-done:
		case <-time.After(hung):
			b.Ring()
			t.Error("one sleeps on, though its time is over")
			<-done
		}
		idle(t, &b)
	})
}
