package cm

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// flat fails the test when anything of a connection remains.
func (n *node) flat() {
	n.t.Helper()
	if n.Len()+len(n.byPeer)+len(n.byQPN)+len(n.timers)+n.lingering+n.CM.events.len()+n.outgoing.len()+n.replies.len()+len(n.last) != 0 {
		n.t.Fatalf("%s keeps %d connections, %d by peer, %d by QPN, %d timers, %d lingering, %d events, %d to send, %d replies",
			n.net.name(n), n.Len(), len(n.byPeer), len(n.byQPN), len(n.timers), n.lingering, n.CM.events.len(), n.outgoing.len(), n.replies.len())
	}
	if h := n.HalfOpen(tcp); h != 0 {
		n.t.Fatalf("%d half-open", h)
	}
	n.check()
}

// F55: 20,000 connections in a row, closed, rejected, given up and destroyed in turn, leave nothing behind.
func TestTwentyThousand(t *testing.T) {
	nw, a, b := pair(t, Config{TimeWait: 5 * ms})
	nw.checks = false
	programs(a, b)
	accept := b.program
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var before int64
	for i := range 20_000 {
		b.program, nw.verdict = accept, nil
		p := reqTo(a, b)
		p.QPN = verbs.QPN(2 + i%64)
		switch i % 5 {
		case 1:
			b.program = func(ev Event) {
				if ev.Type == ReqReceived {
					b.must(b.Reject(nw.now, ev.Conn, verbs.RejectConsumer, []byte("no")))
				}
			}
		case 2:
			nw.verdict = lose(a, REQ, 0)
		}
		id, err := a.Connect(nw.now, p)
		a.must(err)
		switch i % 5 {
		case 3:
			nw.advance(ms) // the REQ is about to be answered
			a.Destroy(nw.now, id)
		case 4:
			nw.advance(3 * ms)
			a.Destroy(nw.now, id)
		case 0:
			nw.advance(3 * ms)
			a.must(a.Disconnect(nw.now, id, nil))
		}
		nw.advance(8 * ms)
		if i%5 == 2 {
			nw.advance(6 * time.Second)
		}
		a.events, b.events = nil, nil
		if i%1000 == 999 {
			a.flat()
			b.flat()
			if now := heap(); before == 0 {
				before = now
			} else if now > before+1<<20 {
				t.Fatalf("after %d: heap %d, was %d", i+1, now, before)
			}
		}
	}
}

// F55: communication IDs run out with an error, are not used again in timewait, and come back after it.
func TestIDsRunOut(t *testing.T) {
	nw, a, b := pair(t, Config{})
	a.idMask, b.idMask = 63, 127
	programs(a, b)
	p := reqTo(a, b)
	var ids []ConnID
	used := make(map[ConnID]bool)
	for range 63 {
		p.QPN++
		id, err := a.Connect(nw.now, p)
		a.must(err)
		if used[id] || id == 0 || id > 63 {
			t.Fatalf("ID %v", id)
		}
		used[id] = true
		ids = append(ids, id)
		nw.advance(3 * ms)
	}
	p.QPN++
	if _, err := a.Connect(nw.now, p); !errors.Is(err, ErrNoIDs) {
		t.Fatalf("the 64th: %v", err)
	}
	a.must(a.Disconnect(nw.now, ids[5], nil))
	nw.advance(10 * ms)
	if a.State(ids[5]) != Timewait {
		t.Fatal(a.State(ids[5]))
	}
	if _, err := a.Connect(nw.now, p); !errors.Is(err, ErrNoIDs) {
		t.Fatalf("in timewait: %v", err)
	}
	nw.advance(DefaultTimeWait)
	id, err := a.Connect(nw.now, p)
	if err != nil || id != ids[5] {
		t.Fatalf("after timewait: %v, %v", id, err)
	}
	// The passive side without IDs drops the REQ, and the repetition finds one.
	nw.advance(3 * ms)
	b.idMask = 0
	p.QPN++
	a.idMask = 255
	_, err = a.Connect(nw.now, p)
	a.must(err)
	a.events = nil
	nw.advance(15 * ms)
	if n := b.counters.Dropped[DropIDs].Load(); n != 1 || len(a.events) != 0 {
		t.Errorf("%d dropped, %d events", n, len(a.events))
	}
	b.idMask = 255
	a.want(RepReceived)
}

// F38: a flood of REQs from forged addresses takes the backlog and no more, is not answered, and does not keep
// an honest peer out for ever; of what is answered, the answer is no bigger than the question.
func TestREQFlood(t *testing.T) {
	nw, a, b := pair(t, Config{Backlog: 128, RequestTimeout: time.Second})
	nw.checks = false
	rnd := rand.New(rand.NewPCG(1, 2))
	if n := b.flood(rnd, 20_000, tcp); n != 0 {
		t.Errorf("unaccepted REQs were answered %d times", n)
	}
	const places = 96 // three quarters: strangers' share
	if b.Len() != places || b.HalfOpen(tcp) != places || b.CM.events.len() != places {
		t.Errorf("%d connections, %d half-open, %d events", b.Len(), b.HalfOpen(tcp), b.CM.events.len())
	}
	if n := b.counters.Dropped[DropBacklog].Load(); n != 20_000-places {
		t.Errorf("%d dropped", n)
	}
	// Those that nobody accepts give their places back: then an honest peer gets in.
	_, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	nw.runUntil("honest request", func() bool {
		if b.HalfOpen(tcp) == places {
			b.flood(rnd, 10, tcp)
		}
		for _, ev := range b.events {
			if ev.Type == ReqReceived && ev.Path.Remote.Addr() == addrA {
				return true
			}
		}
		return false
	})
	// One answer for each REQ that nobody listens to, not more.
	if n := b.flood(rnd, 1000, tcp+1); n != 1000 {
		t.Errorf("1000 REQs for nobody were answered %d times", n)
	}
	b.check()

	// Requests that are begun and given up at once fill neither the queue of events nor memory.
	l := newLab(t, Config{Backlog: 16})
	for range 10_000 {
		l.peer, l.qpn = l.peer+1, 2+(l.qpn+1)%1000
		l.forge(REQ, l.req())
		l.forge(REJ, &roce.REJ{LocalCommID: l.peer, Reason: verbs.RejectTimeout, Info: guidBytes(l.guid), InfoLen: 8})
	}
	if l.Len() > 2*16 || l.events.len() > (maxEventsPerBacklog+4)*16 || l.counters.Dropped[DropEvents].Load() == 0 {
		t.Errorf("%d connections, %d events", l.Len(), l.events.len())
	}
	l.check()
	// A program that rejects everything without ever sending costs no memory either.
	l = newLab(t, Config{Backlog: 16})
	for range 10_000 {
		l.peer, l.qpn = l.peer+1, 2+(l.qpn+1)%1000
		l.request()
		l.must(l.Reject(l.now, l.id, verbs.RejectConsumer, nil))
		l.happened()
	}
	l.check()
	if l.Len() > 16 || l.replies.len() != maxReplies || l.counters.Dropped[DropReplies].Load() == 0 {
		t.Errorf("%d connections, %d replies", l.Len(), l.replies.len())
	}
	var out Out
	n := 0
	for l.NextMAD(&out) {
		n++
	}
	if n != maxReplies+16 {
		t.Errorf("%d MADs to send", n)
	}
}

// carry takes everything from one CM to the other at once.
func carry(now verbs.Instant, from, to *CM, src, dst netip.Addr) (n int) {
	var out Out
	for from.NextMAD(&out) {
		to.HandleMAD(now, netip.AddrPortFrom(src, 4791), dst, out.MAD[:])
		n++
	}
	return n
}

// A hundred thousand connections at once: timers and memory hold.
func TestHundredThousand(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	a, b := New(Config{GUID: 1, Rand: rnd.Uint32}), New(Config{GUID: 2, Rand: rnd.Uint32, Backlog: 200_000})
	if err := b.Listen(tcp); err != nil {
		t.Fatal(err)
	}
	events := func(c *CM, do func(ev *Event) error) {
		t.Helper()
		for {
			ev, ok := c.NextEvent()
			if !ok {
				return
			}
			if err := do(&ev); err != nil {
				t.Fatal(ev.Type, err)
			}
		}
	}
	const n = 100_000
	var now verbs.Instant
	p := ReqParams{Path: Path{addrA, netip.AddrPortFrom(addrB, 0)}, ServiceID: tcp, Type: verbs.RC, MTU: verbs.MTU1024, QPN: 2}
	for range n {
		p.QPN++
		now++
		if _, err := a.Connect(now, p); err != nil {
			t.Fatal(err)
		}
	}
	// Nobody accepts yet, and every REQ is repeated: a few batches do it.
	if got := carry(now, a, b, addrA, addrB); got != n || b.HalfOpen(tcp) != n || len(a.timers) != n || len(b.timers) != n {
		t.Fatalf("%d sent, %d half-open, %d timers", got, b.HalfOpen(tcp), len(a.timers))
	}
	now = now.Add(DefaultRetryInitial)
	for batches := 0; a.Deadline() <= now; batches++ {
		if batches > n/timeoutBatch {
			t.Fatalf("more than %d batches", batches)
		}
		a.HandleTimeout(now)
	}
	if got := carry(now, a, b, addrA, addrB); got != n {
		t.Fatalf("%d REQs repeated", got)
	}
	a.check()
	b.check()
	events(b, func(ev *Event) error {
		p.QPN++
		return b.Accept(now, ev.Conn, RepParams{QPN: p.QPN})
	})
	carry(now, b, a, addrB, addrA)
	events(a, func(ev *Event) error { return a.Ready(now, ev.Conn, nil) })
	carry(now, a, b, addrA, addrB)
	for _, c := range []*CM{a, b} {
		for _, cn := range c.conns {
			if cn.state != Connected || cn.mad != nil || cn.private != nil || cn.slot >= 0 {
				t.Fatalf("%v keeps what it had for the handshake", cn.state)
			}
		}
		if len(c.timers) != 0 || c.Deadline() != verbs.Never {
			t.Fatal("an established connection has a timer")
		}
		c.check()
	}
	if size := unsafe.Sizeof(conn{}); size > 320 {
		t.Errorf("a connection takes %d bytes", size)
	}
	// All of them end.
	for id := range a.conns {
		a.Destroy(now, id)
	}
	carry(now, a, b, addrA, addrB)
	carry(now, b, a, addrB, addrA)
	now = now.Add(DefaultTimeWait)
	for _, c := range []*CM{a, b} {
		for c.Deadline() <= now {
			c.HandleTimeout(now)
		}
		exits := 0
		events(c, func(ev *Event) error {
			if ev.Type == TimewaitExit {
				exits++
			}
			return nil
		})
		if exits != n || c.Len() != 0 || c.Pending() {
			t.Errorf("%d ended, %d remain", exits, c.Len())
		}
		c.check()
	}
}

// A timer that is due late catches up once, not once for each time it missed.
func TestLateTimeout(t *testing.T) {
	l := at(t, (*lab).connect)
	l.now = l.now.Add(3 * time.Second)
	l.HandleTimeout(l.now)
	if got := l.said(); got != "REQ" || l.Deadline() <= l.now {
		t.Errorf("sends %s, next in %v", got, l.Deadline().Sub(l.now))
	}
	l.HandleTimeout(l.now - 5)
	if got := l.said(); got != "-" {
		t.Errorf("too early: %s", got)
	}
}

// One connection, made and ended, on both sides, up to the end of timewait.
func BenchmarkConnect(b *testing.B) {
	b.ReportAllocs()
	rnd := rand.New(rand.NewPCG(1, 2))
	cfg := Config{Rand: rnd.Uint32, GUID: 1, TimeWait: 1}
	x := New(cfg)
	cfg.GUID = 2
	y := New(cfg)
	if err := y.Listen(tcp); err != nil {
		b.Fatal(err)
	}
	p := ReqParams{Path: Path{addrA, netip.AddrPortFrom(addrB, 0)}, ServiceID: tcp, Type: verbs.RC, MTU: verbs.MTU1024}
	now := verbs.Instant(0)
	for i := 0; b.Loop(); i++ {
		now += 1000
		p.QPN = 2 + verbs.QPN(i%1_000_000)
		id, err := x.Connect(now, p)
		if err != nil {
			b.Fatal(err)
		}
		carry(now, x, y, addrA, addrB)
		ev, _ := y.NextEvent()
		for ev.Type == TimewaitExit {
			ev, _ = y.NextEvent()
		}
		if err := y.Accept(now, ev.Conn, RepParams{QPN: p.QPN}); err != nil {
			b.Fatal(err, ev.Type)
		}
		carry(now, y, x, addrB, addrA)
		if err := x.Ready(now, id, nil); err != nil {
			b.Fatal(err)
		}
		x.Disconnect(now, id, nil)
		carry(now, x, y, addrA, addrB)
		carry(now, y, x, addrB, addrA)
		for _, c := range []*CM{x, y} {
			c.HandleTimeout(now)
			for {
				if _, ok := c.NextEvent(); !ok {
					break
				}
			}
		}
	}
}
