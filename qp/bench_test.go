package qp

import (
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// flatMem is one region, for benchmarks: looking a key up costs next to nothing.
type flatMem struct{ buf []byte }

func (m *flatMem) Local(_ PD, _ uint32, addr uint64, n uint32, _ verbs.Access) ([]byte, verbs.WCStatus) {
	if addr > uint64(len(m.buf)) || uint64(n) > uint64(len(m.buf))-addr {
		return nil, verbs.LocProtErr
	}
	return m.buf[addr:][:n:n], verbs.WCSuccess
}

func (m *flatMem) Remote(pd PD, _ verbs.QPN, key uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	return m.Local(pd, key, addr, n, need)
}
func (m *flatMem) Placed(PD, uint32) {}
func (m *flatMem) CompareSwap(PD, verbs.QPN, uint32, uint64, uint64, uint64) (uint64, verbs.WCStatus) {
	return 0, verbs.WCSuccess
}
func (m *flatMem) FetchAdd(PD, verbs.QPN, uint32, uint64, uint64) (uint64, verbs.WCStatus) {
	return 0, verbs.WCSuccess
}
func (m *flatMem) Invalidate(PD, verbs.QPN, uint32) bool { return true }
func (m *flatMem) Bind(PD, verbs.QPN, *Bind) bool        { return true }

// loop is two engines back to back without a wire: what one sends, the other takes in.
type loop struct {
	p    *pair
	a, b *node
	out  Out
	wcs  [256]verbs.WC
}

func newLoop(tb testing.TB, o options) *loop {
	o.window = WindowConfig{Initial: 16 << 20, Max: 16 << 20, PSNs: 1 << 16, Reads: 4 << 20, Trains: true}
	o.cq = 4096
	p := newPair(tb, o)
	l := &loop{p: p, a: p.a, b: p.b}
	for _, n := range []*node{p.a, p.b} {
		m := &flatMem{buf: make([]byte, 1<<21)}
		n.env.Mem, n.q.sq.mem = m, m
	}
	return l
}

// carry moves everything that from has to send to its peer and returns how many packets.
func (l *loop) carry(from *node) (n int) {
	l.p.now += 1000
	for from.q.Service(l.p.now) {
	}
	for from.q.NextPacket(l.p.now, &l.out) == NextPacket {
		if l.out.N > 0 {
			l.out.Packet.Payload = l.out.Gather[0]
		}
		from.peer.q.HandlePacket(l.p.now, &l.out.Packet)
		from.q.Sent(l.p.now)
		n++
	}
	for _, c := range from.env.Dirty {
		c.Commit()
	}
	from.env.Dirty = from.env.Dirty[:0]
	return n
}

// turn carries until nothing moves and returns the completions on both sides.
func (l *loop) turn() (a, b int) {
	for l.carry(l.a)+l.carry(l.b) > 0 {
	}
	for _, n := range []*node{l.a, l.b} {
		for _, c := range n.env.Dirty {
			c.Commit()
		}
		n.env.Dirty = n.env.Dirty[:0]
	}
	a = l.a.cq.Poll(l.wcs[:])
	b = l.b.cq.Poll(l.wcs[:])
	return a, b
}

// stream sends batches of messages of size bytes.
func stream(b *testing.B, size, batch int, op verbs.Opcode) {
	l := newLoop(b, options{mtu: verbs.MTU4096, rdAtomic: 16})
	sends := make([]verbs.SendWR, batch)
	recvs := make([]verbs.RecvWR, batch)
	for i := range sends {
		sends[i] = verbs.SendWR{Opcode: op, SGList: []verbs.SGE{{Addr: uint64(i * size), Length: uint32(size)}}}
		recvs[i] = verbs.RecvWR{SGList: []verbs.SGE{{Addr: 1<<20 + uint64(i*size), Length: uint32(size)}}}
		sends[i].RemoteAddr = 1<<20 + uint64(i*size)
	}
	sends[batch-1].Flags = verbs.Signaled
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	for done := 0; done < b.N; done += batch {
		if op == verbs.Send {
			if _, _, err := l.b.q.PostRecv(recvs); err != nil {
				b.Fatal(err)
			}
		}
		if _, _, err := l.a.q.PostSend(sends); err != nil {
			b.Fatal(err)
		}
		x, y := l.turn()
		if x != 1 || op == verbs.Send && y != batch {
			b.Fatalf("%d and %d completions", x, y)
		}
	}
	if n := l.a.env.Counters.Retransmits.Load(); n != 0 {
		b.Fatalf("%d retransmissions", n)
	}
}

func BenchmarkEngineSendRecv64(b *testing.B)   { stream(b, 64, 32, verbs.Send) }
func BenchmarkEngineSendRecv64x1(b *testing.B) { stream(b, 64, 1, verbs.Send) }
func BenchmarkEngineStream64K(b *testing.B)    { stream(b, 65536, 4, verbs.Send) }
func BenchmarkEngineWrite64K(b *testing.B)     { stream(b, 65536, 4, verbs.RDMAWrite) }
func BenchmarkEngineRead64K(b *testing.B)      { stream(b, 65536, 4, verbs.RDMARead) }

// The data path allocates nothing, whatever the operation.
func TestNoAllocations(t *testing.T) {
	for _, op := range []verbs.Opcode{verbs.Send, verbs.RDMAWrite, verbs.RDMARead, verbs.AtomicFetchAdd} {
		l := newLoop(t, options{mtu: verbs.MTU1024})
		size := uint32(5000)
		if op == verbs.AtomicFetchAdd {
			size = 8
		}
		wr := []verbs.SendWR{{Opcode: op, Flags: verbs.Signaled, SGList: []verbs.SGE{{Length: size}}, RemoteAddr: 8192}}
		recv := []verbs.RecvWR{{SGList: []verbs.SGE{{Addr: 8192, Length: size}}}}
		inline := []verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: []byte("a few bytes")}}
		step := func() {
			want := 1
			for _, err := range []error{
				func() error { _, _, err := l.b.q.PostRecv(recv); return err }(),
				func() error { _, _, err := l.a.q.PostSend(wr); return err }(),
			} {
				if err != nil {
					t.Fatal(err)
				}
			}
			if op == verbs.Send {
				if _, _, err := l.b.q.PostRecv(recv); err != nil {
					t.Fatal(err)
				}
				if _, _, err := l.a.q.PostSend(inline); err != nil {
					t.Fatal(err)
				}
				want = 2
			}
			if a, _ := l.turn(); a != want {
				t.Fatalf("%v: %d completions, want %d", op, a, want)
			}
			if op != verbs.Send {
				l.b.q.rq.take()
				l.b.q.rq.retire(1)
			}
		}
		if n := testing.AllocsPerRun(200, step); n != 0 {
			t.Errorf("%v: %v allocations per operation", op, n)
		}
	}
}
