package role

import (
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// A watcher that sleeps looks in the thread's place: packets, posts and deadlines have their
// effect, though the thread dozes. When it has risen, and nobody comes after it, the thread
// does again.
func TestWatcherComesAndGoes(t *testing.T) {
	atProcs(t, func(t *testing.T, r *rig) {
		rng := rand.New(rand.NewPCG(*seedFlag, 4))
		sent, got := int64(0), int64(0)
		event := func() {
			switch rng.IntN(3) {
			case 0:
				r.s.deliver()
				got++
			case 1:
				r.post(rng.IntN(3))
				sent++
			case 2:
				r.s.advance(min(verbs.Instant(r.w.due.Load()), r.s.clock()+10))
			}
		}
		done := func() bool {
			return r.w.sent.Load() == sent && r.w.got.Load() == got && verbs.Instant(r.w.due.Load()) > r.s.clock()
		}
		for range rounds() {
			var over atomic.Bool
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				if r.Sit() {
					r.Watch(over.Load)
					r.Rise()
				}
			}()
			if rng.IntN(2) == 0 {
				r.until("watcher and thread to rest", func() bool { return r.rest(false) })
			}
			for range rng.IntN(3) {
				event()
				r.until("what happens while somebody watches", done)
			}
			over.Store(true)
			r.Nudge()
			for range rng.IntN(8) {
				runtime.Gosched()
			}
			event()
			r.until("what happens when the watcher goes", done)
			<-gone
			event()
			r.until("what happens when nobody watches", done)
		}
		if r.Counters.Watches.Load() == 0 || r.Counters.Dozes.Load() == 0 {
			t.Error("nobody watched, or the thread did not doze")
		}
	})
}

// Two at a time have no seat, and for a while nobody has after they met.
func TestOneWatches(t *testing.T) {
	r := newRig(t, false).run()
	if !r.Sit() || r.Sit() {
		t.Fatal("no seat, or two")
	}
	r.Park()
	r.Rise()
	if r.Sit() {
		t.Fatal("a seat beside a parked waiter, whom the thread would have to wake")
	}
	r.Unpark()
	n := 0
	for !r.Sit() {
		n++
	}
	if n != shyness {
		t.Errorf("refused %d times after two had met, want %d", n, shyness)
	}
	r.Rise()
}

// Closing ends a watch, and waits for its end.
func TestCloseEndsWatch(t *testing.T) {
	for i := range 200 {
		r := newRig(t, false).run()
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			for over := false; !over && r.Sit(); r.Rise() {
				over = r.Watch(func() bool { return false }) // or it gave up
			}
		}()
		if i%2 == 0 {
			r.until("the watcher to sleep", r.s.chair.asleep)
		}
		runtime.Gosched()
		var shut atomic.Bool
		go func() {
			r.shut()
			shut.Store(true)
		}()
		r.until("Close to return", shut.Load)
		if i%2 == 0 && r.seat.Load() {
			t.Fatal("Close has returned, and a watcher sits")
		}
		<-gone
		if r.Sit() {
			t.Fatal("a seat in a closed role")
		}
	}
}
