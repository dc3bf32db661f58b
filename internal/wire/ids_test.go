package wire

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
)

// idsTest checks packets with chosen Identifications as if they came from one sender.
type idsTest struct {
	t    *testing.T
	w    Wire
	path roce.Path
	run  idRun
	rand *rand.Rand
}

func newIDs(t *testing.T) *idsTest {
	return &idsTest{
		t: t, path: roce.NewPath(netip.MustParseAddrPort("10.0.0.1:4791"), netip.MustParseAddrPort("10.0.0.2:4791")),
		rand: rand.New(rand.NewPCG(1, 2)),
	}
}

// packet makes one that is valid with this Identification.
func (x *idsTest) packet(id uint16) []byte {
	b := make([]byte, 64+roce.ICRCLen)
	for i := range b {
		b[i] = byte(x.rand.Uint32())
	}
	n := len(b) - roce.ICRCLen
	roce.PutICRC(b[n:], x.path.ICRC(b[:n], id))
	return b
}

// take says whether n packets are taken, the k-th with Identification id+k*step at place seg.
func (x *idsTest) take(n int, id, step uint16, seg int, want bool) {
	x.t.Helper()
	for k := range n {
		at := id + uint16(k)*step
		got, ok := x.w.checkICRC(&x.path, &x.run, x.packet(at), seg)
		if ok != want || ok && got != at {
			x.t.Fatalf("packet %d with Identification %d at place %d: %d, %v", k, at, seg, got, ok)
		}
	}
}

// TestIdentifications: a sender that was seen to control its Identifications is held to it, for
// an ICRC that is right for some other one is, then, the ICRC of a damaged packet; anybody else
// may have any.
func TestIdentifications(t *testing.T) {
	t.Run("doorbell", func(t *testing.T) {
		x := newIDs(t)
		x.take(1, 700, 0, 0, true) // too early to tell
		x.take(200, 0, 0, 0, true)
		x.take(1, 128, 0, 0, false)
		x.take(1, 0xFFFF, 0, 0, false)
		x.take(1, 127, 0, 0, true)  // the train was split on the way
		x.take(100, 5, 0, 99, true) // and came as others
		// Damage now and then wears nothing down.
		for range 300 {
			x.take(1, 9999, 0, 0, false)
			x.take(1, 0, 0, 0, true)
		}
		if n := x.w.Counters.FarIDs.Load(); n != 302 {
			t.Errorf("%d far Identifications", n)
		}
	})
	t.Run("foreign", func(t *testing.T) {
		x := newIDs(t)
		x.take(3000, 100, 1, 0, true) // Linux counts
		x.take(100, 65500, 1, 0, true)
		x.take(1000, 3, 9973, 0, true) // others draw them
		x.take(10, 7, 0, 7, true)      // by chance
		x.take(1, 4000, 0, 0, true)
	})
	t.Run("rewritten", func(t *testing.T) {
		// Something on the way begins to write others.
		x := newIDs(t)
		x.take(1000, 0, 0, 0, true)
		x.take(ownMost-ownIDs, 300, 211, 0, false)
		x.take(1000, 300, 211, 0, true)
	})
	t.Run("wrong", func(t *testing.T) {
		x := newIDs(t)
		for i := range 1000 {
			b := x.packet(0)
			b[8+i%(len(b)-8)] ^= 1 << (i % 8)
			if _, ok := x.w.checkICRC(&x.path, &x.run, b, 0); ok {
				t.Fatalf("damage %d passed", i)
			}
		}
		if x.run != (idRun{}) {
			t.Errorf("learned %+v from damaged packets", x.run)
		}
	})
}
