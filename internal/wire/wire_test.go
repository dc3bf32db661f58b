package wire

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// pipe is one end of a link that a test scripts: it keeps what was sent, as whole messages.
type pipe struct {
	addr    netip.AddrPort
	peer    *pipe
	inbox   []link.Rx
	maxSegs int
	accept  func(n int) int // how many of n messages to take; nil takes all
	err     error
	sent    []link.Rx // everything taken, trains unsplit
}

func (p *pipe) Recv(msgs []link.Rx) (int, error) {
	n := copy(msgs, p.inbox)
	p.inbox = p.inbox[n:]
	return n, p.err
}

func (p *pipe) Send(msgs []link.Tx) (int, error) {
	n := len(msgs)
	if p.accept != nil {
		n = p.accept(n)
	}
	for i := range n {
		m := &msgs[i]
		rx := link.Rx{SegSize: m.SegSize, Src: netip.AddrPortFrom(m.Src, p.addr.Port()), Dst: m.Dst.Addr()}
		for _, g := range m.Gather {
			rx.Buf = append(rx.Buf, g...)
		}
		if len(rx.Buf) != m.Len {
			return i, errors.New("length of a message and its pieces differ")
		}
		p.sent = append(p.sent, rx)
		if p.peer != nil {
			p.peer.inbox = append(p.peer.inbox, rx)
		}
	}
	return n, p.err
}

func (p *pipe) Caps() link.Caps {
	return link.Caps{MaxSegs: p.maxSegs, MaxBytes: 65000, ControlsID: true}
}
func (p *pipe) LocalAddr() netip.AddrPort { return p.addr }

// quiet is Upcalls for those who look elsewhere.
type quiet struct {
	request *Conn
	log     []verbs.EventType
}

func (u *quiet) ConnRequest(c *Conn, _ *cm.Event)               { u.request = c }
func (u *quiet) ConnEvent(_ *Conn, t verbs.EventType, _ []byte) { u.log = append(u.log, t) }
func (u *quiet) QPEvent(_ *QP, t verbs.EventType)               { u.log = append(u.log, t) }
func (u *quiet) Completions(*qp.CQ, bool)                       {}

// end is a wire with one queue pair in RTS towards another end.
type end struct {
	w    *Wire
	pipe *pipe
	up   *quiet
	mrs  *mr.Table
	mr   *mr.Region
	lane *qp.CQ
	qp   *QP
}

func newEnd(t *testing.T, addr string, seed uint64) *end {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 3))
	e := &end{
		pipe: &pipe{addr: netip.MustParseAddrPort(addr), maxSegs: 16}, up: &quiet{},
		mrs: mr.New(rnd.Uint64), lane: qp.NewCQ(1024),
	}
	var err error
	if e.w, err = New(Config{Link: e.pipe, Mem: e.mrs, Upcalls: e.up, Rand: rnd.Uint32, GUID: seed}); err != nil {
		t.Fatal(err)
	}
	if e.mr, err = e.mrs.Register(1, make([]byte, 1<<20), verbs.LocalWrite); err != nil {
		t.Fatal(err)
	}
	e.qp, err = e.w.CreateQP(qp.Config{Type: verbs.RC, PD: 1, SendCQ: e.lane, RecvCQ: e.lane,
		Cap: verbs.QPCap{MaxSendWR: 256, MaxRecvWR: 256}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *end) modify(t *testing.T, a verbs.QPAttr) {
	t.Helper()
	if err := e.w.Modify(0, e.qp, &a); err != nil {
		t.Fatal(err)
	}
}

// connect brings both ends to RTS towards each other, without the connection manager.
func connect(t *testing.T, a, b *end, mtu verbs.MTU) {
	t.Helper()
	a.pipe.peer, b.pipe.peer = b.pipe, a.pipe
	for _, x := range [][2]*end{{a, b}, {b, a}} {
		x[0].modify(t, verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags, State: verbs.QPInit, Port: 1})
		x[0].modify(t, verbs.QPAttr{
			Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
				verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
			State: verbs.QPRTR, AV: verbs.AV{Remote: x[1].pipe.addr}, PathMTU: mtu, DestQPN: x[1].qp.Num(), RQPSN: 100, MinRNRTimer: 1,
		})
		x[0].modify(t, verbs.QPAttr{
			Mask:  verbs.AttrState | verbs.AttrSQPSN | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic,
			State: verbs.QPRTS, SQPSN: 100, Timeout: 14, RetryCnt: 7, RNRRetry: 7,
		})
	}
}

func (e *end) sgl(off, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: e.mr.Addr() + uint64(off), Length: uint32(n), LKey: e.mr.Key()}}
}

func (e *end) send(t *testing.T, off, n int) {
	t.Helper()
	_, ring, err := e.qp.Engine().PostSend([]verbs.SendWR{{WRID: uint64(off), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: e.sgl(off, n)}})
	if err != nil {
		t.Fatal(err)
	}
	if ring {
		e.w.Ring(e.qp)
	}
}

func (e *end) recv(t *testing.T, off, n int) {
	t.Helper()
	if _, _, err := e.qp.Engine().PostRecv([]verbs.RecvWR{{WRID: uint64(off), SGList: e.sgl(off, n)}}); err != nil {
		t.Fatal(err)
	}
}

// settle steps both ends until neither has anything to do; time advances a little each turn.
func settle(t *testing.T, now *verbs.Instant, ends ...*end) {
	t.Helper()
	for range 100_000 {
		busy := false
		for _, e := range ends {
			if len(e.pipe.inbox) > 0 || e.w.Pending() || e.w.tx.deadline() <= *now {
				e.w.Step(*now)
				busy = true
			} else if e.w.tx.deadline() != verbs.Never {
				*now, busy = e.w.tx.deadline(), true
			}
		}
		if !busy {
			return
		}
	}
	t.Fatal("the wires never come to rest")
}

// TestTrainsAreHonest: equal packets of one queue pair leave as a train, a shorter one ends
// it, each datagram's ICRC is that for its place in the train, and the receiver takes trains.
func TestTrainsAreHonest(t *testing.T) {
	for _, tc := range []struct{ name, a, b string }{
		{"IPv4", "10.0.0.1:4791", "10.0.0.2:4791"}, {"IPv6", "[fd00::1]:4791", "[fd00::2]:4791"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := newEnd(t, tc.a, 1), newEnd(t, tc.b, 2)
			connect(t, a, b, verbs.MTU1024)
			for i := range a.mr.Bytes() {
				a.mr.Bytes()[i] = byte(i * 7)
			}
			b.recv(t, 0, 100_000)
			a.send(t, 0, 10*1024+77)
			var now verbs.Instant
			settle(t, &now, a, b)
			if !bytes.Equal(a.mr.Bytes()[:10*1024+77], b.mr.Bytes()[:10*1024+77]) {
				t.Error("bytes differ")
			}
			if n := b.w.Counters.DropICRC.Load(); n != 0 {
				t.Errorf("%d ICRCs wrong", n)
			}
			trains, datagrams := 0, 0
			path := roce.NewPath(a.pipe.addr, b.pipe.addr)
			for _, m := range a.pipe.sent {
				if m.SegSize == 0 {
					m.SegSize = len(m.Buf)
				}
				if len(m.Buf) > m.SegSize {
					trains++
				}
				for i, rest := 0, m.Buf; len(rest) > 0; i++ {
					seg := rest[:min(m.SegSize, len(rest))]
					if !path.Check(seg, uint16(i)) {
						t.Errorf("datagram %d of a train of %d bytes: wrong ICRC", i, len(m.Buf))
					}
					datagrams++
					rest = rest[len(seg):]
				}
			}
			if trains == 0 || datagrams != 11 {
				t.Errorf("%d datagrams in %d trains, want 11 in some", datagrams, trains)
			}
			if got := b.w.Counters.TrainsIn.Load(); got != uint64(trains) {
				t.Errorf("%d trains received, %d sent", got, trains)
			}
		})
	}
}

// TestNoTrainsWithoutOffload: a link that cannot split gets single datagrams, all of ID 0.
func TestNoTrainsWithoutOffload(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	a.pipe.maxSegs = 1
	connect(t, a, b, verbs.MTU256)
	b.recv(t, 0, 10_000)
	a.send(t, 0, 5000)
	var now verbs.Instant
	settle(t, &now, a, b)
	for _, m := range a.pipe.sent {
		if m.SegSize != 0 {
			t.Fatalf("a train of %d bytes", len(m.Buf))
		}
	}
	if n := b.w.Counters.DropICRC.Load(); n != 0 || b.lane.Len() != 1 {
		t.Errorf("%d ICRCs wrong, %d completions", n, b.lane.Len())
	}
}

// TestBlockedLinkLosesNothing: a link that takes only some messages, or none for a while, gets
// the rest later, each once and in order.
func TestBlockedLinkLosesNothing(t *testing.T) {
	rnd := rand.New(rand.NewPCG(4, 4))
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	connect(t, a, b, verbs.MTU256)
	a.pipe.accept = func(n int) int { return rnd.IntN(min(n, 3) + 1) }
	var now verbs.Instant
	for i := range 200 {
		b.recv(t, i*1000, 1000)
	}
	for i := range 200 {
		a.send(t, i*1000, 1000)
		if i%10 == 0 {
			settle(t, &now, a, b)
		}
	}
	settle(t, &now, a, b)
	psn, seen := roce.PSN(100), 0
	for _, m := range a.pipe.sent {
		for rest := m.Buf; len(rest) > 0; {
			n := len(rest)
			if m.SegSize > 0 {
				n = min(m.SegSize, n)
			}
			var p roce.Packet
			if err := p.Decode(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
			if p.Opcode.IsRequest() {
				if p.PSN != psn {
					t.Fatalf("PSN %v, want %v", p.PSN, psn)
				}
				psn, seen = psn.Next(), seen+1
			}
		}
	}
	if seen != 800 || b.lane.Len() != 200 {
		t.Errorf("%d packets, want 800; %d messages, want 200", seen, b.lane.Len())
	}
	if a.w.Counters.SendBlocked.Load() == 0 {
		t.Error("the link never blocked")
	}
}

// TestAnswersLeaveBeforeTheirQueuePair: a message is shown to its reader before it is
// acknowledged. A reader that ends the queue pair as soon as it has the message, in whatever
// way, does not take the acknowledgement with it.
func TestAnswersLeaveBeforeTheirQueuePair(t *testing.T) {
	state := func(s verbs.QPState) func(*testing.T, *end) {
		return func(t *testing.T, e *end) { e.modify(t, verbs.QPAttr{Mask: verbs.AttrState, State: s}) }
	}
	for name, finish := range map[string]func(*testing.T, *end){
		"destroy": func(_ *testing.T, e *end) { e.w.DestroyQP(0, e.qp) },
		"error":   state(verbs.QPErr),
		"reset":   state(verbs.QPReset),
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
			connect(t, a, b, verbs.MTU1024)
			b.recv(t, 0, 100)
			a.send(t, 0, 100)
			a.w.Step(0)
			b.w.Step(0)
			if b.lane.Empty() || len(b.pipe.sent) > 0 {
				t.Fatal("the message is not shown before it is acknowledged, so this tests nothing")
			}
			finish(t, b)
			b.w.Step(0)
			a.w.Step(0)
			var wc [1]verbs.WC
			if a.lane.Poll(wc[:]) != 1 || wc[0].Status != verbs.WCSuccess {
				t.Errorf("the sender does not know that its message arrived: %+v", wc[0])
			}
		})
	}
}

// TestDeadLink: the error is kept, and the wire does no more.
func TestDeadLink(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	connect(t, a, b, verbs.MTU256)
	a.pipe.err = errors.New("gone")
	a.send(t, 0, 100)
	a.w.Step(1)
	if a.w.Err() == nil || a.w.Pending() {
		t.Errorf("Err %v, Pending %v", a.w.Err(), a.w.Pending())
	}
	a.w.Step(2)
}

// TestDropsByReason: whatever is wrong with a datagram, it is dropped, counted under its own
// reason, and the queue pair is none the worse.
func TestDropsByReason(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	connect(t, a, b, verbs.MTU1024)
	stranger := netip.MustParseAddrPort("10.0.0.3:4791")
	c := &b.w.Counters
	good := func() *roce.Packet {
		return &roce.Packet{BTH: roce.BTH{Opcode: roce.RCSendOnly, PKey: roce.DefaultPKey, DestQP: b.qp.Num(), PSN: 100, AckReq: true}, Payload: []byte("12345678")}
	}
	mad := func() *roce.Packet {
		return &roce.Packet{BTH: roce.BTH{Opcode: roce.UDSendOnly, PKey: roce.DefaultPKey, DestQP: 1},
			DETH: roce.DETH{QKey: roce.GSIQKey, SrcQP: 1}, Payload: make([]byte, roce.MADLen)}
	}
	inject := func(from netip.AddrPort, to string, p *roce.Packet, spoil func([]byte)) {
		dst := netip.MustParseAddrPort(to)
		path := roce.NewPath(from, dst)
		raw := p.Append(nil)
		raw = append(raw, 0, 0, 0, 0)
		roce.PutICRC(raw[len(raw)-4:], path.ICRC(raw[:len(raw)-4], 0))
		if spoil != nil {
			spoil(raw)
		}
		b.pipe.inbox = append(b.pipe.inbox, link.Rx{Buf: raw, Src: from, Dst: dst.Addr()})
		b.w.Step(1)
	}
	const here = "10.0.0.2:4791"
	from := a.pipe.addr
	for _, tc := range []struct {
		name    string
		counter *atomic.Uint64
		do      func()
	}{
		{"bad ICRC", &c.DropICRC, func() { inject(from, here, good(), func(b []byte) { b[13] ^= 1 }) }},
		{"unknown QPN", &c.DropNoQP, func() { p := good(); p.DestQP ^= 1; inject(from, here, p, nil) }},
		{"QPN 0", &c.DropNoQP, func() { p := good(); p.DestQP = 0; inject(from, here, p, nil) }},
		{"multicast QPN", &c.DropNoQP, func() { p := good(); p.DestQP = verbs.QPNMulticast; inject(from, here, p, nil) }},
		{"other partition", &c.DropPKey, func() { p := good(); p.PKey = 0x1234; inject(from, here, p, nil) }},
		{"wrong source", &c.DropAddress, func() { inject(stranger, here, good(), nil) }},
		{"wrong destination", &c.DropAddress, func() { inject(from, "10.0.0.9:4791", good(), nil) }},
		{"UC opcode to an RC queue pair", &c.DropTransport, func() { p := good(); p.Opcode = roce.UCSendOnly; inject(from, here, p, nil) }},
		{"UD opcode to an RC queue pair", &c.DropTransport, func() { p := mad(); p.DestQP = b.qp.Num(); inject(from, here, p, nil) }},
		{"CNP", &c.DropTransport, func() {
			inject(from, here, &roce.Packet{BTH: roce.BTH{Opcode: roce.CNP, PKey: roce.DefaultPKey, DestQP: b.qp.Num()}}, nil)
		}},
		{"transport version", &c.DropDecode, func() { inject(from, here, good(), func(b []byte) { b[1] |= 1 }) }},
		{"unknown opcode", &c.DropDecode, func() { inject(from, here, good(), func(b []byte) { b[0] = 0xFF }) }},
		{"short MAD", &c.DropGSI, func() { p := mad(); p.Payload = p.Payload[:100]; inject(from, here, p, nil) }},
		{"RC opcode to QP1", &c.DropGSI, func() { p := good(); p.DestQP = 1; inject(from, here, p, nil) }},
		{"Q_Key of QP1", &c.DropQKey, func() { p := mad(); p.DETH.QKey = 7; inject(from, here, p, nil) }},
		{"MAD with a bad ICRC", &c.DropICRC, func() { inject(from, here, mad(), func(b []byte) { b[40] ^= 1 }) }},
		{"truncated", &c.DropTruncated, func() {
			b.pipe.inbox = append(b.pipe.inbox, link.Rx{Buf: make([]byte, 100), Src: from, Dst: b.pipe.addr.Addr(), Truncated: true})
			b.w.Step(1)
		}},
		{"empty", &c.DropDecode, func() {
			b.pipe.inbox = append(b.pipe.inbox, link.Rx{Src: from, Dst: b.pipe.addr.Addr()})
			b.w.Step(1)
		}},
	} {
		before, sent := tc.counter.Load(), len(b.pipe.sent)
		tc.do()
		if got := tc.counter.Load() - before; got != 1 {
			t.Errorf("%s: counted %d times", tc.name, got)
		}
		if len(b.pipe.sent) != sent {
			t.Errorf("%s: was answered", tc.name)
		}
	}
	b.recv(t, 0, 100)
	inject(from, here, good(), nil)
	if b.lane.Len() != 1 || b.qp.State() != verbs.QPRTS {
		t.Errorf("a good packet after all that: %d completions, state %v", b.lane.Len(), b.qp.State())
	}
}

// TestQPNumbersRest: a number is not used again before many others were, and late packets of
// a dead queue pair meet nobody.
func TestQPNumbersRest(t *testing.T) {
	e := newEnd(t, "10.0.0.1:4791", 9)
	seen := map[verbs.QPN]int{}
	for i := range 3 * quarantine {
		q, err := e.w.CreateQP(qp.Config{Type: verbs.RC, PD: 1, SendCQ: e.lane, RecvCQ: e.lane})
		if err != nil {
			t.Fatal(err)
		}
		if last, ok := seen[q.Num()]; ok && i-last < quarantine {
			t.Fatalf("number %v came back after %d others", q.Num(), i-last)
		}
		seen[q.Num()] = i
		e.w.DestroyQP(0, q)
		if e.w.qps.find(q.Num()) != nil {
			t.Fatal("a destroyed queue pair can be found")
		}
	}
	if n := len(e.w.qps.slots); n > 2*quarantine+2 {
		t.Errorf("the table grew to %d slots for one queue pair at a time", n)
	}
}

// TestQPNumbersRunOut: the table says so and recovers.
func TestQPNumbersRunOut(t *testing.T) {
	tab := newQPTable(3, 12345)
	tab.maxSlot = 64
	var got []verbs.QPN
	for {
		n, err := tab.alloc(&QP{})
		if err != nil {
			if !errors.Is(err, ErrNoQPN) {
				t.Fatal(err)
			}
			break
		}
		if n>>Shift != 3 {
			t.Fatalf("number %v does not name wire 3", n)
		}
		got = append(got, n)
	}
	if len(got) != 64 {
		t.Errorf("%d numbers from 64 slots", len(got))
	}
	tab.release(got[7], nil)
	n, err := tab.alloc(&QP{})
	if err != nil || n == got[7] {
		t.Errorf("after a release: %v, %v", n, err)
	}
}
