package transport

import (
	"context"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/park"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// CQ is a completion queue, shared by any number of queue pairs. All methods may be called
// by any goroutine; completions of one queue pair come out in order.
//
// A completion queue must have room for everything that can complete before it is polled:
// one that overflows is in error for good, and its queue pairs with it.
type CQ struct {
	dev   *Device
	lanes []*qp.CQ // one for each of the device's wires
	bell  park.Bell

	mu   sync.Mutex // held while completions are taken out
	next int        // the lane to look at first

	// wires is the set of wires that may bring something: those of the queue pairs, or all while
	// there are none. on counts the queue pairs of each wire; written under mu.
	wires atomic.Uint32
	on    []int32

	users  atomic.Int32 // queue pairs
	closed atomic.Bool  // by Close, or with the device
	ended  atomic.Bool  // by Close
	erred  atomic.Bool  // CQ_ERR was raised
	notify notifier
	events atomic.Uint32
	num    uint32
}

// CreateCQ makes a completion queue for at least depth completions, 1 to 1<<22.
func (d *Device) CreateCQ(depth int) (*CQ, error) {
	if err := checkDepth(depth); err != nil {
		return nil, err
	}
	c := &CQ{dev: d, num: d.lastNum.Add(1), on: make([]int32, len(d.ports))}
	c.wires.Store(d.allWires())
	for range d.ports {
		lane := qp.NewCQ(depth)
		lane.Tag = c
		c.lanes = append(c.lanes, lane)
	}
	if !d.track(c) {
		return nil, ErrClosed
	}
	return c, nil
}

func checkDepth(depth int) error {
	if depth < 1 || depth > 1<<22 {
		return fmt.Errorf("transport: completion queue depth %d, want 1 to %d", depth, 1<<22)
	}
	return nil
}

// Num returns the queue's number, which events about it carry.
func (c *CQ) Num() uint32 { return c.num }

// Poll moves up to len(wc) completions into wc and returns how many. It never blocks: when
// there are none it drives the device by at most one bounded step and looks again. Polling
// is all it takes to make progress.
func (c *CQ) Poll(wc []verbs.WC) int {
	if n := c.take(wc); n > 0 || len(wc) == 0 {
		return n
	}
	c.drive()
	return c.take(wc)
}

// drive lets each wire that may bring something make one step, if nobody else drives it. The
// others are left alone: what they have to do is not what the caller waits for.
func (c *CQ) drive() {
	for set := c.wires.Load(); set != 0; set &= set - 1 {
		c.dev.ports[bits.TrailingZeros32(set)].drive()
	}
}

// attach counts a queue pair in, before it exists; detach counts it out.
func (c *CQ) attach(p *port) {
	c.users.Add(1)
	c.count(p, 1)
}

func (c *CQ) detach(p *port) {
	c.count(p, -1)
	c.users.Add(-1)
}

func (c *CQ) count(p *port, n int32) {
	if len(c.on) == 1 {
		return // the set does not change
	}
	c.mu.Lock()
	c.on[p.index] += n
	var set uint32
	for i, n := range c.on {
		if n > 0 {
			set |= 1 << i
		}
	}
	if set == 0 {
		set = c.dev.allWires()
	}
	changed := c.wires.Swap(set) != set
	c.mu.Unlock()
	if changed {
		c.stir() // who sleeps does so on behalf of the wires that there were
	}
}

// seat returns the socket that a waiter may sleep on: there is one if only one wire can bring
// anything.
func (c *CQ) seat() *watch {
	set := c.wires.Load()
	if set&(set-1) != 0 {
		return nil
	}
	return c.dev.ports[bits.TrailingZeros32(set)].watch
}

func (c *CQ) take(wc []verbs.WC) (n int) {
	if c.empty() {
		return 0
	}
	c.mu.Lock()
	for i := range c.lanes {
		lane := c.lanes[(c.next+i)%len(c.lanes)]
		n += lane.Poll(wc[n:])
		if n == len(wc) {
			break
		}
	}
	c.next++
	if c.next >= len(c.lanes) {
		c.next = 0
	}
	c.mu.Unlock()
	return n
}

func (c *CQ) empty() bool {
	for _, lane := range c.lanes {
		if !lane.Empty() {
			return false
		}
	}
	return true
}

func (c *CQ) overrun() bool {
	for _, lane := range c.lanes {
		if lane.Overrun() {
			return true
		}
	}
	return false
}

// Len returns the number of completions that are waiting.
func (c *CQ) Len() (n int) {
	for _, lane := range c.lanes {
		n += lane.Len()
	}
	return n
}

// Wait blocks until a completion is there, and takes none. It polls for Config.Spin and then
// sleeps. It returns ctx.Err() when ctx ends first, ErrClosed when the queue is closed, and
// ErrCQOverrun when the queue is empty and has lost a completion. A completion that is there
// wins over all of them.
func (c *CQ) Wait(ctx context.Context) error { return c.await(ctx, &c.bell, (*CQ).filled) }

func (c *CQ) filled() bool { return !c.empty() }

// await blocks until ready says so: what makes it so rings bell afterwards.
func (c *CQ) await(ctx context.Context, bell *park.Bell, ready func(*CQ) bool) error {
	for {
		if ready(c) {
			return nil
		}
		if err := c.stopped(ctx); err != nil {
			if err == ErrCQOverrun { //nolint:errorlint // our own sentinel, returned bare
				// The step that lost a completion may not have told of the others yet.
				c.dev.stepped()
			}
			if ready(c) {
				return nil // it came in between
			}
			return err
		}
		if c.dev.spin > 0 && c.spin(ctx, ready) {
			continue
		}
		if w := c.seat(); w != nil && w.wait(ctx, c, ready) {
			continue
		}
		// Armed first, looked at again after: what happens from now on rings.
		ticket := bell.Arm()
		if c.dev.spin > 0 {
			c.drive()
		}
		if ready(c) || c.stopped(ctx) != nil {
			bell.Disarm()
			continue
		}
		c.sleep(ctx, bell, ticket)
	}
}

// sleep parks until the bell rings or ctx ends; await finds out which.
func (c *CQ) sleep(ctx context.Context, bell *park.Bell, ticket park.Ticket) {
	// The wires' threads take over from us.
	set := c.wires.Load()
	c.dev.parkOn(set)
	defer c.dev.unparkOn(set)
	if c.dev.seats.TryTake() {
		defer c.dev.seats.Leave()
		_ = bell.SleepThread(ctx, ticket, -1)
		return
	}
	_ = bell.Sleep(ctx, ticket, -1)
}

// spin polls for a while; false when that found nothing.
func (c *CQ) spin(ctx context.Context, ready func(*CQ) bool) bool {
	if !park.TrySpin() {
		return false
	}
	defer park.EndSpin()
	done := ctx.Done()
	for start := time.Now(); ; {
		for range 32 {
			c.drive()
			if ready(c) {
				return true
			}
			park.Pause()
		}
		select {
		case <-done:
			return true
		default:
		}
		if c.closed.Load() || time.Since(start) >= c.dev.spin {
			return false
		}
	}
}

// stir has everyone who waits look at the condition again: for conditions that others change
// than the owner of the role.
func (c *CQ) stir() {
	c.bell.Ring()
	for _, p := range c.dev.ports {
		if w := p.watch; w != nil && w.cq.Load() == c {
			w.p.role.Nudge()
		}
	}
}

func (c *CQ) stopped(ctx context.Context) error {
	if c.closed.Load() {
		return ErrClosed
	}
	if c.overrun() {
		return ErrCQOverrun
	}
	return ctx.Err()
}

// Next waits for one completion and returns it; a completion in error comes with its status
// as the error. Errors without a completion are those of Wait.
func (c *CQ) Next(ctx context.Context) (verbs.WC, error) {
	var wc [1]verbs.WC
	for {
		// Wait drives if the device is to be driven by waiters; Poll would do so in any case.
		if c.take(wc[:]) == 1 {
			return wc[0], wc[0].Err()
		}
		if err := c.Wait(ctx); err != nil {
			return verbs.WC{}, err
		}
	}
}

// Cap returns how many completions the queue has room for; more than were asked for at times.
func (c *CQ) Cap() int { return c.lanes[0].Cap() }

// Resize gives the queue room for at least depth completions, 1 to 1<<22, while it is in use.
// What it holds stays, in order. It fails, changing nothing, when it holds more than depth, and
// with ErrCQOverrun when it has lost a completion already. Polls wait for it to finish.
func (c *CQ) Resize(depth int) error {
	if err := checkDepth(depth); err != nil {
		return err
	}
	// Consumers first, producers then: nobody who drives a wire waits for mu.
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return ErrClosed
	}
	if n := c.Len(); n > depth && len(c.lanes) > 1 {
		return tooFull(n, depth)
	}
	for i := range c.lanes {
		was := c.lanes[i].Cap()
		if err := c.resize(i, depth); err != nil {
			for i := range c.lanes[:i] {
				_ = c.resize(i, was) // they grow again, or have lost a completion since
			}
			return err
		}
	}
	return nil
}

func tooFull(n, depth int) error {
	return fmt.Errorf("transport: resize to %d: the completion queue holds %d", depth, n)
}

// resize resizes the lane of one wire.
func (c *CQ) resize(i, depth int) error {
	p, lane := c.dev.ports[i], c.lanes[i]
	return p.do(func() error {
		switch {
		case p.wire.ResizeCQ(c.dev.now(), lane, depth):
			return nil
		case lane.Full():
			return ErrCQOverrun
		}
		return tooFull(lane.Len(), depth)
	})
}

// Close ends the queue; waiters return ErrClosed and an event of it that nobody has read is
// dropped. It fails with ErrInUse while queue pairs use it.
func (c *CQ) Close() error {
	if c.users.Load() > 0 {
		return ErrInUse
	}
	c.shut()
	c.dev.untrack(c)
	if !c.ended.Swap(true) {
		c.dev.events.forget(c) // which counts what it drops: once for each object
	}
	return nil
}

// failed raises CQ_ERR, once, if the lane of the wire whose role the caller has has lost a
// completion; the other lanes take none any more. Waiters learn of it with the step's commit,
// once they have taken what is left.
func (c *CQ) failed(wire int) {
	if !c.lanes[wire].Full() || c.erred.Swap(true) {
		return
	}
	c.dev.events.raise(c, verbs.EventCQErr)
	if len(c.lanes) > 1 {
		go func() { // it waits for the other wires
			for i, lane := range c.lanes {
				_ = c.dev.ports[i].do(func() error { lane.Fail(); return nil }) // a closed wire completes nothing
			}
		}()
	}
}

func (c *CQ) pending() *atomic.Uint32 { return &c.events }

func (c *CQ) event(t verbs.EventType) verbs.Event { return verbs.Event{Type: t, CQN: c.num} }

func (c *CQ) shut() {
	c.closed.Store(true)
	c.stir()
	c.notify.bell.Ring()
}
