package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDeferral runs a small study: the table on stdout, or the same figures as JSON there and
// in a file, and plots.
func TestDeferral(t *testing.T) {
	args := []string{"deferral", "--only", "base", "--trials", "20", "--no-costs", "--seed", "3"}
	table := good(t, args...)
	for _, want := range []string{"seed 3, 20 trials", "a deferred doorbell", "first p50"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "study.json")
	out := good(t, append(args, "--out_json", "--out_json_file", file, "--plots", filepath.Join(dir, "plots"), "--png")...)
	if b, err := os.ReadFile(file); err != nil || string(b) != out {
		t.Errorf("the file differs from stdout: %v\n%s\n%s", err, b, out)
	}
	var doc struct {
		Seed  int
		Cells []struct{ Outcomes []struct{ Delivered int } }
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil || doc.Seed != 3 || len(doc.Cells) != 1 {
		t.Fatalf("%v in\n%s", err, out)
	}
	for i, o := range doc.Cells[0].Outcomes {
		if o.Delivered != 200 {
			t.Errorf("strategy %d delivered %d times", i, o.Delivered)
		}
	}
	for _, name := range []string{"cdf-base.svg", "cdf-base.png"} {
		if s, err := os.Stat(filepath.Join(dir, "plots", name)); err != nil || s.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDeferralUsage(t *testing.T) {
	for _, tc := range [][2]string{
		{"x", `unexpected operand "x"`},
		{"--trials=0", `invalid argument "0" for "--trials" flag: want a whole number from 1 to 1000000`},
		{"--png", "--png is about --plots"},
		{"--no-cells --no-costs", "nothing to do"},
	} {
		r := perf(t, append([]string{"deferral"}, strings.Fields(tc[0])...)...)
		if r.code != exitUsage || !strings.Contains(r.stderr, tc[1]) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: exit %d, stderr %q, want %q", tc[0], r.code, r.stderr, tc[1])
		}
	}
	if r := perf(t, "deferral", "--only", "nonsense", "--no-costs"); r.code != exitFailed || !strings.Contains(r.stderr, "nonsense") {
		t.Errorf("exit %d, stderr %q", r.code, r.stderr)
	}
	r := perf(t, "deferral", "--only", "base", "--trials", "1", "--no-costs", "--progress")
	if r.code != exitOK || !strings.HasSuffix(r.stderr, "perf: 100 % of the trials are played\n") {
		t.Errorf("exit %d, stderr %q", r.code, r.stderr)
	}
	if out := good(t, "deferral", "--help"); !strings.Contains(out, "Examples:\n  perf deferral") {
		t.Errorf("no example in\n%s", out)
	}
}
