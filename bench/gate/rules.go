package gate

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// The gate's defaults. The proof in proof_test.go is for these.
const (
	// DefaultCount is how often each side of a benchmark is run, and the least that makes a
	// comparison without a finding green: that of fewer runs would say little.
	DefaultCount = 20
	// DefaultThreshold is how much slower is too slow.
	DefaultThreshold = 0.10
	// DefaultAlpha bounds how often chance turns a run red, for all its benchmarks together:
	// half of it, since the tests look both ways and red is one of them.
	DefaultAlpha = 0.01
	// DefaultResolution is what a comparison must be able to see for its silence to mean
	// something: a benchmark that could be half as slow again unnoticed is not green.
	DefaultResolution = 0.50
)

// Rules is what a rule file says: what to run, how to judge, and what must hold on any machine.
// Use DefaultRules or LoadRules for one; its zero value judges by a threshold of nothing.
type Rules struct {
	// Run says what perf gate runs when it is given no files.
	Run RunRules `toml:"run"`
	// Threshold is how much worse a measurement must have become to be a regression: 0.1 is
	// ten percent. From 0 to 10.
	Threshold float64 `toml:"threshold"`
	// Alpha is the level of the tests, corrected for their number. Above 0, at most 0.1.
	Alpha float64 `toml:"alpha"`
	// Resolution is the effect that a comparison must have been able to see to pass: 0.5 is
	// half as slow again. At least Threshold.
	Resolution float64 `toml:"resolution"`
	// Count is how often Run runs either side. With fewer than DefaultCount nothing that is
	// noisy passes.
	Count int `toml:"count"`

	// Metrics says how units are compared; what is missing here comes from the benchmark
	// files' "Unit" lines and from what the testing package's own units mean.
	Metrics []MetricRule `toml:"metric"`
	// Benches are exceptions for some benchmarks; of several that fit, the last counts.
	Benches []BenchRule `toml:"bench"`
	// Limits hold for the head alone, on any machine.
	Limits []LimitRule `toml:"limit"`
	// Renamed and Removed say which benchmarks of the base are gone on purpose.
	Renamed []RenameRule `toml:"renamed"`
	Removed []RemoveRule `toml:"removed"`
}

// RunRules are the defaults of perf gate's flags.
type RunRules struct {
	// Packages are patterns for go list; none is "./...".
	Packages []string `toml:"packages"`
	// Bench is a regular expression for go test -bench; empty is ".".
	Bench string `toml:"bench"`
	// Benchtime is that of go test, a time or "100x"; empty is "100ms".
	Benchtime string `toml:"benchtime"`
	// Tags are build tags, separated by commas.
	Tags string `toml:"tags"`
	// CPU is GOMAXPROCS for the benchmarks; 0 leaves it alone.
	CPU int `toml:"cpu"`
	// Timeout bounds builds and runs; what is measured by then is judged. 0 is 30 minutes.
	Timeout Duration `toml:"timeout"`
}

// Duration is a time in a rule file: "9m30s".
type Duration struct{ time.Duration }

// UnmarshalText parses what time.ParseDuration parses.
func (d *Duration) UnmarshalText(text []byte) (err error) {
	d.Duration, err = time.ParseDuration(string(text))
	return err
}

// Ways to compare a unit.
const (
	// Noisy values are compared by the statistics.
	Noisy = "noisy"
	// Exact values are compared as they are: any increase is a regression.
	Exact = "exact"
	// Ignore leaves a unit out.
	Ignore = "ignore"
)

// MetricRule says how the values of a unit are compared.
type MetricRule struct {
	// Unit as printed: "ns/op".
	Unit string `toml:"unit"`
	// Better is "lower" or "higher".
	Better string `toml:"better"`
	// Compare is Noisy (if empty), Exact or Ignore.
	Compare string `toml:"compare"`
	// Tolerance and Slack bound what an exact value may grow by: a fraction of it and an
	// absolute amount, added up.
	Tolerance float64 `toml:"tolerance"`
	Slack     float64 `toml:"slack"`
}

// BenchRule is an exception.
type BenchRule struct {
	// Name is a pattern: see Matches.
	Name string `toml:"name"`
	// Unit is the only one that the exception is for; empty is all.
	Unit string `toml:"unit"`
	// Threshold and Resolution replace those of Rules unless they are 0.
	Threshold  float64 `toml:"threshold"`
	Resolution float64 `toml:"resolution"`
	// Ignore leaves the benchmark out; Reason says why, and is required then.
	Ignore bool   `toml:"ignore"`
	Reason string `toml:"reason"`
}

// LimitRule bounds a metric of the head, or the ratio of two benchmarks' in the same run.
type LimitRule struct {
	// Name says what the rule is about, in reports.
	Name string `toml:"name"`
	// Bench is the benchmark, a pattern if Over is empty.
	Bench string `toml:"bench"`
	// Over is the benchmark that Bench is divided by, run by run; empty: by nothing.
	Over string `toml:"over"`
	// Unit is "ns/op" if empty.
	Unit string `toml:"unit"`
	// Max and Min are the bounds, of which at least one is given.
	Max *float64 `toml:"max"`
	Min *float64 `toml:"min"`
}

// RenameRule says that a benchmark of the base has another name in the head.
type RenameRule struct {
	From string `toml:"from"`
	To   string `toml:"to"`
}

// RemoveRule says that benchmarks of the base are gone from the head.
type RemoveRule struct {
	Name   string `toml:"name"` // a pattern
	Reason string `toml:"reason"`
}

// DefaultRules judges by the defaults, without limits or exceptions.
func DefaultRules() *Rules {
	return &Rules{
		Threshold: DefaultThreshold, Alpha: DefaultAlpha, Resolution: DefaultResolution, Count: DefaultCount,
	}
}

// LoadRules reads a rule file. What it doesn't say is as in DefaultRules; a key that has no
// meaning is an error, and so are values out of range.
func LoadRules(text []byte) (*Rules, error) {
	r := DefaultRules()
	d := toml.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(r); err != nil {
		var unknown *toml.StrictMissingError
		if errors.As(err, &unknown) && len(unknown.Errors) > 0 {
			e := unknown.Errors[0]
			line, _ := e.Position()
			return nil, fmt.Errorf("line %d: unknown key %q", line, strings.Join(e.Key(), "."))
		}
		var bad *toml.DecodeError
		if errors.As(err, &bad) {
			line, _ := bad.Position()
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		return nil, err
	}
	if err := r.Check(); err != nil {
		return nil, err
	}
	return r, nil
}

// Check says what is out of range.
func (r *Rules) Check() error {
	bad := func(x, lo, hi float64) bool { return math.IsNaN(x) || x < lo || x > hi }
	switch {
	case bad(r.Threshold, 0, 10):
		return fmt.Errorf("threshold %v is not from 0 to 10", r.Threshold)
	case bad(r.Alpha, 1e-9, 0.1):
		return fmt.Errorf("alpha %v is not above 0 and at most 0.1", r.Alpha)
	case bad(r.Resolution, r.Threshold, 100):
		return fmt.Errorf("resolution %v is not from the threshold, %v, to 100", r.Resolution, r.Threshold)
	case r.Count < 1 || r.Count > maxSamples:
		return fmt.Errorf("count %d is not from 1 to %d", r.Count, maxSamples)
	case r.Run.CPU < 0 || r.Run.CPU > 1024:
		return fmt.Errorf("run.cpu %d is not from 0 to 1024", r.Run.CPU)
	case r.Run.Timeout.Duration < 0:
		return fmt.Errorf("run.timeout %v is negative", r.Run.Timeout)
	}
	for _, m := range r.Metrics {
		switch {
		case m.Unit == "":
			return errors.New("a metric has no unit")
		case m.Compare != "" && m.Compare != Noisy && m.Compare != Exact && m.Compare != Ignore:
			return fmt.Errorf("metric %s: compare is %q, not noisy, exact or ignore", m.Unit, m.Compare)
		case m.Better != "lower" && m.Better != "higher" && m.Compare != Ignore:
			return fmt.Errorf("metric %s: better is %q, not lower or higher", m.Unit, m.Better)
		case bad(m.Tolerance, 0, 10) || bad(m.Slack, 0, math.MaxFloat64):
			return fmt.Errorf("metric %s: tolerance or slack out of range", m.Unit)
		case (m.Tolerance != 0 || m.Slack != 0) && m.Compare != Exact:
			return fmt.Errorf("metric %s: tolerance and slack are for exact values", m.Unit)
		}
	}
	for _, b := range r.Benches {
		switch {
		case b.Name == "":
			return errors.New("a bench has no name")
		case b.Ignore && b.Reason == "":
			return fmt.Errorf("bench %s: ignored without a reason", b.Name)
		case bad(b.Threshold, 0, 10) || bad(b.Resolution, 0, 100):
			return fmt.Errorf("bench %s: threshold or resolution out of range", b.Name)
		}
	}
	for i := range r.Limits {
		l := &r.Limits[i]
		l.Unit = cmp.Or(l.Unit, "ns/op")
		switch {
		case l.Name == "" || l.Bench == "":
			return errors.New("a limit has no name or no bench")
		case l.Max == nil && l.Min == nil:
			return fmt.Errorf("limit %q: neither max nor min", l.Name)
		case l.Max != nil && bad(*l.Max, 0, math.MaxFloat64) || l.Min != nil && bad(*l.Min, 0, math.MaxFloat64):
			return fmt.Errorf("limit %q: max or min out of range", l.Name)
		case l.Over != "" && (strings.Contains(l.Bench, "*") || strings.Contains(l.Over, "*")):
			return fmt.Errorf("limit %q: a ratio is of two benchmarks, not of patterns", l.Name)
		case l.Over != "" && (l.Max != nil && *l.Max == 0 || l.Min != nil && *l.Min == 0):
			return fmt.Errorf("limit %q: a ratio has no bound of zero", l.Name)
		}
	}
	for _, n := range r.Renamed {
		if n.From == "" || n.To == "" {
			return errors.New("a renamed benchmark needs from and to")
		}
	}
	for _, n := range r.Removed {
		if n.Name == "" || n.Reason == "" {
			return errors.New("a removed benchmark needs a name and a reason")
		}
	}
	return nil
}

// Matches says whether a pattern of a rule file means a benchmark. A pattern is a name as in
// the source ("BenchmarkPost/RTR") or as in reports ("Post/RTR"), without "-GOMAXPROCS", with
// or without the end of the package's path in front ("deferral.Post/RTR",
// "bench/deferral.Post/RTR"). A "*" is any text.
func Matches(pattern string, k Key) bool {
	bare := k.bare()
	for _, name := range []string{bare.Name, "Benchmark" + bare.Name} {
		if glob(pattern, name) {
			return true
		}
		for at := bare.Pkg; at != ""; {
			if glob(pattern, at+"."+name) {
				return true
			}
			_, at, _ = strings.Cut(at, "/")
		}
	}
	return false
}

// glob matches text with a pattern in which "*" is any text.
func glob(pattern, text string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == text
	}
	if !strings.HasPrefix(text, head) {
		return false
	}
	for i := len(head); i <= len(text); i++ {
		if glob(rest, text[i:]) {
			return true
		}
	}
	return false
}

// metric is how a unit is compared, and whether anyone has said so.
func (r *Rules) metric(unit string, sets ...*Set) (m MetricRule, known bool) {
	if i := slices.IndexFunc(r.Metrics, func(m MetricRule) bool { return m.Unit == unit }); i >= 0 {
		m = r.Metrics[i]
		m.Compare = cmp.Or(m.Compare, Noisy)
		return m, true
	}
	for _, s := range sets {
		if s == nil {
			continue
		}
		if higher, ok := s.Better[unit]; ok {
			m = MetricRule{Unit: unit, Better: "lower", Compare: Noisy}
			if higher {
				m.Better = "higher"
			}
			if s.Exact[unit] {
				m.Compare = Exact
			}
			return m, true
		}
	}
	switch unit {
	case "ns/op":
		return MetricRule{Unit: unit, Better: "lower", Compare: Noisy}, true
	case "allocs/op":
		return MetricRule{Unit: unit, Better: "lower", Compare: Exact}, true
	case "B/op":
		// What is allocated once is divided by a number of iterations that differs from run to
		// run; an allocation more shows in allocs/op.
		return MetricRule{Unit: unit, Better: "lower", Compare: Exact, Tolerance: 0.02, Slack: 16}, true
	case "instructions/op", "insns/op", "insts/op", "instrs/op":
		return MetricRule{Unit: unit, Better: "lower", Compare: Exact}, true
	case "MB/s":
		// The testing package computes it from ns/op, which is judged.
		return MetricRule{Unit: unit, Better: "higher", Compare: Ignore}, true
	}
	return MetricRule{Unit: unit, Compare: Ignore}, false
}

// exception is what the rules say about one benchmark's unit.
func (r *Rules) exception(k Key, unit string) (threshold, resolution float64, ignored bool) {
	threshold, resolution = r.Threshold, r.Resolution
	for _, b := range r.Benches {
		if !Matches(b.Name, k) || b.Unit != "" && b.Unit != unit {
			continue
		}
		threshold, resolution = cmp.Or(b.Threshold, threshold), cmp.Or(b.Resolution, resolution)
		ignored = b.Ignore
	}
	return threshold, max(resolution, threshold), ignored
}

// renamed returns the head's name of a benchmark of the base.
func (r *Rules) renamed(k Key, head *Set) (to Key, ok bool) {
	for _, n := range r.Renamed {
		if !Matches(n.From, k) {
			continue
		}
		for _, b := range head.Benches {
			if Matches(n.To, b.Key) && procsOf(b.Key) == procsOf(k) {
				return b.Key, true
			}
		}
	}
	return Key{}, false
}

func procsOf(k Key) string {
	_, procs := splitProcs(k.Name)
	return procs
}

// removed returns why a benchmark of the base is gone.
func (r *Rules) removed(k Key) (reason string, ok bool) {
	for _, n := range r.Removed {
		if Matches(n.Name, k) {
			return n.Reason, true
		}
	}
	return "", false
}

// group is what keeps benchmarks in one process, so that a ratio is of neighbours in time: the
// number of the first limit that divides one by the other, -1 if none does. name is that of a
// top-level benchmark.
func (r *Rules) group(pkg, name string) int {
	return slices.IndexFunc(r.Limits, func(l LimitRule) bool {
		return l.Over != "" && (topMatches(l.Bench, Key{pkg, name}) || topMatches(l.Over, Key{pkg, name}))
	})
}

// topMatches says whether a rule's benchmark is a top-level benchmark, or one below it.
func topMatches(rule string, k Key) bool {
	if Matches(rule, k) {
		return true
	}
	for i, c := range rule {
		if c == '/' && Matches(rule[:i], k) {
			return true
		}
	}
	return false
}
