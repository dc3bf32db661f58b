package qp

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// A message of every interesting length arrives whole, once, in order, with each MTU.
func TestSendSegmentation(t *testing.T) {
	for mtu := verbs.MTU256; mtu <= verbs.MTU4096; mtu++ {
		t.Run(mtu.String(), func(t *testing.T) {
			m := mtu.Bytes()
			for _, size := range []int{0, 1, 3, m - 1, m, m + 1, 2*m - 1, 2 * m, 2*m + 1, 5*m + 3, 40 * m} {
				p := newPair(t, options{mtu: mtu, psnA: 0xfffffe})
				fill(p.a.send.buf[:size], 9)
				p.postRecv(p.b, 5, 0, size)
				p.post(p.a, sendWR(verbs.Send, 1, 0, size))
				p.run()
				p.wantWCs(p.a, "1:SEND")
				if got := p.b.wcs[0].ByteLen; got != uint32(size) {
					t.Errorf("%d bytes arrived as %d", size, got)
				}
				p.wantWCs(p.b, "5:RECV")
				if !matches(p.b.recv.buf[:size], 9) {
					t.Errorf("%d bytes arrived changed", size)
				}
				if n := p.a.env.Counters.Retransmits.Load(); n != 0 {
					t.Errorf("%d bytes took %d retransmissions", size, n)
				}
			}
		})
	}
}

func TestEveryOperation(t *testing.T) {
	for _, size := range []int{0, 1, 1024, 5000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			p := newPair(t, options{psnA: 0xffffff, psnB: 0x7fffff})
			fill(p.a.send.buf[:size], 3)
			fill(p.b.remote.buf[8192:][:size], 4)
			for i := range 4 {
				p.postRecv(p.b, uint64(100+i), i*8192, 8192)
			}
			imm := sendWR(verbs.SendWithImm, 2, 0, size)
			imm.ImmData = 0xfffffffe
			write := sendWR(verbs.RDMAWrite, 3, 0, size)
			wimm := sendWR(verbs.RDMAWriteWithImm, 4, 0, size)
			wimm.RemoteAddr += 16384
			wimm.ImmData = 77
			wimm.Flags |= verbs.Solicited
			read := sendWR(verbs.RDMARead, 5, 0, size)
			read.RemoteAddr += 8192
			cas := sendWR(verbs.AtomicCmpAndSwp, 6, 32768, 8)
			cas.RemoteAddr += 65536
			cas.Swap = 1 << 60
			add := sendWR(verbs.AtomicFetchAdd, 7, 32776, 8)
			add.RemoteAddr += 65536
			add.CompareAdd = 5
			inv := sendWR(verbs.SendWithInv, 8, 0, size)
			inv.InvalidateRKey = windowKey
			linv := verbs.SendWR{WRID: 9, Opcode: verbs.LocalInv, Flags: verbs.Signaled, InvalidateRKey: windowKey}
			p.post(p.a, sendWR(verbs.Send, 1, 0, size), imm, write, wimm, read, cas, add, inv, linv)
			p.run()
			for _, wc := range p.a.wcs {
				if wc.WRID == 5 && wc.ByteLen != uint32(size) {
					t.Errorf("READ of %d bytes completed with %d", size, wc.ByteLen)
				}
			}
			p.wantWCs(p.a, "1:SEND", "2:SEND", "3:RDMA_WRITE", "4:RDMA_WRITE", "5:RDMA_READ", "6:COMP_SWAP",
				"7:FETCH_ADD", "8:SEND", "9:LOCAL_INV")
			wcs := p.b.wcs
			if wcs[1].ImmData != 0xfffffffe || wcs[1].Flags != verbs.WithImm || wcs[2].ImmData != 77 ||
				wcs[2].Flags != verbs.WithImm|verbs.WithSolicited || wcs[2].ByteLen != uint32(size) ||
				wcs[3].InvalidatedRKey != windowKey || wcs[3].Flags != verbs.WithInv {
				t.Errorf("completions %+v", wcs)
			}
			p.wantWCs(p.b, "100:RECV", "101:RECV", "102:RECV_RDMA_WITH_IMM", "103:RECV")
			for i, b := range [][]byte{
				p.b.recv.buf[:size], p.b.recv.buf[8192:][:size], p.b.remote.buf[:size], p.b.remote.buf[16384:][:size],
			} {
				if !matches(b, 3) {
					t.Errorf("message %d changed", i)
				}
			}
			if !matches(p.a.recv.buf[:size], 4) {
				t.Error("READ returned other bytes")
			}
			if got := hostUint64(p.b.remote.buf[65536:]); got != 1<<60+5 {
				t.Errorf("atomics left %#x", got)
			}
			if a, b := hostUint64(p.a.recv.buf[32768:]), hostUint64(p.a.recv.buf[32776:]); a != 0 || b != 1<<60 {
				t.Errorf("atomics returned %#x, %#x", a, b)
			}
			if !p.b.window.dead || !p.a.window.dead {
				t.Error("a key was not invalidated")
			}
			if n := p.a.env.Counters.Retransmits.Load(); n != 0 {
				t.Errorf("%d retransmissions", n)
			}
		})
	}
}

// F26: PSNs wrap in every place a packet can be, also with loss there.
func TestPSNWrap(t *testing.T) {
	for _, psn := range []verbs.PSN{0xfffffa, 0xfffffe, 0xffffff, 0x7fffff, 0x800000, 0} {
		for drop := range 24 {
			p := newPair(t, options{psnA: psn, psnB: psn, retry: 7})
			fill(p.a.send.buf[:5000], 3)
			fill(p.b.remote.buf[8192:][:5000], 4)
			p.postRecv(p.b, 100, 0, 8192)
			read := sendWR(verbs.RDMARead, 3, 0, 5000)
			read.RemoteAddr += 8192
			add := sendWR(verbs.AtomicFetchAdd, 4, 32776, 8)
			add.RemoteAddr += 65536
			add.CompareAdd = 5
			p.post(p.a, sendWR(verbs.Send, 1, 0, 5000), sendWR(verbs.RDMAWrite, 2, 0, 3000), read, add)
			n := 0
			lossy(p, func(*node) bool { n++; return n == drop+1 })
			p.wantWCs(p.a, "1:SEND", "2:RDMA_WRITE", "3:RDMA_READ", "4:FETCH_ADD")
			p.wantWCs(p.b, "100:RECV")
			if !matches(p.b.recv.buf[:5000], 3) || !matches(p.b.remote.buf[:3000], 3) || !matches(p.a.recv.buf[:5000], 4) {
				t.Fatalf("psn %v, packet %d lost: bytes changed", psn, drop)
			}
			if got := hostUint64(p.b.remote.buf[65536:]); got != 5 {
				t.Fatalf("psn %v, packet %d lost: the atomic was done %d times", psn, drop, got/5)
			}
		}
	}
}

// lossy runs p until it settles, dropping what drop says, 5 us a way.
func lossy(p *pair, drop func(from *node) bool) {
	p.t.Helper()
	for range 10000 {
		p.pump(p.a)
		p.pump(p.b)
		x, y := p.a.take(), p.b.take()
		if len(x)+len(y) == 0 {
			at := min(p.a.q.Deadline(), p.b.q.Deadline())
			if at == verbs.Never {
				return
			}
			p.advance(max(at.Sub(p.now), 0))
			continue
		}
		p.advance(5 * time.Microsecond)
		for _, b := range x {
			if !drop(p.a) {
				p.deliver(p.b, b)
			}
		}
		for _, b := range y {
			if !drop(p.b) {
				p.deliver(p.a, b)
			}
		}
	}
	p.t.Fatal("never settles")
}

// A region counts a WRITE once, when its last byte is placed: not one of length zero, which
// names no region, not a duplicate, and not one that was refused.
func TestPlaced(t *testing.T) {
	p := newPair(t, options{retry: 7})
	p.post(p.a, sendWR(verbs.RDMAWrite, 1, 0, 3000))
	p.pump(p.a)
	out := p.a.take()
	p.deliver(p.b, out[:2]...)
	if p.b.remote.placed != 0 {
		t.Error("counted before its end")
	}
	p.deliver(p.b, out[2:]...)
	p.deliver(p.b, out...)
	if p.b.remote.placed != 1 {
		t.Errorf("counted %d times", p.b.remote.placed)
	}
	bad := sendWR(verbs.RDMAWrite, 4, 0, 3000)
	bad.RemoteAddr += uint64(len(p.b.remote.buf)) - 2500
	before := bytes.Clone(p.b.remote.buf)
	p.post(p.a, sendWR(verbs.RDMAWrite, 2, 0, 0), sendWR(verbs.RDMAWrite, 3, 0, 1), bad)
	p.run()
	p.wantWCs(p.a, "1:RDMA_WRITE", "2:RDMA_WRITE", "3:RDMA_WRITE", "4:REM_ACCESS_ERR")
	if p.b.remote.placed != 2 {
		t.Errorf("counted %d times, want 2", p.b.remote.placed)
	}
	if !bytes.Equal(before[1:], p.b.remote.buf[1:]) {
		t.Error("a WRITE that leaves the region wrote some of it")
	}
}
