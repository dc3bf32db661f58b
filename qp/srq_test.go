package qp

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func testSRQ(t testing.TB, depth int) *SRQ {
	t.Helper()
	s, err := NewSRQ(testPD, depth, 2)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// supply posts one receive of size bytes at off.
func supply(t testing.TB, s *SRQ, id uint64, off, size int) {
	t.Helper()
	wr := verbs.RecvWR{WRID: id, SGList: []verbs.SGE{{Addr: recvBase + uint64(off), Length: uint32(size), LKey: recvKey}}}
	if n, err := s.Post([]verbs.RecvWR{wr}); n != 1 || err != nil {
		t.Fatalf("posted %d: %v", n, err)
	}
}

// sharing makes pairs whose B sides take from one SRQ.
func sharing(t testing.TB, s *SRQ, n int, o options) (ps []*pair) {
	t.Helper()
	o.srq = s
	for range n {
		ps = append(ps, newPair(t, o))
	}
	return ps
}

// Receives go to whichever queue pair has a message, in the order of posting.
func TestSharedReceivesInOrder(t *testing.T) {
	s := testSRQ(t, 8)
	ps := sharing(t, s, 3, options{})
	for lap := range 5 { // around the ring
		for i := range 6 {
			supply(t, s, uint64(100+i), i*4096, 4096)
		}
		for i := range 6 {
			p := ps[(i*2+lap)%3]
			op := verbs.Send
			if i%2 == 1 {
				op = verbs.RDMAWriteWithImm
			}
			fill(p.a.send.buf[:3000], uint64(i))
			p.post(p.a, sendWR(op, uint64(i), 0, 3000))
			p.run()
			if op == verbs.Send {
				p.wantWCs(p.b, fmt.Sprintf("%d:RECV", 100+i))
				if !matches(p.b.recv.buf[i*4096:][:3000], uint64(i)) {
					t.Errorf("message %d changed", i)
				}
			} else {
				p.wantWCs(p.b, fmt.Sprintf("%d:RECV_RDMA_WITH_IMM", 100+i))
			}
		}
		if n := s.Len(); n != 0 {
			t.Fatalf("%d receives left", n)
		}
	}
}

// The oldest receive belongs to the message that began first, however long that takes.
func TestSharedReceiveIsTakenAtTheStart(t *testing.T) {
	s := testSRQ(t, 8)
	ps := sharing(t, s, 2, options{})
	supply(t, s, 1, 0, 4096)
	supply(t, s, 2, 4096, 4096)
	long := ps[0]
	long.post(long.a, sendWR(verbs.Send, 1, 0, 4000))
	long.pump(long.a)
	out := long.a.take()
	long.deliver(long.b, out[:2]...)
	if n := s.Len(); n != 1 {
		t.Fatalf("%d receives left, want 1", n)
	}
	ps[1].post(ps[1].a, sendWR(verbs.Send, 1, 0, 100))
	ps[1].run()
	ps[1].wantWCs(ps[1].b, "2:RECV")
	long.deliver(long.b, out[2:]...)
	long.run()
	long.wantWCs(long.b, "1:RECV")
}

// An empty SRQ means an RNR NAK, and the message comes back.
func TestSharedReceivesRunOut(t *testing.T) {
	s := testSRQ(t, 8)
	p := sharing(t, s, 1, options{rnrRetry: 7, rnrTimer: 1})[0]
	p.post(p.a, sendWR(verbs.Send, 1, 0, 100), sendWR(verbs.Send, 2, 0, 100))
	p.run()
	if n := p.b.env.Counters.RNRNaksSent.Load(); n != 1 {
		t.Fatalf("%d RNR NAKs", n)
	}
	supply(t, s, 7, 0, 100)
	supply(t, s, 8, 0, 100)
	p.settle(1e9)
	p.wantWCs(p.a, "1:SEND", "2:SEND")
	p.wantWCs(p.b, "7:RECV", "8:RECV")

	// So does one that another wire's owner is taking from: nobody waits.
	supply(t, s, 9, 0, 100)
	s.busy.Store(true)
	p.post(p.a, sendWR(verbs.Send, 3, 0, 100))
	p.run()
	if n := p.b.env.Counters.RNRNaksSent.Load(); n < 2 || s.Len() != 1 {
		t.Fatalf("%d RNR NAKs, %d receives left", n, s.Len())
	}
	s.busy.Store(false)
	p.settle(1e9)
	p.wantWCs(p.b, "9:RECV")
}

// AETHs carry no credits (IBTA Vol 1, 9.7.7.2.1).
func TestSharedReceivesGiveNoCredits(t *testing.T) {
	s := testSRQ(t, 8)
	p := sharing(t, s, 1, options{})[0]
	supply(t, s, 1, 0, 100)
	acks := 0
	p.sent = func(from *node, pkt *roce.Packet) {
		if from == p.b && pkt.Opcode == roce.RCAck {
			acks++
			if pkt.AETH.Syndrome != roce.AckNoCredit {
				t.Errorf("syndrome %#x", pkt.AETH.Syndrome)
			}
		}
	}
	p.post(p.a, sendWR(verbs.Send, 1, 0, 100))
	p.run()
	if acks == 0 {
		t.Error("no ACK")
	}
}

// A queue pair in ERR flushes what it took and leaves the rest; LAST_WQE_REACHED comes in a
// later step than the flush.
func TestLastWQEReached(t *testing.T) {
	for _, how := range []string{"modify", "peer", "idle", "unposted"} {
		t.Run(how, func(t *testing.T) {
			s := testSRQ(t, 8)
			ps := sharing(t, s, 2, options{})
			p := ps[0]
			for i := range 3 {
				supply(t, s, uint64(i+1), i*4096, 4096)
			}
			held := how == "modify" || how == "peer"
			if held {
				p.post(p.a, sendWR(verbs.Send, 1, 0, 4000))
				p.pump(p.a)
				p.deliver(p.b, p.a.take()[:2]...)
			}
			switch how {
			case "peer":
				p.inject(p.b, roce.RCWriteOnly, 2, 0) // not the rest of a SEND
			case "unposted":
				p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPReset})
				p.modify(p.b, p.initAttr())
				fallthrough
			default:
				p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
			}
			p.b.events = 0
			p.pump(p.b)
			if held {
				if p.b.events&EvLastWQEReached != 0 {
					t.Fatal("raised in the step of the flush")
				}
				p.wantWCs(p.b, "1:WR_FLUSH_ERR")
				if p.b.q.Deadline() > p.now {
					t.Fatal("nobody comes back for the event")
				}
				p.b.q.HandleTimeout(p.now)
				p.pump(p.b)
			}
			if p.b.events&EvLastWQEReached == 0 {
				t.Fatal("not raised")
			}
			p.b.events = 0
			p.b.q.HandleTimeout(p.now) // for the move to ERR itself
			p.pump(p.b)
			if p.b.events != 0 || p.b.q.Deadline() != verbs.Never {
				t.Errorf("events %b, deadline %d after the last", p.b.events, p.b.q.Deadline())
			}
			want := 3
			if held {
				want = 2
			}
			if s.Len() != want {
				t.Errorf("%d receives left, want %d", s.Len(), want)
			}
			o := ps[1]
			o.post(o.a, sendWR(verbs.Send, 1, 0, 100))
			o.run()
			o.wantWCs(o.b, fmt.Sprintf("%d:RECV", 4-want))
			if o.b.events&EvLastWQEReached != 0 {
				t.Error("raised for another queue pair")
			}
		})
	}
}

// The event waits for the commit of the flush even when other queue pairs keep the lane busy,
// and not for more than that.
func TestLastWQEInABusyLane(t *testing.T) {
	s := testSRQ(t, 8)
	p := sharing(t, s, 1, options{})[0]
	supply(t, s, 1, 0, 4096)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 4000))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()[:2]...)
	p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
	q, c := p.b.q, p.b.cq
	other := verbs.WC{WRID: 99}
	for range 3 { // not committed in between
		c.add(&other, &p.b.env)
		q.Service(p.now)
		if q.TakeEvents()&EvLastWQEReached != 0 {
			t.Fatal("raised before the commit")
		}
	}
	c.Commit()
	c.add(&other, &p.b.env) // somebody else's, of the next step
	q.Service(p.now)
	if q.TakeEvents()&EvLastWQEReached == 0 {
		t.Fatal("not raised after the commit")
	}
}

// RESET in mid-message loses the receive that was taken, and the queue pair lives on.
func TestSharedReceiveLostInReset(t *testing.T) {
	s := testSRQ(t, 8)
	p := sharing(t, s, 1, options{})[0]
	supply(t, s, 1, 0, 4096)
	supply(t, s, 2, 0, 4096)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 4000))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()[:2]...)
	for _, n := range []*node{p.a, p.b} {
		p.modify(n, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPReset})
	}
	p.to(p.a, verbs.QPRTS)
	p.to(p.b, verbs.QPRTS)
	p.pump(p.b)
	p.wantWCs(p.b)
	p.post(p.a, sendWR(verbs.Send, 2, 0, 100))
	p.run()
	p.wantWCs(p.b, "2:RECV")
}

func TestSRQArguments(t *testing.T) {
	for _, tc := range []struct{ depth, sge int }{{-1, 0}, {1<<16 + 1, 0}, {0, -1}, {0, 33}} {
		if _, err := NewSRQ(testPD, tc.depth, tc.sge); !errors.Is(err, verbs.ErrBadAttr) {
			t.Errorf("depth %d, %d SGEs: %v", tc.depth, tc.sge, err)
		}
	}
	d, err := NewSRQ(testPD, 0, 0)
	if err != nil || d.Depth() != 128 || d.MaxSGE() != 4 {
		t.Errorf("defaults: %v, %d, %d", err, d.Depth(), d.MaxSGE())
	}
	s := testSRQ(t, 5)
	if s.Depth() != 8 {
		t.Errorf("depth %d", s.Depth())
	}
	cq := NewCQ(4)
	cfg := Config{Num: 20, Type: verbs.RC, PD: testPD + 1, SendCQ: cq, RecvCQ: cq, SRQ: s}
	if _, err := New(cfg, &Env{Mem: &testMem{}}); !errors.Is(err, verbs.ErrBadAttr) {
		t.Errorf("another domain: %v", err)
	}
	cfg.PD = testPD
	q, err := New(cfg, &Env{Mem: &testMem{}})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := q.PostRecv(make([]verbs.RecvWR, 1)); !errors.Is(err, verbs.ErrBadWR) {
		t.Errorf("PostRecv with an SRQ: %v", err)
	}
	if c := q.Cap(); c.MaxRecvWR != 0 || c.MaxRecvSGE != 0 || q.SRQ() != s {
		t.Errorf("cap %+v", c)
	}
	wrs := make([]verbs.RecvWR, 12)
	wrs[2].SGList = make([]verbs.SGE, 3)
	if n, err := s.Post(wrs); n != 2 || !errors.Is(err, verbs.ErrTooManySGE) {
		t.Errorf("posted %d: %v", n, err)
	}
	if n, err := s.Post(wrs[3:]); n != 6 || !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("posted %d: %v", n, err)
	}
	if n, err := s.Post(wrs[3:4]); n != 0 || !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("posted %d into a full queue: %v", n, err)
	}
	if n, err := s.Post(nil); n != 0 || err != nil {
		t.Errorf("posted %d of nothing: %v", n, err)
	}
}

// The limit: one event when fewer than n are left, then none until it is armed again; at once
// when fewer are left already.
func TestSRQLimit(t *testing.T) {
	s := testSRQ(t, 8)
	p := sharing(t, s, 1, options{rnrRetry: 7, rnrTimer: 1})[0]
	for i := range 5 {
		supply(t, s, uint64(i), 0, 100)
	}
	if s.SetLimit(3) {
		t.Fatal("low with 5 of 3")
	}
	message := func() (events int) {
		p.post(p.a, sendWR(verbs.Send, 1, 0, 100))
		p.run()
		events = len(p.b.env.Low)
		p.b.env.Low = p.b.env.Low[:0]
		return events
	}
	for i, want := range []int{0, 0, 1, 0} { // 4, 3, 2, 1 left
		if got := message(); got != want {
			t.Errorf("message %d: %d events, want %d", i, got, want)
		}
	}
	if s.SetLimit(1) {
		t.Error("low with 1 of 1")
	}
	if !s.SetLimit(2) || s.limit.Load() != 0 {
		t.Error("not low with 1 of 2, or not disarmed")
	}
	if s.SetLimit(0) {
		t.Error("low without a limit")
	}
	supply(t, s, 9, 0, 100)
	if s.SetLimit(2) {
		t.Error("low with 2 of 2")
	}
	if got := message(); got != 1 {
		t.Errorf("%d events, want 1", got)
	}
}

// TestSRQRace: posters and takers from many goroutines, across the end of 32 bits. Every
// receive is taken once, whole, and those of one poster in order; a limit that is armed again
// and again is reported once each time.
func TestSRQRace(t *testing.T) {
	const posters, takers = 3, 2
	each := 3000
	if underRace || yield.Enabled {
		each = 300
	}
	for _, start := range []uint64{0, 1<<32 - 1000} {
		c, _ := resolveCap(verbs.QPCap{MaxRecvWR: 16, MaxRecvSGE: 2})
		s := newSRQ(testPD, c, start)
		var wg sync.WaitGroup
		for g := range posters {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(g), start))
				for i := 0; i < each; {
					wrs := make([]verbs.RecvWR, min(1+rnd.IntN(5), each-i))
					for j := range wrs {
						id := uint64(g)<<32 | uint64(i+j)
						wrs[j] = verbs.RecvWR{WRID: id, SGList: []verbs.SGE{{Addr: id, Length: uint32(i + j)}, {Addr: ^id, Length: 1}}[:1+(i+j)%2]}
					}
					n, err := s.Post(wrs)
					if n < len(wrs) && !errors.Is(err, verbs.ErrQueueFull) {
						t.Errorf("posted %d of %d: %v", n, len(wrs), err)
						return
					}
					i += n
				}
			})
		}
		// order is written under the queue's own lock, in effect: a taker records in the order
		// of takes only if takes are exclusive.
		var mu sync.Mutex
		seen := make(map[uint64]int)
		var lows, arms int
		for range takers {
			wg.Go(func() {
				var w RecvWQE
				var sges [2]verbs.SGE
				last := [posters]int{-1, -1, -1}
				for {
					mu.Lock()
					done := len(seen) == posters*each
					mu.Unlock()
					if done {
						return
					}
					if !s.take(&w, sges[:]) {
						continue
					}
					g, i := int(w.WRID>>32), int(uint32(w.WRID))
					if i <= last[g] {
						t.Errorf("poster %d: %d after %d", g, i, last[g])
						return
					}
					last[g] = i
					if int(w.NumSGE) != 1+i%2 || sges[0].Addr != w.WRID || sges[0].Length != uint32(i) || i%2 == 1 && sges[1].Addr != ^w.WRID {
						t.Errorf("receive %#x is torn: %+v %+v", w.WRID, w, sges)
						return
					}
					mu.Lock()
					seen[w.WRID]++
					if s.low() {
						lows++
					}
					if lows == arms {
						arms++
						if s.SetLimit(8) {
							lows++
						}
					}
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		for id, n := range seen {
			if n != 1 {
				t.Errorf("receive %#x taken %d times", id, n)
			}
		}
		if lows > arms || lows < arms-1 {
			t.Errorf("%d events for %d limits", lows, arms)
		}
		if s.Len() != 0 {
			t.Errorf("%d left", s.Len())
		}
	}
}

// The shared path allocates nothing.
func TestSRQAllocatesNothing(t *testing.T) {
	s := testSRQ(t, 8)
	l := newLoop(t, options{srq: s})
	recv := []verbs.RecvWR{{SGList: []verbs.SGE{{Addr: 8192, Length: 5000}}}}
	wr := []verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: []verbs.SGE{{Length: 5000}}}}
	step := func() {
		if _, err := s.Post(recv); err != nil {
			t.Fatal(err)
		}
		if _, _, err := l.a.q.PostSend(wr); err != nil {
			t.Fatal(err)
		}
		if a, b := l.turn(); a != 1 || b != 1 {
			t.Fatalf("%d and %d completions", a, b)
		}
	}
	step()
	if n := testing.AllocsPerRun(200, step); n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}

// A receive that UC has not used up yet is flushed after the sends, which take more than a turn:
// the event waits for it, and the queue pair asks to be served again.
func TestLastWQEAfterALongFlush(t *testing.T) {
	s := testSRQ(t, 8)
	p := sharing(t, s, 1, options{typ: verbs.UC, cap: verbs.QPCap{MaxSendWR: 128}})[0]
	supply(t, s, 1, 0, 4096)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 4000))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()[:2]...)
	for range 100 {
		p.post(p.b, sendWR(verbs.RDMAWrite, 2, 0, 8))
	}
	if s.Len() != 0 {
		t.Fatal("the message has taken no receive")
	}
	p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
	q, c := p.b.q, p.b.cq
	q.HandleTimeout(p.now)
	if !q.Service(p.now) {
		t.Fatal("flushed in one turn")
	}
	c.Commit()
	if q.Service(p.now) {
		t.Fatal("not flushed in two turns")
	}
	if q.TakeEvents()&EvLastWQEReached != 0 {
		t.Fatal("raised in the step of the receive's flush")
	}
	if q.Deadline() > p.now {
		t.Fatal("nobody comes back for the event")
	}
	c.Commit()
	q.HandleTimeout(p.now)
	q.Service(p.now)
	if q.TakeEvents()&EvLastWQEReached == 0 {
		t.Fatal("not raised")
	}
	// Once in each life.
	for range 2 {
		p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPReset})
		p.to(p.b, verbs.QPRTS)
		p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
		q.Service(p.now)
		if q.TakeEvents()&EvLastWQEReached == 0 {
			t.Fatal("not raised in another life")
		}
	}
}
