package gate

import (
	"math"
	"slices"
)

// estimate is what the samples of two sides say about one number: the logarithm of the ratio
// of head to base.
type estimate struct {
	pairs  bool    // whether there are pairs, or two sides without
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

// detectable is the smallest change (the logarithm of its ratio) that n differences, or n
// samples on either side, would find with probability 0.9 at level alpha, if they spread like
// those at hand: +Inf if they could find none, because even the smallest p that so few can
// reach is above alpha. known keeps what takes long to compute, for the same alpha.
func (e estimate) detectable(alpha float64, n int, known map[int]float64) float64 {
	if n < 2 {
		return math.Inf(1)
	}
	if e.pairs {
		effect, ok := known[n]
		if !ok {
			effect = signedRankEffect(n, alpha)
			known[n] = effect
		}
		if math.IsInf(effect, 1) {
			return effect
		}
		return e.sd * effect
	}
	if e.minP > alpha && n <= e.n {
		return math.Inf(1)
	}
	// The t test's formula, with its quantile by the first term of its expansion; a rank test
	// needs 1/0.955 times the samples (Hodges and Lehmann, 1956).
	z := normalQuantile(1 - alpha/2)
	t := z + (z*z*z+z)/(4*float64(2*n-2))
	return (t + normalQuantile(power)) * e.sd / math.Sqrt(0.955*float64(n))
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

// medianOf is the median of values in any order, which it leaves alone, without those that are
// NaN: runs that do not report it.
func medianOf(v []float64) float64 {
	v = slices.DeleteFunc(slices.Clone(v), math.IsNaN)
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
