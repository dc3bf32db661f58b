package role

import (
	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Run is the thread: it owns the role when nobody else does, and returns after Close. Call
// it once, on a goroutine that may be locked to its thread: unless commands are waiting it
// uses no channel, lock, timer or netpoller, only atomics, the driver and the sleeper.
//
//	 +--------------- drives changed, or owned ----------------+
//	 v                                                         |
//	nap ----> look: take quietly, step until nothing is left --+--> doze, if a watcher sits
//	           ^                                               | no drive since the
//	           |                                               v last look, or summoned
//	           +------- sleep <- release <- bed <- step <- arm +
func (r *Role) Run() {
	if !r.begin() {
		return
	}
	defer close(r.commands.exited)
	seen := r.word.Drives()
	call := false // a waiter summoned us
	for !r.Closed() {
		if !r.word.TryBorrow() {
			d := r.word.Drives()
			call = r.nap(d - seen)
			seen = d
			continue
		}
		if !r.exhaust() {
			return
		}
		d := r.word.Drives()
		if (d == seen || call) && !r.seat.Load() {
			seen = d
			until, ok := r.toBed()
			if !ok {
				return
			}
			call = r.sleep(until)
			continue
		}
		for !r.word.Leave() {
			if !r.exhaust() {
				return
			}
		}
		if d == seen && r.seat.Load() {
			call = r.doze()
		} else {
			call = r.nap(d - seen)
		}
		seen = d
	}
}

// exhaust steps until nothing is left. It is false after the last command.
func (r *Role) exhaust() bool {
	for {
		more, ok := r.turn()
		if !ok {
			return false
		}
		if !more {
			return true
		}
	}
}

// toBed arms the socket, looks again, writes down until when the thread will sleep and
// releases the role. Bed is written before the release: whoever finds the role free must
// find out that the thread sleeps. It is false after the last command.
func (r *Role) toBed() (until verbs.Instant, ok bool) {
	r.sleeper.Arm()
	for {
		yield.Point()
		if !r.exhaust() {
			return 0, false
		}
		until = max(r.driver.NextDeadline(), earliest)
		r.bed.Store(int64(until))
		yield.Point()
		if r.word.Leave() {
			return until, true
		}
	}
}

// sleep rests until a packet, a wake-up or the time.
func (r *Role) sleep(until verbs.Instant) (call bool) {
	r.Counters.Sleeps.Add(1)
	yield.Point()
	r.sleeper.Sleep(until)
	call = r.bed.Swap(awake) == summoned
	r.sleeper.Disarm()
	return call
}

// nap rests for a moment, unless a waiter has asked for the thread already.
func (r *Role) nap(driven uint64) (call bool) {
	if r.bed.CompareAndSwap(awake, napping) {
		r.Counters.Naps.Add(1)
		yield.Point()
		r.sleeper.Nap(driven)
	}
	return r.bed.Swap(awake) == summoned
}
