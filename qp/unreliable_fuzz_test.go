package qp

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// FuzzUnreliable does for UC and UD what FuzzHandlePacket does for RC: a schedule of packets,
// posts and moves. Nothing panics, the invariants hold, memory that nothing gives away does
// not change, nothing but requests leaves and none of them asks for an answer, and a
// receive never completes with more than it holds.
func FuzzUnreliable(f *testing.F) {
	for op := range byte(12) {
		f.Add([]byte{3, 0, 2, 200, 0, op, 0, 1, 0, 1, 9, 0, op ^ 2, 8, 1, 0, 0, 9})
		f.Add([]byte{2, 1, 2, 200, 0, op, 8, 0, 64, 3, 9, 1, 2, 3, 9})
	}
	f.Add([]byte{3, 0, 1, 0xc2, 20, 9, 13, 3, 1, 2, 3, 9})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 2000 {
			return
		}
		x := newUnreliableFuzzer(t, &fuzzBytes{in})
		for len(x.in.b) > 0 {
			x.step()
		}
		if x.q.State() != verbs.QPReset {
			x.p.state(x.n, verbs.QPErr)
			x.pump()
			if x.q.sq.InUse() != 0 || x.q.rq.InUse() != 0 {
				t.Fatalf("%d sends and %d receives left in ERR", x.q.sq.InUse(), x.q.rq.InUse())
			}
		}
		x.guards()
	})
}

type unreliableFuzzer struct{ fuzzer }

func newUnreliableFuzzer(t testing.TB, in *fuzzBytes) *unreliableFuzzer {
	state := verbs.QPState(in.byte() % verbs.QPStates)
	cfg := in.byte()
	o := options{
		typ: verbs.UC, mtu: verbs.MTU256, cq: 32, memSize: 8192, psnA: 0xfffffe, psnB: 0xfffffd,
		cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 4}, noAccess: cfg>>5 == 1, qkeyA: 0x11111111,
	}
	if cfg&1 != 0 {
		o.typ = verbs.UD
	}
	o.stateA = verbs.QPRTS
	if state == verbs.QPInit || state == verbs.QPRTR {
		o.stateA = state
	}
	p := newPair(t, o)
	x := &unreliableFuzzer{fuzzer{t: t, in: in, p: p, n: p.a, q: p.a.q}}
	whole := bytes.Repeat([]byte{0xa5}, 8192+2*512)
	p.a.remote.buf = whole[512 : 512+8192 : 512+8192]
	x.guarded = whole
	for i := range p.a.send.buf {
		p.a.send.buf[i] = byte(i)
	}
	x.before = bytes.Clone(p.a.send.buf)
	p.sent = func(_ *node, pkt *roce.Packet) {
		if pkt.AckReq || !fits(pkt.Opcode, o.typ) {
			t.Fatalf("%v sent %v, AckReq %v", o.typ, pkt.Opcode, pkt.AckReq)
		}
	}
	switch {
	case state == verbs.QPRTR && cfg&2 != 0 && o.typ == verbs.UC:
		if err := p.a.q.ArmRTS(&verbs.QPAttr{Mask: verbs.AttrSQPSN, SQPSN: 7}); err != nil {
			t.Fatal(err)
		}
	case state == verbs.QPReset, state == verbs.QPErr, state == verbs.QPSQD:
		p.state(p.a, state)
	}
	return x
}

func fits(op roce.Opcode, t verbs.QPType) bool {
	return op.Transport() == roce.TransportUC && t == verbs.UC || op.Transport() == roce.TransportUD && t == verbs.UD
}

func (x *unreliableFuzzer) step() {
	in := x.in
	switch c := in.byte(); c % 16 {
	case 0, 3, 4, 5, 6, 7, 8:
		x.packet()
	case 1, 11:
		x.post()
	case 2:
		wr := verbs.RecvWR{WRID: uint64(in.byte()) * 8, SGList: []verbs.SGE{{Addr: recvBase, LKey: recvKey}}}
		wr.SGList[0].Length = uint32(wr.WRID)
		if c&0x80 != 0 {
			wr.SGList[0].LKey++
		}
		_, _, _ = x.q.PostRecv([]verbs.RecvWR{wr})
	case 9, 10:
		x.pump()
	case 12:
		x.p.now = max(x.p.now, min(x.q.Deadline(), x.p.now+1))
		x.q.HandleTimeout(x.p.now)
	case 13:
		x.modify(in.byte())
	case 14:
		x.q.Service(x.p.now)
		x.q.NextPacket(x.p.now, &x.n.scratch)
	case 15:
		if in.byte() == 7 {
			x.n.remote.dead = true
		}
	}
	if err := x.q.check(); err != nil {
		x.t.Fatal(err)
	}
	x.guards()
	for _, wc := range x.n.wcs {
		if wc.Status == verbs.WCSuccess && wc.Opcode == verbs.WCRecv && uint64(wc.ByteLen) > wc.WRID {
			x.t.Fatalf("%d bytes in a receive of %d", wc.ByteLen, wc.WRID)
		}
	}
	x.n.wcs = nil
}

func (x *unreliableFuzzer) modify(c byte) {
	to := verbs.QPState(c % verbs.QPStates)
	a := &verbs.QPAttr{Mask: verbs.AttrState, State: to}
	switch {
	case to == verbs.QPInit:
		a = x.p.initAttr()
	case to == verbs.QPRTR:
		a = x.p.rtrAttr(x.n)
	case to == verbs.QPRTS && x.q.State() == verbs.QPRTR:
		a = x.p.rtsAttr(x.n)
	}
	_ = x.q.Modify(x.p.now, x.p.forType(x.n, a))
}

func (x *unreliableFuzzer) post() {
	in := x.in
	c := in.byte()
	wr := datagram(x.p.b, verbs.Opcode(c%10), uint64(c), int(in.byte())*12)
	if wr.Opcode == verbs.BindMW {
		wr.SGList = nil
	}
	if c&0x10 != 0 {
		wr.Flags ^= verbs.Signaled
	}
	if c&0x20 != 0 {
		wr.AH = verbs.AH(c) * 5
	}
	if c&0xc0 == 0xc0 && len(wr.SGList) > 0 {
		wr.SGList[0].LKey++
	}
	_, _, _ = x.q.PostSend([]verbs.SendWR{wr})
}

// packet gives the queue pair a packet of its transport, with valid headers.
func (x *unreliableFuzzer) packet() {
	in := x.in
	var p roce.Packet
	op := in.byte() % 12
	near := in.byte()
	p.PSN = psnOf(x.q.resp.epsn).Add(int(int8(near)) / 8)
	if near&7 == 7 {
		p.PSN = verbs.PSN(in.byte())<<16 | verbs.PSN(in.byte())
	}
	size := int(in.byte())<<8 | int(in.byte())
	if size %= 600; size&3 == 3 {
		size = 256
	}
	flags := in.byte()
	p.Solicited = flags&2 != 0
	p.RETH = roce.RETH{VA: remoteBase + uint64(flags>>2)*160, RKey: remoteKey, DMALen: uint32(size)}
	switch {
	case flags&0x80 != 0:
		p.RETH.DMALen = uint32(in.byte())<<8 | uint32(in.byte())
	case flags&0x40 != 0:
		p.RETH.DMALen = uint32(in.byte()) << 24
		p.RETH.VA = uint64(in.byte()) << 56
	}
	if flags&0x30 == 0x30 {
		p.RETH.RKey = sendKey + uint32(in.byte()&3)<<8
	}
	p.Payload = bytes.Repeat([]byte{0x5a}, size)
	p.Pad = roce.PadCount(size)
	if x.p.o.typ == verbs.UC {
		p.Opcode = ucBase | roce.Opcode(op)
		x.q.HandlePacket(x.p.now, &p)
		return
	}
	p.Opcode = roce.UDSendOnly | roce.Opcode(op&1)
	p.DETH = roce.DETH{QKey: 0x11111111 + uint32(flags&1), SrcQP: verbs.QPN(near)}
	from, to := netip.MustParseAddr("10.0.0.9"), addrOf(x.n)
	if flags&4 != 0 {
		from, to = netip.MustParseAddr("fd00::9"), netip.MustParseAddr("fd00::1")
	}
	x.q.HandleDatagram(x.p.now, &p, from, to, flags)
}
