package park

import (
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// oneSleeper is what Parker, ThreadParker and Kicker have in common.
type oneSleeper interface {
	Arm()
	Sleep(timeout time.Duration) bool
}

// await is the sleeper's side of the protocol.
func await(p oneSleeper, disarm func(), ready func() bool) bool {
	for !ready() {
		p.Arm()
		if ready() {
			disarm()
			return true
		}
		if !p.Sleep(hung) {
			return false
		}
	}
	return true
}

func newKicker(t *testing.T) *Kicker {
	t.Helper()
	k, err := NewKicker()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

func TestParkerLosesNothing(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		var p Parker
		oneWakeRounds(t, nil, func(ready func() bool) bool { return await(&p, p.Disarm, ready) }, func() { p.Wake() })
	})
}

func TestThreadParkerLosesNothing(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		var p ThreadParker
		oneWakeRounds(t, runtime.LockOSThread,
			func(ready func() bool) bool { return await(&p, p.Disarm, ready) }, func() { p.Wake() })
	})
}

func TestKickerLosesNothing(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		k := newKicker(t)
		oneWakeRounds(t, runtime.LockOSThread,
			func(ready func() bool) bool { return await(k, func() { k.Disarm() }, ready) }, func() { k.Kick() })
	})
}

// TestOneSleeper walks each primitive through its states, without anybody else around.
func TestOneSleeper(t *testing.T) {
	type primitive struct {
		name   string
		p      oneSleeper
		disarm func()
		wake   func() bool
	}
	var parker Parker
	var thread ThreadParker
	kicker := newKicker(t)
	for _, tt := range []primitive{
		{"Parker", &parker, parker.Disarm, parker.Wake},
		{"ThreadParker", &thread, thread.Disarm, thread.Wake},
		{"Kicker", kicker, func() { kicker.Disarm() }, kicker.Kick},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.wake() {
				t.Error("woke somebody who is awake")
			}
			tt.p.Arm()
			if tt.p.Sleep(0) {
				t.Error("Sleep(0) says it was woken")
			}
			tt.p.Arm()
			if tt.p.Sleep(time.Millisecond) {
				t.Error("Sleep(1ms) says it was woken")
			}
			if tt.wake() {
				t.Error("woke somebody whose sleep is over")
			}
			tt.p.Arm()
			tt.disarm()
			if tt.wake() {
				t.Error("woke somebody who has disarmed")
			}
			tt.p.Arm()
			tt.wake()
			if !tt.p.Sleep(-1) {
				t.Error("a wake-up between Arm and Sleep was not noticed")
			}
			// One wake-up ends one sleep.
			tt.p.Arm()
			if tt.p.Sleep(time.Millisecond) {
				t.Error("a wake-up ended two sleeps")
			}
		})
	}
}

// TestOneSleeperTimeouts lets wake-ups and timeouts meet: whichever wins, the next sleep
// starts clean.
func TestOneSleeperTimeouts(t *testing.T) {
	var parker Parker
	var thread ThreadParker
	kicker := newKicker(t)
	for _, tt := range []struct {
		name string
		p    oneSleeper
		wake func() bool
	}{{"Parker", &parker, parker.Wake}, {"ThreadParker", &thread, thread.Wake}, {"Kicker", kicker, kicker.Kick}} {
		t.Run(tt.name, func(t *testing.T) {
			var stop atomic.Bool
			done := make(chan struct{})
			go func() {
				defer close(done)
				for !stop.Load() {
					tt.wake()
					runtime.Gosched()
				}
			}()
			for i := range 2000 {
				tt.p.Arm()
				tt.p.Sleep(time.Duration(i%50) * time.Microsecond)
			}
			stop.Store(true)
			<-done
			tt.p.Arm()
			if tt.p.Sleep(time.Millisecond) {
				t.Error("a wake-up from before Arm ended the sleep")
			}
		})
	}
}

// TestParkerSlowWaker: a waker that has decided to wake and is held up before it does owes a
// token. A sleeper whose timeout ends meanwhile takes it, or it would end a later sleep.
func TestParkerSlowWaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Parker
		woken := make(chan bool)
		go func() {
			p.Arm()
			woken <- p.Sleep(time.Second)
		}()
		synctest.Wait()
		if p.word.Swap(awake) != asleep { // the first half of Wake
			t.Fatal("not asleep")
		}
		time.Sleep(time.Minute)
		p.wake <- struct{}{} // the second half
		if !<-woken || len(p.wake) != 0 {
			t.Errorf("%d tokens left for a later sleep", len(p.wake))
		}
	})
}

// TestParkerSynctest: a wire that sleeps on a Parker lets a bubble's clock go on.
func TestParkerSynctest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Parker
		begin := time.Now()
		p.Arm()
		if p.Sleep(time.Hour) || time.Since(begin) != time.Hour {
			t.Errorf("woke after %v, want an hour of the bubble's time", time.Since(begin))
		}
		go func() {
			time.Sleep(time.Minute)
			p.Wake()
		}()
		begin = time.Now()
		p.Arm()
		if !p.Sleep(time.Hour) || time.Since(begin) != time.Minute {
			t.Errorf("woke after %v, want a minute", time.Since(begin))
		}
	})
}
