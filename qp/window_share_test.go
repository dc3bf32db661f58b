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
