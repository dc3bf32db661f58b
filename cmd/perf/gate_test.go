package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/bench/gate"
)

// benchFile writes benchmark results into a file of a directory, and returns its name.
func benchFile(t *testing.T, dir, name string, runs int, ns float64) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("goos: linux\ngoarch: amd64\npkg: example.org/p\n")
	for i := range runs {
		fmt.Fprintf(&b, "BenchmarkA-2 1000 %.2f ns/op 0 allocs/op\n", ns*(1+0.001*float64(i)))
	}
	name = filepath.Join(dir, name)
	if err := os.WriteFile(name, []byte(b.String()+"PASS\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestGateFiles: exit codes, and the forms of a report.
func TestGateFiles(t *testing.T) {
	dir := t.TempDir()
	base, same := benchFile(t, dir, "base", gate.DefaultCount, 100), benchFile(t, dir, "same", gate.DefaultCount, 100)
	slower, few := benchFile(t, dir, "slower", gate.DefaultCount, 150), benchFile(t, dir, "few", 3, 100)
	rules := filepath.Join(dir, "gate.toml")
	if err := os.WriteFile(rules, []byte("[[limit]]\nname = 'no allocations'\nbench = 'p.A'\nunit = 'allocs/op'\nmax = 0\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args string
		code int
		say  string
	}{
		{"--base " + base + " --head " + same, 0, "PASS: 2 pass"},
		{"--base " + base + " --head " + slower, 1, "REGRESSION: 1 regression, 1 pass"},
		{"--base " + base + " --head " + slower + " --threshold 0.6", 0, "PASS"},
		{"--base " + base + " --head " + few, 2, "INCONCLUSIVE"},
		{"--base " + base + " --head " + few + " --count 3", 2, "3 of 20 runs: could have seen"},
		{"--base " + base + " --head " + os.DevNull, 2, "no benchmark results"},
		{"--head " + same + " --rules " + rules, 0, "no allocations"},
		{"--head " + same, 2, "nothing was judged"},
	} {
		r := perf(t, append([]string{"gate", "--all"}, strings.Fields(tc.args)...)...)
		if r.code != tc.code || !strings.Contains(r.stdout, tc.say) || (r.stderr == "") != (tc.code == 0) {
			t.Errorf("%s: exit %d, want %d and %q\n%s%s", tc.args, r.code, tc.code, tc.say, r.stdout, r.stderr)
		}
	}
	doc, comment := filepath.Join(dir, "doc.json"), filepath.Join(dir, "comment.md")
	if r := perf(t, "gate", "--base", base, "--head", slower, "--json="+doc, "--markdown="+comment); r.code != 1 || !strings.HasPrefix(r.stdout, "REGRESSION") {
		t.Errorf("exit %d\n%s", r.code, r.stdout)
	}
	out := perf(t, "gate", "--base", base, "--head", slower, "--json").stdout
	if b, err := os.ReadFile(doc); err != nil || string(b) != out || !json.Valid(b) {
		t.Errorf("the file differs from stdout: %v\n%s\n%s", err, b, out)
	}
	out = perf(t, "gate", "--base", base, "--head", slower, "--markdown").stdout
	if b, err := os.ReadFile(comment); err != nil || string(b) != out || !strings.HasPrefix(out, "### ") {
		t.Errorf("the file differs from stdout: %v\n%s\n%s", err, b, out)
	}
}

// TestGateUsage: whatever is wrong with the command line or the files is not green.
func TestGateUsage(t *testing.T) {
	dir := t.TempDir()
	base := benchFile(t, dir, "base", 1, 100)
	rules := filepath.Join(dir, "gate.toml")
	if err := os.WriteFile(rules, []byte("treshold = 1\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, tc := range [][2]string{
		{"x", "unexpected operand"},
		{"", "nothing to judge by"},
		{"--head-rev HEAD --pkg ./p", "nothing to judge by"},
		{"--base " + base, "--base needs --head"},
		{"--base " + base + " --head " + base + " --base-rev main", "--base-rev"},
		{"--head " + base + " --json --markdown", "both"},
		{"--count 0", "want a whole number from 1 to 1000"},
		{"--threshold -1", "want a number from 0 to 10"},
		{"--alpha NaN", "want a number"},
		{"--timeout 0", "want seconds"},
		{"--head " + filepath.Join(dir, "none"), "no such file"},
		{"--head " + base + " --rules " + filepath.Join(dir, "none"), "no such file"},
		{"--head " + base + " --rules " + rules, `line 1: unknown key "treshold"`},
		{"--head " + dir, "directory"},
		{"--base-rev nonsense --pkg ./nothing", "no revision"},
		{"--save " + t.TempDir() + " --bench (", "bench"},
	} {
		r := perf(t, append([]string{"gate"}, strings.Fields(tc[0])...)...)
		if r.code != 2 || !strings.Contains(r.stderr, tc[1]) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: exit %d, stderr %q, want %q", tc[0], r.code, r.stderr, tc[1])
		}
	}
}

// TestGateInterrupted: a signal ends the benchmark that runs, removes worktrees and temporary
// files, and is no verdict.
func TestGateInterrupted(t *testing.T) {
	for _, tool := range []string{"git", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s", tool)
		}
	}
	repo, tmp := t.TempDir(), t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(repo, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", repo, "-c", "user.name=a", "-c", "user.email=a@example.org"}, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %s: %v\n%s", args, err, out)
		}
		return string(out)
	}
	write("go.mod", "module example.org/m\n\ngo 1.24\n")
	started := filepath.Join(tmp, "started")
	write("p_test.go", fmt.Sprintf(`package m

import (
	"os"
	"testing"
	"time"
)

func BenchmarkEver(b *testing.B) {
	if err := os.WriteFile(%q, nil, 0o666); err != nil {
		b.Fatal(err)
	}
	time.Sleep(time.Hour)
}
`, started))
	git("init", "-q")
	git("add", ".")
	git("commit", "-q", "-m", "one")
	t.Setenv("TMPDIR", tmp)
	t.Chdir(repo)
	p := start(t, "gate", "--base-rev", "HEAD")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(started); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the benchmark does not start")
		}
	}
	p.signal(t, syscall.SIGINT)
	if r := p.end(t); r.code != exitInterrupted {
		t.Errorf("exit %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	if list := git("worktree", "list"); strings.Count(list, "\n") != 1 {
		t.Errorf("worktrees are left:\n%s", list)
	}
	if left, _ := filepath.Glob(filepath.Join(tmp, "perf-gate-*")); len(left) != 0 {
		t.Errorf("files are left: %v", left)
	}
}
