package bench

import (
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Latency is a distribution of times: of SendLat and WriteLat of half round trips, of the other
// latency tests of whole operations.
type Latency struct {
	Min, Max, Median, P99, P999 time.Duration
	// Mean and StdDev are in nanoseconds.
	Mean, StdDev float64
}

// latencyRecorder collects round trips without allocating.
type latencyRecorder struct {
	hist     *hdrhistogram.Histogram
	n        uint64
	min, max int64
	// Welford's running mean and sum of squared distances from it: exact where a
	// histogram's would be off by its resolution.
	mean, m2 float64
}

// maxLatency is where the histogram ends; longer times count as this in percentiles.
const maxLatency = int64(100 * time.Second)

func newLatencyRecorder() *latencyRecorder {
	return &latencyRecorder{hist: hdrhistogram.New(1, maxLatency, 3), min: math.MaxInt64}
}

func (r *latencyRecorder) record(d time.Duration) {
	v := int64(d)
	r.n++
	r.min, r.max = min(r.min, v), max(r.max, v)
	delta := float64(v) - r.mean
	r.mean += delta / float64(r.n)
	r.m2 += delta * (float64(v) - r.mean)
	_ = r.hist.RecordValue(min(max(v, 1), maxLatency)) // cannot be out of range
}

// divided returns the distribution of that part of what was recorded; zero if that was nothing.
func (r *latencyRecorder) divided(parts int) Latency {
	if r.n == 0 {
		return Latency{}
	}
	by := time.Duration(parts)
	// The histogram answers with the upper end of a bucket; never let that pass the maximum.
	at := func(q float64) time.Duration {
		return time.Duration(min(max(r.hist.ValueAtQuantile(q), r.min), r.max)) / by
	}
	return Latency{
		Min: time.Duration(r.min) / by, Max: time.Duration(r.max) / by,
		Median: at(50), P99: at(99), P999: at(99.9),
		Mean: r.mean / float64(by), StdDev: math.Sqrt(r.m2/float64(r.n)) / float64(by),
	}
}

// meter measures a rate: messages over time, and the best stretch.
type meter struct {
	start, end time.Duration // of the session's clock
	n          uint64

	least  uint64 // messages that a peak is taken over
	markAt time.Duration
	markN  uint64
	peak   float64 // messages per second
}

// stretch is the least time that a peak is taken over.
const stretch = time.Millisecond

// begin starts a measurement. A peak is taken over least messages or more, which should be
// more than may be under way: else it tells how completions bunch, after the receiver or the
// sender has not run for a while, and exceeds what anything can carry.
func (m *meter) begin(now time.Duration, least uint64) {
	*m = meter{start: now, end: now, least: least, markAt: now}
}

// add counts n messages that were complete at now.
func (m *meter) add(now time.Duration, n uint64) {
	m.n += n
	m.end = now
	if d := now - m.markAt; d >= stretch && m.n-m.markN >= m.least {
		m.peak = max(m.peak, float64(m.n-m.markN)/d.Seconds())
		m.markAt, m.markN = now, m.n
	}
}

// elapsed is at least a nanosecond, so that rates are finite.
func (m *meter) elapsed() time.Duration { return max(m.end-m.start, 1) }

// peakRate is the best rate, at least the average.
func (m *meter) peakRate() float64 { return max(m.peak, float64(m.n)/m.elapsed().Seconds()) }
