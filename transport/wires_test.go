package transport_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/net/bpf"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// several opens a device with several wires, where there are such.
func several(t *testing.T, addr string, wires int, cfg transport.Config) *transport.Device {
	t.Helper()
	if wires > 1 && !transport.Direct {
		t.Skip("this system has one socket for each port")
	}
	cfg.Wires = wires
	return open(t, addr, cfg)
}

func TestWiresConfig(t *testing.T) {
	for _, n := range []int{-1, 3, 6, 32} {
		if _, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.80.1:4791"), Wires: n}); err == nil {
			t.Errorf("%d wires: no error", n)
		}
	}
	d, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.80.1:4791"), Wires: 16})
	if transport.Direct {
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	} else if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v, want one that is errors.ErrUnsupported", err)
	}
}

// The kernel's program and the wires agree on whose a datagram is, whatever is in it.
func TestSteering(t *testing.T) {
	const seed = 3
	rnd := rand.New(rand.NewPCG(seed, 0))
	attrs := []roce.AttrID{roce.AttrREQ, roce.AttrREJ, roce.AttrREP, roce.AttrRTU, roce.AttrSIDRReq, roce.AttrSIDRRep, 0xFFFF}
	for _, wires := range []int{2, 4, 16} {
		raw := transport.Steering(wires)
		prog, ok := bpf.Disassemble(raw)
		if !ok {
			t.Fatal("the program cannot be disassembled")
		}
		vm, err := bpf.NewVM(prog)
		if err != nil {
			t.Fatal(err)
		}
		seen := make(map[int]int)
		for i := range 20000 {
			b := make([]byte, rnd.IntN(300))
			for i := range b {
				b[i] = byte(rnd.Uint32())
			}
			if i%2 == 0 && len(b) >= 40 { // a MAD
				binary.BigEndian.PutUint32(b[4:], 0xAB000001)
				binary.BigEndian.PutUint16(b[36:], uint16(attrs[rnd.IntN(len(attrs))]))
				if len(b) >= 52 && rnd.IntN(3) == 0 {
					clear(b[48:52])
				}
			}
			want := transport.Owner(b, wires)
			if got, err := vm.Run(b); err != nil || got != want {
				t.Fatalf("seed %d: % x: the program says %d, %v; want %d", seed, b, got, err, want)
			}
			seen[want]++
		}
		if len(seen) != wires {
			t.Errorf("of %d wires only %v were chosen", wires, seen)
		}
	}
}

// crowd is several connections between two devices whose ends share a completion queue on each
// side and a shared receive queue on the passive one.
type crowd struct {
	ctx      context.Context
	a, b     *transport.Device
	am, bm   *transport.MR
	acq, bcq *transport.CQ
	srq      *transport.SRQ
	qa, qb   []*transport.QP
}

const crowdRoom = 256 // bytes of memory for each message

func newCrowd(t *testing.T, a, b *transport.Device, n, recvs int) *crowd {
	t.Helper()
	c := &crowd{
		ctx: deadline(t), a: a, b: b, am: register(t, a, n*crowdRoom, verbs.LocalWrite),
		bm:  register(t, b, (n+recvs)*crowdRoom, verbs.LocalWrite|verbs.RemoteWrite|verbs.RemoteRead|verbs.RemoteAtomic),
		acq: createCQ(t, a, 4096), bcq: createCQ(t, b, 4096), srq: createSRQ(t, b.PD(), transport.SRQConfig{MaxWR: recvs}),
	}
	for i := range recvs {
		if err := c.srq.PostRecv(verbs.RecvWR{WRID: uint64(i), SGList: c.bm.SGL((n+i)*crowdRoom, crowdRoom)}); err != nil {
			t.Fatal(err)
		}
	}
	for range n {
		qa, qb := pair(t, a, b, transport.ConnParam{SendCQ: c.acq, RecvCQ: c.acq}, transport.ConnParam{SendCQ: c.bcq, RecvCQ: c.bcq, SRQ: c.srq})
		c.qa, c.qb = append(c.qa, qa), append(c.qb, qb)
	}
	return c
}

// exchange has every connection do everything that there is, many times, and checks it all.
func (c *crowd) exchange(t *testing.T, rounds int) {
	t.Helper()
	const kinds = 4 // of requests, in this order
	for i := range c.qa {
		copy(c.am.Bytes()[i*crowdRoom:], fmt.Sprintf("connection %3d", i))
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		// Messages of one connection arrive in order.
		next := make(map[verbs.QPN]uint32)
		for range rounds * len(c.qa) {
			wc, err := c.bcq.Next(c.ctx)
			if err != nil || wc.ImmData != next[wc.QPN] {
				t.Errorf("received %+v, %v; want message %d", wc, err, next[wc.QPN])
				return
			}
			next[wc.QPN]++
			err = c.srq.PostRecv(verbs.RecvWR{WRID: wc.WRID, SGList: c.bm.SGL((len(c.qa)+int(wc.WRID))*crowdRoom, crowdRoom)})
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	done := make([]int, len(c.qa))
	number := make(map[verbs.QPN]int)
	posted := 0
	postAll := func(i, round int) {
		remote := c.bm.Addr() + uint64(i*crowdRoom)
		for k, wr := range []verbs.SendWR{
			{Opcode: verbs.SendWithImm, ImmData: uint32(round), SGList: c.am.SGL(i*crowdRoom, 16)},
			{Opcode: verbs.RDMAWrite, SGList: c.am.SGL(i*crowdRoom, 64), RemoteAddr: remote, RKey: c.bm.RKey()},
			{Opcode: verbs.RDMARead, SGList: c.am.SGL(i*crowdRoom+64, 64), RemoteAddr: remote, RKey: c.bm.RKey()},
			{Opcode: verbs.AtomicFetchAdd, SGList: c.am.SGL(i*crowdRoom+128, 8), RemoteAddr: remote + 128, RKey: c.bm.RKey(), CompareAdd: 1},
		} {
			wr.WRID, wr.Flags = uint64(round*kinds+k), verbs.Signaled
			if err := c.qa[i].PostSend(wr); err != nil {
				t.Fatal(err)
			}
			posted++
		}
	}
	for i, q := range c.qa {
		number[q.Num()] = i
		postAll(i, 0)
	}
	for completed := 0; completed < posted; completed++ {
		wc, err := c.acq.Next(c.ctx)
		if err != nil {
			t.Fatalf("%+v: %v", wc, err)
		}
		i := number[wc.QPN]
		if wc.WRID != uint64(done[i]) {
			t.Fatalf("connection %d: request %d completed, want %d", i, wc.WRID, done[i])
		}
		if done[i]++; done[i]%kinds == 0 && done[i]/kinds < rounds {
			postAll(i, done[i]/kinds)
		}
	}
	wg.Wait()
	for i := range c.qa {
		// The last addition brought back what the others had made.
		sum := binary.NativeEndian.Uint64(c.am.Bytes()[i*crowdRoom+128:]) + 1
		if want := fmt.Sprintf("connection %3d", i); sum != uint64(rounds) || string(c.am.Bytes()[i*crowdRoom+64:][:len(want)]) != want {
			t.Errorf("connection %d: %d atomics, read back %q", i, sum, c.am.Bytes()[i*crowdRoom+64:][:16])
		}
	}
}

// TestWires: connections on all wires, sharing queues, do everything, in order; the other device
// may have as many wires, or one.
func TestWires(t *testing.T) {
	for i, tc := range []struct{ a, b int }{{4, 4}, {1, 4}, {4, 1}, {2, 4}} {
		t.Run(fmt.Sprintf("%d and %d", tc.a, tc.b), func(t *testing.T) {
			a := several(t, fmt.Sprintf("127.1.81.%d", 2*i+1), tc.a, transport.Config{})
			b := several(t, fmt.Sprintf("127.1.81.%d", 2*i+2), tc.b, transport.Config{})
			c := newCrowd(t, a, b, 8, 64)
			on := make(map[int]int)
			for _, q := range c.qa {
				on[transport.WireOf(q)]++
			}
			if len(on) != tc.a {
				t.Errorf("8 connections are on wires %v", on)
			}
			if tc.a == tc.b {
				for i, q := range c.qa {
					if transport.WireOf(q) != transport.WireOf(c.qb[i]) {
						t.Errorf("connection %d: wire %d has %d as its peer", i, transport.WireOf(q), transport.WireOf(c.qb[i]))
					}
				}
			}
			c.exchange(t, 50)
			for _, d := range []*transport.Device{a, b} {
				if n := d.Counters()["wire_misdirected"]; n != 0 {
					t.Errorf("%d datagrams arrived at the wrong socket", n)
				}
			}
			for i := range c.qa {
				if err := errors.Join(c.qa[i].Close(), c.qb[i].Wait(c.ctx)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestMisdirected: the system chooses the wrong socket, for all, or gives all to one, and what
// arrives is handed over. Nothing is lost by that, connecting included.
func TestMisdirected(t *testing.T) {
	for i, tc := range []struct {
		name string
		prog []bpf.Instruction
	}{
		{"all to one", []bpf.Instruction{bpf.RetConstant{Val: 0}}},
		{"to another", []bpf.Instruction{
			bpf.LoadAbsolute{Off: 4, Size: 4},
			bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 20},
			bpf.ALUOpConstant{Op: bpf.ALUOpAdd, Val: 1},
			bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 3},
			bpf.RetA{},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := several(t, fmt.Sprintf("127.1.82.%d", 2*i+1), 4, transport.Config{})
			b := several(t, fmt.Sprintf("127.1.82.%d", 2*i+2), 4, transport.Config{})
			prog, err := bpf.Assemble(tc.prog)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range []*transport.Device{a, b} {
				if err := transport.Steer(d, prog); err != nil {
					t.Fatal(err)
				}
			}
			c := newCrowd(t, a, b, 8, 64)
			c.exchange(t, 20)
			for _, d := range []*transport.Device{a, b} {
				if n := d.Counters()["wire_misdirected"]; n == 0 {
					t.Error("nothing was handed over")
				}
			}
		})
	}
}

// TestWiresPortInUse: a device with several wires has its port to itself, as one with one.
func TestWiresPortInUse(t *testing.T) {
	a := several(t, "127.1.83.1", 4, transport.Config{})
	for _, wires := range []int{1, 2} {
		if _, err := transport.Open(transport.Config{Bind: a.LocalAddr(), Wires: wires}); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("a second device with %d wires: %v", wires, err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	b := several(t, "127.1.83.1", 2, transport.Config{})
	if b.LocalAddr() != a.LocalAddr() {
		t.Errorf("bound %v", b.LocalAddr())
	}
}

// TestRawConnectionOfAnotherWire: a program makes its queue pair before it knows which wire has
// the request.
func TestRawConnectionOfAnotherWire(t *testing.T) {
	a, b := several(t, "127.1.84.1", 1, transport.Config{}), several(t, "127.1.84.2", 4, transport.Config{})
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	for range 8 {
		passive := rawQP(ctx, t, b)
		done := make(chan struct{})
		go func() {
			defer close(done)
			passive.passive(ln)
		}()
		id, err := a.CreateCMID(netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), transport.ConnParam{PrivateData: []byte("req")})
		if err != nil {
			t.Fatal(err)
		}
		active := rawQP(ctx, t, a)
		active.id = id
		active.init()
		if err := id.Connect(ctx, active.q); err != nil {
			t.Fatal(err)
		}
		<-done
		if t.Failed() {
			return
		}
		active.event(verbs.EventConnectResponse)
		active.move(verbs.QPRTR)
		active.move(verbs.QPRTS)
		if err := id.Establish([]byte("rtu")); err != nil {
			t.Fatal(err)
		}
		passive.event(verbs.EventEstablished)
		passive.move(verbs.QPRTS)
		active.post("request")
		passive.exchanged("request")
		active.exchanged("greeting")
		active.close()
		passive.event(verbs.EventDisconnected)
		passive.close()
	}
}

// TestCQOfSeveralWires: a lane that overflows ends the whole queue; resizing is for all lanes.
func TestCQOfSeveralWires(t *testing.T) {
	a, b := several(t, "127.1.85.1", 2, transport.Config{}), several(t, "127.1.85.2", 2, transport.Config{})
	c := newCrowd(t, a, b, 2, 16)
	send := func(i int) {
		t.Helper()
		if err := c.qa[i].PostSend(verbs.SendWR{Opcode: verbs.RDMAWrite, Flags: verbs.Signaled, SGList: c.am.SGL(i*crowdRoom, 8), RemoteAddr: c.bm.Addr() + uint64(i*crowdRoom), RKey: c.bm.RKey()}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 6 {
		send(i % 2)
	}
	waitFor(t, func() bool { return c.acq.Len() == 6 })
	if err := c.acq.Resize(5); err == nil {
		t.Error("6 completions fit into 5")
	}
	if err := c.acq.Resize(8); err != nil {
		t.Fatal(err)
	}
	if err := c.acq.Close(); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("close: %v", err)
	}
	for range 9 {
		send(0)
	}
	if e := event(t, a, verbs.EventCQErr); e.CQN != c.acq.Num() {
		t.Errorf("event %+v", e)
	}
	wcs := make([]verbs.WC, 32)
	err := c.acq.Wait(c.ctx)
	for ; err == nil; err = c.acq.Wait(c.ctx) {
		c.acq.Poll(wcs)
	}
	if !errors.Is(err, transport.ErrCQOverrun) {
		t.Errorf("wait: %v", err)
	}
	// The other wire hears of it, and its queue pair learns of it with its next completion.
	waitFor(t, func() bool {
		send(1)
		c.acq.Poll(wcs)
		return c.qa[1].State() == verbs.QPErr
	})
}

// TestWaiterLeavesTheSocket: who sleeps on the socket of the only wire that can bring anything
// must not go on doing so when another can.
func TestWaiterLeavesTheSocket(t *testing.T) {
	a, b := several(t, "127.1.86.1", 2, transport.Config{Spin: -1}), several(t, "127.1.86.2", 2, transport.Config{})
	ctx := deadline(t)
	acq := createCQ(t, a, 64)
	am, bm := register(t, a, 64, verbs.LocalWrite), register(t, b, 64, 0)
	recv := []verbs.RecvWR{{SGList: am.SGL(0, 64)}}
	pair(t, a, b, transport.ConnParam{SendCQ: acq, RecvCQ: acq, Recv: recv}, transport.ConnParam{})
	got := make(chan error, 1)
	go func() {
		wc, err := acq.Next(ctx)
		if err == nil && wc.ByteLen != 5 {
			err = fmt.Errorf("received %+v", wc)
		}
		got <- err
	}()
	waitFor(t, func() bool { return transport.Watched(a) })
	qa, qb := pair(t, a, b, transport.ConnParam{SendCQ: acq, RecvCQ: acq, Recv: recv}, transport.ConnParam{})
	if transport.WireOf(qa) == 0 {
		t.Fatal("the second queue pair is on the first wire")
	}
	waitFor(t, func() bool { return !transport.Watched(a) })
	want(t, "send", post(t, qb, verbs.SendWR{Opcode: verbs.Send, SGList: bm.SGL(0, 5)}), verbs.WCSuccess)
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

// TestCloseOfSeveralWires: a device is closed under load, and every peer is told.
func TestCloseOfSeveralWires(t *testing.T) {
	a, b := several(t, "127.1.87.1", 4, transport.Config{}), several(t, "127.1.87.2", 4, transport.Config{})
	c := newCrowd(t, a, b, 8, 64)
	var wg sync.WaitGroup
	for i, q := range c.qa {
		wg.Go(func() {
			for {
				err := q.PostSend(verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: c.am.SGL(i*crowdRoom, 64), RemoteAddr: c.bm.Addr() + uint64(i*crowdRoom), RKey: c.bm.RKey()})
				if err != nil && !errors.Is(err, verbs.ErrQueueFull) {
					return
				}
				if q.State() == verbs.QPErr {
					return
				}
				c.acq.Poll(make([]verbs.WC, 16))
			}
		})
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	for _, q := range c.qa {
		if err := q.Wait(c.ctx); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
}
