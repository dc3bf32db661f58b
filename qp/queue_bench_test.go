package qp

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/ring"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// What the deferred doorbell costs. BenchmarkPostRTR against BenchmarkPostRTS is the price of
// deferral at the post, BenchmarkPublish4096 against BenchmarkPublish1 that of the move to
// RTS, BenchmarkPostRTS against BenchmarkPostNoGate that of the gate itself: the state in the
// queue word and the re-check. The wire stands still while posts are timed.

// benchDepth is the depth of the queues posted to: 256 entries stay in the nearest caches.
const benchDepth = 256

// benchPost times posts of one request. A full queue is emptied in one step, which is in the
// time of every 256th post.
func benchPost(b *testing.B, state verbs.QPState) {
	q, _ := newSQ(benchDepth, 0)
	if state == verbs.QPRTS {
		q.move(verbs.QPRTS)
	}
	wr := sends(1)
	rings := 0
	post := func() {
		_, ring, err := q.Post(wr)
		if err != nil {
			b.Fatal(err)
		}
		if ring {
			rings++
		}
	}
	for range benchDepth { // touch the memory
		post()
	}
	emptyBench(&q.gate)
	b.ReportAllocs()
	left := benchDepth
	for b.Loop() {
		post()
		if left--; left == 0 {
			left = benchDepth
			emptyBench(&q.gate)
		}
	}
	if (rings != 0) != (state == verbs.QPRTS) {
		b.Fatalf("%d posts in %v rang", rings, state)
	}
}

// emptyBench takes and retires everything, whatever the state.
func emptyBench(g *gate) {
	n := g.ctl.Load()>>stateBits - g.taken
	g.taken += n
	g.free(n)
}

func BenchmarkPostRTS(b *testing.B) { benchPost(b, verbs.QPRTS) }
func BenchmarkPostRTR(b *testing.B) { benchPost(b, verbs.QPRTR) }

// ungated is SendQueue without a gate: the same ring, checks and entries, with a reservation
// word that holds nothing but the count, and no look at any state.
type ungated struct {
	SendQueue
	_        [128]byte
	reserved atomic.Uint64
}

// post is kept like SendQueue.Post, what belongs to the gate excepted.
//
//go:noinline
func (q *ungated) post(wrs []verbs.SendWR) (n int, ring bool, err error) {
	valid := 0
	for valid < len(wrs) {
		if err = q.check(&wrs[valid]); err != nil {
			break
		}
		valid++
	}
	if valid == 0 {
		return 0, false, err
	}
	pos, took, full := q.reserveUngated(uint64(valid))
	if full != nil {
		return 0, false, full
	}
	for i := range took {
		q.write(pos+i, &wrs[i])
	}
	q.publish(pos, took)
	if int(took) < valid {
		err = verbs.ErrQueueFull
	}
	return int(took), true, err
}

//go:noinline
func (q *ungated) reserveUngated(n uint64) (pos, took uint64, err error) {
	for {
		pos = q.reserved.Load()
		took = min(n, q.depth-(pos-q.retired.Load()))
		if took == 0 {
			return 0, 0, verbs.ErrQueueFull
		}
		if q.reserved.CompareAndSwap(pos, pos+took) {
			return pos, took, nil
		}
	}
}

func BenchmarkPostNoGate(b *testing.B) {
	sq, _ := newSQ(benchDepth, 0)
	q := &ungated{}
	q.slots, q.depth, q.mask = ring.NewSlots(benchDepth), sq.depth, sq.mask
	q.wqes, q.sges, q.inline = sq.wqes, sq.sges, sq.inline
	q.maxSGE, q.maxInline, q.mem, q.pd, q.ops, q.mtu = sq.maxSGE, sq.maxInline, sq.mem, sq.pd, sq.ops, sq.mtu
	wr := sends(1)
	rings := 0
	post := func() {
		_, ring, err := q.post(wr)
		if err != nil {
			b.Fatal(err)
		}
		if ring {
			rings++
		}
	}
	for range benchDepth {
		post()
	}
	q.free(benchDepth)
	b.ReportAllocs()
	left := benchDepth
	for b.Loop() {
		post()
		if left--; left == 0 {
			left = benchDepth
			q.free(benchDepth)
		}
	}
	if rings == 0 {
		b.Fatal("no post rang")
	}
}

// benchPublish times a step of the owner that opens the gate for n entries, or closes it
// again: the two take turns, for entries that nobody has looked at can be published again.
func benchPublish(b *testing.B, n int) {
	q, _ := newSQ(n, 0)
	mustPost(b, q, false, make([]uint64, n)...)
	open := false
	b.ReportAllocs()
	for b.Loop() {
		to := verbs.QPRTS
		if open {
			to = verbs.QPRTR
		}
		open = !open
		if got := q.move(to); got != uint64(n) {
			b.Fatalf("published %d, want %d", got, n)
		}
		if _, fate := q.next(); (fate == FateSend) != open {
			b.Fatalf("%v after the move to %v", fate, to)
		}
	}
}

func BenchmarkPublish1(b *testing.B)    { benchPublish(b, 1) }
func BenchmarkPublish64(b *testing.B)   { benchPublish(b, 64) }
func BenchmarkPublish4096(b *testing.B) { benchPublish(b, 4096) }

// BenchmarkPostParallel has several goroutines post into one queue in RTS while its owner
// takes and retires: the price of sharing.
func BenchmarkPostParallel(b *testing.B) {
	for _, chain := range []int{1, 16} {
		b.Run(fmt.Sprintf("chain=%d", chain), func(b *testing.B) {
			q, _ := newSQ(benchDepth, 0)
			q.move(verbs.QPRTS)
			var stop atomic.Bool
			done := make(chan struct{})
			go func() {
				defer close(done)
				for !stop.Load() {
					n := uint64(0)
					for q.readable() {
						q.take()
						n++
					}
					if n == 0 {
						runtime.Gosched()
					}
					q.retire(n)
				}
			}()
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				wrs := sends(make([]uint64, chain)...)
				for pb.Next() {
					for n := 0; n < chain; {
						took, _, _ := q.Post(wrs[n:])
						if n += took; took == 0 {
							runtime.Gosched()
						}
					}
				}
			})
			stop.Store(true)
			<-done
		})
	}
}
