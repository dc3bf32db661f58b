package transport_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// stream sends count messages from qa and waits for each to complete; with imm i.
func stream(t *testing.T, qa *transport.QP, count int, flags func(i int) verbs.SendFlags, pause time.Duration) {
	t.Helper()
	for i := range count {
		wr := verbs.SendWR{Opcode: verbs.SendWithImm, Flags: verbs.Signaled | flags(i), ImmData: uint32(i)}
		if err := qa.PostSend(wr); err != nil {
			t.Error(err)
			return
		}
		if _, err := qa.SendCQ().Next(t.Context()); err != nil {
			t.Error(err)
			return
		}
		if pause > 0 && i%7 == 0 {
			time.Sleep(pause) // so that the receiver really sleeps at times
		}
	}
}

// TestNotify: arm, poll again, wait never misses a completion, whichever way the device waits.
func TestNotify(t *testing.T) {
	for name, spin := range map[string]time.Duration{"spin": 0, "sleep": -1} {
		t.Run(name, func(t *testing.T) {
			a, b := open(t, "127.1.26.1", transport.Config{}), open(t, "127.1.26.2", transport.Config{Spin: spin})
			qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{Cap: verbs.QPCap{MaxRecvWR: 64}})
			const count = 1000
			for range 64 {
				if err := qb.PostRecv(verbs.RecvWR{}); err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			wg.Go(func() { stream(t, qa, count, func(int) verbs.SendFlags { return 0 }, 200*time.Microsecond) })
			cq, ctx := qb.CQ(), deadline(t)
			var wc [8]verbs.WC
			for got := 0; got < count; {
				cq.RequestNotify(false)
				for n := cq.Poll(wc[:]); n > 0; n = cq.Poll(wc[:]) {
					for _, c := range wc[:n] {
						if c.ImmData != uint32(got) || c.Status != verbs.WCSuccess {
							t.Fatalf("completion %+v, want message %d", c, got)
						}
						got++
						if err := qb.PostRecv(verbs.RecvWR{}); err != nil {
							t.Fatal(err)
						}
					}
				}
				if got < count {
					if err := cq.WaitNotify(ctx); err != nil {
						t.Fatalf("after %d of %d: %v", got, count, err)
					}
				}
			}
			wg.Wait()
		})
	}
}

// TestNotifyRules: one notification for one arming, solicited and not, cumulative; what is there
// already does not notify; errors are solicited.
func TestNotifyRules(t *testing.T) {
	a, b := open(t, "127.1.27.1", transport.Config{}), open(t, "127.1.27.2", transport.Config{})
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	cq, ctx := qb.CQ(), deadline(t)
	over, cancel := context.WithCancel(ctx)
	cancel()
	pending := func() bool {
		err := cq.WaitNotify(over) // takes one that is there, and waits for none
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		return err == nil
	}
	message := func(flags verbs.SendFlags) {
		t.Helper()
		if err := qb.PostRecv(verbs.RecvWR{}); err != nil {
			t.Fatal(err)
		}
		before := cq.Len()
		stream(t, qa, 1, func(int) verbs.SendFlags { return flags }, 0)
		for cq.Len() == before {
			if err := cq.Wait(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	drain := func() {
		var wc [16]verbs.WC
		for cq.Poll(wc[:]) > 0 {
		}
	}
	check := func(what string, want bool) {
		t.Helper()
		if got := pending(); got != want {
			t.Errorf("%s: notified %v, want %v", what, got, want)
		}
	}
	message(verbs.Solicited)
	check("not armed", false)
	cq.RequestNotify(false)
	check("armed with a completion there", false)
	message(0)
	check("armed for any", true)
	check("the same again", false)
	message(verbs.Solicited)
	check("armed once", false)
	cq.RequestNotify(true)
	message(0)
	check("armed for solicited, plain message", false)
	message(verbs.Solicited)
	check("armed for solicited, solicited message", true)
	cq.RequestNotify(true)
	cq.RequestNotify(false)
	cq.RequestNotify(true)
	message(0)
	check("any wins", true)
	cq.RequestNotify(false)
	message(0)
	cq.RequestNotify(false)
	message(0)
	check("two armings, first", true)
	check("two armings, second", true)
	drain()
	cq.RequestNotify(true)
	if err := qb.PostRecv(verbs.RecvWR{}); err != nil {
		t.Fatal(err)
	}
	if err := qb.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}); err != nil {
		t.Fatal(err)
	}
	if err := cq.WaitNotify(ctx); err != nil {
		t.Errorf("a flush is not solicited: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- cq.WaitNotify(ctx) }()
	if err := qb.Close(); err != nil { // and its queue with it
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, transport.ErrClosed) {
		t.Errorf("wait on a closed queue: %v", err)
	}
}

// TestResizeCQ: a queue is resized again and again under traffic, in both directions; nothing is
// lost or out of order.
func TestResizeCQ(t *testing.T) {
	a, b := open(t, "127.1.28.1", transport.Config{}), open(t, "127.1.28.2", transport.Config{})
	cq := createCQ(t, b, 64)
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{RecvCQ: cq, SendCQ: cq, Cap: verbs.QPCap{MaxRecvWR: 32, MaxSendWR: 16}})
	const count = 1000
	for range 32 {
		if err := qb.PostRecv(verbs.RecvWR{}); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { stream(t, qa, count, func(int) verbs.SendFlags { return 0 }, 0) })
	stop := make(chan struct{})
	wg.Go(func() {
		for depth := 64; ; depth = 64 + (depth*31)%1000 {
			select {
			case <-stop:
				return
			default:
			}
			if err := cq.Resize(depth); err != nil {
				t.Error(err)
				return
			}
		}
	})
	ctx := deadline(t)
	for i := range count {
		wc, err := cq.Next(ctx)
		if err != nil || wc.ImmData != uint32(i) {
			t.Fatalf("completion %d: %+v, %v", i, wc, err)
		}
		if err := qb.PostRecv(verbs.RecvWR{}); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	for _, depth := range []int{0, -1, 1<<22 + 1} {
		if err := cq.Resize(depth); err == nil {
			t.Errorf("resize to %d accepted", depth)
		}
	}
}

// F21: a queue that overflows tells: what it took can be polled, then Wait says so, CQ_ERR
// names it, and its queue pairs are in ERR.
func TestCQOverrun(t *testing.T) {
	a, b := open(t, "127.1.29.1", transport.Config{}), open(t, "127.1.29.2", transport.Config{})
	ctx := deadline(t)
	cq := createCQ(t, b, 4)
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{RecvCQ: cq})
	if err := cq.Resize(2); err != nil || cq.Cap() != 2 {
		t.Fatalf("capacity %d, %v", cq.Cap(), err)
	}
	if err := cq.Resize(4); err != nil {
		t.Fatal(err)
	}
	cq.RequestNotify(true)
	for i := range 8 {
		if err := qb.PostRecv(verbs.RecvWR{WRID: uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		if err := qa.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled}); err != nil {
			t.Fatal(err)
		}
		if _, err := qa.SendCQ().Next(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := cq.Resize(2); err == nil || cq.Cap() != 4 {
		t.Errorf("shrunk below the 3 completions it holds: %v", err)
	}
	for range 5 {
		if err := qa.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled}); err != nil {
			t.Fatal(err)
		}
	}
	if ev := event(t, b, verbs.EventCQErr); ev.CQN != cq.Num() || ev.QPN != 0 {
		t.Errorf("event %+v, want of %d", ev, cq.Num())
	}
	if err := cq.WaitNotify(ctx); err != nil {
		t.Errorf("the overrun does not notify: %v", err)
	}
	for i := range 4 {
		if wc, err := cq.Next(ctx); err != nil || wc.WRID != uint64(i) {
			t.Fatalf("completion %d: %+v, %v", i, wc, err)
		}
	}
	if err := cq.Wait(ctx); !errors.Is(err, transport.ErrCQOverrun) {
		t.Errorf("wait: %v", err)
	}
	if err := cq.WaitNotify(ctx); !errors.Is(err, transport.ErrCQOverrun) {
		t.Errorf("wait for a notification: %v", err)
	}
	if err := cq.Resize(64); !errors.Is(err, transport.ErrCQOverrun) {
		t.Errorf("resize: %v", err)
	}
	if s := qb.State(); s != verbs.QPErr {
		t.Errorf("the queue pair is in %v", s)
	}
}

// A completion queue that is closed with an event that nobody has read is not kept by it.
func TestCQCloseForgetsEvents(t *testing.T) {
	dev := open(t, "127.1.29.3", transport.Config{})
	cq, other := createCQ(t, dev, 1), createCQ(t, dev, 1)
	for round := range 2 {
		q, err := dev.PD().CreateQP(transport.QPConfig{SendCQ: other, RecvCQ: cq})
		if err != nil {
			t.Fatal(err)
		}
		if err := q.Modify(verbs.QPAttr{
			Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
			State: verbs.QPInit, Port: 1,
		}); err != nil {
			t.Fatal(err)
		}
		for range cq.Cap() + 1 {
			if err := q.PostRecv(verbs.RecvWR{}); err != nil {
				t.Fatal(err)
			}
		}
		// Flushed, they are one more than the queue holds.
		if err := q.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}); err != nil {
			t.Fatal(err)
		}
		if err := cq.Wait(deadline(t)); err != nil {
			t.Fatal(err)
		}
		for cq.Poll(make([]verbs.WC, 1)) > 0 {
		}
		if err := cq.Wait(deadline(t)); !errors.Is(err, transport.ErrCQOverrun) {
			t.Fatalf("wait: %v", err)
		}
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		if n := transport.UnreadEvents(dev); n == 0 {
			t.Fatal("no event")
		}
		for range 2 { // closing twice is nothing new
			if err := cq.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if n := transport.UnreadEvents(dev); n != 0 {
			t.Errorf("round %d: events of %d closed objects are kept", round, n)
		}
		cq = createCQ(t, dev, 1)
	}
}

// TestPollersYieldOneProcessor: where one goroutine runs at a time, a poller that finds nothing lets
// the others run, among whom the peer may be.
func TestPollersYieldOneProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	dev := open(t, "127.1.40.1", transport.Config{})
	cq, err := dev.CreateCQ(1)
	if err != nil {
		t.Fatal(err)
	}
	var ran atomic.Bool
	go ran.Store(true)
	var wc [1]verbs.WC
	for range 100 {
		if n := cq.Poll(wc[:]); n != 0 {
			t.Fatal(wc)
		}
		if ran.Load() {
			return
		}
	}
	t.Error("a poller kept the only processor to itself")
}
