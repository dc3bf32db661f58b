package qp

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// postIDs posts receives with these numbers and returns how many were taken.
func postIDs(s *SRQ, first, n uint64) (int, error) {
	wrs := make([]verbs.RecvWR, n)
	for i := range wrs {
		id := first + uint64(i)
		wrs[i] = verbs.RecvWR{WRID: id, SGList: []verbs.SGE{{Addr: id, Length: uint32(id)}, {Addr: ^id, Length: 1}}[:1+id%2]}
	}
	return s.Post(wrs)
}

// takeID takes the oldest receive, which must be whole.
func takeID(t rapid.TB, s *SRQ) (id uint64, ok bool) {
	t.Helper()
	var w RecvWQE
	var sges [2]verbs.SGE
	if !s.take(&w, sges[:]) {
		return 0, false
	}
	id = w.WRID
	if w.NumSGE != uint8(1+id%2) || sges[0].Addr != id || w.Length != uint64(uint32(id))+id%2 || id%2 == 1 && sges[1].Addr != ^id {
		t.Fatalf("receive %#x is torn: %+v %+v", id, w, sges)
	}
	return id, true
}

// Resize: what it grants, what it refuses, and that a refusal changes nothing.
func TestSRQResize(t *testing.T) {
	for _, tc := range []struct {
		name               string
		depth, held, limit int
		to                 int
		want               error
		wantDepth          int
	}{
		{"grow", 4, 4, 0, 16, nil, 16},
		{"round up", 4, 0, 0, 17, nil, 32},
		{"shrink", 16, 3, 0, 4, nil, 4},
		{"shrink to what is held", 16, 4, 0, 4, nil, 4},
		{"to less than is held", 16, 5, 0, 4, verbs.ErrQueueFull, 16},
		{"to one", 16, 1, 0, 1, nil, 1},
		{"the same", 16, 16, 0, 16, nil, 16},
		{"the same, rounded up", 16, 16, 0, 9, nil, 16},
		{"to the limit", 16, 8, 4, 4, verbs.ErrQueueFull, 16},
		{"to the limit when it fits", 16, 4, 4, 4, nil, 4},
		{"below the limit", 16, 8, 8, 4, verbs.ErrBadAttr, 16},
		{"none", 16, 0, 0, 0, verbs.ErrBadAttr, 16},
		{"less than none", 16, 0, 0, -1, verbs.ErrBadAttr, 16},
		{"the largest", 16, 16, 0, 1 << 16, nil, 1 << 16},
		{"more than the largest", 16, 0, 0, 1<<16 + 1, verbs.ErrBadAttr, 16},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := testSRQ(t, tc.depth)
			if n, err := postIDs(s, 100, uint64(tc.held)); n != tc.held || err != nil {
				t.Fatal(n, err)
			}
			if s.SetLimit(tc.limit) {
				t.Fatal("low already")
			}
			if err := s.Resize(tc.to); !errors.Is(err, tc.want) {
				t.Fatalf("%v, want %v", err, tc.want)
			}
			if s.Depth() != tc.wantDepth || s.Len() != tc.held || s.limit.Load() != int64(tc.limit) || s.MaxSGE() != 2 {
				t.Errorf("depth %d, %d held, limit %d", s.Depth(), s.Len(), s.limit.Load())
			}
			if tc.wantDepth > 1024 {
				return
			}
			// As much room as there should be, and everything in order.
			room := tc.wantDepth - tc.held
			if n, err := postIDs(s, uint64(100+tc.held), uint64(room+1)); n != room || !errors.Is(err, verbs.ErrQueueFull) {
				t.Fatalf("posted %d: %v, want %d", n, err, room)
			}
			for i := range tc.wantDepth {
				if id, ok := takeID(t, s); !ok || id != uint64(100+i) {
					t.Fatalf("take %d: %d, %v", i, id, ok)
				}
			}
			if id, ok := takeID(t, s); ok || s.Len() != 0 {
				t.Errorf("took %d of an empty queue, %d held", id, s.Len())
			}
		})
	}
}

// The chain of rings is bounded, and a ring that was drained is let go of by whoever comes by.
func TestSRQResizeBound(t *testing.T) {
	s := testSRQ(t, 32)
	resize := func(i int) error { return s.Resize(32 << (1 - i%2)) }
	post := func(id uint64) {
		t.Helper()
		if n, err := postIDs(s, id, 1); n != 1 {
			t.Fatal(err)
		}
	}
	post(0)
	for i := range srqRings - 1 {
		if err := resize(i); err != nil {
			t.Fatalf("resize %d: %v", i, err)
		}
		post(uint64(i + 1))
	}
	depth := s.Depth()
	if err := resize(srqRings - 1); !errors.Is(err, ErrResizes) || s.Depth() != depth || s.Len() != srqRings {
		t.Fatalf("%v, depth %d, %d held", err, s.Depth(), s.Len())
	}
	for i := range srqRings {
		if id, ok := takeID(t, s); !ok || id != uint64(i) {
			t.Fatalf("take %d: %d, %v", i, id, ok)
		}
		if err := resize(srqRings - 1 + i); err != nil {
			t.Fatalf("after %d takes: %v", i+1, err)
		}
	}
	// Without any takes, too, when there is nothing to take.
	for i := range 3 * srqRings {
		if err := resize(i); err != nil {
			t.Fatalf("resize %d of an empty queue: %v", i, err)
		}
	}
	if s.head.Load().next.Load() != s.tail.Load() && s.head.Load() != s.tail.Load() {
		t.Error("drained rings are kept")
	}
}

// A resize under the messages of queue pairs, with one half received.
func TestSRQResizeUnderMessages(t *testing.T) {
	s := testSRQ(t, 2)
	ps := sharing(t, s, 2, options{rnrRetry: 7, rnrTimer: 1})
	supply(t, s, 1, 0, 4096)
	supply(t, s, 2, 4096, 4096)
	long := ps[0]
	fill(long.a.send.buf[:4000], 1)
	long.post(long.a, sendWR(verbs.Send, 1, 0, 4000))
	long.pump(long.a)
	out := long.a.take()
	long.deliver(long.b, out[:2]...)
	if err := s.Resize(8); err != nil { // 2 lies in the old ring
		t.Fatal(err)
	}
	supply(t, s, 3, 8192, 4096) // in the new one
	for _, want := range []string{"2:RECV", "3:RECV"} {
		ps[1].post(ps[1].a, sendWR(verbs.Send, 1, 0, 100))
		ps[1].run()
		ps[1].wantWCs(ps[1].b, want)
	}
	if err := s.Resize(1); err != nil { // 1 is the queue pair's, not the queue's
		t.Fatal(err)
	}
	long.deliver(long.b, out[2:]...)
	long.run()
	long.wantWCs(long.b, "1:RECV")
	if !matches(long.b.recv.buf[:4000], 1) {
		t.Error("message changed")
	}
}

// The limit counts what all rings hold: one event, at the right moment, whichever way the queue
// was resized since it was armed.
func TestSRQLimitAcrossResizes(t *testing.T) {
	s := testSRQ(t, 8)
	if n, err := postIDs(s, 0, 6); n != 6 {
		t.Fatal(err)
	}
	if s.SetLimit(4) {
		t.Fatal("low with 6 of 4")
	}
	for i, step := range []struct {
		do  func() error
		low bool
	}{
		{func() error { return s.Resize(32) }, false},
		{func() error { takeID(t, s); return nil }, false}, // 5 left
		{func() error { _, err := postIDs(s, 6, 1); return err }, false},
		{func() error { takeID(t, s); return nil }, false}, // 5
		{func() error { takeID(t, s); return nil }, false}, // 4
		{func() error { return s.Resize(4) }, false},
		{func() error { takeID(t, s); return nil }, true}, // 3
		{func() error { takeID(t, s); return nil }, false},
		{func() error { return s.Resize(2) }, false},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		if got := s.low(); got != step.low {
			t.Errorf("step %d: low is %v with %d left", i, got, s.Len())
		}
	}
}

// TestSRQModel: posts, takes, resizes and limits at random against a list.
func TestSRQModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		depth := 1 << rapid.IntRange(0, 5).Draw(t, "depth")
		start := rapid.SampledFrom([]uint64{0, 1, 1<<32 - 3, 1<<62 - 3}).Draw(t, "start")
		c, err := resolveCap(verbs.QPCap{MaxRecvWR: depth, MaxRecvSGE: 2})
		if err != nil {
			t.Fatal(err)
		}
		s := newSRQ(testPD, c, start)
		var held []uint64 // what the queue holds
		var ends []uint64 // how many had been posted when a ring was sealed, of rings not drained
		var posted uint64
		limit := 0
		check := func() {
			if s.Len() != len(held) || s.Depth() != depth {
				t.Fatalf("%d held, depth %d; want %d, %d", s.Len(), s.Depth(), len(held), depth)
			}
			low := limit > 0 && len(held) < limit
			if low {
				limit = 0
			}
			if got := s.low(); got != low {
				t.Fatalf("low is %v with %d held", got, len(held))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"post": func(t *rapid.T) {
				n := rapid.IntRange(1, 40).Draw(t, "n")
				took, err := postIDs(s, posted, uint64(n))
				want := min(n, depth-len(held))
				if took != want || (err != nil) != (want < n) || err != nil && !errors.Is(err, verbs.ErrQueueFull) {
					t.Fatalf("posted %d of %d: %v, want %d", took, n, err, want)
				}
				for range took {
					held = append(held, posted)
					posted++
				}
			},
			"take": func(t *rapid.T) {
				for range rapid.IntRange(1, 20).Draw(t, "n") {
					id, ok := takeID(t, s)
					if ok != (len(held) > 0) || ok && id != held[0] {
						t.Fatalf("took %d, %v of %v", id, ok, held)
					}
					if !ok {
						break
					}
					held = held[1:]
				}
			},
			"resize": func(t *rapid.T) {
				n := rapid.IntRange(-1, 70).Draw(t, "to")
				room := 1
				for room < n {
					room *= 2
				}
				taken := posted - uint64(len(held))
				for len(ends) > 0 && ends[0] <= taken {
					ends = ends[1:]
				}
				err := s.Resize(n)
				var want error
				switch {
				case n < 1 || limit > room:
					want = verbs.ErrBadAttr
				case room == depth:
				case len(ends)+1 == srqRings:
					want = ErrResizes
				case len(held) > room:
					want = verbs.ErrQueueFull
				default:
					depth, ends = room, append(ends, posted)
				}
				if !errors.Is(err, want) {
					t.Fatalf("resize to %d: %v, want %v", n, err, want)
				}
			},
			"limit": func(t *rapid.T) {
				limit = rapid.IntRange(0, depth).Draw(t, "limit")
				low := len(held) < limit
				if s.SetLimit(limit) != low {
					t.Fatalf("low is %v with %d of %d", !low, len(held), limit)
				}
				if low {
					limit = 0
				}
			},
		})
	})
}

// TestSRQResizeRace: posters, takers and resizes from many goroutines. Every receive is taken
// once, whole, and those of one poster in order; never is more outstanding than fits.
func TestSRQResizeRace(t *testing.T) {
	const posters, takers = 3, 2
	each := uint64(3000)
	if underRace || yield.Enabled || testing.Short() {
		each = 1500
	}
	for _, start := range []uint64{0, 1<<32 - 1000} {
		c, _ := resolveCap(verbs.QPCap{MaxRecvWR: 16, MaxRecvSGE: 2})
		s := newSRQ(testPD, c, start)
		var resizer, others sync.WaitGroup
		var stop atomic.Bool
		var resized atomic.Uint64
		resizer.Go(func() {
			rnd := rand.New(rand.NewPCG(7, start))
			for !stop.Load() {
				switch err := s.Resize(1 << rnd.IntN(7)); {
				case err == nil:
					resized.Add(1)
				case !errors.Is(err, verbs.ErrQueueFull) && !errors.Is(err, ErrResizes):
					t.Error(err)
					return
				}
				if n := s.Len(); n < 0 || n > 64 {
					t.Errorf("%d held", n)
				}
				runtime.Gosched()
			}
		})
		for g := range posters {
			others.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(g), start))
				for i := uint64(0); i < each && !t.Failed(); {
					if resized.Load() < i/16 {
						runtime.Gosched() // what is posted is taken, and then there is nothing against it
						continue
					}
					want := min(1+rnd.Uint64N(5), each-i)
					n, err := postIDs(s, uint64(g)<<32|i, want)
					if n == 0 {
						runtime.Gosched()
					}
					if uint64(n) < want && !errors.Is(err, verbs.ErrQueueFull) {
						t.Errorf("posted %d of %d: %v", n, want, err)
						return
					}
					i += uint64(n)
				}
			})
		}
		var left atomic.Int64
		left.Store(int64(posters * each))
		seen := make([][posters]map[uint64]bool, takers)
		for k := range takers {
			for g := range posters {
				seen[k][g] = map[uint64]bool{}
			}
			others.Go(func() {
				var last [posters]uint64 // and one
				for left.Load() > 0 && !t.Failed() {
					id, ok := takeID(t, s)
					if !ok {
						runtime.Gosched()
						continue
					}
					left.Add(-1)
					g, i := id>>32, id&(1<<32-1)
					if i < last[g] {
						t.Errorf("poster %d: %d after %d", g, i, last[g]-1)
					}
					last[g] = i + 1
					seen[k][g][i] = true
				}
			})
		}
		others.Wait()
		stop.Store(true)
		resizer.Wait()
		if t.Failed() {
			return
		}
		for g := range posters {
			for i := range each {
				if seen[0][g][i] == seen[1][g][i] {
					t.Fatalf("poster %d: %d was taken twice or never", g, i)
				}
			}
		}
		if s.Len() != 0 {
			t.Errorf("%d left", s.Len())
		}
	}
}

// Posting and taking allocate nothing in a queue that was resized.
func TestSRQResizedAllocatesNothing(t *testing.T) {
	s := testSRQ(t, 8)
	recv := []verbs.RecvWR{{SGList: []verbs.SGE{{Addr: 8192, Length: 5000}}}}
	var w RecvWQE
	var sges [2]verbs.SGE
	step := func() {
		if _, err := s.Post(recv); err != nil || !s.take(&w, sges[:]) {
			t.Fatal(err)
		}
	}
	step()
	if err := s.Resize(32); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(200, step); n != 0 {
		t.Errorf("%v allocations per receive", n)
	}
}
