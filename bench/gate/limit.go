package gate

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// limit judges a limit of the rules on the head.
func (j *judge) limit(l *LimitRule) {
	f := Finding{Limit: l.Name, Bench: l.Bench, Unit: l.Unit, P: 1}
	if l.Over != "" {
		j.ratio(f, l)
		return
	}
	found := false
	for _, b := range j.head.Benches {
		if !Matches(l.Bench, b.Key) {
			continue
		}
		found = true
		f.Bench = b.Key.String()
		j.bound(f, l, b)
	}
	if !found {
		f.Verdict, f.Note = Inconclusive, "no such benchmark was measured"
		j.add(f)
	}
}

// strays is of how many runs one may break a limit on an exact unit.
const strays = 10

// bound judges a limit on the values of one benchmark.
func (j *judge) bound(f Finding, l *LimitRule, b *Bench) {
	v := b.values(f.Unit)
	if f.Note = unusable(b, v); f.Note != "" {
		f.Verdict = Inconclusive
		j.add(f)
		return
	}
	f.Head = medianOf(v)
	m, _ := j.rules.metric(f.Unit, j.base, j.head)
	zero := l.Max != nil && *l.Max == 0 || slices.Min(v) == 0
	if m.Compare == Noisy && !zero {
		j.bounds(f, l, logs(v))
		return
	}
	// Every value counts but one in ten at either end: on a machine that stood still for a
	// moment a run has one iteration, and what the runtime did meanwhile counts as that one's.
	slices.Sort(v)
	aside := len(v) / strays
	least, most := v[aside], v[len(v)-1-aside]
	f.Exact, f.N, f.Verdict = true, len(v), Pass
	switch {
	case l.Max != nil && most > *l.Max:
		f.Verdict, f.Note = Regression, fmt.Sprintf("%g is above %g", most, *l.Max)
	case l.Min != nil && least < *l.Min:
		f.Verdict, f.Note = Regression, fmt.Sprintf("%g is below %g", least, *l.Min)
	}
	j.add(f)
}

// ratio judges a limit on the ratio of two benchmarks of one run.
func (j *judge) ratio(f Finding, l *LimitRule) {
	var sides [2]*Bench
	for i, name := range []string{l.Bench, l.Over} {
		for _, b := range j.head.Benches {
			if !Matches(name, b.Key) {
				continue
			}
			if sides[i] != nil {
				f.Verdict, f.Note = Inconclusive, fmt.Sprintf("%s is both %v and %v", name, sides[i].Key, b.Key)
				j.add(f)
				return
			}
			sides[i] = b
		}
		if sides[i] == nil {
			f.Verdict, f.Note = Inconclusive, fmt.Sprintf("%s was not measured", name)
			j.add(f)
			return
		}
	}
	f.Bench = sides[0].Key.String() + " / " + sides[1].Key.String()
	for _, b := range sides {
		if f.Note = unusable(b, b.values(f.Unit)); f.Note == "" && slices.Min(b.values(f.Unit)) <= 0 {
			f.Note = fmt.Sprintf("%v: a value of zero has no ratio", b.Key)
		}
		if f.Note != "" {
			f.Verdict = Inconclusive
			j.add(f)
			return
		}
	}
	// Of one run are the samples of one pair, or else those of one place in the file.
	over, v, paired := pairUp(sides[1], sides[0], f.Unit)
	if !paired {
		n := min(len(over), len(v))
		over, v = over[:n], v[:n]
	}
	f.Head = medianOf(v)
	d := logs(v)
	for i, x := range logs(over) {
		d[i] -= x
	}
	j.bounds(f, l, d)
}

// unusable says why a benchmark's values cannot be judged.
func unusable(b *Bench, v []float64) string {
	switch {
	case len(b.Faults) > 0:
		return strings.Join(b.Faults, "; ")
	case len(v) == 0:
		return fmt.Sprintf("%v was not measured", b.Key)
	case slices.ContainsFunc(v, math.IsNaN):
		return fmt.Sprintf("%v does not report it", b.Key)
	}
	return ""
}

// bounds prepares the tests of logarithms against a limit's bounds.
func (j *judge) bounds(f Finding, l *LimitRule, d []float64) {
	for _, bound := range []struct {
		at    *float64
		worse float64
	}{{l.Max, 1}, {l.Min, -1}} {
		if bound.at == nil {
			continue
		}
		shifted := slices.Clone(d)
		for i := range shifted {
			shifted[i] -= math.Log(*bound.at)
		}
		p := pending{Finding: f, e: comparePairs(shifted), worse: bound.worse, limit: true}
		p.Base = *bound.at
		j.pending = append(j.pending, p)
	}
}
