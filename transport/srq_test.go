package transport_test

import (
	"errors"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func createSRQ(t testing.TB, pd *transport.PD, cfg transport.SRQConfig) *transport.SRQ {
	t.Helper()
	s, err := pd.CreateSRQ(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func createCQ(t testing.TB, dev *transport.Device, depth int) *transport.CQ {
	t.Helper()
	c, err := dev.CreateCQ(depth)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// event waits for an event of this type and skips others.
func event(t *testing.T, dev *transport.Device, typ verbs.EventType) verbs.Event {
	t.Helper()
	for ctx := deadline(t); ; {
		ev, err := dev.NextEvent(ctx)
		if err != nil {
			t.Fatalf("%v: %v", typ, err)
		}
		if ev.Type == typ {
			return ev
		}
	}
}

// TestSRQ: connections of one program take their receives from one queue; the limit tells when
// it runs low; a queue pair is ended without losing a receive.
func TestSRQ(t *testing.T) {
	a, b := open(t, "127.1.24.1", transport.Config{}), open(t, "127.1.24.2", transport.Config{})
	ctx := deadline(t)
	amr, bmr := register(t, a, 1024, 0), register(t, b, 64<<10, verbs.LocalWrite)
	srq := createSRQ(t, b.PD(), transport.SRQConfig{MaxWR: 16})
	cq := createCQ(t, b, 256)
	const conns, messages = 4, 40
	var qas, qbs []*transport.QP
	for range conns {
		qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{SRQ: srq, RecvCQ: cq})
		qas, qbs = append(qas, qa), append(qbs, qb)
	}
	post := func(id int) {
		t.Helper()
		if err := srq.PostRecv(verbs.RecvWR{WRID: uint64(id), SGList: bmr.SGL(id*1024, 1024)}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 16 {
		post(i)
	}
	if err := srq.PostRecv(verbs.RecvWR{}); !errors.Is(err, transport.ErrQueueFull) {
		t.Errorf("a full queue: %v", err)
	}
	if err := qbs[0].PostRecv(verbs.RecvWR{}); !errors.Is(err, verbs.ErrBadWR) {
		t.Errorf("PostRecv with an SRQ: %v", err)
	}
	if err := srq.SetLimit(17); err == nil {
		t.Error("a limit beyond the depth accepted")
	}
	if err := srq.SetLimit(16); err != nil {
		t.Fatal(err)
	}
	for i := range messages {
		for j, qa := range qas {
			amr.Bytes()[j] = byte(i)
			wr := verbs.SendWR{Opcode: verbs.SendWithImm, Flags: verbs.Signaled, ImmData: uint32(i<<8 | j), SGList: amr.SGL(0, 64)}
			if err := qa.PostSend(wr); err != nil {
				t.Fatal(err)
			}
			wc, err := cq.Next(ctx)
			if err != nil || wc.ImmData != wr.ImmData || wc.QPN != qbs[j].Num() {
				t.Fatalf("message %d of connection %d: %+v, %v", i, j, wc, err)
			}
			if i == 0 && j == 0 {
				if ev := event(t, b, verbs.EventSRQLimitReached); ev.SRQN != srq.Num() || ev.QPN != 0 {
					t.Errorf("event %+v", ev)
				}
			}
			if got := bmr.Bytes()[int(wc.WRID)*1024+j]; got != byte(i) {
				t.Fatalf("receive %d holds %d, want %d", wc.WRID, got, i)
			}
			post(int(wc.WRID))
			if _, err := qa.SendCQ().Next(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	// As many as the limit is not fewer.
	if err := srq.SetLimit(16); err != nil {
		t.Fatal(err)
	}
	if srq.Len() != 16 {
		t.Fatalf("%d receives", srq.Len())
	}
	if err := srq.Close(); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("close in use: %v", err)
	}
	for i, qb := range qbs {
		if err := qb.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}); err != nil {
			t.Fatal(err)
		}
		if ev := event(t, b, verbs.EventQPLastWQEReached); ev.QPN != qb.Num() {
			t.Errorf("event %+v, want of %v", ev, qb.Num())
		}
		if err := errors.Join(qb.Close(), qas[i].Close()); err != nil {
			t.Fatal(err)
		}
	}
	if n := srq.Len(); n != 16 {
		t.Errorf("%d receives left, want all 16", n)
	}
	if err := srq.Close(); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{srq.Close(), srq.PostRecv(verbs.RecvWR{}), srq.SetLimit(1)} {
		if !errors.Is(err, transport.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
	if _, err := b.PD().CreateQP(transport.QPConfig{SendCQ: cq, RecvCQ: cq, SRQ: srq}); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("queue pair on a closed queue: %v", err)
	}
	pd, err := b.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	srq = createSRQ(t, pd, transport.SRQConfig{})
	if err := srq.SetLimit(1); err != nil {
		t.Fatal(err)
	}
	if ev := event(t, b, verbs.EventSRQLimitReached); ev.SRQN != srq.Num() {
		t.Errorf("event %+v", ev)
	}
	if _, err := b.PD().CreateQP(transport.QPConfig{SendCQ: cq, RecvCQ: cq, SRQ: srq}); !errors.Is(err, verbs.ErrBadAttr) {
		t.Errorf("SRQ of another domain: %v", err)
	}
	if err := errors.Join(srq.Close(), cq.Close()); err != nil {
		t.Errorf("a refused queue pair holds something: %v", err)
	}
}

// TestSRQPathAllocatesNothing posts to the SRQ, sends, polls.
func TestSRQPathAllocatesNothing(t *testing.T) {
	if !udp.Direct {
		t.Skip("the portable socket path allocates for each datagram")
	}
	a, b := open(t, "127.1.25.1", transport.Config{}), open(t, "127.1.25.2", transport.Config{})
	srq := createSRQ(t, b.PD(), transport.SRQConfig{})
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{SRQ: srq})
	amr, bmr := register(t, a, 64, 0), register(t, b, 64, verbs.LocalWrite)
	sge, rge := amr.SGL(0, 64), bmr.SGL(0, 64)
	wc := make([]verbs.WC, 4)
	round := func() {
		if err := srq.PostRecv(verbs.RecvWR{SGList: rge}); err != nil {
			t.Fatal(err)
		}
		if err := qa.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sge}); err != nil {
			t.Fatal(err)
		}
		for qb.CQ().Poll(wc) == 0 {
		}
		for qa.CQ().Poll(wc) == 0 {
			qb.CQ().Poll(wc)
		}
	}
	for range 100 {
		round()
	}
	if n := testing.AllocsPerRun(500, round); n > 0 {
		t.Errorf("%v allocations per message", n)
	}
}

// A shared receive queue that is closed with an event that nobody has read is not kept by it.
func TestSRQCloseForgetsEvents(t *testing.T) {
	dev := open(t, "127.1.24.5", transport.Config{})
	srq := createSRQ(t, dev.PD(), transport.SRQConfig{})
	if err := srq.SetLimit(1); err != nil { // fewer are left already
		t.Fatal(err)
	}
	if n := transport.UnreadEvents(dev); n != 1 {
		t.Fatalf("%d objects have events, want 1", n)
	}
	if err := srq.Close(); err != nil {
		t.Fatal(err)
	}
	if n := transport.UnreadEvents(dev); n != 0 {
		t.Errorf("events of %d closed objects are kept", n)
	}
	if err := srq.Close(); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
}

// The largest shared receive queue is the one that the device says, and no larger.
func TestSRQLimits(t *testing.T) {
	dev := open(t, "127.1.24.6", transport.Config{})
	attr := dev.Attr()
	srq := createSRQ(t, dev.PD(), transport.SRQConfig{MaxWR: attr.MaxSRQWR, MaxSGE: 1})
	if srq.Cap() != attr.MaxSRQWR {
		t.Errorf("capacity %d, want %d", srq.Cap(), attr.MaxSRQWR)
	}
	createSRQ(t, dev.PD(), transport.SRQConfig{MaxWR: 1, MaxSGE: attr.MaxSRQSGE})
	for _, cfg := range []transport.SRQConfig{{MaxWR: attr.MaxSRQWR + 1}, {MaxSGE: attr.MaxSRQSGE + 1}} {
		if _, err := dev.PD().CreateSRQ(cfg); !errors.Is(err, verbs.ErrBadAttr) {
			t.Errorf("%+v: %v, want ErrBadAttr", cfg, err)
		}
	}
}
