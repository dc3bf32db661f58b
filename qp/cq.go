package qp

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/ring"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// CQ is one wire's lane of a completion queue: its producer is the wire's owner, its
// consumer whoever holds the completion queue's consumer lock. Completions that queue
// pairs add stay invisible until the wire commits them, once a step and after the step's
// events are out.
type CQ struct {
	// ring is replaced by Resize, when nobody adds or polls; others may still look at the old
	// one, which keeps what it holds.
	ring atomic.Pointer[ring.SPSC[verbs.WC]]
	// Tag is the owner's to use: it leads from a lane to its completion queue.
	Tag any

	// overrun says that a completion found no room. It is visible no earlier than what the
	// lane still took: who sees it and an empty lane has them all.
	overrun atomic.Bool

	// Owner of the wire only.

	dirty     bool // completions, or overrun, wait for Commit
	full      bool // a completion found no room; the lane takes no more
	solicited bool // one of them is solicited or an error
	commits   uint64
	reported  bool // the overrun
}

// NewCQ makes a lane for at least depth completions.
func NewCQ(depth int) *CQ {
	c := &CQ{}
	c.ring.Store(ring.NewSPSC[verbs.WC](depth))
	return c
}

// add appends a completion; false when the lane has no room, which is an overrun: entries
// already there stay intact, and nothing is ever added again (IBTA Vol 1, 11.6.3.2).
func (c *CQ) add(wc *verbs.WC, env *Env) bool {
	if c.full {
		return false
	}
	if !c.dirty {
		c.dirty = true
		env.Dirty = append(env.Dirty, c)
	}
	slot := c.ring.Load().Reserve()
	if slot == nil {
		c.full, c.solicited = true, true
		return false
	}
	*slot = *wc
	if wc.Status != verbs.WCSuccess || wc.Flags&verbs.WithSolicited != 0 {
		c.solicited = true
	}
	return true
}

// Commit makes added completions visible and reports whether one of them was solicited or
// an error. Wire's owner only.
func (c *CQ) Commit() (solicited bool) {
	c.ring.Load().Commit()
	if c.full {
		c.overrun.Store(true)
	}
	solicited = c.solicited
	c.dirty, c.solicited = false, false
	c.commits++
	return solicited
}

// Poll moves up to len(wc) visible completions into wc, oldest first. Consumer only.
func (c *CQ) Poll(wc []verbs.WC) int { return c.ring.Load().PopBatch(wc) }

// Empty reports whether no completion is visible. Any goroutine.
func (c *CQ) Empty() bool { return c.ring.Load().Empty() }

// Len returns the number of visible completions. Any goroutine.
func (c *CQ) Len() int { return c.ring.Load().Len() }

// Cap returns the lane's capacity.
func (c *CQ) Cap() int { return c.ring.Load().Cap() }

// Overrun reports whether a completion was ever lost for want of room; those before it are
// visible. Any goroutine.
func (c *CQ) Overrun() bool { return c.overrun.Load() }

// Full is Overrun as the wire's owner knows it, who knows it first.
func (c *CQ) Full() bool { return c.full }

// Fail makes the lane take no more, because another lane of its completion queue has lost a
// completion: the queue pairs fail with their next. The wire's owner calls it.
func (c *CQ) Fail() { c.full = true }

// Resize gives the lane room for at least depth completions, keeping those it holds and their
// order. It returns false, and changes nothing, when it holds more than depth, or has lost
// one. The wire's owner calls it with nothing waiting for Commit and while nobody polls.
func (c *CQ) Resize(depth int) bool {
	if c.dirty {
		panic("BUG: qp: a lane resized before its commit")
	}
	old := c.ring.Load()
	n := old.Len()
	if n > depth || c.full {
		return false
	}
	r := ring.NewSPSC[verbs.WC](depth)
	for i := range n {
		*r.Reserve() = *old.PeekAt(i)
	}
	r.Commit()
	c.ring.Store(r)
	return true
}
