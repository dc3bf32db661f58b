package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench/gate"
)

// verdictError ends perf gate with the exit code of its verdict, or of what kept it from one.
type verdictError struct {
	error
	code int
}

func (e verdictError) Unwrap() error { return e.error }

// gateExitInconclusive is the exit code when nothing could be said.
const gateExitInconclusive = 2

// autoRev is the base revision that perf gate finds itself.
const autoRev = "auto"

// gating is what the gate command's flags say.
type gating struct {
	base, head       string
	baseRev, headRev string
	rules            string
	packages         []string
	bench, benchtime string
	count            int
	threshold, alpha float64
	resolution       float64
	timeout          time.Duration
	json, markdown   string
	save             string
	force, tolerate  bool
	all, progress    bool
}

func (a *app) gate() *cobra.Command {
	g := &gating{}
	cmd := &cobra.Command{
		Use:   "gate",
		Short: "Say whether Go benchmarks have become slower, for CI",
		Long: `Compares benchmarks of any Go module: two files that go test -bench has written,
or two revisions, which it builds and runs by turns (--base-rev). It is red only
if a change is larger than a threshold and than chance; what it cannot tell is
inconclusive. Without a base, the limits of the rule file are judged alone.

Exit codes: 0 pass, 1 regression, 2 inconclusive or nothing measured.`,
		Example: `  perf gate --base-rev origin/main --rules bench/gate.toml --markdown=comment.md
  perf gate --base-rev HEAD~1 --pkg ./parser --bench 'Parse|Scan' --count 30
  perf gate --base old.txt --head new.txt --json`,
		Args: atMost(0, "no operands"),
	}
	f := cmd.Flags()
	f.StringVar(&g.base, "base", "", "benchmark results to compare with, in `FILE`")
	f.StringVar(&g.head, "head", "", "benchmark results to judge, in `FILE`; without --base by the rules' limits alone")
	f.StringVar(&g.baseRev, "base-rev", "", "build and run `REV`, by turns with the head; auto is the last landed revision")
	f.StringVar(&g.headRev, "head-rev", "", "judge `REV` (the working tree)")
	f.StringVar(&g.rules, "rules", "", "rule `FILE` in TOML")
	f.StringArrayVar(&g.packages, "pkg", nil, "packages whose benchmarks run, as for go list (./...); may be repeated")
	f.StringVar(&g.bench, "bench", "", "benchmarks to run, `REGEXP` as for go test (.)")
	f.StringVar(&g.benchtime, "benchtime", "", "how long each runs each time, `TIME` as for go test (100ms)")
	f.Var(whole[int]{&g.count, 1, 1000}, "count", fmt.Sprintf("runs of either side; with fewer than %[1]d no comparison passes (%[1]d)", gate.DefaultCount))
	f.Var(fraction{&g.threshold, 0, 10}, "threshold", fmt.Sprintf("how much worse is a regression: 0.1 is 10 %% (%v)", gate.DefaultThreshold))
	f.Var(fraction{&g.alpha, 1e-9, 0.1}, "alpha", fmt.Sprintf("how likely chance may make a difference, in all tests together (%v)", gate.DefaultAlpha))
	f.Var(fraction{&g.resolution, 0, 100}, "resolution", fmt.Sprintf("the change that a comparison must be able to see to pass (%v)", gate.DefaultResolution))
	f.Var(seconds{&g.timeout, time.Second, 24 * time.Hour}, "timeout", "judge what is measured by then (1800)")
	f.StringVar(&g.json, "json", "", "write JSON to `FILE`, or to stdout in place of the text")
	f.StringVar(&g.markdown, "markdown", "", "write Markdown to `FILE`, or to stdout in place of the text")
	f.Lookup("json").NoOptDefVal, f.Lookup("markdown").NoOptDefVal = "-", "-"
	f.StringVar(&g.save, "save", "", "keep what is measured in `DIR`: base.txt and head.txt, for --base and --head")
	f.BoolVar(&g.force, "force", false, "compare files of different machines")
	f.BoolVar(&g.tolerate, "tolerate-noise", false, "let a comparison be that is too noisy to tell, in spite of enough runs")
	f.BoolVar(&g.all, "all", false, "list what has passed, too")
	f.BoolVar(&g.progress, "progress", false, "say on stderr how far it is; on a terminal it does in any case")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		files, runs := g.base != "" || g.head != "", g.baseRev != "" || g.headRev != "" || g.save != ""
		switch {
		case files && runs:
			return usageError{errors.New("--base and --head are files, which have been measured: --base-rev, --head-rev and --save are for runs")}
		case g.base != "" && g.head == "":
			return usageError{errors.New("--base needs --head, the file to judge")}
		case g.json == "-" && g.markdown == "-":
			return usageError{errors.New("--json and --markdown cannot both be on stdout")}
		}
		rules, err := g.load(cmd)
		if err != nil {
			return verdictError{err, gateExitInconclusive}
		}
		if !files && g.baseRev == "" && g.save == "" && len(rules.Limits) == 0 {
			return usageError{errors.New("nothing to judge by: give --base-rev (origin/main, HEAD~1), or --rules with limits")}
		}
		if err := a.runGate(g, rules, files); err != nil {
			if errors.Is(err, errInterrupted) || errors.As(err, &verdictError{}) {
				return err
			}
			return verdictError{err, gateExitInconclusive}
		}
		return nil
	}
	return cmd
}

// load reads the rule file, and puts the flags above it.
func (g *gating) load(cmd *cobra.Command) (*gate.Rules, error) {
	rules := gate.DefaultRules()
	if g.rules != "" {
		text, err := os.ReadFile(g.rules)
		if err != nil {
			return nil, err
		}
		if rules, err = gate.LoadRules(text); err != nil {
			return nil, fmt.Errorf("%s: %w", g.rules, err)
		}
	}
	set := cmd.Flags().Changed
	if len(g.packages) > 0 {
		rules.Run.Packages = g.packages
	}
	if g.bench != "" {
		rules.Run.Bench = g.bench
	}
	if g.benchtime != "" {
		rules.Run.Benchtime = g.benchtime
	}
	if set("count") {
		rules.Count = g.count
	}
	if set("threshold") {
		rules.Threshold = g.threshold
		rules.Resolution = max(rules.Resolution, g.threshold)
	}
	if set("alpha") {
		rules.Alpha = g.alpha
	}
	if set("resolution") {
		rules.Resolution = g.resolution
	}
	if set("timeout") {
		rules.Run.Timeout.Duration = g.timeout
	}
	return rules, rules.Check()
}

// runGate reads or measures, judges and reports.
func (a *app) runGate(g *gating, rules *gate.Rules, files bool) (err error) {
	var base, head *gate.Set
	if files {
		if head, err = readBench(g.head); err == nil && g.base != "" {
			base, err = readBench(g.base)
		}
	} else {
		base, head, err = a.measureGate(g, rules)
	}
	if err != nil {
		return err
	}
	report := gate.Judge(base, head, rules, gate.Options{Force: g.force, TolerateNoise: g.tolerate})
	if err := a.writeGate(g, report); err != nil {
		return err
	}
	if code := report.ExitCode(); code != exitOK {
		return verdictError{fmt.Errorf("the verdict is: %s", report.Verdict), code}
	}
	return nil
}

func readBench(name string) (*gate.Set, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return gate.Read(f, name)
}

// measureGate builds and runs the revisions until the first signal.
func (a *app) measureGate(g *gating, rules *gate.Rules) (base, head *gate.Set, err error) {
	ctx, stop := a.onSignal(func() {})
	defer stop()
	cfg := gate.Config{Base: g.baseRev, Head: g.headRev, Rules: rules}
	if g.progress || isTerminal(a.stderr) {
		cfg.Progress = func(s string) { fmt.Fprintln(a.stderr, "perf: "+s) }
	}
	if g.baseRev == autoRev {
		if cfg.Base, err = gate.Landed(ctx, ""); err != nil {
			return nil, nil, interruptedBy(ctx, err)
		}
		if cfg.Base != "" {
			fmt.Fprintf(a.stderr, "perf: the base is %s\n", cfg.Base)
		}
	}
	if g.save != "" {
		if err := os.MkdirAll(g.save, 0o777); err != nil {
			return nil, nil, err
		}
		keep := func(name string) (f *os.File) {
			if err == nil {
				f, err = os.Create(filepath.Join(g.save, name))
			}
			return f
		}
		rawHead, rawBase := keep("head.txt"), keep("base.txt")
		if err != nil {
			return nil, nil, err
		}
		defer func() { err = errors.Join(err, rawHead.Close(), rawBase.Close()) }()
		cfg.RawHead, cfg.RawBase = rawHead, rawBase
	}
	base, head, err = gate.Run(ctx, cfg)
	return base, head, interruptedBy(ctx, err)
}

// isTerminal reports whether somebody may be looking.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// interruptedBy makes errInterrupted of an error that the signal's context has caused.
func interruptedBy(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return errInterrupted
	}
	return err
}

// writeGate writes the report in all forms that are asked for.
func (a *app) writeGate(g *gating, r *gate.Report) (err error) {
	text := true
	for _, form := range []struct {
		to    string
		write func(io.Writer) error
	}{{g.json, r.WriteJSON}, {g.markdown, r.WriteMarkdown}} {
		if form.to == "" {
			continue
		}
		var doc bytes.Buffer
		if err := form.write(&doc); err != nil {
			return err
		}
		if form.to == "-" {
			text = false
			_, err = a.stdout.Write(doc.Bytes())
		} else {
			err = os.WriteFile(form.to, doc.Bytes(), 0o644)
		}
		if err != nil {
			return err
		}
	}
	if text {
		return r.WriteText(a.stdout, g.all)
	}
	return nil
}

// fraction is a flag that takes a number within bounds.
type fraction struct {
	p        *float64
	min, max float64
}

func (f fraction) String() string { return "" }

func (f fraction) Type() string { return "X" }

func (f fraction) Set(s string) error {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(v) || v < f.min || v > f.max {
		return fmt.Errorf("want a number from %v to %v", f.min, f.max)
	}
	*f.p = v
	return nil
}
