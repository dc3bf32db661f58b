package gate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// header is how go test begins a package's output.
const header = "goos: linux\ngoarch: amd64\npkg: example.org/m/p\ncpu: Some CPU\n"

// bench writes n lines of a benchmark whose times lie within a hundredth of ns.
func bench(name string, n int, ns float64, rest string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "Benchmark%s-2\t1000\t%.4g ns/op%s\n", name, ns*(1+0.01*math.Sin(float64(i)+ns)), rest)
	}
	return b.String()
}

func mustRead(t testing.TB, text, name string) *Set {
	t.Helper()
	s, err := Read(strings.NewReader(text), name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustRules(t testing.TB, text string) *Rules {
	t.Helper()
	r, err := LoadRules([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestVerdicts: what comes of two files.
func TestVerdicts(t *testing.T) {
	const n = DefaultCount
	alloc := func(bytes, allocs int) string { return fmt.Sprintf("\t%d B/op\t%d allocs/op", bytes, allocs) }
	two := header + bench("A", n, 100, "") + bench("B", n, 5000, "") + "PASS\nok  \texample.org/m/p\t3.1s\n"
	crlf := strings.ReplaceAll(two, "\n", "\r\n")
	replace := func(old, now string) string {
		if !strings.Contains(two, old) {
			t.Fatalf("no %q to replace", old)
		}
		return strings.Replace(two, old, now, 1)
	}
	firstB := bench("B", n, 5000, "")[:strings.Index(bench("B", n, 5000, ""), "\n")+1]
	tests := []struct {
		name, base, head string
		rules            string
		force            bool
		want             Verdict
		say              string // what the text must say
	}{
		{"identical", two, two, "", false, Pass, "2 pass"},
		{"slower", two, header + bench("A", n, 100, "") + bench("B", n, 6000, "") + "PASS\n", "", false, Regression, "p.B-2"},
		{"much slower", two, header + bench("A", n, 300, "") + bench("B", n, 15000, "") + "PASS\n", "", false, Regression, "2 regression"},
		{"a little slower", two, header + bench("A", n, 104, "") + bench("B", n, 5000, "") + "PASS\n", "", false, Pass, ""},
		{"faster", two, header + bench("A", n, 50, "") + bench("B", n, 5000, "") + "PASS\n", "", false, Pass, "1 improved"},
		{"a threshold for one", two, header + bench("A", n, 130, "") + bench("B", n, 5000, "") + "PASS\n", "[[bench]]\nname = 'BenchmarkA'\nthreshold = 0.5\n", false, Pass, ""},
		{"one left out", two, header + bench("A", n, 130, "") + bench("B", n, 5000, "") + "PASS\n", "[[bench]]\nname = 'p.A'\nignore = true\nreason = 'noise'\n", false, Pass, "1 ignored"},

		{"missing", two, header + bench("A", n, 100, "") + "PASS\n", "", false, Inconclusive, "missing in head"},
		{"removed on purpose", two, header + bench("A", n, 100, "") + "PASS\n", "[[removed]]\nname = 'p.B'\nreason = 'not of use'\n", false, Pass, "not of use"},
		{"removed, but another", two, header + bench("A", n, 100, "") + "PASS\n", "[[removed]]\nname = 'p.C'\nreason = 'not of use'\n", false, Inconclusive, "missing"},
		{"renamed", two, header + bench("A", n, 100, "") + bench("C", n, 5000, "") + "PASS\n", "", false, Inconclusive, "1 new"},
		{"renamed on purpose", two, header + bench("A", n, 100, "") + bench("C", n, 5000, "") + "PASS\n", "[[renamed]]\nfrom = 'B'\nto = 'C'\n", false, Pass, "2 pass"},
		{"renamed and slower", two, header + bench("A", n, 100, "") + bench("C", n, 9000, "") + "PASS\n", "[[renamed]]\nfrom = 'B'\nto = 'C'\n", false, Regression, "p.B-2 → p.C-2"},
		{"new", header + bench("A", n, 100, "") + "PASS\n", two, "", false, Pass, "1 new"},
		{"all new", header + bench("Z", n, 100, "") + "PASS\n", two, "", false, Inconclusive, "missing"},
		{"another package", two, strings.ReplaceAll(two, "/m/p", "/m/q"), "", false, Inconclusive, "missing"},

		{"empty head", two, "", "", false, Inconclusive, "no benchmark results"},
		{"empty base", "", two, "", false, Inconclusive, "no benchmark results"},
		{"both empty", "", "", "", false, Inconclusive, "no benchmark results"},
		{"headers only", header, header, "", false, Inconclusive, "no benchmark results"},
		{"no benchmarks match", "PASS\nok x 0.1s\n", "PASS\nok x 0.1s\n", "", false, Inconclusive, "no benchmark results"},
		{"text", "Dear all,\n\nlunch is at one.\n", two, "", false, Inconclusive, "no benchmark results"},
		{"bytes", "\x7fELF\x02\xff\xfe\x00", two, "", false, Inconclusive, "not UTF-8"},
		{"UTF-16", "\xff\xfeB\x00e\x00\n\x00", two, "", false, Inconclusive, "UTF-16"},
		{"JSON of go test", two, `{"Action":"output","Output":"BenchmarkA-2 1 1 ns/op\n"}` + "\n", "", false, Inconclusive, "go test -json"},

		{"CRLF", crlf, crlf, "", false, Pass, "2 pass"},
		{"CRLF on one side", two, crlf, "", false, Pass, "2 pass"},
		{"a byte order mark", "\ufeff" + two, two, "", false, Pass, "2 pass"},
		{"cut in a line", two, two[:len(two)/2], "", false, Inconclusive, "truncated"},
		{"cut after a line", two, two[:strings.Index(two, "PASS")], "", false, Inconclusive, "truncated"},
		{"the last byte gone", two, two[:len(two)-1], "", false, Inconclusive, "truncated"},
		{"filtered, both alike", two[:strings.Index(two, "PASS")], two[:strings.Index(two, "PASS")], "", false, Pass, ""},

		{"failed", two, replace(firstB, "--- FAIL: BenchmarkB-2\n    b_test.go:7: no\n"), "", false, Inconclusive, "failed in head"},
		{"failed behind its name", two, replace(firstB, "BenchmarkB-2         \t--- FAIL: BenchmarkB-2\n"), "", false, Inconclusive, "failed in head"},
		{"a package failed", two, strings.Replace(two, "PASS\nok", "FAIL\nFAIL", 1), "", false, Inconclusive, "failed"},
		{"panic", two, replace(firstB, "BenchmarkB-2 \tpanic: oh\n"), "", false, Inconclusive, "line 25"},
		{"skipped in the head", two, header + bench("A", n, 100, "") + "--- SKIP: BenchmarkB-2\nPASS\n", "", false, Inconclusive, "skipped in head"},
		{"skipped in both", header + bench("A", n, 100, "") + "--- SKIP: BenchmarkB-2\nPASS\n", header + bench("A", n, 100, "") + "--- SKIP: BenchmarkB-2\nPASS\n", "", false, Pass, "1 ignored"},

		{"another processor", two, replace("Some CPU", "Other CPU"), "", false, Inconclusive, "another machine: cpu"},
		{"another processor, forced", two, replace("Some CPU", "Other CPU"), "", true, Inconclusive, "another machine: cpu"},
		{"another system", two, replace("goos: linux", "goos: darwin"), "", false, Inconclusive, "goos"},
		{"another word size", two, replace("goarch: amd64", "goarch: 386"), "", false, Inconclusive, "goarch"},
		{"more processors", two, strings.ReplaceAll(two, "-2\t", "-4\t"), "", false, Inconclusive, "GOMAXPROCS is 2"},
		{"a processor unnamed", two, replace("cpu: Some CPU\n", ""), "", false, Pass, ""},
		{"two machines in a file", two, two + strings.ReplaceAll(two, "Some CPU", "Other CPU"), "", false, Inconclusive, "several machines"},

		{"NaN", two, replace(firstB, "BenchmarkB-2\t1000\tNaN ns/op\n"), "", false, Inconclusive, "NaN"},
		{"infinity", two, replace(firstB, "BenchmarkB-2\t1000\t+Inf ns/op\n"), "", false, Inconclusive, "Inf"},
		{"beyond floating point", two, replace(firstB, "BenchmarkB-2\t1000\t1e999 ns/op\n"), "", false, Inconclusive, ""},
		{"zero", two, replace(firstB, "BenchmarkB-2\t1000\t0 ns/op\n"), "", false, Inconclusive, "a value of 0"},
		{"all zero", header + bench("A", n, 0, ""), header + bench("A", n, 0, ""), "", false, Inconclusive, "a value of 0"},
		{"negative", two, replace(firstB, "BenchmarkB-2\t1000\t-5 ns/op\n"), "", false, Inconclusive, "-5 ns/op"},
		{"no iterations", two, replace(firstB, "BenchmarkB-2\t0\t5000 ns/op\n"), "", false, Inconclusive, "0 iterations"},
		{"no unit", two, replace(firstB, "BenchmarkB-2\t1000\t5000\n"), "", false, Inconclusive, "missing units"},
		{"no number", two, replace(firstB, "BenchmarkB-2\t1000\tfast ns/op\n"), "", false, Inconclusive, "line 25"},
		{"two values", two, replace(firstB, "BenchmarkB-2\t1000\t5000 ns/op\t5001 ns/op\n"), "", false, Inconclusive, "two values of ns/op"},
		{"a very long line", two, two + strings.Repeat("x", 1<<20) + "\n", "", false, Inconclusive, "too long"},
		{"a name twice", two + bench("C", n, 7, ""), two + bench("C", n, 7, "") + bench("C", n, 7, "") + "PASS\n", "", false, Inconclusive, "duplicated: 40 samples"},
		{"twice in a pair", "pair: 1\n" + header + bench("A", 1, 100, ""), "pair: 1\n" + header + bench("A", 2, 100, ""), "", false, Inconclusive, "duplicated in pair 1"},
		{"too many samples", two, header + bench("A", maxSamples+1, 100, "") + bench("B", n, 5000, "") + "PASS\n", "", false, Inconclusive, "more than 1000 samples"},

		{"an allocation more", header + bench("A", n, 100, alloc(0, 0)), header + bench("A", n, 100, alloc(16, 1)), "", false, Regression, "allocs/op"},
		{"an allocation less", header + bench("A", n, 100, alloc(16, 1)), header + bench("A", n, 100, alloc(0, 0)), "", false, Pass, "1 improved"},
		{"an allocation more, one run", header + bench("A", 1, 100, alloc(0, 0)), header + bench("A", 1, 100, alloc(8, 1)), "", false, Regression, "allocs/op"},
		{"bytes within the tolerance", header + bench("A", n, 100, alloc(1000, 2)), header + bench("A", n, 100, alloc(1036, 2)), "", false, Pass, ""},
		{"bytes beyond the tolerance", header + bench("A", n, 100, alloc(1000, 2)), header + bench("A", n, 100, alloc(1037, 2)), "", false, Regression, "B/op"},
		{"instructions", header + bench("A", n, 100, "\t5000 instructions/op"), header + bench("A", n, 100, "\t5001 instructions/op"), "", false, Regression, "instructions/op"},
		{"a metric gone", header + bench("A", n, 100, "\t5 allocs/op"), header + bench("A", n, 100, ""), "", false, Inconclusive, "not reported by head"},
		{"a metric new", header + bench("A", n, 100, ""), header + bench("A", n, 100, "\t5 allocs/op"), "", false, Pass, "1 new"},

		{"an unknown metric", header + bench("A", n, 100, "\t5 cats"), header + bench("A", n, 100, "\t50 cats"), "", false, Pass, "whether more is better: cats"},
		{"a known metric", header + bench("A", n, 100, "\t5 cats"), header + bench("A", n, 100, "\t50 cats"), "[[metric]]\nunit = 'cats'\nbetter = 'lower'\n", false, Regression, "cats"},
		{"more is better", header + bench("A", n, 100, "\t50 cats"), header + bench("A", n, 100, "\t5 cats"), "[[metric]]\nunit = 'cats'\nbetter = 'higher'\n", false, Regression, "cats"},
		{"more is better, and more it is", header + bench("A", n, 100, "\t5 cats"), header + bench("A", n, 100, "\t50 cats"), "[[metric]]\nunit = 'cats'\nbetter = 'higher'\n", false, Pass, "1 improved"},
		{"a metric by the file", "Unit cats better=higher\n" + header + bench("A", n, 100, "\t50 cats"), header + bench("A", n, 100, "\t5 cats"), "", false, Regression, "cats"},
		{"MB/s is not judged twice", header + bench("A", n, 100, "\t50 MB/s"), header + bench("A", n, 100, "\t5 MB/s"), "", false, Pass, ""},

		{"too few runs", header + bench("A", 10, 100, ""), header + bench("A", 10, 100, ""), "", false, Inconclusive, "10 of 20 runs: could have seen +"},
		{"too few runs by one", header + bench("A", n-1, 100, ""), header + bench("A", n-1, 100, ""), "", false, Inconclusive, "19 of 20 runs"},
		{"far too few runs", header + bench("A", 3, 100, ""), header + bench("A", 3, 100, ""), "", false, Inconclusive, "too few to see anything; 20 could have seen +"},
		{"one run", header + bench("A", 1, 100, ""), header + bench("A", 1, 300, ""), "", false, Inconclusive, "1 of 20 runs"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			r := Judge(mustRead(t, tc.base, "base"), mustRead(t, tc.head, "head"), mustRules(t, tc.rules), Options{Force: tc.force})
			var text strings.Builder
			if err := r.WriteText(&text, true); err != nil {
				t.Fatal(err)
			}
			if r.Verdict != tc.want || !strings.Contains(text.String(), tc.say) {
				t.Errorf("%s, want %s and %q in\n%s", r.Verdict, tc.want, tc.say, text.String())
			}
			if want := map[Verdict]int{Pass: 0, Regression: 1, Inconclusive: 2}[tc.want]; r.ExitCode() != want {
				t.Errorf("exit code %d, want %d", r.ExitCode(), want)
			}
		})
	}
}

// TestForce: files of different machines are compared when the user says so, and stay a problem.
func TestForce(t *testing.T) {
	base := mustRead(t, header+bench("A", DefaultCount, 100, ""), "base")
	head := mustRead(t, strings.Replace(header, "Some CPU", "Other CPU", 1)+bench("A", DefaultCount, 200, ""), "head")
	if r := Judge(base, head, DefaultRules(), Options{}); r.Verdict != Inconclusive || len(r.Findings) != 0 {
		t.Errorf("%s with %d findings, want none", r.Verdict, len(r.Findings))
	}
	if r := Judge(base, head, DefaultRules(), Options{Force: true}); r.Verdict != Regression {
		t.Errorf("%s, want a regression", r.Verdict)
	}
}

// TestTolerateNoise: noise alone is tolerated on demand, and nothing else.
func TestTolerateNoise(t *testing.T) {
	noisy := func(runs int) string {
		rnd := rand.New(rand.NewPCG(3, 3))
		var b strings.Builder
		b.WriteString(header)
		for range runs {
			fmt.Fprintf(&b, "BenchmarkNoisy-2 10 %.1f ns/op\n", 100*math.Exp(rnd.NormFloat64()))
		}
		return b.String()
	}
	quiet := bench("Quiet", DefaultCount, 100, "")
	for _, tc := range []struct {
		name, base, head string
		want             Verdict
	}{
		{"noise beside what can be told", noisy(DefaultCount) + quiet, noisy(DefaultCount) + quiet, Pass},
		{"nothing but noise", noisy(DefaultCount), noisy(DefaultCount), Inconclusive},
		{"too few runs", noisy(DefaultCount-1) + quiet, noisy(DefaultCount-1) + quiet, Inconclusive},
		{"missing", noisy(DefaultCount) + quiet + bench("Gone", DefaultCount, 5, ""), noisy(DefaultCount) + quiet, Inconclusive},
		{"slower", noisy(DefaultCount) + quiet, noisy(DefaultCount) + bench("Quiet", DefaultCount, 150, ""), Regression},
	} {
		base, head := mustRead(t, tc.base, "base"), mustRead(t, tc.head, "head")
		if r := Judge(base, head, DefaultRules(), Options{TolerateNoise: true}); r.Verdict != tc.want {
			t.Errorf("%s: %s, want %s: %+v", tc.name, r.Verdict, tc.want, r)
		}
		if r := Judge(base, head, DefaultRules(), Options{}); tc.want == Pass && r.Verdict != Inconclusive {
			t.Errorf("%s: %s without tolerance: %+v", tc.name, r.Verdict, r)
		}
	}
}

// TestLimits: rules that hold without a base, on any machine.
func TestLimits(t *testing.T) {
	const n = DefaultCount
	file := header + bench("Slow", n, 106, "\t0 B/op\t0 allocs/op") + bench("Fast", n, 100, "\t0 B/op\t0 allocs/op") + bench("Sub/a=1", n, 50, "\t8 B/op\t1 allocs/op") + "PASS\n"
	few := header + bench("Slow", 5, 106, "") + bench("Fast", 5, 100, "") + "PASS\n"
	rule := func(s string) string { return "[[limit]]\nname = 'a rule'\n" + s }
	for _, tc := range []struct {
		name, file, rules string
		want              Verdict
		say               string
	}{
		{"no limits", file, "", Inconclusive, "nothing was judged"},
		{"within", file, rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.1"), Pass, "a rule: p.Slow-2 / p.Fast-2"},
		{"beyond", file, rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.05"), Regression, "a rule"},
		{"within, from below", file, rule("bench = 'Slow'\nover = 'Fast'\nmin = 1.05"), Pass, ""},
		{"beyond, from below", file, rule("bench = 'Fast'\nover = 'Slow'\nmin = 0.95"), Regression, "a rule"},
		{"both bounds", file, rule("bench = 'Slow'\nover = 'Fast'\nmin = 0.9\nmax = 1.2"), Pass, "2 pass"},
		{"too few runs", few, rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.1"), Inconclusive, "5 of 20 runs"},
		{"not measured", file, rule("bench = 'Slow'\nover = 'Gone'\nmax = 1.1"), Inconclusive, "Gone was not measured"},
		{"a pattern fits nothing", file, rule("bench = 'Gone*'\nunit = 'allocs/op'\nmax = 0"), Inconclusive, "no such benchmark"},
		{"no allocations", file, rule("bench = 'p.*s*t'\nunit = 'allocs/op'\nmax = 0"), Pass, ""},
		{"an allocation", file, rule("bench = '*'\nunit = 'allocs/op'\nmax = 0"), Regression, "1 is above 0"},
		{"one run is enough for what is exact", header + bench("A", 1, 5, "\t1 allocs/op"), rule("bench = 'A'\nunit = 'allocs/op'\nmax = 1"), Pass, ""},
		{"a unit that is not reported", file, rule("bench = 'Slow'\nunit = 'cats'\nmax = 1"), Inconclusive, "does not report it"},
		{"sub-benchmarks", file, rule("bench = 'm/p.BenchmarkSub/a=1'\nover = 'Fast'\nmax = 0.6"), Pass, "p.Sub/a=1-2"},
		{"an absolute time", file, rule("bench = 'Slow'\nmax = 200"), Pass, ""},
		{"an absolute time exceeded", file, rule("bench = 'Slow'\nmax = 90"), Regression, ""},
		{"failed", file + "--- FAIL: BenchmarkFast-2\n", rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.1"), Inconclusive, "failed in head"},
		{"zero", strings.Replace(file, " ns/op\t0 B", "e-999 ns/op\t0 B", 1), rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.1"), Inconclusive, ""},
		{"ambiguous", file + strings.ReplaceAll(bench("Fast", n, 100, ""), "-2\t", "-4\t"), rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.1"), Inconclusive, "is both"},
		{"empty", "", rule("bench = '*'\nmax = 1.1"), Inconclusive, "no such benchmark"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := Judge(nil, mustRead(t, tc.file, "head"), mustRules(t, tc.rules), Options{})
			var text strings.Builder
			if err := r.WriteText(&text, true); err != nil {
				t.Fatal(err)
			}
			if r.Verdict != tc.want || !strings.Contains(text.String(), tc.say) {
				t.Errorf("%s, want %s and %q in\n%s", r.Verdict, tc.want, tc.say, text.String())
			}
		})
	}
	// On another machine the base is not compared, and the limits are judged all the same.
	base := mustRead(t, strings.Replace(file, "Some CPU", "Other CPU", 1), "base")
	r := Judge(base, mustRead(t, file, "head"), mustRules(t, rule("bench = 'Slow'\nover = 'Fast'\nmax = 1.05")), Options{})
	if r.Verdict != Regression {
		t.Errorf("%s, want a regression by the limit", r.Verdict)
	}
}

// TestPairs: runs of one pair are compared wherever they stand in the files, and pairs of
// which one half is missing are left out.
func TestPairs(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var base, head strings.Builder
	base.WriteString(header)
	head.WriteString(header)
	order := rnd.Perm(DefaultCount + 2)
	speed := func(i int) float64 { return 100 * math.Exp(float64(i)/3) } // each pair has its own
	for i := range DefaultCount + 2 {
		fmt.Fprintf(&base, "pair: x.%d\nBenchmarkA-2 1 %.3f ns/op\n", i, speed(i))
		if k := order[i]; k >= 2 {
			fmt.Fprintf(&head, "pair: x.%d\nBenchmarkA-2 1 %.3f ns/op\n", k, 1.2*speed(k)*(1+0.01*rnd.Float64()))
		}
	}
	r := Judge(mustRead(t, base.String(), "base"), mustRead(t, head.String(), "head"), DefaultRules(), Options{})
	if f := r.Findings[0]; !r.Paired || r.Verdict != Regression || f.N != DefaultCount || math.Abs(f.Ratio-1.205) > 0.01 {
		t.Errorf("%+v", r)
	}
	// Pairs of another run are no pairs.
	other := strings.ReplaceAll(head.String(), "pair: x.", "pair: y.")
	if r := Judge(mustRead(t, base.String(), "base"), mustRead(t, other, "head"), DefaultRules(), Options{}); r.Paired {
		t.Errorf("paired: %+v", r)
	}
}

// TestUnsteadyAllocations: counts that differ from run to run are red only beyond chance.
func TestUnsteadyAllocations(t *testing.T) {
	file := func(seed uint64, often float64, more int) string {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var b strings.Builder
		for range DefaultCount {
			n := 3
			if rnd.Float64() < often {
				n += more
			}
			fmt.Fprintf(&b, "BenchmarkA-2 1000 %.1f ns/op %d allocs/op\n", 100+rnd.Float64(), n)
		}
		return b.String()
	}
	same := Judge(mustRead(t, file(1, 0.3, 1), "base"), mustRead(t, file(2, 0.3, 1), "head"), DefaultRules(), Options{})
	if same.Verdict != Pass {
		t.Errorf("%s of two like ones: %+v", same.Verdict, same.Findings)
	}
	more := Judge(mustRead(t, file(1, 0.1, 1), "base"), mustRead(t, file(2, 0.95, 1), "head"), DefaultRules(), Options{})
	if more.Verdict != Regression {
		t.Errorf("%s of more allocations: %+v", more.Verdict, more.Findings)
	}
}

// TestRuleFiles: what a rule file may not say.
func TestRuleFiles(t *testing.T) {
	for _, tc := range [][2]string{
		{"threshold = 0.2\nalpha = 0.001\nresolution = 0.4\ncount = 30\n[run]\npackages = ['./a']\nbench = 'X'\nbenchtime = '50ms'\ncpu = 2\ntimeout = '9m'\n", ""},
		{"treshold = 0.2\n", `line 1: unknown key "treshold"`},
		{"[run]\ncpus = 2\n", `line 2: unknown key "run.cpus"`},
		{"threshold = 'x'\n", "line 1"},
		{"threshold = \n", "line 1"},
		{"threshold = -1\n", "threshold -1"},
		{"threshold = nan\n", "threshold NaN"},
		{"alpha = 0\n", "alpha 0"},
		{"alpha = 0.5\n", "alpha 0.5"},
		{"resolution = 0.01\n", "resolution 0.01"},
		{"count = 0\n", "count 0"},
		{"count = 1001\n", "count 1001"},
		{"[run]\ntimeout = 'soon'\n", "soon"},
		{"[run]\ntimeout = '-1s'\n", "negative"},
		{"[[metric]]\nbetter = 'lower'\n", "no unit"},
		{"[[metric]]\nunit = 'x'\n", "better"},
		{"[[metric]]\nunit = 'x'\nbetter = 'more'\n", "better"},
		{"[[metric]]\nunit = 'x'\nbetter = 'lower'\ncompare = 'roughly'\n", "compare"},
		{"[[metric]]\nunit = 'x'\nbetter = 'lower'\ntolerance = 0.1\n", "exact"},
		{"[[bench]]\nthreshold = 0.5\n", "no name"},
		{"[[bench]]\nname = 'x'\nignore = true\n", "without a reason"},
		{"[[limit]]\nname = 'x'\nbench = 'y'\n", "neither max nor min"},
		{"[[limit]]\nbench = 'y'\nmax = 1\n", "no name"},
		{"[[limit]]\nname = 'x'\nbench = 'y*'\nover = 'z'\nmax = 1\n", "patterns"},
		{"[[limit]]\nname = 'x'\nbench = 'y'\nover = 'z'\nmax = 0\n", "zero"},
		{"[[limit]]\nname = 'x'\nbench = 'y'\nmax = inf\n", "out of range"},
		{"[[renamed]]\nfrom = 'x'\n", "from and to"},
		{"[[removed]]\nname = 'x'\n", "reason"},
	} {
		_, err := LoadRules([]byte(tc[0]))
		if (err == nil) != (tc[1] == "") || err != nil && !strings.Contains(err.Error(), tc[1]) {
			t.Errorf("%q: %v, want %q", tc[0], err, tc[1])
		}
	}
}

// TestMatches: how a rule names a benchmark.
func TestMatches(t *testing.T) {
	k := Key{"example.org/m/bench/deferral", "Post/RTR-8"}
	for pattern, want := range map[string]bool{
		"Post/RTR": true, "BenchmarkPost/RTR": true, "deferral.Post/RTR": true, "bench/deferral.BenchmarkPost/RTR": true,
		"example.org/m/bench/deferral.Post/RTR": true, "Post*": true, "*": true, "deferral.*": true, "*/RTR": true, "P*/R*": true,
		"Post": false, "Post/RTR-8": false, "ferral.Post/RTR": false, "RTR": false, "": false, "other.*": false, "Post/RTR*x": false,
	} {
		if Matches(pattern, k) != want {
			t.Errorf("%q: %v", pattern, !want)
		}
	}
}

// TestLimitStrays: one run in ten may break a limit on an exact unit.
func TestLimitStrays(t *testing.T) {
	limits := mustRules(t, "[[limit]]\nname = 'x'\nbench = 'A'\nunit = 'allocs/op'\nmax = 0\n")
	for strays, want := range map[int]Verdict{0: Pass, 2: Pass, 3: Regression} {
		text := header + bench("A", 25-strays, 100, "\t0 allocs/op") + bench("A", strays, 100, "\t1 allocs/op") + "PASS\n"
		if r := Judge(nil, mustRead(t, text, "head"), limits, Options{}); r.Verdict != want {
			t.Errorf("%d of 25 runs break the limit: %v, want %v", strays, r.Verdict, want)
		}
	}
}
