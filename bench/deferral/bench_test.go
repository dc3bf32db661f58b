package deferral

import (
	"fmt"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// BenchmarkTimeToFirstByte plays connections whose RTU is 2 ms late and whose first request
// overtakes it, and reports the 99th percentile of the time to the first byte in virtual
// nanoseconds (vns-p99): less is better, and neither the machine nor its load changes it.
func BenchmarkTimeToFirstByte(b *testing.B) {
	for s := range NumStrategies {
		b.Run(s.Letter(), func(b *testing.B) {
			c := Base()
			c.RTUDelay = 2 * time.Millisecond
			const trials = 1000
			var p99 int64
			for b.Loop() {
				t := mustPlay(b, &c, s, 1, trials)
				p99 = *quantilesOf(t.firstByte, false).P99
			}
			b.ReportMetric(float64(p99), "vns-p99")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/trials, "ns/conn")
			b.ReportMetric(0, "ns/op") // of a thousand connections: of no use to anyone
		})
	}
}

// BenchmarkPublication moves a queue pair with N deferred WQEs from RTR to RTS: real
// nanoseconds for each move.
func BenchmarkPublication(b *testing.B) {
	for _, n := range waiting {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			q := newBench(max(n, 1), 16)
			moves, sum := 0, time.Duration(0)
			for b.Loop() {
				k, d := q.transitions(n, false)
				moves, sum = moves+k, sum+d
			}
			b.ReportMetric(float64(sum.Nanoseconds())/float64(moves), "ns/op")
		})
	}
}

// BenchmarkPost posts one WQE in RTS, in RTR, and into a queue without a gate.
func BenchmarkPost(b *testing.B) {
	posts, plain := newBench(costDepth, 1), newPlainQueue(costDepth)
	for _, bm := range []struct {
		name string
		f    loop
	}{
		{"RTS", func() (int, time.Duration) { return posts.posts(verbs.QPRTS) }},
		{"RTR", func() (int, time.Duration) { return posts.posts(verbs.QPRTR) }},
		{"plain", func() (int, time.Duration) { return plain.posts(&posts.wr[0]) }},
	} {
		b.Run(bm.name, func(b *testing.B) {
			ops, sum := 0, time.Duration(0)
			for b.Loop() {
				k, d := bm.f()
				ops, sum = ops+k, sum+d
			}
			b.ReportMetric(float64(sum.Nanoseconds())/float64(ops), "ns/op")
		})
	}
}
