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
		f.Add([]byte{0x83, 1, 2, 200, 0, op, 0, 1, 0, 1, 9, 0, op, 8, 1, 0, 0, 9, 2, 9, 0, op ^ 2, 16, 0, 4, 0, 9})
		f.Add([]byte{0x83, 0, 2, 200, 0, op, 0, 1, 0, 1, 9, 0, op ^ 2, 8, 1, 0, 0, 9, 13, 4, 9})
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
		x.finish()
	})
}

type unreliableFuzzer struct{ fuzzer }

func newUnreliableFuzzer(t testing.TB, in *fuzzBytes) *unreliableFuzzer {
	first, cfg := in.byte(), in.byte()
	o := options{typ: verbs.UC, noAccess: cfg>>5 == 1, qkeyA: 0x11111111}
	if cfg&1 != 0 {
		o.typ = verbs.UD
	}
	x := &unreliableFuzzer{fuzzer{t: t, in: in}}
	x.begin(first, o, cfg&2 != 0 && o.typ == verbs.UC)
	x.p.sent = func(_ *node, pkt *roce.Packet) {
		if pkt.AckReq || !fits(pkt.Opcode, o.typ) {
			t.Fatalf("%v sent %v, AckReq %v", o.typ, pkt.Opcode, pkt.AckReq)
		}
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
		n := uint32(in.byte()) * 8
		x.recv(c, uint64(n), n)
	case 9, 10:
		x.pump()
	case 12:
		x.p.now = max(x.p.now, min(x.q.Deadline(), x.p.now+1))
		x.q.HandleTimeout(x.p.now)
	case 13:
		x.modify(in.byte())
	case 14:
		x.q.Service(x.p.now)
		if x.q.NextPacket(x.p.now, &x.n.scratch) == NextPacket {
			x.q.Sent(x.p.now)
		}
	case 15:
		if in.byte() == 7 {
			x.n.remote.dead = true
		}
	}
	x.holds()
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
	tweak(&wr, c)
	if c&0x20 != 0 {
		wr.AH = verbs.AH(c) * 5
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
	p.RETH = x.reth(flags, size)
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
