package gate

import (
	"math"
	"slices"

	"golang.org/x/perf/benchmath"
)

// Two files that were measured one after the other have no pairs. The Mann-Whitney test
// compares them as they are. It trusts that whatever the machine does, it does to both files
// alike, which a machine that stays at another speed for a minute belies; so the files are
// searched for two speeds. A benchmark whose own samples lie at two speeds is not accused: how
// many lie at either is the machine's doing. Nor is one whose difference is about as large as
// that between the two speeds of others.

const (
	// speedGap is the ratio, as a logarithm, between two neighbouring samples that tells two
	// speeds from noise.
	speedGap = 0.336 // 1.4 times
	// speedSamples is how many samples there must be on either side of the gap.
	speedSamples = 3
	// speedBenches is how many benchmarks must show two speeds for the machine to be the cause.
	speedBenches = 2
)

// compareSides compares the logarithms of a unit's values in two files.
func compareSides(base, head []float64) estimate {
	n1, n2 := len(base), len(head)
	e := estimate{n: min(n1, n2), p: 1, minP: 1, lo: math.Inf(-1), hi: math.Inf(1)}
	if e.n == 0 {
		return e
	}
	x, y := slices.Clone(base), slices.Clone(head)
	t := &benchmath.DefaultThresholds
	e.p = benchmath.AssumeNothing.Compare(benchmath.NewSample(x, t), benchmath.NewSample(y, t)).P
	e.minP = min(1, 2/binomial(n1+n2, n1))
	e.sd = math.Sqrt(spread(x)*spread(x) + spread(y)*spread(y))
	// Hodges and Lehmann's shift is the median of all differences; their order statistics are
	// its interval, with the normal approximation to the test's distribution.
	diff := make([]float64, 0, n1*n2)
	for _, b := range y {
		for _, a := range x {
			diff = append(diff, b-a)
		}
	}
	slices.Sort(diff)
	e.shift = median(diff)
	width := normalQuantile(0.975) * math.Sqrt(float64(n1*n2*(n1+n2+1))/12)
	if k := int(float64(n1*n2)/2 - width); k >= 0 && e.n >= 4 {
		e.lo, e.hi = diff[k], diff[len(diff)-1-k]
	}
	return e
}

// binomial is n over k, as near as floating point has it.
func binomial(n, k int) float64 {
	a, _ := math.Lgamma(float64(n + 1))
	b, _ := math.Lgamma(float64(k + 1))
	c, _ := math.Lgamma(float64(n - k + 1))
	return math.Exp(a - b - c)
}

// speeds looks for two speeds in logarithms of samples, and returns the ratio between them as
// a logarithm: 0 if there is one speed only.
func speeds(samples []float64) float64 {
	v := slices.Clone(samples)
	slices.Sort(v)
	at, widest := 0, 0.0
	for i := speedSamples; i <= len(v)-speedSamples; i++ {
		if gap := v[i] - v[i-1]; gap > widest {
			at, widest = i, gap
		}
	}
	if widest < speedGap {
		return 0
	}
	return median(v[at:]) - median(v[:at])
}
