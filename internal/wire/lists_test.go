package wire

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestTimersOrder checks the heap against a sorted list under random updates, removals and
// deadlines that move later.
func TestTimersOrder(t *testing.T) {
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, 1))
	var tm timers
	qs := make([]*QP, 500)
	for i := range qs {
		qs[i] = &QP{heapIndex: -1}
	}
	want := map[*QP]verbs.Instant{}
	for step := range 20000 {
		q := qs[rnd.IntN(len(qs))]
		switch rnd.IntN(4) {
		case 0, 1:
			at := verbs.Instant(rnd.IntN(1000))
			if old, ok := want[q]; !ok || at < old {
				want[q] = at // only earlier deadlines move an entry
			}
			tm.update(q, at)
		case 2:
			tm.remove(q)
			delete(want, q)
		case 3:
			now := verbs.Instant(rnd.IntN(1000))
			min := verbs.Never
			for _, at := range want {
				if at < min {
					min = at
				}
			}
			if tm.next() != min {
				t.Fatalf("seed %d, step %d: next %d, want %d", seed, step, tm.next(), min)
			}
			got := tm.pop(now)
			if (got != nil) != (min <= now) {
				t.Fatalf("seed %d, step %d: pop at %d gives %v, earliest is %d", seed, step, now, got, min)
			}
			if got != nil {
				if want[got] != min {
					t.Fatalf("seed %d, step %d: popped %d, earliest is %d", seed, step, want[got], min)
				}
				delete(want, got)
			}
		}
		for i, q := range tm.heap {
			if q.heapIndex != i {
				t.Fatalf("seed %d, step %d: index %d says %d", seed, step, i, q.heapIndex)
			}
		}
	}
	tm.update(qs[0], verbs.Never)
}

// TestReadyListLosesNothing: markers publish a number and push; the owner takes all, clears
// the mark and reads the number. After the last push the owner must have seen the last number.
func TestReadyListLosesNothing(t *testing.T) {
	for _, procs := range []int{1, 2, 4} {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
		var l readyList
		const posters, rounds = 3, 20000
		qs := make([]*QP, posters)
		var published [posters]atomic.Int64
		for i := range qs {
			qs[i] = &QP{Tag: i}
		}
		var wg sync.WaitGroup
		var running atomic.Int32
		running.Store(posters)
		for i := range posters {
			wg.Go(func() {
				defer running.Add(-1)
				for n := range rounds {
					published[i].Store(int64(n + 1))
					l.push(qs[i])
					if n%64 == 0 {
						runtime.Gosched()
					}
				}
			})
		}
		var seen [posters]int64
		for {
			last := running.Load() == 0
			for q := l.takeAll(); q != nil; {
				next := q.nextReady
				q.nextReady = nil
				q.marked.Store(false)
				seen[q.Tag.(int)] = published[q.Tag.(int)].Load()
				q = next
			}
			if last {
				break
			}
			runtime.Gosched()
		}
		wg.Wait()
		for i := range seen {
			if seen[i] != rounds {
				t.Errorf("GOMAXPROCS %d: poster %d's last mark was lost: saw %d of %d", procs, i, seen[i], rounds)
			}
		}
	}
}

func TestReadyListKeepsOrderAndMarksOnce(t *testing.T) {
	var l readyList
	qs := []*QP{{Tag: 0}, {Tag: 1}, {Tag: 2}}
	for _, q := range qs {
		if !l.push(q) || l.push(q) {
			t.Fatal("the first push must succeed, the second must not")
		}
	}
	var got []int
	for q := l.takeAll(); q != nil; q = q.nextReady {
		got = append(got, q.Tag.(int))
	}
	if !slices.Equal(got, []int{0, 1, 2}) || !l.empty() {
		t.Errorf("took %v", got)
	}
}

// TestExactDeadline: a deadline that has passed out of use, or later, is only seen by who looks
// whether it is still one.
func TestExactDeadline(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	connect(t, a, b, verbs.MTU1024)
	b.recv(t, 0, 64)
	a.send(t, 0, 64)
	a.w.Step(0)
	set := a.w.NextDeadline()
	if set == verbs.Never || a.w.ExactDeadline() != set {
		t.Fatalf("an unanswered request: %d, exactly %d", set, a.w.ExactDeadline())
	}
	for range 4 {
		b.w.Step(1)
		a.w.Step(2)
	}
	if got := a.w.NextDeadline(); got != set {
		t.Fatalf("answered: %d, want that of before, %d", got, set)
	}
	if got := a.w.ExactDeadline(); got != verbs.Never {
		t.Errorf("answered: exactly %d", got)
	}
	if got := a.w.NextDeadline(); got != verbs.Never {
		t.Errorf("looked at: %d", got)
	}
	b.recv(t, 0, 64)
	a.send(t, 0, 64)
	a.w.Step(1000)
	if got := a.w.NextDeadline(); got == verbs.Never || got != a.w.ExactDeadline() {
		t.Errorf("another request: %d, exactly %d", got, a.w.ExactDeadline())
	}
}
