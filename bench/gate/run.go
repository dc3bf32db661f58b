package gate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Config says what Run runs.
type Config struct {
	// Dir is in the module whose benchmarks run; empty is the current directory.
	Dir string
	// Base is the revision to compare with; empty means that there is none.
	Base string
	// Head is the revision to judge; empty is the working tree as it is.
	Head string
	// Rules say what to run, and which benchmarks must run beside each other.
	Rules *Rules
	// Progress is told what goes on, a line at a time; nil is nobody.
	Progress func(string)
	// RawBase and RawHead, if not nil, get the two files as they are measured.
	RawBase, RawHead io.Writer
}

// side is a revision under test.
type side struct {
	name string
	dir  string // the module's directory in the checkout
	out  string // where its test binaries are
	raw  bytes.Buffer
	also io.Writer
	// binaries by package; packages without one do not build or have no benchmarks.
	packages map[string]*testPackage
	faults   []string
}

// testPackage is a package's test binary.
type testPackage struct {
	path, dir, binary string
	benchmarks        []string // top-level ones that the rules choose, in the source's order
}

// unit is what one process runs: a benchmark, or several that are divided by each other.
type unit struct {
	pkg   string
	names []string
}

// Run builds the two sides and measures them by turns: every benchmark of one side right after
// the same of the other, and which of the two is first changes from turn to turn. base is nil
// if there is none. When the time is up it returns what there is; ctx ended is an error, after
// everything is cleaned up.
func Run(ctx context.Context, c Config) (base, head *Set, err error) {
	rules := c.Rules
	timed, cancel := context.WithTimeoutCause(ctx, cmp.Or(rules.Run.Timeout.Duration, 30*time.Minute), errTimeout)
	defer cancel()
	tmp, err := os.MkdirTemp("", "perf-gate-")
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	r := &runner{Config: c, tmp: tmp}
	defer r.close()
	if err := r.prepare(timed); err != nil {
		return nil, nil, r.why(ctx, err)
	}
	if err := r.measure(timed); err != nil && !errors.Is(err, errTimeout) {
		return nil, nil, r.why(ctx, err)
	}
	if r.base != nil {
		if base, err = r.base.set(); err != nil {
			return nil, nil, err
		}
	}
	head, err = r.head.set()
	return base, head, err
}

// runner is one call of Run.
type runner struct {
	Config
	tmp        string
	base, head *side
	trees      []*worktree
}

func (r *runner) close() {
	for _, w := range r.trees {
		w.remove()
	}
}

// why is the error to report: that of the caller's context comes first.
func (r *runner) why(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (r *runner) say(format string, args ...any) {
	if r.Progress != nil {
		r.Progress(fmt.Sprintf(format, args...))
	}
}

// prepare checks out, builds and lists both sides.
func (r *runner) prepare(ctx context.Context) (err error) {
	out, err := command(ctx, r.Dir, nil, "go", "env", "GOMOD")
	mod := strings.TrimSpace(string(out))
	if err != nil {
		return err
	}
	if mod == "" || mod == os.DevNull {
		return errors.New("not in a module: there is no go.mod here or above")
	}
	if r.head, err = r.side(ctx, "head", r.Head, filepath.Dir(mod), r.RawHead); err != nil {
		return err
	}
	if err := r.build(ctx, r.head); err != nil {
		return fmt.Errorf("head: %w", err)
	}
	if r.Base == "" {
		return nil
	}
	if r.base, err = r.side(ctx, "base", r.Base, filepath.Dir(mod), r.RawBase); err != nil {
		return err
	}
	if err := r.build(ctx, r.base); err != nil {
		if ctx.Err() != nil {
			return err
		}
		r.base.faults = append(r.base.faults, err.Error()) // the head's limits are judged all the same
	}
	return nil
}

// side makes a side, with a worktree of its own if rev says so.
func (r *runner) side(ctx context.Context, name, rev, module string, also io.Writer) (*side, error) {
	s := &side{name: name, dir: module, out: filepath.Join(r.tmp, name+"-bin"), also: also, packages: map[string]*testPackage{}}
	if rev == "" {
		return s, os.Mkdir(s.out, 0o777)
	}
	top, err := command(ctx, module, nil, "git", "rev-parse", "--show-prefix")
	if err != nil {
		return nil, fmt.Errorf("revisions need a git repository: %w", err)
	}
	tree := filepath.Join(r.tmp, name)
	w, err := addWorktree(ctx, module, tree, rev)
	if err != nil {
		return nil, err
	}
	r.trees = append(r.trees, w)
	s.dir = filepath.Join(tree, filepath.FromSlash(strings.TrimSpace(string(top))))
	return s, os.Mkdir(s.out, 0o777)
}

// build builds the test binaries of all packages that have benchmarks, and asks them which.
func (r *runner) build(ctx context.Context, s *side) error {
	run := r.Rules.Run
	args := []string{"list", "-e", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles"}
	if run.Tags != "" {
		args = append(args, "-tags", run.Tags)
	}
	patterns := run.Packages
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	out, err := command(ctx, s.dir, nil, "go", append(append(args, "--"), patterns...)...)
	if err != nil {
		return err
	}
	choose, err := topLevel(run.Bench)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(out))
	for n := 0; ; n++ {
		var p struct {
			ImportPath, Dir           string
			TestGoFiles, XTestGoFiles []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if !hasBenchmarks(p.Dir, slices.Concat(p.TestGoFiles, p.XTestGoFiles)) {
			continue
		}
		r.say("%s: build %s", s.name, p.ImportPath)
		t := &testPackage{path: p.ImportPath, dir: p.Dir, binary: filepath.Join(s.out, strconv.Itoa(n)+".test.exe")}
		args := []string{"test", "-c", "-vet=off", "-trimpath", "-o", t.binary}
		if run.Tags != "" {
			args = append(args, "-tags", run.Tags)
		}
		if _, err := command(ctx, s.dir, nil, "go", append(args, p.ImportPath)...); err != nil {
			if ctx.Err() != nil {
				return err
			}
			s.faults = append(s.faults, fmt.Sprintf("%s does not build: %v", p.ImportPath, err))
			continue
		}
		list, err := command(ctx, t.dir, nil, t.binary, "-test.list", "^Benchmark")
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			s.faults = append(s.faults, fmt.Sprintf("%s does not start: %v", p.ImportPath, err))
			continue
		}
		for _, name := range strings.Fields(string(list)) {
			if strings.HasPrefix(name, "Benchmark") && choose.MatchString(name) {
				t.benchmarks = append(t.benchmarks, name)
			}
		}
		s.packages[t.path] = t
	}
}

// topLevel compiles what chooses top-level benchmarks.
func topLevel(bench string) (*regexp.Regexp, error) {
	top, _ := splitBench(bench)
	re, err := regexp.Compile(cmp.Or(top, "."))
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	return re, nil
}

// hasBenchmarks looks for a benchmark in a package's test files, which is cheaper than to
// build the package.
func hasBenchmarks(dir string, files []string) bool {
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f))
		if err == nil && bytes.Contains(text, []byte("\nfunc Benchmark")) {
			return true
		}
	}
	return false
}

// units lists what processes run, of both sides.
func (r *runner) units() []unit {
	var all []unit
	group := map[string]int{} // by package and rule, the place in all
	for _, s := range []*side{r.head, r.base} {
		if s == nil {
			continue
		}
		paths := make([]string, 0, len(s.packages))
		for path := range s.packages {
			paths = append(paths, path)
		}
		slices.Sort(paths)
		for _, path := range paths {
			for _, name := range s.packages[path].benchmarks {
				key := path + " " + name
				if g := r.Rules.group(path, strings.TrimPrefix(name, "Benchmark")); g >= 0 {
					key = path + " " + strconv.Itoa(g)
				}
				i, ok := group[key]
				if !ok {
					i = len(all)
					group[key] = i
					all = append(all, unit{pkg: path})
				}
				if !slices.Contains(all[i].names, name) {
					all[i].names = append(all[i].names, name)
				}
			}
		}
	}
	return all
}

// measure runs everything, turn by turn.
func (r *runner) measure(ctx context.Context) error {
	units := r.units()
	if len(units) == 0 {
		return nil // Judge says that nothing was measured
	}
	// Pairs of other runs must not be taken for pairs of this one.
	id := strconv.FormatInt(time.Now().UnixNano(), 36)
	start := time.Now()
	for turn := range r.Rules.Count {
		for i, u := range units {
			sides := []*side{r.base, r.head}
			if (turn+i)%2 == 1 {
				slices.Reverse(sides)
			}
			for _, s := range sides {
				if s == nil {
					continue
				}
				if err := r.run(ctx, s, u, fmt.Sprintf("%s.%d", id, turn+1)); err != nil {
					if errors.Is(err, errTimeout) {
						r.say("the time is used up after %d of %d turns", turn, r.Rules.Count)
					}
					return err
				}
			}
		}
		r.say("turn %d of %d, %d s", turn+1, r.Rules.Count, int(time.Since(start).Seconds()))
	}
	return nil
}

// run runs one unit of one side once.
func (r *runner) run(ctx context.Context, s *side, u unit, pair string) error {
	p := s.packages[u.pkg]
	if p == nil {
		return nil
	}
	var names []string
	for _, n := range u.names {
		if slices.Contains(p.benchmarks, n) {
			names = append(names, n)
		}
	}
	if len(names) == 0 {
		return nil
	}
	run := r.Rules.Run
	bench := "^(" + strings.Join(names, "|") + ")$"
	if _, sub := splitBench(run.Bench); sub != "" {
		bench += "/" + sub
	}
	args := []string{
		"-test.run=^$", "-test.bench=" + bench, "-test.benchmem", "-test.count=1",
		"-test.benchtime=" + cmp.Or(run.Benchtime, "100ms"),
	}
	if run.CPU > 0 {
		args = append(args, "-test.cpu="+strconv.Itoa(run.CPU))
	}
	out, err := command(ctx, p.dir, nil, p.binary, args...)
	if ctx.Err() != nil {
		return context.Cause(ctx) // what is printed so far is half a measurement
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "pair: %s\n", pair)
	text.Write(out)
	if len(out) > 0 && out[len(out)-1] != '\n' {
		text.WriteByte('\n')
	}
	if err != nil {
		fmt.Fprintf(&text, "FAIL\t%s\n", u.pkg)
		if f := fmt.Sprintf("%s: %v", strings.Join(names, ", "), err); len(s.faults) < maxFaults {
			s.faults = append(s.faults, f)
		}
	}
	s.raw.Write(text.Bytes())
	if s.also != nil {
		_, err = s.also.Write(text.Bytes())
		return err
	}
	return nil
}

// splitBench cuts a -bench expression into what chooses top-level benchmarks and the rest, at
// the first slash outside of brackets, as go test does.
func splitBench(bench string) (top, sub string) {
	depth := 0
	for i := 0; i < len(bench); i++ {
		switch bench[i] {
		case '\\':
			i++
		case '[', '(':
			depth++
		case ']', ')':
			depth--
		case '/':
			if depth == 0 {
				return bench[:i], bench[i+1:]
			}
		}
	}
	return bench, ""
}

// set reads what a side has printed.
func (s *side) set() (*Set, error) {
	set, err := Read(&s.raw, s.name)
	if err == nil {
		for _, f := range s.faults {
			set.fault("%s", f)
		}
	}
	return set, err
}
