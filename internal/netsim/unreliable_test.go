package netsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// lossy is a UC connection that sends numbered messages one way and notes which arrive. What
// arrives must be whole, in order, once, and in the oldest receive.
type lossy struct {
	t        *testing.T
	what     string
	net      *Net
	a, b     *Node
	aq, bq   *wire.QP
	aMR, bMR *mr.Region
	op       verbs.Opcode
	size     int

	sent     int
	arrived  []int
	nextRecv uint64
	failed   bool
}

const ucDepth = 64

func newLossy(t *testing.T, what string, net *Net, op verbs.Opcode, size int) *lossy {
	t.Helper()
	l := &lossy{t: t, what: what, net: net, op: op, size: size, a: net.Node("10.0.0.1"), b: net.Node("10.0.0.2")}
	c := verbs.QPCap{MaxSendWR: ucDepth, MaxRecvWR: ucDepth}
	aLane, bLane := qp.NewCQ(4*ucDepth), qp.NewCQ(4*ucDepth)
	l.aq, l.bq = l.a.TypedQP(verbs.UC, aLane, c), l.b.TypedQP(verbs.UC, bLane, c)
	l.aMR = l.a.Register(make([]byte, ucDepth*size), 0)
	l.bMR = l.b.Register(make([]byte, ucDepth*size), verbs.LocalWrite|verbs.RemoteWrite)
	for i := range ucDepth {
		l.recv(uint64(i))
	}
	if _, _, err := net.Connect(l.a, l.b, l.aq, l.bq, Defaults()); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	l.a.OnCompletions, l.b.OnCompletions = l.onSent, l.onArrived
	return l
}

func (l *lossy) recv(id uint64) {
	if _, err := l.b.Recv(l.bq, verbs.RecvWR{WRID: id, SGList: sgl(l.bMR, int(id%ucDepth)*l.size, l.size)}); err != nil {
		l.t.Fatalf("%s: recv: %v", l.what, err)
	}
}

// post sends message n: all of size bytes, so that its packets can be counted.
func (l *lossy) post(n int) {
	off := n % ucDepth * l.size
	fill(l.aMR.Bytes()[off:][:l.size], n)
	wr := verbs.SendWR{
		WRID: uint64(n), Opcode: l.op, ImmData: uint32(n), Flags: verbs.Signaled, SGList: sgl(l.aMR, off, l.size),
		RKey: l.bMR.Key(), RemoteAddr: l.bMR.Addr() + uint64(off),
	}
	if _, err := l.a.Send(l.aq, wr); err != nil {
		l.t.Fatalf("%s: send %d: %v", l.what, n, err)
	}
}

func (l *lossy) onSent(lane *qp.CQ) {
	var wc [32]verbs.WC
	for n := lane.Poll(wc[:]); n > 0; n = lane.Poll(wc[:]) {
		for _, c := range wc[:n] {
			if c.Status != verbs.WCSuccess || c.WRID != uint64(l.sent) {
				l.t.Errorf("%s: send completion %d (%v), want %d", l.what, c.WRID, c.Status, l.sent)
				l.failed = true
			}
			l.sent++
		}
	}
}

func (l *lossy) onArrived(lane *qp.CQ) {
	var wc [32]verbs.WC
	want := make([]byte, l.size)
	for n := lane.Poll(wc[:]); n > 0; n = lane.Poll(wc[:]) {
		for _, c := range wc[:n] {
			k := int(c.ImmData)
			place := int(c.WRID % ucDepth)
			if c.Opcode == verbs.WCRecvRDMAWithImm {
				place = k % ucDepth
			}
			fill(want, k)
			switch {
			case c.Status != verbs.WCSuccess || c.WRID != l.nextRecv || int(c.ByteLen) != l.size,
				len(l.arrived) > 0 && k <= l.arrived[len(l.arrived)-1],
				!bytes.Equal(want, l.bMR.Bytes()[place*l.size:][:l.size]):
				l.t.Errorf("%s: receive %d (want %d) has message %d of %d bytes, %v", l.what, c.WRID, l.nextRecv, k, c.ByteLen, c.Status)
				l.failed = true
			}
			l.arrived = append(l.arrived, k)
			l.nextRecv++
			l.recv(l.nextRecv + ucDepth - 1)
		}
	}
}

// play sends messages, so many at a time and then a pause in which all arrives that will.
func (l *lossy) play(messages, burst int) {
	l.t.Helper()
	for n := 0; n < messages && !l.failed; {
		for range min(burst, messages-n) {
			l.post(n)
			n++
		}
		// Sends complete when they have left, whatever becomes of them.
		if !l.net.Run(time.Second, func() bool { return l.sent == n || l.failed }) {
			l.t.Fatalf("%s: %d of %d sends complete", l.what, l.sent, n)
		}
		l.net.Run(time.Millisecond, nil)
	}
	if s := l.bq.State(); s != verbs.QPRTS && len(l.arrived) > 0 {
		l.t.Errorf("%s: the receiver is in %v", l.what, s)
	}
}

// silent fails when the receiver says anything but what the connection manager does.
func (l *lossy) silent() Rule {
	return func(p *Packet) Verdict {
		d, ok := p.Decode()
		if ok && d.DestQP != verbs.QPNGSI && (p.Src == l.b.Addr || d.AckReq || d.Opcode.Transport() != roce.TransportUC) {
			l.t.Errorf("%s: a packet %v, AckReq %v, from %v", l.what, d.Opcode, d.AckReq, p.Src)
		}
		return Verdict{}
	}
}

// TestUCEachPacketLost: 1000 messages of five packets; of every seventh the packet with each
// index in turn is lost, said twice, or late. That message goes missing if it is lost, others never.
func TestUCEachPacketLost(t *testing.T) {
	const size, packets, messages = 4*1024 + 300, 5, 1000
	for _, op := range []verbs.Opcode{verbs.SendWithImm, verbs.RDMAWriteWithImm} {
		for index := range packets {
			for _, fault := range []struct {
				name string
				v    Verdict
				lost bool
			}{
				{"lost", Verdict{Drop: true}, true},
				{"damaged", Verdict{Corrupt: true}, true},
				{"twice", Verdict{Copies: 2}, false},
				{"overtaken", Verdict{Delay: 5 * time.Microsecond}, true},
			} {
				what := fmt.Sprintf("%v, packet %d %s", op, index, fault.name)
				net := New(uint64(index))
				l := newLossy(t, what, net, op, size)
				nth := 0
				net.Rules = []Rule{l.silent(), func(p *Packet) Verdict {
					d, ok := p.Decode()
					if !ok || d.DestQP != l.bq.Num() {
						return Verdict{}
					}
					nth++
					if (nth-1)/packets%7 == 3 && (nth-1)%packets == index {
						return fault.v
					}
					return Verdict{}
				}}
				l.play(messages, 10)
				want := messages
				if fault.lost {
					want -= (messages + 3) / 7
				}
				if fault.name == "overtaken" {
					want = l.overtaken(index, packets, messages, 7, 3)
				}
				extra := 0
				if fault.v.Corrupt {
					extra = 3 // the ICRC leaves out what routers may change: 8 bits of a thousand bytes
				}
				if n := len(l.arrived); n < want || n > want+extra {
					t.Errorf("%s: %d messages arrived, want %d", what, len(l.arrived), want)
				}
				if l.failed {
					return
				}
			}
		}
	}
}

// overtaken is how many messages arrive when the packet with an index of every so many-th
// message is late by less than a burst: all of that message's others are there before it, so
// it alone is lost; but a last packet of a burst has nobody who could overtake it.
func (l *lossy) overtaken(index, packets, messages, every, at int) int {
	n := messages
	for m := at; m < messages; m += every {
		if index == packets-1 && m%10 == 9 {
			continue
		}
		n--
	}
	return n
}

// TestUCRandomFaults: everything at once. Whatever arrives is whole, in order and once, and
// when the network gets well so does the connection.
func TestUCRandomFaults(t *testing.T) {
	for seed := range uint64(12) {
		what := fmt.Sprintf("seed %d", seed)
		net := New(seed)
		net.RunIDs = seed%3 == 1
		op := verbs.SendWithImm
		if seed%2 == 1 {
			op = verbs.RDMAWriteWithImm
		}
		l := newLossy(t, what, net, op, 8+int(seed)*700)
		net.Rules = []Rule{l.silent()}
		net.Faults = Faults{Drop: 0.03, Duplicate: 0.05, Reorder: 0.03, Corrupt: 0.02}
		l.play(1500, 20)
		if n := len(l.arrived); n < 300 || n == 1500 {
			t.Errorf("%s: %d of 1500 arrived", what, n)
		}
		net.Faults = Faults{}
		before := len(l.arrived)
		for n := range 50 {
			l.post(1500 + n)
		}
		net.Run(time.Second, nil)
		if n := len(l.arrived) - before; n != 50 {
			t.Errorf("%s: %d of 50 arrived in the end", what, n)
		}
		if l.failed {
			return
		}
	}
}

// TestUCGreeting is the race for which the project exists, on UC: the RTU is lost, and the
// active side's first message moves the passive one to RTS, which sends what was posted in RTR.
func TestUCGreeting(t *testing.T) {
	net := New(5)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	aLane, bLane := qp.NewCQ(8), qp.NewCQ(8)
	aq, bq := a.TypedQP(verbs.UC, aLane, verbs.QPCap{}), b.TypedQP(verbs.UC, bLane, verbs.QPCap{})
	aMR, bMR := a.Register(make([]byte, 64), verbs.LocalWrite), b.Register(make([]byte, 64), verbs.LocalWrite)
	for _, x := range []struct {
		n *Node
		q *wire.QP
		r *mr.Region
	}{{a, aq, aMR}, {b, bq, bMR}} {
		if _, err := x.n.Recv(x.q, verbs.RecvWR{WRID: 1, SGList: sgl(x.r, 0, 64)}); err != nil {
			t.Fatal(err)
		}
	}
	net.Rules = []Rule{func(p *Packet) Verdict { return Verdict{Drop: p.CM() == uint16(roce.AttrRTU)} }}
	if err := b.Wire.Listen(service); err != nil {
		t.Fatal(err)
	}
	var bc *wire.Conn
	b.OnConnRequest = func(c *wire.Conn, _ *cm.Event) { bc = c }
	if _, err := a.Wire.Dial(net.Now(), aq, wire.DialParam{Path: a.Path(b), Service: service, SrcPort: 40000, ConnParam: Defaults()}); err != nil {
		t.Fatal(err)
	}
	net.Run(time.Second, func() bool { return bc != nil })
	if bc == nil || bc.Type() != verbs.UC {
		t.Fatal("no UC request arrived")
	}
	if err := b.Wire.Accept(net.Now(), bc, bq, Defaults()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Send(bq, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte(greeting)}); err != nil {
		t.Fatal(err)
	}
	net.Run(time.Second, func() bool { return aq.State() == verbs.QPRTS })
	if aLane.Len() != 0 || bq.State() != verbs.QPRTR {
		t.Fatalf("%d arrived at the active side, the passive one is in %v", aLane.Len(), bq.State())
	}
	atVisit := verbs.QPState(99)
	b.OnCompletions = func(*qp.CQ) { atVisit = bq.State() }
	if _, err := a.Send(aq, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte("request")}); err != nil {
		t.Fatal(err)
	}
	net.Run(time.Second, func() bool { return aLane.Len() > 0 })
	if atVisit != verbs.QPRTS || string(aMR.Bytes()[:len(greeting)]) != greeting || string(bMR.Bytes()[:7]) != "request" {
		t.Errorf("the passive side was in %v; %q and %q arrived", atVisit, aMR.Bytes(), bMR.Bytes())
	}
}

// TestUDFaults: many talk to one over a bad network. What arrives is what was sent, by whom the
// GRH and the completion say; what is lost is lost, and when the network is well all arrives.
func TestUDFaults(t *testing.T) {
	const senders, size, messages = 10, 600, 200
	for seed := range uint64(6) {
		net := New(seed)
		net.RunIDs = seed%2 == 1
		b := net.Node("10.0.0.1")
		if seed%3 == 2 {
			b = net.Node("[fd00::1]:4791")
		}
		lane := qp.NewCQ(1024)
		bq := b.TypedQP(verbs.UD, lane, verbs.QPCap{MaxRecvWR: 256})
		bMR := b.Register(make([]byte, 256*1024), verbs.LocalWrite)
		ready(t, net, b, bq)
		recv := func(i uint64) {
			if _, err := b.Recv(bq, verbs.RecvWR{WRID: i, SGList: sgl(bMR, int(i)*1024, 40+size)}); err != nil {
				t.Fatal(err)
			}
		}
		for i := range uint64(256) {
			recv(i)
		}
		type sender struct {
			n  *Node
			q  *wire.QP
			mr *mr.Region
			ah verbs.AH
		}
		var all []sender
		byAddr := map[netip.Addr]int{}
		for i := range senders {
			addr := fmt.Sprintf("10.0.1.%d", i+1)
			if !b.Addr.Addr().Is4() {
				addr = fmt.Sprintf("[fd00::1:%d]:%d", i+1, 4791+i)
			}
			s := sender{n: net.Node(addr)}
			s.q = s.n.TypedQP(verbs.UD, qp.NewCQ(1024), verbs.QPCap{})
			s.mr = s.n.Register(make([]byte, size), 0)
			ready(t, net, s.n, s.q)
			var err error
			if s.ah, err = s.n.Wire.CreateAH(PD, verbs.AV{Remote: b.Addr}, 0); err != nil {
				t.Fatal(err)
			}
			byAddr[s.n.Addr.Addr()] = i
			all = append(all, s)
		}
		got := make([]map[int]int, senders) // by sender: how often each message came
		for i := range got {
			got[i] = map[int]int{}
		}
		want := make([]byte, size)
		b.OnCompletions = func(*qp.CQ) {
			var wc [32]verbs.WC
			for n := lane.Poll(wc[:]); n > 0; n = lane.Poll(wc[:]) {
				for _, c := range wc[:n] {
					buf := bMR.Bytes()[c.WRID*1024:][:1024]
					from, to, ok := roce.GRHAddrs(buf)
					i, known := byAddr[from]
					k := int(binary.BigEndian.Uint64(buf[40:]))
					if !ok || !known || to != b.Addr.Addr() || c.SrcQPN != all[i].q.Num() || int(c.ImmData) != i {
						t.Errorf("seed %d: from %v to %v: %+v", seed, from, to, c)
						continue
					}
					fill(want, k)
					if n := int(c.ByteLen) - 40; n != 8+k || !bytes.Equal(buf[40:40+n], want[:n]) {
						t.Errorf("seed %d: message %d of %d arrived changed", seed, k, i)
					}
					got[i][k]++
					recv(c.WRID)
				}
			}
		}
		send := func(k int) {
			for i, s := range all {
				fill(s.mr.Bytes()[:8+k], k)
				wr := verbs.SendWR{
					Opcode: verbs.SendWithImm, ImmData: uint32(i), SGList: sgl(s.mr, 0, 8+k),
					AH: s.ah, RemoteQPN: bq.Num(), RemoteQKey: QKey,
				}
				if k%10 == 9 {
					wr.RemoteQKey ^= 1 // dropped, and no harm done
				}
				if _, err := s.n.Send(s.q, wr); err != nil {
					t.Fatal(err)
				}
			}
			net.Run(100*time.Microsecond, nil)
		}
		net.Faults = Faults{Drop: 0.05, Duplicate: 0.05, Reorder: 0.1, Corrupt: 0.05}
		for k := range messages {
			send(k)
		}
		net.Faults = Faults{}
		net.Run(time.Second, nil)
		for k := messages; k < messages+5; k++ {
			send(k)
		}
		net.Run(time.Second, nil)
		total := 0
		for i := range got {
			for k := messages; k < messages+5; k++ {
				if got[i][k] != 1 {
					t.Errorf("seed %d: message %d of %d came %d times over a good network", seed, k, i, got[i][k])
				}
			}
			for k := range messages {
				if k%10 == 9 && got[i][k] != 0 {
					t.Errorf("seed %d: a message with a wrong Q_Key arrived", seed)
				}
				total += got[i][k]
			}
		}
		if total < senders*messages/2 {
			t.Errorf("seed %d: %d messages arrived", seed, total)
		}
		c := b.Wire.QPCounters()
		if c.DroppedQKey.Load() == 0 || b.Wire.Counters.DropICRC.Load() == 0 || bq.State() != verbs.QPRTS {
			t.Errorf("seed %d: Q_Key %d, ICRC %d, state %v", seed, c.DroppedQKey.Load(), b.Wire.Counters.DropICRC.Load(), bq.State())
		}
	}
}

// ready moves a UD queue pair from INIT to RTS.
func ready(t *testing.T, net *Net, nd *Node, q *wire.QP) {
	t.Helper()
	for _, a := range []verbs.QPAttr{
		{Mask: verbs.AttrState, State: verbs.QPRTR},
		{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS, SQPSN: 1},
	} {
		if err := nd.Wire.Modify(net.Now(), q, &a); err != nil {
			t.Fatal(err)
		}
	}
}
