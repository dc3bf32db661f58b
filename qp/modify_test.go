package qp

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// attrTable is ibv_modify_qp's table for RC as people write it down: R required, o optional.
const attrTable = `
attribute            RESET>INIT INIT>INIT INIT>RTR RTR>RTS RTS>RTS RTS>SQD SQD>SQD SQD>RTS
CUR_STATE            .          .         .        o       o       .       .       o
EN_SQD_ASYNC_NOTIFY  .          .         .        .       .       o       .       .
ACCESS_FLAGS         R          o         o        o       o       .       o       o
PKEY_INDEX           R          o         o        .       .       .       o       .
PORT                 R          o         .        .       .       .       o       .
QKEY                 .          .         .        .       .       .       .       .
AV                   .          .         R        .       .       .       o       .
PATH_MTU             .          .         R        .       .       .       .       .
TIMEOUT              .          .         .        R       .       .       o       .
RETRY_CNT            .          .         .        R       .       .       o       .
RNR_RETRY            .          .         .        R       .       .       o       .
RQ_PSN               .          .         R        .       .       .       .       .
MAX_QP_RD_ATOMIC     .          .         .        R       .       .       o       .
ALT_PATH             .          .         o        o       o       .       o       o
MIN_RNR_TIMER        .          .         R        o       o       .       o       o
SQ_PSN               .          .         .        R       .       .       .       .
MAX_DEST_RD_ATOMIC   .          .         R        .       .       .       o       .
PATH_MIG_STATE       .          .         .        o       o       .       o       o
CAP                  .          .         .        .       .       .       .       .
DEST_QPN             .          .         R        .       .       .       .       .
`

func stateNamed(t *testing.T, name string) verbs.QPState {
	for s := range verbs.QPState(verbs.QPStates) {
		if s.String() == name {
			return s
		}
	}
	t.Fatalf("no state %q", name)
	return 0
}

func attrNamed(t *testing.T, name string) verbs.AttrMask {
	for i := range 21 {
		if m := verbs.AttrMask(1) << i; m.String() == name {
			return m
		}
	}
	t.Fatalf("no attribute %q", name)
	return 0
}

func TestTransitionTable(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(attrTable), "\n")
	edges := strings.Fields(lines[0])[1:]
	want := map[[2]verbs.QPState]edge{}
	for i, e := range edges {
		from, to, _ := strings.Cut(e, ">")
		x := edge{legal: true}
		for _, line := range lines[1:] {
			f := strings.Fields(line)
			switch f[i+1] {
			case "R":
				x.required.rc |= attrNamed(t, f[0])
			case "o":
				x.optional.rc |= attrNamed(t, f[0])
			}
		}
		want[[2]verbs.QPState{stateNamed(t, from), stateNamed(t, to)}] = x
	}
	// Moves that need nothing.
	for s := range verbs.QPState(verbs.QPStates) {
		want[[2]verbs.QPState{s, verbs.QPReset}] = edge{legal: true}
		if s != verbs.QPReset {
			want[[2]verbs.QPState{s, verbs.QPErr}] = edge{legal: true}
		}
	}
	want[[2]verbs.QPState{verbs.QPSQE, verbs.QPRTS}] = edge{legal: true}
	for from := range verbs.QPState(verbs.QPStates) {
		for to := range verbs.QPState(9) {
			got, w := edgeOf(from, to), want[[2]verbs.QPState{from, to}]
			if got.legal != w.legal || got.required.rc != w.required.rc || got.optional.rc != w.optional.rc {
				t.Errorf("%v to %v: legal %v, requires %v, allows %v; want %v, %v, %v", from, to,
					got.legal, got.required.rc, got.optional.rc, w.legal, w.required.rc, w.optional.rc)
			}
		}
	}
}

// inState returns a queue pair in a state, with its pair.
func inState(t *testing.T, s verbs.QPState) *pair {
	o := options{stateA: s}
	switch s {
	case verbs.QPReset:
		p := newPair(t, o)
		p.state(p.a, verbs.QPReset)
		return p
	case verbs.QPSQD, verbs.QPErr:
		o.stateA = verbs.QPRTS
		p := newPair(t, o)
		p.state(p.a, s)
		return p
	}
	return newPair(t, o)
}

// full returns attributes that take a queue pair from one state to another.
func full(p *pair, from, to verbs.QPState) *verbs.QPAttr {
	switch {
	case from == verbs.QPReset && to == verbs.QPInit:
		return p.initAttr()
	case from == verbs.QPInit && to == verbs.QPRTR:
		return p.rtrAttr(p.a)
	case from == verbs.QPRTR && to == verbs.QPRTS:
		return p.rtsAttr(p.a)
	}
	return &verbs.QPAttr{Mask: verbs.AttrState, State: to}
}

// Every edge: allowed with what it requires, refused without any one of these and with any
// attribute that it does not know; a refusal names the attribute and changes nothing.
func TestModifyEdges(t *testing.T) {
	for _, from := range []verbs.QPState{
		verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPErr,
	} {
		for to := range verbs.QPState(verbs.QPStates) {
			p := inState(t, from)
			if got := p.a.q.State(); got != from {
				t.Fatalf("state is %v, want %v", got, from)
			}
			e := edgeOf(from, to)
			a := full(p, from, to)
			refuse := func(b verbs.QPAttr, sentinel error, name string) {
				t.Helper()
				before := p.a.q.Attr()
				err := p.a.q.Modify(p.now, &b)
				if !errors.Is(err, sentinel) || !strings.Contains(fmt.Sprint(err), name) {
					t.Errorf("%v to %v with %v: %v, want %v naming %s", from, to, b.Mask, err, sentinel, name)
				}
				if after := p.a.q.Attr(); after != before {
					t.Errorf("%v to %v with %v failed and changed attributes", from, to, b.Mask)
				}
			}
			if !e.legal {
				refuse(*a, verbs.ErrBadState, from.String())
				continue
			}
			b := *a
			b.Mask &^= verbs.AttrState
			refuse(b, verbs.ErrBadAttr, "STATE")
			for i := 1; i < 21; i++ {
				bit := verbs.AttrMask(1) << i
				b = *a
				switch {
				case e.required.rc&bit != 0:
					b.Mask &^= bit
				case e.optional.rc&bit == 0:
					b.Mask |= bit
				default:
					continue
				}
				refuse(b, verbs.ErrBadAttr, bit.String())
			}
			if err := p.a.q.Modify(p.now, a); err != nil || p.a.q.State() != to {
				t.Errorf("%v to %v: %v, now in %v", from, to, err, p.a.q.State())
			}
			p.check(p.a)
		}
	}
}

// F53: ranges, each at its limit and one beyond.
func TestModifyRanges(t *testing.T) {
	for _, c := range []struct {
		name string
		from verbs.QPState
		set  func(a *verbs.QPAttr, over bool)
	}{
		{"PKEY_INDEX", verbs.QPReset, func(a *verbs.QPAttr, over bool) { a.PKeyIndex = b2u[uint16](over) }},
		{"PORT", verbs.QPReset, func(a *verbs.QPAttr, over bool) { a.Port = 1 + b2u[uint8](over) }},
		{"PORT", verbs.QPReset, func(a *verbs.QPAttr, over bool) { a.Port = 1 - b2u[uint8](over) }},
		{"ACCESS_FLAGS", verbs.QPReset, func(a *verbs.QPAttr, over bool) { a.AccessFlags = 31 + 32*b2u[verbs.Access](over) }},
		{"PATH_MTU", verbs.QPInit, func(a *verbs.QPAttr, over bool) { a.PathMTU = 5 + b2u[verbs.MTU](over) }},
		{"PATH_MTU", verbs.QPInit, func(a *verbs.QPAttr, over bool) { a.PathMTU = 1 - b2u[verbs.MTU](over) }},
		{"DEST_QPN", verbs.QPInit, func(a *verbs.QPAttr, over bool) { a.DestQPN = 0xffffff + b2u[verbs.QPN](over) }},
		{"RQ_PSN", verbs.QPInit, func(a *verbs.QPAttr, over bool) { a.RQPSN = 0xffffff + b2u[verbs.PSN](over) }},
		{"MAX_DEST_RD_ATOMIC", verbs.QPInit, func(a *verbs.QPAttr, over bool) { a.MaxDestRdAtomic = 128 + b2u[uint8](over) }},
		{"MIN_RNR_TIMER", verbs.QPInit, func(a *verbs.QPAttr, over bool) { a.MinRNRTimer = 31 + b2u[verbs.RNRTimer](over) }},
		{"AV", verbs.QPInit, func(a *verbs.QPAttr, over bool) {
			a.AV.Remote = netip.MustParseAddrPort("[::1]:0")
			if over {
				a.AV.Remote = netip.AddrPort{}
			}
		}},
		{"TIMEOUT", verbs.QPRTR, func(a *verbs.QPAttr, over bool) { a.Timeout = 31 + b2u[verbs.AckTimeout](over) }},
		{"RETRY_CNT", verbs.QPRTR, func(a *verbs.QPAttr, over bool) { a.RetryCnt = 7 + b2u[uint8](over) }},
		{"RNR_RETRY", verbs.QPRTR, func(a *verbs.QPAttr, over bool) { a.RNRRetry = 7 + b2u[uint8](over) }},
		{"SQ_PSN", verbs.QPRTR, func(a *verbs.QPAttr, over bool) { a.SQPSN = 0xffffff + b2u[verbs.PSN](over) }},
		{"MAX_QP_RD_ATOMIC", verbs.QPRTR, func(a *verbs.QPAttr, over bool) { a.MaxQPRdAtomic = 128 + b2u[uint8](over) }},
		{"CUR_STATE", verbs.QPRTR, func(a *verbs.QPAttr, over bool) {
			a.Mask |= verbs.AttrCurState
			a.CurState = verbs.QPRTR + b2u[verbs.QPState](over)
		}},
	} {
		p := inState(t, c.from)
		a := full(p, c.from, c.from+1)
		c.set(a, true)
		err := p.a.q.Modify(p.now, a)
		if !errors.Is(err, verbs.ErrBadAttr) || !strings.Contains(err.Error(), c.name) {
			t.Errorf("%s out of range: %v", c.name, err)
		}
		if p.a.q.State() != c.from {
			t.Errorf("%s out of range: state is %v", c.name, p.a.q.State())
		}
		c.set(a, false)
		if err := p.a.q.Modify(p.now, a); err != nil {
			t.Errorf("%s at its limit: %v", c.name, err)
		}
	}
}

func b2u[T ~uint8 | ~uint16 | ~uint32](b bool) T {
	if b {
		return 1
	}
	return 0
}

// F14: a failed move to RTS publishes nothing; the next, correct one publishes once. Posts
// before it leave before posts after it.
func TestFailedModifyPublishesNothing(t *testing.T) {
	p := newPair(t, options{stateB: verbs.QPRTR})
	for i := range 8 {
		p.postRecv(p.a, uint64(100+i), i*64, 64)
	}
	for id := range uint64(5) {
		wr := sendWR(verbs.Send, id, 0, 8)
		wr.Flags = 0
		p.post(p.b, wr)
	}
	bad := p.rtsAttr(p.b)
	bad.RetryCnt = 8
	if err := p.b.q.Modify(p.now, bad); !errors.Is(err, verbs.ErrBadAttr) {
		t.Fatal(err)
	}
	p.pump(p.b)
	if len(p.b.out) != 0 || p.b.q.State() != verbs.QPRTR {
		t.Fatal("a failed modify opened the gate")
	}
	p.advance(1500)
	p.modify(p.b, p.rtsAttr(p.b))
	p.post(p.b, sendWR(verbs.Send, 5, 0, 8))
	p.run()
	p.wantWCs(p.b, "5:SEND")
	p.wantWCs(p.a, "100:RECV", "101:RECV", "102:RECV", "103:RECV", "104:RECV", "105:RECV")
	n, wait := p.b.q.Published()
	if n != 5 || wait != 1500 {
		t.Errorf("published %d after %v", n, wait)
	}
	c := &p.b.env.Counters
	if c.Deferred.Load() != 5 || c.Publications.Load() != 1 || c.DeferredNanos.Load() != 1500 {
		t.Errorf("counted %d deferred, %d publications, %d ns", c.Deferred.Load(), c.Publications.Load(), c.DeferredNanos.Load())
	}
}

// The gate opens before the request that opens it can complete: when the completion is
// added, the state is RTS and the event is pending.
func TestEstablishedBeforeCompletion(t *testing.T) {
	p := newPair(t, options{stateB: verbs.QPRTR, armB: true})
	p.postRecv(p.b, 1, 0, 64)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 8))
	p.pump(p.a)
	p.deliver(p.b, p.a.take()...)
	if st := p.b.q.State(); st != verbs.QPRTS {
		t.Errorf("state is %v", st)
	}
	if p.b.cq.Len() != 0 || len(p.b.env.Dirty) != 1 {
		t.Errorf("%d completions visible before the commit", p.b.cq.Len())
	}
	if ev := p.b.q.TakeEvents(); ev != EvCommEst|EvToRTS {
		t.Errorf("events %b", ev)
	}
	if a := p.b.q.Attr(); a.RetryCnt != p.o.retry || a.Timeout != p.o.timeout || a.State != verbs.QPRTS {
		t.Errorf("attributes %+v", a)
	}
	// A later, correct RTU's modify is refused without harm.
	if err := p.b.q.Modify(p.now, p.rtsAttr(p.b)); !errors.Is(err, verbs.ErrBadAttr) {
		t.Errorf("second move to RTS: %v", err)
	}
}

func TestArmRTS(t *testing.T) {
	p := newPair(t, options{stateB: verbs.QPRTR})
	bad := p.rtsAttr(p.b)
	bad.RNRRetry = 8
	if err := p.b.q.ArmRTS(bad); !errors.Is(err, verbs.ErrBadAttr) {
		t.Error(err)
	}
	bad = p.rtsAttr(p.b)
	bad.Mask &^= verbs.AttrSQPSN
	if err := p.b.q.ArmRTS(bad); !errors.Is(err, verbs.ErrBadAttr) {
		t.Error(err)
	}
	if err := p.a.q.ArmRTS(p.rtsAttr(p.a)); !errors.Is(err, verbs.ErrBadState) {
		t.Error(err)
	}
	// RESET disarms.
	if err := p.b.q.ArmRTS(p.rtsAttr(p.b)); err != nil {
		t.Fatal(err)
	}
	p.state(p.b, verbs.QPReset)
	p.to(p.b, verbs.QPRTR)
	p.postRecv(p.b, 1, 0, 64)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 8))
	p.run()
	if st := p.b.q.State(); st != verbs.QPRTR {
		t.Errorf("state is %v", st)
	}
}

func TestNewRefuses(t *testing.T) {
	cq := NewCQ(1)
	ok := Config{Type: verbs.RC, SendCQ: cq, RecvCQ: cq}
	env := &Env{Mem: &testMem{}}
	for name, f := range map[string]func(*Config){
		"TYPE":          func(c *Config) { c.Type = verbs.GSI },
		"CQ":            func(c *Config) { c.SendCQ = nil },
		"NUM":           func(c *Config) { c.Num = 1 << 24 },
		"MaxSendWR":     func(c *Config) { c.Cap.MaxSendWR = -1 },
		"MaxRecvWR":     func(c *Config) { c.Cap.MaxRecvWR = maxWR + 1 },
		"MaxSendSGE":    func(c *Config) { c.Cap.MaxSendSGE = 33 },
		"MaxRecvSGE":    func(c *Config) { c.Cap.MaxRecvSGE = 33 },
		"MaxInlineData": func(c *Config) { c.Cap.MaxInlineData = 1025 },
	} {
		c := ok
		f(&c)
		if _, err := New(c, env); !errors.Is(err, verbs.ErrBadAttr) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ok.Cap = verbs.QPCap{MaxSendWR: 3, MaxInlineData: -1}
	q, err := New(ok, env)
	if err != nil {
		t.Fatal(err)
	}
	want := verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 128, MaxSendSGE: 4, MaxRecvSGE: 4}
	if q.Cap() != want || q.Type() != verbs.RC || q.State() != verbs.QPReset {
		t.Errorf("made %v %+v in %v", q.Type(), q.Cap(), q.State())
	}
	if q.Deadline() != verbs.Never {
		t.Error("a new queue pair has a timer")
	}
}

// Close gives back what is in flight, drops what is posted, and ends it all.
func TestClose(t *testing.T) {
	p := newPair(t, options{})
	p.post(p.a, sendWR(verbs.Send, 1, 0, 5000), sendWR(verbs.RDMARead, 2, 0, 5000))
	p.pump(p.a)
	if p.a.win.used == 0 || p.a.win.inbound == 0 {
		t.Fatal("nothing in flight")
	}
	p.a.q.Close(p.now)
	p.check(p.a)
	if p.a.win.used != 0 || p.a.win.inbound != 0 || p.a.q.Deadline() != verbs.Never {
		t.Error("something is left of a closed queue pair")
	}
	if _, _, err := p.a.q.PostSend([]verbs.SendWR{sendWR(verbs.Send, 1, 0, 8)}); !errors.Is(err, verbs.ErrBadState) {
		t.Error(err)
	}
	if _, _, err := p.a.q.PostRecv([]verbs.RecvWR{{}}); !errors.Is(err, verbs.ErrBadState) {
		t.Error(err)
	}
	if err := p.a.q.Modify(p.now, p.initAttr()); !errors.Is(err, verbs.ErrBadState) {
		t.Error(err)
	}
	if err := p.a.q.ArmRTS(p.rtsAttr(p.a)); !errors.Is(err, verbs.ErrBadState) {
		t.Error(err)
	}
	p.pump(p.a)
	p.wantWCs(p.a)
}

// F18: a second life begins clean: new PSNs, no old completion, and what the first life left
// in the network does not reach it.
func TestSecondLife(t *testing.T) {
	p := newPair(t, options{psnA: 100, psnB: 200})
	p.postRecv(p.b, 10, 0, 64)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64), sendWR(verbs.Send, 2, 0, 3000))
	p.pump(p.a)
	old := p.a.take()
	p.state(p.a, verbs.QPReset)
	p.state(p.b, verbs.QPReset)
	p.o.psnA, p.o.psnB = 0x500000, 0x600000
	p.to(p.a, verbs.QPRTS)
	p.to(p.b, verbs.QPRTS)
	p.postRecv(p.b, 20, 0, 64)
	p.deliver(p.b, old...)
	p.pump(p.b)
	p.b.take()
	fill(p.a.send.buf[:64], 5)
	p.post(p.a, sendWR(verbs.Send, 3, 0, 64))
	p.run()
	p.wantWCs(p.a, "3:SEND")
	p.wantWCs(p.b, "20:RECV")
	if !matches(p.b.recv.buf[:64], 5) {
		t.Error("the wrong message arrived")
	}
}

// In SQD attributes of the path and the depths may change; what the responder remembers
// survives.
func TestModifyInSQD(t *testing.T) {
	p := newPair(t, options{rdAtomic: 4})
	add := sendWR(verbs.AtomicFetchAdd, 1, 0, 8)
	add.CompareAdd = 3
	p.post(p.a, add)
	p.run()
	p.state(p.b, verbs.QPSQD)
	a := &verbs.QPAttr{
		Mask: verbs.AttrState | verbs.AttrMaxDestRdAtomic | verbs.AttrMaxQPRdAtomic | verbs.AttrTimeout |
			verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMinRNRTimer | verbs.AttrAV,
		State: verbs.QPSQD, MaxDestRdAtomic: 2, MaxQPRdAtomic: 1, Timeout: 20, RetryCnt: 1, RNRRetry: 3, MinRNRTimer: 9,
		AV: verbs.AV{Remote: netip.MustParseAddrPort("127.0.0.9:4791")},
	}
	p.modify(p.b, a)
	got := p.b.q.Attr()
	if got.MaxDestRdAtomic != 2 || got.MaxQPRdAtomic != 1 || got.Timeout != 20 || got.MinRNRTimer != 9 || got.AV != a.AV {
		t.Errorf("attributes %+v", got)
	}
	// The atomic's answer comes once more, after the change.
	p.deliver(p.b, append(roceRequest(p, add), 0, 0, 0, 0))
	p.pump(p.b)
	out := decoded(t, p.b.take())
	if len(out) != 1 || out[0].AtomicAck != 0 {
		t.Errorf("answers %+v", out)
	}
	if hostUint64(p.b.remote.buf) != 3 {
		t.Error("done twice")
	}
	p.modify(p.b, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTS})
	p.post(p.b, sendWR(verbs.RDMARead, 2, 0, 8), sendWR(verbs.RDMARead, 3, 8, 8))
	p.pump(p.b)
	if out := decoded(t, p.b.take()); len(out) != 1 || p.b.q.req.readN != 1 {
		t.Errorf("%d READs outstanding of 1 that may be: %+v", p.b.q.req.readN, out)
	}
}

// SQD is not left for RTS before it is drained; for ERR it is. A path that changes while it
// drains takes what is in flight along.
func TestDraining(t *testing.T) {
	p := newPair(t, options{})
	p.postRecv(p.b, 10, 0, 64)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
	p.pump(p.a)
	p.a.take()
	p.state(p.a, verbs.QPSQD)
	if err := p.a.q.Modify(p.now, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTS}); !errors.Is(err, verbs.ErrBadState) {
		t.Errorf("left SQD before it was drained: %v", err)
	}
	old := p.a.win
	p.a.win = NewWindow(WindowConfig{})
	p.a.q.SetWindow(p.a.win)
	if old.used != 0 {
		t.Errorf("%d bytes left in the old window", old.used)
	}
	p.check(p.a)
	p.run()
	p.wantWCs(p.a, "1:SEND")
	p.modify(p.a, &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTS})
	if p.a.events != 0 {
		t.Errorf("events %b that nobody asked for", p.a.events)
	}

	p = newPair(t, options{})
	p.post(p.a, sendWR(verbs.Send, 1, 0, 64))
	p.pump(p.a)
	p.state(p.a, verbs.QPSQD)
	p.post(p.a, sendWR(verbs.Send, 2, 0, 64))
	p.state(p.a, verbs.QPErr)
	p.pump(p.a)
	p.wantWCs(p.a, "1:WR_FLUSH_ERR", "2:WR_FLUSH_ERR")
}
