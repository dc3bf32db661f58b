package gate

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// someReport has findings of every kind.
func someReport(t *testing.T) *Report {
	t.Helper()
	const n = DefaultCount
	base := header + bench("A", n, 100, "\t0 allocs/op") + bench("B|x", n, 50, "") + bench("Gone", n, 50, "") + bench("Old", n, 50, "") + bench("Zero", 1, 0, "")
	head := header + bench("A", n, 130, "\t1 allocs/op") + bench("B|x", n, 40, "") + bench("New", n, 50, "") + bench("Zero", 1, 0, "") + "FAIL\n"
	rules := mustRules(t, "[[limit]]\nname = 'a_rule'\nbench = 'A'\nover = 'New'\nmax = 2\n[[limit]]\nname = 'another'\nbench = 'A'\nunit = 'allocs/op'\nmax = 1\n"+
		"[[removed]]\nname = 'Gone'\nreason = 'merged <b>away</b>'\n")
	return Judge(mustRead(t, base, "base.txt"), mustRead(t, head, "head.txt"), rules, Options{})
}

// TestText: the report for people.
func TestText(t *testing.T) {
	r := someReport(t)
	var all, some strings.Builder
	if err := r.WriteText(&all, true); err != nil {
		t.Fatal(err)
	}
	if err := r.WriteText(&some, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"REGRESSION: 3 regression, 2 inconclusive, 1 improved, ", "head.txt (20 runs) against base.txt (20 runs)",
		"problem: head.txt: a package failed", "a_rule: p.A-2 / p.New-2", "+30 % [+2", "merged <b>away</b>", "missing in head.txt",
	} {
		if !strings.Contains(some.String(), want) {
			t.Errorf("no %q in\n%s", want, some.String())
		}
	}
	if strings.Contains(some.String(), "another") || !strings.Contains(all.String(), "another: p.A-2") {
		t.Errorf("passes are listed on demand:\n%s\n%s", some.String(), all.String())
	}
}

// TestMarkdown: what a stranger's benchmark is called remains text.
func TestMarkdown(t *testing.T) {
	var b strings.Builder
	if err := someReport(t).WriteMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"### ❌ Benchmarks: REGRESSION", `p.B\|x-2`, "merged &lt;b&gt;away&lt;/b&gt;", "<details>", `a\_rule`, "|---|"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "|") && strings.Count(strings.ReplaceAll(line, `\|`, ""), "|") != len(columns)+1 {
			t.Errorf("a row of another width: %s", line)
		}
	}
}

// TestJSON: documents are valid by the schema, which has no field that is not described.
func TestJSON(t *testing.T) {
	schema, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(SchemaID, schema); err != nil {
		t.Fatal(err)
	}
	compiled, err := c.Compile(SchemaID)
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]*Report{
		"full": someReport(t), "empty": Judge(nil, &Set{Name: "x"}, DefaultRules(), Options{}),
		"few": Judge(mustRead(t, bench("A", 2, 1, ""), "a"), mustRead(t, bench("A", 2, 1, ""), "b"), DefaultRules(), Options{}),
	} {
		var b bytes.Buffer
		if err := r.WriteJSON(&b); err != nil {
			t.Fatal(name, err)
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b.Bytes()))
		if err != nil {
			t.Fatal(name, err)
		}
		if err := compiled.Validate(doc); err != nil {
			t.Errorf("%s: %v\n%s", name, err, b.String())
		}
		var back struct {
			Verdict  string `json:"verdict"`
			ExitCode int    `json:"exit_code"`
		}
		if err := json.Unmarshal(b.Bytes(), &back); err != nil || back.Verdict != string(r.Verdict) || back.ExitCode != r.ExitCode() {
			t.Errorf("%s: %+v, %v", name, back, err)
		}
		doc.(map[string]any)["more"] = 1
		if compiled.Validate(doc) == nil {
			t.Error("the schema takes fields that it does not describe")
		}
	}
}

// FuzzRead: no file makes Read or Judge panic, and no file is green beside another unless it
// has a benchmark of the same name.
func FuzzRead(f *testing.F) {
	f.Add([]byte(header + bench("A", 20, 100, "\t0 allocs/op") + "PASS\n"))
	f.Add([]byte("pair: 1\nBenchmarkA-2 1 1 ns/op\n--- FAIL: BenchmarkA-2\r\npkg: x\nUnit a better=higher\n"))
	f.Add([]byte("BenchmarkA 1 NaN ns/op 1e999 B/op -1 x\n"))
	base := mustRead(f, header+bench("A", 20, 100, "\t0 allocs/op")+"PASS\n", "base")
	limits := mustRules(f, "[[limit]]\nname = 'x'\nbench = 'A'\nover = 'B'\nmax = 1\n[[limit]]\nname = 'y'\nbench = '*'\nmax = 1\nmin = 0.1\n")
	f.Fuzz(func(t *testing.T, text []byte) {
		head, err := Read(bytes.NewReader(text), "head")
		if err != nil {
			t.Fatal(err)
		}
		r := Judge(base, head, DefaultRules(), Options{})
		if b := head.bench(Key{"example.org/m/p", "A-2"}); r.Verdict == Pass && (b == nil || len(b.Samples) < DefaultCount) {
			t.Errorf("green with nothing to compare: %+v", r)
		}
		Judge(head, head, limits, Options{Force: true})
		for _, write := range []func() error{
			func() error { return r.WriteText(&bytes.Buffer{}, true) },
			func() error { return r.WriteMarkdown(&bytes.Buffer{}) },
			func() error { return r.WriteJSON(&bytes.Buffer{}) },
		} {
			if err := write(); err != nil {
				t.Error(err)
			}
		}
	})
}
