package qp

import (
	"math/rand/v2"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// laneWith makes a lane that holds completions 0 to n-1, committed.
func laneWith(t *testing.T, depth, n int) (*CQ, *Env) {
	t.Helper()
	c, env := NewCQ(depth), &Env{}
	for i := range n {
		if !c.add(&verbs.WC{WRID: uint64(i)}, env) {
			t.Fatalf("no room for completion %d of %d", i, n)
		}
	}
	c.Commit()
	return c, env
}

func drainLane(c *CQ) (ids []uint64) {
	var wc [3]verbs.WC
	for n := c.Poll(wc[:]); n > 0; n = c.Poll(wc[:]) {
		for i := range n {
			ids = append(ids, wc[i].WRID)
		}
	}
	return ids
}

func inOrder(t *testing.T, ids []uint64, n int) {
	t.Helper()
	for i, id := range ids {
		if id != uint64(i) {
			t.Fatalf("completions %v, want 0 to %d", ids, n-1)
		}
	}
	if len(ids) != n {
		t.Fatalf("%d completions, want %d", len(ids), n)
	}
}

// F21: what is in a lane stays, in order; whoever sees the overrun sees all of it.
func TestLaneOverrun(t *testing.T) {
	for _, depth := range []int{1, 4, 5} {
		c, env := laneWith(t, depth, 0)
		n := c.Cap()
		for i := range n + 3 {
			if ok := c.add(&verbs.WC{WRID: uint64(i)}, env); ok != (i < n) {
				t.Fatalf("depth %d: add %d: %v", depth, i, ok)
			}
			if c.Overrun() || c.Full() != (i >= n) {
				t.Fatalf("depth %d, %d added: overrun visible before what the lane holds", depth, i+1)
			}
		}
		if !c.Commit() || !c.Overrun() {
			t.Errorf("depth %d: the overrun is not solicited or not visible", depth)
		}
		inOrder(t, drainLane(c), n)
		if c.add(&verbs.WC{}, env) {
			t.Errorf("depth %d: the lane takes completions after its overrun", depth)
		}
		if c.Resize(64) {
			t.Errorf("depth %d: resized after its overrun", depth)
		}
	}
	// Found full with nothing of its own to commit: the wire hears of it all the same.
	c, env := laneWith(t, 1, 1)
	env.Dirty = nil
	if c.add(&verbs.WC{}, env); len(env.Dirty) != 1 {
		t.Error("nobody commits the overrun")
	}
}

// Resizing keeps what is there, in order, and refuses less room than that.
func TestLaneResize(t *testing.T) {
	c, env := laneWith(t, 8, 6)
	before := c.ring.Load()
	if c.Resize(5) || c.Cap() != 8 {
		t.Error("shrunk below what it holds")
	}
	if !c.Resize(6) || c.Cap() != 8 || !c.Resize(100) || c.Cap() != 128 {
		t.Errorf("capacity %d", c.Cap())
	}
	if before.Empty() {
		t.Error("whoever still looks at the old ring takes the lane for empty")
	}
	for i := 6; i < 100; i++ {
		if !c.add(&verbs.WC{WRID: uint64(i)}, env) {
			t.Fatalf("no room for %d", i)
		}
	}
	c.Commit()
	if c.Resize(99) || !c.Resize(100) {
		t.Error("100 completions")
	}
	inOrder(t, drainLane(c), 100)
	if !c.Resize(1) || c.Cap() != 1 {
		t.Errorf("capacity %d, want 1", c.Cap())
	}
}

// Random adds, polls and sizes lose and disorder nothing.
func TestLaneResizeAtRandom(t *testing.T) {
	const seed = 4
	rnd := rand.New(rand.NewPCG(seed, 1))
	c, env := laneWith(t, 16, 0)
	added, polled := uint64(0), uint64(0)
	var wc [8]verbs.WC
	for step := range 50000 {
		switch rnd.IntN(4) {
		case 0, 1:
			if c.ring.Load().Free() > 0 {
				c.add(&verbs.WC{WRID: added}, env)
				added++
				c.Commit()
			}
		case 2:
			for _, w := range wc[:c.Poll(wc[:1+rnd.IntN(8)])] {
				if w.WRID != polled {
					t.Fatalf("seed %d, step %d: completion %d, want %d", seed, step, w.WRID, polled)
				}
				polled++
			}
		case 3:
			depth, held := 1+rnd.IntN(40), int(added-polled)
			if got := c.Resize(depth); got != (held <= depth) {
				t.Fatalf("seed %d, step %d: resize of %d to %d: %v", seed, step, held, depth, got)
			}
		}
	}
	if polled == 0 || added == polled {
		t.Errorf("%d added, %d polled", added, polled)
	}
}
