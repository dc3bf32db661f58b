package gate

import (
	"math"
	"slices"
)

// estimate is what the samples of two sides say about one number: the logarithm of the ratio
// of head to base.
type estimate struct {
	n      int     // pairs, or the smaller side's samples
	aside  int     // of them, pairs set aside because the machine changed its speed between them
	shift  float64 // Hodges and Lehmann's estimate: robust, and the one that the tests belong to
	lo, hi float64 // confidence interval of shift, at 95 %
	p      float64 // two-sided: how often chance alone makes a difference like this
	minP   float64 // the smallest p that this many samples can reach
	sd     float64 // standard deviation of one difference
	unsure string  // why the difference may be the machine's; empty if nothing says so
}

// power is the probability with which an effect of the size that detectable names is found.
const power = 0.9

// detectable is the smallest change (the logarithm of its ratio) that would have been found
// with probability 0.9 at level alpha: +Inf if no change could have been, because even the
// smallest p that so few samples can reach is above alpha. n is the number of differences
// that would be measured; for n itself pass e.n - e.aside.
func (e estimate) detectable(alpha float64, n int) float64 {
	if n < 2 || e.minP > alpha && n <= e.n-e.aside {
		return math.Inf(1)
	}
	// The t test's formula; a rank test needs 1/0.955 times its samples (Hodges and Lehmann, 1956).
	z := normalQuantile(1-alpha/2) + normalQuantile(power)
	return z * e.sd / math.Sqrt(0.955*float64(n))
}

// normalQuantile is the inverse of the normal distribution function.
func normalQuantile(p float64) float64 { return math.Sqrt2 * math.Erfinv(2*p-1) }

// normalTail is the probability of a standard normal variable above z.
func normalTail(z float64) float64 { return math.Erfc(z/math.Sqrt2) / 2 }

// holm adjusts p-values for their number, in place of which they are returned: an adjusted
// value is at most alpha for any true null hypothesis with probability alpha at most, whatever
// the dependence between them. Holm, "A simple sequentially rejective multiple test procedure",
// 1979.
func holm(p []float64) []float64 {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case p[a] < p[b]:
			return -1
		case p[a] > p[b]:
			return 1
		}
		return 0
	})
	adjusted, most := make([]float64, len(p)), 0.0
	for rank, i := range order {
		most = max(most, min(1, p[i]*float64(len(p)-rank)))
		adjusted[i] = most
	}
	return adjusted
}

// median returns the middle of sorted values, 0 of none.
func median(sorted []float64) float64 {
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// medianOf is the median of values in any order, which it leaves alone.
func medianOf(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return median(v)
}

// spread is the standard deviation of values.
func spread(v []float64) float64 {
	if len(v) < 2 {
		return 0
	}
	mean, sum := 0.0, 0.0
	for _, x := range v {
		mean += x / float64(len(v))
	}
	for _, x := range v {
		sum += (x - mean) * (x - mean)
	}
	return math.Sqrt(sum / float64(len(v)-1))
}
