package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// comparison is what the compare command's flags say.
type comparison struct {
	rounds   int
	procs    int
	each     time.Duration
	budget   time.Duration
	idle     int
	only     string
	peers    string
	noPeers  bool
	list     bool
	json     bool
	jsonFile string
	progress bool
}

func (a *app) compare() *cobra.Command {
	c := &comparison{rounds: 5, procs: 2, each: 200 * time.Millisecond, budget: 270 * time.Second, idle: 100_000}
	cmd := &cobra.Command{
		Use:   "compare",
		Short: "Compare Doorbell with bare sockets, TCP and other transports, in one run",
		Long: `Runs Doorbell's tests, the floors (bare UDP sockets, TCP, rings) and other
transports by turns, each as two processes held to two CPUs, and prints medians,
their ratios and the marks. Between runs it measures how far apart the CPUs are:
figures are compared only within one mode of the machine, and a run disturbed by
others is repeated while time allows. A missed mark is a result, not a failure.
Idle connections take some 15 s to set up and a gigabyte; --idle has fewer.

quic-go and kcp-go run if --peers names the program of bench/peers or its folder;
ucx_perftest and fi_pingpong if they are installed.`,
		Example: `  perf compare
  perf compare --only "round trip" --rounds 9
  perf compare --no-peers --out_json_file compare.json`,
		Args: atMost(0, "no operands"),
	}
	f := cmd.Flags()
	f.Var(whole[int]{&c.rounds, 1, 1000}, "rounds", "runs of each")
	f.Var(seconds{&c.each, 10 * time.Millisecond, time.Minute}, "each", "how long a run measures")
	f.Var(seconds{&c.budget, time.Second, 24 * time.Hour}, "budget", "begin no round after this time, and repeat nothing that would take longer")
	f.Var(whole[int]{&c.procs, 0, 256}, "procs", "GOMAXPROCS of every process that is measured; 0 is the runtime's choice, but at least 2 where the process is ours")
	f.Var(whole[int]{&c.idle, 1, 120_000}, "idle", "how many connections the row of idle ones has")
	f.StringVar(&c.only, "only", "", "only the rows that match `REGEXP`")
	f.StringVar(&c.peers, "peers", "bench/peers", "the program of bench/peers, or the `FOLDER` to build it from")
	f.BoolVar(&c.noPeers, "no-peers", false, "leave out other transports")
	f.BoolVar(&c.list, "list", false, "print the rows and what they compare, and run nothing")
	f.BoolVar(&c.json, "out_json", false, "print the report as JSON, and nothing else on stdout")
	f.BoolVar(&c.json, "json", false, "the same as --out_json")
	f.StringVar(&c.jsonFile, "out_json_file", "", "write the report as JSON to `FILE`")
	f.BoolVar(&c.progress, "progress", false, "say on stderr what runs")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		only, err := regexp.Compile(c.only)
		if err != nil {
			return usageError{fmt.Errorf("invalid argument %q for \"--only\" flag: %w", c.only, err)}
		}
		rows := chooseRows(only, c.noPeers)
		if len(rows) == 0 {
			return usageError{fmt.Errorf("no row matches %q; see perf compare --list", c.only)}
		}
		if c.list {
			return listRows(a.stdout, rows)
		}
		tests := map[string]bool{}
		for _, other := range cmd.Root().Commands() {
			tests[other.Name()] = true
		}
		return a.runCompare(cmd.Context(), c, rows, tests)
	}
	return cmd
}

// floorEnd is one end of a floor, which compare starts.
func (a *app) floorEnd() *cobra.Command { return a.end("floor-end", floor.End) }

// end is a hidden command that is one end of a measurement.
func (a *app) end(name string, run func(context.Context, []string, io.Writer) error) *cobra.Command {
	var g collecting
	cmd := &cobra.Command{
		Use: name, Hidden: true, Args: cobra.ArbitraryArgs,
		Short: "One end of a measurement: what perf compare starts",
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			first, stop := a.onSignal(cancel)
			defer stop()
			defer context.AfterFunc(first, cancel)()
			defer g.start()()
			return run(ctx, args, a.stdout)
		},
	}
	cmd.Flags().DurationVar(&g.every, "gc", 0, "collect garbage so long after the last collection, again and again")
	cmd.Flags().IntVar(&g.heap, "heap", 0, "MiB of pointers that a collection has to follow")
	return cmd
}

// runCompare measures rounds until they are done, time is up or a signal comes, and reports.
func (a *app) runCompare(ctx context.Context, c *comparison, rows []pairing, tests map[string]bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first, stop := a.onSignal(cancel)
	defer stop()
	defer context.AfterFunc(first, cancel)()

	e, err := newArena(ctx, a, c, tests)
	if err != nil {
		return err
	}
	defer e.close()
	together, apart := separate(wanted(rows))
	e.measure(ctx, apart)
	e.endIdle()
	e.measure(ctx, together)
	r := e.report(rows)
	r.Interrupted = first.Err() != nil
	if c.json {
		err = writeCompareJSON(a.stdout, r)
	} else {
		err = writeCompareText(a.stdout, r)
	}
	if c.jsonFile != "" {
		err = errors.Join(err, writeFile(c.jsonFile, r))
	}
	switch {
	case r.Interrupted:
		err = errors.Join(errInterrupted, err)
	case err == nil && r.Failed > 0:
		err = fmt.Errorf("%d of the rows could not be measured; the report says why", r.Failed)
	}
	return err
}

// arena is where measurements take place.
type arena struct {
	a        *app
	c        *comparison
	exe      string
	tests    map[string]bool // the tests that this build has
	places   [2]floor.Place  // of the end that serves and of the one that drives
	cpus     []int
	peers    string // the program, once built
	peersErr error
	temp     string
	begin    time.Time
	spaces   map[int]*namespaces // by MTU
	failures map[string]string   // why a measurement cannot run at all, by its name
	runs     map[string][]run
	quiet    quiet
	idle     map[int]*idlePair // by number of connections
}

func newArena(ctx context.Context, a *app, c *comparison, tests map[string]bool) (*arena, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("this program's own file: %w", err)
	}
	e := &arena{
		a: a, c: c, exe: exe, tests: tests, begin: time.Now(), spaces: map[int]*namespaces{},
		failures: map[string]string{}, runs: map[string][]run{}, idle: map[int]*idlePair{},
	}
	if e.temp, err = os.MkdirTemp("", "doorbell-compare-"); err != nil {
		return nil, err
	}
	if e.cpus = floor.CPUs(); len(e.cpus) >= 2 {
		e.cpus = e.cpus[:2]
		e.places = [2]floor.Place{{CPU: e.cpus[0] + 1}, {CPU: e.cpus[1] + 1}}
	}
	// Two, as for a program that is free to use both CPUs: held to one the runtime would
	// choose 1, and a locked thread and a goroutine would take turns at the only P.
	for i := range e.places {
		e.places[i].Procs = c.procs
	}
	return e, ctx.Err()
}

func (e *arena) close() {
	e.endIdle()
	for _, n := range e.spaces {
		n.remove()
	}
	_ = os.RemoveAll(e.temp)
}

// run is one run of one measurement.
type run struct {
	Values map[string]float64 `json:"values"`
	// Mode is the machine's, by the calibrations before and after.
	Mode floor.Mode `json:"mode"`
	// Others is the part of both CPUs that neither this program nor what it runs used.
	Others float64 `json:"others"`
	// Line is the round trip of a cache line before and after, in nanoseconds.
	Line [2]int64 `json:"cache_line_ns"`
}

// The part of the CPUs that others may use before a run is repeated.
const noisy = 0.05

// good reports whether a run needs no repetition.
func (r *run) good() bool { return r.Others < noisy && r.Mode != floor.Mixed }

// separate splits measurements into those that have rounds together and those apart.
func separate(list []measurement) (together, apart []measurement) {
	for _, m := range list {
		if m.prepare != nil {
			apart = append(apart, m)
		} else {
			together = append(together, m)
		}
	}
	return together, apart
}

// measure runs every measurement once in each round.
func (e *arena) measure(ctx context.Context, list []measurement) {
	if len(list) == 0 {
		return
	}
	for _, m := range list {
		if m.prepare != nil && ctx.Err() == nil {
			m.prepare(ctx, e)
		}
	}
	var longest time.Duration
	for round := range e.c.rounds {
		if round > 0 && time.Since(e.begin)+longest > e.c.budget {
			return
		}
		began := time.Now()
		line := e.calibrate()
		for _, m := range list {
			if ctx.Err() != nil {
				return
			}
			if e.failures[m.name] != "" {
				continue
			}
			if e.c.progress {
				fmt.Fprintf(e.a.stderr, "perf: round %d of %d: %s\n", round+1, e.c.rounds, m.name)
			}
			var kept run
			var failed error
			for try := range 3 {
				// Repeating must leave time for the rounds that are to come.
				left := e.c.budget - time.Since(e.begin) - longest*time.Duration(e.c.rounds-round-1)
				if try > 0 && left < 0 {
					break
				}
				e.quiet.begin()
				values, err := m.run(ctx, e)
				others := e.quiet.end()
				after := e.calibrate()
				r := run{Values: values, Mode: floor.ModeOf(line, after), Others: others, Line: [2]int64{int64(line), int64(after)}}
				line = after
				failed = err
				if err != nil {
					if errors.Is(err, errSkip) {
						break
					}
					continue
				}
				if try == 0 || kept.Values == nil || r.good() || r.Others < kept.Others && r.Mode != floor.Mixed {
					kept = r
				}
				if kept.good() {
					break
				}
			}
			switch {
			case kept.Values != nil:
				e.runs[m.name] = append(e.runs[m.name], kept)
			case ctx.Err() == nil:
				e.failures[m.name] = oneLine(failed.Error())
			}
		}
		longest = max(longest, time.Since(began))
	}
}

// calibrate measures the machine's mode; 0 if there are no two CPUs.
func (e *arena) calibrate() time.Duration {
	if len(e.cpus) < 2 {
		return 0
	}
	return floor.Calibrate([2]int(e.cpus))
}

// machine describes where the figures are from.
type machine struct {
	OS, Arch, Kernel, CPU string
	CPUs                  int
	Go                    string
}

func thisMachine() machine {
	m := machine{OS: runtime.GOOS, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Go: runtime.Version()}
	m.Kernel, m.CPU = kernelAndCPU()
	return m
}
