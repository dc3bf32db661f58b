package gate

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Verdict says what a finding, or a whole report, comes to.
type Verdict string

// The verdicts, from good to bad.
const (
	Pass         Verdict = "pass"
	Improved     Verdict = "improved"     // better by more than the threshold
	New          Verdict = "new"          // not in the base
	Removed      Verdict = "removed"      // gone, and the rules say so
	Ignored      Verdict = "ignored"      // left out, and the rules or both sides say so
	Inconclusive Verdict = "inconclusive" // nothing can be said, which is not green
	Regression   Verdict = "regression"
)

// Finding is the verdict on one measurement of one benchmark, or on one limit.
type Finding struct {
	Verdict Verdict
	// Limit is the rule's name if the finding is about one.
	Limit string
	// Bench and Unit say what was measured; Unit is empty if the whole benchmark is meant.
	Bench, Unit string
	// Base and Head are medians: 0 of what there is not. Of a limit on a ratio, Base is that
	// of the benchmark divided by; of another, the bound.
	Base, Head float64
	// Ratio is head to base, Lo and Hi its confidence interval at 95 %; all 0 if unknown.
	// Of a limit it is what is bounded.
	Ratio, Lo, Hi float64
	// Exact says that values were compared as they are.
	Exact bool
	// P is the p-value, corrected for the number of tests; 1 if nothing was tested.
	P float64
	// N is the number of pairs, or of the smaller side's samples; Aside of the pairs were set
	// aside because the machine changed its speed.
	N, Aside int
	// Detectable is the change that would have been seen in nine of ten runs: 0.15 is fifteen
	// percent worse. 0 if that is unknown, +Inf if no change would have been.
	Detectable float64
	// Noise says that the verdict is inconclusive for no other reason than noise, in spite of
	// enough runs.
	Noise bool
	// Note says why, in a few words.
	Note string
}

// Report is what Judge returns.
type Report struct {
	Verdict Verdict
	// Base and Head are the names of the two sides; Base is empty if there is none.
	Base, Head string
	// BaseRuns and HeadRuns are how many samples a benchmark has at most.
	BaseRuns, HeadRuns int
	// Paired says that runs were compared with their neighbours in time.
	Paired bool
	// Tests is how many tests the p-values are corrected for.
	Tests int
	// Alpha and Threshold are the rules'.
	Alpha, Threshold float64
	// Findings come worst first, then by name.
	Findings []Finding
	// Problems are why nothing is green beside the findings. Notes change nothing.
	Problems, Notes []string
}

// ExitCode is 0 for a pass, 1 for a regression, 2 for everything else.
func (r *Report) ExitCode() int {
	switch r.Verdict {
	case Pass:
		return 0
	case Regression:
		return 1
	}
	return 2
}

// Options say what Judge overlooks.
type Options struct {
	// Force compares files of different machines.
	Force bool
	// TolerateNoise lets findings that are inconclusive by noise alone be, and judges by the
	// others: a gate that nobody has to run again, and that sees less on a noisy day.
	TolerateNoise bool
}

// Judge compares two sides by rules; base may be nil, and then only the rules' limits are
// judged. It changes neither set.
func Judge(base, head *Set, rules *Rules, o Options) *Report {
	j := &judge{rules: rules, base: base, head: head, effects: map[int]float64{}, r: &Report{Alpha: rules.Alpha, Threshold: rules.Threshold}}
	r := j.r
	r.Head, r.HeadRuns = head.Name, head.runs()
	if base != nil {
		r.Base, r.BaseRuns = base.Name, base.runs()
	}
	j.files()
	switch {
	case base == nil:
		r.Notes = append(r.Notes, "there is no base: the limits alone are judged")
	case j.sameMachine() || o.Force:
		j.compare()
	}
	for i := range rules.Limits {
		j.limit(&rules.Limits[i])
	}
	j.decide()
	j.conclude(o.TolerateNoise)
	return r
}

// judge is one call of Judge.
type judge struct {
	rules      *Rules
	base, head *Set
	r          *Report
	pending    []pending
	unknown    []string        // units whose better direction nobody knows
	effects    map[int]float64 // for detectable
}

// pending is a finding that waits for the correction of its p-value.
type pending struct {
	Finding
	e          estimate
	threshold  float64 // as a logarithm: what the shift must exceed
	resolution float64 // as a logarithm
	worse      float64 // +1 if a larger ratio is worse, -1 if a smaller one is
	limit      bool
	exact      bool // values that should not differ but do, from run to run
	grown      bool // of those: by more than their tolerance
}

func (j *judge) add(f Finding)                      { j.r.Findings = append(j.r.Findings, f) }
func (j *judge) problem(format string, args ...any) { addFault(&j.r.Problems, format, args...) }

// files looks at what is wrong with the files as a whole.
func (j *judge) files() {
	sets := []*Set{j.head}
	if j.base != nil {
		sets = []*Set{j.base, j.head}
	}
	trailers := slices.ContainsFunc(sets, func(s *Set) bool { return s.trailers })
	for _, s := range sets {
		for _, f := range s.Faults {
			j.problem("%s: %s", s.Name, f)
		}
		if trailers && s.open {
			j.problem("%s: truncated: its last package does not end in PASS, FAIL or ok", s.Name)
		}
		if s.runs() == 0 {
			j.problem("%s: no benchmark results", s.Name)
		}
	}
}

// sameMachine says whether both files come from machines that look alike. What one of them
// does not say is no difference.
func (j *judge) sameMachine() bool {
	same := true
	for _, key := range []string{"goos", "goarch", "cpu", "procs"} {
		a, b := slices.Sorted(slices.Values(j.base.Machine[key])), slices.Sorted(slices.Values(j.head.Machine[key]))
		if len(a) == 0 || len(b) == 0 || slices.Equal(a, b) {
			continue
		}
		if key == "procs" { // several are a benchmark's own matter: -cpu 1,2,4
			if len(a) > 1 || len(b) > 1 {
				continue
			}
			key = "GOMAXPROCS"
		}
		same = false
		j.problem("another machine: %s is %s in %s and %s in %s; not compared without --force",
			key, strings.Join(a, " and "), j.base.Name, strings.Join(b, " and "), j.head.Name)
	}
	return same
}

// compare compares every benchmark of either side.
func (j *judge) compare() {
	taken := map[Key]bool{}
	for _, b := range j.base.Benches {
		if _, _, ignored := j.rules.exception(b.Key, ""); ignored {
			taken[b.Key] = true
			j.add(Finding{Verdict: Ignored, Bench: b.Key.String(), Note: "by the rules"})
			continue
		}
		h := j.head.bench(b.Key)
		if h == nil {
			if to, ok := j.rules.renamed(b.Key, j.head); ok {
				h = j.head.bench(to)
			}
		}
		if h == nil {
			f := Finding{Verdict: Inconclusive, Bench: b.Key.String(), Note: "missing in " + j.head.Name}
			if reason, ok := j.rules.removed(b.Key); ok {
				f.Verdict, f.Note = Removed, reason
			}
			j.add(f)
			continue
		}
		taken[h.Key] = true
		j.bench(b, h)
	}
	for _, h := range j.head.Benches {
		if taken[h.Key] {
			continue
		}
		f := Finding{Verdict: New, Bench: h.Key.String(), Note: "not in " + j.base.Name}
		if len(h.Faults) > 0 {
			f.Verdict, f.Note = Inconclusive, strings.Join(h.Faults, "; ")
		}
		j.add(f)
	}
	j.speeds()
}

// bench compares all units of a benchmark.
func (j *judge) bench(b, h *Bench) {
	name := h.Key.String()
	if b.Key != h.Key {
		name = b.Key.String() + " → " + h.Key.String()
	}
	if faults := slices.Concat(b.Faults, h.Faults); len(faults) > 0 {
		f := Finding{Verdict: Inconclusive, Bench: name, Note: strings.Join(faults, "; ")}
		skipped := func(b *Bench) bool {
			return len(b.Samples) == 0 && len(b.Faults) == 1 && strings.HasPrefix(b.Faults[0], "skipped")
		}
		if skipped(b) && skipped(h) {
			f.Verdict, f.Note = Ignored, "skipped on both sides"
		}
		j.add(f)
		return
	}
	before, now := b.units(), h.units()
	for _, unit := range before {
		m, known := j.rules.metric(unit, j.base, j.head)
		if !known && !slices.Contains(j.unknown, unit) {
			j.unknown = append(j.unknown, unit)
		}
		_, _, ignored := j.rules.exception(h.Key, unit)
		if m.Compare == Ignore || ignored {
			continue
		}
		f := Finding{Bench: name, Unit: unit, P: 1}
		switch {
		case !slices.Contains(now, unit):
			f.Verdict, f.Note = Inconclusive, "not reported by "+j.head.Name
			j.add(f)
		case m.Compare == Exact:
			j.exact(f, m, b, h)
		default:
			j.noisy(f, m, b, h)
		}
	}
	for _, unit := range now {
		if m, _ := j.rules.metric(unit, j.base, j.head); m.Compare != Ignore && !slices.Contains(before, unit) {
			j.add(Finding{Verdict: New, Bench: name, Unit: unit, Note: "not reported by " + j.base.Name})
		}
	}
}

// pairUp returns the values of a unit in both files, those of a pair at the same index if the
// files have pairs in common, as they are if not.
func pairUp(b, h *Bench, unit string) (base, head []float64, paired bool) {
	vb, vh := b.values(unit), h.values(unit)
	samePair := func(x, y Sample) bool { return x.Pair == y.Pair && x.Pair != noPair }
	if len(vb) > 0 && slices.EqualFunc(b.Samples, h.Samples, samePair) { // as perf gate writes them
		return vb, vh, true
	}
	at := map[string]int{}
	for i, s := range b.Samples {
		if s.Pair != noPair {
			at[s.Pair] = i
		}
	}
	for i, s := range h.Samples {
		if k, ok := at[s.Pair]; ok && s.Pair != noPair {
			base, head = append(base, vb[k]), append(head, vh[i])
		}
	}
	if len(base) > 0 {
		return base, head, true
	}
	return vb, vh, false
}

// noisy prepares the comparison of values by statistics.
func (j *judge) noisy(f Finding, m MetricRule, b, h *Bench) {
	base, head, paired := pairUp(b, h, f.Unit)
	f.Base, f.Head = medianOf(base), medianOf(head)
	for _, v := range slices.Concat(base, head) {
		if !(v > 0) {
			f.Verdict, f.Note = Inconclusive, fmt.Sprintf("a value of %v cannot be compared", v)
			if math.IsNaN(v) {
				f.Note = "some runs do not report it"
			}
			j.add(f)
			return
		}
	}
	p := pending{Finding: f, worse: 1}
	if m.Better == "higher" {
		p.worse = -1
	}
	lb, lh := logs(base), logs(head)
	if paired {
		j.r.Paired = true
		for i := range lh {
			lh[i] -= lb[i]
		}
		p.e = comparePairs(lh)
	} else {
		p.e = compareSides(lb, lh)
	}
	threshold, resolution, _ := j.rules.exception(h.Key, f.Unit)
	p.threshold, p.resolution = math.Log1p(threshold), math.Log1p(resolution)
	j.pending = append(j.pending, p)
}

func logs(v []float64) []float64 {
	l := make([]float64, len(v))
	for i, x := range v {
		l[i] = math.Log(x)
	}
	return l
}

// exact compares values that do not depend on the machine. If they differ from run to run of
// one side all the same, the mean must have grown, and by more than chance brings.
func (j *judge) exact(f Finding, m MetricRule, b, h *Bench) {
	base, head, paired := pairUp(b, h, f.Unit)
	f.Exact, f.N = true, min(len(base), len(head))
	f.Base, f.Head = medianOf(base), medianOf(head)
	if f.Base > 0 {
		f.Ratio = f.Head / f.Base
	}
	if slices.ContainsFunc(slices.Concat(base, head), math.IsNaN) {
		f.Verdict, f.Note = Inconclusive, "some runs do not report it"
		j.add(f)
		return
	}
	steady := slices.Min(base) == slices.Max(base) && slices.Min(head) == slices.Max(head)
	grown := beyond(mean(base), mean(head), m)
	if steady {
		f.Verdict = Pass
		switch {
		case grown:
			f.Verdict = Regression
		case beyond(f.Head, f.Base, m):
			f.Verdict = Improved
		}
		j.add(f)
		return
	}
	p := pending{Finding: f, exact: true, grown: grown, worse: 1}
	if m.Better == "higher" {
		p.worse = -1
	}
	if paired {
		d := make([]float64, len(head))
		for i := range d {
			d[i] = head[i] - base[i]
		}
		p.e = estimate{pairs: true, n: len(d), p: signedRank(d), shift: mean(d)}
	} else {
		p.e = compareSides(base, head)
		p.e.shift = mean(head) - mean(base)
	}
	j.pending = append(j.pending, p)
}

// beyond says whether a value has become worse by more than its tolerance.
func beyond(before, now float64, m MetricRule) bool {
	if m.Better == "higher" {
		return now < before*(1-m.Tolerance)-m.Slack
	}
	return now > before*(1+m.Tolerance)+m.Slack
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(max(len(v), 1))
}

// speeds looks for a machine with two speeds in files without pairs.
func (j *judge) speeds() {
	if j.r.Paired {
		return
	}
	var gaps []float64
	gap := map[string]float64{}
	for _, b := range j.base.Benches {
		h := j.head.bench(b.Key)
		if h == nil {
			continue
		}
		for _, unit := range b.units() {
			if m, _ := j.rules.metric(unit, j.base, j.head); m.Compare != Noisy {
				continue
			}
			v, w := b.values(unit), h.values(unit)
			if slices.ContainsFunc(slices.Concat(v, w), func(x float64) bool { return !(x > 0) }) {
				continue
			}
			if g := max(speeds(logs(v)), speeds(logs(w))); g > 0 {
				gap[b.Key.String()] = max(g, gap[b.Key.String()])
			}
		}
	}
	for _, g := range gap {
		gaps = append(gaps, g)
	}
	everywhere := 0.0
	if len(gaps) >= speedBenches {
		everywhere = medianOf(gaps)
	}
	for i := range j.pending {
		p := &j.pending[i]
		g, own := everywhere, gap[p.Bench]
		if own > 0 {
			g = own
		}
		if g > 0 && !p.exact && (own > 0 || math.Abs(p.e.shift) >= g/2) {
			p.e.unsure = fmt.Sprintf("the files show a machine with two speeds, %.1f times apart; measure both sides by turns", math.Exp(g))
		}
	}
}

// decide corrects the p-values of what is pending and turns it into findings.
func (j *judge) decide() {
	ps := make([]float64, len(j.pending))
	for i, p := range j.pending {
		ps[i] = p.e.p
	}
	adjusted := holm(ps)
	j.r.Tests = len(ps)
	for i := range j.pending {
		j.pending[i].P = adjusted[i]
		j.add(j.verdict(&j.pending[i], j.rules.Alpha/float64(len(ps))))
	}
}

// verdict turns a comparison with a corrected p-value into a finding. alpha is the level of
// one test among all.
func (j *judge) verdict(p *pending, alpha float64) Finding {
	f := p.Finding
	f.N, f.Aside = p.e.n, p.e.aside
	shift := p.worse * p.e.shift
	found := f.P <= j.rules.Alpha
	few := p.e.n < DefaultCount
	if p.exact {
		switch {
		case p.grown && found && shift > 0:
			f.Verdict = Regression
		case few:
			f.Verdict, f.Note = Inconclusive, fmt.Sprintf("differs from run to run, and %d of %d runs are too few to compare it", p.e.n, DefaultCount)
		default:
			f.Verdict, f.Note = Pass, "differs from run to run"
		}
		return f
	}
	f.Ratio = math.Exp(p.e.shift)
	if !math.IsInf(p.e.hi, 1) {
		f.Lo, f.Hi = math.Exp(p.e.lo), math.Exp(p.e.hi)
	}
	if p.limit { // the shift is from the bound
		f.Ratio, f.Lo, f.Hi = f.Ratio*f.Base, f.Lo*f.Base, f.Hi*f.Base
		f.Base = 0
	}
	seen := p.e.detectable(alpha, p.e.n-p.e.aside, j.effects)
	if p.e.sd > 0 || math.IsInf(seen, 1) {
		f.Detectable = math.Expm1(seen)
	}
	switch {
	case found && shift > p.threshold && p.e.unsure != "":
		f.Verdict, f.Note = Inconclusive, p.e.unsure
	case found && shift > p.threshold:
		f.Verdict = Regression
	case few:
		f.Verdict, f.Note = Inconclusive, j.tooFew(p, alpha)
	case p.e.minP > alpha:
		f.Noise = true
		f.Verdict, f.Note = Inconclusive, "too few pairs are left"
	case p.limit && shift > p.threshold:
		f.Noise = true
		f.Verdict, f.Note = Inconclusive, "above the limit, but not beyond what chance brings"
		if p.worse < 0 {
			f.Note = "below the limit, but not beyond what chance brings"
		}
	case !p.limit && seen > p.resolution:
		f.Noise = true
		f.Verdict, f.Note = Inconclusive, fmt.Sprintf("too noisy: could have seen %s, not less", percent(math.Expm1(seen)))
	case !p.limit && found && shift < -p.threshold:
		f.Verdict = Improved
	default:
		f.Verdict = Pass
	}
	return f
}

// tooFew says what a comparison with too few runs could have seen, and what it will with more.
func (j *judge) tooFew(p *pending, alpha float64) string {
	note := fmt.Sprintf("%d of %d runs: ", p.e.n, DefaultCount)
	if p.e.n < 2 || p.e.sd == 0 {
		return note + "too few to see anything"
	}
	could := p.e.detectable(alpha, p.e.n-p.e.aside, j.effects)
	if !math.IsInf(could, 1) {
		return note + "could have seen " + percent(math.Expm1(could))
	}
	will := p.e.detectable(alpha, DefaultCount, j.effects)
	return note + fmt.Sprintf("too few to see anything; %d could have seen %s", DefaultCount, percent(math.Expm1(will)))
}

// percent writes a change: "+12 %".
func percent(x float64) string {
	if x >= 9.995 {
		return fmt.Sprintf("x%.3g", 1+x)
	}
	return fmt.Sprintf("%+.3g %%", 100*x)
}

// rank orders verdicts from bad to good.
func rank(v Verdict) int {
	return slices.Index([]Verdict{Regression, Inconclusive, Removed, New, Improved, Pass, Ignored}, v)
}

// conclude sorts the findings and makes a verdict of them.
func (j *judge) conclude(tolerate bool) {
	r := j.r
	slices.SortStableFunc(r.Findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(rank(a.Verdict), rank(b.Verdict)), strings.Compare(a.Limit, b.Limit),
			strings.Compare(a.Bench, b.Bench), strings.Compare(a.Unit, b.Unit))
	})
	judged := 0
	slower, compared := 0, 0
	for _, f := range r.Findings {
		if f.Verdict != New && f.Verdict != Removed && f.Verdict != Ignored && !f.Noise {
			judged++
		}
		if f.Limit == "" && !f.Exact && f.Ratio != 0 {
			compared++
			if f.Verdict == Regression {
				slower++
			}
		}
	}
	if judged == 0 && len(r.Problems) == 0 { // what is tolerated does not make a pass either
		j.problem("nothing was judged")
	}
	if len(j.unknown) > 0 {
		slices.Sort(j.unknown)
		r.Notes = append(r.Notes, fmt.Sprintf("not judged, since nobody says whether more is better: %s", strings.Join(j.unknown, ", ")))
	}
	if !r.Paired && compared >= 4 && 2*slower > compared {
		r.Notes = append(r.Notes, "most benchmarks are slower: if the machine was, measure both sides by turns")
	}
	r.Verdict = Pass
	if len(r.Problems) > 0 {
		r.Verdict = Inconclusive
	}
	for _, f := range r.Findings {
		if f.Verdict == Regression {
			r.Verdict = Regression
			break
		}
		if f.Verdict == Inconclusive && !(tolerate && f.Noise) {
			r.Verdict = Inconclusive
		}
	}
}
