package transport

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// watch is the seat on a port's socket that a waiter may take instead of parking: a packet then
// wakes the waiter itself, which saves one wake-up in two. Who sits owns the fields, but for
// cq, which owners of the role read.
type watch struct {
	p    *port
	poll *udp.Poller
	cq   atomic.Pointer[CQ] // whose completions wake the one who sits

	claimed bool // Sleep is to receive by itself
	idle    bool // the last such sleep was in vain: the next ones of this wait are to be long
	shy     int  // how many sleeps are to leave the packets to others

	ctx   context.Context
	ready func(*CQ) bool
	done  func() bool // made once, so that a wait allocates nothing

	// heard is the context that nudges when it ends, and unhear takes that back. It is kept
	// from wait to wait, since most programs wait with the same one.
	heard  <-chan struct{}
	unhear func() bool
}

func newWatch(p *port) (*watch, error) {
	poll, err := udp.NewPoller(p.sock)
	if err != nil {
		return nil, err
	}
	w := &watch{p: p, poll: poll}
	w.done = func() bool {
		c := w.cq.Load()
		return w.ready(c) || c.stopped(w.ctx) != nil || c.seat() != w
	}
	p.role.SetWatcher(w)
	return w, nil
}

const (
	// claimLeast is how far away a deadline must be to sleep in the receiving call, which may
	// oversleep it by some milliseconds, as the thread's nap may: shorter than the shortest
	// retransmission timeout.
	claimLeast = 2 * time.Millisecond
	// others is how many looks at the socket there may be during such a sleep before the watcher
	// takes them for a poller's, whose packets it must not keep; and then for shySleeps sleeps.
	// The thread's are fewer.
	others    = 8
	shySleeps = 1024
)

// Claim and what follows is the role's.
func (w *watch) Claim(until verbs.Instant) {
	if w.shy > 0 {
		w.shy--
		return
	}
	if w.idle || w.p.dev.wires() > 1 {
		return
	}
	if until != verbs.Never {
		least := w.p.dev.now() + verbs.Instant(claimLeast)
		if until < least && w.p.wire.ExactDeadline() < least {
			return
		}
	}
	w.claimed = w.poll.Claim()
}

// Unclaim: see Claim.
func (w *watch) Unclaim() {
	if w.claimed {
		w.claimed = false
		w.poll.Unclaim()
	}
}

// Sleep receives by itself what it has claimed, and else sleeps until there is something.
func (w *watch) Sleep(until verbs.Instant) {
	if !w.claimed {
		w.p.sleep(w.poll, udp.Readable, until)
		return
	}
	w.claimed = false
	w.slept(w.poll.Await())
}

// slept draws the conclusions from a sleep: see Poller.Await.
func (w *watch) slept(idle bool, missed int) {
	w.idle = idle
	if missed > others {
		w.shy = shySleeps
	}
}

// Wake: see Sleep.
func (w *watch) Wake() { w.poll.Kick() }

// wait sleeps on the socket until c is ready or stopped. It is false when somebody else does,
// or when it had to give up: then the caller parks.
func (w *watch) wait(ctx context.Context, c *CQ, ready func(*CQ) bool) bool {
	r := w.p.role
	if !r.Sit() {
		return false
	}
	w.ctx, w.ready, w.idle = ctx, ready, false
	w.cq.Store(c)
	w.hear(ctx)
	ok := r.Watch(w.done)
	w.cq.Store(nil)
	w.ctx, w.ready = nil, nil
	r.Rise()
	return ok
}

func (w *watch) hear(ctx context.Context) {
	done := ctx.Done()
	if done == w.heard {
		return
	}
	if w.unhear != nil {
		w.unhear()
		w.unhear = nil
	}
	if w.heard = done; done != nil {
		w.unhear = context.AfterFunc(ctx, w.p.role.Nudge)
	}
}

// completed is told that c has something new, by the owner of the role.
func (w *watch) completed(c *CQ) {
	if w.cq.Load() == c {
		w.p.role.Completed()
	}
}

// close comes after the role's.
func (w *watch) close() error {
	if w.unhear != nil {
		w.unhear()
	}
	return w.poll.Close()
}
