package gate

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/perf/benchfmt"
)

// Bounds on a benchmark file: what is beyond them is a fault, not a reason to use up memory.
const (
	maxFileBytes = 256 << 20
	maxSamples   = 1000 // of one benchmark: the statistics take the square of it
	maxFaults    = 20   // listed for one file or benchmark
)

// Read reads the output of go test -bench, of one run or of many. What is wrong with it is no
// error but a fault in the Set, so that it reaches the verdict; an error means that r failed.
// name is for messages.
//
// Lines "key: value" may stand between results, as the format allows. The key "pair" says to
// which run the results after it belong: results of the same pair in two files were measured
// one right after the other, and are compared with each other.
func Read(r io.Reader, name string) (*Set, error) {
	s := &Set{Name: name, Machine: map[string][]string{}, Better: map[string]bool{}, Exact: map[string]bool{}}
	text, err := io.ReadAll(io.LimitReader(r, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(text) > maxFileBytes {
		s.fault("larger than %d MiB", maxFileBytes>>20)
		return s, nil
	}
	if !utf8.Valid(text) {
		s.fault("not UTF-8 text; PowerShell's > writes UTF-16, use Out-File -Encoding utf8")
		return s, nil
	}
	text = bytes.TrimPrefix(text, []byte("\ufeff"))
	text = bytes.ReplaceAll(text, []byte("\r\n"), []byte("\n"))
	if len(text) > 0 && text[len(text)-1] != '\n' {
		s.fault("truncated: the last line has no end")
	}
	p := parser{set: s, benches: map[Key]*Bench{}}
	p.markers(text)
	p.results(text)
	p.finish()
	return s, nil
}

func (s *Set) fault(format string, args ...any) { addFault(&s.Faults, format, args...) }

func addFault(faults *[]string, format string, args ...any) {
	msg := fmt.Sprintf(format, args...)
	if len(*faults) < maxFaults && !slices.Contains(*faults, msg) {
		*faults = append(*faults, msg)
	}
}

// parser fills a Set.
type parser struct {
	set     *Set
	benches map[Key]*Bench
	failed  []int // lines that say that a benchmark failed; in order
}

// get returns the benchmark of a key, a new one if need be.
func (p *parser) get(k Key) *Bench {
	b := p.benches[k]
	if b == nil {
		b = &Bench{Key: k}
		p.benches[k] = b
	}
	return b
}

// markers looks at the lines that are no results: what has failed, and where a package ends.
func (p *parser) markers(text []byte) {
	s, pkg, ended, n := p.set, "", true, 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimRight(line, "\n")
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		switch {
		case strings.HasPrefix(line, "pkg: "):
			pkg, ended = strings.TrimSpace(line[5:]), false
		case strings.HasPrefix(line, `{"`):
			s.fault("looks like the output of go test -json; plain output is wanted")
		case f[0] == "ok" || f[0] == "PASS" || f[0] == "FAIL":
			s.trailers, ended = true, true
			if f[0] == "FAIL" && len(f) > 1 {
				s.fault("%s failed", f[1])
			} else if f[0] == "FAIL" {
				s.fault("a package failed")
			}
		case strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: "):
			s.fault("%s", line)
		}
		// "--- FAIL: BenchmarkX-2" may be indented, or stand after the name's first half line.
		for mark, what := range map[string]string{"--- FAIL: Benchmark": "failed", "--- SKIP: Benchmark": "skipped"} {
			if _, rest, ok := strings.Cut(line, mark); ok && strings.TrimSpace(rest) != "" {
				addFault(&p.get(Key{pkg, strings.Fields(rest)[0]}).Faults, "%s in %s", what, s.Name)
				p.failed = append(p.failed, n)
			}
		}
	}
	s.open = !ended
}

// results takes the benchmark lines.
func (p *parser) results(text []byte) {
	s := p.set
	r := benchfmt.NewReader(bytes.NewReader(text), s.Name)
	for r.Scan() {
		switch rec := r.Result().(type) {
		case *benchfmt.SyntaxError:
			if _, known := slices.BinarySearch(p.failed, rec.Line); !known {
				s.fault("line %d: %s", rec.Line, rec.Msg)
			}
		case *benchfmt.UnitMetadata:
			switch {
			case rec.Key == "better":
				s.Better[rec.OrigUnit] = rec.Value == "higher"
			case rec.Key == "assume" && rec.Value == "exact":
				s.Exact[rec.OrigUnit] = true
			}
		case *benchfmt.Result:
			p.result(rec)
		}
	}
	if err := r.Err(); err != nil {
		s.fault("%v", err)
	}
}

// result takes one benchmark line.
func (p *parser) result(rec *benchfmt.Result) {
	for _, key := range []string{"goos", "goarch", "cpu"} {
		p.machine(key, rec.GetConfig(key))
	}
	name := rec.Name.String()
	_, procs := splitProcs(name)
	if procs == "" {
		procs = "1"
	}
	p.machine("procs", procs)
	b := p.get(Key{rec.GetConfig("pkg"), name})
	_, line := rec.Pos()
	where := fmt.Sprintf("%s:%d", p.set.Name, line)
	if rec.Iters <= 0 {
		addFault(&b.Faults, "%s: %d iterations", where, rec.Iters)
	}
	if len(b.Samples) >= maxSamples {
		addFault(&b.Faults, "more than %d samples in %s", maxSamples, p.set.Name)
		return
	}
	sample := Sample{Pair: rec.GetConfig("pair"), Values: make([]Value, 0, len(rec.Values))}
	for _, v := range rec.Values {
		x, unit := v.Value, v.Unit
		if v.OrigUnit != "" {
			x, unit = v.OrigValue, v.OrigUnit
		}
		if slices.ContainsFunc(sample.Values, func(o Value) bool { return o.Unit == unit }) {
			addFault(&b.Faults, "%s: two values of %s", where, unit)
		}
		if math.IsNaN(x) || math.IsInf(x, 0) || x < 0 {
			addFault(&b.Faults, "%s: %v %s", where, x, unit)
		}
		sample.Values = append(sample.Values, Value{unit, x})
	}
	if sample.Pair != noPair && slices.ContainsFunc(b.Samples, func(o Sample) bool { return o.Pair == sample.Pair }) {
		addFault(&b.Faults, "%s: duplicated in pair %s", where, sample.Pair)
	}
	b.Samples = append(b.Samples, sample)
}

func (p *parser) machine(key, value string) {
	m := p.set.Machine
	if value != "" && !slices.Contains(m[key], value) && len(m[key]) < maxFaults {
		m[key] = append(m[key], value)
	}
}

// finish sorts, and looks at what only shows when everything is read.
func (p *parser) finish() {
	s := p.set
	counts := map[int]int{}
	for _, b := range p.benches {
		s.Benches = append(s.Benches, b)
		counts[len(b.Samples)]++
	}
	slices.SortFunc(s.Benches, func(a, b *Bench) int { return compareKeys(a.Key, b.Key) })
	// A name that stands for two benchmarks has twice the samples of the others.
	usual, most := 0, 0
	for n, times := range counts {
		if times > most || times == most && n < usual {
			usual, most = n, times
		}
	}
	for _, b := range s.Benches {
		if len(b.Samples) > 0 && b.Samples[0].Pair != noPair {
			continue // result has looked
		}
		if n := len(b.Samples); len(s.Benches) > 2 && usual > 0 && n > usual && n%usual == 0 {
			addFault(&b.Faults, "duplicated: %d samples in %s, where others have %d", n, s.Name, usual)
		}
	}
	for key, values := range s.Machine {
		if key != "procs" && len(values) > 1 {
			s.fault("of several machines: %s is %s", key, strings.Join(values, " and "))
		}
	}
	slices.Sort(s.Faults)
}
