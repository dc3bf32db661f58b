package gate

import (
	"math"
	"slices"
)

// Wilcoxon's signed-rank test of pairs. If the code is the same, then which side of a pair was
// slower is a coin toss, whatever the machine does meanwhile: each sign is fair given all the
// sizes. So the test is exact for any noise that does not know which side it hits.
//
// A pair between whose halves the machine changed its speed tells nothing, and its rank is one
// of the highest. Such pairs are set aside by a rule that looks at sizes only and never at
// signs, which leaves the coin toss fair and the test exact.

const (
	// asideFactor says how many times the median size of a difference a pair's may have. It
	// is 2.7 standard deviations of a normal distribution.
	asideFactor = 4
	// asideFloor is what is never set aside: a fifth more is no other speed.
	asideFloor = 0.18
	// exactPairs is the most pairs whose distribution is computed; of more it is normal
	// enough (Lehmann, "Nonparametrics", 1975, section 3.2).
	exactPairs = 60
	// maxWalsh is the most pairs of which all averages are sorted.
	maxWalsh = 1000
)

// comparePairs compares logarithms of ratios, one of each pair.
func comparePairs(d []float64) estimate {
	e := estimate{pairs: true, n: len(d), p: 1, minP: 1}
	kept := setAside(d)
	e.aside = len(d) - len(kept)
	if len(kept) == 0 {
		return e
	}
	e.minP = math.Ldexp(1, 1-len(kept))
	e.sd = spread(kept)
	e.p = signedRank(kept)
	averages := walsh(kept)
	e.shift = median(averages)
	// Tukey's interval: as many averages off each end as the test allows at 5 %.
	k := signedRankCritical(len(kept), 0.05)
	e.lo, e.hi = math.Inf(-1), math.Inf(1)
	if k >= 0 {
		e.lo, e.hi = averages[k], averages[len(averages)-1-k]
	}
	return e
}

// setAside returns the differences that are not too large beside the others.
func setAside(d []float64) []float64 {
	sizes := make([]float64, len(d))
	for i, x := range d {
		sizes[i] = math.Abs(x)
	}
	limit := max(asideFactor*medianOf(sizes), asideFloor)
	kept := make([]float64, 0, len(d))
	for i, x := range d {
		if sizes[i] <= limit {
			kept = append(kept, x)
		}
	}
	return kept
}

// walsh returns the averages of all pairs of values, each with itself too, sorted.
func walsh(v []float64) []float64 {
	if len(v) > maxWalsh {
		panic("BUG: gate: more samples than Read lets through")
	}
	w := make([]float64, 0, len(v)*(len(v)+1)/2)
	for i, x := range v {
		for _, y := range v[:i+1] {
			w = append(w, (x+y)/2)
		}
	}
	slices.Sort(w)
	return w
}

// signedRank returns the two-sided p-value of Wilcoxon's test. Zeros are left out, and equal
// sizes share their ranks: given the sizes, the distribution is exact all the same.
func signedRank(d []float64) float64 {
	v := slices.DeleteFunc(slices.Clone(d), func(x float64) bool { return x == 0 })
	n := len(v)
	if n == 0 {
		return 1
	}
	slices.SortFunc(v, func(a, b float64) int {
		switch a, b := math.Abs(a), math.Abs(b); {
		case a < b:
			return -1
		case a > b:
			return 1
		}
		return 0
	})
	ranks := make([]int, n) // doubled, for a shared rank may be a half
	positive, total := 0, 0
	for i := 0; i < n; {
		j := i + 1
		for j < n && math.Abs(v[j]) == math.Abs(v[i]) {
			j++
		}
		for k := i; k < j; k++ {
			ranks[k] = i + j + 1
			total += ranks[k]
			if v[k] > 0 {
				positive += ranks[k]
			}
		}
		i = j
	}
	small := min(positive, total-positive)
	if n > exactPairs {
		variance := 0.0
		for _, r := range ranks {
			variance += float64(r*r) / 4
		}
		z := (float64(total)/2 - float64(small) - 1) / math.Sqrt(variance)
		return min(1, 2*normalTail(z))
	}
	return min(1, 2*signedRankTail(ranks, small))
}

// signedRankTail returns the probability that the ranks with a positive sign add up to at most
// limit, when signs are fair.
func signedRankTail(ranks []int, limit int) float64 {
	// prob[s] is the probability of the sum s; sums beyond limit are of no use.
	prob := make([]float64, limit+1)
	prob[0] = 1
	for _, r := range ranks {
		for s := limit; s >= 0; s-- {
			prob[s] /= 2
			if s >= r {
				prob[s] += prob[s-r] / 2
			}
		}
	}
	sum := 0.0
	for _, x := range prob {
		sum += x
	}
	return sum
}

// signedRankCritical returns the largest sum of ranks that is rare at a two-sided level, for n
// pairs without ties; -1 if none is.
func signedRankCritical(n int, level float64) int {
	if n > exactPairs {
		mean, sd := float64(n*(n+1))/4, math.Sqrt(float64(n*(n+1)*(2*n+1))/24)
		return max(-1, int(mean-normalQuantile(1-level/2)*sd)-1)
	}
	half := n * (n + 1) / 4
	prob := make([]float64, half+1)
	prob[0] = 1
	for r := 1; r <= n; r++ {
		for s := half; s >= 0; s-- {
			prob[s] /= 2
			if s >= r {
				prob[s] += prob[s-r] / 2
			}
		}
	}
	sum := 0.0
	for s, x := range prob {
		if sum += x; 2*sum > level {
			return s - 1
		}
	}
	return half
}

// signedRankEffect is the shift of a normal distribution of standard deviation 1 that n of its
// values show with probability 0.9 at a two-sided level; +Inf if n values can show none. It
// takes the sum of ranks as normal, with mean and variance under the shift (Lehmann,
// "Nonparametrics", 1975, section 4.2): few values reach strict levels only if nearly all have
// the same sign, which the usual formula, made for many, does not know.
func signedRankEffect(n int, level float64) float64 {
	critical := float64(signedRankCritical(n, level))
	if critical < 0 {
		return math.Inf(1)
	}
	z, k := normalQuantile(power), float64(n)
	lo, hi := 0.0, 8.0
	for range 24 {
		shift := (lo + hi) / 2
		// Of one value, of the sum of two, of two sums that share a value, and of a value and a
		// sum that holds it: how likely all of them are positive.
		one, two := normalTail(-shift), normalTail(-shift*math.Sqrt2)
		share, holds := 0.0, 0.0
		const step = 0.2
		for u := -5.0; u <= 5; u += step {
			density := math.Exp(-u*u/2) / math.Sqrt(2*math.Pi) * step
			other := normalTail(-u - 2*shift)
			share += density * other * other
			holds += density * other * min(1, max(0, (u+shift)/step+0.5))
		}
		mean := k*one + k*(k-1)/2*two
		variance := k*one*(1-one) + k*(k-1)/2*two*(1-two) + 2*k*(k-1)*(holds-one*two) + k*(k-1)*(k-2)*(share-two*two)
		// The sum of the ranks of the wrong sign must stay within the critical value.
		if k*(k+1)/2-mean+z*math.Sqrt(max(0, variance)) <= critical+0.5 {
			hi = shift
		} else {
			lo = shift
		}
	}
	return hi
}
