package qp

import (
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// F27: time to error is (retry_cnt+1) timeouts, for every retry_cnt and some codes; a short
// code is stretched, by at most the four times that the standard allows.
func TestTimeToError(t *testing.T) {
	for _, code := range []verbs.AckTimeout{1, 5, 8, 9, 10, 11, 14, 17} {
		for retry := range uint8(8) {
			p := newPair(t, options{timeout: code, retry: retry})
			p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
			start := p.now
			for range 100000 {
				p.pump(p.a)
				p.a.take()
				if p.a.q.State() == verbs.QPErr {
					break
				}
				p.advance(p.a.q.Deadline().Sub(p.now))
			}
			p.wantWCs(p.a, "1:RETRY_EXC_ERR")
			took := p.now.Sub(start)
			least := code.Duration() * time.Duration(retry+1)
			if took < least || took > 4*least {
				t.Errorf("timeout %d, retry_cnt %d: failed after %v, want %v to %v", code, retry, took, least, 4*least)
			}
			c := &p.a.env.Counters
			if got := c.Timeouts.Load(); got != uint64(retry)+1 {
				t.Errorf("timeout %d, retry_cnt %d: %d timeouts", code, retry, got)
			}
		}
	}
}

// Progress reloads both retry counters and restarts the timers; nothing outstanding stops
// them.
func TestProgressReloads(t *testing.T) {
	p := newPair(t, options{retry: 1, rnrRetry: 1, rnrTimer: 1, timeout: 12})
	for id := range uint64(5) {
		p.post(p.a, sendWR(verbs.Send, id, 0, 64))
		p.pump(p.a)
		p.a.take() // lost
		p.advance(20 * time.Millisecond)
		p.pump(p.a)
		if p.a.env.Counters.Timeouts.Load() != id+1 {
			t.Fatalf("message %d: %d timeouts", id, p.a.env.Counters.Timeouts.Load())
		}
		p.run() // RNR: no receive is posted
		p.postRecv(p.b, id, 0, 64)
		p.advance(10 * time.Microsecond)
		p.run()
		if p.a.q.Deadline() != verbs.Never {
			t.Fatal("a timer runs with nothing outstanding")
		}
	}
	p.wantWCs(p.a, "0:SEND", "1:SEND", "2:SEND", "3:SEND", "4:SEND")
}

// Tail loss: the last packet of a burst is lost and nothing follows it. The early timer
// recovers within a few milliseconds, whatever the attribute says.
func TestTailLoss(t *testing.T) {
	p := newPair(t, options{timeout: 20})
	for i := range 20 {
		p.postRecv(p.b, uint64(i), 0, 8192)
	}
	for id := range uint64(10) { // teach it the round trip
		p.post(p.a, sendWR(verbs.Send, id, 0, 64))
		p.pump(p.a)
		p.advance(50 * time.Microsecond)
		p.run()
	}
	if rtt := p.a.win.RTT(); rtt != 50*time.Microsecond {
		t.Errorf("measured %v", rtt)
	}
	p.post(p.a, sendWR(verbs.Send, 10, 0, 5000))
	p.pump(p.a)
	out := p.a.take()
	p.deliver(p.b, out[:len(out)-1]...)
	start := p.now
	p.settle(time.Second)
	if took := p.now.Sub(start); took > 4*time.Millisecond {
		t.Errorf("recovered after %v", took)
	}
	if n := p.a.env.Counters.Timeouts.Load(); n != 0 {
		t.Errorf("%d ack timeouts", n)
	}
}

// A peer that stalls for half a second costs a few packets, one at a time, and neither the
// connection nor the window: it had everything.
func TestStalledPeer(t *testing.T) {
	p := newPair(t, options{retry: 7, timeout: 14})
	for i := range 64 {
		p.postRecv(p.b, uint64(i), 0, 64)
		p.post(p.a, sendWR(verbs.Send, uint64(i), 0, 64))
	}
	p.pump(p.a)
	all := p.a.take()
	window := p.a.win.Limit()
	p.advance(500 * time.Millisecond)
	if p.a.win.Limit() >= window {
		t.Error("silence left the window as it was")
	}
	again := p.a.take()
	if len(again) > 20 {
		t.Errorf("%d packets sent into a stall", len(again))
	}
	p.deliver(p.b, append(all, again...)...)
	p.run()
	if len(p.a.wcs) != 64 || p.a.q.State() != verbs.QPRTS {
		t.Errorf("%d completions, state %v", len(p.a.wcs), p.a.q.State())
	}
	if n := p.a.win.Limit(); n < window {
		t.Errorf("the window is %d, was %d before the stall", n, window)
	}
}

// What silence means shows when the peer answers the one packet that was sent again: it has
// that one only, so the rest was lost too, and the window stays cut.
func TestSilenceWasLoss(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256, timeout: 14})
	p.postRecv(p.b, 1, 0, 1<<14)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 1<<14))
	p.pump(p.a)
	p.a.take() // lost
	window := p.a.win.Limit()
	p.now = p.a.q.Deadline()
	p.a.q.HandleTimeout(p.now)
	p.pump(p.a)
	again := p.a.take()
	if len(again) != 1 || !decoded(t, again)[0].AckReq {
		t.Fatalf("%d packets ask the silent peer, want one", len(again))
	}
	p.deliver(p.b, again...)
	p.run()
	p.wantWCs(p.a, "1:SEND")
	if n := p.a.win.Limit(); n >= window {
		t.Errorf("the window is %d, was %d before the loss", n, window)
	}
	if p.a.win.spared != 0 {
		t.Error("what is late another time would undo this cut")
	}
}

// Our own wire was not run for a while: one late timeout counts once.
func TestLateTimeoutCountsOnce(t *testing.T) {
	p := newPair(t, options{retry: 1, timeout: 10})
	p.postRecv(p.b, 1, 0, 64)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
	p.pump(p.a)
	p.a.take()
	p.now = p.now.Add(time.Hour)
	p.a.q.HandleTimeout(p.now)
	p.check(p.a)
	p.run()
	p.wantWCs(p.a, "1:SEND")
}

// Karn: an answer that could be to either try is no measure of the round trip.
func TestNoRTTFromRetransmission(t *testing.T) {
	p := newPair(t, options{timeout: 20})
	p.postRecv(p.b, 1, 0, 64)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
	p.pump(p.a)
	late := p.a.take()
	p.advance(15 * time.Millisecond)
	p.deliver(p.b, late...)
	p.run()
	p.wantWCs(p.a, "1:SEND")
	if rtt := p.a.win.RTT(); rtt != 0 {
		t.Errorf("measured %v", rtt)
	}
}

// A timeout of one's own making: the answer to the first try arrives after going back. What
// was acknowledged is not sent again, and the rest goes on from there.
func TestAnswerAfterGoingBack(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256})
	p.postRecv(p.b, 1, 0, 4096)
	p.postRecv(p.b, 2, 0, 4096)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 1024), sendWR(verbs.Send, 2, 0, 1024))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	p.pump(p.b)
	acks := p.b.take()
	p.now = p.a.q.Deadline()
	p.a.q.HandleTimeout(p.now)
	p.deliver(p.a, acks...)
	p.pump(p.a)
	if n := len(p.a.take()); n != 0 {
		t.Errorf("%d packets sent again", n)
	}
	p.wantWCs(p.a, "1:SEND", "2:SEND")
}

// The same in the middle of a READ, whose late responses are as good as new ones.
func TestReadResponsesAfterGoingBack(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256, psnA: 0xfffffd})
	fill(p.b.remote.buf[:2000], 6)
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 2000))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	p.pump(p.b)
	resp := p.b.take()
	p.deliver(p.a, resp[:2]...)
	p.now = p.a.q.Deadline()
	p.a.q.HandleTimeout(p.now)
	p.check(p.a)
	p.deliver(p.a, resp[2:5]...)
	p.pump(p.a)
	again := decoded(t, p.a.take())
	if len(again) != 1 || again[0].RETH.VA != remoteBase+5*256 || again[0].RETH.DMALen != 2000-5*256 {
		t.Fatalf("asked again with %+v", again)
	}
	p.deliver(p.a, resp[5:]...)
	p.pump(p.a)
	p.wantWCs(p.a, "1:RDMA_READ")
	if !matches(p.a.recv.buf[:2000], 6) {
		t.Error("bytes changed")
	}
}

// F08: whatever happens during an RNR wait, no request leaves before it is over.
func TestRNRWaitIsKept(t *testing.T) {
	for code := range verbs.RNRTimer(32) {
		p := newPair(t, options{rnrRetry: 1, rnrTimer: code, timeout: 8, retry: 1})
		p.post(p.a, sendWR(verbs.Send, 1, 0, 64), sendWR(verbs.Send, 2, 0, 64))
		p.pump(p.a)
		p.deliver(p.b, p.a.take()...)
		p.pump(p.b)
		nak := p.b.take()
		p.deliver(p.a, nak...)
		end := p.now.Add(code.Duration())
		p.postRecv(p.b, 10, 0, 64)
		p.postRecv(p.b, 11, 0, 64)
		p.postRecv(p.b, 12, 0, 64)
		// The NAK again, an old ACK, a sequence NAK, a post, and all the time but a nanosecond.
		p.deliver(p.a, nak...)
		p.inject(p.a, roce.RCAck, p.o.psnA.Add(-1), roce.AckNoCredit)
		p.inject(p.a, roce.RCAck, p.o.psnA, roce.NakPSNSeq)
		p.post(p.a, sendWR(verbs.Send, 3, 0, 64))
		p.pump(p.a)
		p.advance(end.Sub(p.now) - 1)
		p.a.q.HandleTimeout(p.now) // too early
		p.pump(p.a)
		if n := len(p.a.out); n != 0 {
			t.Fatalf("code %d: %d packets left early", code, n)
		}
		p.advance(1)
		p.run()
		p.wantWCs(p.a, "1:SEND", "2:SEND", "3:SEND")
		if n := p.a.env.Counters.Timeouts.Load(); n != 0 {
			t.Errorf("code %d: %d ack timeouts", code, n)
		}
	}
}

// rnr_retry 7 waits without end.
func TestRNRForever(t *testing.T) {
	p := newPair(t, options{rnrRetry: 7, rnrTimer: 14, timeout: 8, retry: 0})
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
	for range 40000 { // 51 seconds
		p.run()
		p.advance(verbs.RNRTimer(14).Duration())
	}
	p.postRecv(p.b, 1, 0, 64)
	p.run()
	p.advance(verbs.RNRTimer(14).Duration())
	p.run()
	p.wantWCs(p.a, "1:SEND")
}

// An answer before the request that met no receive was lost: the RNR NAK is obeyed, it costs
// no retry, and the missing answer is asked for.
func TestRNRBehindLostRead(t *testing.T) {
	p := newPair(t, options{rnrRetry: 1, rnrTimer: 1, retry: 7})
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 64), sendWR(verbs.Send, 2, 0, 64))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	p.pump(p.b)
	p.deliver(p.a, p.b.take()[1:]...) // the response is lost, the NAK is not
	p.pump(p.a)
	if len(p.a.out) != 0 {
		t.Fatal("a request left during the wait")
	}
	p.advance(10 * time.Microsecond)
	p.run()
	p.postRecv(p.b, 10, 0, 64)
	p.advance(10 * time.Microsecond)
	p.run()
	p.wantWCs(p.a, "1:RDMA_READ", "2:SEND")
}

// An error behind a READ whose answer was lost: the responder is in ERR and will not repeat
// it, so the READ flushes, in order, and the error is told at once.
func TestErrorBehindLostRead(t *testing.T) {
	p := newPair(t, options{})
	bad := sendWR(verbs.RDMAWrite, 2, 0, 64)
	bad.RKey = 1
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 64), bad, sendWR(verbs.Send, 3, 0, 64))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	p.pump(p.b)
	p.deliver(p.a, p.b.take()[1:]...)
	p.pump(p.a)
	p.wantWCs(p.a, "1:WR_FLUSH_ERR", "2:REM_ACCESS_ERR", "3:WR_FLUSH_ERR")
}

// Full-size packets vanish while small ones arrive: an event says so, once.
func TestPathMTUEvent(t *testing.T) {
	p := newPair(t, options{retry: 7, timeout: 17})
	for i := range 4 {
		p.postRecv(p.b, uint64(i), 0, 8192)
	}
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
	p.run()
	p.post(p.a, sendWR(verbs.Send, 2, 0, 2000))
	for range 10 {
		p.pump(p.a)
		for _, b := range p.a.take() {
			if len(b) < 1024 {
				p.deliver(p.b, b)
			}
		}
		p.pump(p.b)
		p.deliver(p.a, p.b.take()...)
		p.advance(max(p.a.q.Deadline().Sub(p.now), 0))
	}
	if p.a.events != EvPathMTU {
		t.Errorf("events %b", p.a.events)
	}
	p.a.events = 0
	p.settle(time.Second)
	if p.a.events != 0 {
		t.Errorf("events %b after all went well", p.a.events)
	}
	p.wantWCs(p.a, "1:SEND", "2:SEND")

	// A peer that does not answer at all says nothing about the path.
	p = newPair(t, options{retry: 7, timeout: 17})
	p.post(p.a, sendWR(verbs.Send, 2, 0, 2000))
	p.pump(p.a)
	p.advance(2 * time.Second)
	if p.a.events&EvPathMTU != 0 {
		t.Error("raised for a silent peer")
	}
}

// The region goes away while the response to a READ is under way.
func TestRegionDiesUnderRead(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256})
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 1024))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	for range 2 {
		if p.b.q.NextPacket(p.now, &p.b.scratch) != NextPacket {
			t.Fatal("no response")
		}
		p.deliver(p.a, p.encode(p.b, &p.b.scratch))
	}
	p.b.remote.dead = true
	p.run()
	p.wantWCs(p.a, "1:REM_ACCESS_ERR")
	if p.b.events != EvQPAccessErr|EvToErr {
		t.Errorf("events %b", p.b.events)
	}
}

// A NAK that ends the connection is sent after the answers that come before it, also in ERR.
func TestAnswersBeforeFatalNak(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256})
	bad := sendWR(verbs.RDMAWrite, 2, 0, 64)
	bad.RKey = 1
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 1024), bad)
	p.run()
	p.wantWCs(p.a, "1:RDMA_READ", "2:REM_ACCESS_ERR")
	if p.b.q.State() != verbs.QPErr || p.b.q.resp.owes() {
		t.Error("the responder is not in ERR or still owes")
	}
}

// inject gives n an ACK packet that nobody sent.
func (p *pair) inject(n *node, op roce.Opcode, psn verbs.PSN, syndrome uint8) {
	p.t.Helper()
	pkt := roce.Packet{
		BTH:  roce.BTH{Opcode: op, PKey: roce.DefaultPKey, DestQP: n.q.Num(), PSN: psn},
		AETH: roce.AETH{Syndrome: syndrome},
	}
	n.q.HandlePacket(p.now, &pkt)
	p.check(n)
}

// A send completion without room: CQ_ERR, the queue pair goes to ERR, what the CQ holds
// stays, and the WQEs are all disposed of.
func TestSendCQOverrun(t *testing.T) {
	for _, fail := range []bool{false, true} {
		p := newPair(t, options{cq: 2, retry: 0})
		for i := range 4 {
			p.postRecv(p.b, uint64(i), 0, 64)
		}
		for id := range uint64(4) {
			p.post(p.a, sendWR(verbs.Send, id, 0, 64))
		}
		for p.a.q.NextPacket(p.now, &p.a.scratch) == NextPacket {
			p.encode(p.a, &p.a.scratch)
		}
		if fail { // the third completion is an error
			p.inject(p.a, roce.RCAck, 1, roce.AckNoCredit)
			p.inject(p.a, roce.RCAck, 2, roce.NakRemAccess)
		} else {
			p.inject(p.a, roce.RCAck, 3, roce.AckNoCredit)
		}
		for p.a.q.Service(p.now) {
		}
		p.check(p.a)
		if ev := p.a.q.TakeEvents(); ev != EvCQErr|EvQPFatal|EvToErr || p.a.q.State() != verbs.QPErr {
			t.Errorf("events %b in %v", ev, p.a.q.State())
		}
		if n := p.a.env.Counters.CQOverruns.Load(); n != 1 {
			t.Errorf("%d overruns", n)
		}
		if n := p.a.q.sq.InUse(); n != 0 || !p.a.cq.Full() {
			t.Errorf("%d WQEs left, overrun %v", n, p.a.cq.Full())
		}
		p.pump(p.a)
		p.wantWCs(p.a, "0:SEND", "1:SEND")
	}
}

// Packets of any kind are dropped in the states that do not take them.
func TestStatesDropPackets(t *testing.T) {
	for _, s := range []verbs.QPState{verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPErr} {
		p := inState(t, s)
		p.inject(p.a, roce.RCAck, 0, roce.AckNoCredit)
		want := uint64(1)
		if s != verbs.QPRTR {
			p.inject(p.a, roce.RCSendOnly, 0, 0)
			want = 2
		}
		p.pump(p.a)
		if got := p.a.env.Counters.DroppedState.Load(); got != want || len(p.a.out) != 0 {
			t.Errorf("%v: %d dropped, %d packets out", s, got, len(p.a.out))
		}
	}
}

// An idle queue pair is small beyond its queues.
func TestIdleSize(t *testing.T) {
	var q QP
	per := int(unsafe.Sizeof(q)) + 128*int(unsafe.Sizeof(span{})) + 16*int(unsafe.Sizeof(resource{})) + 16*8
	if per > 4096 {
		t.Errorf("%d bytes: QP %d, spans of 128 WQEs %d, 16 resources %d", per, unsafe.Sizeof(q),
			128*unsafe.Sizeof(span{}), 16*unsafe.Sizeof(resource{}))
	}
}

// A WQE cannot be sent again, because its memory is gone; but the first try had arrived, and
// its answer comes. It is done, and what is behind it goes on.
func TestAnswerSavesFailedWQE(t *testing.T) {
	p := newPair(t, options{})
	for i := range 3 {
		p.postRecv(p.b, uint64(i), 0, 64)
	}
	read := sendWR(verbs.Send, 2, 0, 8)
	read.SGList[0].Addr, read.SGList[0].LKey = windowBase, windowKey
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64), read)
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	p.pump(p.b)
	acks := p.b.take()
	p.a.window.dead = true
	p.now = p.a.q.Deadline()
	p.a.q.HandleTimeout(p.now)
	p.pump(p.a)
	if n := len(p.a.out); n != 1 {
		t.Fatalf("%d packets sent again, want the first", n)
	}
	p.post(p.a, sendWR(verbs.Send, 3, 0, 64))
	p.deliver(p.a, acks...)
	p.run()
	p.wantWCs(p.a, "1:SEND", "2:SEND", "3:SEND")
}

// After the early timer has gone back, the next gap in a READ's answers counts as news.
func TestGapAfterTimer(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256})
	fill(p.b.remote.buf[:1024], 6)
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 1024))
	answers := func() [][]byte {
		p.pump(p.a)
		p.deliver(p.b, p.a.take()...)
		p.pump(p.b)
		return p.b.take()
	}
	p.deliver(p.a, answers()[1:]...) // a gap
	answers()                        // all lost
	p.advance(p.a.q.Deadline().Sub(p.now))
	p.deliver(p.a, answers()[1:]...) // a gap at the same place
	start := p.now
	p.run()
	p.wantWCs(p.a, "1:RDMA_READ")
	if p.now != start {
		t.Errorf("took %v more", p.now.Sub(start))
	}
}

// Packets change places within a batch. When the gap closes there, no NAK leaves; when
// something behind it was dropped for good, the NAK asks for that.
func TestGapClosesInItsBatch(t *testing.T) {
	for _, c := range []struct {
		order    []int
		syndrome uint8
		psn      verbs.PSN
	}{
		{[]int{1, 0, 1, 2}, roce.AckNoCredit, 2},
		{[]int{2, 1, 0, 1, 2}, roce.AckNoCredit, 2},
		{[]int{1, 0, 2}, roce.NakPSNSeq, 1},
		{[]int{2, 0, 1}, roce.NakPSNSeq, 2},
		{[]int{2, 1}, roce.NakPSNSeq, 0},
	} {
		p := newPair(t, options{mtu: verbs.MTU256})
		p.postRecv(p.b, 10, 0, 1024)
		p.post(p.a, sendWR(verbs.Send, 1, 0, 600))
		p.pump(p.a)
		out := p.a.take()
		for _, i := range c.order {
			p.deliver(p.b, out[i])
		}
		p.pump(p.b)
		got := decoded(t, p.b.out)
		if len(got) != 1 || got[0].AETH.Syndrome != c.syndrome || got[0].PSN != c.psn {
			t.Errorf("order %v: answered with %+v", c.order, got)
		}
		p.run()
		p.wantWCs(p.a, "1:SEND")
	}
}

// Answers leave in the order of PSNs: one that is asked for again goes before the rest of a
// later one.
func TestAnswersInOrder(t *testing.T) {
	p := newPair(t, options{mtu: verbs.MTU256})
	p.post(p.a, sendWR(verbs.RDMARead, 1, 0, 500), sendWR(verbs.RDMARead, 2, 0, 1000))
	p.pump(p.a)
	req := p.a.take()
	p.deliver(p.b, req...)
	var psns []verbs.PSN
	for i := 0; p.b.q.NextPacket(p.now, &p.b.scratch) == NextPacket; i++ {
		psns = append(psns, p.b.scratch.Packet.PSN)
		if i == 3 {
			p.deliver(p.b, req[0])
		}
	}
	want := []verbs.PSN{0, 1, 2, 3, 0, 1, 4, 5}
	if !slices.Equal(psns, want) {
		t.Errorf("answered %v, want %v", psns, want)
	}
}
