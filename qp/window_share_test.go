package qp

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Who was refused is woken when a quarter of the window is free, or all of it.
func TestWindowRoom(t *testing.T) {
	for _, c := range []struct {
		used, need int64
		want       bool
	}{{0, 1000, true}, {7500, 100, true}, {7501, 100, false}, {9900, 100, false}, {6500, 3500, true}, {6501, 3500, false}, {0, 20000, true}} {
		w := NewWindow(WindowConfig{Initial: 10000, Max: 10000})
		w.charge(c.used)
		w.refuse(c.need)
		if got := w.HasRoom(); got != c.want {
			t.Errorf("%d used of 10000, %d wanted: room %v", c.used, c.need, got)
		}
	}
}

// A packet is lost when something sent later was acknowledged; when the peer has answered lately
// it waits behind others.
func TestWindowOverdue(t *testing.T) {
	ms := func(n int) verbs.Instant { return verbs.Instant(n) * verbs.Instant(time.Millisecond) }
	for _, c := range []struct {
		now, sent int
		want      bool
	}{{21, 11, false}, {22, 20, false}, {21, 10, true}, {21, 9, true}, {20 + 100, 11, true}} {
		w := NewWindow(WindowConfig{})
		w.sample(ms(11), time.Millisecond) // of a packet sent at 10 ms
		w.heardAt = ms(20)
		if got := w.overdue(ms(c.now), ms(c.sent), 1); got != c.want {
			t.Errorf("sent at %d ms, now %d: overdue %v", c.sent, c.now, got)
		}
	}
}

// A silent peer is asked by one queue pair at a time, by each in its turn, less and less often; by
// one that is alone whenever its timer says so.
func TestWindowSilence(t *testing.T) {
	w := NewWindow(WindowConfig{})
	start := verbs.Instant(time.Second)
	// Their timers go off one behind the other, always in the same order.
	type timer struct {
		at      verbs.Instant
		backoff uint8
		asked   int
	}
	var qs [3]timer
	for i := range qs {
		qs[i].at = start.Add(time.Duration(i) * time.Millisecond)
	}
	total := 0
	for {
		q := 0
		for i := range qs {
			if qs[i].at < qs[q].at {
				q = i
			}
		}
		now := qs[q].at
		if now > start.Add(20*time.Second) {
			break
		}
		if w.overdue(now, start, verbs.QPN(q)) {
			qs[q].asked++
			qs[q].backoff = min(qs[q].backoff+1, maxBackoff)
			total++
		}
		qs[q].at = now.Add(w.rto(qs[q].backoff))
	}
	// After 10, 20, 40, ... 640 ms, then every second, which is the ceiling, or a little more.
	if total < 12 || total > 27 || min(qs[0].asked, qs[1].asked, qs[2].asked) < 3 {
		t.Errorf("in twenty seconds three queue pairs asked %d times: %+v", total, qs)
	}
	w = NewWindow(WindowConfig{})
	for k := range uint8(10) {
		if !w.overdue(start, start, 7) {
			t.Errorf("alone: not allowed to ask for the %dth time", k)
		}
		start = start.Add(w.rto(k + 1))
	}
}

// When many queue pairs have lost their last packet, one asks the silent peer, and once that was
// answered the others need not take turns.
func TestWindowSilenceBroken(t *testing.T) {
	w := NewWindow(WindowConfig{})
	sent := verbs.Instant(time.Second)
	now := sent.Add(w.rto(0))
	if !w.overdue(now, sent, 1) || w.overdue(now, sent, 2) {
		t.Fatal("not one queue pair asks")
	}
	asked := now
	now = now.Add(time.Millisecond)
	w.heardAt = now
	if w.overdue(now, sent, 2) {
		t.Error("sent again to a peer that has just answered")
	}
	now = now.Add(w.rto(0))
	for q := verbs.QPN(2); q < 100; q++ {
		if !w.overdue(now, sent, q) {
			t.Fatalf("queue pair %d still waits for its turn", q)
		}
	}
	if w.overdue(now, asked.Add(1), 100) && w.overdue(now, asked.Add(1), 101) {
		t.Error("what was sent after the question is not lost for sure, and two ask at once")
	}
}

// A round trip that has become longer than the early timer is found out, and then nothing is sent
// twice any more.
func TestLongerRoundTrip(t *testing.T) {
	p := newPair(t, options{timeout: 20}) // 4.3 s
	again := &p.a.env.Counters.Retransmits
	for i := range 16 {
		p.postRecv(p.b, 1, 0, 64)
		p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
		if i < 8 { // at once: the window knows a round trip of nothing
			p.run()
			continue
		}
		before := again.Load()
		p.pump(p.a)
		p.deliver(p.b, p.a.take()...)
		p.pump(p.b)
		answers := p.b.take()
		p.advance(100 * time.Millisecond)
		late := p.a.take()
		p.deliver(p.a, answers...)
		p.deliver(p.b, late...)
		p.run()
		if n := again.Load() - before; n > 0 && i > 11 {
			t.Errorf("message %d: sent again %d times", i, n)
		}
	}
	if len(p.a.wcs) != 16 || p.a.win.RTT() < 10*time.Millisecond {
		t.Errorf("%d completions, a round trip of %v", len(p.a.wcs), p.a.win.RTT())
	}
}

// In a full window one packet may still leave, the first of a queue pair, which asks for an
// acknowledgement: so nothing waits for one that nobody was asked for. But only while nobody
// else has anything under way: who fills the window has asked.
func TestWindowFullLetsFirstPacketGo(t *testing.T) {
	for name, c := range map[string]struct {
		limit, others int64
		want          []Next
	}{
		"too small for any packet":    {1, 0, []Next{NextPacket, NextBlocked}},
		"room for one":                {datagramCost, 0, []Next{NextPacket, NextBlocked}},
		"filled by others":            {10 * datagramCost, 10 * datagramCost, []Next{NextBlocked}},
		"nearly filled by others":     {10 * datagramCost, 9*datagramCost + 1, []Next{NextBlocked}},
		"filled by others, then full": {2 * datagramCost, datagramCost, []Next{NextPacket, NextBlocked}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, options{})
			w := NewWindow(WindowConfig{Initial: int(c.limit), Max: int(c.limit)})
			p.a.q.SetWindow(w)
			w.charge(c.others)
			for i := range uint64(3) {
				if _, _, err := p.a.q.PostSend([]verbs.SendWR{sendWR(verbs.Send, i, 0, 64)}); err != nil {
					t.Fatal(err)
				}
			}
			for i, want := range c.want {
				out := &p.a.scratch
				if got := p.a.q.NextPacket(p.now, out); got != want {
					t.Fatalf("packet %d: %v, want %v", i, got, want)
				}
				if want == NextPacket && !out.Packet.AckReq {
					t.Errorf("packet %d, behind which nothing fits, asks for no acknowledgement", i)
				}
			}
		})
	}
}

// While small messages of one queue pair pass, bulk of another fills less of the window that they
// share, and waits for no timer; when they have stopped it fills all of it again.
func TestBulkLetsSmallPass(t *testing.T) {
	const full, message = 768 << 10, 1 << 20
	shared := NewWindow(WindowConfig{Initial: full, Max: full, PSNs: 1 << 13, Trains: true})
	bulk := newPair(t, options{mtu: verbs.MTU4096, memSize: message})
	small := newPair(t, options{mtu: verbs.MTU4096})
	for _, p := range []*pair{bulk, small} {
		p.state(p.a, verbs.QPReset)
		p.a.q.SetWindow(shared)
		p.a.win = shared
		p.to(p.a, verbs.QPRTS)
	}
	bulk.a.shares, small.a.shares = []*QP{small.a.q}, []*QP{bulk.a.q}
	// turn has the bulk's peer answer all but some of what is under way, and bulk go on.
	turn := func(keep int) {
		bulk.a.wcs = bulk.a.wcs[:0]
		for bulk.a.q.sq.InUse() < 8 {
			bulk.post(bulk.a, sendWR(verbs.RDMAWrite, 1, 0, message))
		}
		out := bulk.a.take()
		n := max(len(out)-keep, 0)
		bulk.deliver(bulk.b, out[:n]...)
		bulk.pump(bulk.b)
		bulk.deliver(bulk.a, bulk.b.take()...)
		shared.HasRoom()
		bulk.pump(bulk.a)
		bulk.a.out = append(out[n:len(out):len(out)], bulk.a.out...)
	}
	ping := func() {
		small.postRecv(small.b, 1, 0, 64)
		small.post(small.a, sendWR(verbs.Send, 1, 0, 64))
		small.pump(small.a)
		if len(small.a.out) != 1 {
			t.Fatal("a small message waits for room")
		}
		small.run()
	}
	turn(0)
	if shared.Used() < full*9/10 {
		t.Fatalf("bulk alone has %d bytes under way", shared.Used())
	}
	for i := range 50 {
		ping()
		turn(i % 7)
		if n := shared.Used(); i > 0 && n > politeLimit || n == 0 {
			t.Fatalf("beside small messages, turn %d: %d bytes under way", i, n)
		}
	}
	moved := 0
	for shared.Used() < full*9/10 {
		before := shared.Used()
		turn(0)
		if moved += before; moved > politeSpan+full {
			t.Fatal("bulk stays polite")
		}
	}
	if moved < politeSpan*9/10 {
		t.Errorf("polite for %d bytes only", moved)
	}
	if n := bulk.a.env.Counters.EarlyRetransmits.Load(); n != 0 {
		t.Errorf("%d early retransmissions", n)
	}
}

// Politeness comes between packets of messages that have asked for no answer yet: they go on
// until one has, or nobody would ever answer.
func TestPoliteInMidMessage(t *testing.T) {
	const full, message = 768 << 10, 1 << 20
	shared := NewWindow(WindowConfig{Initial: full, Max: full, PSNs: 1 << 13, Trains: true})
	var pairs [3]*pair
	for i := range pairs {
		p := newPair(t, options{mtu: verbs.MTU4096, memSize: message})
		p.state(p.a, verbs.QPReset)
		p.a.q.SetWindow(shared)
		p.a.win = shared
		p.to(p.a, verbs.QPRTS)
		pairs[i] = p
	}
	x, y, small := pairs[0], pairs[1], pairs[2]
	for _, p := range pairs[:2] {
		p.post(p.a, sendWR(verbs.RDMAWrite, 1, 0, message))
		for range 30 {
			var out Out
			if p.a.q.NextPacket(p.now, &out) != NextPacket || out.Packet.AckReq {
				t.Fatal("a bulk packet does not leave, or asks")
			}
			p.a.out = append(p.a.out, p.encode(p.a, &out))
		}
	}
	small.postRecv(small.b, 1, 0, 64)
	small.post(small.a, sendWR(verbs.Send, 1, 0, 64))
	var out Out
	if small.a.q.NextPacket(small.now, &out) != NextPacket {
		t.Fatal("a small message waits for room")
	}
	if shared.Used() < politeLimit || shared.polite == 0 {
		t.Fatal("the window is not in the state that this is about")
	}
	for _, p := range []*pair{x, y} {
		asks := false
		for !asks {
			if p.a.q.NextPacket(p.now, &out) != NextPacket {
				t.Fatal("stands still, and nobody was asked for an answer")
			}
			asks = out.Packet.AckReq
		}
		if p.a.q.NextPacket(p.now, &out) == NextPacket {
			t.Error("goes on though small messages want to pass")
		}
	}
}
