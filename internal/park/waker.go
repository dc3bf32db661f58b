package park

import (
	"runtime"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// Waker wakes the channel sleepers of bells on behalf of locked threads. A device has one;
// make it with NewWaker and end it with Close. It is one ordinary goroutine, started by the
// first ring that needs it.
type Waker struct {
	// list holds the bells to ring, newest first, linked by Bell.next.
	list   atomic.Pointer[Bell]
	state  atomic.Uint32 // wakerIdle, wakerRunning, wakerClosed
	parker ThreadParker
	done   chan struct{} // closed when the goroutine has ended, or will never be
}

const (
	wakerIdle uint32 = iota
	wakerRunning
	wakerClosed
)

// NewWaker makes a Waker.
func NewWaker() *Waker { return &Waker{done: make(chan struct{})} }

// wake has the channel sleepers of b woken soon. It never blocks; any thread.
func (w *Waker) wake(b *Bell) {
	if !b.queued.CompareAndSwap(false, true) {
		return // on the list of a waker that has not begun with it: it will see our sleepers
	}
	for {
		b.next = w.list.Load()
		yield.Point()
		if w.list.CompareAndSwap(b.next, b) {
			break
		}
	}
	yield.Point()
	switch w.state.Load() {
	case wakerRunning:
		w.parker.Wake()
	case wakerClosed:
		w.drain() // nobody else will
	default:
		if w.state.CompareAndSwap(wakerIdle, wakerRunning) {
			go w.run()
		} else {
			w.parker.Wake()
			if w.state.Load() == wakerClosed {
				w.drain()
			}
		}
	}
}

// run is the goroutine.
func (w *Waker) run() {
	defer close(w.done)
	for {
		// Read before the list: once it says closed, whoever adds to the list after us sees
		// that too and drains the list itself.
		closed := w.state.Load() == wakerClosed
		yield.Point()
		if w.drain() {
			// Those woken stand in line for this processor: let them run on it rather
			// than take it to sleep, where it would be missed until the runtime notices.
			runtime.Gosched()
			continue
		}
		if closed {
			return
		}
		w.parker.Arm()
		if w.list.Load() == nil && w.state.Load() != wakerClosed {
			w.parker.Sleep(-1)
		} else {
			w.parker.Disarm()
		}
	}
}

// drain rings every bell on the list and reports whether there was one. A bell may be
// queued again before its sleepers are woken; they are then woken by whoever comes first.
func (w *Waker) drain() bool {
	b := w.list.Swap(nil)
	if b == nil {
		return false
	}
	for b != nil {
		next := b.next
		b.next = nil
		b.queued.Store(false)
		yield.Point()
		b.wakeParked()
		b = next
	}
	return true
}

// Close ends the goroutine and waits for it. Bells rung before and after are still rung:
// the latter by the ringer itself. Not on a locked thread.
func (w *Waker) Close() {
	switch w.state.Swap(wakerClosed) {
	case wakerIdle:
		close(w.done)
	case wakerRunning:
		w.parker.Wake()
	}
	<-w.done
}
