package floor

import (
	"errors"
	"testing"
	"time"
)

// The benchmarks have stable names: a gate compares them from commit to commit. Both ends are
// goroutines of this process; perf compare gives each a process.

func floorBench(b *testing.B, p Params) {
	p.Iters = int64(b.N)
	if p.Kind == Stream || p.Kind == Bulk {
		b.SetBytes(int64(p.Size))
		if p.Kind == Stream {
			b.SetBytes(int64(p.payload()))
		}
	}
	b.ReportAllocs()
	r, err := Run(b.Context(), p)
	if errors.Is(err, errors.ErrUnsupported) {
		b.Skip(err)
	}
	if err != nil {
		b.Fatal(err)
	}
	// Setting up and warming up took time too, which is not the floor's.
	b.ReportMetric(float64(r.Elapsed)/float64(r.Ops), "ns/op")
	switch {
	case r.P50 > 0:
		b.ReportMetric(float64(r.P50)/float64(time.Nanosecond), "p50-ns/rtt")
		b.ReportMetric(float64(r.P99)/float64(time.Nanosecond), "p99-ns/rtt")
	case p.Kind == Stream || p.Kind == Bulk:
		b.ReportMetric(r.Gbps(), "Gb/s")
	}
	if r.Lost > 0 {
		b.ReportMetric(float64(r.Lost), "lost")
	}
}

func BenchmarkUDPPingPong(b *testing.B) {
	for _, c := range []struct {
		name string
		p    Params
	}{
		{"spin/64", Params{Size: 64}},
		{"spin/80", Params{Size: 64 + Frame}},
		{"spin/80/connected", Params{Size: 64 + Frame, Connected: true}},
		{"block/80", Params{Size: 64 + Frame, Block: true}},
	} {
		c.p.Kind = PingPong
		b.Run(c.name, func(b *testing.B) { floorBench(b, c.p) })
	}
}

func BenchmarkUDPStream(b *testing.B) {
	for _, c := range []struct {
		name string
		p    Params
	}{
		{"gso/4096", Params{Size: 4096 + Frame, Train: 15, Window: 255}},
		{"gso/4096/block", Params{Size: 4096 + Frame, Train: 15, Window: 255, Block: true}},
		{"gso/64/window=2048", Params{Size: 64 + Frame, Train: 128, Window: 2048}},
		{"gso/64/window=64", Params{Size: 64 + Frame, Train: 32, Window: 64}},
		{"mmsg/4096", Params{Size: 4096 + Frame, Train: 16, Window: 256, NoOffload: true}},
		{"mmsg/64/window=64", Params{Size: 64 + Frame, Train: 32, Window: 64, NoOffload: true}},
	} {
		c.p.Kind = Stream
		b.Run(c.name, func(b *testing.B) { floorBench(b, c.p) })
	}
}

func BenchmarkTCPStream(b *testing.B) {
	for _, c := range []struct {
		name string
		size int
	}{{"64K", 64 << 10}, {"256K", 256 << 10}, {"1M", 1 << 20}} {
		b.Run(c.name, func(b *testing.B) { floorBench(b, Params{Kind: Bulk, Size: c.size}) })
	}
}

func BenchmarkTCPEcho(b *testing.B) {
	b.Run("64/window=1", func(b *testing.B) { floorBench(b, Params{Kind: Echo, Size: 64}) })
	b.Run("64/window=64", func(b *testing.B) { floorBench(b, Params{Kind: Echo, Size: 64, Window: 64}) })
}

func BenchmarkHandOver(b *testing.B) {
	b.Run("ring/publish=1", func(b *testing.B) { floorBench(b, Params{Kind: Ring}) })
	b.Run("ring/publish=32", func(b *testing.B) { floorBench(b, Params{Kind: Ring, Train: 32}) })
	b.Run("chan", func(b *testing.B) { floorBench(b, Params{Kind: Chan}) })
}
