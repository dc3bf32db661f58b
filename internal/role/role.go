package role

import (
	"math"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Driver is what the owner of the role drives: a wire. Its methods are called only under
// the role, never after [Role.Close] has run its last command. They must not block, and
// must not call the role's Do, Close or Drive; Ring is allowed.
type Driver interface {
	// Step does a bounded amount of work: what posters marked, what arrived, what is due.
	// more says that it may have stopped because of a bound; a step that returns false has
	// seen the socket empty. Marks must be cleared before their work is looked for.
	Step() (more bool)
	// Pending reports whether Step would find something to do without a packet or a deadline.
	Pending() bool
	// NextDeadline returns when Step must be called again at the latest, [verbs.Never] for
	// no such time. It is called at each release and must be cheap.
	NextDeadline() verbs.Instant
}

// Sleeper is how the thread rests. Only the thread calls the methods but Wake.
type Sleeper interface {
	// Arm has packets end the next Sleep: those that arrive from now on; a level-triggered
	// sleeper, whose Sleep also ends when packets are there already, does more than needed.
	Arm()
	// Disarm is called after each Sleep: from now on packets wake nobody.
	Disarm()
	// Sleep blocks until a packet arrives while armed, somebody calls Wake or the time has
	// come ([verbs.Never]: no time). It may return early for no reason.
	Sleep(until verbs.Instant)
	// Nap blocks for a moment, a few milliseconds at most, or until Rouse. Packets do not
	// end it. driven says how often others drove since the thread looked last: who drives
	// all the time needs the thread the less.
	Nap(driven uint64)
	// Doze is a Nap without end.
	Doze()
	// Wake ends the present Sleep, Rouse the present Nap or Doze. Both keep: when the thread
	// does not rest so, the next one ends at once; two may count as one. Any goroutine, under
	// the role or not, as long as Close has not returned.
	Wake()
	Rouse()
	// Hurry ends the present Nap if it is a long one: something was posted that should not
	// wait for so long. It may be called at any time, also after Close.
	Hurry()
}

// What bed holds beside the instant until which the thread sleeps.
const (
	awake    = math.MinInt64 + iota // at work, or woken: it will look without being told
	napping                         // it will look by itself soon
	dozing                          // a waiter sleeps on the socket and looks in its place
	summoned                        // a parking waiter asks it to take over without delay
	earliest                        // instants from here on
)

// Role is the role of one wire. Make it with [New].
type Role struct {
	word Word
	_    [120]byte

	// bed is written by the thread when it goes to rest and gets up, and taken back to
	// awake by whoever wakes it.
	bed atomic.Int64
	// wakers counts those who may be about to call Wake, so that Close can wait for them.
	wakers atomic.Int32
	_      [112]byte

	// cot is to the watcher what bed is to the thread: awake, also when there is none, or
	// until when it sleeps. seat is taken while there is one.
	cot  atomic.Int64
	seat atomic.Bool
	// waiters counts those who are parked without the seat.
	waiters atomic.Int32
	shy     atomic.Int32
	_       [100]byte

	driver   Driver
	sleeper  Sleeper
	watcher  Watcher // nil: no seat
	commands commands

	// Counters may be read by anyone.
	Counters Counters
}

// Counters are totals since New.
type Counters struct {
	// Naps, Dozes and Sleeps count how often the thread rested, Watches how often a waiter
	// slept in its place, Wakes how often either was woken by a call; HandOvers the owners
	// that ran out of budget; Commands those run.
	Naps, Dozes, Sleeps, Watches, Wakes, HandOvers, Commands atomic.Uint64
}

// New makes a free role over d and s. Until Run is called nobody but takers drives, and
// their budgets do not count, for there is nobody to hand over to.
func New(d Driver, s Sleeper) *Role {
	r := &Role{driver: d, sleeper: s}
	r.bed.Store(awake)
	r.cot.Store(awake)
	r.commands.init()
	return r
}

// Drive takes the role, does up to budget steps (at least one) while there is work, and
// releases it. When somebody else owns the role it leaves a note and returns false: what the
// caller made ready before will be seen by the owner, or by the thread within a nap. Any
// goroutine. After Close it returns false for ever; see Closed.
func (r *Role) Drive(budget int) bool {
	if !r.word.TryTake() {
		return false
	}
	r.settle(budget)
	return true
}

// Poll is Drive for those who leave nothing behind: no note when the role is owned.
func (r *Role) Poll(budget int) bool {
	if !r.word.TryTakeQuiet() {
		return false
	}
	r.settle(budget)
	return true
}

// TryDrive runs fn under the role when nobody owns it, and reports whether it did. It is the
// inline transmit of a post: fn sends, and must not block. No step follows unless somebody
// left a note meanwhile. It does not count as a drive: fn does not look at the socket, so
// the thread must go on doing so. When it returns false, mark the work ready and Ring.
func (r *Role) TryDrive(fn func()) bool {
	if !r.word.TryBorrow() {
		return false
	}
	fn()
	yield.Point()
	if !r.release() {
		r.settle(1)
	}
	return true
}

// Ring has work that was marked ready before looked at. Call it after the first mark only.
// When the role is owned, the owner gets a note; when it is free, the watcher or the thread is
// woken if it sleeps, and the thread looks by itself within a short nap if it naps: only
// a sleeper costs a system call, and only the first ring of a sleep. Any goroutine, also under
// the role.
func (r *Role) Ring() {
	if !r.word.Note() {
		yield.Point()
		r.kick(earliest - 1)
		if r.bed.Load() == napping {
			r.sleeper.Hurry()
		}
	}
}

// HandBack says that a waiter is about to park and nobody else drives, as far as it knows:
// a napping thread is woken and takes over at once, as after a whole nap without a drive.
// Without it nothing is lost, but what happens next is late by up to a nap. It wakes
// somebody if the thread naps, and is in vain under the role.
func (r *Role) HandBack() {
	for {
		switch b := r.bed.Load(); b {
		case awake:
			yield.Point()
			if r.bed.CompareAndSwap(awake, summoned) {
				return
			}
		case napping, dozing:
			if r.wake(b, summoned) {
				return
			}
		default:
			return
		}
	}
}

// turn runs the commands that were left, then a step. ok is false after the last command:
// the caller keeps the role for ever and touches nothing more.
func (r *Role) turn() (more, ok bool) {
	if r.commands.queued.Load() && !r.runCommands() {
		return false, false
	}
	return r.driver.Step(), true
}

// settle steps as long as there is work and budget, and releases the role. Before there is
// a thread to hand over to, the budget does not count.
func (r *Role) settle(budget int) {
	for {
		more, ok := r.turn()
		if !ok {
			return
		}
		budget--
		yield.Point()
		if !more && r.release() {
			return
		}
		if budget <= 0 && r.commands.running.Load() {
			r.handOver()
			return
		}
	}
}

// release leaves the role if it can, and sees to it that the thread does not oversleep the
// earliest deadline. It does so after leaving, so that a woken thread finds the role free;
// the deadline was read under the role, and a thread that went to bed since has seen it.
func (r *Role) release() bool {
	deadline := r.driver.NextDeadline()
	if !r.word.Leave() {
		return false
	}
	yield.Point()
	r.kick(int64(deadline))
	return true
}

// handOver releases the role with work or a note left. The thread looks by itself when it
// naps, and is woken when it sleeps.
func (r *Role) handOver() {
	r.Counters.HandOvers.Add(1)
	r.word.Drop()
	yield.Point()
	r.kick(earliest - 1)
}

// kick wakes the watcher, or if none sleeps the thread, if it sleeps until later than t.
func (r *Role) kick(t int64) {
	if r.wakeWatcher(t) {
		return
	}
	if b := r.bed.Load(); b >= earliest && b > t {
		// When the swap fails the thread was woken in between, or got up and looked by itself.
		r.wake(b, awake)
	}
}

// wake moves bed from one value to another, and ends the rest if that was done here. Close
// waits until nobody is between the two.
func (r *Role) wake(from, to int64) bool {
	r.wakers.Add(1)
	yield.Point()
	ok := r.bed.CompareAndSwap(from, to)
	if ok {
		yield.Point()
		r.Counters.Wakes.Add(1)
		if from == napping || from == dozing {
			r.sleeper.Rouse()
		} else {
			r.sleeper.Wake()
		}
	}
	r.wakers.Add(-1)
	return ok
}
