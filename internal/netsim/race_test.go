package netsim

import (
	"bytes"
	"errors"
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

const service = roce.SID(0x0106_0000 | 7471)

// opening is one connection in the making: the passive side posts a greeting as soon as it
// has accepted, in RTR; the active side, once established, sends a first request.
type opening struct {
	t      *testing.T
	net    *Net
	a, b   *Node
	aq, bq *wire.QP
	ac, bc *wire.Conn

	aLane, bLane *qp.CQ
	aMR, bMR     *mr.Region

	aUp, bUp     int // EventEstablished seen
	rtus         int // EventRTU seen at b
	greetings    int // received by a
	requests     int // received by b
	stateAtVisit verbs.QPState
	upAtVisit    bool

	conns, qps int // of both nodes, before
}

const greeting = "welcome, posted in RTR"

// open runs a connection up to the REP: b is in RTR with its greeting posted.
func open(t *testing.T, net *Net, a, b *Node, request bool) *opening {
	t.Helper()
	o := &opening{t: t, net: net, a: a, b: b, aLane: qp.NewCQ(64), bLane: qp.NewCQ(64)}
	o.conns, o.qps = a.Wire.Conns()+b.Wire.Conns(), a.Wire.QPs()+b.Wire.QPs()
	o.aq, o.bq = a.QP(o.aLane, verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8}), b.QP(o.bLane, verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8})
	o.aMR = a.Register(make([]byte, 256), verbs.LocalWrite)
	o.bMR = b.Register(make([]byte, 256), verbs.LocalWrite)
	copy(o.bMR.Bytes(), greeting)
	for _, nd := range []struct {
		n *Node
		q *wire.QP
		r *mr.Region
	}{{a, o.aq, o.aMR}, {b, o.bq, o.bMR}} {
		if _, err := nd.n.Recv(nd.q, verbs.RecvWR{WRID: 1, SGList: sgl(nd.r, 128, 128)}); err != nil {
			t.Fatal(err)
		}
	}
	b.OnConnRequest = func(c *wire.Conn, _ *cm.Event) { o.bc = c }
	a.OnConnEvent = func(c *wire.Conn, e verbs.EventType, _ []byte) {
		if c != o.ac || e != verbs.EventEstablished {
			return
		}
		o.aUp++
		if request {
			if _, err := a.Send(o.aq, verbs.SendWR{WRID: 2, Opcode: verbs.Send, InlineData: []byte("request")}); err != nil {
				t.Error(err)
			}
		}
	}
	b.OnConnEvent = func(c *wire.Conn, e verbs.EventType, _ []byte) {
		if c != o.bc {
			return
		}
		switch e {
		case verbs.EventEstablished:
			o.bUp++
		case verbs.EventRTU:
			o.rtus++
		}
	}
	a.OnCompletions = func(l *qp.CQ) { o.collect(l, &o.greetings, nil) }
	b.OnCompletions = func(l *qp.CQ) {
		o.collect(l, &o.requests, func() { o.stateAtVisit, o.upAtVisit = o.bq.State(), o.bUp > 0 })
	}
	p := Defaults()
	var err error
	if o.ac, err = a.Wire.Dial(net.Now(), o.aq, wire.DialParam{Path: a.Path(b), Service: service, SrcPort: 40000, ConnParam: p}); err != nil {
		t.Fatal(err)
	}
	if !net.Run(10*time.Second, func() bool { return o.bc != nil }) {
		t.Fatal("no REQ arrived")
	}
	if err := b.Wire.Accept(net.Now(), o.bc, o.bq, p); err != nil {
		t.Fatal(err)
	}
	if s := o.bq.State(); s != verbs.QPRTR {
		t.Fatalf("after Accept the queue pair is in %v, want RTR", s)
	}
	if _, err := b.Send(o.bq, verbs.SendWR{WRID: 3, Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sgl(o.bMR, 0, len(greeting))}); err != nil {
		t.Fatalf("post in RTR: %v", err)
	}
	return o
}

func sgl(r *mr.Region, off, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: r.Addr() + uint64(off), Length: uint32(n), LKey: r.Key()}}
}

func (o *opening) collect(l *qp.CQ, received *int, visit func()) {
	var wc [8]verbs.WC
	for _, c := range wc[:l.Poll(wc[:])] {
		if c.Status == verbs.WRFlushErr {
			continue
		}
		if c.Status != verbs.WCSuccess {
			o.t.Errorf("completion %d: %v", c.WRID, c.Status)
		}
		if c.Opcode.IsRecv() {
			*received++
			if visit != nil {
				visit()
			}
		}
	}
}

// finish closes both ends and checks that nothing is left behind.
func (o *opening) finish() {
	o.t.Helper()
	now := o.net.Now()
	o.a.Wire.Hangup(now, o.ac)
	o.a.Wire.DestroyQP(now, o.aq)
	o.net.Run(2*time.Second, nil)
	o.b.Wire.DestroyQP(o.net.Now(), o.bq)
	if err := errors.Join(o.a.MRs.Close(o.aMR), o.b.MRs.Close(o.bMR)); err != nil {
		o.t.Fatal(err)
	}
	if n := o.a.Wire.Conns() + o.b.Wire.Conns() - o.conns; n != 0 {
		o.t.Fatalf("%d connections left after both ends closed", n)
	}
	if n := o.a.Wire.QPs() + o.b.Wire.QPs() - o.qps; n != 0 {
		o.t.Fatalf("%d queue pairs left", n)
	}
}

// TestGreetingLeavesOnRTU: the ordinary way. The greeting waits for the RTU and then leaves
// at once.
func TestGreetingLeavesOnRTU(t *testing.T) {
	net := New(1)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	if err := b.Wire.Listen(service); err != nil {
		t.Fatal(err)
	}
	var sentInRTR bool
	var o *opening
	net.Rules = append(net.Rules, func(p *Packet) Verdict {
		if d, ok := p.Decode(); ok && p.Src.Addr() == b.Addr.Addr() && d.Opcode == roce.RCSendOnly && o.bq.State() != verbs.QPRTS {
			sentInRTR = true
		}
		return Verdict{}
	})
	o = open(t, net, a, b, false)
	if !net.Run(time.Second, func() bool { return o.greetings == 1 }) {
		t.Fatal("the greeting never arrived")
	}
	if sentInRTR {
		t.Error("the greeting left in RTR")
	}
	if !bytes.Equal(o.aMR.Bytes()[128:128+len(greeting)], []byte(greeting)) {
		t.Errorf("got %q", o.aMR.Bytes()[128:])
	}
	if o.aUp != 1 || o.bUp != 1 {
		t.Errorf("established %d and %d times, want once each", o.aUp, o.bUp)
	}
	if n := b.Wire.QPCounters().Deferred.Load(); n != 1 {
		t.Errorf("%d deferred WQEs counted, want 1", n)
	}
	if n := b.Wire.QPCounters().CommEst.Load(); n != 0 {
		t.Errorf("COMM_EST counted %d times on an RTU that came first", n)
	}
	o.finish()
}

// rtuFate makes the first n RTUs late or lost.
func rtuFate(v Verdict) Rule {
	return func(p *Packet) Verdict {
		if p.CM() == uint16(roce.AttrRTU) {
			return v
		}
		return Verdict{}
	}
}

// TestFirstRequestBeatsRTU: the race this project exists for, ten thousand times each way.
// The active side's first request reaches b in RTR while the RTU is late, or lost for good.
// It must establish the connection: the queue pair is in RTS, and the program told, before
// the request's completion can be seen; the greeting arrives exactly once.
func TestFirstRequestBeatsRTU(t *testing.T) {
	rounds := 10000
	if testing.Short() || raceEnabled {
		rounds = 500
	}
	for _, tc := range []struct {
		name    string
		verdict Verdict
		rtus    int
	}{
		{"RTU late", Verdict{Delay: 300 * time.Microsecond}, 1},
		{"RTU lost", Verdict{Drop: true}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const seed = 7
			net := New(seed)
			net.Rules = []Rule{rtuFate(tc.verdict)}
			a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
			if err := b.Wire.Listen(service); err != nil {
				t.Fatal(err)
			}
			for i := range rounds {
				o := open(t, net, a, b, true)
				if !net.Run(time.Second, func() bool { return o.greetings == 1 && o.requests == 1 }) {
					t.Fatalf("seed %d, round %d: greeting %d, request %d", seed, i, o.greetings, o.requests)
				}
				if o.stateAtVisit != verbs.QPRTS || !o.upAtVisit {
					t.Fatalf("seed %d, round %d: when the request could be seen the queue pair was in %v, told=%v",
						seed, i, o.stateAtVisit, o.upAtVisit)
				}
				net.Run(100*time.Millisecond, nil)
				if o.greetings != 1 || o.requests != 1 || o.aUp != 1 || o.bUp != 1 || o.rtus != tc.rtus {
					t.Fatalf("seed %d, round %d: greetings %d, requests %d, established %d and %d, late RTUs %d",
						seed, i, o.greetings, o.requests, o.aUp, o.bUp, o.rtus)
				}
				o.finish()
			}
			if n := b.Wire.QPCounters().CommEst.Load(); n != uint64(rounds) {
				t.Errorf("COMM_EST %d times in %d rounds", n, rounds)
			}
		})
	}
}

// TestRTULostAndNobodyTalks: without a first request only the REP's repetition can mend a
// lost RTU; the greeting then leaves within tens of milliseconds, once.
func TestRTULostAndNobodyTalks(t *testing.T) {
	net := New(3)
	lost := 0
	net.Rules = []Rule{func(p *Packet) Verdict {
		if p.CM() == uint16(roce.AttrRTU) && lost < 2 {
			lost++
			return Verdict{Drop: true}
		}
		return Verdict{}
	}}
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	if err := b.Wire.Listen(service); err != nil {
		t.Fatal(err)
	}
	start := net.Now()
	o := open(t, net, a, b, false)
	if !net.Run(time.Second, func() bool { return o.greetings == 1 }) {
		t.Fatal("the greeting never arrived")
	}
	if d := net.Now().Sub(start); d > 300*time.Millisecond {
		t.Errorf("two lost RTUs cost %v", d)
	}
	o.finish()
}

// TestOpeningUnderFaults opens connections while everything is lost, doubled, reordered and
// corrupted at random: each establishes and delivers greeting and request exactly once.
func TestOpeningUnderFaults(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() || raceEnabled {
		seeds = 4
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			net := New(seed)
			net.Faults = Faults{Drop: 0.05, Duplicate: 0.05, Reorder: 0.05, Corrupt: 0.02}
			a, b := net.Node("fd00::1"), net.Node("fd00::2")
			if err := b.Wire.Listen(service); err != nil {
				t.Fatal(err)
			}
			for i := range 50 {
				o := open(t, net, a, b, true)
				if !net.Run(10*time.Second, func() bool { return o.greetings == 1 && o.requests == 1 }) {
					t.Fatalf("seed %d, round %d: greeting %d, request %d\na: %v\nb: %v", seed, i, o.greetings, o.requests, a.Log, b.Log)
				}
				net.Run(time.Second, nil)
				if o.greetings != 1 || o.requests != 1 || o.aUp != 1 || o.bUp != 1 {
					t.Fatalf("seed %d, round %d: greetings %d, requests %d, established %d and %d",
						seed, i, o.greetings, o.requests, o.aUp, o.bUp)
				}
				o.finish()
				a.Log, b.Log = a.Log[:0], b.Log[:0]
			}
		})
	}
}

// TestRawConsumer: a program that drives its queue pairs itself, through the connection
// manager. It posts in RTR, hears COMM_EST with the RTU lost, notifies, and moves to RTS.
func TestRawConsumer(t *testing.T) {
	net := New(11)
	net.Rules = []Rule{rtuFate(Verdict{Drop: true})}
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	if err := b.Wire.Listen(service); err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lanes := [2]*qp.CQ{qp.NewCQ(16), qp.NewCQ(16)}
	aq, bq := a.QP(lanes[0], verbs.QPCap{}), b.QP(lanes[1], verbs.QPCap{})
	amr := a.Register(make([]byte, 64), verbs.LocalWrite)
	bmr := b.Register(make([]byte, 64), verbs.LocalWrite)
	for _, err := range []error{
		func() error { _, err := a.Recv(aq, verbs.RecvWR{WRID: 1, SGList: sgl(amr, 0, 64)}); return err }(),
		func() error { _, err := b.Recv(bq, verbs.RecvWR{WRID: 1, SGList: sgl(bmr, 0, 64)}); return err }(),
	} {
		must(err)
	}
	p := Defaults()
	p.Raw = true
	var bc *wire.Conn
	var response, commEst, established bool
	b.OnConnRequest = func(c *wire.Conn, _ *cm.Event) { bc = c }
	a.OnConnEvent = func(_ *wire.Conn, e verbs.EventType, _ []byte) {
		response = response || e == verbs.EventConnectResponse
	}
	b.OnQPEvent = func(_ *wire.QP, e verbs.EventType) { commEst = commEst || e == verbs.EventCommEst }
	b.OnConnEvent = func(_ *wire.Conn, e verbs.EventType, _ []byte) {
		established = established || e == verbs.EventEstablished
	}
	ac, err := a.Wire.Dial(net.Now(), aq, wire.DialParam{Path: a.Path(b), Service: service, ConnParam: p})
	must(err)
	if !net.Run(time.Second, func() bool { return bc != nil }) {
		t.Fatal("no REQ")
	}
	must(b.Wire.Negotiate(bc, p))
	rtr := bc.Attr(verbs.QPRTR)
	must(b.Wire.Modify(net.Now(), bq, &rtr))
	must(b.Wire.AcceptRaw(net.Now(), bc, bq, []byte("rep")))
	_, err = b.Send(bq, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte("deferred")})
	must(err)
	if !net.Run(time.Second, func() bool { return response }) {
		t.Fatal("no REP")
	}
	if aq.State() != verbs.QPInit || bq.State() != verbs.QPRTR {
		t.Fatalf("the wire moved a raw queue pair: %v, %v", aq.State(), bq.State())
	}
	for _, s := range []verbs.QPState{verbs.QPRTR, verbs.QPRTS} {
		attr := ac.Attr(s)
		must(a.Wire.Modify(net.Now(), aq, &attr))
	}
	must(a.Wire.Ready(net.Now(), ac, nil))
	_, err = a.Send(aq, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte("request")})
	must(err)
	if !net.Run(time.Second, func() bool { return commEst }) {
		t.Fatal("no COMM_EST")
	}
	if established || bq.State() != verbs.QPRTR {
		t.Fatalf("established by itself: %v, %v", established, bq.State())
	}
	must(b.Wire.Notify(net.Now(), bc))
	if !established {
		t.Error("Notify established nothing")
	}
	rts := bc.Attr(verbs.QPRTS)
	must(b.Wire.Modify(net.Now(), bq, &rts))
	if !net.Run(time.Second, func() bool { return string(amr.Bytes()[:8]) == "deferred" }) {
		t.Error("the deferred send never arrived")
	}
	must(b.Wire.Disconnect(net.Now(), bc, nil))
	net.Run(3*time.Second, nil)
	if n := a.Wire.Conns() + b.Wire.Conns(); n != 0 {
		t.Errorf("%d connections left", n)
	}
}
