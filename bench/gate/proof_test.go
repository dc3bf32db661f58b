package gate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
)

// The proof of the gate's promises, by simulation of machines on which the code's share of a
// measurement is known. The seed is fixed: what the proof says is true of every run of it.

const (
	proofSeed    = 20_240_817
	proofBenches = 30
	proofTrials  = 2000
	speedRatio   = 3.0 // between the two speeds of a machine
)

// machine gives the time that a run takes beside the one that it should take.
type machine struct {
	rnd   *rand.Rand
	noise func(*rand.Rand) float64
	// dwell is how many runs the machine stays at a speed on average; 0 is one speed only.
	dwell float64
	slow  bool
}

func (m *machine) run() float64 {
	if m.dwell > 0 && m.rnd.Float64() < 1/m.dwell {
		m.slow = m.rnd.IntN(2) == 0 // a fair coin: with a dwell of 1 every run has its own speed
	}
	t := 100 * m.noise(m.rnd)
	if m.slow {
		t *= speedRatio
	}
	return t
}

// quarter is noise of ±25 %, any value as likely as any other.
func quarter(r *rand.Rand) float64 { return 0.75 + 0.5*r.Float64() }

// moderate is log-normal noise of 5 %.
func moderate(r *rand.Rand) float64 { return math.Exp(0.05 * r.NormFloat64()) }

// files are two sides, to be measured again and again.
type files [2]*Set

func newFiles(turns bool, count int) files {
	f := files{{Name: "base"}, {Name: "head"}}
	for _, s := range f {
		for i := range proofBenches {
			b := &Bench{Key: Key{"p", fmt.Sprintf("B%02d", i)}}
			for run := range count {
				pair := noPair
				if turns {
					pair = fmt.Sprint(run)
				}
				b.Samples = append(b.Samples, Sample{Pair: pair, Values: []Value{{Unit: "ns/op"}}})
			}
			s.Benches = append(s.Benches, b)
		}
	}
	return f
}

// measure fills two files, as perf gate does by turns, or as go test does one after the other.
// The first benchmark takes factor times as long in the head.
func (m *machine) measure(f files, turns bool, count int, factor float64) {
	one := func(side, bench, run int) {
		t := m.run()
		if side == 1 && bench == 0 {
			t *= factor
		}
		f[side].Benches[bench].Samples[run].Values[0].X = t
	}
	if turns {
		for run := range count {
			for bench := range proofBenches {
				first := (run + bench) % 2
				one(first, bench, run)
				one(1-first, bench, run)
			}
		}
		return
	}
	for side := range f {
		for bench := range proofBenches {
			for run := range count {
				one(side, bench, run)
			}
		}
	}
}

// outcome counts verdicts.
type outcome map[Verdict]int

// trials judges many measurements of one kind, on all processors.
func trials(seed uint64, n int, turns bool, count int, factor float64, m machine) outcome {
	workers := runtime.GOMAXPROCS(0)
	parts := make([]outcome, workers)
	rules := DefaultRules()
	defer debug.SetGCPercent(debug.SetGCPercent(1000)) // a few megabytes live, and much garbage
	var wg sync.WaitGroup
	for w := range workers {
		parts[w] = outcome{}
		wg.Go(func() {
			f := newFiles(turns, count)
			for i := w; i < n; i += workers {
				m := m
				m.rnd = rand.New(rand.NewPCG(seed, uint64(i)))
				m.slow = m.dwell > 0 && m.rnd.IntN(2) == 0
				m.measure(f, turns, count, factor)
				parts[w][Judge(f[0], f[1], rules, Options{}).Verdict]++
			}
		})
	}
	wg.Wait()
	all := outcome{}
	for _, p := range parts {
		for v, k := range p {
			all[v] += k
		}
	}
	return all
}

// TestProofNoFalseAlarm: the same code on both sides is red in less than one run of a hundred.
func TestProofNoFalseAlarm(t *testing.T) {
	for _, tc := range []struct {
		name  string
		turns bool
		m     machine
		n     int
		green bool // at least four times of five
	}{
		{"by turns, noise of 25 %", true, machine{noise: quarter}, proofTrials, true},
		{"by turns, noise and two speeds", true, machine{noise: quarter, dwell: 40}, proofTrials, true},
		{"by turns, each run at its own speed", true, machine{noise: quarter, dwell: 1}, proofTrials / 10, false},
		{"files, noise of 25 %", false, machine{noise: quarter}, proofTrials, true},
		{"files, noise and two speeds", false, machine{noise: quarter, dwell: 40}, proofTrials, false},
		{"files, each run at its own speed", false, machine{noise: quarter, dwell: 1}, proofTrials / 10, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			limit := tc.n / 100
			if testing.Short() { // enough to see that nothing is broken, but no proof
				tc.n /= 10
				limit = max(1, tc.n/25)
			}
			got := trials(proofSeed, tc.n, tc.turns, DefaultCount, 1, tc.m)
			t.Logf("of %d: %v", tc.n, got)
			if got[Regression] >= limit {
				t.Errorf("red in %d of %d runs with the same code", got[Regression], tc.n)
			}
			if tc.green && got[Pass]*5 < tc.n*4 {
				t.Errorf("green in %d of %d runs only", got[Pass], tc.n)
			}
		})
	}
}

// TestProofFindsSlower: one benchmark of thirty that has become 15 % slower turns the run red
// in more than nine of ten, under log-normal noise of 5 % on each run; measured by turns, on a
// machine with two speeds too.
func TestProofFindsSlower(t *testing.T) {
	n := 500
	if testing.Short() {
		n = 100
	}
	for _, tc := range []struct {
		name  string
		turns bool
		m     machine
	}{
		{"by turns", true, machine{noise: moderate}},
		{"by turns, two speeds", true, machine{noise: moderate, dwell: 40}},
		{"by turns, two quick speeds", true, machine{noise: moderate, dwell: 10}},
		{"files", false, machine{noise: moderate}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if !tc.turns {
				n = min(n, 200)
			}
			got := trials(proofSeed, n, tc.turns, DefaultCount, 1.15, tc.m)
			t.Logf("of %d: %v", n, got)
			if got[Regression]*10 <= n*9 {
				t.Errorf("red in %d of %d runs only", got[Regression], n)
			}
		})
	}
}
