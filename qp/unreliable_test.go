package qp

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// testAHs knows the address handles below 100, as many bytes times 16 their paths carry.
type testAHs struct{}

func (testAHs) AddressHandle(pd PD, ah verbs.AH) (uint32, bool) {
	return uint32(ah) * 16, pd == testPD && ah < 1000
}

// wideAH is a handle whose path carries any message.
const wideAH verbs.AH = 999

// addrOf is a node's address.
func addrOf(n *node) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, 0, byte(n.q.Num())})
}

// forType takes from attributes that suit RC what the pair's type does not know, and adds
// what it needs.
func (p *pair) forType(n *node, a *verbs.QPAttr) *verbs.QPAttr {
	if p.o.typ == verbs.RC {
		return a
	}
	b := *a
	e := edgeOf(n.q.state, a.State)
	required := e.required.of(p.o.typ)
	rcOnly := e.required.rc | e.optional.rc
	b.Mask &^= rcOnly &^ (required | e.optional.of(p.o.typ))
	if required&verbs.AttrQKey != 0 {
		b.Mask |= verbs.AttrQKey
		b.QKey = p.o.qkeyA
		if n == p.b {
			b.QKey = p.o.qkeyB
		}
	}
	return &b
}

// datagram is a request that goes to peer's queue pair.
func datagram(peer *node, op verbs.Opcode, id uint64, size int) verbs.SendWR {
	wr := sendWR(op, id, 0, size)
	wr.AH, wr.RemoteQPN, wr.RemoteQKey = wideAH, peer.q.Num(), 0x11111111
	return wr
}

func ud(o options) options {
	o.typ, o.qkeyA, o.qkeyB = verbs.UD, 0x11111111, 0x11111111
	return o
}

func uc(o options) options {
	o.typ = verbs.UC
	return o
}

// Every operation of UC, in every length that matters: all bytes arrive, completions come when
// the last packet has left, and no packet asks for an answer or is one.
func TestUCOperations(t *testing.T) {
	for mtu := verbs.MTU256; mtu <= verbs.MTU4096; mtu++ {
		m := mtu.Bytes()
		for _, size := range []int{0, 1, 3, m - 1, m, m + 1, 3*m + 5} {
			p := newPair(t, uc(options{mtu: mtu, psnA: 0xfffffe}))
			p.sent = func(n *node, pkt *roce.Packet) {
				if n == p.b || pkt.AckReq || pkt.Opcode.Transport() != roce.TransportUC {
					t.Fatalf("%s sent %v, AckReq %v", n.name, pkt.Opcode, pkt.AckReq)
				}
			}
			fill(p.a.send.buf[:size], 9)
			for i := range 3 {
				p.postRecv(p.b, uint64(5+i), i<<15, size)
			}
			imm, write, wimm := sendWR(verbs.SendWithImm, 2, 0, size), sendWR(verbs.RDMAWrite, 3, 0, size), sendWR(verbs.RDMAWriteWithImm, 4, 0, size)
			imm.ImmData, wimm.ImmData = 0xcafe, 0xfeed
			wimm.RemoteAddr += 1 << 16
			wimm.Flags |= verbs.Solicited
			p.post(p.a, sendWR(verbs.Send, 1, 0, size), imm, write, wimm)
			p.pump(p.a)
			p.wantWCs(p.a, "1:SEND", "2:SEND", "3:RDMA_WRITE", "4:RDMA_WRITE")
			p.run()
			wcs := p.b.wcs
			p.wantWCs(p.b, "5:RECV", "6:RECV", "7:RECV_RDMA_WITH_IMM")
			if wcs[1].Flags != verbs.WithImm || wcs[1].ImmData != 0xcafe || wcs[2].ImmData != 0xfeed ||
				wcs[2].Flags != verbs.WithImm|verbs.WithSolicited || wcs[0].SrcQPN != p.a.q.Num() {
				t.Errorf("completions %+v", wcs)
			}
			for _, wc := range wcs {
				if wc.ByteLen != uint32(size) {
					t.Errorf("%d bytes arrived as %d", size, wc.ByteLen)
				}
			}
			for i, b := range [][]byte{p.b.recv.buf[:size], p.b.recv.buf[1<<15:][:size], p.b.remote.buf[:size], p.b.remote.buf[1<<16:][:size]} {
				if !matches(b, 9) {
					t.Errorf("MTU %v: message %d of %d bytes changed", mtu, i, size)
				}
			}
			if want := min(2*size, 2); p.b.remote.placed != want {
				t.Errorf("%d bytes: WRITEs counted %d times, want %d", size, p.b.remote.placed, want)
			}
			if p.a.win.used != 0 || p.a.q.Deadline() != verbs.Never {
				t.Error("a window is charged or a timer runs")
			}
		}
	}
}

// F30: messages of five packets and of one, each packet lost in turn, said twice, late by some,
// or overtaken. A message with a gap is dropped whole and its receive serves the next one;
// what is not touched by the fault arrives, and nothing arrives twice, mixed or out of order.
func TestUCFaults(t *testing.T) {
	const m, messages = 1024, 6
	sizes := []int{5 * m, m, 4*m + 100, 3, 5 * m, 2 * m}
	ops := []verbs.Opcode{verbs.Send, verbs.SendWithImm, verbs.RDMAWriteWithImm}
	for _, op := range ops {
		base := newPair(t, uc(options{psnA: 0xfffff8, posBase: 3}))
		all := ucMessages(base, op, sizes)
		var of []int // the message of each packet
		for i, size := range sizes {
			for range max(1, (size+m-1)/m) {
				of = append(of, i)
			}
		}
		for at := range all {
			for name, fault := range map[string]func() (packets [][]byte, lost []int){
				"lost": func() ([][]byte, []int) {
					return append(bytesList(all[:at]), all[at+1:]...), []int{of[at]}
				},
				"twice": func() ([][]byte, []int) { return insert(all, at+1, all[at]), nil },
				"late": func() ([][]byte, []int) { // repeated after three others
					return insert(all, min(at+4, len(all)), all[at]), nil
				},
				"swapped": func() ([][]byte, []int) {
					if at+1 == len(all) {
						return all, nil
					}
					x := bytesList(all)
					x[at], x[at+1] = x[at+1], x[at]
					return x, []int{of[at]}
				},
			} {
				in, lost := fault()
				p := newPair(t, uc(options{psnA: 0xfffff8, posBase: 3}))
				for i := range messages {
					p.postRecv(p.b, uint64(i), i*8*m, 8*m)
				}
				p.deliver(p.b, in...)
				p.pump(p.b)
				var want []int
				for i := range sizes {
					if len(lost) == 0 || lost[0] != i {
						want = append(want, i)
					}
				}
				where := fmt.Sprintf("%v, packet %d %s", op, at, name)
				if len(p.b.wcs) != len(want) {
					t.Fatalf("%s: %d messages arrived, want %v", where, len(p.b.wcs), want)
				}
				for i, wc := range p.b.wcs {
					k := want[i]
					buf := p.b.recv.buf[i*8*m:]
					if op == verbs.RDMAWriteWithImm {
						buf = p.b.remote.buf[k*8*m:]
					}
					if wc.Status != verbs.WCSuccess || wc.WRID != uint64(i) || int(wc.ByteLen) != sizes[k] ||
						op != verbs.Send && wc.ImmData != uint32(k) || !matches(buf[:sizes[k]], uint64(k)) {
						t.Errorf("%s: completion %d is %+v, want message %d", where, i, wc, k)
					}
				}
				if len(p.b.out) != 0 {
					t.Errorf("%s: the receiver sent something", where)
				}
			}
		}
	}
}

func bytesList(x [][]byte) [][]byte { return append([][]byte(nil), x...) }

func insert(x [][]byte, at int, b []byte) [][]byte {
	return append(append(bytesList(x[:at]), b), x[at:]...)
}

// ucMessages returns the packets of messages that a sends.
func ucMessages(p *pair, op verbs.Opcode, sizes []int) [][]byte {
	for i, size := range sizes {
		fill(p.a.send.buf[i*8192:][:size], uint64(i))
		wr := sendWR(op, uint64(i), i*8192, size)
		wr.ImmData = uint32(i)
		wr.RemoteAddr += uint64(i * 8192)
		p.post(p.a, wr)
	}
	p.pump(p.a)
	return p.a.take()
}

// Any subset of the packets in any order: only whole messages complete, in order, each at most
// once, each with its own bytes.
func TestUCNeverSplices(t *testing.T) {
	sizes := []int{3000, 1024, 0, 5000, 1, 2048, 4096, 100}
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 30))
		p := newPair(t, uc(options{psnA: verbs.PSN(rnd.Uint32()) & verbs.PSNMask}))
		for i := range sizes {
			p.postRecv(p.b, uint64(i), i*8192, 8192)
		}
		packets := ucMessages(p, verbs.SendWithImm, sizes)
		for i := 0; i < len(packets); i++ {
			switch rnd.IntN(8) {
			case 0:
				packets = append(packets[:i], packets[i+1:]...)
				i--
			case 1:
				j := rnd.IntN(len(packets))
				packets[i], packets[j] = packets[j], packets[i]
			case 2:
				packets = insert(packets, rnd.IntN(len(packets)), packets[i])
				i++
			}
		}
		p.deliver(p.b, packets...)
		p.pump(p.b)
		last := -1
		for i, wc := range p.b.wcs {
			k := int(wc.ImmData)
			if k <= last || wc.WRID != uint64(i) || int(wc.ByteLen) != sizes[k] || !matches(p.b.recv.buf[i*8192:][:sizes[k]], uint64(k)) {
				t.Fatalf("seed %d: completion %d is %+v after message %d", seed, i, wc, last)
			}
			last = k
		}
		if len(p.b.events.names()) != 0 || p.b.q.State() != verbs.QPRTS {
			t.Fatalf("seed %d: %v in %v", seed, p.b.events, p.b.q.State())
		}
	}
}

func (s EventSet) names() (n []string) {
	s.Each(func(e verbs.EventType) { n = append(n, e.String()) })
	return n
}

// What is wrong with a message of UC drops it, is counted, and hurts nobody: the next one
// arrives in the receive that the wrong one left.
func TestUCDrops(t *testing.T) {
	const m = 1024
	for _, tc := range []struct {
		name    string
		counter func(*Counters) uint64
		o       options
		recv    int // bytes of the first receive; -1 for none
		wr      verbs.SendWR
	}{
		{"no receive", func(c *Counters) uint64 { return c.DroppedNoRecv.Load() }, options{}, -1, sendWR(verbs.Send, 1, 0, 3*m)},
		{"no receive for a WRITE", func(c *Counters) uint64 { return c.DroppedNoRecv.Load() }, options{}, -1, sendWR(verbs.RDMAWriteWithImm, 1, 0, 3*m)},
		{"too long", func(c *Counters) uint64 { return c.DroppedLength.Load() }, options{}, 3*m - 1, sendWR(verbs.Send, 1, 0, 3*m)},
		{"no access", func(c *Counters) uint64 { return c.DroppedAccess.Load() }, options{noAccess: true}, 10, sendWR(verbs.RDMAWrite, 1, 0, 3*m)},
		{"region without access", func(c *Counters) uint64 { return c.DroppedAccess.Load() }, options{remoteAccess: verbs.LocalWrite}, 10, sendWR(verbs.RDMAWriteWithImm, 1, 0, 3*m)},
		{"other domain", func(c *Counters) uint64 { return c.DroppedAccess.Load() }, options{ownPDForRemote: true}, 10, sendWR(verbs.RDMAWrite, 1, 0, 1)},
		{"out of range", func(c *Counters) uint64 { return c.DroppedAccess.Load() }, options{memSize: 2 * m}, 10, sendWR(verbs.RDMAWrite, 1, 0, 2*m)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, uc(tc.o))
			if tc.name == "out of range" {
				tc.wr.RemoteAddr++
			}
			if tc.recv >= 0 {
				p.postRecv(p.b, 7, 0, tc.recv)
			}
			before := bytes.Clone(p.b.remote.buf)
			p.post(p.a, tc.wr)
			p.run()
			if n := tc.counter(&p.b.env.Counters); n != 1 {
				t.Errorf("counted %d times", n)
			}
			if tc.name != "no receive for a WRITE" && !bytes.Equal(before, p.b.remote.buf) {
				t.Error("memory changed")
			}
			if p.b.remote.placed != 0 {
				t.Error("a dropped WRITE was counted as placed")
			}
			p.wantWCs(p.b)
			if tc.recv < 0 {
				p.postRecv(p.b, 7, 0, 10)
			}
			fill(p.a.send.buf[:10], 4)
			p.post(p.a, sendWR(verbs.Send, 2, 0, 10))
			p.run()
			p.wantWCs(p.b, "7:RECV")
			if !matches(p.b.recv.buf[:10], 4) || p.b.q.State() != verbs.QPRTS {
				t.Errorf("the next message did not arrive well, state %v", p.b.q.State())
			}
		})
	}
}

// COMM_EST and the armed move exist for UC, and come from a message's beginning even if others
// before it were lost; the rest of a message says nothing.
func TestUCEstablishes(t *testing.T) {
	p := newPair(t, uc(options{stateB: verbs.QPRTR}))
	if err := p.b.q.ArmRTS(&verbs.QPAttr{Mask: verbs.AttrSQPSN, SQPSN: 5}); err != nil {
		t.Fatal(err)
	}
	p.postRecv(p.b, 1, 0, 4096)
	p.postRecv(p.b, 2, 4096, 4096)
	p.post(p.b, sendWR(verbs.Send, 9, 0, 10))
	packets := ucMessages(p, verbs.Send, []int{3000, 2000})
	p.deliver(p.b, packets[1:3]...)
	p.pump(p.b)
	if p.b.q.State() != verbs.QPRTR || p.b.events != 0 {
		t.Fatalf("the end of a message moved it to %v", p.b.q.State())
	}
	p.deliver(p.b, packets[3])
	if p.b.q.State() != verbs.QPRTS {
		t.Fatal("a first packet did not establish the connection")
	}
	p.deliver(p.b, packets[4])
	p.pump(p.b)
	if p.b.events != EvCommEst|EvToRTS {
		t.Errorf("events %v", p.b.events.names())
	}
	p.wantWCs(p.b, "1:RECV", "9:SEND")
	if n, _ := p.b.q.Published(); n != 1 {
		t.Errorf("published %d", n)
	}
}

// A send error of UC or UD costs the send queue: it completes with its status, what is behind
// it flushes, also what is posted later; receiving goes on; the move back to RTS begins with
// what is posted after it.
func TestSQE(t *testing.T) {
	for _, tc := range []struct {
		name string
		o    options
		bad  func(p *pair, wr *verbs.SendWR)
		want string
	}{
		{"UC key", uc(options{}), func(_ *pair, wr *verbs.SendWR) { wr.SGList[0].LKey++ }, "LOC_PROT_ERR"},
		{"UC key in mid-message", uc(options{}), func(_ *pair, wr *verbs.SendWR) {
			wr.SGList = []verbs.SGE{{Addr: sendBase, Length: 2048, LKey: sendKey}, {Addr: sendBase, Length: 100, LKey: 1}}
		}, "LOC_PROT_ERR"},
		{"UC window", uc(options{}), func(_ *pair, wr *verbs.SendWR) { wr.Opcode, wr.SGList = verbs.BindMW, nil }, "MW_BIND_ERR"},
		{"UD key", ud(options{}), func(_ *pair, wr *verbs.SendWR) { wr.SGList[0].LKey++ }, "LOC_PROT_ERR"},
		{"UD unknown handle", ud(options{}), func(_ *pair, wr *verbs.SendWR) { wr.AH = 1000 }, "LOC_QP_OP_ERR"},
		{"UD path too narrow", ud(options{}), func(_ *pair, wr *verbs.SendWR) { wr.AH = 6 }, "LOC_LEN_ERR"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, tc.o)
			wr := func(n *node, id uint64) verbs.SendWR {
				if p.o.typ == verbs.UD {
					return datagram(n.peer, verbs.Send, id, 100)
				}
				return sendWR(verbs.Send, id, 0, 100)
			}
			for i := range 6 {
				p.postRecv(p.b, uint64(10+i), 0, 8192)
				p.postRecv(p.a, uint64(10+i), 0, 8192)
			}
			bad, silent := wr(p.a, 2), wr(p.a, 3)
			tc.bad(p, &bad)
			bad.Flags, silent.Flags = 0, 0
			p.post(p.a, wr(p.a, 1), bad, silent)
			p.run()
			if s := p.a.q.State(); s != verbs.QPSQE {
				t.Fatalf("state %v", s)
			}
			p.settle(1e9)
			p.wantWCs(p.a, "1:SEND", "2:"+tc.want, "3:WR_FLUSH_ERR")
			p.post(p.a, wr(p.a, 4))
			p.pump(p.a)
			p.wantWCs(p.a, "4:WR_FLUSH_ERR")
			p.post(p.b, wr(p.b, 1))
			p.run()
			p.wantWCs(p.a, "10:RECV")
			p.post(p.a, wr(p.a, 5)) // before the move: its fate is sealed by it
			p.state(p.a, verbs.QPRTS)
			p.post(p.a, wr(p.a, 6))
			p.run()
			p.wantWCs(p.a, "5:WR_FLUSH_ERR", "6:SEND")
			p.b.wcs = p.b.wcs[max(0, len(p.b.wcs)-1):]
			p.wantWCs(p.b, "11:RECV")
			if p.a.events.names() != nil {
				t.Errorf("events %v", p.a.events.names())
			}
		})
	}
}

// Posts in RTR wait for RTS and leave in order; those in SQD wait too, a message that was
// begun goes on, and SQ_DRAINED comes when it is out.
func TestUnreliableGate(t *testing.T) {
	for _, o := range []options{uc(options{stateA: verbs.QPRTR}), ud(options{stateA: verbs.QPRTR})} {
		t.Run(o.typ.String(), func(t *testing.T) {
			p := newPair(t, o)
			wr := func(id uint64, size int) verbs.SendWR {
				if o.typ == verbs.UD {
					return datagram(p.b, verbs.Send, id, min(size, 1024))
				}
				return sendWR(verbs.Send, id, 0, size)
			}
			p.post(p.a, wr(1, 10), wr(2, 3000), wr(3, 10))
			p.pump(p.a)
			if len(p.a.out) != 0 {
				t.Fatal("something left in RTR")
			}
			p.modify(p.a, p.rtsAttr(p.a))
			p.next(p.a)
			p.next(p.a)
			p.modify(p.a, &verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrEnSQDAsyncNotify, State: verbs.QPSQD, EnSQDAsyncNotify: true})
			p.post(p.a, wr(4, 10))
			p.pump(p.a)
			p.wantWCs(p.a, "1:SEND", "2:SEND")
			if p.a.events != EvSQDrained {
				t.Errorf("events %v", p.a.events.names())
			}
			p.state(p.a, verbs.QPRTS)
			p.pump(p.a)
			p.wantWCs(p.a, "3:SEND", "4:SEND")
			if n, _ := p.a.q.Published(); n != 3 {
				t.Errorf("published %d, want 3", n)
			}
		})
	}
}

// The slot of an unreliable send, and the inline data in it, stay the wire's until it has copied
// them: only then may a poster have the slot, and only then is the send complete.
func TestUnreliableSlotUntilSent(t *testing.T) {
	for _, o := range []options{uc(options{}), ud(options{})} {
		t.Run(o.typ.String(), func(t *testing.T) {
			p := newPair(t, o)
			wr := func(id int) verbs.SendWR {
				wr := verbs.SendWR{Opcode: verbs.Send, WRID: uint64(id), InlineData: []byte{byte(id)}, Flags: verbs.Signaled}
				if o.typ == verbs.UD {
					to := datagram(p.b, verbs.Send, 0, 0)
					wr.AH, wr.RemoteQPN, wr.RemoteQKey = to.AH, to.RemoteQPN, to.RemoteQKey
				}
				return wr
			}
			depth := p.a.q.Cap().MaxSendWR
			for id := range depth {
				p.post(p.a, wr(id))
			}
			for id := range depth {
				if next := p.a.q.NextPacket(p.now, &p.a.scratch); next != NextPacket {
					t.Fatalf("packet %d: %v", id, next)
				}
				if _, _, err := p.a.q.PostSend([]verbs.SendWR{wr(99)}); err != verbs.ErrQueueFull {
					t.Fatalf("packet %d: a post before it was sent: %v", id, err)
				}
				if got := p.a.scratch.Gather[0]; len(got) != 1 || got[0] != byte(id) {
					t.Fatalf("packet %d holds %x", id, got)
				}
				if p.a.cq.Commit(); p.a.cq.Len() != id {
					t.Fatalf("packet %d: complete before it was sent", id)
				}
				p.a.q.Sent(p.now)
				p.post(p.a, wr(depth+id))
			}
		})
	}
}

// F29: what a receiver of datagrams drops and what it takes, with receives of every awkward
// size; each drop is counted, the receive stays, the queue pair too, and nobody is answered.
func TestUDDrops(t *testing.T) {
	const mtu = 1024
	for _, room := range []int{0, 39, 40, 41, 100, 40 + mtu} {
		for _, size := range []int{0, 1, 60, 61, mtu} {
			p := newPair(t, ud(options{}))
			fill(p.a.send.buf[:size], 2)
			p.post(p.a, datagram(p.b, verbs.Send, 1, size)) // no receive is posted
			p.run()
			if n := p.b.env.Counters.DroppedNoRecv.Load(); n != 1 {
				t.Fatalf("without a receive: counted %d", n)
			}
			p.postRecv(p.b, 7, 0, room)
			for i, key := range []uint32{0x11111110, 0x22222222, 0} {
				wr := datagram(p.b, verbs.Send, 2, size)
				wr.RemoteQKey = key
				p.post(p.a, wr)
				p.run()
				if n := p.b.env.Counters.DroppedQKey.Load(); n != uint64(i+1) {
					t.Fatalf("wrong Q_Key: counted %d", n)
				}
			}
			wr := datagram(p.b, verbs.SendWithImm, 3, size)
			wr.RemoteQKey = 1 << 31 // the sender's own Q_Key
			wr.ImmData = 0xabcd
			wr.Flags |= verbs.Solicited
			p.post(p.a, wr)
			p.run()
			fits := room >= 40+size
			if dropped := p.b.env.Counters.DroppedLength.Load(); (dropped == 0) != fits {
				t.Errorf("%d bytes into %d: dropped %d", size, room, dropped)
			}
			if !fits {
				p.wantWCs(p.b)
				if room < 40 {
					continue
				}
				p.post(p.a, datagram(p.b, verbs.Send, 4, 0)) // fits into the same receive
				p.run()
				p.wantWCs(p.b, "7:RECV")
				continue
			}
			wc := p.b.wcs[0]
			p.wantWCs(p.b, "7:RECV")
			if int(wc.ByteLen) != 40+size || wc.SrcQPN != p.a.q.Num() || wc.ImmData != 0xabcd ||
				wc.Flags != verbs.WithGRH|verbs.WithImm|verbs.WithSolicited {
				t.Errorf("completion %+v", wc)
			}
			from, to, ok := roce.GRHAddrs(p.b.recv.buf)
			if !ok || from != addrOf(p.a) || to != addrOf(p.b) {
				t.Errorf("GRH says %v to %v, %v", from, to, ok)
			}
			if !matches(p.b.recv.buf[40:][:size], 2) || p.b.q.State() != verbs.QPRTS {
				t.Errorf("%d bytes into %d arrived changed, or state %v", size, room, p.b.q.State())
			}
		}
	}
}

// The GRH and the payload are scattered like one piece.
func TestUDSplitGRH(t *testing.T) {
	for _, cut := range []uint32{1, 20, 39, 40, 41, 60} {
		p := newPair(t, ud(options{}))
		fill(p.a.send.buf[:50], 2)
		wr := verbs.RecvWR{WRID: 7, SGList: []verbs.SGE{
			{Addr: recvBase, Length: cut, LKey: recvKey}, {Addr: recvBase + 4096, Length: 90 - cut, LKey: recvKey},
		}}
		if _, _, err := p.b.q.PostRecv([]verbs.RecvWR{wr}); err != nil {
			t.Fatal(err)
		}
		p.post(p.a, datagram(p.b, verbs.Send, 1, 50))
		p.run()
		got := append(bytes.Clone(p.b.recv.buf[:cut]), p.b.recv.buf[4096:][:90-cut]...)
		if _, _, ok := roce.GRHAddrs(got); !ok || !matches(got[40:], 2) {
			t.Errorf("cut at %d: arrived changed", cut)
		}
		p.wantWCs(p.b, "7:RECV")
	}
}

// Posting to UD: longer than the MTU is refused at once, a chain up to there is taken.
func TestUDPost(t *testing.T) {
	p := newPair(t, ud(options{}))
	good, long := datagram(p.b, verbs.Send, 1, 1024), datagram(p.b, verbs.Send, 2, 1025)
	n, _, err := p.a.q.PostSend([]verbs.SendWR{good, long, good})
	if n != 1 || !errors.Is(err, verbs.ErrTooLong) {
		t.Errorf("took %d, %v", n, err)
	}
	p.pump(p.a)
	p.wantWCs(p.a, "1:SEND")
	if pkt := decoded(t, p.a.out)[0]; pkt.DestQP != p.b.q.Num() || pkt.DETH != (roce.DETH{QKey: 0x11111111, SrcQP: p.a.q.Num()}) || pkt.AckReq {
		t.Errorf("sent %+v", pkt)
	}
}

// A receive whose memory cannot be written is the program's mistake: it fails and ends the
// queue pair. So does a completion queue without room.
func TestUnreliableReceiverErrors(t *testing.T) {
	for _, o := range []options{uc(options{cq: 2}), ud(options{cq: 2})} {
		send := func(p *pair, k int) {
			for range k {
				wr := sendWR(verbs.Send, 1, 0, 1000)
				if o.typ == verbs.UD {
					wr = datagram(p.b, verbs.Send, 1, 1000)
				}
				wr.Flags = 0
				p.post(p.a, wr)
			}
		}
		p := newPair(t, o)
		p.b.recv.dead = true
		p.postRecv(p.b, 7, 0, 2000)
		p.postRecv(p.b, 8, 0, 2000)
		send(p, 2)
		p.run()
		p.wantWCs(p.b, "7:LOC_PROT_ERR", "8:WR_FLUSH_ERR")
		if p.b.q.State() != verbs.QPErr || p.b.events&EvToErr == 0 {
			t.Errorf("%v: state %v", o.typ, p.b.q.State())
		}

		p = newPair(t, o)
		for i := range 4 {
			p.postRecv(p.b, uint64(i), 0, 2000)
		}
		send(p, 3)
		p.pump(p.a)
		p.deliver(p.b, p.a.take()...)
		p.pump(p.b)
		p.wantWCs(p.b, "0:RECV", "1:RECV")
		if p.b.q.State() != verbs.QPErr || p.b.events&EvCQErr == 0 || !p.b.cq.Overrun() {
			t.Errorf("%v: state %v, events %v", o.typ, p.b.q.State(), p.b.events.names())
		}
		if len(p.b.out) != 0 {
			t.Errorf("%v: a receiver in error said something", o.typ)
		}
	}
}

// ERR and RESET in the middle of a message, on both sides.
func TestUnreliableLives(t *testing.T) {
	p := newPair(t, uc(options{}))
	p.postRecv(p.b, 7, 0, 8192)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 5000), sendWR(verbs.Send, 2, 0, 10))
	p.deliver(p.b, p.next(p.a))
	p.state(p.b, verbs.QPErr)
	p.state(p.a, verbs.QPErr)
	p.pump(p.a)
	p.pump(p.b)
	p.wantWCs(p.a, "1:WR_FLUSH_ERR", "2:WR_FLUSH_ERR")
	p.wantWCs(p.b, "7:WR_FLUSH_ERR")

	p = newPair(t, uc(options{psnA: 9}))
	p.postRecv(p.b, 7, 0, 8192)
	p.post(p.a, sendWR(verbs.Send, 1, 0, 5000))
	p.deliver(p.b, p.next(p.a))
	for _, n := range []*node{p.a, p.b} {
		p.state(n, verbs.QPReset)
		p.to(n, verbs.QPRTS)
	}
	fill(p.a.send.buf[:3000], 5)
	p.postRecv(p.b, 8, 0, 8192)
	p.post(p.a, sendWR(verbs.Send, 2, 0, 3000))
	p.run()
	p.wantWCs(p.a, "2:SEND")
	p.wantWCs(p.b, "8:RECV")
	if !matches(p.b.recv.buf[:3000], 5) {
		t.Error("the second life's message changed")
	}
}

// Packets that a peer should not send: their PSNs follow each other, but they do not make the
// message they say they are. What is wrong is dropped, what begins anew is taken.
func TestUCSequence(t *testing.T) {
	const m = 1024
	type pkt struct {
		op     roce.Opcode
		size   int
		length uint32 // RETH
	}
	for _, tc := range []struct {
		name string
		in   []pkt
		want []string // "length" of each completion
	}{
		{"first in mid-message", []pkt{{roce.UCSendFirst, m, 0}, {roce.UCSendFirst, m, 0}, {roce.UCSendLast, 5, 0}}, []string{"1029"}},
		{"only in mid-message", []pkt{{roce.UCSendFirst, m, 0}, {roce.UCSendOnly, 9, 0}, {roce.UCSendLast, 5, 0}}, []string{"9"}},
		{"WRITE in mid-SEND", []pkt{{roce.UCSendFirst, m, 0}, {roce.UCWriteOnly, 8, 8}, {roce.UCSendLast, 5, 0}}, nil},
		{"WRITE's end in a SEND", []pkt{{roce.UCSendFirst, m, 0}, {roce.UCWriteLastImm, 8, 0}, {roce.UCSendLast, 5, 0}}, nil},
		{"SEND's end in a WRITE", []pkt{{roce.UCWriteFirst, m, m + 8}, {roce.UCSendLast, 8, 0}, {roce.UCWriteLastImm, 8, 0}}, nil},
		{"SEND in mid-WRITE", []pkt{{roce.UCWriteFirst, m, m + 8}, {roce.UCSendOnlyImm, 7, 0}, {roce.UCWriteLastImm, 8, 0}}, []string{"7"}},
		{"WRITE ends early", []pkt{{roce.UCWriteFirst, m, 3 * m}, {roce.UCWriteLastImm, 8, 0}}, nil},
		{"WRITE ends late", []pkt{{roce.UCWriteFirst, m, 2 * m}, {roce.UCWriteMiddle, m, 0}, {roce.UCWriteLastImm, 8, 0}}, nil},
		{"WRITE with too much", []pkt{{roce.UCWriteFirst, m, m + 8}, {roce.UCWriteLastImm, 9, 0}}, nil},
		{"WRITE only with too little", []pkt{{roce.UCWriteOnlyImm, 9, 10}}, nil},
		{"WRITE beyond 2^31", []pkt{{roce.UCWriteFirst, m, 1<<31 + 1}, {roce.UCWriteLastImm, 9, 0}}, nil},
		{"short first", []pkt{{roce.UCSendFirst, m - 4, 0}, {roce.UCSendLast, 8, 0}}, nil},
		{"short middle", []pkt{{roce.UCSendFirst, m, 0}, {roce.UCSendMiddle, 4, 0}, {roce.UCSendLast, 8, 0}}, nil},
		{"empty last", []pkt{{roce.UCSendFirst, m, 0}, {roce.UCSendLast, 0, 0}}, nil},
		{"longer than the MTU", []pkt{{roce.UCSendOnly, m + 4, 0}}, nil},
		{"good", []pkt{{roce.UCWriteFirst, m, m + 8}, {roce.UCWriteLastImm, 8, 0}, {roce.UCWriteOnlyImm, 0, 0}}, []string{"1032", "0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, uc(options{}))
			for i := range 3 {
				p.postRecv(p.b, uint64(i), i*8192, 8192)
			}
			raw := func(i int, in pkt) {
				x := roce.Packet{
					BTH:     roce.BTH{Opcode: in.op, DestQP: p.b.q.Num(), PSN: verbs.PSN(i), Pad: roce.PadCount(in.size)},
					RETH:    roce.RETH{VA: remoteBase, RKey: remoteKey, DMALen: in.length},
					Payload: make([]byte, in.size),
				}
				p.deliver(p.b, append(x.Append(nil), 0, 0, 0, 0))
			}
			for i, in := range tc.in {
				raw(i, in)
			}
			raw(len(tc.in), pkt{roce.UCSendOnly, 77, 0}) // and life goes on
			p.pump(p.b)
			var got []string
			for i, wc := range p.b.wcs {
				if wc.WRID != uint64(i) || wc.Status != verbs.WCSuccess {
					t.Errorf("completion %+v", wc)
				}
				got = append(got, fmt.Sprint(wc.ByteLen))
			}
			if want := append(tc.want, "77"); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("messages of %v bytes arrived, want %v", got, want)
			}
		})
	}
}

// A datagram longer than the MTU is dropped, however long the receive.
func TestUDTooLongToReceive(t *testing.T) {
	p := newPair(t, ud(options{}))
	p.postRecv(p.b, 7, 0, 8192)
	for _, size := range []int{1028, 1024} {
		x := roce.Packet{
			BTH:     roce.BTH{Opcode: roce.UDSendOnly, DestQP: p.b.q.Num()},
			DETH:    roce.DETH{QKey: 0x11111111, SrcQP: 5},
			Payload: make([]byte, size),
		}
		p.deliver(p.b, append(x.Append(nil), 0, 0, 0, 0))
	}
	p.pump(p.b)
	if n := p.b.env.Counters.DroppedLength.Load(); n != 1 {
		t.Errorf("counted %d", n)
	}
	p.wantWCs(p.b, "7:RECV")
}
