package role

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Each test of this file does one thing per round while others drive, and then nothing any
// more: what was done must have its effect without another event. Half of the rounds begin
// only when the thread sleeps.

func eachRound(t *testing.T, r *rig, waiter bool, fn func(i int64, rng *rand.Rand, c *crowd)) {
	rng := rand.New(rand.NewPCG(*seedFlag, 2))
	c := newCrowd(2, r.disturb)
	defer c.end()
	for i := range rounds() {
		fn(int64(i+1), rng, c)
		if rng.IntN(2) == 0 {
			r.until("the thread to sleep", func() bool { return r.rest(waiter) })
		}
	}
}

func TestPostIsSent(t *testing.T) {
	atProcs(t, func(t *testing.T, r *rig) {
		eachRound(t, r, false, func(i int64, rng *rand.Rand, c *crowd) {
			c.round()
			r.post(rng.IntN(3))
			r.until("the crowd", c.back)
			r.until("the post to be sent", func() bool { return r.w.sent.Load() == i })
		})
	})
}

func TestPacketIsReceived(t *testing.T) {
	atProcs(t, func(t *testing.T, r *rig) {
		eachRound(t, r, false, func(i int64, rng *rand.Rand, c *crowd) {
			c.round()
			r.s.deliver()
			r.until("the crowd", c.back)
			r.until("the packet to be received", func() bool { return r.w.got.Load() == i })
		})
	})
}

// The clock is set to the very deadline, so a thread that sleeps until later is found out.
func TestDeadlineIsKept(t *testing.T) {
	atProcs(t, func(t *testing.T, r *rig) {
		eachRound(t, r, false, func(i int64, rng *rand.Rand, c *crowd) {
			c.round()
			r.post(rng.IntN(3))
			r.until("the crowd", c.back)
			r.until("the post to be sent", func() bool { return r.w.sent.Load() == i })
			r.s.advance(min(verbs.Instant(r.w.due.Load()), r.s.clock()+10))
			r.until("the deadline to pass", func() bool { return r.w.timers.Load() == 0 })
		})
	})
}

func TestCommandIsRun(t *testing.T) {
	atProcs(t, func(t *testing.T, r *rig) {
		ran := int64(0) // the owner's
		eachRound(t, r, false, func(i int64, rng *rand.Rand, c *crowd) {
			c.round()
			if err := r.Do(func() { r.w.enter(); ran++; r.w.exit() }); err != nil || ran != i {
				t.Fatalf("round %d: ran %d, %v", i, ran, err)
			}
			r.until("the crowd", c.back)
		})
	})
}

func TestWaiterWakesUp(t *testing.T) {
	for how := range 3 {
		atProcs(t, func(t *testing.T, r *rig) {
			b := &r.w.bell
			b.hand, b.sit = how == 1, how == 2
			end := b.wait()
			eachRound(t, r, true, func(i int64, rng *rand.Rand, c *crowd) {
				// The second one comes while the waiter takes the first or parks again.
				c.round()
				for range 2 {
					if rng.IntN(2) == 0 {
						r.s.deliver()
					} else {
						r.post(rng.IntN(3))
					}
					for range rng.IntN(8) {
						runtime.Gosched()
					}
				}
				r.until("the crowd", c.back)
				r.until("the waiter", func() bool { return b.taken.Load() == 2*i })
				r.s.advance(min(verbs.Instant(r.w.due.Load()), r.s.clock()+10))
			})
			end(t)
		})
	}
}

// Everything at once, with time that moves only when all is at rest: then nothing may be left.
func TestNothingIsLeftAtRest(t *testing.T) {
	t.Run("parking", func(t *testing.T) { nothingIsLeftAtRest(t, false) })
	t.Run("watching", func(t *testing.T) { nothingIsLeftAtRest(t, true) })
}

func nothingIsLeftAtRest(t *testing.T, sit bool) {
	atProcs(t, func(t *testing.T, r *rig) {
		b := &r.w.bell
		b.hand, b.sit = !sit, sit
		end := b.wait()
		c := newCrowd(3, func(rng *rand.Rand) {
			for range 1 + rng.IntN(3) {
				switch rng.IntN(3) {
				case 0:
					r.post(rng.IntN(3))
				case 1:
					r.s.deliver()
				case 2:
					r.disturb(rng)
				}
			}
		})
		defer c.end()
		for range rounds() {
			c.round()
			r.until("the crowd", c.back)
			r.until("rest", func() bool { return r.rest(true) })
			now := r.s.clock()
			if r.word.Owned() || r.word.Pending() || r.w.work.Load() != 0 || r.w.mark.Load() || r.s.packets != 0 ||
				verbs.Instant(r.w.due.Load()) <= now || b.cqe.Load() != 0 {
				t.Fatalf("left at rest (-seed %d): owned %v, note %v, work %d, packets %d, due %d, now %d, completions %d", *seedFlag,
					r.word.Owned(), r.word.Pending(), r.w.work.Load(), r.s.packets, r.w.due.Load(), now, b.cqe.Load())
			}
			if r.s.both() {
				t.Fatalf("the thread sleeps beside the watcher (-seed %d)", *seedFlag)
			}
			r.s.advance(now + 1)
		}
		end(t)
		if c := &r.Counters; sit != (c.Watches.Load() > 0) || sit != (c.Dozes.Load() > 0) {
			t.Errorf("watched %d times, dozed %d times", c.Watches.Load(), c.Dozes.Load())
		}
	})
}
