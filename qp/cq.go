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
	ring *ring.SPSC[verbs.WC]
	// Tag is the owner's to use: it leads from a lane to its completion queue.
	Tag any

	// overrun is set when a completion found no room; the lane then takes no more.
	overrun atomic.Bool

	// Owner of the wire only.

	dirty     bool // completions wait for Commit
	solicited bool // one of them is solicited or an error
	commits   uint64
	reported  bool // the overrun
}

// NewCQ makes a lane for at least depth completions.
func NewCQ(depth int) *CQ { return &CQ{ring: ring.NewSPSC[verbs.WC](depth)} }

// add appends a completion; false when the lane has no room, which is an overrun: entries
// already there stay intact, and nothing is ever added again (IBTA Vol 1, 11.6.3.2).
func (c *CQ) add(wc *verbs.WC, env *Env) bool {
	if c.overrun.Load() {
		return false
	}
	slot := c.ring.Reserve()
	if slot == nil {
		c.overrun.Store(true)
		return false
	}
	*slot = *wc
	if !c.dirty {
		c.dirty = true
		env.Dirty = append(env.Dirty, c)
	}
	if wc.Status != verbs.WCSuccess || wc.Flags&verbs.WithSolicited != 0 {
		c.solicited = true
	}
	return true
}

// Commit makes added completions visible and reports whether one of them was solicited or
// an error. Wire's owner only.
func (c *CQ) Commit() (solicited bool) {
	c.ring.Commit()
	solicited = c.solicited
	c.dirty, c.solicited = false, false
	c.commits++
	return solicited
}

// Poll moves up to len(wc) visible completions into wc, oldest first. Consumer only.
func (c *CQ) Poll(wc []verbs.WC) int { return c.ring.PopBatch(wc) }

// Empty reports whether no completion is visible. Any goroutine.
func (c *CQ) Empty() bool { return c.ring.Empty() }

// Len returns the number of visible completions. Any goroutine.
func (c *CQ) Len() int { return c.ring.Len() }

// Cap returns the lane's capacity.
func (c *CQ) Cap() int { return c.ring.Cap() }

// Overrun reports whether a completion was ever lost for want of room. Any goroutine.
func (c *CQ) Overrun() bool { return c.overrun.Load() }
