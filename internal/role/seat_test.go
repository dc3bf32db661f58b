package role

import (
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// These tests have no thread and no second goroutine: what others do happens while the watcher
// asks or sleeps, and bed and cot are what the thread and the watcher would have left.

// stool is a Watcher that sleeps only in name: sleep is what happens meanwhile.
type stool struct {
	claims int // Claim less Sleep and Unclaim
	sleep  func(until verbs.Instant)
	wake   func()
	sleeps int
	wakes  int
}

func (s *stool) Claim(verbs.Instant) { s.claims++ }
func (s *stool) Unclaim()            { s.claims-- }

func (s *stool) Sleep(until verbs.Instant) {
	if s.claims != 1 {
		panic("slept without a claim, or with two")
	}
	s.claims--
	s.sleeps++
	if s.sleep != nil {
		s.sleep(until)
	}
}

func (s *stool) Wake() {
	s.wakes++
	if s.wake != nil {
		s.wake()
	}
}

func newSeat(t *testing.T) (*rig, *stool) {
	r, s := newRig(t, false), &stool{}
	r.SetWatcher(s)
	r.commands.running.Store(true)
	return r, s
}

func TestWhoWakesWatcher(t *testing.T) {
	const never = int64(verbs.Never)
	for _, c := range []struct {
		name     string
		cot, bed int64
		next     verbs.Instant
		do       func(r *rig)
		woken    int   // the watcher
		rested   int64 // cot afterwards
		left     int64 // bed afterwards
	}{
		{"ring, watched", never, dozing, verbs.Never, func(r *rig) { r.Ring(); r.Ring() }, 1, awake, dozing},
		{"ring, watched till soon", 5, dozing, verbs.Never, func(r *rig) { r.Ring() }, 1, awake, dozing},
		{"ring, the watcher is up", awake, dozing, verbs.Never, func(r *rig) { r.Ring() }, 0, awake, dozing},
		{"ring, the watcher is up and the thread asleep", awake, never, verbs.Never, func(r *rig) { r.Ring() }, 0, awake, awake},
		{"earlier deadline", 9, dozing, 8, func(r *rig) { r.Poll(1); r.Poll(1) }, 1, awake, dozing},
		{"same deadline", 8, dozing, 8, func(r *rig) { r.Poll(1) }, 0, 8, dozing},
		{"no budget", never, dozing, verbs.Never, func(r *rig) { r.w.endless = true; r.Poll(1) }, 1, awake, dozing},
		{"completed", 7, dozing, verbs.Never, func(r *rig) { r.Completed(); r.Completed() }, 1, awake, dozing},
		{"completed, the watcher is up", awake, never, verbs.Never, func(r *rig) { r.Completed() }, 0, awake, never},
		{"nudge", 7, dozing, verbs.Never, func(r *rig) { r.Nudge() }, 1, 7, dozing},
		{"nudge, the watcher is up", awake, dozing, verbs.Never, func(r *rig) { r.Nudge() }, 1, awake, dozing},
		{"nudge, nobody sits", awake, never, verbs.Never, func(r *rig) { r.Rise(); r.Nudge() }, 0, awake, never},
		{"rise, the thread dozes", awake, dozing, verbs.Never, func(r *rig) { r.Rise() }, 0, awake, awake},
		{"rise, the thread naps", awake, napping, verbs.Never, func(r *rig) { r.Rise() }, 0, awake, napping},
		{"rise from beside one who is parked", awake, napping, verbs.Never, func(r *rig) { r.Park(); r.Rise() }, 0, awake, summoned},
		{"rise from beside one, the thread dozes", awake, dozing, verbs.Never, func(r *rig) { r.Park(); r.Rise() }, 0, awake, summoned},
		{"park beside a watcher", never, dozing, verbs.Never, func(r *rig) { r.Park() }, 0, never, dozing},
		{"park, nobody sits", awake, napping, verbs.Never, func(r *rig) { r.Rise(); r.Park() }, 0, awake, summoned},
	} {
		r, s := newSeat(t)
		r.w.next = c.next
		if !r.Sit() {
			t.Fatal("no seat")
		}
		r.cot.Store(c.cot)
		r.bed.Store(c.bed)
		s.wake = func() {
			if r.wakers.Load() == 0 {
				t.Errorf("%s: Close does not wait for who wakes the watcher", c.name)
			}
		}
		c.do(r)
		if s.wakes != c.woken || r.cot.Load() != c.rested || r.bed.Load() != c.left {
			t.Errorf("%s: woken %d times, cot %d, bed %d; want %d, %d, %d", c.name, s.wakes, r.cot.Load(), r.bed.Load(), c.woken, c.rested, c.left)
		}
		if r.word.Owned() || r.wakers.Load() != 0 {
			t.Errorf("%s: the role was kept, or wakers %d", c.name, r.wakers.Load())
		}
	}
}

// What a watcher does from Sit to Rise, and what it leaves.
func TestWatch(t *testing.T) {
	type answers []bool // what done says, one after the other
	for _, c := range []struct {
		name          string
		before        func(r *rig)
		done          answers
		asked         func(r *rig, n int) // while done is asked for the nth time
		slept         func(r *rig)
		sleeps, steps int
		left          int64 // bed afterwards, before Rise
	}{
		{"done at once", nil, answers{true}, nil, nil, 0, 0, awake},
		{"nothing to do", nil, answers{false, true}, nil, nil, 1, 1, awake},
		{"a mark from before", func(r *rig) { r.w.mark.Store(true) }, answers{false, true}, nil, nil, 1, 2, awake},
		{"a command from before", func(r *rig) { r.leave(false) }, answers{false, true}, nil, nil, 1, 2, awake},
		{"the thread slept", func(r *rig) { r.bed.Store(int64(verbs.Never)) }, answers{false, true}, nil, nil, 1, 1, awake},
		{"the thread dozed", func(r *rig) { r.bed.Store(dozing) }, answers{false, true}, nil, nil, 1, 1, dozing},
		{"a note while it looks", nil, answers{false, true}, func(r *rig, n int) {
			if n == 1 {
				r.Ring()
			}
		}, nil, 0, 1, awake},
		{"a note at the end, the thread sleeps", func(r *rig) { r.bed.Store(int64(verbs.Never)) }, answers{true},
			func(r *rig, _ int) { r.Ring() }, nil, 0, 0, awake},
		{"work left at the end, the thread sleeps", func(r *rig) { r.bed.Store(int64(verbs.Never)); r.w.endless = true }, answers{true}, nil, nil, 0, 1, awake},
		{"a deadline at the end, the thread sleeps", func(r *rig) { r.bed.Store(9); r.w.next = 8 }, answers{true}, nil, nil, 0, 0, awake},
		{"woken in its sleep", nil, answers{false, false, true}, nil, func(r *rig) { r.Ring() }, 2, 2, awake},
	} {
		r, s := newSeat(t)
		s.sleep = func(until verbs.Instant) {
			if r.word.Owned() || r.cot.Load() != int64(until) {
				t.Errorf("%s: sleeps with the role, or without a word: cot %d, until %d", c.name, r.cot.Load(), until)
			}
			if c.slept != nil {
				c.slept(r)
			}
		}
		if c.before != nil {
			c.before(r)
		}
		if !r.Sit() {
			t.Fatal("no seat")
		}
		asked := 0
		over := r.Watch(func() bool {
			if !r.word.Owned() || r.cot.Load() != awake {
				t.Errorf("%s: asked without the role, or cot %d", c.name, r.cot.Load())
			}
			asked++
			if c.asked != nil {
				c.asked(r, asked)
			}
			return c.done[asked-1]
		})
		if !over || asked != len(c.done) || s.sleeps != c.sleeps || r.w.steps != c.steps {
			t.Errorf("%s: over %v, asked %d times, slept %d times, %d steps; want true, %d, %d, %d",
				c.name, over, asked, s.sleeps, r.w.steps, len(c.done), c.sleeps, c.steps)
		}
		if s.claims != 0 {
			t.Errorf("%s: %d claims left", c.name, s.claims)
		}
		if r.word.Owned() || r.word.Pending() || r.cot.Load() != awake || r.bed.Load() != c.left {
			t.Errorf("%s: left owned %v, note %v, cot %d, bed %d; want bed %d", c.name, r.word.Owned(), r.word.Pending(), r.cot.Load(), r.bed.Load(), c.left)
		}
	}
}

// leave puts a command into the list as one does who will not come back for it.
func (r *rig) leave(last bool) {
	if err := r.commands.push(&command{fn: func() {}, last: last, done: make(chan struct{})}); err != nil {
		r.t.Fatal(err)
	}
}

// A watcher that never gets the role gives the seat up; one that runs the last command keeps
// the role for ever, and who comes later finds out.
func TestWatchEnds(t *testing.T) {
	r, s := newSeat(t)
	r.word.TryTake()
	if !r.Sit() || r.Watch(func() bool { t.Error("asked without the role"); return true }) || s.sleeps != 0 {
		t.Fatal("watched without the role")
	}
	if r.word.Pending() {
		t.Error("a note from one who leaves nothing behind")
	}
	r.word.Leave()
	r.leave(true)
	if !r.Watch(func() bool { t.Error("asked after the last command"); return true }) || !r.word.Owned() || r.w.steps != 0 {
		t.Fatalf("the last command: owned %v, %d steps", r.word.Owned(), r.w.steps)
	}
	if !r.Watch(func() bool { t.Error("asked when closed"); return true }) {
		t.Error("gave up, but the role is closed")
	}
	r.Nudge() // Close's business now
	r.Rise()
	if r.Sit() {
		t.Error("a seat in a closed role")
	}
	if s.wakes != 0 {
		t.Error("woken in a closed role")
	}
}

// The thread dozes only while somebody sits whose Rise will find it dozing.
func TestDoze(t *testing.T) {
	for _, c := range []struct {
		name  string
		sit   bool
		bed   int64
		call  bool
		dozes uint64
	}{
		{"beside a watcher", true, awake, false, 1},
		{"the watcher has just risen", false, awake, false, 0},
		{"a waiter has called", true, summoned, true, 0},
		{"a waiter has called, and nobody sits", false, summoned, true, 0},
	} {
		r, _ := newSeat(t)
		r.bed.Store(c.bed)
		r.s.roused = true // so that a doze which should not be ends
		if c.sit && !r.Sit() {
			t.Fatal("no seat")
		}
		if call := r.doze(); call != c.call || r.Counters.Dozes.Load() != c.dozes || r.bed.Load() != awake {
			t.Errorf("%s: call %v, dozed %d times, bed %d; want %v, %d", c.name, call, r.Counters.Dozes.Load(), r.bed.Load(), c.call, c.dozes)
		}
	}
}

// Sit may take the seat for a moment when Close is through: nobody is to be woken then.
func TestNoNudgeAfterClose(t *testing.T) {
	r, s := newSeat(t)
	r.commands.running.Store(false)
	r.shut()
	r.seat.Store(true)
	r.Nudge()
	if s.wakes != 0 {
		t.Error("Nudge wakes the watcher though Close has returned")
	}
}
