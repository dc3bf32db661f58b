package transport_test

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var (
	rushFor  = flag.Duration("rushfor", defaultRushFor, "how long TestRush opens and closes connections")
	rushSize = flag.Int("rushsize", defaultRushSize, "how many connections TestRush opens at once")
)

// rush is a great many connections that open at once over real sockets.
type rush struct {
	t      *testing.T
	ctx    context.Context
	a, b   *transport.Device
	am, bm *transport.MR
	acq    *transport.CQ
	bcq    *transport.CQ
	all    []rushed
	left   atomic.Int64 // things that have not happened yet
	done   chan struct{}
}

// rushed is what has happened to one connection.
type rushed struct {
	aq, bq                            *transport.QP
	greetings, aSent, requests, bSent atomic.Int32
}

// What a work request's WRID says beside the connection's number.
const (
	rushRecv = iota // and rushRecv+1: two receives, so that a second message finds room and is seen
	_
	rushSend
	rushKinds
)

var rushCap = verbs.QPCap{MaxSendWR: 2, MaxRecvWR: 2, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 8}

// param are one side's parameters for connection i.
func (r *rush) param(i int, cq *transport.CQ, m *transport.MR) transport.ConnParam {
	p := transport.ConnParam{
		Cap: rushCap, SendCQ: cq, RecvCQ: cq, PrivateData: binary.BigEndian.AppendUint32(nil, uint32(i)),
		// With the race detector on a busy machine a peer is silent for longer than the default's
		// two seconds, and is not dead.
		AckTimeout: 2 * time.Second,
	}
	for k := range 2 {
		p.Recv = append(p.Recv, verbs.RecvWR{WRID: uint64(i*rushKinds + rushRecv + k), SGList: m.SGL(i*16+k*8, 8)})
	}
	return p
}

// say sends connection i's number.
func (r *rush) say(q *transport.QP, i int) {
	err := q.PostSend(verbs.SendWR{
		WRID: uint64(i*rushKinds + rushSend), Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: binary.BigEndian.AppendUint64(nil, uint64(i)),
	})
	if err != nil {
		r.t.Errorf("connection %d: post in %v: %v", i, q.State(), err)
	}
}

// saw counts something that must happen once.
func (r *rush) saw(i int, n *atomic.Int32, what string) {
	if n.Add(1) != 1 {
		r.t.Errorf("connection %d: %s more than once", i, what)
		return
	}
	if r.left.Add(-1) == 0 {
		close(r.done)
	}
}

// read takes a side's completions until ctx ends.
func (r *rush) read(ctx context.Context, cq *transport.CQ, m *transport.MR, sent, received func(c *rushed) *atomic.Int32) {
	wcs := make([]verbs.WC, 64)
	for cq.Wait(ctx) == nil {
		for _, wc := range wcs[:cq.Poll(wcs)] {
			i, kind := int(wc.WRID)/rushKinds, int(wc.WRID)%rushKinds
			c := &r.all[i]
			switch {
			case wc.Status == verbs.WRFlushErr:
			case wc.Status != verbs.WCSuccess:
				r.t.Errorf("connection %d: %v", i, wc.Status)
			case kind == rushSend:
				r.saw(i, sent(c), "a send's completion")
			default:
				if got := binary.BigEndian.Uint64(m.Bytes()[i*16+kind*8:]); got != uint64(i) {
					r.t.Errorf("connection %d received the message of %d", i, got)
				}
				r.saw(i, received(c), "a message")
			}
		}
	}
}

// serve accepts everything; greetings are posted in RTR.
func (r *rush) serve(ctx context.Context, ln *transport.Listener) {
	for {
		req, err := ln.Next(ctx)
		if err != nil {
			return
		}
		i := int(binary.BigEndian.Uint32(req.PrivateData()))
		q, err := req.Accept(ctx, r.param(i, r.bcq, r.bm))
		if err != nil {
			r.t.Errorf("accept %d: %v", i, err)
			return
		}
		r.all[i].bq = q
		r.say(q, i)
	}
}

// round opens and closes all connections once.
func (r *rush) round(n int) {
	ctx, stop := context.WithCancel(r.ctx)
	defer stop()
	r.all, r.done = make([]rushed, n), make(chan struct{})
	r.left.Store(4 * int64(n))
	ln := listen(r.t, r.b, 7471)
	defer ln.Close()
	var helpers, dials sync.WaitGroup
	defer helpers.Wait()
	defer stop()
	helpers.Go(func() { r.serve(ctx, ln) })
	helpers.Go(func() {
		r.read(ctx, r.acq, r.am, func(c *rushed) *atomic.Int32 { return &c.aSent }, func(c *rushed) *atomic.Int32 { return &c.greetings })
	})
	helpers.Go(func() {
		r.read(ctx, r.bcq, r.bm, func(c *rushed) *atomic.Int32 { return &c.bSent }, func(c *rushed) *atomic.Int32 { return &c.requests })
	})
	to := netip.AddrPortFrom(r.b.LocalAddr().Addr(), 7471)
	for i := range n {
		dials.Go(func() {
			q, err := r.a.Dial(ctx, to, r.param(i, r.acq, r.am))
			if err != nil {
				r.t.Errorf("dial %d: %v", i, err)
				return
			}
			r.all[i].aq = q
			r.say(q, i)
		})
	}
	dials.Wait()
	if r.t.Failed() {
		return
	}
	select {
	case <-r.done:
	case <-ctx.Done():
		for i := range r.all {
			if c := &r.all[i]; c.greetings.Load()+c.aSent.Load()+c.requests.Load()+c.bSent.Load() != 4 {
				r.t.Errorf("connection %d: %d greetings of %d sent, %d requests of %d sent", i,
					c.greetings.Load(), c.bSent.Load(), c.requests.Load(), c.aSent.Load())
				break
			}
		}
		r.t.Fatalf("%d things have not happened", r.left.Load())
	}
	// Each side closes half of the connections first; the other learns of it.
	var ends sync.WaitGroup
	for i := range r.all {
		first, second := r.all[i].aq, r.all[i].bq
		if i%2 == 0 {
			first, second = second, first
		}
		if err := first.Close(); err != nil {
			r.t.Errorf("close %d: %v", i, err)
		}
		ends.Go(func() {
			if err := errors.Join(second.Wait(ctx), second.Close()); err != nil {
				r.t.Errorf("the other end of %d: %v", i, err)
			}
		})
	}
	ends.Wait()
}

// TestRush opens many connections at once over real sockets, with 5 % of the management
// datagrams lost and RTUs overtaken by requests, and closes them, over and over. All establish;
// everything arrives once; nothing is left of them.
func TestRush(t *testing.T) {
	n, long := *rushSize, *rushFor
	if (testing.Short() || raceEnabled) && long == 0 {
		n = min(n, 200)
	}
	// A rush of thousands on a small machine takes longer than the default's five seconds.
	cfg := transport.Config{ConnectTimeout: time.Minute, DisconnectTimeout: 30 * time.Second}
	goroutines := runtime.NumGoroutine()
	a, b := open(t, "127.1.31.1", cfg), open(t, "127.1.31.2", cfg)
	const seed = 1
	lossy(a, 64, randomLoss(seed, 0.05))
	lossy(b, 64, randomLoss(seed+1, 0.05))
	ctx, cancel := context.WithTimeout(t.Context(), long+5*time.Minute)
	defer cancel()
	r := &rush{t: t, ctx: ctx, a: a, b: b, am: register(t, a, 16*n, verbs.LocalWrite), bm: register(t, b, 16*n, verbs.LocalWrite)}
	for cq, dev := range map[**transport.CQ]*transport.Device{&r.acq: a, &r.bcq: b} {
		var err error
		if *cq, err = dev.CreateCQ(4 * n); err != nil {
			t.Fatal(err)
		}
	}
	_, _, objects := transport.Tables(a)
	var live0 int64
	rounds := 0
	for start := time.Now(); rounds == 0 || time.Since(start) < long && !t.Failed(); rounds++ {
		began := time.Now()
		r.round(n)
		if t.Failed() {
			t.Fatalf("round %d, seed %d", rounds, seed)
		}
		opened := time.Since(began)
		for _, d := range []*transport.Device{a, b} {
			waitFor(t, func() bool { return transport.Held(d, 7471) == wire.Held{} })
			if _, _, o := transport.Tables(d); o > objects {
				t.Errorf("round %d: %v holds %d objects, %d before", rounds, d.LocalAddr(), o, objects)
			}
			if e := transport.UnreadEvents(d); e > 64 {
				t.Errorf("round %d: %v keeps events of %d objects", rounds, d.LocalAddr(), e)
			}
		}
		waitFor(t, func() bool { return runtime.NumGoroutine() <= goroutines+16 })
		r.all = nil
		live, _ := heap()
		switch {
		case rounds == 1:
			live0 = live
		case rounds > 1 && live > live0+int64(n)*64+1<<20:
			t.Errorf("round %d: %d bytes of heap, %d after the second", rounds, live, live0)
		}
		if long > 0 {
			t.Logf("round %d: %v, %d bytes of heap", rounds, opened.Round(time.Millisecond), live)
		}
	}
	c, again := b.Counters(), a.Counters()
	t.Logf("%d rounds of %d: %d established by COMM_EST, %d REQs and %d REPs sent again, %d REQs dropped by the backlog",
		rounds, n, c["cm_comm_est"], again["cm_retransmitted_req"], c["cm_retransmitted_rep"], c["cm_dropped_backlog"])
	for _, name := range []string{
		"qp_packets_sent", "qp_retransmits", "qp_early_retransmits", "qp_timeouts", "qp_duplicates", "qp_rnr_naks_sent", "qp_dropped_state",
		"udp_rx_dropped", "wire_send_blocked",
	} {
		t.Logf("%s: %d and %d", name, again[name], c[name])
	}
	if c["cm_comm_est"] == 0 {
		t.Error("no request overtook its RTU")
	}
}
