package netsim

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// replay lets one of our wires be a host of a capture. The packets of the other host are fed
// to it as they were captured, byte for byte with their ICRC, at their times; the programs of
// the host are played from the capture too: what they posted and when, when they had a
// receive posted and when not. What the wire sends is compared with what Linux sent.
//
// For that the wire's queue pairs have the capture's numbers (see numbered) and its memory
// the capture's R_Keys and addresses (see keys).
type replay struct {
	t    testing.TB
	us   netip.Addr
	wire *wire.Wire
	mem  *keys
	now  verbs.Instant
	qps  []*side
	// together: packets that Linux answered together arrive together.
	together bool
	// lost are frames that never got to us.
	lost map[*frame]bool

	// lossless captures: whatever we send arrives.
	lossless bool
	// truncated captures lack packets of the peer.
	truncated bool
	// silent: where Linux has one answer, we have none.
	silent bool

	// cm opens and closes the connections; nil when that was done before.
	cm    *conversation
	draws []uint32 // what the wire's random numbers are next

	inbox         []*frame
	fed, invented int
}

// side is an endpoint that our wire plays.
type side struct {
	*endpoint
	q    *wire.QP
	lane *qp.CQ
	did  []*sent
	// told are Linux's answers where the capture does not show all of them.
	told []*frame
	// covered are the PSNs that our requests asked something for, and how often each
	// was sent.
	covered map[verbs.PSN]int
	// fedRNR is what covered was of a PSN when an RNR NAK of it was fed last.
	fedRNR map[verbs.PSN]int
	// restUntil is when the last RNR NAK allows requests again.
	restUntil verbs.Instant
	lastDone  verbs.Instant // when the last send completed

	regions  []*mr.Region // of sends
	buffers  []*mr.Region // of recvs
	status   []verbs.WC   // of sends, in order
	received []verbs.WC
	posted   int
	ready    int // receives posted
	ah       verbs.AH
	expected verbs.PSN // of the peer's requests
}

// sent is a packet of ours.
type sent struct {
	at verbs.Instant
	p  roce.Packet
	// done is the first PSN that we were not given yet when it left.
	done verbs.PSN
}

// keys is the memory of a replay: regions that a peer knows by the capture's R_Key and
// address. Everything else is the device's own table.
type keys struct {
	*mr.Table
	byRKey map[uint32]*shared
}

// shared is a region that the peer uses, and shadow what it must hold: what was there at
// first, what the peer's WRITEs and atomics made of it, and what the program on our side must
// have written, because a READ found it there.
type shared struct {
	*mr.Region
	va     uint64 // of the first byte
	end    uint64
	shadow []byte
	pokes  int
}

func (k *keys) translate(rkey uint32, va uint64) (uint32, uint64) {
	if s := k.byRKey[rkey]; s != nil {
		return s.Key(), va - s.va + s.Addr()
	}
	return rkey, va
}

func (k *keys) Remote(pd qp.PD, qpn verbs.QPN, rkey uint32, va uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	rkey, va = k.translate(rkey, va)
	return k.Table.Remote(pd, qpn, rkey, va, n, need)
}

func (k *keys) Placed(pd qp.PD, rkey uint32) {
	rkey, _ = k.translate(rkey, 0)
	k.Table.Placed(pd, rkey)
}

func (k *keys) CompareSwap(pd qp.PD, qpn verbs.QPN, rkey uint32, va, compare, swap uint64) (uint64, verbs.WCStatus) {
	rkey, va = k.translate(rkey, va)
	return k.Table.CompareSwap(pd, qpn, rkey, va, compare, swap)
}

func (k *keys) FetchAdd(pd qp.PD, qpn verbs.QPN, rkey uint32, va, add uint64) (uint64, verbs.WCStatus) {
	rkey, va = k.translate(rkey, va)
	return k.Table.FetchAdd(pd, qpn, rkey, va, add)
}

// scripted is the link of a replay.
type scripted struct{ *replay }

// Recv delivers what has arrived; packets that arrive together in trains, as a kernel does
// that coalesces what it receives (GRO).
func (l scripted) Recv(msgs []link.Rx) (n int, _ error) {
	for ; n < len(msgs) && len(l.inbox) > 0; n++ {
		f := l.inbox[0]
		m := link.Rx{Buf: bytes.Clone(f.raw), Src: f.src, Dst: f.dst.Addr()}
		l.inbox = l.inbox[1:]
		for last := len(f.raw); l.together && len(l.inbox) > 0 && last == len(f.raw); l.inbox = l.inbox[1:] {
			next := l.inbox[0]
			if next.src != f.src || next.dst != f.dst || len(next.raw) > len(f.raw) {
				break
			}
			m.Buf, m.SegSize = append(m.Buf, next.raw...), len(f.raw)
			last = len(next.raw)
		}
		msgs[n] = m
	}
	return n, nil
}

func (l scripted) Send(msgs []link.Tx) (int, error) {
	for i := range msgs {
		m := &msgs[i]
		flat := slices.Concat(m.Gather...)
		seg := m.SegSize
		if seg == 0 {
			seg = len(flat)
		}
		path := roce.NewPath(netip.AddrPortFrom(m.Src, roce.Port), m.Dst)
		for id := uint16(0); len(flat) > 0; id++ {
			k := min(seg, len(flat))
			l.took(m, &path, id, flat[:k:k])
			flat = flat[k:]
		}
	}
	return len(msgs), nil
}

func (scripted) Caps() link.Caps {
	return link.Caps{MaxSegs: 16, MaxBytes: 65000, ControlsID: true}
}

func (l scripted) LocalAddr() netip.AddrPort { return netip.AddrPortFrom(l.us, roce.Port) }

// took files a packet of ours under the queue pair that sent it.
func (r *replay) took(m *link.Tx, path *roce.Path, id uint16, b []byte) {
	s := &sent{at: r.now}
	if err := s.p.Decode(b); err != nil {
		r.t.Errorf("we send %x: %v", b, err)
		return
	}
	if pad := b[len(b)-roce.ICRCLen-int(s.p.Pad) : len(b)-roce.ICRCLen]; !bytes.Equal(pad, make([]byte, len(pad))) {
		r.t.Errorf("our %v is padded with %x", &s.p, pad)
	}
	if !path.Check(b, id) {
		r.t.Errorf("our %v has a wrong ICRC", &s.p)
	}
	if s.p.PKey != roce.DefaultPKey || s.p.Pad != roce.PadCount(len(s.p.Payload)) || !s.p.MigReq {
		r.t.Errorf("our %v: P_Key %#x, pad %d, M %v", &s.p, s.p.PKey, s.p.Pad, s.p.MigReq)
	}
	if isCM(&frame{p: s.p}) && r.cm != nil {
		s.p.Payload = bytes.Clone(s.p.Payload)
		r.cm.heard(s)
		return
	}
	var from *side
	for _, q := range r.qps {
		ud := s.p.Opcode.HasDETH()
		if ud && q.num == s.p.DETH.SrcQP || !ud && q.typ != verbs.UD && q.peer == s.p.DestQP && q.peerHost == m.Dst.Addr() {
			from = q
		}
	}
	if from == nil || m.Src != r.us || m.Dst != netip.AddrPortFrom(from.peerHost, roce.Port) {
		r.t.Errorf("we send %v from %v to %v", &s.p, m.Src, m.Dst)
		return
	}
	s.done = from.expected
	from.did = append(from.did, s)
	if s.p.Opcode.IsRequest() {
		if s.at < from.restUntil {
			r.t.Errorf("at %v we send %v, %v before the RNR timer ends", time.Duration(s.at), &s.p, from.restUntil.Sub(s.at))
		}
		n := 1
		if s.p.Opcode == roce.RCReadRequest {
			mtu := from.mtu.Bytes()
			n = max(1, (int(s.p.RETH.DMALen)+mtu-1)/mtu)
		}
		for i := range n {
			from.covered[s.p.PSN.Add(i)]++
		}
	}
}

// Upcalls of the wire: completions are polled, connections are not there.
func (r *replay) ConnRequest(*wire.Conn, *cm.Event)             {}
func (r *replay) ConnEvent(*wire.Conn, verbs.EventType, []byte) {}
func (r *replay) QPEvent(*wire.QP, verbs.EventType)             {}
func (r *replay) Completions(*qp.CQ, bool)                      {}

func (r *replay) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *replay) region(n int) *mr.Region {
	m, err := r.mem.Register(PD, make([]byte, n), verbs.LocalWrite|verbs.RemoteWrite|verbs.RemoteRead|verbs.RemoteAtomic)
	r.must(err)
	return m
}

// newReplay makes a wire with the queue pairs that a host has in a capture.
func newReplay(t testing.TB, us netip.Addr, all []*endpoint, extra map[uint32][2]uint64, managed bool) *replay {
	rnd := rand.New(rand.NewPCG(0xC0FFEE, 1))
	r := &replay{t: t, us: us, lost: map[*frame]bool{}}
	r.mem = &keys{Table: mr.New(rnd.Uint64), byRKey: map[uint32]*shared{}}
	wanted := map[verbs.QPN]*side{}
	lowest := verbs.QPNMask
	for _, e := range all {
		if e.host != us {
			continue
		}
		s := &side{endpoint: e, covered: map[verbs.PSN]int{}, fedRNR: map[verbs.PSN]int{}, lane: qp.NewCQ(512), expected: e.recvPSN}
		wanted[e.num] = s
		lowest = min(lowest, e.num)
		r.qps = append(r.qps, s)
	}
	// The first number that the wire draws is where its queue pairs' numbers begin.
	r.draws = []uint32{uint32(lowest)}
	var up wire.Upcalls = r
	if managed {
		r.cm = &conversation{
			replay: r, tids: map[uint64]uint64{}, requests: map[uint32]*wire.Conn{},
			conns: map[verbs.QPN]*wire.Conn{}, events: map[*wire.Conn][]verbs.EventType{},
		}
		up = r.cm
	}
	w, err := wire.New(wire.Config{
		Link: scripted{r}, Mem: r.mem, Upcalls: up, GUID: 1,
		Rand: func() uint32 {
			if len(r.draws) > 0 {
				n := r.draws[0]
				r.draws = r.draws[1:]
				return n
			}
			return rnd.Uint32()
		},
	})
	r.must(err)
	r.wire = w
	r.numbered(wanted, lowest)
	r.share(extra)
	for _, s := range r.qps {
		r.open(s)
	}
	return r
}

// numbered makes the queue pairs with the capture's numbers. A wire draws where its numbers
// begin, and gives a number out again, with three bits of it counted on, after more than 64
// others had their turn; so some hundred queue pairs come and go until the three bits are
// zero, as they are in rxe's small numbers.
func (r *replay) numbered(wanted map[verbs.QPN]*side, lowest verbs.QPN) {
	create := func(cfg qp.Config) *wire.QP {
		q, err := r.wire.CreateQP(cfg)
		r.must(err)
		return q
	}
	dummy := qp.Config{Type: verbs.UC, Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1}, PD: PD, SendCQ: qp.NewCQ(1), RecvCQ: qp.NewCQ(1)}
	turn := 65 + len(wanted)
	var first []*wire.QP
	for range turn {
		first = append(first, create(dummy))
	}
	for _, q := range first {
		r.wire.DestroyQP(r.now, q)
	}
	for range 6 * turn {
		r.wire.DestroyQP(r.now, create(dummy))
	}
	for n := lowest; len(wanted) > 0; n++ {
		cfg := dummy
		s := wanted[n]
		if s != nil {
			cfg.Type, cfg.Cap, cfg.SendCQ, cfg.RecvCQ = s.typ, verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64}, s.lane, s.lane
			cfg.MTU = s.mtu
		}
		q := create(cfg)
		if q.Num() != n {
			r.t.Fatalf("the wire numbers a queue pair %v, not %v", q.Num(), n)
		}
		if s == nil {
			r.wire.DestroyQP(r.now, q)
			continue
		}
		s.q = q
		delete(wanted, n)
	}
}

// share makes the regions that the peer's requests name, as far as Linux did not refuse them,
// and those of extra, which are known otherwise: address and length by R_Key.
func (r *replay) share(extra map[uint32][2]uint64) {
	extent := map[uint32][2]uint64{}
	for k, x := range extra {
		extent[k] = [2]uint64{x[0], x[0] + x[1]}
	}
	for _, s := range r.qps {
		for _, m := range s.recvs {
			if m.length == 0 || !isRemote(m.op) || s.refused(m) != 0 {
				continue
			}
			x, ok := extent[m.rkey]
			if !ok {
				x = [2]uint64{m.va &^ 4095, 0}
			}
			extent[m.rkey] = [2]uint64{min(x[0], m.va&^4095), max(x[1], m.va+uint64(m.length))}
		}
	}
	for k, x := range extent {
		n := int(x[1] - x[0])
		r.mem.byRKey[k] = &shared{Region: r.region(n), va: x[0], end: x[1], shadow: make([]byte, n)}
	}
}

func isRemote(op verbs.Opcode) bool {
	switch op {
	case verbs.Send, verbs.SendWithImm, verbs.SendWithInv:
		return false
	}
	return true
}

// refused returns the syndrome of the NAK with which this end of the capture refused a
// message of its peer for good, 0 for none.
func (e *endpoint) refused(m *message) uint8 {
	for _, f := range e.out {
		if y := f.p.AETH.Syndrome; f.p.Opcode == roce.RCAck && y > roce.NakPSNSeq && m.holds(f.p.PSN) {
			return y
		}
	}
	return 0
}

// open takes a queue pair to RTS with the attributes of the capture, or to INIT when it is to
// be connected.
func (r *replay) open(s *side) {
	modify := func(a verbs.QPAttr) {
		r.must(r.wire.Modify(r.now, s.q, &a))
	}
	av := verbs.AV{Remote: netip.AddrPortFrom(s.peerHost, roce.Port), Local: r.us}
	a := verbs.QPAttr{
		Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort, State: verbs.QPInit, Port: 1,
		AccessFlags: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic, QKey: s.qkey,
		AV: av, PathMTU: s.mtu, DestQPN: s.peer, RQPSN: s.recvPSN, MaxDestRdAtomic: 16, MinRNRTimer: s.minRNR,
		SQPSN: s.sendPSN, Timeout: s.timeout, RetryCnt: s.retry, RNRRetry: s.rnr, MaxQPRdAtomic: 16,
	}
	init, rtr, rts := a, a, a
	rtr.State, rts.State = verbs.QPRTR, verbs.QPRTS
	rtr.Mask, rts.Mask = verbs.AttrState, verbs.AttrState|verbs.AttrSQPSN
	switch s.typ {
	case verbs.RC:
		rtr.Mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer
		rts.Mask |= verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic
		fallthrough
	case verbs.UC:
		init.Mask |= verbs.AttrAccessFlags
		rtr.Mask |= verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN
	case verbs.UD:
		init.Mask |= verbs.AttrQKey
		var err error
		s.ah, err = r.wire.CreateAH(PD, av, s.mtu)
		r.must(err)
	}
	modify(init)
	if r.cm != nil {
		return
	}
	modify(rtr)
	modify(rts)
}

// settle steps the wire until it has nothing to do at this moment.
func (r *replay) settle() {
	for rounds := 0; len(r.inbox) > 0 || r.wire.Pending() || r.wire.NextDeadline() <= r.now; rounds++ {
		if rounds > 100_000 {
			r.t.Fatal("the wire never comes to rest")
		}
		r.wire.Step(r.now)
	}
	for _, s := range r.qps {
		var wc [16]verbs.WC
		for n := s.lane.Poll(wc[:]); n > 0; n = s.lane.Poll(wc[:]) {
			for _, c := range wc[:n] {
				// Receives' IDs are odd.
				if c.WRID%2 == 1 {
					s.received = append(s.received, c)
				} else {
					s.status, s.lastDone = append(s.status, c), r.now
				}
			}
		}
	}
}

// until lets time pass up to at, or until done reports true.
func (r *replay) until(at verbs.Instant, done func() bool) bool {
	for {
		r.settle()
		if done != nil && done() {
			return true
		}
		next := r.wire.NextDeadline()
		if next > at {
			r.now = max(r.now, at)
			return done == nil
		}
		r.now = max(r.now, next)
	}
}

// post posts the next send of a side.
func (r *replay) post(s *side) {
	m := s.sends[s.posted]
	reg := r.region(max(int(m.length), len(m.data), 8))
	copy(reg.Bytes(), m.data)
	s.regions = append(s.regions, reg)
	wr := verbs.SendWR{
		WRID: uint64(2 * s.posted), Opcode: m.op, Flags: verbs.Signaled, ImmData: m.imm, InvalidateRKey: m.inv,
		RemoteAddr: m.va, RKey: m.rkey, AH: s.ah,
	}
	if m.length > 0 {
		wr.SGList = []verbs.SGE{{Addr: reg.Addr(), Length: m.length, LKey: reg.Key()}}
	}
	if m.solicited {
		wr.Flags |= verbs.Solicited
	}
	switch m.op {
	case verbs.AtomicCmpAndSwp:
		wr.CompareAdd, wr.Swap = m.atomic.Compare, m.atomic.SwapAdd
	case verbs.AtomicFetchAdd:
		wr.CompareAdd = m.atomic.SwapAdd
	}
	if s.typ == verbs.UD {
		wr.RemoteQPN, wr.RemoteQKey = m.first.p.DestQP, m.first.p.DETH.QKey
	}
	_, ring, err := s.q.Engine().PostSend([]verbs.SendWR{wr})
	r.must(err)
	if ring {
		r.wire.Ring(s.q)
	}
	s.posted++
}

// receive posts the receive that the next message needs, as large as what Linux had.
func (r *replay) receive(s *side, size int) {
	reg := r.region(max(size, 1))
	s.buffers = append(s.buffers, reg)
	wr := verbs.RecvWR{WRID: uint64(2*s.ready + 1)}
	if size > 0 {
		wr.SGList = []verbs.SGE{{Addr: reg.Addr(), Length: uint32(size), LKey: reg.Key()}}
	}
	_, ring, err := s.q.Engine().PostRecv([]verbs.RecvWR{wr})
	r.must(err)
	if ring {
		r.wire.Ring(s.q)
	}
	s.ready++
}

// sideOf returns the side to which a frame goes or, when it is one of ours, from which it came.
func (r *replay) sideOf(f *frame) *side {
	for _, s := range r.qps {
		if slices.Contains(s.in, f) || slices.Contains(s.out, f) {
			return s
		}
	}
	return nil
}
