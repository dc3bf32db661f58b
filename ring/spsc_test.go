package ring

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// TestSPSCFull is F21: a ring that is full refuses, and what it holds stays as it was.
func TestSPSCFull(t *testing.T) {
	for _, capacity := range []int{1, 2, 4} {
		for _, start := range starts {
			r := newSPSC[entry](capacity, start)
			for i := range 2 * capacity {
				if got, want := r.Push(makeEntry(0, uint64(i))), i < capacity; got != want {
					t.Fatalf("capacity %d: Push %d = %v, want %v", capacity, i, got, want)
				}
			}
			if r.Reserve() != nil || r.Free() != 0 || r.Len() != capacity {
				t.Errorf("capacity %d: a full ring has Free %d, Len %d", capacity, r.Free(), r.Len())
			}
			for i := range capacity {
				e, ok := r.Pop()
				if err := e.check(); !ok || err != nil || e.seq != uint64(i) {
					t.Errorf("capacity %d: Pop %d = %d, %v, %v", capacity, i, e.seq, ok, err)
				}
			}
			if _, ok := r.Pop(); ok || !r.Empty() {
				t.Errorf("capacity %d: the drained ring is not empty", capacity)
			}
		}
	}
}

func TestSPSCCommit(t *testing.T) {
	r := newSPSC[int](4, 1<<64-3)
	for i := range 3 {
		*r.Reserve() = i
		if r.Peek() != nil || !r.Empty() || r.Len() != 0 {
			t.Fatal("a reserved slot is visible before Commit")
		}
	}
	if r.Pending() != 3 || r.Free() != 1 {
		t.Errorf("Pending %d, Free %d; want 3, 1", r.Pending(), r.Free())
	}
	r.Commit()
	r.Commit() // nothing more to do
	if r.Pending() != 0 || r.Len() != 3 {
		t.Errorf("after Commit: Pending %d, Len %d; want 0, 3", r.Pending(), r.Len())
	}
	if got := *r.PeekAt(2); got != 2 {
		t.Errorf("PeekAt(2) = %d", got)
	}
	if r.PeekAt(3) != nil {
		t.Error("PeekAt(3) of three entries is not nil")
	}
	r.Advance(2)
	if got := *r.Peek(); got != 2 {
		t.Errorf("after Advance(2) Peek is %d, want 2", got)
	}
	mustPanic(t, "Advance past the end", func() { r.Advance(2) })
	mustPanic(t, "Advance backwards", func() { r.Advance(-1) })
	*r.Reserve() = 3
	if !r.Push(4) || r.Pending() != 0 || r.Len() != 3 {
		t.Error("Push does not commit what was reserved before")
	}
}

func TestSPSCDropsPointers(t *testing.T) {
	r := newSPSC[*int](4, 2)
	held := func() (n int) {
		for _, p := range r.buf {
			if p != nil {
				n++
			}
		}
		return n
	}
	for range 4 {
		r.Push(new(int))
	}
	r.Pop()
	r.Advance(1)
	if held() != 2 {
		t.Errorf("after Pop and Advance the ring holds %d pointers, want 2", held())
	}
	r.PopBatch(make([]*int, 4))
	if held() != 0 {
		t.Errorf("after PopBatch the ring holds %d pointers", held())
	}
}

// TestSPSCStress is F72: entries arrive whole and in order whatever the interleaving, with
// a third goroutine looking on.
func TestSPSCStress(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		for _, capacity := range []int{1, 2, 4, 64} {
			for _, start := range starts[1:] {
				for _, batch := range []int{0, 1, 7} {
					t.Run(fmt.Sprintf("cap=%d/start=%d/batch=%d", capacity, start, batch), func(t *testing.T) {
						stressSPSC(t, capacity, start, batch)
					})
				}
			}
		}
	})
}

// stressSPSC sends entries through a ring: one by one with Push and Pop if batch is 0,
// else in batches of up to batch.
func stressSPSC(t *testing.T, capacity int, start uint64, batch int) {
	n := rounds(t, 4000)
	r := newSPSC[entry](capacity, start)
	var wg sync.WaitGroup
	var done atomic.Bool
	wg.Go(func() {
		if batch == 0 {
			producePush(r, n)
		} else {
			produceBatches(r, n, batch)
		}
	})
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
	if err := consumeSPSC(r, n, batch); err != nil {
		t.Error(err)
	}
}

func producePush(r *SPSC[entry], n int) {
	for i := 0; i < n; {
		if r.Push(makeEntry(0, uint64(i))) {
			i++
		} else {
			runtime.Gosched()
		}
	}
}

func produceBatches(r *SPSC[entry], n, batch int) {
	for i := 0; i < n; {
		for r.Pending() < batch && i < n {
			slot := r.Reserve()
			if slot == nil {
				break
			}
			*slot = makeEntry(0, uint64(i))
			i++
		}
		if r.Pending() == 0 {
			runtime.Gosched()
		}
		r.Commit()
	}
}

func consumeSPSC(r *SPSC[entry], n, batch int) (first error) {
	got := make([]entry, max(batch, 1))
	for i := 0; i < n; {
		k := 0
		switch {
		case batch == 0:
			var ok bool
			if got[0], ok = r.Pop(); ok {
				k = 1
			}
		case i%3 == 0:
			for k < batch {
				e := r.PeekAt(k)
				if e == nil {
					break
				}
				got[k] = *e
				k++
			}
			r.Advance(k)
		default:
			k = r.PopBatch(got)
		}
		if k == 0 {
			runtime.Gosched()
		}
		for j := range got[:k] {
			err := got[j].check()
			if err == nil && got[j].seq != uint64(i) {
				err = fmt.Errorf("got entry %d, want %d", got[j].seq, i)
			}
			if err != nil && first == nil {
				first = err // and drain the rest, so that the producer ends
			}
			i++
		}
	}
	return first
}
