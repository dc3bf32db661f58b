package netsim

import (
	"fmt"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// connect opens a connection whose passive queue pair takes its receives from srq, if not nil.
func connect(t *testing.T, net *Net, a, b *Node, srq *qp.SRQ, lane *qp.CQ) (aq, bq *wire.QP, ac, bc *wire.Conn) {
	t.Helper()
	aq = a.QP(qp.NewCQ(1024), verbs.QPCap{})
	bq, err := b.Wire.CreateQP(qp.Config{Type: verbs.RC, PD: PD, SRQ: srq, SendCQ: lane, RecvCQ: lane})
	if err != nil {
		t.Fatal(err)
	}
	attr := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
		State: verbs.QPInit, Port: 1, AccessFlags: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic,
	}
	if err := b.Wire.Modify(net.Now(), bq, &attr); err != nil {
		t.Fatal(err)
	}
	p := Defaults()
	p.Access = verbs.RemoteWrite | verbs.RemoteRead
	if ac, bc, err = net.Connect(a, b, aq, bq, p); err != nil {
		t.Fatal(err)
	}
	return aq, bq, ac, bc
}

// TestSRQUnderFaults: many queue pairs share few receives while the network loses, doubles and
// delays: each message arrives once, whole, in the order of its queue pair, and every receive
// is used or still there. REQ and REP say that an SRQ is in use.
func TestSRQUnderFaults(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { srqRun(t, seed) })
	}
}

func srqRun(t *testing.T, seed uint64) {
	const qps, messages, depth, size = 5, 120, 8, 3000
	net := New(seed)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	srq, err := qp.NewSRQ(PD, depth, 1)
	if err != nil {
		t.Fatal(err)
	}
	lows := 0
	srq.OnLow = func() { lows++ }
	lane := qp.NewCQ(1024)
	aqs, byNum := make([]*wire.QP, qps), map[verbs.QPN]int{}
	for i := range aqs {
		aq, bq, ac, bc := connect(t, net, a, b, srq, lane)
		if bc.Req.SRQ || !ac.Rep.SRQ {
			t.Fatalf("REQ says SRQ %v, REP %v", bc.Req.SRQ, ac.Rep.SRQ)
		}
		aqs[i], byNum[bq.Num()] = aq, i
	}
	amr, bmr := a.Register(make([]byte, qps*size), 0), b.Register(make([]byte, depth*size), verbs.LocalWrite)
	supply := func(id int) {
		wr := verbs.RecvWR{WRID: uint64(id), SGList: sgl(bmr, id*size, size)}
		if n, err := srq.Post([]verbs.RecvWR{wr}); n != 1 {
			t.Fatalf("seed %d: receive: %v", seed, err)
		}
	}
	for i := range depth {
		supply(i)
	}
	srq.SetLimit(depth / 2)
	net.Faults = Faults{Drop: 0.02, Duplicate: 0.02, Reorder: 0.02}
	length := func(q, n int) int { return 8 + (q*31+n*977)%(size-7) }
	var next, received [qps]int
	var late []int // receives to be supplied later, so that the queue runs dry now and then
	got, sent := 0, 0
	post := func(q int) {
		if next[q] == messages {
			return
		}
		buf := amr.Bytes()[q*size:][:length(q, next[q])]
		fill(buf, q<<20|next[q])
		op := verbs.SendWR{WRID: uint64(q), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sgl(amr, q*size, len(buf))}
		if _, err := a.Send(aqs[q], op); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		next[q]++
	}
	var wc [16]verbs.WC
	a.OnCompletions = func(l *qp.CQ) {
		for _, c := range wc[:l.Poll(wc[:])] {
			if c.Status != verbs.WCSuccess {
				t.Fatalf("seed %d: %v", seed, c.Status)
			}
			sent++
			post(int(c.WRID))
		}
	}
	b.OnCompletions = func(l *qp.CQ) {
		for _, c := range wc[:l.Poll(wc[:])] {
			if c.Status != verbs.WCSuccess {
				t.Fatalf("seed %d: %v", seed, c.Status)
			}
			q := byNum[c.QPN]
			n := received[q]
			buf := bmr.Bytes()[int(c.WRID)*size:][:c.ByteLen]
			want := make([]byte, length(q, n))
			fill(want, q<<20|n)
			if string(buf) != string(want) {
				t.Fatalf("seed %d: queue pair %d, message %d: %d bytes beginning %x, want %d beginning %x",
					seed, q, n, len(buf), buf[:8], len(want), want[:8])
			}
			received[q]++
			got++
			if got%7 == 0 {

				late = append(late, int(c.WRID))
				continue
			}
			supply(int(c.WRID))
		}
	}
	for q := range aqs {
		post(q)
	}
	for sent < qps*messages {
		if !net.Run(50*time.Millisecond, func() bool { return sent == qps*messages }) && net.Now() > verbs.Instant(5*time.Minute) {
			t.Fatalf("seed %d: stuck after %d messages", seed, sent)
		}
		for _, id := range late {
			supply(id)
		}
		late = late[:0]
	}
	if got != qps*messages || srq.Len() != depth {
		t.Errorf("seed %d: %d messages, %d receives left", seed, got, srq.Len())
	}
	if lows != 1 {
		t.Errorf("seed %d: %d limit events", seed, lows)
	}
	if n := b.Wire.QPCounters().RNRNaksSent.Load(); n == 0 {
		t.Errorf("seed %d: the queue never ran dry", seed)
	}
}

// TestLastWQEAfterFlush: the event comes when the flush completions can be polled.
func TestLastWQEAfterFlush(t *testing.T) {
	net := New(3)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	srq, err := qp.NewSRQ(PD, 4, 1)
	if err != nil {
		t.Fatal(err)
	}
	lane := qp.NewCQ(64)
	aq, bq, _, _ := connect(t, net, a, b, srq, lane)
	amr, bmr := a.Register(make([]byte, 4096), 0), b.Register(make([]byte, 4096), verbs.LocalWrite)
	for i := range 3 {
		if _, err := srq.Post([]verbs.RecvWR{{WRID: uint64(i), SGList: sgl(bmr, 0, 4096)}}); err != nil {
			t.Fatal(err)
		}
	}
	// The second packet of a SEND is lost for good: the first has taken a receive.
	net.Rules = append(net.Rules, func(p *Packet) Verdict {
		d, ok := p.Decode()
		return Verdict{Drop: ok && (d.Opcode&0x1F == 1 || d.Opcode&0x1F == 2)}
	})
	if _, err := a.Send(aq, verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sgl(amr, 0, 4096)}); err != nil {
		t.Fatal(err)
	}
	visible := -1
	b.OnQPEvent = func(_ *wire.QP, ev verbs.EventType) {
		if ev == verbs.EventQPLastWQEReached {
			visible = lane.Len()
		}
	}
	net.Run(time.Millisecond, nil)
	if srq.Len() != 2 {
		t.Fatalf("%d receives left, want 2", srq.Len())
	}
	attr := verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}
	if err := b.Wire.Modify(net.Now(), bq, &attr); err != nil {
		t.Fatal(err)
	}
	net.Run(time.Second, func() bool { return visible >= 0 })
	if visible != 1 || srq.Len() != 2 {
		t.Errorf("%d completions visible at the event, want 1; %d receives left, want 2", visible, srq.Len())
	}
	var wc [4]verbs.WC
	if n := lane.Poll(wc[:]); n != 1 || wc[0].Status != verbs.WRFlushErr || wc[0].WRID != 0 {
		t.Errorf("%d completions: %+v", n, wc[0])
	}
}

// TestInvalidateUnderFaults: each SEND with invalidate takes its window away exactly once, also
// when it is sent again; a WRITE through a window that is gone hears why, not a timeout.
func TestInvalidateUnderFaults(t *testing.T) {
	for seed := range uint64(6) {
		net := New(seed)
		a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
		lane := qp.NewCQ(1024)
		aq, bq, _, _ := connect(t, net, a, b, nil, lane)
		amr := a.Register(make([]byte, 64), 0)
		bmr := b.Register(make([]byte, 64), verbs.LocalWrite|verbs.MWBind)
		win, err := b.MRs.AllocWindow(PD)
		if err != nil {
			t.Fatal(err)
		}
		net.Faults = Faults{Drop: 0.05, Duplicate: 0.05, Reorder: 0.05}
		var wc [16]verbs.WC
		var sent, received []verbs.WC
		a.OnCompletions = func(l *qp.CQ) { sent = append(sent, wc[:l.Poll(wc[:])]...) }
		b.OnCompletions = func(l *qp.CQ) { received = append(received, wc[:l.Poll(wc[:])]...) }
		await := func(what string, wcs *[]verbs.WC, want verbs.WCStatus) verbs.WC {
			t.Helper()
			if !net.Run(10*time.Second, func() bool { return len(*wcs) > 0 }) {
				t.Fatalf("seed %d: %s never completes", seed, what)
			}
			c := (*wcs)[0]
			*wcs = (*wcs)[1:]
			if c.Status != want {
				t.Fatalf("seed %d: %s: %v, want %v", seed, what, c.Status, want)
			}
			return c
		}
		send := func(wr verbs.SendWR) {
			t.Helper()
			wr.Flags |= verbs.Signaled
			if _, err := a.Send(aq, wr); err != nil {
				t.Fatal(err)
			}
		}
		write := func() verbs.SendWR {
			return verbs.SendWR{Opcode: verbs.RDMAWrite, RKey: win.Key(), RemoteAddr: bmr.Addr(), SGList: sgl(amr, 0, 64)}
		}
		for i := range 100 {
			key := win.Key()&^0xFF | uint32(uint8(win.Key())+1)
			bind := verbs.SendWR{
				Opcode: verbs.BindMW, Flags: verbs.Signaled, RKey: key, SGList: sgl(bmr, 0, 64), BindAccess: verbs.RemoteWrite,
			}
			if _, err := b.Send(bq, bind); err != nil {
				t.Fatal(err)
			}
			await("bind", &received, verbs.WCSuccess)
			if _, err := b.Recv(bq, verbs.RecvWR{WRID: uint64(i)}); err != nil {
				t.Fatal(err)
			}
			send(write())
			send(verbs.SendWR{Opcode: verbs.SendWithInv, InvalidateRKey: key})
			await("WRITE", &sent, verbs.WCSuccess)
			c := await("receive", &received, verbs.WCSuccess)
			if c.WRID != uint64(i) || c.InvalidatedRKey != key || b.MRs.Bound() != 0 {
				t.Fatalf("seed %d: %+v, %d windows bound", seed, c, b.MRs.Bound())
			}
			await("SEND with invalidate", &sent, verbs.WCSuccess)
		}
		if bmr.Placed() != 100 {
			t.Errorf("seed %d: %d WRITEs placed", seed, bmr.Placed())
		}
		send(write())
		await("WRITE through nothing", &sent, verbs.RemAccessErr)
	}
}

// F42: whatever a responder refuses on a connection, the requester hears the reason, within a
// round trip: the NAK goes ahead of the DREQ that follows.
func TestRefusalIsHeardBeforeTheDREQ(t *testing.T) {
	for _, tc := range []struct {
		name string
		wr   func(a, b *mr.Region) verbs.SendWR
		want verbs.WCStatus
	}{
		{"WRITE, bad R_Key", func(a, b *mr.Region) verbs.SendWR {
			return verbs.SendWR{Opcode: verbs.RDMAWrite, RKey: b.Key() ^ 1, RemoteAddr: b.Addr(), SGList: sgl(a, 0, 64)}
		}, verbs.RemAccessErr},
		{"READ, bad range", func(a, b *mr.Region) verbs.SendWR {
			return verbs.SendWR{Opcode: verbs.RDMARead, RKey: b.Key(), RemoteAddr: b.Addr() + 1, SGList: sgl(a, 0, 64)}
		}, verbs.RemAccessErr},
		{"atomic, not allowed by the queue pair", func(a, b *mr.Region) verbs.SendWR {
			return verbs.SendWR{Opcode: verbs.AtomicFetchAdd, RKey: b.Key(), RemoteAddr: b.Addr(), SGList: sgl(a, 0, 8)}
		}, verbs.RemInvReqErr},
		{"SEND, too long", func(a, _ *mr.Region) verbs.SendWR {
			return verbs.SendWR{Opcode: verbs.Send, SGList: sgl(a, 0, 64)}
		}, verbs.RemInvReqErr},
	} {
		t.Run(tc.name, func(t *testing.T) {
			net := New(1)
			a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
			aq, bq, _, _ := connect(t, net, a, b, nil, qp.NewCQ(64))
			attr := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrAccessFlags, State: verbs.QPRTS, AccessFlags: verbs.RemoteWrite | verbs.RemoteRead}
			if err := b.Wire.Modify(net.Now(), bq, &attr); err != nil {
				t.Fatal(err)
			}
			amr := a.Register(make([]byte, 64), verbs.LocalWrite)
			bmr := b.Register(make([]byte, 64), verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite|verbs.RemoteAtomic)
			if _, err := b.Recv(bq, verbs.RecvWR{SGList: sgl(bmr, 0, 8)}); err != nil {
				t.Fatal(err)
			}
			var wc [4]verbs.WC
			status := verbs.WCStatus(255)
			a.OnCompletions = func(l *qp.CQ) {
				if n := l.Poll(wc[:]); n > 0 && status == 255 {
					status = wc[0].Status
				}
			}
			wr := tc.wr(amr, bmr)
			wr.Flags = verbs.Signaled
			if _, err := a.Send(aq, wr); err != nil {
				t.Fatal(err)
			}
			start := net.Now()
			net.Run(time.Second, func() bool { return status != 255 })
			if took := net.Now().Sub(start); status != tc.want || took > 4*net.Latency {
				t.Errorf("%v after %v, want %v", status, took, tc.want)
			}
		})
	}
}
