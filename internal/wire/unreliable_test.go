package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// newUDEnd makes a wire with one UD queue pair in RTS, whose Q_Key is 7.
func newUDEnd(t *testing.T, addr string, seed uint64) *end {
	t.Helper()
	e := newEnd(t, addr, seed)
	e.useType(t, verbs.UD)
	e.modify(t, verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey, State: verbs.QPInit, Port: 1, QKey: 7})
	e.modify(t, verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTR})
	e.modify(t, verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS})
	return e
}

// useType gives the end a queue pair of another type instead.
func (e *end) useType(t *testing.T, typ verbs.QPType) {
	t.Helper()
	e.w.DestroyQP(0, e.qp)
	var err error
	e.qp, err = e.w.CreateQP(qp.Config{Type: typ, PD: 1, SendCQ: e.lane, RecvCQ: e.lane, Cap: verbs.QPCap{MaxSendWR: 256, MaxRecvWR: 256}})
	if err != nil {
		t.Fatal(err)
	}
}

func (e *end) ah(t *testing.T, to string) verbs.AH {
	t.Helper()
	ah, err := e.w.CreateAH(1, verbs.AV{Remote: netip.MustParseAddrPort(to)}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return ah
}

func (e *end) datagram(t *testing.T, ah verbs.AH, qpn verbs.QPN, off, n int) {
	t.Helper()
	_, ring, err := e.qp.Engine().PostSend([]verbs.SendWR{{
		WRID: uint64(off), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: e.sgl(off, n), AH: ah, RemoteQPN: qpn, RemoteQKey: 7,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if ring {
		e.w.Ring(e.qp)
	}
}

// TestDatagramTrains: datagrams of one queue pair share a train as long as they go to the same
// queue pair at the same address, and every one has the ICRC of its own way.
func TestDatagramTrains(t *testing.T) {
	for _, tc := range []struct{ name, a, b, c string }{
		{"IPv4", "10.0.0.1:4791", "10.0.0.2:4791", "10.0.0.3:4000"},
		{"IPv6", "[fd00::1]:4791", "[fd00::2]:4791", "[fd00::3]:4000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := newUDEnd(t, tc.a, 1)
			b, c := a.ah(t, tc.b), a.ah(t, tc.c)
			for i := range a.mr.Bytes() {
				a.mr.Bytes()[i] = byte(i * 7)
			}
			type msg struct {
				ah  verbs.AH
				qpn verbs.QPN
			}
			const size = 700
			order := []msg{{b, 20}, {b, 20}, {b, 20}, {c, 20}, {c, 20}, {b, 20}, {b, 21}, {b, 21}, {c, 20}}
			for i, m := range order {
				a.datagram(t, m.ah, m.qpn, i*size, size)
			}
			a.w.Step(0)
			i := 0
			for _, tx := range a.pipe.sent {
				dst := netip.AddrPortFrom(tx.Dst, 4791)
				if tx.Dst == netip.MustParseAddrPort(tc.c).Addr() {
					dst = netip.MustParseAddrPort(tc.c)
				}
				path := roce.NewPath(a.pipe.addr, dst)
				seg := tx.SegSize
				if seg == 0 {
					seg = len(tx.Buf)
				}
				for id := 0; len(tx.Buf) > 0; id++ {
					raw := tx.Buf[:min(seg, len(tx.Buf))]
					tx.Buf = tx.Buf[len(raw):]
					var p roce.Packet
					if err := p.Decode(raw); err != nil || !path.Check(raw, uint16(id)) {
						t.Fatalf("datagram %d: %v, or a wrong ICRC", i, err)
					}
					want := netip.MustParseAddrPort(tc.b)
					if order[i].ah == c {
						want = netip.MustParseAddrPort(tc.c)
					}
					if dst != want || p.DestQP != order[i].qpn || !bytes.Equal(p.Payload, a.mr.Bytes()[i*size:][:size]) {
						t.Errorf("datagram %d went to %v at %v", i, p.DestQP, dst)
					}
					i++
				}
			}
			if i != len(order) || len(a.pipe.sent) != 5 {
				t.Errorf("%d datagrams in %d sends, want %d in 5", i, len(a.pipe.sent), len(order))
			}
			if n := a.lane.Len(); n != len(order) {
				t.Errorf("%d completions", n)
			}
		})
	}
}

// TestDatagramsFromAnybody: more senders than the cache has places, each with its own run of
// Identifications; all arrive, with the sender's address in the GRH.
func TestDatagramsFromAnybody(t *testing.T) {
	b := newUDEnd(t, "10.0.0.2:4791", 2)
	for i := range 200 {
		b.recv(t, i*128, 128)
	}
	for round := range 2 {
		for i := range 100 {
			from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), uint16(4791+i%3))
			p := roce.Packet{
				BTH:  roce.BTH{Opcode: roce.UDSendOnly, PKey: roce.DefaultPKey, DestQP: b.qp.Num(), PSN: 5},
				DETH: roce.DETH{QKey: 7, SrcQP: verbs.QPN(100 + i)}, Payload: binary.BigEndian.AppendUint32(nil, uint32(i)),
			}
			b.inject(&p, from, b.pipe.addr, uint16(i*600+round))
		}
		b.w.Step(0)
		b.w.Step(0)
	}
	var wc [256]verbs.WC
	n := b.lane.Poll(wc[:])
	if n != 200 {
		t.Fatalf("%d of 200 arrived; wrong ICRC: %d", n, b.w.Counters.DropICRC.Load())
	}
	for i, c := range wc[:n] {
		buf := b.mr.Bytes()[c.WRID:][:128]
		from, to, ok := roce.GRHAddrs(buf)
		want := netip.AddrFrom4([4]byte{10, 1, 0, byte(i % 100)})
		if !ok || from != want || to != b.pipe.addr.Addr() || c.ByteLen != 44 || c.SrcQPN != verbs.QPN(100+i%100) ||
			binary.BigEndian.Uint32(buf[40:]) != uint32(i%100) {
			t.Fatalf("datagram %d: from %v to %v, %+v", i, from, to, c)
		}
	}
}

// inject leaves a packet in the end's inbox, with the ICRC of an Identification.
func (e *end) inject(p *roce.Packet, from, to netip.AddrPort, id uint16) {
	p.Pad = roce.PadCount(len(p.Payload))
	raw := append(p.Append(nil), 0, 0, 0, 0)
	path := roce.NewPath(from, to)
	roce.PutICRC(raw[len(raw)-4:], path.ICRC(raw[:len(raw)-4], id))
	e.pipe.inbox = append(e.pipe.inbox, link.Rx{Buf: raw, Src: from, Dst: to.Addr()})
}

// TestDatagramDrops: what the wire itself does not let through to a UD queue pair.
func TestDatagramDrops(t *testing.T) {
	b := newUDEnd(t, "10.0.0.2:4791", 2)
	b.recv(t, 0, 128)
	c := &b.w.Counters
	from := netip.MustParseAddrPort("10.0.0.9:4791")
	good := func() *roce.Packet {
		return &roce.Packet{BTH: roce.BTH{Opcode: roce.UDSendOnly, PKey: roce.DefaultPKey, DestQP: b.qp.Num()}, DETH: roce.DETH{QKey: 7, SrcQP: 20}}
	}
	p := good()
	p.Opcode = roce.RCSendOnly
	b.inject(p, from, b.pipe.addr, 0)
	p.Opcode = roce.UCSendOnly
	b.inject(p, from, b.pipe.addr, 0)
	b.inject(good(), from, netip.MustParseAddrPort("224.0.0.9:4791"), 0)
	b.inject(good(), from, b.pipe.addr, 0)
	b.pipe.inbox[3].Buf[20] ^= 1
	b.inject(good(), from, b.pipe.addr, 0)
	b.pipe.inbox[4].Src = netip.MustParseAddrPort("[fd00::9]:4791")
	b.w.Step(0)
	if c.DropTransport.Load() != 2 || c.DropAddress.Load() != 2 || c.DropICRC.Load() != 1 || b.lane.Len() != 0 {
		t.Errorf("transport %d, address %d, ICRC %d, completions %d",
			c.DropTransport.Load(), c.DropAddress.Load(), c.DropICRC.Load(), b.lane.Len())
	}
	b.inject(good(), from, b.pipe.addr, 0)
	b.w.Step(0)
	if b.lane.Len() != 1 || len(b.pipe.sent) != 0 {
		t.Errorf("%d completions, %d answers", b.lane.Len(), len(b.pipe.sent))
	}
}

// TestAddressHandles: numbers are not used again soon, destroyed and foreign ones name
// nothing, and a table that is full says so.
func TestAddressHandles(t *testing.T) {
	a := newUDEnd(t, "10.0.0.1:4791", 1)
	a.w.ahs.max = 8
	seen := map[verbs.AH]bool{0: true}
	for range 100 {
		ah := a.ah(t, "10.0.0.2:0")
		if seen[ah] {
			t.Fatalf("handle %#x came back", uint32(ah))
		}
		seen[ah] = true
		if h := a.w.ahs.find(ah); h == nil || h.dst.Port() != roce.Port || h.src != a.pipe.addr.Addr() || h.mtu != 4096 {
			t.Fatalf("handle %#x: %+v", uint32(ah), h)
		}
		if err := a.w.DestroyAH(ah); err != nil {
			t.Fatal(err)
		}
		if err := a.w.DestroyAH(ah); !errors.Is(err, verbs.ErrBadAttr) {
			t.Fatalf("destroyed twice: %v", err)
		}
	}
	var first verbs.AH
	for i := range 8 {
		if ah := a.ah(t, "10.0.0.2:0"); i == 0 {
			first = ah
		}
	}
	if _, err := a.w.CreateAH(1, verbs.AV{Remote: netip.MustParseAddrPort("10.0.0.2:0")}, 0); !errors.Is(err, ErrNoAH) {
		t.Errorf("a ninth of eight: %v", err)
	}
	if _, ok := a.w.ahs.AddressHandle(2, first); ok {
		t.Error("a handle of another domain can be used")
	}
	for _, ah := range []verbs.AH{0, 9, MaxAH, 1<<32 - 1, first + 1<<ahSlotBits} {
		if _, ok := a.w.ahs.AddressHandle(1, ah); ok {
			t.Errorf("handle %#x exists", uint32(ah))
		}
	}
	for _, to := range []string{"0.0.0.0:1", "[fd00::1]:1"} {
		if _, err := a.w.CreateAH(1, verbs.AV{Remote: netip.MustParseAddrPort(to)}, 0); !errors.Is(err, verbs.ErrBadAttr) {
			t.Errorf("to %s: %v", to, err)
		}
	}
	narrow, err := newUDEnd(t, "10.0.0.1:4791", 1).w.CreateAH(1, verbs.AV{Remote: netip.MustParseAddrPort("10.0.0.2:0")}, verbs.MTU256)
	if err != nil || narrow == 0 {
		t.Error(err)
	}
	// A request whose handle is gone fails, and the send queue with it.
	if err := a.w.DestroyAH(first); err != nil {
		t.Fatal(err)
	}
	a.datagram(t, first, 20, 0, 10)
	a.w.Step(0)
	var wc [2]verbs.WC
	if n := a.lane.Poll(wc[:]); n != 1 || wc[0].Status != verbs.LocQPOpErr || a.qp.State() != verbs.QPSQE {
		t.Errorf("%d completions, %v, state %v", n, wc[0].Status, a.qp.State())
	}
}

// TestBlockedLinkUnreliable: sends complete although the link does not take them, the program
// uses its memory again, and what leaves later is what was sent.
func TestBlockedLinkUnreliable(t *testing.T) {
	a, b := newUDEnd(t, "10.0.0.1:4791", 1), newUDEnd(t, "10.0.0.2:4791", 2)
	a.pipe.peer = b.pipe
	a.pipe.accept = func(int) int { return 0 }
	b.recv(t, 0, 4096)
	copy(a.mr.Bytes(), bytes.Repeat([]byte{1}, 2000))
	a.datagram(t, a.ah(t, "10.0.0.2:0"), b.qp.Num(), 0, 2000)
	a.w.Step(0)
	if a.lane.Len() != 1 {
		t.Fatal("the send did not complete")
	}
	clear(a.mr.Bytes()[:2000])
	a.pipe.accept = nil
	now := a.w.tx.deadline()
	settle(t, &now, a, b)
	if b.lane.Len() != 1 || !bytes.Equal(b.mr.Bytes()[40:][:2000], bytes.Repeat([]byte{1}, 2000)) {
		t.Errorf("%d arrived, wrong ICRC %d", b.lane.Len(), b.w.Counters.DropICRC.Load())
	}
}

// TestUnreliableTurns: what is left of a deep queue of UC or UD after a turn waits for the next
// step, asks for that one unless the link is blocked, and has all left in the end.
func TestUnreliableTurns(t *testing.T) {
	const messages, size = 256, 64 << 10
	for _, typ := range []verbs.QPType{verbs.UC, verbs.UD} {
		t.Run(typ.String(), func(t *testing.T) {
			a := newUDEnd(t, "10.0.0.1:4791", 1)
			ah := a.ah(t, "10.0.0.2:0")
			post := func() { a.datagram(t, ah, 77, 0, 4096) }
			n := messages
			if typ == verbs.UC {
				a.useType(t, typ)
				a.to(t, typ, verbs.QPRTS)
				post = func() { a.send(t, 0, size) }
				n *= size / 1024
			}
			for range messages {
				post()
			}
			now := verbs.Instant(5)
			sent := func() int { return int(a.w.QPCounters().PacketsSent.Load()) }
			for steps, before := 0, 0; before < n; before = sent() {
				if steps++; steps%2 == 0 {
					a.w.Step(now)
				} else {
					a.w.Transmit(now)
				}
				turn := sent() - before
				if turn < 1 || turn > packetsEach {
					t.Fatalf("step %d sends %d packets", steps, turn)
				}
				if due := a.w.NextDeadline() <= now; sent() < n && (!a.w.Pending() || !due) {
					t.Fatalf("after step %d: pending %v, due %v", steps, a.w.Pending(), due)
				}
				a.pipe.sent = nil
				now++
			}
			if a.w.Step(now); a.w.Pending() || a.w.NextDeadline() <= now {
				t.Error("there is always more to do")
			}
			// A blocked link is tried again in a while, not at once.
			a.lane.Poll(make([]verbs.WC, messages))
			for range messages {
				post()
			}
			taken := 0
			a.pipe.accept = func(n int) int { n = min(n, 3-taken); taken += n; return n }
			a.w.Step(now)
			if next := a.w.NextDeadline(); a.w.Pending() || next != now.Add(retryBlocked) {
				t.Errorf("blocked: pending %v, due in %v", a.w.Pending(), next.Sub(now))
			}
			a.pipe.accept = nil
			for range 2 * n { // one packet a step is enough
				now = now.Add(retryBlocked)
				a.w.Step(now)
				a.pipe.sent = nil
			}
			if sent() != 2*n || a.lane.Len() != messages {
				t.Errorf("%d packets sent, want %d; %d completions", sent(), 2*n, a.lane.Len())
			}
		})
	}
}

// TestUnreliableAllocatesNothing: a UD message, sent and received.
func TestUnreliableAllocatesNothing(t *testing.T) {
	a, b := newUDEnd(t, "10.0.0.1:4791", 1), newUDEnd(t, "10.0.0.2:4791", 2)
	ah := a.ah(t, "10.0.0.2:0")
	rx := make([]link.Rx, 1)
	wrs := []verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: a.sgl(0, 100), AH: ah, RemoteQPN: b.qp.Num(), RemoteQKey: 7}}
	recv := []verbs.RecvWR{{SGList: b.sgl(0, 4096)}}
	a.datagram(t, ah, b.qp.Num(), 0, 100)
	a.w.Step(0)
	rx[0] = a.pipe.sent[0]
	a.pipe.sent = nil
	a.w.link, b.w.link = sink{a.pipe}, sink{b.pipe}
	var wc [4]verbs.WC
	got := 0
	allocs := testing.AllocsPerRun(200, func() {
		_, _, _ = a.qp.Engine().PostSend(wrs)
		a.w.Ring(a.qp)
		a.w.Step(0)
		a.lane.Poll(wc[:])
		_, _, _ = b.qp.Engine().PostRecv(recv)
		b.pipe.inbox = rx
		b.w.Step(0)
		b.w.Step(0)
		got += b.lane.Poll(wc[:])
	})
	if allocs != 0 || got < 200 {
		t.Errorf("%v allocations a message, %d received", allocs, got)
	}
}

// sink takes what is sent without keeping it.
type sink struct{ *pipe }

func (sink) Send(msgs []link.Tx) (int, error) { return len(msgs), nil }

// TestEveryOpcode: F44: all 256 opcodes in several lengths, to every kind of queue pair number
// and every type and state of queue pair, with a good ICRC and a bad one. Nothing breaks, and
// an unreliable queue pair never answers.
func TestEveryOpcode(t *testing.T) {
	from := netip.MustParseAddrPort("10.0.0.1:4791")
	for _, typ := range []verbs.QPType{verbs.RC, verbs.UC, verbs.UD} {
		for _, state := range []verbs.QPState{verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPRTS, verbs.QPErr} {
			t.Run(fmt.Sprintf("%v in %v", typ, state), func(t *testing.T) {
				for op := range 256 {
					b := newEnd(t, "10.0.0.2:4791", 2)
					b.useType(t, typ)
					b.to(t, typ, state)
					for i := range 20 {
						b.recv0(i * 4096)
					}
					for _, qpn := range []verbs.QPN{0, 1, b.qp.Num(), verbs.QPNMulticast} {
						for _, n := range []int{12, 16, 28, 48, 64, 1500} {
							raw := make([]byte, n)
							raw[0] = byte(op)
							binary.BigEndian.PutUint16(raw[2:], roce.DefaultPKey)
							binary.BigEndian.PutUint32(raw[4:], uint32(qpn))
							raw[11] = 100 // PSN
							if n > 16 {
								raw[15] = 7 // Q_Key
							}
							path := roce.NewPath(from, b.pipe.addr)
							roce.PutICRC(raw[n-4:], path.ICRC(raw[:max(n-4, 12)], 0))
							bad := bytes.Clone(raw)
							bad[n-1] ^= 0x55
							bad[n-2] ^= 0x5a
							for _, buf := range [][]byte{bad, raw} {
								b.pipe.inbox = append(b.pipe.inbox, link.Rx{Buf: buf, Src: from, Dst: b.pipe.addr.Addr()})
								b.w.Step(0)
								b.w.Step(0)
							}
						}
					}
					for _, rx := range b.pipe.sent {
						var p roce.Packet
						if err := p.Decode(rx.Buf); err != nil || typ != verbs.RC || state != verbs.QPRTR && state != verbs.QPRTS {
							t.Fatalf("opcode %#x: answered with %v (%v)", op, p.Opcode, err)
						}
					}
				}
			})
		}
	}
}

func (e *end) recv0(off int) {
	_, _, _ = e.qp.Engine().PostRecv([]verbs.RecvWR{{SGList: e.sgl(off, 4096)}})
}

// to moves the end's queue pair, of a type, from RESET to a state; its peer is 10.0.0.1.
func (e *end) to(t *testing.T, typ verbs.QPType, state verbs.QPState) {
	t.Helper()
	init := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags, State: verbs.QPInit, Port: 1, AccessFlags: verbs.RemoteWrite}
	rtr := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN,
		State: verbs.QPRTR, AV: verbs.AV{Remote: netip.MustParseAddrPort("10.0.0.1:0")}, PathMTU: verbs.MTU1024, DestQPN: 30, RQPSN: 100, MinRNRTimer: 1,
	}
	rts := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS, SQPSN: 100, Timeout: 14}
	switch typ {
	case verbs.RC:
		rtr.Mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer
		rts.Mask |= verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic
	case verbs.UD:
		init.Mask ^= verbs.AttrAccessFlags | verbs.AttrQKey
		init.QKey = 7
		rtr.Mask = verbs.AttrState
	}
	for _, a := range []verbs.QPAttr{init, rtr, rts, {Mask: verbs.AttrState, State: verbs.QPErr}} {
		if a.State > state {
			break
		}
		e.modify(t, a)
	}
}

// TestSendErrorFlushesByItself: what was posted behind a send that fails is flushed without a
// packet, a post or a call that would make the wire look again.
func TestSendErrorFlushesByItself(t *testing.T) {
	for _, bad := range []verbs.SendWR{
		{Opcode: verbs.Send, SGList: []verbs.SGE{{Addr: 1, Length: 1, LKey: 1}}},
		{Opcode: verbs.BindMW},
	} {
		a := newEnd(t, "10.0.0.1:4791", 1)
		a.useType(t, verbs.UC)
		a.to(t, verbs.UC, verbs.QPRTS)
		good := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: a.sgl(0, 10)}
		wrs := []verbs.SendWR{good, bad}
		for range 200 {
			wrs = append(wrs, good)
		}
		if _, ring, err := a.qp.Engine().PostSend(wrs); err != nil || !ring {
			t.Fatal(ring, err)
		}
		a.w.Ring(a.qp)
		var now verbs.Instant
		for range 100 {
			if !a.w.Pending() && a.w.NextDeadline() > now {
				break
			}
			a.w.Step(now)
		}
		if n := a.lane.Len(); n != len(wrs) || a.qp.State() != verbs.QPSQE {
			t.Errorf("%v: %d of %d completed, state %v", bad.Opcode, n, len(wrs), a.qp.State())
		}
	}
}

// TestLocalOperationsAmongSends: a bind on UC is done in its place, and what is behind it
// leaves without anything that would make the wire look again.
func TestLocalOperationsAmongSends(t *testing.T) {
	a := newEnd(t, "10.0.0.1:4791", 1)
	a.useType(t, verbs.UC)
	a.to(t, verbs.UC, verbs.QPRTS)
	r, err := a.mrs.Register(1, make([]byte, 4096), verbs.LocalWrite|verbs.MWBind)
	if err != nil {
		t.Fatal(err)
	}
	w, err := a.mrs.AllocWindow(1)
	if err != nil {
		t.Fatal(err)
	}
	good := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: a.sgl(0, 10)}
	bind := verbs.SendWR{
		Opcode: verbs.BindMW, Flags: verbs.Signaled, RKey: w.Key() ^ 1, BindAccess: verbs.RemoteWrite,
		SGList: []verbs.SGE{{Addr: r.Addr(), Length: 100, LKey: r.Key()}},
	}
	unbind := bind
	unbind.RKey, unbind.SGList = bind.RKey^2, nil
	wrs := []verbs.SendWR{good, bind, unbind, good, good}
	if _, _, err := a.qp.Engine().PostSend(wrs); err != nil {
		t.Fatal(err)
	}
	a.w.Ring(a.qp)
	for a.w.Pending() {
		a.w.Step(0)
	}
	var wc [8]verbs.WC
	n := a.lane.Poll(wc[:])
	for _, c := range wc[:n] {
		if c.Status != verbs.WCSuccess {
			t.Errorf("%v: %v", c.Opcode, c.Status)
		}
	}
	datagrams := a.w.Counters.DatagramsOut.Load()
	if n != len(wrs) || datagrams != 3 {
		t.Errorf("%d of %d completed, %d packets sent", n, len(wrs), datagrams)
	}
}

// TestSources: the cache never answers with another's path, whoever had the place before.
func TestSources(t *testing.T) {
	var c sources
	to := [2]netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")}
	for i := range 5000 {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 1, byte(i % 3)}), uint16(4791+i%7))
		s := c.find(from, to[i%2], 4791)
		if want := roce.NewPath(from, netip.AddrPortFrom(to[i%2], 4791)); s.path != want {
			t.Fatalf("%v to %v: another's path", from, to[i%2])
		}
		if i%11 == 0 {
			c.seed += 1 << 48 // as if others had come and gone: ports move to other places
		}
	}
}
