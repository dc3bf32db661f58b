package ring

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

func TestMPSCFull(t *testing.T) {
	for _, capacity := range []int{1, 2, 4} {
		for _, start := range starts {
			r := newMPSC[entry](capacity, start)
			for i := range 2 * capacity {
				if got, want := r.Push(makeEntry(0, uint64(i))), i < capacity; got != want {
					t.Fatalf("capacity %d: Push %d = %v, want %v", capacity, i, got, want)
				}
			}
			if r.Len() != capacity || r.PushBatch([]entry{{}}) != 0 {
				t.Errorf("capacity %d: a full ring has Len %d or takes a batch", capacity, r.Len())
			}
			for i := range capacity {
				e, ok := r.Pop()
				if err := e.check(); !ok || err != nil || e.seq != uint64(i) {
					t.Errorf("capacity %d: Pop %d = %d, %v, %v", capacity, i, e.seq, ok, err)
				}
			}
			if _, ok := r.Pop(); ok || !r.Empty() || r.Len() != 0 {
				t.Errorf("capacity %d: the drained ring is not empty", capacity)
			}
		}
	}
}

// TestMPSCGap: the consumer stops at a slot that is reserved and not published, and what
// lies behind it waits.
func TestMPSCGap(t *testing.T) {
	r := newMPSC[int](4, 1<<64-2)
	slow, _ := r.reserve(1)
	if !r.Push(2) {
		t.Fatal("no room")
	}
	if _, ok := r.Pop(); ok || r.Peek() != nil || r.PopBatch(make([]int, 4)) != 0 || !r.Empty() {
		t.Error("the consumer passed a slot that is not published")
	}
	if r.Len() != 2 {
		t.Errorf("Len = %d, want 2 slots in use", r.Len())
	}
	mustPanic(t, "Advance over a gap", func() { r.Advance(1) })
	r.buf[slow&r.mask] = 1
	r.slots.Publish(slow)
	if *r.Peek() != 1 || *r.PeekAt(1) != 2 || r.PeekAt(2) != nil || r.PeekAt(4) != nil {
		t.Error("Peek does not show what was published")
	}
	r.Advance(2)
	if !r.Empty() || r.Len() != 0 {
		t.Error("not empty")
	}
}

// TestMPSCOldRetired: the copy of retired that producers share may fall behind by any
// number of laps when one of them is slow to store it; it may cost a second look and never room.
func TestMPSCOldRetired(t *testing.T) {
	for _, start := range starts {
		r := newMPSC[int](2, start)
		for i := range 100 {
			r.Push(i)
			r.retiredSeen.Store(start)
			if i > 0 {
				if r.Push(-1) {
					t.Fatalf("start %d: pushed into a full ring", start)
				}
				if v, ok := r.Pop(); !ok || v != i-1 {
					t.Fatalf("start %d: Pop = %d, %v; want %d", start, v, ok, i-1)
				}
			}
			r.retiredSeen.Store(start)
		}
	}
}

func TestMPSCDropsPointers(t *testing.T) {
	r := newMPSC[string](4, 2)
	held := func() (n int) {
		for _, p := range r.buf {
			if p != "" {
				n++
			}
		}
		return n
	}
	r.PushBatch([]string{"a", "b", "c", "d"})
	r.Pop()
	r.Advance(1)
	if held() != 2 {
		t.Errorf("after Pop and Advance the ring holds %d strings, want 2", held())
	}
	r.PopBatch(make([]string, 4))
	if held() != 0 {
		t.Errorf("after PopBatch the ring holds %d strings", held())
	}
}

// TestMPSCStress is F72 with many producers: every entry arrives once and whole, each
// producer's in order.
func TestMPSCStress(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		for _, producers := range []int{1, 3, 8} {
			for _, capacity := range []int{1, 2, 4, 64} {
				for _, start := range starts[1:] {
					t.Run(fmt.Sprintf("producers=%d/cap=%d/start=%d", producers, capacity, start), func(t *testing.T) {
						stressMPSC(t, producers, capacity, start)
					})
				}
			}
		}
	})
}

func stressMPSC(t *testing.T, producers, capacity int, start uint64) {
	n := rounds(t, 4000/producers)
	r := newMPSC[entry](capacity, start)
	var wg sync.WaitGroup
	var done atomic.Bool
	for who := range producers {
		wg.Go(func() { produceMPSC(r, uint64(who), n) })
	}
	wg.Go(func() {
		for !done.Load() {
			if l := r.Len(); l < 0 || l > r.Cap() {
				t.Errorf("Len = %d, capacity %d", l, r.Cap())
				return
			}
			r.Empty()
			runtime.Gosched()
		}
	})
	defer wg.Wait()
	defer done.Store(true)
	if err := consumeMPSC(r, producers, n); err != nil {
		t.Error(err)
	}
}

// produceMPSC sends n entries, by turns alone and in batches of up to five.
func produceMPSC(r *MPSC[entry], who uint64, n int) {
	var batch [5]entry
	for i := 0; i < n; {
		k := 0
		if i%2 == 0 {
			some := batch[:min(len(batch), n-i)]
			for j := range some {
				some[j] = makeEntry(who, uint64(i+j))
			}
			k = r.PushBatch(some)
		} else if r.Push(makeEntry(who, uint64(i))) {
			k = 1
		}
		if k == 0 {
			runtime.Gosched()
		}
		i += k
	}
}

func consumeMPSC(r *MPSC[entry], producers, n int) (first error) {
	next := make([]uint64, producers)
	got := make([]entry, 3)
	for i := 0; i < producers*n; {
		k := 0
		if i%3 == 0 {
			if e := r.Peek(); e != nil {
				got[0], k = *e, 1
				r.Advance(1)
			}
		} else {
			k = r.PopBatch(got)
		}
		if k == 0 {
			runtime.Gosched()
		}
		for j := range got[:k] {
			e := &got[j]
			err := e.check()
			if err == nil && e.seq != next[e.who] {
				err = fmt.Errorf("got entry %d of producer %d, want %d", e.seq, e.who, next[e.who])
			}
			if err != nil {
				if first == nil {
					first = err
				}
			} else {
				next[e.who]++
			}
			i++
		}
	}
	return first
}

// TestMPSCBatchWhole: once the first entry of a batch can be seen, all of it can, and in a row.
func TestMPSCBatchWhole(t *testing.T) {
	const producers, size = 3, 4
	n := rounds(t, 8000)
	r := newMPSC[entry](4*size, 1<<64-3)
	var wg sync.WaitGroup
	for who := range uint64(producers) {
		wg.Go(func() {
			for i := 0; i < n; {
				var batch [size]entry
				for j := range batch {
					batch[j] = makeEntry(who, uint64(i*size+j))
				}
				switch k := r.PushBatch(batch[:]); k {
				case size:
					i++
				case 0:
					runtime.Gosched()
				default:
					// Slots are taken and given back in whole batches.
					t.Errorf("took %d of a batch of %d", k, size)
				}
			}
		})
	}
	defer wg.Wait()
	for range producers * n {
		for r.Peek() == nil {
			runtime.Gosched()
		}
		first := *r.Peek()
		for j := range size {
			e := r.PeekAt(j)
			if e == nil {
				t.Error("a batch is visible in part")
				for e == nil {
					e = r.PeekAt(j)
				}
			}
			if e.who != first.who || e.seq != first.seq+uint64(j) {
				t.Errorf("entry %d of producer %d lies inside the batch of %d that begins with %d", e.seq, e.who, first.who, first.seq)
			}
		}
		r.Advance(size)
	}
}

// TestEmptyIsTrue: a ring that always holds something is never found empty, however slow
// the one who looks: it may sleep on the answer.
func TestEmptyIsTrue(t *testing.T) {
	n := rounds(t, 40000)
	s, m := newSPSC[int](4, 1<<64-3), newMPSC[int](4, 1<<64-3)
	s.Push(0)
	m.Push(0)
	var wg sync.WaitGroup
	var done atomic.Bool
	wg.Go(func() {
		for !done.Load() {
			if s.Empty() || s.Len() == 0 {
				t.Error("an SPSC that holds entries says it is empty")
				return
			}
			if m.Empty() || m.Len() == 0 {
				t.Error("an MPSC that holds entries says it is empty")
				return
			}
		}
	})
	wg.Go(func() {
		for i := 1; i < n; {
			if s.Push(i) {
				for !m.Push(i) {
					runtime.Gosched()
				}
				i++
			} else {
				runtime.Gosched()
			}
		}
	})
	for i := 1; i < n; i++ {
		for s.PeekAt(1) == nil || m.PeekAt(1) == nil {
			runtime.Gosched()
		}
		s.Advance(1)
		m.Advance(1)
	}
	done.Store(true)
	wg.Wait()
}
