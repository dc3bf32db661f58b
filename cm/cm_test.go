package cm

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const ms = time.Millisecond

var (
	addrA = netip.MustParseAddr("10.77.0.2")
	addrB = netip.MustParseAddr("10.77.0.3")
	tcp   = roce.ServiceID(roce.PSTCP, 7471)
)

// node is one CM on the virtual network.
type node struct {
	*CM
	t      testing.TB
	net    *network
	addr   netip.Addr
	port   uint16
	events []Event
	// qpn is the last QP that repParams used.
	qpn verbs.QPN
	// last is the last event of each connection: events follow an order.
	last map[ConnID]EventType
	// program, when set, acts on events as they come.
	program func(ev Event)
}

// repParams returns parameters for a QP that no other connection has.
func (n *node) repParams() RepParams {
	n.qpn++
	p := repParams
	p.QPN += n.qpn
	return p
}

// record checks that an event may follow what the connection had before.
func (n *node) record(ev Event) {
	before := n.last[ev.Conn]
	ok := before < ev.Type
	switch ev.Type {
	case ReqReceived, RepReceived:
		ok = before == 0
	case Unreachable:
		ok = ok && before <= RepReceived
	case Disconnected:
		ok = ok && before < Rejected
	}
	if !ok {
		n.t.Fatalf("%s: %v has %v after %v", n.net.name(n), ev.Conn, ev.Type, before)
	}
	if n.last[ev.Conn] = ev.Type; ev.Type == TimewaitExit {
		delete(n.last, ev.Conn)
	}
}

// network joins nodes by a virtual link with virtual time. Each MAD takes 1 ms. verdict,
// when set, decides the fate of each: the delays after which copies of it arrive, none
// meaning that it is lost.
type network struct {
	t       testing.TB
	now     verbs.Instant
	nodes   []*node
	flying  packets
	seq     int
	verdict func(p *packet) []time.Duration
	// trace lists the first MADs sent, as "A REQ"; sent counts all of them.
	trace  []string
	sent   map[string]int
	checks bool // call CM.check all the time
	rnd    *rand.Rand
}

type packet struct {
	from  *node
	nth   int // of this kind from this node, from 1
	msg   Message
	out   Out
	at    verbs.Instant
	order int
}

type packets []*packet

func (h packets) Len() int { return len(h) }
func (h packets) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].order < h[j].order
}
func (h packets) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *packets) Push(x any)   { *h = append(*h, x.(*packet)) }
func (h *packets) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func newNetwork(t testing.TB, seed uint64) *network {
	return &network{t: t, now: 1000, sent: make(map[string]int), checks: true, rnd: rand.New(rand.NewPCG(seed, 1))}
}

// add returns a new node. cfg.Rand and, if 0, GUID are filled in.
func (nw *network) add(addr netip.Addr, cfg Config) *node {
	if cfg.Rand == nil {
		cfg.Rand = nw.rnd.Uint32
	}
	if cfg.GUID == 0 {
		cfg.GUID = 0x5054_00ff_fe00_0001 + uint64(len(nw.nodes))
	}
	n := &node{CM: New(cfg), t: nw.t, net: nw, addr: addr, port: cfg.UDPPort, last: make(map[ConnID]EventType)}
	if n.port == 0 {
		n.port = roce.Port
	}
	nw.nodes = append(nw.nodes, n)
	return n
}

// pair returns two nodes, A and B, B listening on tcp.
func pair(t testing.TB, cfg Config) (nw *network, a, b *node) {
	nw = newNetwork(t, 1)
	a, b = nw.add(addrA, cfg), nw.add(addrB, cfg)
	if err := b.Listen(tcp); err != nil {
		t.Fatal(err)
	}
	return nw, a, b
}

func (nw *network) name(n *node) string { return string(rune('A' + slices.Index(nw.nodes, n))) }

// flush takes what the nodes have to say.
func (nw *network) flush() {
	for _, n := range nw.nodes {
		for {
			ev, ok := n.NextEvent()
			if !ok {
				break
			}
			n.record(ev)
			n.events = append(n.events, ev)
			if n.program != nil {
				n.program(ev)
			}
		}
		var out Out
		for {
			pending := n.Pending()
			if !n.NextMAD(&out) {
				break
			}
			if !pending {
				nw.t.Fatalf("%s has something to send and does not say so", nw.name(n))
			}
			var m roce.MAD
			if err := m.Decode(out.MAD[:]); err != nil || !m.IsCM() {
				nw.t.Fatalf("%s sends no CM MAD: %v %+v", nw.name(n), err, m)
			}
			p := &packet{from: n, msg: Message(m.AttrID - roce.AttrREQ), out: out}
			key := nw.name(n) + " " + p.msg.String()
			nw.sent[key]++
			p.nth = nw.sent[key]
			if len(nw.trace) < 1000 {
				nw.trace = append(nw.trace, key)
			}
			fate := []time.Duration{ms}
			if nw.verdict != nil {
				fate = nw.verdict(p)
			}
			for _, d := range fate {
				q := *p
				nw.seq++
				q.at, q.order = nw.now.Add(d), nw.seq
				heap.Push(&nw.flying, &q)
			}
		}
		if n.Pending() {
			nw.t.Fatalf("%s has more to send", nw.name(n))
		}
		if nw.checks {
			n.check()
		}
	}
}

// deliver hands a packet to the node at its address and port, if there is one.
func (nw *network) deliver(p *packet) {
	for _, n := range nw.nodes {
		if n.addr == p.out.Remote.Addr() && n.port == p.out.Remote.Port() {
			mad := p.out.MAD
			n.HandleMAD(nw.now, netip.AddrPortFrom(p.from.addr, p.from.port), n.addr, mad[:])
			for i := range mad {
				mad[i] = 0xEE // whoever kept it will notice
			}
		}
	}
}

// next returns when something happens.
func (nw *network) next() verbs.Instant {
	at := verbs.Never
	if len(nw.flying) > 0 {
		at = nw.flying[0].at
	}
	for _, n := range nw.nodes {
		at = min(at, n.Deadline())
	}
	return at
}

// runUntil lets time pass until stop holds; the test fails when nothing is left to happen.
func (nw *network) runUntil(what string, stop func() bool) {
	nw.t.Helper()
	for range 100_000 {
		nw.flush()
		if stop() {
			return
		}
		at := nw.next()
		if at == verbs.Never {
			break
		}
		nw.step(at)
	}
	nw.t.Fatalf("%s does not happen; trace: %v", what, nw.trace)
}

// advance lets time pass.
func (nw *network) advance(d time.Duration) {
	end := nw.now.Add(d)
	for {
		nw.flush()
		at := nw.next()
		if at > end {
			break
		}
		nw.step(at)
	}
	nw.now = end
}

func (nw *network) step(at verbs.Instant) {
	nw.now = max(nw.now, at)
	for len(nw.flying) > 0 && nw.flying[0].at <= nw.now {
		nw.deliver(heap.Pop(&nw.flying).(*packet))
	}
	for _, n := range nw.nodes {
		n.HandleTimeout(nw.now)
	}
}

// want takes the node's next event of a type, letting time pass; another event fails the test.
func (n *node) want(typ EventType) Event {
	n.t.Helper()
	n.net.runUntil(fmt.Sprintf("%s %v", n.net.name(n), typ), func() bool { return len(n.events) > 0 })
	ev := n.events[0]
	n.events = n.events[1:]
	if ev.Type != typ {
		n.t.Fatalf("%s got %v, want %v; trace: %v", n.net.name(n), ev.Type, typ, n.net.trace)
	}
	return ev
}

// quiet fails the test when the node has an event.
func (n *node) quiet() {
	n.t.Helper()
	n.net.flush()
	if len(n.events) > 0 {
		n.t.Fatalf("%s has %v", n.net.name(n), n.events[0].Type)
	}
}

// count returns how often a node has sent a message.
func (n *node) count(m Message) int { return n.net.sent[n.net.name(n)+" "+m.String()] }

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func reqTo(a, b *node) ReqParams {
	return ReqParams{
		Path:      Path{Local: a.addr, Remote: netip.AddrPortFrom(b.addr, b.port)},
		ServiceID: tcp, SrcPort: 40000, Type: verbs.RC, QPN: 0x11, StartPSN: 0x123456, MTU: verbs.MTU1024,
		ResponderResources: 4, InitiatorDepth: 5, RetryCnt: 7, RNRRetry: 6, PrivateData: []byte("hello"),
	}
}

var repParams = RepParams{QPN: 0x22, StartPSN: 0xabcdef, ResponderResources: 3, InitiatorDepth: 2, RNRRetry: 7, PrivateData: []byte("welcome")}

// connect makes a connection and returns both IDs.
func connect(a, b *node) (ida, idb ConnID) {
	a.t.Helper()
	ida, err := a.Connect(a.net.now, reqTo(a, b))
	a.must(err)
	idb = b.want(ReqReceived).Conn
	b.must(b.Accept(b.net.now, idb, repParams))
	a.want(RepReceived)
	a.must(a.Ready(a.net.now, ida, []byte("ready")))
	b.want(Established)
	return ida, idb
}

func TestConnectAndDisconnect(t *testing.T) {
	nw, a, b := pair(t, Config{})
	ida, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	ev := b.want(ReqReceived)
	idb := ev.Conn
	wantReq := ReqInfo{
		Type: verbs.RC, QPN: 0x11, StartPSN: 0x123456, MTU: verbs.MTU1024, ResponderResources: 4, InitiatorDepth: 5,
		RetryCnt: 7, RNRRetry: 6, AckTimeout: DefaultAckTimeout, FlowLabel: (40000*31 + 7471) & 0xfffff, GUID: a.cfg.GUID,
		SrcPort: 40000, Src: addrA, Dst: addrB,
	}
	if ev.Req != wantReq {
		t.Errorf("ReqReceived %+v, want %+v", ev.Req, wantReq)
	}
	if want := padded("hello", MaxReqPrivate); string(ev.PrivateData) != want {
		t.Errorf("private data of the REQ %q", ev.PrivateData)
	}
	if want := (Path{Local: addrB, Remote: netip.AddrPortFrom(addrA, 4791)}); ev.Path != want || ev.Service != tcp {
		t.Errorf("path %v, service %v", ev.Path, ev.Service)
	}
	b.must(b.Accept(nw.now, idb, repParams))
	ev = a.want(RepReceived)
	wantRep := RepInfo{
		QPN: 0x22, StartPSN: 0xabcdef, ResponderResources: 3, InitiatorDepth: 2, RNRRetry: 7, TargetAckDelay: 15, GUID: b.cfg.GUID,
	}
	if ev.Rep != wantRep || ev.Conn != ida {
		t.Errorf("RepReceived %v %+v, want %+v", ev.Conn, ev.Rep, wantRep)
	}
	if want := padded("welcome", roce.REPPrivateLen); string(ev.PrivateData) != want {
		t.Errorf("private data of the REP %q", ev.PrivateData)
	}
	a.must(a.Ready(nw.now, ida, []byte("ready")))
	ev = b.want(Established)
	if want := padded("ready", roce.RTUPrivateLen); string(ev.PrivateData) != want {
		t.Errorf("private data of the RTU %q", ev.PrivateData)
	}
	if a.Deadline() != verbs.Never || b.Deadline() != verbs.Never {
		t.Error("an established connection has a timer")
	}
	a.must(a.Disconnect(nw.now, ida, []byte("bye")))
	ev = b.want(Disconnected)
	if want := padded("bye", roce.DREQPrivateLen); string(ev.PrivateData) != want || ev.Reason != 0 {
		t.Errorf("private data of the DREQ %q, reason %v", ev.PrivateData, ev.Reason)
	}
	ev = a.want(Disconnected)
	if ev.Reason != 0 {
		t.Errorf("reason %v", ev.Reason)
	}
	a.want(TimewaitExit)
	b.want(TimewaitExit)
	nw.advance(time.Hour)
	a.quiet()
	b.quiet()
	want := []string{"A REQ", "B REP", "A RTU", "A DREQ", "B DREP"}
	if !slices.Equal(nw.trace, want) {
		t.Errorf("trace %v, want %v", nw.trace, want)
	}
	if a.Len() != 0 || b.Len() != 0 {
		t.Error("connections remain")
	}
}

func padded(s string, n int) string { return s + string(make([]byte, n-len(s))) }
