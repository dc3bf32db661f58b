package qp

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// F47: messages of every size around what may be outstanding, on a lossless link: nothing
// waits for a timer, and the windows are kept.
func TestWindowNeverStalls(t *testing.T) {
	for _, w := range []WindowConfig{
		{PSNs: 1, Initial: 1 << 20}, {PSNs: 2, Initial: 1 << 20}, {PSNs: 8, Initial: 1 << 20}, {PSNs: 33, Initial: 1 << 20},
		{Initial: 1, Max: 1}, {Initial: 900, Max: 900}, {Initial: 5000, Max: 5000}, {Initial: 40000, Max: 40000},
		{Initial: 5000, Max: 5000, Trains: true}, {PSNs: 3, Initial: 2500, Max: 2500},
	} {
		for _, packets := range []int{1, 2, 3, 7, 8, 9, 24, 31, 32, 33, 34, 66, 100} {
			for _, op := range []verbs.Opcode{verbs.Send, verbs.RDMAWrite, verbs.RDMARead} {
				for _, depth := range []int{1, 2, 16} {
					p := newPair(t, options{mtu: verbs.MTU256, window: w, cap: verbs.QPCap{MaxSendWR: depth, MaxRecvWR: 64}, memSize: 1 << 15})
					p.sent = func(n *node, pkt *roce.Packet) {
						if n == p.a && n.q.req.nxt-n.q.req.una > uint64(n.win.cfg.PSNs) && !isRead(op) && n.win.cfg.PSNs > 1 {
							t.Fatalf("%d PSNs outstanding of %d", n.q.req.nxt-n.q.req.una, n.win.cfg.PSNs)
						}
					}
					for i := range depth {
						p.postRecv(p.b, uint64(i), 0, 256*packets)
						wr := sendWR(op, uint64(i), 0, 256*packets-i)
						if i < depth-1 {
							wr.Flags = 0
						}
						p.post(p.a, wr)
					}
					p.run()
					if len(p.a.wcs) != 1 || p.a.wcs[0].Status != verbs.WCSuccess {
						t.Fatalf("%+v, %d packets, %v, depth %d: stalled with %+v", w, packets, op, depth, p.a.wcs)
					}
					if n := p.a.env.Counters.Retransmits.Load(); n != 0 {
						t.Fatalf("%+v: %d retransmissions", w, n)
					}
				}
			}
		}
	}
}

// Sixteen queue pairs with many small messages share one window: the peer's socket never
// holds more than it says, beyond the one packet that each may always send.
func TestWindowIsShared(t *testing.T) {
	const limit = 32 * datagramCost
	shared := NewWindow(WindowConfig{Initial: limit, Max: limit})
	var pairs []*pair
	for range 16 {
		p := newPair(t, options{cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64}})
		p.a.q.SetWindow(shared)
		for i := range 64 {
			p.postRecv(p.b, uint64(i), 0, 64)
			wr := sendWR(verbs.Send, uint64(i), 0, 64)
			if _, _, err := p.a.q.PostSend([]verbs.SendWR{wr}); err != nil {
				t.Fatal(err)
			}
		}
		pairs = append(pairs, p)
	}
	done := 0
	for round := 0; done < 16*64; round++ {
		if round > 1000 {
			t.Fatalf("%d of %d messages after %d rounds", done, 16*64, round)
		}
		for i := range pairs {
			// Turns, so that nobody is always first.
			p := pairs[(i+round)%len(pairs)]
			for p.a.q.NextPacket(p.now, &p.a.scratch) == NextPacket {
				p.a.out = append(p.a.out, p.encode(p.a, &p.a.scratch))
			}
		}
		inFlight, room := int64(0), false
		for _, p := range pairs {
			inFlight += int64(len(p.a.out)) * datagramCost
		}
		if inFlight > limit+16*datagramCost {
			t.Fatalf("%d bytes in flight, the window is %d", inFlight, limit)
		}
		for _, p := range pairs {
			p.deliver2(p.b, p.a.take()...)
			p.pump2(p.b)
			p.deliver2(p.a, p.b.take()...)
			room = room || shared.HasRoom()
			p.pump2(p.a)
			done += len(p.a.wcs)
			p.a.wcs = nil
			p.b.wcs = nil
		}
		if !room {
			t.Fatal("nobody would have been woken")
		}
	}
	if shared.used != 0 {
		// What pump2 let leave in the last round was delivered in none.
		t.Logf("%d bytes in flight at the end", shared.used)
	}
}

// deliver2 and pump2 do as deliver and pump, without the checks that assume a window of one's own.
func (p *pair) deliver2(n *node, packets ...[]byte) {
	var pkt roce.Packet
	for _, b := range packets {
		if err := pkt.Decode(b); err != nil {
			p.t.Fatal(err)
		}
		n.q.HandlePacket(p.now, &pkt)
		if err := n.q.check(); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *pair) pump2(n *node) {
	for n.q.Service(p.now) {
	}
	for n.q.NextPacket(p.now, &n.scratch) == NextPacket {
		n.out = append(n.out, p.encode(n, &n.scratch))
	}
	for _, c := range n.env.Dirty {
		c.Commit()
	}
	n.env.Dirty = n.env.Dirty[:0]
	var wc [64]verbs.WC
	k := n.cq.Poll(wc[:])
	n.wcs = append(n.wcs, wc[:k]...)
}

func TestWindowGrowsAndShrinks(t *testing.T) {
	w := NewWindow(WindowConfig{})
	if w.Limit() != 32*(832+1024) || w.Used() != 0 {
		t.Fatalf("limit %d, used %d", w.Limit(), w.Used())
	}
	now := verbs.Instant(1e9)
	fly := func() { // one round trip with the window full
		n := w.limit
		w.charge(n)
		for n > 0 {
			k := min(n, 4096)
			w.acked(k)
			n -= k
		}
		now = now.Add(time.Millisecond)
	}
	before := w.limit
	fly()
	if w.limit < before*5/4 || w.limit > 2*before {
		t.Errorf("slow start: %d to %d", before, w.limit)
	}
	w.lost(now, false)
	if w.limit < before*5/4*7/10 || w.slowFrom != w.limit {
		t.Errorf("after a loss: %d, slow from %d", w.limit, w.slowFrom)
	}
	cut := w.limit
	w.charge(w.limit)
	w.lost(now.Add(100), true) // the same round trip
	w.release(w.limit)
	if w.limit != cut {
		t.Errorf("cut twice in one round trip: %d to %d", cut, w.limit)
	}
	for range 10 {
		fly()
	}
	if grew := w.limit - cut; grew < 3*1856 || grew > 10*1856 {
		t.Errorf("ten round trips of additive increase: %d bytes", grew)
	}
	open := w.limit
	now = now.Add(time.Second)
	w.charge(w.limit/2 - 1)
	w.lost(now, true) // of little that was in flight
	w.release(w.limit/2 - 1)
	if w.limit != open {
		t.Errorf("half empty, and cut from %d to %d", open, w.limit)
	}
	silent := func() {
		now = now.Add(time.Second)
		n := w.limit
		w.charge(n)
		w.lost(now, true)
		w.release(n)
	}
	for range 100 {
		silent()
	}
	if w.limit != windowFloor {
		t.Errorf("floor %d, want %d", w.limit, windowFloor)
	}
	if w.needless(); w.limit != open {
		t.Errorf("late and not lost: back at %d, was %d", w.limit, open)
	}
	silent()
	w.lost(now.Add(time.Second), false)
	if low := w.limit; low < open {
		if w.needless(); w.limit != low {
			t.Errorf("something was lost after all: %d to %d", low, w.limit)
		}
	}
	for range 100 {
		silent()
	}
	for range 10000 {
		fly()
	}
	if w.limit != int64(w.cfg.Max) {
		t.Errorf("grew to %d, the most is %d", w.limit, w.cfg.Max)
	}
	// A window that nobody fills does not grow.
	w.Configure(WindowConfig{Initial: 100000, Max: 200000})
	for range 100 {
		w.charge(1000)
		w.acked(1000)
	}
	if w.limit != 100000 {
		t.Errorf("grew to %d without need", w.limit)
	}
}

// The round trip grows far beyond its least: the window gives way. Jitter of a scheduler
// does not count.
func TestWindowFollowsRTT(t *testing.T) {
	w := NewWindow(WindowConfig{Initial: 1 << 18, Max: 1 << 20})
	w.limit = 1 << 20
	now := verbs.Instant(0)
	for i := range 200 {
		now = now.Add(time.Millisecond)
		w.sample(now, 50*time.Microsecond+time.Duration(i%10)*150*time.Microsecond)
	}
	if w.limit != 1<<20 {
		t.Errorf("jitter cut the window to %d", w.limit)
	}
	if w.rto(0) != rtoFloor && w.rto(0) > 4*time.Millisecond {
		t.Errorf("rto %v", w.rto(0))
	}
	for range 50 {
		now = now.Add(10 * time.Millisecond)
		w.sample(now, 20*time.Millisecond)
	}
	if w.limit != 1<<18 {
		t.Errorf("a queue of 20 ms left the window at %d", w.limit)
	}
	if d := w.rto(0); d < 20*time.Millisecond || d > 60*time.Millisecond {
		t.Errorf("rto %v", d)
	}
	if d := w.rto(200); d != rtoCeiling {
		t.Errorf("rto %v after many retries", d)
	}
}

// READs of many queue pairs wait for our own buffer; whoever waits too long goes anyway.
func TestReadsShareOurBuffer(t *testing.T) {
	cfg := WindowConfig{Reads: 8 * (832 + 256)}
	shared := NewWindow(cfg)
	x, y := newPair(t, options{mtu: verbs.MTU256, rdAtomic: 8}), newPair(t, options{mtu: verbs.MTU256})
	for _, p := range []*pair{x, y} {
		p.state(p.a, verbs.QPReset)
		p.a.q.SetWindow(shared)
		p.a.win = shared
		p.to(p.a, verbs.QPRTS)
	}
	now := x.now
	read := []verbs.SendWR{sendWR(verbs.RDMARead, 1, 0, 20*256)}
	for _, p := range []*pair{x, y} {
		if _, _, err := p.a.q.PostSend(read); err != nil {
			t.Fatal(err)
		}
	}
	var out Out
	n := 0
	for x.a.q.NextPacket(now, &out) == NextPacket {
		n++
	}
	if n != 2 { // two pieces of four
		t.Errorf("%d requests left", n)
	}
	if y.a.q.NextPacket(now, &out) != NextBlocked || shared.HasRoom() {
		t.Error("the other queue pair is not blocked")
	}
	if y.a.q.Deadline() == verbs.Never {
		t.Fatal("it would wait for ever")
	}
	// The first one's peer is gone; the second goes on when its wait is over.
	now = y.a.q.Deadline()
	y.a.q.HandleTimeout(now)
	if err := y.a.q.check(); err != nil {
		t.Fatal(err)
	}
	if y.a.q.NextPacket(now, &out) != NextPacket {
		t.Error("still blocked")
	}
	x.a.q.Close(now)
	if !shared.HasRoom() {
		t.Error("nobody is told of the room")
	}
	y.a.q.Close(now)
	if shared.inbound != 0 || shared.used != 0 {
		t.Errorf("%d and %d bytes left", shared.inbound, shared.used)
	}
}

// READ responses have most of our buffer as long as the peer sends next to nothing by itself, and
// then the share that it leaves; some READs later again the whole.
func TestReadsAlone(t *testing.T) {
	const packet = datagramCost + 4096
	w := NewWindow(WindowConfig{Reads: 8 * packet, ReadsAlone: 12 * packet, Trains: true})
	room := func() (n int) {
		for w.readRoom(1, 4096) {
			w.chargeReads(1, 4096)
			n++
		}
		w.releaseReads(uint32(n), 4096)
		return n
	}
	if n := room(); n != 12 {
		t.Errorf("room for %d responses, want 12", n)
	}
	w.arrived(64)
	if n := room(); n != 12 {
		t.Errorf("room for %d responses after a small message, want 12", n)
	}
	for range 1000 {
		w.arrived(4096)
	}
	if n := room(); n != 8 {
		t.Errorf("room for %d responses beside bulk, want 8", n)
	}
	total := 0
	for room() == 8 {
		if total += 8; total > theirsFade*theirsMost/packet {
			t.Fatal("the peer's messages are never forgotten")
		}
	}
	if n := room(); n != 12 || total < 100 {
		t.Errorf("room for %d responses, after %d", n, total)
	}
	if w := NewWindow(WindowConfig{Reads: 8 * packet}); w.readLimit() != 8*packet {
		t.Errorf("%d bytes without ReadsAlone", w.readLimit())
	}
}

func TestWindowConfigLimits(t *testing.T) {
	w := NewWindow(WindowConfig{PSNs: 1 << 30, Initial: 100, Max: 50, Reads: 1 << 40 >> 10})
	if w.cfg.PSNs != maxPSNs || w.Limit() != 50 {
		t.Errorf("%+v", w.cfg)
	}
	if c := w.readChunk(256); c != maxReadChunk {
		t.Errorf("READ pieces of %d packets", c)
	}
	if c := NewWindow(WindowConfig{Reads: 1}).readChunk(4096); c != 1 {
		t.Errorf("READ pieces of %d packets", c)
	}
	if NewWindow(WindowConfig{Initial: 8 << 20}).Limit() != 8<<20 {
		t.Error("a large window was cut to the default maximum")
	}
	small, large := w.cost(0), w.cost(4096)
	if small != 832 || w.cost(64) != 832 || large < 4096+600 {
		t.Errorf("costs %d, %d, %d", small, w.cost(64), large)
	}
	w.Configure(WindowConfig{Trains: true})
	if c := w.cost(64); c > 200 {
		t.Errorf("64 bytes in a train cost %d", c)
	}
}

// The largest message: 2^31 bytes take 2^23 packets of 256.
func TestPacketCounts(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256})
	for _, c := range []struct{ length, want uint32 }{
		{0, 1}, {1, 1}, {256, 1}, {257, 2}, {verbs.MaxMessage, 1 << 23}, {verbs.MaxMessage - 1, 1 << 23},
	} {
		if got := p.a.q.packets(c.length); got != c.want {
			t.Errorf("%d bytes take %d packets, want %d", c.length, got, c.want)
		}
	}
	if n := extend(seqBase+5, 0xfffffe); n != seqBase-2 {
		t.Errorf("extended to %x", n)
	}
	if n := extend(seqBase+1<<24-1, 3); n != seqBase+1<<24+3 {
		t.Errorf("extended to %x", n)
	}
}
