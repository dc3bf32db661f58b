package role

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// Word is the role word, {owned, pending, drives} in one atomic word:
//
//	63                                         2   1         0
//	+-------------------------------------------+---------+-------+
//	| drives: counted takes, never restarts     | pending | owned |
//	+-------------------------------------------+---------+-------+
//
// The zero Word is free. Any goroutine may call any method, but Leave and Drop only the
// owner. [Role] is what to use; the word is exported for its documentation and benchmarks.
type Word struct{ v atomic.Uint64 }

const (
	owned   = 1
	pending = 2
	drive   = 4 // one drive
)

// TryTake takes the role and counts a drive. When somebody owns it, it leaves a note
// instead and returns false: the owner will step once more before it goes.
func (w *Word) TryTake() bool { return w.take(true, drive) }

// TryTakeQuiet takes the role and counts a drive, or returns false and leaves no trace. For
// pollers, who leave nothing behind.
func (w *Word) TryTakeQuiet() bool { return w.take(false, drive) }

// TryBorrow is TryTakeQuiet without counting: for the thread, which would otherwise keep
// itself awake (and with notes would never let a looping owner go), and for a transmit from
// a post, which does not look at the socket and so does not replace the thread.
func (w *Word) TryBorrow() bool { return w.take(false, 0) }

// TryInsist is TryTake without counting: for commands.
func (w *Word) TryInsist() bool { return w.take(true, 0) }

func (w *Word) take(note bool, count uint64) bool {
	for {
		v := w.v.Load()
		yield.Point()
		switch {
		case v&owned == 0:
			if w.v.CompareAndSwap(v, v+count|owned) {
				return true
			}
		case !note || v&pending != 0:
			// A note that was there is as good as ours: the owner has yet to take it, and
			// will look after that.
			return false
		case w.v.CompareAndSwap(v, v|pending):
			return false
		}
	}
}

// Note leaves a note when the role is owned and reports whether it was. Unlike the Try
// methods it never takes the role.
func (w *Word) Note() bool {
	for {
		v := w.v.Load()
		yield.Point()
		switch {
		case v&owned == 0:
			return false
		case v&pending != 0 || w.v.CompareAndSwap(v, v|pending):
			return true
		}
	}
}

// Leave releases the role when no note was left. Otherwise it takes the note and returns
// false: the caller still owns the role, must look for work again and Leave again.
func (w *Word) Leave() bool {
	for {
		v := w.v.Load()
		if v&owned == 0 {
			panic("BUG: role: left by one who does not own it")
		}
		yield.Point()
		if v&pending != 0 {
			w.v.And(^uint64(pending)) // only the owner clears it
			return false
		}
		if w.v.CompareAndSwap(v, v&^owned) {
			return true
		}
	}
}

// Drop releases the role whether or not there is a note. The caller answers for the note:
// it has the thread look.
func (w *Word) Drop() {
	if w.v.And(^uint64(owned|pending))&owned == 0 {
		panic("BUG: role: dropped by one who does not own it")
	}
}

// Owned reports whether anybody owns the role at this moment.
func (w *Word) Owned() bool { return w.v.Load()&owned != 0 }

// Pending reports whether a note waits for the owner.
func (w *Word) Pending() bool { return w.v.Load()&pending != 0 }

// Drives returns how many drives were counted so far. Only whether it changed means anything.
func (w *Word) Drives() uint64 { return w.v.Load() / drive }
