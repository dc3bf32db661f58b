package qp

import (
	"bytes"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// fuzzBytes reads a fuzz input; past its end everything is 0.
type fuzzBytes struct{ b []byte }

func (f *fuzzBytes) byte() byte {
	if len(f.b) == 0 {
		return 0
	}
	c := f.b[0]
	f.b = f.b[1:]
	return c
}

func (f *fuzzBytes) u16() uint16 { return uint16(f.byte())<<8 | uint16(f.byte()) }

// FuzzHandlePacket makes a schedule of its input: packets with valid headers, most of them
// near the PSNs that matter, posts, time and transmission, thrown at a queue pair in each of
// its states. Nothing panics, the invariants hold after each step, memory that no key gives
// away does not change, and what leaves can be encoded.
func FuzzHandlePacket(f *testing.F) {
	f.Add([]byte{3, 0, 4, 0, 0, 64, 1, 0, 9, 0})
	f.Add([]byte{3, 1, 0, 0x11, 0, 0, 0, 0, 9, 2, 2, 2})
	f.Add([]byte{2, 0, 0x0c, 0, 0, 200, 1, 9, 0, 0x13, 0, 0, 0, 0, 9})
	for op := range byte(0x20) {
		f.Add([]byte{3, 1, 4, 1, 2, 0, op, 0, 0, 64, 3, 9, 0, op, 0, 1, 0, 0, 9})
		f.Add([]byte{op % 7, 0, op, 0, 0, 64, 3, 9})
		f.Add([]byte{0x83, 0, 2, 200, 0, op, 0, 0, 64, 3, 9, 0, op, 0, 0, 64, 3, 9, 2, 9, 11, 1, 0, 0, op, 8, 0, 64, 3, 9})
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 2000 {
			return
		}
		x := newFuzzer(t, &fuzzBytes{in})
		for len(x.in.b) > 0 {
			x.step()
		}
		x.finish()
	})
}

// finish: whatever happened, ERR flushes everything and RESET leaves nothing behind.
func (x *fuzzer) finish() {
	x.t.Helper()
	if x.q.State() != verbs.QPReset {
		x.p.state(x.n, verbs.QPErr)
		x.pump()
		if x.q.sq.InUse() != 0 || x.q.rq.InUse() != 0 {
			x.t.Fatalf("%d sends and %d receives left in ERR", x.q.sq.InUse(), x.q.rq.InUse())
		}
	}
	x.p.state(x.n, verbs.QPReset)
	x.pump()
	if x.n.win.used != 0 || x.n.win.inbound != 0 {
		x.t.Fatal("the window is not empty after RESET")
	}
	x.guards()
}

type fuzzer struct {
	t       testing.TB
	in      *fuzzBytes
	p       *pair
	n       *node
	q       *QP
	before  []byte // the send region, which nobody may write
	guarded []byte // what surrounds the remote region
}

// newFuzzer makes a reliable queue pair in the state that the input asks for.
func newFuzzer(t testing.TB, in *fuzzBytes) *fuzzer {
	first, cfg := in.byte(), in.byte()
	x := &fuzzer{t: t, in: in}
	x.begin(first, options{
		retry: 1, rnrRetry: cfg & 7, rdAtomic: cfg >> 3 & 3, noRdAtomic: true, timeout: 10, noAccess: cfg>>5 == 1,
		window: WindowConfig{PSNs: 1 + int(cfg>>4), Initial: 4000, Max: 8000, Reads: 3000},
	}, cfg&1 != 0)
	return x
}

// begin makes the queue pair. The low bits of first are its state, the highest one gives it an
// SRQ; with arm it is armed in RTR. The remote region lies in the middle of a guarded piece
// of memory.
func (x *fuzzer) begin(first byte, o options, arm bool) {
	state := verbs.QPState(first & 0x7f % verbs.QPStates)
	o.mtu, o.cq, o.memSize, o.psnA, o.psnB = verbs.MTU256, 32, 8192, 0xfffffe, 0xfffffd
	o.cap = verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 4}
	if first&0x80 != 0 {
		o.srqA = testSRQ(x.t, 4)
	}
	o.stateA = verbs.QPRTS
	if state == verbs.QPInit || state == verbs.QPRTR {
		o.stateA = state
	}
	x.p = newPair(x.t, o)
	x.n, x.q = x.p.a, x.p.a.q
	whole := bytes.Repeat([]byte{0xa5}, 8192+2*512)
	x.n.remote.buf = whole[512 : 512+8192 : 512+8192]
	x.guarded = whole
	for i := range x.n.send.buf {
		x.n.send.buf[i] = byte(i)
	}
	x.before = bytes.Clone(x.n.send.buf)
	switch {
	case state == verbs.QPReset, state == verbs.QPErr, state == verbs.QPSQD:
		x.p.state(x.n, state)
	case state == verbs.QPRTR && arm:
		if err := x.q.ArmRTS(x.p.forType(x.n, x.p.rtsAttr(x.n))); err != nil {
			x.t.Fatal(err)
		}
	}
}

func (x *fuzzer) guards() {
	x.t.Helper()
	if !bytes.Equal(x.before, x.n.send.buf) {
		x.t.Fatal("memory without any write access changed")
	}
	for i, c := range x.guarded {
		if (i < 512 || i >= 512+8192) && c != 0xa5 {
			x.t.Fatalf("byte %d beside the remote region changed", i-512)
		}
	}
}

func (x *fuzzer) pump() {
	x.p.pump(x.n)
	x.n.out = nil
}

func (x *fuzzer) step() {
	in := x.in
	switch c := in.byte(); c % 16 {
	case 0, 3, 4, 5, 6, 7:
		x.packet()
	case 1, 8:
		x.post()
	case 2:
		x.recv(c, uint64(c), uint32(in.byte())*8)
	case 9, 10:
		x.pump()
	case 11:
		x.p.now = x.p.now.Add(time.Duration(in.u16()) * 10 * time.Microsecond)
	case 12:
		if d := x.q.Deadline(); d != verbs.Never {
			x.p.now = max(x.p.now, d)
			x.q.HandleTimeout(x.p.now)
		}
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
}

// holds looks at what must be so after each step.
func (x *fuzzer) holds() {
	x.t.Helper()
	if err := x.q.check(); err != nil {
		x.t.Fatal(err)
	}
	x.guards()
}

// recv posts a receive of n bytes, where receives are taken from; its key is wrong when the
// highest bit of c is set.
func (x *fuzzer) recv(c byte, id uint64, n uint32) {
	wrs := []verbs.RecvWR{{WRID: id, SGList: []verbs.SGE{{Addr: recvBase, Length: n, LKey: recvKey + uint32(c>>7)}}}}
	if s := x.q.SRQ(); s != nil {
		_, _ = s.Post(wrs)
		return
	}
	_, _, _ = x.q.PostRecv(wrs)
}

func (x *fuzzer) modify(c byte) {
	a := &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPState(c % verbs.QPStates)}
	switch {
	case a.State == verbs.QPInit:
		a = x.p.initAttr()
	case a.State == verbs.QPRTR:
		a = x.p.rtrAttr(x.n)
	case a.State == verbs.QPRTS && x.q.State() == verbs.QPRTR:
		a = x.p.rtsAttr(x.n)
	case a.State == verbs.QPSQD && x.q.State() == verbs.QPSQD:
		a.Mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMaxQPRdAtomic
		a.MaxDestRdAtomic, a.MaxQPRdAtomic = c>>4&7, c>>5
	}
	_ = x.q.Modify(x.p.now, a)
}

func (x *fuzzer) post() {
	in := x.in
	c := in.byte()
	size := int(in.byte()) * 12
	op := verbs.Opcode(c % 10)
	if op == verbs.AtomicCmpAndSwp || op == verbs.AtomicFetchAdd {
		size = 8
	}
	wr := sendWR(op, uint64(c), 0, size)
	tweak(&wr, c)
	if c&0x20 != 0 {
		wr.Flags |= verbs.Fence
	}
	_, _, _ = x.q.PostSend([]verbs.SendWR{wr})
}

// packet gives the queue pair a packet with valid headers: its PSN is near what the
// responder expects or near what the requester has outstanding.
func (x *fuzzer) packet() {
	in := x.in
	var p roce.Packet
	p.Opcode = roce.Opcode(in.byte() & 0x1f)
	near := in.byte()
	if p.Opcode.IsResponse() {
		p.PSN = psnOf(x.q.req.una).Add(int(int8(near)) / 8)
	} else {
		p.PSN = psnOf(x.q.resp.epsn).Add(int(int8(near)) / 8)
	}
	if near&7 == 7 {
		p.PSN = verbs.PSN(in.u16())<<8&verbs.PSNMask | verbs.PSN(in.byte())
	}
	size := int(in.u16()) % 1200
	if size&3 == 3 {
		size = 256
	}
	flags := in.byte()
	p.AckReq, p.Solicited = flags&1 != 0, flags&2 != 0
	p.RETH = x.reth(flags, size)
	p.Atomic = roce.AtomicETH{VA: p.RETH.VA, RKey: p.RETH.RKey, SwapAdd: uint64(size), Compare: uint64(flags)}
	p.AETH = roce.AETH{Syndrome: in.byte(), MSN: uint32(near)}
	p.InvRKey = windowKey
	if p.Opcode.HasPayload() || !p.Opcode.Valid() {
		p.Payload = bytes.Repeat([]byte{0x5a}, size)
	}
	p.Pad = roce.PadCount(len(p.Payload))
	if flags == 0xff {
		p.Pad = 3
	}
	x.q.HandlePacket(x.p.now, &p)
}

// reth makes a RETH, most of them good.
func (x *fuzzer) reth(flags byte, size int) roce.RETH {
	h := roce.RETH{VA: remoteBase + uint64(flags>>2)*160, RKey: remoteKey, DMALen: uint32(size)}
	switch {
	case flags&0x80 != 0:
		h.DMALen = uint32(x.in.u16())
	case flags&0x40 != 0:
		h.DMALen = uint32(x.in.u16())<<16 | uint32(x.in.u16())
		h.VA = uint64(x.in.u16()) << 48
	}
	if flags&0x30 == 0x30 {
		h.RKey = sendKey + uint32(x.in.byte()&3)<<8
	}
	return h
}

// tweak changes a send request as the bits of c say.
func tweak(wr *verbs.SendWR, c byte) {
	if wr.Opcode == verbs.LocalInv || wr.Opcode == verbs.BindMW {
		wr.SGList = nil
	}
	if c&0x10 != 0 {
		wr.Flags ^= verbs.Signaled
	}
	if c&0xc0 == 0xc0 && len(wr.SGList) > 0 {
		wr.SGList[0].LKey++
	}
}
