//go:build !doorbellportable

package udp

import (
	"fmt"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// spin receives until want datagrams are there, and returns the last buffer.
func (n *node) spin(msgs []link.Rx, want int) link.Rx {
	for want > 0 {
		k, err := n.Recv(msgs)
		if err != nil {
			n.t.Fatal(err)
		}
		for i := range msgs[:k] {
			want -= segments(len(msgs[i].Buf), msgs[i].SegSize)
		}
		if k > 0 && want <= 0 {
			return msgs[k-1]
		}
	}
	return link.Rx{}
}

// The data path allocates nothing.
func TestNoAllocations(t *testing.T) {
	for _, tc := range []struct {
		name, a, b string
		f          func(*Config)
	}{
		{"IPv4", "127.0.0.1:0", "127.0.0.2:0", func(*Config) {}},
		{"all", "[::]:0", "127.0.0.2:0", func(*Config) {}},
		{"IPv6", "[::1]:0", "[::]:0", func(*Config) {}},
		{"no offloads", "127.0.0.1:0", "127.0.0.2:0", func(c *Config) { c.NoGSO, c.NoGRO, c.NoBatch = true, true, true }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := openNode(t, tc.a, tc.f), openNode(t, tc.b, tc.f)
			src, to := a.LocalAddr().Addr(), b.LocalAddr()
			if src.IsUnspecified() {
				src = local
			}
			if to.Addr().IsUnspecified() {
				to = b.at("::1")
			}
			train := tx(src, to, pattern(2100), 200)
			train.TrafficClass = 4
			msgs := []link.Tx{tx(src, to, pattern(64), 0), train, tx(src, to, pattern(100), 0)}
			rx := make([]link.Rx, 32)
			n := testing.AllocsPerRun(200, func() {
				if k, err := a.Send(msgs); k != len(msgs) || err != nil {
					t.Fatal(k, err)
				}
				b.spin(rx, 13)
				if _, err := b.poll.Wait(Readable, 1000); err != nil {
					t.Fatal(err)
				}
				b.poll.Kick()
				_, _ = a.Caps(), a.LocalAddr()
			})
			if n != 0 {
				t.Errorf("%v allocations per round", n)
			}
		})
	}
}

// Zones are strings; the same peer's again costs nothing.
func TestNoAllocationsWithZone(t *testing.T) {
	k := &fakeKernel{}
	s := fakeNode(t, k, "[::]:0")
	raw, other := [16]byte{0xfe, 0x80, 15: 1}, [16]byte{0xfe, 0x80, 15: 2}
	a := s.zones.addr(raw, 1)
	if n := testing.AllocsPerRun(100, func() {
		if s.zones.addr(raw, 1) != a || s.zones.addr(other, 1) == a {
			t.Fatal("wrong address")
		}
		if i, err := s.zones.index(a.Zone()); i != 1 || err != nil {
			t.Fatal(i, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkPingPong(b *testing.B) {
	x, y := openNode(b, "127.0.0.1:0"), openNode(b, "127.0.0.2:0")
	data := pattern(64)
	there := []link.Tx{tx(x.LocalAddr().Addr(), y.LocalAddr(), data, 0)}
	back := []link.Tx{tx(y.LocalAddr().Addr(), x.LocalAddr(), data, 0)}
	rx := make([]link.Rx, 32)
	b.ReportAllocs()
	for b.Loop() {
		if n, err := x.Send(there); n != 1 || err != nil {
			b.Fatal(n, err)
		}
		y.spin(rx, 1)
		if n, err := y.Send(back); n != 1 || err != nil {
			b.Fatal(n, err)
		}
		x.spin(rx, 1)
	}
}

// One goroutine sends a batch and receives it: both costs together.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{64, 1024, 4096} {
		for _, mode := range []string{"GSO", "mmsg", "single"} {
			b.Run(fmt.Sprintf("%s/%d", mode, size), func(b *testing.B) {
				var f func(*Config)
				segs := 1
				switch mode {
				case "GSO":
					f = func(*Config) {}
					segs = min(128, 60000/size)
				case "mmsg":
					f = func(c *Config) { c.NoGSO, c.NoGRO = true, true }
				case "single":
					f = func(c *Config) { c.NoGSO, c.NoGRO, c.NoBatch = true, true, true }
				}
				x, y := openNode(b, "127.0.0.1:0", f), openNode(b, "127.0.0.2:0", f)
				var msgs []link.Tx
				per := 32
				if segs > 1 {
					per = segs * 4
				}
				for n := per; n > 0; n -= segs {
					seg := size
					if segs == 1 {
						seg = 0
					}
					msgs = append(msgs, tx(x.LocalAddr().Addr(), y.LocalAddr(), pattern(segs*size), seg))
				}
				rx := make([]link.Rx, 32)
				b.SetBytes(int64(per * size))
				b.ReportAllocs()
				packets := 0
				for b.Loop() {
					if n, err := x.Send(msgs); n != len(msgs) || err != nil {
						b.Fatal(n, err)
					}
					y.spin(rx, per)
					packets += per
				}
				b.ReportMetric(float64(packets)/b.Elapsed().Seconds(), "packets/s")
			})
		}
	}
}

// What a kick costs the kicker when nobody sleeps, and a look at an empty socket.
func BenchmarkPoller(b *testing.B) {
	n := openNode(b, "127.0.0.1:0")
	b.Run("kick awake", func(b *testing.B) {
		for b.Loop() {
			n.poll.Kick()
		}
	})
	b.Run("look", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			n.wait(Readable, 0)
		}
	})
	b.Run("empty Recv", func(b *testing.B) {
		rx := make([]link.Rx, 32)
		for b.Loop() {
			if _, err := n.Recv(rx); err != nil {
				b.Fatal(err)
			}
		}
	})
}
