package role

import (
	"runtime"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Watcher is how a waiter rests in the thread's place: on the socket itself, so that a packet
// wakes it and not first the thread, which would then wake it. At most one waiter a role does
// so at a time, and only while no other waiter is parked, whom it would have to wake.
type Watcher interface {
	// Claim is called under the role before each Sleep: from now until that Sleep ends the
	// watcher may keep packets to itself, so that nobody else's step finds any. Those that came
	// meanwhile are found by steps after it. Unclaim takes it back, likewise under the role, when
	// there will be no Sleep. Only who has the seat calls them.
	Claim(until verbs.Instant)
	Unclaim()
	// Sleep blocks until there is a packet, also one that came before, or Wake, or the time
	// has come. It may return early for no reason. Only who has the seat calls it.
	Sleep(until verbs.Instant)
	// Wake ends the present Sleep, or the next. Any goroutine, as long as Close has not
	// returned.
	Wake()
}

const (
	// insistence is how often a watcher tries to take the role before it gives up its seat.
	insistence = 256
	// shyness is how many waits do without the seat after two waiters were in each other's
	// way: to hand the socket over between watcher and thread costs more than the seat saves.
	shyness = 64
)

// SetWatcher gives the role a watcher's way to rest; without one Sit refuses. Before Run.
func (r *Role) SetWatcher(w Watcher) { r.watcher = w }

// Sit asks for the watcher's seat. Who gets it calls Watch, and then Rise. Any goroutine.
func (r *Role) Sit() bool {
	if r.watcher == nil || r.waiters.Load() != 0 || r.seat.Load() {
		return false
	}
	if n := r.shy.Load(); n > 0 {
		r.shy.Store(n - 1) // others may do so too; it need not be exact
		return false
	}
	if !r.seat.CompareAndSwap(false, true) {
		return false
	}
	if r.Closed() {
		r.seat.Store(false)
		return false
	}
	return true
}

// Watch drives, and sleeps on the socket in between, until done says so or the role is closed.
// It returns false when it had to give up without either, because others kept the role: then
// the caller parks. done is called under the role, and may look at nothing that is changed
// without it, unless whoever does so calls Nudge. Only who has the seat.
//
// While a watcher sleeps the thread does not: it dozes until Rise. Whatever would wake the
// thread wakes the watcher.
func (r *Role) Watch(done func() bool) bool {
	for fresh := true; ; fresh = false {
		if !r.insist() {
			return r.Closed()
		}
		until, over := r.toCot(done, fresh)
		if over {
			return true
		}
		// The thread may still sleep on the same socket: from the time before we sat here.
		if b := r.bed.Load(); b >= earliest {
			r.wake(b, awake)
		}
		r.Counters.Watches.Add(1)
		r.watcher.Sleep(until)
		r.cot.Store(awake) // and now it looks, whoever has woken it
		yield.Point()
	}
}

// toCot steps until nothing is left and releases the role, as the thread's toBed does; or
// until done, and then leaves what is left to the thread, which looks soon. fresh says that
// nobody has slept yet: then it may go to sleep without a step, for a packet that is there
// ends that sleep at once.
func (r *Role) toCot(done func() bool, fresh bool) (until verbs.Instant, over bool) {
	for ; ; fresh = false {
		more := false
		if !fresh || r.driver.Pending() || r.commands.queued.Load() {
			var ok bool
			if more, ok = r.turn(); !ok {
				return 0, true
			}
		}
		if done() {
			if more || !r.release() {
				r.handOver()
			}
			return 0, true
		}
		if more {
			continue
		}
		until = max(r.driver.NextDeadline(), earliest)
		r.cot.Store(int64(until))
		r.watcher.Claim(until)
		yield.Point()
		if r.word.Leave() {
			return until, false
		}
		r.watcher.Unclaim()
		r.cot.Store(awake) // we may go without sleeping
	}
}

// insist takes the role, trying for a while.
func (r *Role) insist() bool {
	for range insistence {
		if r.word.TryTakeQuiet() {
			return true
		}
		if r.Closed() {
			return false
		}
		runtime.Gosched()
	}
	return false
}

// Rise gives the seat back. From here on the thread looks by itself, in a while.
func (r *Role) Rise() {
	r.seat.Store(false)
	yield.Point()
	if b := r.bed.Load(); b == dozing {
		r.wake(b, awake)
	}
	if r.waiters.Load() != 0 {
		r.shy.Store(shyness)
		r.HandBack()
	}
}

// Park says that a waiter is about to park without the seat: unless a watcher looks, the
// thread takes over at once. Unpark comes after. Any goroutine, but not under the role.
func (r *Role) Park() {
	r.waiters.Add(1)
	yield.Point()
	if !r.seat.Load() {
		r.HandBack()
	}
}

// Unpark: see Park.
func (r *Role) Unpark() { r.waiters.Add(-1) }

// Nudge has a watcher ask done again, whatever it does now. Any goroutine. A closed role's
// watcher is woken by Close; and Sit may take the seat for a moment when Close is through.
func (r *Role) Nudge() {
	r.wakers.Add(1)
	yield.Point()
	if r.seat.Load() && !r.Closed() {
		yield.Point()
		r.watcher.Wake()
	}
	r.wakers.Add(-1)
}

// Completed is Nudge for the owner of the role, who has changed what done looks at: it costs
// a system call only if the watcher sleeps.
func (r *Role) Completed() { r.wakeWatcher(earliest - 1) }

// wakeWatcher wakes the watcher if it sleeps until later than t. It is false when no watcher
// sleeps, so that it is for the thread to do what there is to do.
func (r *Role) wakeWatcher(t int64) bool {
	b := r.cot.Load()
	if b < earliest {
		return false
	}
	if b > t {
		r.wakers.Add(1)
		yield.Point()
		// When the swap fails it was woken in between, or got up: it will look.
		if r.cot.CompareAndSwap(b, awake) {
			yield.Point()
			r.Counters.Wakes.Add(1)
			r.watcher.Wake()
		}
		r.wakers.Add(-1)
	}
	return true
}

// doze rests until Rise, or until a waiter asks for the thread.
func (r *Role) doze() (call bool) {
	yield.Point()
	if r.bed.CompareAndSwap(awake, dozing) {
		yield.Point()
		if r.seat.Load() || !r.bed.CompareAndSwap(dozing, awake) {
			// If the seat is given up from now on, or was and that was told already, there is
			// a token.
			r.Counters.Dozes.Add(1)
			r.sleeper.Doze()
		}
	}
	return r.bed.Swap(awake) == summoned
}
