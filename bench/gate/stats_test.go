package gate

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestSignedRankIsExact compares the test with the count of all ways to choose signs.
func TestSignedRankIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Small whole numbers, for ties and zeros.
		d := rapid.SliceOfN(rapid.Map(rapid.IntRange(-4, 4), func(i int) float64 { return float64(i) }), 0, 9).Draw(t, "d")
		got, want := signedRank(d), allSigns(d)
		if math.Abs(got-want) > 1e-12 {
			t.Fatalf("p = %v, by counting %v", got, want)
		}
	})
}

// allSigns is the two-sided p-value by enumeration: how many of all signs give a sum of ranks
// as small, or as large, as the one at hand.
func allSigns(d []float64) float64 {
	v := slices.DeleteFunc(slices.Clone(d), func(x float64) bool { return x == 0 })
	rank := make([]float64, len(v))
	total, sum := 0.0, 0.0
	for i, x := range v {
		for _, y := range v {
			switch {
			case math.Abs(y) < math.Abs(x):
				rank[i]++
			case math.Abs(y) == math.Abs(x):
				rank[i] += 0.5
			}
		}
		rank[i] += 0.5
		total += rank[i]
		if x > 0 {
			sum += rank[i]
		}
	}
	small, hits := min(sum, total-sum), 0
	for signs := range 1 << len(v) {
		s := 0.0
		for i := range v {
			if signs>>i&1 == 1 {
				s += rank[i]
			}
		}
		if s <= small {
			hits++
		}
	}
	return min(1, 2*float64(hits)/float64(int(1)<<len(v)))
}

// TestSignedRankNormal: where the normal approximation takes over it agrees with what is exact.
func TestSignedRankNormal(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		d := make([]float64, exactPairs+1)
		for i := range d {
			d[i] = rnd.NormFloat64() + 0.3
		}
		ranks, positive := make([]int, len(d)), 0
		slices.SortFunc(d, func(a, b float64) int { return int(math.Copysign(1, math.Abs(a)-math.Abs(b))) })
		for i, x := range d {
			if ranks[i] = i + 1; x > 0 {
				positive += i + 1
			}
		}
		total := len(d) * (len(d) + 1) / 2
		exact := min(1, 2*signedRankTail(ranks, min(positive, total-positive)))
		if got := signedRank(d); math.Abs(got-exact) > 0.5*exact+1e-4 {
			t.Errorf("p = %v, exactly %v", got, exact)
		}
	}
}

// TestCritical: the known critical values of Wilcoxon's test, two-sided at 5 %.
func TestCritical(t *testing.T) {
	for n, want := range map[int]int{5: -1, 6: 0, 7: 2, 8: 3, 10: 8, 15: 25, 20: 52, 25: 89} {
		if got := signedRankCritical(n, 0.05); got != want {
			t.Errorf("n = %d: %d, want %d", n, got, want)
		}
	}
}

// TestHolm: an example worked by hand.
func TestHolm(t *testing.T) {
	got := holm([]float64{0.04, 0.001, 0.03, 0.01})
	for i, want := range []float64{0.06, 0.004, 0.06, 0.03} {
		if math.Abs(got[i]-want) > 1e-12 {
			t.Errorf("%v, want %v at %d", got, want, i)
		}
	}
	if len(holm(nil)) != 0 {
		t.Error("p-values from nothing")
	}
}

// TestSetAside: sizes decide, and signs never.
func TestSetAside(t *testing.T) {
	d := []float64{0.1, -0.1, 0.12, 0.08, -0.11, 1.1, -1.2}
	if got := setAside(d); len(got) != 5 {
		t.Errorf("kept %v", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		d := rapid.SliceOf(rapid.Float64Range(-2, 2)).Draw(t, "d")
		flipped := slices.Clone(d)
		for i := range flipped {
			if rapid.Bool().Draw(t, "flip") {
				flipped[i] = -flipped[i]
			}
		}
		if len(setAside(d)) != len(setAside(flipped)) {
			t.Fatal("signs matter")
		}
	})
}

// TestInterval: the confidence intervals hold what they should in about 95 of 100 cases.
func TestInterval(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	const trials, truth = 2000, 0.2
	paired, sides := 0, 0
	for range trials {
		d, x, y := make([]float64, 20), make([]float64, 20), make([]float64, 20)
		for i := range d {
			d[i] = truth + 0.1*rnd.NormFloat64()
			x[i], y[i] = 0.1*rnd.NormFloat64(), truth+0.1*rnd.NormFloat64()
		}
		if e := comparePairs(d); e.lo <= truth && truth <= e.hi {
			paired++
		}
		if e := compareSides(x, y); e.lo <= truth && truth <= e.hi {
			sides++
		}
	}
	for what, hits := range map[string]int{"pairs": paired, "sides": sides} {
		if hits < trials*93/100 || hits > trials*98/100 {
			t.Errorf("%s: %d of %d intervals hold the truth", what, hits, trials)
		}
	}
}

// TestDetectable: an effect of the size that a comparison says it could have seen is found in
// about nine of ten cases.
func TestDetectable(t *testing.T) {
	const trials, alpha = 1000, DefaultAlpha / proofBenches
	rnd := rand.New(rand.NewPCG(5, 5))
	for _, n := range []int{15, 20, 30, 80} {
		for _, pairs := range []bool{true, false} {
			found := 0
			effect := estimate{pairs: pairs, n: n, sd: 0.1}.detectable(alpha, n, map[int]float64{})
			for range trials {
				x, y := make([]float64, n), make([]float64, n)
				for i := range x {
					x[i], y[i] = 0.1/math.Sqrt2*rnd.NormFloat64(), effect+0.1/math.Sqrt2*rnd.NormFloat64()
				}
				e := estimate{}
				if pairs {
					for i := range x {
						y[i] -= x[i]
					}
					e.p = signedRank(y)
				} else {
					e = compareSides(x, y)
				}
				if e.p <= alpha {
					found++
				}
			}
			t.Logf("n = %d, pairs %v: %.3f found in %d of %d", n, pairs, effect, found, trials)
			if found < trials*82/100 || found > trials*96/100 {
				t.Errorf("n = %d, pairs %v: %.3f found in %d of %d", n, pairs, effect, found, trials)
			}
		}
	}
	for _, pairs := range []bool{true, false} {
		e := estimate{pairs: pairs, n: 5, sd: 0.1, minP: 0.0625}
		if got := e.detectable(alpha, 5, map[int]float64{}); !math.IsInf(got, 1) {
			t.Errorf("five samples see %v", got)
		}
		if got := e.detectable(alpha, 20, map[int]float64{}); math.IsInf(got, 1) {
			t.Errorf("twenty samples see %v", got)
		}
	}
}

// TestSpeeds: two speeds are told from noise, and need samples at both.
func TestSpeeds(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 9))
	for range 500 {
		v := make([]float64, DefaultCount)
		for i := range v {
			v[i] = math.Log(quarter(rnd))
		}
		if g := speeds(v); g != 0 {
			t.Fatalf("noise of 25 %% shows speeds %v apart: %v", g, v)
		}
		slow := speedSamples + rnd.IntN(DefaultCount-2*speedSamples)
		for i := range slow {
			v[i] += math.Log(speedRatio)
		}
		if g := speeds(v); math.Abs(g-math.Log(speedRatio)) > 0.4 {
			t.Fatalf("%d slow samples show %v", slow, g)
		}
	}
	if speeds([]float64{0, 0, 0, 0, 0, 0, 0, 9}) != 0 {
		t.Error("an outlier is a speed")
	}
	if speeds(nil) != 0 || speeds([]float64{1}) != 0 {
		t.Error("nothing is a speed")
	}
}
