package deferral

import (
	"math"
	"slices"
)

// tally adds up what a strategy did in a cell.
type tally struct {
	Counts
	firstByte, lastByte, toWire []int64
}

// Counts are totals over all trials of a strategy in a cell.
type Counts struct {
	Trials, Connections int
	// Delivered connections got all their messages, Undelivered ones not.
	Delivered, Undelivered int
	// Duplicated and Misordered count messages that arrived twice or out of turn. Both are 0.
	Duplicated, Misordered int
	// Packets is the number of request packets of both sides, Retransmitted of those among
	// them that were sent before. REPs is the number of repeated REPs.
	Packets, Retransmitted, REPs int
	// NotReady is the number of packets that met a queue pair in no state for them.
	NotReady uint64
	// CommEst is the number of COMM_EST events, Violations of request packets that the
	// server sent before RTU and first request, Refused of refused posts.
	CommEst, Violations, Refused int
}

// add adds u, which was counted later.
func (t *tally) add(u *tally) {
	t.Trials += u.Trials
	t.Connections += u.Connections
	t.Delivered += u.Delivered
	t.Undelivered += u.Undelivered
	t.Duplicated += u.Duplicated
	t.Misordered += u.Misordered
	t.Packets += u.Packets
	t.Retransmitted += u.Retransmitted
	t.REPs += u.REPs
	t.NotReady += u.NotReady
	t.CommEst += u.CommEst
	t.Violations += u.Violations
	t.Refused += u.Refused
	t.firstByte = append(t.firstByte, u.firstByte...)
	t.lastByte = append(t.lastByte, u.lastByte...)
	t.toWire = append(t.toWire, u.toWire...)
}

// Quantiles describes a sample of times in nanoseconds. A quantile p is nil where the sample
// has fewer than 10/(1-p) values: ten of them must lie beyond it.
type Quantiles struct {
	N                        int
	Min, P50, P99, P999, Max *int64
	// CDF is the distribution, nil where it is not kept.
	CDF []Point
}

// Point is a step of a distribution: the fraction of the sample up to a time.
type Point struct {
	NS       int64
	Fraction float64
}

// quantilesOf describes a sample, which it sorts; cdf says whether to keep the distribution.
func quantilesOf(sample []int64, cdf bool) Quantiles {
	slices.Sort(sample)
	q := Quantiles{N: len(sample), P50: quantile(sample, 0.5), P99: quantile(sample, 0.99), P999: quantile(sample, 0.999)}
	if len(sample) > 0 {
		q.Min, q.Max = &sample[0], &sample[len(sample)-1]
	}
	if cdf {
		q.CDF = cdfOf(sample)
	}
	return q
}

// quantile returns the p-quantile (nearest rank) of a sorted sample, nil where it is too
// small for it.
func quantile(sorted []int64, p float64) *int64 {
	n := float64(len(sorted))
	if n < 10/(1-p)-1e-6 {
		return nil
	}
	return &sorted[int(math.Ceil(p*n-1e-9))-1]
}

// cdfSteps is how many steps of a distribution are kept.
const cdfSteps = 64

// cdfOf returns the steps of a sorted sample's distribution, closer towards its upper end.
func cdfOf(sorted []int64) []Point {
	n := len(sorted)
	if n == 0 {
		return nil
	}
	points := []Point{{sorted[0], 1 / float64(n)}}
	put := func(i int) {
		p := Point{sorted[i], float64(i+1) / float64(n)}
		if last := &points[len(points)-1]; last.Fraction < p.Fraction {
			points = append(points, p)
		}
	}
	for k := 1; k < cdfSteps; k++ {
		put(k * (n - 1) / cdfSteps)
	}
	for tail := 100; tail < n; tail *= 10 {
		put(n - 1 - n/tail)
	}
	put(n - 1)
	return points
}
