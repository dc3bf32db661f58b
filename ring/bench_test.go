package ring

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
)

// wqe has the size of one cache line, like the entries these rings carry.
type wqe [8]uint64

// BenchmarkSPSC moves one entry an op between two goroutines, published one by one or in batches.
func BenchmarkSPSC(b *testing.B) {
	for _, batch := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("publish=%d", batch), func(b *testing.B) {
			r := NewSPSC[wqe](1024)
			b.ReportAllocs()
			var wg sync.WaitGroup
			n := b.N
			wg.Go(func() {
				for i := 0; i < n; {
					for r.Pending() < batch && i < n {
						slot := r.Reserve()
						if slot == nil {
							break
						}
						slot[0] = uint64(i)
						i++
					}
					if r.Pending() == 0 {
						pause()
					}
					r.Commit()
				}
			})
			var got [32]wqe
			for i := 0; i < n; {
				k := r.PopBatch(got[:batch])
				if k == 0 {
					pause()
				}
				i += k
			}
			wg.Wait()
		})
	}
}

// BenchmarkMPSC moves one entry an op from one of several producers. It is what a gated
// post is measured against: the same reservation without the gate's state.
func BenchmarkMPSC(b *testing.B) {
	for _, producers := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("producers=%d", producers), func(b *testing.B) {
			r := NewMPSC[wqe](1024)
			b.ReportAllocs()
			var wg sync.WaitGroup
			for who := range producers {
				n := b.N / producers
				if who == 0 {
					n += b.N % producers
				}
				wg.Go(func() {
					for i := 0; i < n; {
						if r.Push(wqe{uint64(i)}) {
							i++
						} else {
							runtime.Gosched()
						}
					}
				})
			}
			for i := 0; i < b.N; {
				if r.Peek() == nil {
					pause()
					continue
				}
				r.Advance(1)
				i++
			}
			wg.Wait()
		})
	}
}

// BenchmarkMPSCPush is a post and its retirement by one goroutine: what the instructions
// cost when no cache line moves.
func BenchmarkMPSCPush(b *testing.B) {
	r := NewMPSC[wqe](1024)
	b.ReportAllocs()
	for b.Loop() {
		r.Push(wqe{1})
		r.Advance(1)
	}
}

// BenchmarkSPSCPush is the same for one producer and one consumer in one goroutine.
func BenchmarkSPSCPush(b *testing.B) {
	r := NewSPSC[wqe](1024)
	b.ReportAllocs()
	for b.Loop() {
		r.Push(wqe{1})
		r.Advance(1)
	}
}

// TestNoAllocs: nothing allocates after construction.
func TestNoAllocs(t *testing.T) {
	s, m := NewSPSC[wqe](8), NewMPSC[wqe](8)
	var buf [8]wqe
	if n := testing.AllocsPerRun(1000, func() {
		s.Push(buf[0])
		s.Reserve()
		s.Commit()
		s.Peek()
		s.Advance(1)
		s.PopBatch(buf[:])
		m.Push(buf[0])
		m.PushBatch(buf[:3])
		m.Peek()
		m.Advance(1)
		m.Pop()
		m.PopBatch(buf[:])
	}); n != 0 {
		t.Errorf("%v allocations a round, want none", n)
	}
}

// pause is a spin hint with a safepoint, so that a spinning benchmark can be preempted.
//
//go:noinline
func pause() { nop() }

//go:noinline
func nop() {}
