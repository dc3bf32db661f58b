package wire

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// FuzzWire makes a schedule of its input: datagrams and trains, most of them with an honest ICRC,
// for queue pairs of each type in each state, for one that is gone, for QP1, for multicast and for
// nobody; posts, requests to connect, moves, time. Nothing panics, every step ends, nothing
// beside the region that the peers may reach is written, and what leaves is honest.
func FuzzWire(f *testing.F) {
	for op := range 0x82 {
		for to := range byte(4) {
			f.Add([]byte{0, 0, to, byte(op), 4, 0, 64, 0, 5, 0, to, byte(op), 12, 1, 0, 1, 5, 3, 1, 2, 9, 5})
		}
	}
	for attr := range byte(12) {
		f.Add([]byte{4, 1, attr, 0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 1, attr + 1, 0, 9, 9, 5, 6, 200, 5})
	}
	f.Add([]byte{0, 7, 5, 8, 5, 6, 255, 5, 0, 3, 4, 4, 0, 64, 0, 5, 4, 2, 200, 100, 0, 1, 5, 9, 1, 5})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 1000 {
			return
		}
		x := newWireFuzzer(t, in)
		for len(x.in) > 0 {
			x.step()
		}
		for _, q := range x.qps {
			x.w.DestroyQP(x.now, q)
		}
		x.rest()
		if len(x.w.conns) == 0 && len(x.w.peers) != 0 {
			t.Errorf("%d peers left without a queue pair", len(x.w.peers))
		}
	})
}

type wireFuzzer struct {
	t     *testing.T
	in    []byte
	now   verbs.Instant
	w     *Wire
	pipe  *pipe
	mrs   *mr.Table
	lane  *qp.CQ
	qps   []*QP // RC, UC, UD, and those that were accepted
	gone  verbs.QPN
	whole []byte // the region lies in its middle
	mr    *mr.Region
	req   *Conn
}

// fuzzGuard bytes on each side of the region keep this value.
const fuzzGuard, fuzzByte = 512, 0xA5

var fuzzPeer = netip.MustParseAddrPort("10.0.0.1:4791")

func newWireFuzzer(t *testing.T, in []byte) *wireFuzzer {
	rnd := rand.New(rand.NewPCG(1, 3))
	x := &wireFuzzer{
		t: t, in: in, now: 1e9, mrs: mr.New(rnd.Uint64), lane: qp.NewCQ(64),
		pipe: &pipe{addr: netip.MustParseAddrPort("10.0.0.2:4791"), maxSegs: 16}, whole: bytes.Repeat([]byte{fuzzByte}, 4096+2*fuzzGuard),
	}
	var err error
	if x.w, err = New(Config{Link: x.pipe, Mem: x.mrs, Upcalls: x, Rand: rnd.Uint32, GUID: 2, CM: cm.Config{Backlog: 4}}); err != nil {
		t.Fatal(err)
	}
	all := verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
	if x.mr, err = x.mrs.Register(1, x.whole[fuzzGuard:fuzzGuard+4096:fuzzGuard+4096], all); err != nil {
		t.Fatal(err)
	}
	if err := x.w.Listen(fuzzService); err != nil {
		t.Fatal(err)
	}
	state := verbs.QPState(x.byte() % verbs.QPStates)
	gone := x.newQP(verbs.RC, verbs.QPRTS)
	x.gone = gone.Num()
	x.w.DestroyQP(x.now, gone)
	x.qps = []*QP{x.newQP(verbs.RC, state), x.newQP(verbs.UC, state), x.newQP(verbs.UD, state)}
	return x
}

const fuzzService = roce.SID(0x0106_0000 | 7471)

func (x *wireFuzzer) byte() byte {
	if len(x.in) == 0 {
		return 0
	}
	c := x.in[0]
	x.in = x.in[1:]
	return c
}

func (x *wireFuzzer) newQP(typ verbs.QPType, state verbs.QPState) *QP {
	q, err := x.w.CreateQP(qp.Config{
		Type: typ, PD: 1, SendCQ: x.lane, RecvCQ: x.lane, Cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8},
	})
	if err != nil {
		x.t.Fatal(err)
	}
	for _, to := range []verbs.QPState{verbs.QPInit, verbs.QPRTR, verbs.QPRTS} {
		if state == verbs.QPReset || to > state && state < verbs.QPRTS {
			break
		}
		if err := x.move(q, to); err != nil {
			x.t.Fatal(err)
		}
	}
	if state > verbs.QPRTS {
		_ = x.move(q, state)
	}
	return q
}

// move makes a transition with the attributes that it needs.
func (x *wireFuzzer) move(q *QP, to verbs.QPState) error {
	a := verbs.QPAttr{
		Mask: verbs.AttrState, State: to, Port: 1, AccessFlags: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic, QKey: 7,
		AV: verbs.AV{Remote: fuzzPeer}, PathMTU: verbs.MTU256, DestQPN: 77, RQPSN: 100, SQPSN: 100, MaxDestRdAtomic: 2, MaxQPRdAtomic: 2,
		MinRNRTimer: 1, Timeout: 10, RetryCnt: 1, RNRRetry: 1,
	}
	from := q.State()
	typ := q.q.Type()
	switch {
	case to == verbs.QPInit && typ == verbs.UD:
		a.Mask |= verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey
	case to == verbs.QPInit:
		a.Mask |= verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags
	case to == verbs.QPRTR && typ != verbs.UD:
		a.Mask |= verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN
		if typ == verbs.RC {
			a.Mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer
		}
	case to == verbs.QPRTS && from == verbs.QPRTR:
		a.Mask |= verbs.AttrSQPSN
		if typ == verbs.RC {
			a.Mask |= verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic
		}
	}
	return x.w.Modify(x.now, q, &a)
}

// ConnRequest, ConnEvent, QPEvent and Completions implement Upcalls.
func (x *wireFuzzer) ConnRequest(c *Conn, _ *cm.Event)         { x.req = c }
func (x *wireFuzzer) ConnEvent(*Conn, verbs.EventType, []byte) {}
func (x *wireFuzzer) QPEvent(*QP, verbs.EventType)             {}
func (x *wireFuzzer) Completions(lane *qp.CQ, _ bool) {
	var wc [16]verbs.WC
	for lane.Poll(wc[:]) > 0 {
	}
}

func (x *wireFuzzer) step() {
	switch x.byte() % 10 {
	case 0, 1, 2:
		x.deliver(x.packet())
	case 3:
		x.post()
	case 4:
		x.deliver(x.mad())
	case 5:
		x.rest()
	case 6:
		x.now = x.now.Add(time.Duration(x.byte()) * time.Duration(x.byte()) * 100 * time.Microsecond)
	case 7:
		x.answer()
	case 8:
		c := x.byte()
		_ = x.move(x.qps[int(c>>4)%len(x.qps)], verbs.QPState(c%16)%verbs.QPStates)
	case 9: // what is no packet at all
		n := int(x.byte()) % 80
		b := make([]byte, n)
		for i := range b {
			b[i] = x.byte()
		}
		x.deliver(b)
	}
}

// rest steps until there is nothing to do at this moment.
func (x *wireFuzzer) rest() {
	x.t.Helper()
	for range 10_000 {
		if len(x.pipe.inbox) == 0 && !x.w.Pending() && x.w.NextDeadline() > x.now {
			x.check()
			return
		}
		x.w.Step(x.now)
	}
	x.t.Fatal("the wire never comes to rest")
}

func (x *wireFuzzer) check() {
	x.t.Helper()
	for i, c := range x.whole {
		if (i < fuzzGuard || i >= fuzzGuard+4096) && c != fuzzByte {
			x.t.Fatalf("byte %d beside the region was written", i-fuzzGuard)
		}
	}
	for _, m := range x.pipe.sent {
		seg := m.SegSize
		if seg == 0 {
			seg = len(m.Buf)
		}
		var p roce.Packet
		for id, b := 0, m.Buf; len(b) > 0; id++ {
			n := min(seg, len(b))
			path := roce.NewPath(m.Src, netip.AddrPortFrom(m.Dst, roce.Port))
			if err := p.Decode(b[:n]); err != nil || m.Dst == fuzzPeer.Addr() && !path.Check(b[:n], uint16(id)) {
				x.t.Fatalf("a packet that is not honest left: %x: %v", b[:n], err)
			}
			b = b[n:]
		}
	}
	x.pipe.sent = x.pipe.sent[:0]
}

// deliver puts a datagram into the inbox; the next bytes spoil it, or make a train of it.
func (x *wireFuzzer) deliver(b []byte) {
	rx := link.Rx{Buf: b, Src: fuzzPeer, Dst: x.pipe.addr.Addr()}
	how := x.byte()
	path := roce.NewPath(fuzzPeer, x.pipe.addr)
	sign := func() {
		if n := len(rx.Buf) - roce.ICRCLen; n >= roce.BTHLen {
			roce.PutICRC(rx.Buf[n:], path.ICRC(rx.Buf[:n], 0))
		}
	}
	switch how & 7 {
	case 1:
		if len(b) > 1 {
			b[1] ^= how & 0x30 // the pad count
		}
	case 2:
		rx.Buf = b[:len(b)*int(how>>3)/32]
	case 3:
		rx.Buf = append(b, make([]byte, how>>3)...)
	case 4:
		rx.Src = netip.MustParseAddrPort([]string{"10.0.0.1:9", "10.0.0.3:4791", "[fd00::1]:4791"}[how>>3%3])
		path = roce.NewPath(netip.AddrPortFrom(fuzzPeer.Addr(), rx.Src.Port()), x.pipe.addr)
	case 5:
		rx.Truncated = true
	}
	sign()
	switch {
	case how&7 == 6 && len(b) > 0:
		b[int(how>>3)%len(b)] ^= 1
	case how&7 == 7 && len(b) > 0:
		rx.SegSize = len(b)
		for range how >> 5 {
			rx.Buf = append(rx.Buf, b...)
		}
		rx.Buf = rx.Buf[:max(len(rx.Buf)-int(how>>3&3), 0)]
	}
	x.pipe.inbox = append(x.pipe.inbox, rx)
}

// packet makes a packet for one of those who may get some.
func (x *wireFuzzer) packet() []byte {
	to, op, near := x.byte(), x.byte(), x.byte()
	size := int(x.byte())<<8 | int(x.byte())
	flags := x.byte()
	dest := verbs.QPN(to)
	switch i := int(to) % 8; {
	case i < 3:
		dest = x.qps[i].Num()
	case i == 3:
		dest = x.gone
	case i == 4:
		dest = verbs.QPNMulticast
	case i == 5:
		dest = x.qps[len(x.qps)-1].Num()
	}
	size %= 1100
	p := roce.Packet{
		BTH: roce.BTH{
			Opcode: roce.Opcode(op), PKey: roce.DefaultPKey, DestQP: dest, AckReq: flags&1 != 0, Solicited: flags&2 != 0,
			PSN: verbs.PSN(100).Add(int(int8(near)) / 8),
		},
		RETH: roce.RETH{VA: x.mr.Addr() + uint64(flags>>2)*160, RKey: x.mr.Key(), DMALen: uint32(size)},
		DETH: roce.DETH{QKey: 7 + uint32(flags>>7), SrcQP: 9}, Imm: uint32(near), InvRKey: x.mr.Key(),
		AETH: roce.AETH{Syndrome: near, MSN: uint32(flags)},
	}
	if flags&0xc0 == 0xc0 {
		p.RETH.DMALen = uint32(x.byte())<<24 | uint32(x.byte())
		p.RETH.VA ^= uint64(x.byte()) << 56
	}
	p.Atomic = roce.AtomicETH{VA: p.RETH.VA, RKey: p.RETH.RKey, SwapAdd: 1}
	if !p.Opcode.Valid() {
		p.Opcode = roce.RCWriteOnly // a shape to begin with
	}
	if p.Opcode.HasPayload() {
		p.Payload = bytes.Repeat([]byte{0x5a}, size)
		p.Pad = roce.PadCount(size)
	}
	b := append(p.Append(nil), 0, 0, 0, 0)
	b[0] = op
	return b
}

// mad makes a datagram for QP1 around a message of the connection manager.
func (x *wireFuzzer) mad() []byte {
	var m [roce.MADLen]byte
	attr := roce.AttrREQ + roce.AttrID(x.byte()%16)
	h := roce.NewCMMAD(attr, uint64(x.byte()))
	h.PutHeader(m[:])
	body := m[roce.MADHeaderLen:]
	if attr == roce.AttrREQ {
		req := roce.REQ{
			LocalCommID: 5, ServiceID: fuzzService, LocalCAGUID: 9, LocalQPN: 77, ResponderResources: 2, InitiatorDepth: 2,
			StartingPSN: 100, PathMTU: verbs.MTU256, PKey: roce.DefaultPKey,
			Primary: roce.CMPath{LocalGID: roce.GIDFromAddr(fuzzPeer.Addr()), RemoteGID: roce.GIDFromAddr(x.pipe.addr.Addr())},
		}
		var private [roce.REQPrivateLen]byte
		ip := roce.IPCMHeader{Src: fuzzPeer.Addr(), Dst: x.pipe.addr.Addr(), SrcPort: 1}
		ip.Put(private[:])
		req.PrivateData = private[:]
		req.Put(body)
	}
	for _, c := range x.w.conns { // so that some messages name a connection
		body[4], body[5], body[6], body[7] = byte(c.id>>24), byte(c.id>>16), byte(c.id>>8), byte(c.id)
		break
	}
	for n := x.byte() % 8; n > 0; n-- {
		body[x.byte()%128] ^= x.byte()
	}
	p := roce.Packet{
		BTH:  roce.BTH{Opcode: roce.UDSendOnly, PKey: roce.DefaultPKey, DestQP: verbs.QPNGSI},
		DETH: roce.DETH{QKey: roce.GSIQKey, SrcQP: verbs.QPNGSI}, Payload: m[:],
	}
	return append(p.Append(nil), 0, 0, 0, 0)
}

func (x *wireFuzzer) post() {
	c, size := x.byte(), uint32(x.byte())*8
	q := x.qps[int(c>>4)%len(x.qps)]
	sge := []verbs.SGE{{Addr: x.mr.Addr(), Length: size, LKey: x.mr.Key() ^ uint32(c>>3&1)}}
	if c&1 == 0 {
		_, _, _ = q.q.PostRecv([]verbs.RecvWR{{SGList: sge}})
		return
	}
	op := verbs.Opcode(c >> 1 % 10)
	if op == verbs.AtomicCmpAndSwp || op == verbs.AtomicFetchAdd {
		sge[0].Length = 8
	}
	if _, ring, _ := q.q.PostSend([]verbs.SendWR{{
		Opcode: op, Flags: verbs.Signaled, SGList: sge, RemoteAddr: x.mr.Addr(), RKey: x.mr.Key(), RemoteQPN: 9, AH: verbs.AH(c),
	}}); ring {
		x.w.Ring(q)
	}
}

// answer accepts a request to connect, or rejects it, or hangs up.
func (x *wireFuzzer) answer() {
	c, how := x.req, x.byte()
	if c == nil {
		return
	}
	switch how & 3 {
	case 0:
		_ = x.w.Reject(x.now, c, verbs.RejectConsumer, nil)
	case 1:
		x.w.Hangup(x.now, c)
	default:
		q := x.newQP(c.Type(), verbs.QPInit)
		p := ConnParam{MTU: verbs.MTU256, RetryCnt: 1, RNRRetry: 1, Timeout: 10, MinRNRTimer: 1, ResponderResources: 2, InitiatorDepth: 2}
		if x.w.Accept(x.now, c, q, p) != nil {
			x.w.DestroyQP(x.now, q)
			return
		}
		x.qps = append(x.qps, q)
	}
}
