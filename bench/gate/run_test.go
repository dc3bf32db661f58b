package gate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// project is a small module in a git repository, with two commits.
type project struct {
	t   *testing.T
	dir string
}

const benchSource = `package p

import "testing"

var sink []byte

func BenchmarkPlain(b *testing.B) {
	for b.Loop() {
	}
}

func BenchmarkAlloc(b *testing.B) {
	for b.Loop() {
		%s
	}
}
`

func (p *project) write(name, text string) {
	p.t.Helper()
	name = filepath.Join(p.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
		p.t.Fatal(err)
	}
}

func (p *project) git(args ...string) string {
	p.t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL="+os.DevNull, "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.org")
	out, err := cmd.CombinedOutput()
	if err != nil {
		p.t.Fatalf("git %s: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (p *project) commit(msg string) string {
	p.t.Helper()
	p.git("add", "-A")
	p.git("commit", "-q", "-m", msg)
	return p.git("rev-parse", "HEAD")
}

// newProject makes a module below the top of its repository, whose first commit is the base.
func newProject(t *testing.T) (p *project, first string) {
	t.Helper()
	for _, tool := range []string{"git", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s", tool)
		}
	}
	p = &project{t, t.TempDir()}
	p.git("init", "-q", "-b", "main")
	p.write("mod/go.mod", "module example.org/m\n\ngo 1.24\n")
	p.write("mod/p/p_test.go", fmt.Sprintf(benchSource, "sink = nil"))
	p.write("mod/none/none.go", "package none\n")
	return p, p.commit("one")
}

// clean fails the test if anything is left behind.
func (p *project) clean(tmp string) {
	p.t.Helper()
	if list := p.git("worktree", "list"); strings.Count(list, "\n") != 0 {
		p.t.Errorf("worktrees are left:\n%s", list)
	}
	if left, _ := os.ReadDir(tmp); len(left) != 0 {
		p.t.Errorf("files are left: %v", left)
	}
}

// TestRun builds and runs a revision and a working tree by turns, and finds an allocation.
func TestRun(t *testing.T) {
	p, first := newProject(t)
	p.write("mod/p/p_test.go", fmt.Sprintf(benchSource, "sink = make([]byte, 100)"))
	p.write("mod/p/more_test.go", "package p\n\nimport \"testing\"\n\nfunc BenchmarkMore(b *testing.B) {\n\tb.Run(\"x=1\", func(b *testing.B) {\n\t\tfor b.Loop() {\n\t\t}\n\t})\n}\n")
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	rules := DefaultRules()
	rules.Count, rules.Run.Benchtime = 2, "10x"
	var rawBase, rawHead bytes.Buffer
	base, head, err := Run(t.Context(), Config{Dir: filepath.Join(p.dir, "mod", "p"), Base: first, Rules: rules, RawBase: &rawBase, RawHead: &rawHead})
	if err != nil {
		t.Fatal(err)
	}
	p.clean(tmp)
	r := Judge(base, head, rules, Options{})
	if r.Verdict != Regression || !r.Paired || r.Findings[0].Unit != "allocs/op" && r.Findings[0].Unit != "B/op" {
		t.Errorf("%+v", r)
	}
	if len(base.Benches) != 2 || len(head.Benches) != 3 || base.runs() != 2 || len(base.Faults)+len(head.Faults) != 0 {
		t.Errorf("base %+v, head %+v", base, head)
	}
	// What is kept says the same.
	again := Judge(mustRead(t, rawBase.String(), "base"), mustRead(t, rawHead.String(), "head"), rules, Options{})
	if fmt.Sprint(again) != fmt.Sprint(r) {
		t.Errorf("the files say\n%+v\nand the run\n%+v", again, r)
	}
}

// TestRunRevisions compares two revisions while the working tree does not even build, and a
// head that does not build with one that does.
func TestRunRevisions(t *testing.T) {
	p, first := newProject(t)
	p.write("mod/q/q_test.go", "package q\n\nimport \"testing\"\n\nfunc BenchmarkQ(b *testing.B) {\n\tb.Fatal(\"no\")\n}\n")
	second := p.commit("two")
	p.write("mod/p/p_test.go", "package p\n\nfunc BenchmarkPlain( {\n")
	p.write("mod/p/x_test.go", "package p\n\nfunc BenchmarkPlain( {\n")
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	rules := DefaultRules()
	rules.Count, rules.Run.Benchtime = 1, "10x"
	cfg := Config{Dir: filepath.Join(p.dir, "mod"), Base: first, Head: second, Rules: rules}
	base, head, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := Judge(base, head, rules, Options{})
	if q := head.bench(Key{"example.org/m/q", "Q"}); r.Verdict != Inconclusive || len(head.Faults) == 0 || base.runs() != 1 {
		t.Errorf("%+v\nof %+v, base %+v", r, q, base)
	}
	cfg.Head = ""
	if base, head, err = Run(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if r := Judge(base, head, rules, Options{}); r.Verdict != Inconclusive || !strings.Contains(strings.Join(r.Problems, " "), "does not build") {
		t.Errorf("%+v", r)
	}
	for _, bad := range []string{"nonsense", "--help"} {
		cfg.Base = bad
		if _, _, err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "no revision") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	p.clean(tmp)
}

// TestRunEnds: a benchmark that never ends is killed with its children when the time is up or
// the user loses patience, and nothing is left behind.
func TestRunEnds(t *testing.T) {
	p, first := newProject(t)
	started := filepath.Join(t.TempDir(), "started")
	p.write("mod/p/p_test.go", fmt.Sprintf(`package p

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
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	rules := DefaultRules()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(started); err == nil {
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	_, _, err := Run(ctx, Config{Dir: filepath.Join(p.dir, "mod"), Base: first, Rules: rules})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want a cancelled context", err)
	}
	// Base has benchmarks that end: some of it is measured, and the time is up in the head.
	rules.Run.Timeout.Duration, rules.Run.Benchtime = 5*time.Second, "10x"
	if testing.Short() {
		return
	}
	start := time.Now()
	base, head, err := Run(t.Context(), Config{Dir: filepath.Join(p.dir, "mod"), Base: first, Rules: rules})
	p.clean(tmp)
	if time.Since(start) > time.Minute {
		t.Errorf("ended after %v", time.Since(start))
	}
	if errors.Is(err, errTimeout) { // a slow machine: while it was building
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if r := Judge(base, head, rules, Options{}); r.Verdict != Inconclusive {
		t.Errorf("%+v", r)
	}
}

// TestLanded: which revision is the last that has landed.
func TestLanded(t *testing.T) {
	p, first := newProject(t)
	landed := func(want string) {
		t.Helper()
		if got, err := Landed(t.Context(), p.dir); got != want || err != nil {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
	landed("") // one commit
	p.write("mod/p/p_test.go", "package p // changed\n")
	landed(first) // and a change
	second := p.commit("two")
	landed(first)
	p.git("update-ref", "refs/remotes/origin/main", first)
	p.write("new", "")
	p.commit("three")
	landed(first) // two ahead of the remote
	p.git("update-ref", "refs/remotes/origin/main", "HEAD")
	landed(second) // HEAD has landed
	dir := t.TempDir()
	if got, err := Landed(t.Context(), dir); got != "" || err != nil {
		t.Errorf("%q, %v outside of a repository", got, err)
	}
}

// TestSplitBench: as go test splits.
func TestSplitBench(t *testing.T) {
	for in, want := range map[string][2]string{
		"": {}, "A": {"A", ""}, "A/b": {"A", "b"}, "A/b/c": {"A", "b/c"}, "[/]x/y": {"[/]x", "y"}, "(a/b)/c": {"(a/b)", "c"}, `\/a/b`: {`\/a`, "b"},
	} {
		if top, sub := splitBench(in); top != want[0] || sub != want[1] {
			t.Errorf("%q: %q and %q", in, top, sub)
		}
	}
}
