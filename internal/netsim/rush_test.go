package netsim

import (
	"encoding/binary"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// rush is a great many connections that open at once, while the network loses management
// datagrams and lets requests overtake RTUs. Each passive side greets in RTR, each active side
// sends a request right behind its RTU.
type rush struct {
	t    *testing.T
	net  *Net
	a, b *Node
	am   *mr.Region
	bm   *mr.Region
	// by the active side's queue pair number, and by ours at b
	byA, byB map[verbs.QPN]*rushed
	all      []*rushed
	waiting  []*wire.Conn

	aLane, bLane *qp.CQ
	open         int // connections with something missing
	closing      bool
	early        int // packets that left a queue pair in RTR
	lost, late   int // management datagrams, RTUs
}

// rushed is one of the connections: what each side has seen.
type rushed struct {
	i                int
	aq, bq           *wire.QP
	ac, bc           *wire.Conn
	aUp, bUp         int
	greetings, aSent int
	requests, bSent  int
}

func (c *rushed) done() bool {
	return c.aUp == 1 && c.bUp == 1 && c.greetings == 1 && c.requests == 1 && c.aSent == 1 && c.bSent == 1
}

func (c *rushed) String() string {
	return fmt.Sprintf("established %d and %d, greetings %d of %d sent, requests %d of %d sent", c.aUp, c.bUp, c.greetings, c.bSent, c.requests, c.aSent)
}

// stride is each connection's memory at a node: two receives of 8 bytes, so that a second
// arrival finds room and is seen.
const stride = 16

// runRush opens n connections at once, waits for all of them, closes them and looks for what is left.
func runRush(t *testing.T, seed uint64, n int) {
	t.Helper()
	net := New(seed)
	r := &rush{
		t: t, net: net, a: net.Node("10.0.0.1"), b: net.Node("10.0.0.2"),
		byA: make(map[verbs.QPN]*rushed, n), byB: make(map[verbs.QPN]*rushed, n),
		aLane: qp.NewCQ(4 * n), bLane: qp.NewCQ(4 * n), open: n,
	}
	r.am = r.a.Register(make([]byte, n*stride), verbs.LocalWrite)
	r.bm = r.b.Register(make([]byte, n*stride), verbs.LocalWrite)
	r.a.OnConnEvent, r.b.OnConnEvent = r.aEvent, r.bEvent
	r.b.OnConnRequest = func(c *wire.Conn, _ *cm.Event) { r.waiting = append(r.waiting, c) }
	r.a.OnCompletions, r.b.OnCompletions = r.aCompletions, r.bCompletions
	net.Rules = []Rule{r.fate}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	must(r.b.Wire.Listen(service))
	for i := range n {
		c := &rushed{i: i, aq: r.a.QP(r.aLane, rushCap)}
		r.all = append(r.all, c)
		r.byA[c.aq.Num()] = c
		r.receive(r.a, c.aq, r.am, i)
		var err error
		c.ac, err = r.a.Wire.Dial(net.Now(), c.aq, wire.DialParam{
			Path: r.a.Path(r.b), Service: service, SrcPort: 40000, ConnParam: rushParam(),
		})
		must(err)
		c.ac.Tag = c
	}
	if !net.Run(time.Minute, func() bool { r.accept(); return r.open == 0 }) {
		for i, c := range r.all {
			if !c.done() {
				t.Errorf("seed %d: connection %d: %v", seed, i, c)
				break
			}
		}
		t.Fatalf("seed %d: %d of %d connections have something missing", seed, r.open, n)
	}
	opened := net.Now()
	net.Run(10*time.Second, nil) // whatever is repeated has its time
	for i, c := range r.all {
		if !c.done() {
			t.Fatalf("seed %d: connection %d: %v", seed, i, c)
		}
	}
	if r.early != 0 {
		t.Errorf("seed %d: %d packets left in RTR", seed, r.early)
	}
	r.closing = true
	// Both sides close, each half of the connections, and the other sides after them.
	for i, c := range r.all {
		if i%2 == 0 {
			r.a.Wire.Hangup(net.Now(), c.ac)
			r.a.Wire.DestroyQP(net.Now(), c.aq)
		} else {
			r.b.Wire.Hangup(net.Now(), c.bc)
			r.b.Wire.DestroyQP(net.Now(), c.bq)
		}
	}
	net.Run(5*time.Second, nil)
	for i, c := range r.all {
		if i%2 == 0 {
			r.b.Wire.DestroyQP(net.Now(), c.bq)
		} else {
			r.a.Wire.DestroyQP(net.Now(), c.aq)
		}
	}
	net.Run(5*time.Second, nil)
	for _, nd := range []*Node{r.a, r.b} {
		if h := nd.Wire.Held(service); h != (wire.Held{}) {
			t.Errorf("seed %d: %v holds %+v after all has ended", seed, nd.Addr, h)
		}
	}
	comm := r.b.Wire.QPCounters().CommEst.Load()
	if comm == 0 || r.lost == 0 || r.late == 0 {
		t.Errorf("seed %d: %d requests overtook their RTUs, %d datagrams lost, %d RTUs late: no test of anything", seed, comm, r.lost, r.late)
	}
	t.Logf("seed %d: %d connections open after %v; %d by COMM_EST, %d datagrams lost, %d RTUs late, %d REQs dropped by the backlog",
		seed, n, time.Duration(opened), comm, r.lost, r.late, r.b.Wire.CMCounters().Dropped[cm.DropBacklog].Load())
}

var rushCap = verbs.QPCap{MaxSendWR: 2, MaxRecvWR: 2, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 8}

func rushParam() wire.ConnParam {
	p := Defaults()
	// A dead peer is not what this is about, and a rush takes its time.
	p.Timeout = verbs.AckTimeoutFor(time.Second)
	return p
}

// fate loses one management datagram in twenty, holds half of the RTUs back for up to 3 ms, and
// lets everything take up to 2 ms longer than it must, so that the rush is no lock-step.
func (r *rush) fate(p *Packet) Verdict {
	rnd := r.net.Rand()
	jitter := time.Duration(rnd.Int64N(int64(2 * time.Millisecond)))
	kind := p.CM()
	if kind == 0 {
		if d, ok := p.Decode(); ok && p.Src == r.b.Addr && d.Opcode == roce.RCSendOnly {
			if c := r.byA[d.DestQP]; c.bq.State() != verbs.QPRTS {
				r.early++
			}
		}
		return Verdict{Delay: 1 + jitter/20}
	}
	if rnd.Float64() < 0.05 {
		r.lost++
		return Verdict{Drop: true}
	}
	if kind == uint16(roce.AttrRTU) {
		switch rnd.IntN(4) {
		case 0, 1:
			r.late++
			jitter += time.Millisecond
		case 2:
			jitter = 0 // it stays ahead of the request
		}
	}
	return Verdict{Delay: 1 + jitter}
}

// receive posts a queue pair's two receives.
func (r *rush) receive(nd *Node, q *wire.QP, m *mr.Region, i int) {
	r.t.Helper()
	for k := range 2 {
		if _, err := nd.Recv(q, verbs.RecvWR{WRID: uint64(2*i + k), SGList: sgl(m, i*stride+k*8, 8)}); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r *rush) send(nd *Node, q *wire.QP, i int) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(i))
	if _, err := nd.Send(q, verbs.SendWR{WRID: uint64(i), Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: b[:]}); err != nil {
		r.t.Errorf("post in %v: %v", q.State(), err)
	}
}

// accept answers what has come meanwhile, as a program between steps does: greeting posted in RTR.
func (r *rush) accept() {
	for _, bc := range r.waiting {
		c := r.byA[bc.Req.QPN]
		if c == nil || c.bq != nil {
			r.t.Fatalf("a second request of one connection, or one of nobody: %v", bc.Req.QPN)
		}
		c.bq, c.bc = r.b.QP(r.bLane, rushCap), bc
		r.byB[c.bq.Num()] = c
		r.receive(r.b, c.bq, r.bm, c.i)
		bc.Tag = c
		if err := r.b.Wire.Accept(r.net.Now(), bc, c.bq, rushParam()); err != nil {
			r.t.Fatal(err)
		}
		r.send(r.b, c.bq, c.i)
	}
	r.waiting = r.waiting[:0]
}

func (r *rush) aEvent(ac *wire.Conn, e verbs.EventType, _ []byte) {
	c := ac.Tag.(*rushed)
	switch e {
	case verbs.EventEstablished:
		r.saw(c, &c.aUp)
		r.send(r.a, c.aq, c.i)
	case verbs.EventUnreachable, verbs.EventRejected, verbs.EventConnectError:
		r.t.Fatalf("connection %d: %v, %v", c.i, e, ac.Reason)
	}
}

func (r *rush) bEvent(bc *wire.Conn, e verbs.EventType, _ []byte) {
	c, ok := bc.Tag.(*rushed)
	if !ok {
		return // given up before it was accepted
	}
	switch e {
	case verbs.EventEstablished:
		r.saw(c, &c.bUp)
	case verbs.EventUnreachable, verbs.EventRejected:
		r.t.Fatalf("connection %d: %v, %v", c.i, e, bc.Reason)
	}
}

// saw counts something that must happen once, and the connections that have seen everything.
func (r *rush) saw(c *rushed, what *int) {
	was := c.done()
	*what++
	switch {
	case was:
		r.t.Errorf("connection %d: once more: %v", c.i, c)
	case c.done():
		r.open--
	}
}

// collect takes completions; by finds the connection by its queue pair.
func (r *rush) collect(lane *qp.CQ, by map[verbs.QPN]*rushed, m *mr.Region, sent, received func(*rushed) *int) {
	var wcs [64]verbs.WC
	for n := lane.Poll(wcs[:]); n > 0; n = lane.Poll(wcs[:]) {
		for _, wc := range wcs[:n] {
			c := by[wc.QPN]
			switch {
			case r.closing && wc.Status == verbs.WRFlushErr:
			case wc.Status != verbs.WCSuccess:
				r.t.Fatalf("connection %d: %v", c.i, wc.Status)
			case !wc.Opcode.IsRecv():
				r.saw(c, sent(c))
			default:
				if got := binary.BigEndian.Uint64(m.Bytes()[wc.WRID*8:]); got != uint64(c.i) {
					r.t.Errorf("connection %d received the message of %d", c.i, got)
				}
				r.saw(c, received(c))
			}
		}
	}
}

func (r *rush) aCompletions(lane *qp.CQ) {
	r.collect(lane, r.byA, r.am, func(c *rushed) *int { return &c.aSent }, func(c *rushed) *int { return &c.greetings })
}

func (r *rush) bCompletions(lane *qp.CQ) {
	// The queue pair is in RTS and the program told before the request can be seen.
	r.collect(lane, r.byB, r.bm, func(c *rushed) *int { return &c.bSent }, func(c *rushed) *int {
		if s := c.bq.State(); s != verbs.QPRTS || c.bUp != 1 {
			r.t.Errorf("connection %d: a request can be seen in %v, established %d times", c.i, s, c.bUp)
		}
		return &c.requests
	})
}

var rushSeed = flag.Int64("rushseed", -1, "the one seed that TestRush runs")

// TestRush: many connections at once with 5 % of the management datagrams lost.
func TestRush(t *testing.T) {
	seeds, n := uint64(2), 1000
	switch {
	case soak:
		seeds, n = 100, 10_000
	case testing.Short() || raceEnabled:
		seeds, n = 1, 300
	}
	first := uint64(0)
	if *rushSeed >= 0 {
		first, seeds = uint64(*rushSeed), 1
	}
	for seed := first; seed < first+seeds; seed++ {
		runRush(t, seed, n)
		if t.Failed() {
			return
		}
	}
}
