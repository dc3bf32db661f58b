package qp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// region is a piece of testMem.
type region struct {
	pd     PD
	key    uint32
	base   uint64
	buf    []byte
	access verbs.Access
	placed int
	dead   bool
}

// testMem is registered memory for tests: a list of regions whose key is both L_Key and R_Key.
type testMem struct {
	regions []*region
	binds   []Bind
}

func (m *testMem) add(pd PD, key uint32, base uint64, n int, access verbs.Access) *region {
	r := &region{pd: pd, key: key, base: base, buf: make([]byte, n), access: access}
	m.regions = append(m.regions, r)
	return r
}

func (m *testMem) find(pd PD, key uint32, addr uint64, n uint32, need verbs.Access) ([]byte, *region) {
	for _, r := range m.regions {
		if r.key != key || r.pd != pd || r.dead || need&^r.access != 0 {
			continue
		}
		off := addr - r.base
		if off > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-off {
			return nil, nil
		}
		return r.buf[off:][:n:n], r
	}
	return nil, nil
}

func (m *testMem) Local(pd PD, key uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	if n == 0 {
		return nil, verbs.WCSuccess
	}
	if b, r := m.find(pd, key, addr, n, need); r != nil {
		return b, verbs.WCSuccess
	}
	return nil, verbs.LocProtErr
}

func (m *testMem) Remote(pd PD, _ verbs.QPN, key uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	if n == 0 {
		return nil, verbs.WCSuccess
	}
	if b, r := m.find(pd, key, addr, n, need); r != nil {
		return b, verbs.WCSuccess
	}
	return nil, verbs.RemAccessErr
}

func (m *testMem) Placed(pd PD, key uint32) {
	for _, r := range m.regions {
		if r.key == key && r.pd == pd && !r.dead {
			r.placed++
		}
	}
}

func (m *testMem) CompareSwap(pd PD, qpn verbs.QPN, key uint32, addr, compare, swap uint64) (uint64, verbs.WCStatus) {
	b, st := m.Remote(pd, qpn, key, addr, 8, verbs.RemoteAtomic)
	if st != verbs.WCSuccess {
		return 0, st
	}
	old := binary.NativeEndian.Uint64(b)
	if old == compare {
		binary.NativeEndian.PutUint64(b, swap)
	}
	return old, verbs.WCSuccess
}

func (m *testMem) FetchAdd(pd PD, qpn verbs.QPN, key uint32, addr, add uint64) (uint64, verbs.WCStatus) {
	b, st := m.Remote(pd, qpn, key, addr, 8, verbs.RemoteAtomic)
	if st != verbs.WCSuccess {
		return 0, st
	}
	old := binary.NativeEndian.Uint64(b)
	binary.NativeEndian.PutUint64(b, old+add)
	return old, verbs.WCSuccess
}

// Bind takes whatever names the window, and keeps what was asked.
func (m *testMem) Bind(_ PD, _ verbs.QPN, b *Bind) bool {
	m.binds = append(m.binds, *b)
	return b.RKey>>8 == windowKey>>8
}

func (m *testMem) Invalidate(pd PD, _ verbs.QPN, key uint32) bool {
	for _, r := range m.regions {
		if r.key == key && r.pd == pd && !r.dead {
			r.dead = true
			return true
		}
	}
	return false
}

// Keys and places of the regions that every node of a pair has.
const (
	sendKey, sendBase     = 0x100, 0x10000
	recvKey, recvBase     = 0x200, 0x4000000
	remoteKey, remoteBase = 0x300, 0x8000000
	windowKey, windowBase = 0x400, 0xc000000 // small, to be invalidated
	testPD                = PD(7)
	everything            = verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
)

// node is one end of a pair: an engine and its wire's side.
type node struct {
	name   string
	peer   *node
	q      *QP
	env    Env
	mem    *testMem
	cq     *CQ
	win    *Window
	shares []*QP // other queue pairs that use win
	send   *region
	recv   *region
	remote *region
	window *region
	// out are packets that left and were not delivered, encoded.
	out     [][]byte
	blocked bool
	events  EventSet // all that were raised
	wcs     []verbs.WC
	scratch Out
}

// pair is two engines with a network in between that the test plays.
type pair struct {
	t    testing.TB
	now  verbs.Instant
	a, b *node
	o    options
	// sent sees every packet as it leaves.
	sent func(from *node, p *roce.Packet)
}

// options of a pair; zero fields get the values in withDefaults.
type options struct {
	typ              verbs.QPType // RC
	qkeyA, qkeyB     uint32
	mtu              verbs.MTU
	psnA, psnB       verbs.PSN // A's and B's starting PSNs
	cap              verbs.QPCap
	cq               int
	timeout          verbs.AckTimeout
	neverTimeout     bool
	retry, rnrRetry  uint8
	rnrTimer         verbs.RNRTimer
	rdAtomic         uint8
	noRdAtomic       bool
	access           verbs.Access
	noAccess         bool
	window           WindowConfig
	memSize          int
	sigAll           bool
	stateA, stateB   verbs.QPState // RTS
	posBase          uint64
	armB             bool
	destDepth        uint8 // of B's responder, when it differs
	remoteAccess     verbs.Access
	noRemoteAccess   bool
	ownPDForRemote   bool
	separateRecvCQ   int
	startAtZeroClock bool
	srq, srqA        *SRQ // B's and A's
}

func (o options) withDefaults() options {
	def := func(v *verbs.MTU, d verbs.MTU) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.mtu, verbs.MTU1024)
	if o.typ == 0 {
		o.typ = verbs.RC
	}
	if o.cq == 0 {
		o.cq = 1024
	}
	if o.timeout == 0 && !o.neverTimeout {
		o.timeout = 14
	}
	if o.rdAtomic == 0 && !o.noRdAtomic {
		o.rdAtomic = 4
	}
	if o.access == 0 && !o.noAccess {
		o.access = verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
	}
	if o.remoteAccess == 0 && !o.noRemoteAccess {
		o.remoteAccess = everything
	}
	if o.memSize == 0 {
		o.memSize = 1 << 18
	}
	if o.stateA == 0 {
		o.stateA = verbs.QPRTS
	}
	if o.stateB == 0 {
		o.stateB = verbs.QPRTS
	}
	return o
}

func newPair(t testing.TB, o options) *pair {
	t.Helper()
	p := &pair{t: t, o: o.withDefaults(), now: 1e9}
	if o.startAtZeroClock {
		p.now = 0
	}
	p.a, p.b = p.newNode("a", 0x11), p.newNode("b", 0x22)
	p.a.peer, p.b.peer = p.b, p.a
	p.to(p.a, p.o.stateA)
	p.to(p.b, p.o.stateB)
	return p
}

func (p *pair) newNode(name string, num verbs.QPN) *node {
	n := &node{name: name, mem: &testMem{}}
	n.env.Mem, n.env.AHs = n.mem, testAHs{}
	n.cq = NewCQ(p.o.cq)
	recvCQ := n.cq
	n.send = n.mem.add(testPD, sendKey, sendBase, p.o.memSize, 0)
	n.recv = n.mem.add(testPD, recvKey, recvBase, p.o.memSize, verbs.LocalWrite)
	remotePD := testPD
	if p.o.ownPDForRemote {
		remotePD++
	}
	n.remote = n.mem.add(remotePD, remoteKey, remoteBase, p.o.memSize, p.o.remoteAccess)
	n.window = n.mem.add(testPD, windowKey, windowBase, 64, everything)
	c, err := resolveCap(p.o.cap)
	if err != nil {
		p.t.Fatal(err)
	}
	cfg := Config{
		Num: num, Type: p.o.typ, MTU: p.o.mtu, SQSigAll: p.o.sigAll, PD: testPD, SendCQ: n.cq, RecvCQ: recvCQ,
	}
	if cfg.SRQ = p.o.srqA; name == "b" {
		cfg.SRQ = p.o.srq
	}
	n.q = newAt(cfg, c, &n.env, p.o.posBase)
	n.win = NewWindow(p.o.window)
	n.q.SetWindow(n.win)
	return n
}

// psns returns n's own starting PSN and the one it expects.
func (p *pair) psns(n *node) (sq, rq verbs.PSN) {
	if n == p.a {
		return p.o.psnA, p.o.psnB
	}
	return p.o.psnB, p.o.psnA
}

// initAttr, rtrAttr and rtsAttr are the attributes of the usual three transitions.
func (p *pair) initAttr() *verbs.QPAttr {
	return &verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
		State: verbs.QPInit, Port: 1, AccessFlags: p.o.access,
	}
}

func (p *pair) rtrAttr(n *node) *verbs.QPAttr {
	_, rq := p.psns(n)
	depth := p.o.rdAtomic
	if n == p.b && p.o.destDepth != 0 {
		depth = p.o.destDepth
	}
	return &verbs.QPAttr{
		Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
			verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
		State: verbs.QPRTR, AV: verbs.AV{Remote: netip.MustParseAddrPort("127.0.0.2:4791")},
		PathMTU: p.o.mtu, DestQPN: n.peer.q.Num(), RQPSN: rq, MaxDestRdAtomic: depth, MinRNRTimer: p.o.rnrTimer,
	}
}

func (p *pair) rtsAttr(n *node) *verbs.QPAttr {
	sq, _ := p.psns(n)
	return &verbs.QPAttr{
		Mask: verbs.AttrState | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry |
			verbs.AttrMaxQPRdAtomic | verbs.AttrSQPSN,
		State: verbs.QPRTS, Timeout: p.o.timeout, RetryCnt: p.o.retry, RNRRetry: p.o.rnrRetry,
		MaxQPRdAtomic: p.o.rdAtomic, SQPSN: sq,
	}
}

// to moves n from RESET up to a state.
func (p *pair) to(n *node, s verbs.QPState) {
	p.t.Helper()
	steps := []struct {
		s verbs.QPState
		a *verbs.QPAttr
	}{{verbs.QPInit, p.initAttr()}, {verbs.QPRTR, p.rtrAttr(n)}, {verbs.QPRTS, p.rtsAttr(n)}}
	for _, step := range steps {
		if step.s > s {
			break
		}
		p.modify(n, step.a)
	}
	if s == verbs.QPRTR && n == p.b && p.o.armB {
		if err := n.q.ArmRTS(p.rtsAttr(n)); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *pair) modify(n *node, a *verbs.QPAttr) {
	p.t.Helper()
	a = p.forType(n, a)
	if err := n.q.Modify(p.now, a); err != nil {
		p.t.Fatalf("%s to %v: %v", n.name, a.State, err)
	}
	p.check(n)
}

// state moves n to a state that takes no attributes.
func (p *pair) state(n *node, s verbs.QPState) {
	p.t.Helper()
	p.modify(n, &verbs.QPAttr{Mask: verbs.AttrState, State: s})
}

func (p *pair) check(n *node) {
	p.t.Helper()
	if err := n.q.check(); err != nil {
		p.t.Fatalf("%s: %v", n.name, err)
	}
	charge, inbound := n.q.req.charge, int64(n.q.req.inbound)*n.win.readCost(n.q.mtu)
	for _, q := range n.shares {
		charge, inbound = charge+q.req.charge, inbound+int64(q.req.inbound)*n.win.readCost(q.mtu)
	}
	if got := n.win.used; got != charge {
		p.t.Fatalf("%s: the window holds %d bytes, its queue pairs %d", n.name, got, charge)
	}
	if got := n.win.inbound; got != inbound {
		p.t.Fatalf("%s: the window holds %d bytes of responses, its queue pairs %d", n.name, got, inbound)
	}
}

// pump does one wire's step for n: service, then everything that may leave.
func (p *pair) pump(n *node) {
	p.t.Helper()
	for i := 0; n.q.Service(p.now); i++ {
		if i == 1<<12 {
			p.t.Fatalf("%s: Service never ends", n.name)
		}
		p.check(n)
	}
	p.check(n)
	for i := 0; ; i++ {
		if i == 1<<16 {
			p.t.Fatalf("%s never stops sending", n.name)
		}
		next := n.q.NextPacket(p.now, &n.scratch)
		p.check(n)
		n.blocked = next == NextBlocked
		if next != NextPacket {
			break
		}
		n.out = append(n.out, p.encode(n, &n.scratch))
		n.q.Sent(p.now)
	}
	if n.q.State() == verbs.QPErr {
		for n.q.Service(p.now) {
		}
		p.check(n)
	}
	n.events |= n.q.TakeEvents()
	for _, c := range n.env.Dirty {
		c.Commit()
	}
	n.env.Dirty = n.env.Dirty[:0]
	var wc [16]verbs.WC
	for {
		k := n.cq.Poll(wc[:])
		n.wcs = append(n.wcs, wc[:k]...)
		if k == 0 {
			return
		}
	}
}

// encode makes wire bytes of a packet, as a wire would, with an ICRC of zeros.
func (p *pair) encode(n *node, out *Out) []byte {
	p.t.Helper()
	size := 0
	for _, g := range out.Gather[:out.N] {
		size += len(g)
		out.Packet.Payload = append(out.Packet.Payload, g...)
	}
	if size != out.Len {
		p.t.Fatalf("%s: pieces hold %d bytes, Len says %d", n.name, size, out.Len)
	}
	out.Packet.Pad = roce.PadCount(size)
	if p.sent != nil {
		p.sent(n, &out.Packet)
	}
	return append(out.Packet.Append(nil), 0, 0, 0, 0)
}

// next lets n send one packet, which must not be refused, and returns it encoded.
func (p *pair) next(n *node) []byte {
	p.t.Helper()
	if next := n.q.NextPacket(p.now, &n.scratch); next != NextPacket {
		p.t.Fatalf("%s: no packet: %v", n.name, next)
	}
	b := p.encode(n, &n.scratch)
	n.q.Sent(p.now)
	return b
}

// deliver hands encoded packets to n.
func (p *pair) deliver(n *node, packets ...[]byte) {
	p.t.Helper()
	var pkt roce.Packet
	for _, b := range packets {
		if err := pkt.Decode(b); err != nil {
			p.t.Fatalf("to %s: %v", n.name, err)
		}
		if p.o.typ == verbs.UD {
			n.q.HandleDatagram(p.now, &pkt, addrOf(n.peer), addrOf(n), 0)
		} else {
			n.q.HandlePacket(p.now, &pkt)
		}
		p.check(n)
	}
}

// take returns what n has sent and not yet delivered.
func (n *node) take() [][]byte {
	out := n.out
	n.out = nil
	return out
}

// run delivers everything both ways until nothing moves; time stands still.
func (p *pair) run() {
	p.t.Helper()
	for range 100000 {
		p.pump(p.a)
		p.pump(p.b)
		x, y := p.a.take(), p.b.take()
		if len(x)+len(y) == 0 {
			return
		}
		p.deliver(p.b, x...)
		p.deliver(p.a, y...)
	}
	p.t.Fatal("the pair never becomes quiet")
}

// advance lets d pass, firing timers when they are due and pumping after each; what leaves
// stays undelivered.
func (p *pair) advance(d time.Duration) {
	p.t.Helper()
	end := p.now.Add(d)
	for range 1000000 {
		at := min(p.a.q.Deadline(), p.b.q.Deadline())
		if at > end {
			p.now = end
			return
		}
		p.now = max(p.now, at)
		for _, n := range []*node{p.a, p.b} {
			if n.q.Deadline() <= p.now {
				n.q.HandleTimeout(p.now)
				p.check(n)
			}
			p.pump(n)
		}
	}
	p.t.Fatal("timers never stop firing")
}

// settle runs and lets time pass until neither side has a timer, at most limit.
func (p *pair) settle(limit time.Duration) {
	p.t.Helper()
	end := p.now.Add(limit)
	p.run()
	for p.now < end {
		at := min(p.a.q.Deadline(), p.b.q.Deadline())
		if at == verbs.Never {
			return
		}
		p.advance(max(at.Sub(p.now), 0))
		p.run()
	}
}

func (p *pair) post(n *node, wrs ...verbs.SendWR) {
	p.t.Helper()
	if k, _, err := n.q.PostSend(wrs); err != nil {
		p.t.Fatalf("%s: posted %d of %d: %v", n.name, k, len(wrs), err)
	}
}

func (p *pair) postRecv(n *node, id uint64, off, size int) {
	p.t.Helper()
	wr := verbs.RecvWR{WRID: id, SGList: []verbs.SGE{{Addr: recvBase + uint64(off), Length: uint32(size), LKey: recvKey}}}
	if _, _, err := n.q.PostRecv([]verbs.RecvWR{wr}); err != nil {
		p.t.Fatalf("%s: %v", n.name, err)
	}
}

// sendWR makes a signaled request over size bytes of n's send region at off.
func sendWR(op verbs.Opcode, id uint64, off, size int) verbs.SendWR {
	wr := verbs.SendWR{WRID: id, Opcode: op, Flags: verbs.Signaled, RKey: remoteKey, RemoteAddr: remoteBase}
	if op == verbs.RDMARead || op == verbs.AtomicCmpAndSwp || op == verbs.AtomicFetchAdd {
		wr.SGList = []verbs.SGE{{Addr: recvBase + uint64(off), Length: uint32(size), LKey: recvKey}}
	} else {
		wr.SGList = []verbs.SGE{{Addr: sendBase + uint64(off), Length: uint32(size), LKey: sendKey}}
	}
	return wr
}

// fill writes a pattern that differs between ids.
func fill(b []byte, id uint64) {
	for i := range b {
		b[i] = byte(uint64(i)*7 + uint64(i)>>8*3 + id*31 + 1)
	}
}

func matches(b []byte, id uint64) bool {
	for i := range b {
		if b[i] != byte(uint64(i)*7+uint64(i)>>8*3+id*31+1) {
			return false
		}
	}
	return true
}

// wantWCs compares the completions so far, as "id:STATUS" or "id:OPCODE", and forgets them.
func (p *pair) wantWCs(n *node, want ...string) {
	p.t.Helper()
	var got []string
	for _, wc := range n.wcs {
		s := wc.Opcode.String()
		if wc.Status != verbs.WCSuccess {
			s = wc.Status.String()
		}
		if wc.QPN != n.q.Num() {
			p.t.Errorf("%s: completion of QP %v", n.name, wc.QPN)
		}
		got = append(got, fmt.Sprintf("%d:%s", wc.WRID, s))
	}
	n.wcs = nil
	if fmt.Sprint(got) != fmt.Sprint(want) {
		p.t.Fatalf("%s: completions %v, want %v", n.name, got, want)
	}
}

// decoded returns the packets without consuming them.
func decoded(t testing.TB, raw [][]byte) (ps []roce.Packet) {
	t.Helper()
	for _, b := range raw {
		var p roce.Packet
		if err := p.Decode(b); err != nil {
			t.Fatal(err)
		}
		ps = append(ps, p)
	}
	return ps
}

func hostUint64(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

// roceRequest encodes the FETCH_ADD of wr at a's first PSN.
func roceRequest(p *pair, wr verbs.SendWR) []byte {
	pkt := roce.Packet{
		BTH:    roce.BTH{Opcode: roce.RCFetchAdd, PKey: roce.DefaultPKey, DestQP: p.b.q.Num(), AckReq: true, PSN: p.o.psnA},
		Atomic: roce.AtomicETH{VA: wr.RemoteAddr, RKey: wr.RKey, SwapAdd: wr.CompareAdd},
	}
	return pkt.Append(nil)
}
