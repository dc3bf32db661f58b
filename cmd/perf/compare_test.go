package main

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

func TestCompareCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--only", "("}, `"--only" flag`},
		{[]string{"--only", "carrier pigeon"}, "no row matches"},
		{[]string{"--rounds", "0"}, "1 to 1000"},
		{[]string{"--each", "0"}, "want seconds"},
		{[]string{"--budget", "never"}, "want seconds"},
		{[]string{"--procs", "-1"}, "0 to 256"},
		{[]string{"--idle", "0"}, "1 to 120000"},
		{[]string{"more"}, "unexpected operand"},
	} {
		r := perf(t, append([]string{"compare"}, c.args...)...)
		if r.code != exitUsage || !strings.Contains(r.stderr, c.want) || strings.Count(r.stderr, "\n") != 1 || r.stdout != "" {
			t.Errorf("perf compare %q: exit %d\n%s%s\nwant exit 2 and one line with %q", c.args, r.code, r.stdout, r.stderr, c.want)
		}
	}
}

func TestCompareList(t *testing.T) {
	all := good(t, "compare", "--list")
	if got, want := strings.Count(all, "\n"), len(allRows())+1; got != want {
		t.Errorf("got %d lines, want %d", got, want)
	}
	alone := good(t, "compare", "--list", "--no-peers")
	if !strings.Contains(all, "quic-go") || strings.Contains(alone, "quic-go") {
		t.Errorf("peers are listed wrongly:\n%s\nwithout:\n%s", all, alone)
	}
}

// TestCompareRows holds the table to what the report takes for granted.
func TestCompareRows(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range allRows() {
		if seen[r.name] {
			t.Errorf("two rows are called %q", r.name)
		}
		seen[r.name] = true
		if units[r.value] == "" || r.product.run == nil || r.reference.run == nil || r.product.name == r.reference.name {
			t.Errorf("%s: incomplete: %+v", r.name, r)
		}
		if r.reach != 0 && (r.atMost() && r.reach > r.mark || !r.atMost() && r.reach < r.mark) {
			t.Errorf("%s: %v is easier than the mark, %v", r.name, r.reach, r.mark)
		}
	}
	rows := chooseRows(regexp.MustCompile("polling, p"), false)
	var names []string
	for _, m := range wanted(rows) {
		names = append(names, m.name)
	}
	if want := []string{"raw UDP, spinning", "Doorbell send_lat", "Doorbell write_lat", "Doorbell read_lat"}; !slices.Equal(names, want) {
		t.Errorf("got measurements %q, want %q", names, want)
	}
}

func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		value             string
		mark, reach, have float64
		want              string
	}{
		{p50, 1.25, 1.12, 1.3, verdictMiss},
		{p50, 1.25, 1.12, 1.25, verdictPass},
		{p50, 1.25, 1.12, 1.12, verdictReach},
		{p99, 2, 0, 0.5, verdictPass},
		{gbps, 0.85, 0.95, 0.84, verdictMiss},
		{gbps, 0.85, 0.95, 0.85, verdictPass},
		{mps, 0.5, 0.75, 0.8, verdictReach},
		{mps, 0, 0, 0.01, verdictNone},
	} {
		if got := verdict(&pairing{value: c.value, mark: c.mark, reach: c.reach}, c.have); got != c.want {
			t.Errorf("%s at %v, mark %v, reach %v: got %q, want %q", c.value, c.have, c.mark, c.reach, got, c.want)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{9, 1}, 5}, {[]float64{5, 1, 100}, 5}, {[]float64{4, 1, 3, 2}, 2.5}} {
		if got := median(c.in); got != c.want {
			t.Errorf("median of %v: got %v, want %v", c.in, got, c.want)
		}
	}
}

// runsOf makes runs with a value in a mode; negative ones were noisy.
func runsOf(mode floor.Mode, values ...float64) []run {
	var list []run
	for _, v := range values {
		r := run{Values: map[string]float64{p50: math.Abs(v)}, Mode: mode}
		if v < 0 {
			r.Others = 0.5
		}
		list = append(list, r)
	}
	return list
}

// TestJudge compares within one mode, and leaves out noise where enough is left.
func TestJudge(t *testing.T) {
	r := pairing{
		name: "row", product: measurement{name: "ours"}, reference: measurement{name: "theirs"}, value: p50, mark: 1.25, reach: 1.1,
	}
	for _, c := range []struct {
		name          string
		ours, theirs  []run
		failed        map[string]string
		ratio         float64
		mode          floor.Mode
		verdict, note string
	}{
		{
			name: "fast alone counts",
			ours: slices.Concat(runsOf(floor.Fast, 12, 12, 12), runsOf(floor.Slow, 99, 99, 99, 99)), theirs: slices.Concat(runsOf(floor.Fast, 10, 10, 10), runsOf(floor.Slow, 1)),
			ratio: 1.2, mode: floor.Fast, verdict: verdictPass, note: "from 3 runs only",
		},
		{
			name: "slow if never fast", ours: runsOf(floor.Slow, 20, 20, 20, 20, 20), theirs: runsOf(floor.Slow, 10, 10, 10, 10, 10),
			ratio: 2, mode: floor.Slow, verdict: verdictMiss, note: "in slow mode",
		},
		{
			name: "one slow, one fast", ours: runsOf(floor.Slow, 20), theirs: runsOf(floor.Fast, 10),
			ratio: 2, mode: floor.Mixed, verdict: verdictMiss, note: "in mixed mode",
		},
		{
			name: "noise left out", ours: runsOf(floor.Fast, -90, -90, 10, 10, 10), theirs: runsOf(floor.Fast, 10, 10, 10, 10, 10),
			ratio: 1, mode: floor.Fast, verdict: verdictReach, note: "from 3 runs only",
		},
		{
			name: "noise only", ours: runsOf(floor.Fast, -20, -20, -20, -20, -20), theirs: runsOf(floor.Fast, 10, 10, 10, 10, 10),
			ratio: 2, mode: floor.Fast, verdict: verdictNoise, note: "others used the CPUs",
		},
		{name: "not in this build", failed: map[string]string{"ours": "skipped: no such test"}, verdict: verdictSkip, note: "ours: no such test"},
		{name: "broken", failed: map[string]string{"theirs": "it broke"}, verdict: verdictFail, note: "theirs: it broke"},
		{name: "no time", ours: runsOf(floor.Fast, 1), verdict: verdictSkip, note: "not measured"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := &arena{c: &comparison{}, failures: c.failed, runs: map[string][]run{"ours": c.ours, "theirs": c.theirs}}
			got := e.judge(&r)
			if math.Abs(got.Ratio-c.ratio) > 1e-9 || got.Verdict != c.verdict || !strings.Contains(strings.Join(got.Notes, "; "), c.note) {
				t.Errorf("got %+v, want ratio %v, %q and a note with %q", got, c.ratio, c.verdict, c.note)
			}
			if c.mode != "" && got.Mode != c.mode {
				t.Errorf("got mode %s, want %s", got.Mode, c.mode)
			}
		})
	}
}

func TestReportValues(t *testing.T) {
	const bw = `{"test_info":{"BW_unit":"Gb/sec"},"results":{"BW_average":25.5,"MsgRate":0.5}}`
	const lat = `{"test_info":{},"results":{"t_typical":3.5,"percentile_99":6}}`
	for _, c := range []struct {
		test, doc string
		want      map[string]float64
	}{
		{"send_bw", bw, map[string]float64{gbps: 25.5, mps: 0.5}},
		{"send_lat", lat, map[string]float64{p50: 7, p99: 12}},
		{"write_lat", lat, map[string]float64{p50: 7, p99: 12}},
		{"read_lat", lat, map[string]float64{p50: 3.5, p99: 6}},
		{"send_lat", bw, nil},
		{"send_bw", lat, nil},
		{"send_bw", strings.Replace(bw, "Gb/sec", "MiB/sec", 1), nil},
		{"send_bw", strings.Replace(bw, "25.5", "0", 1), nil},
		{"send_bw", `{"results":null}`, nil},
		{"send_bw", `{"results":[{"BW_average":1}]}`, nil},
		{"send_bw", "", nil},
	} {
		got, err := reportValues(c.test, []byte(c.doc))
		if (err != nil) != (c.want == nil) {
			t.Errorf("%s of %s: got %v, %v, want %v", c.test, c.doc, got, err, c.want)
		}
		for name, x := range c.want {
			if got[name] != x {
				t.Errorf("%s of %s: %s is %v, want %v", c.test, c.doc, name, got[name], x)
			}
		}
	}
}

// TestParseTools reads what the tools of others print; the samples are theirs.
func TestParseTools(t *testing.T) {
	const pingpong = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n" +
		"1m      200     =200     400m        1.94s    216.61    4840.75       0.00\n"
	got, err := parsePingPong(pingpong, 1<<20)
	if err != nil || got[p50] != 9681.5 || math.Abs(got[gbps]-1.7329) > 1e-3 {
		t.Errorf("fi_pingpong: got %v, %v", got, err)
	}
	for _, bad := range []string{"", "fi_getinfo: -61", strings.Replace(pingpong, "4840.75", "nan?", 1), strings.Replace(pingpong, "4840.75", "0", 1)} {
		if got, err := parsePingPong(bad, 64); err == nil {
			t.Errorf("fi_pingpong printing %q: got %v, want an error", bad, got)
		}
	}
	const final = "[thread 0]   357   0.451  2891.016  2891.016   345.90  345.90   346   346\n" +
		"Final:   20000      7.652     8.467     8.467     1754.52     1754.52      118102      118102\n"
	got, err = parseUCX(final)
	if err != nil || got[p50] != 15.304 || math.Abs(got[gbps]-14.718) > 1e-3 {
		t.Errorf("ucx_perftest: got %v, %v", got, err)
	}
	for _, bad := range []string{"", "Final:\n", strings.Replace(final, "7.652", "x", 1), strings.Replace(final, "1754.52     1754.52", "1754.52     0", 1)} {
		if got, err := parseUCX(bad); err == nil {
			t.Errorf("ucx_perftest printing %q: got %v, want an error", bad, got)
		}
	}
}

// compareHere runs a comparison whose ends are this test's file.
func compareHere(t *testing.T, args ...string) *comparisonReport {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("bare sockets are measured on Linux only")
	}
	t.Setenv(asPerf, "1")
	out := good(t, append([]string{"compare", "--rounds", "1", "--each", "0.02", "--budget", "1", "--out_json"}, args...)...)
	var r comparisonReport
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return &r
}

// TestCompareRuns runs some rows of every kind, briefly, and looks at the arithmetic.
func TestCompareRuns(t *testing.T) {
	only := "^64 B SEND round trip, polling, p50$|^64 B SEND echoed|beside bulk, p99"
	if testing.Short() {
		only = "^64 B SEND round trip, polling, p50$"
	}
	compareRows(t, only)
}

// compareRows runs rows once and looks at the arithmetic.
func compareRows(t *testing.T, only string) {
	t.Helper()
	r := compareHere(t, "--no-peers", "--only", only)
	for _, row := range r.Rows {
		if row.Product <= 0 || row.Reference <= 0 || math.Abs(row.Ratio-row.Product/row.Reference) > 1e-9 || row.Samples != [2]int{1, 1} {
			t.Errorf("got %+v", row)
		}
	}
	if r.Failed != 0 || len(r.Runs) < 2 || r.Wall <= 0 {
		t.Errorf("got %d failed rows, %d measurements in %v s", r.Failed, len(r.Runs), r.Wall)
	}
}

// TestCompareConns runs the rows of streams and messages.
func TestCompareConns(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	for _, only := range []string{
		"^64 B over a stream there and back, p50$", "^stream, writes of 64 KiB$",
		"^message of 64 B there and back, p50$", "^messages of 64 KiB$",
	} {
		t.Run(only, func(t *testing.T) { compareRows(t, only) })
	}
}

// TestCompareIdle looks at what is told of idle connections, and that nobody is left.
func TestCompareIdle(t *testing.T) {
	r := compareHere(t, "--idle", "40", "--rounds", "2", "--only", "idle connections, p50")
	row := r.Rows[0]
	if r.Failed != 0 || row.Ratio <= 0 || !strings.Contains(strings.Join(row.Notes, "; "), "40 connections, made in") {
		t.Errorf("got %+v", row)
	}
	for name, list := range r.Runs {
		for _, one := range list {
			if with := one.Values["idle"] == 40; with == strings.HasSuffix(name, "none") || with && (one.Values["heap"] <= 0 || one.Values["setup_sec"] <= 0) {
				t.Errorf("%s: got %v", name, one.Values)
			}
		}
	}
}

// TestCompareIdleFails has the ends of idle connections fail in every way that they can.
func TestCompareIdleFails(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs programs of Linux")
	}
	a := &app{stdout: io.Discard, stderr: io.Discard, signals: make(chan os.Signal)}
	for _, c := range []struct{ exe, want string }{
		{"/nowhere/at/all", "no such file"},
		{"true", "EOF"},
		{"echo", "invalid character"}, // it says its argument, "idle-end"
	} {
		e, err := newArena(t.Context(), a, &comparison{idle: 1}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if e.exe, err = exec.LookPath(c.exe); err != nil {
			e.exe = c.exe
		}
		e.startIdle(t.Context(), 1)
		if _, err := e.beside(1); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("with %s: got %v, want an error with %q", c.exe, err, c.want)
		}
		e.close()
	}
	e := &arena{c: &comparison{}, idle: map[int]*idlePair{}}
	e.startIdle(t.Context(), 1<<30)
	if _, err := e.beside(1 << 30); !errors.Is(err, errSkip) {
		t.Errorf("with more connections than memory: got %v, want them skipped", err)
	}
}

// TestGrow counts the nodes of heaps.
func TestGrow(t *testing.T) {
	var count func(*node) int
	count = func(n *node) int {
		if n == nil {
			return 0
		}
		return 1 + count(n.left) + count(n.right)
	}
	for _, n := range []int{0, 1, 2, 3, 10, 1000, 1023, 1024} {
		if got := count(grow(n)); got != n+1 {
			t.Errorf("grow(%d) has %d nodes, want %d", n, got, n+1)
		}
	}
	stop := (&collecting{every: 1, heap: 1}).start()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for after.NumForcedGC < before.NumForcedGC+3 {
		runtime.ReadMemStats(&after)
	}
	stop()
	(&collecting{}).start()()
}

// TestCompareNamespaces looks for what a comparison between namespaces leaves behind.
func TestCompareNamespaces(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a second")
	}
	r := compareHere(t, "--no-peers", "--only", "^64 B SEND round trip, p50, veth, MTU 9000$")
	if row := r.Rows[0]; row.Verdict == verdictSkip {
		t.Skip(row.Notes)
	} else if row.Ratio <= 0 {
		t.Errorf("got %+v", row)
	}
	out, err := exec.Command("ip", "netns", "list").CombinedOutput()
	if err != nil || strings.Contains(string(out), "doorbell-") {
		t.Errorf("namespaces were left behind: %v\n%s", err, out)
	}
}

// TestCompareMissingPeers goes on without what is not there.
func TestCompareMissingPeers(t *testing.T) {
	r := compareHere(t, "--only", "^1 MiB against kcp-go$", "--peers", t.TempDir()+"/none")
	if row := r.Rows[0]; row.Verdict != verdictSkip || !strings.Contains(strings.Join(row.Notes, ""), "--peers") {
		t.Errorf("got %+v, want it skipped with a reason", row)
	}
}

// trigger is a writer that sends a signal when it sees a text.
type trigger struct {
	text    string
	signals chan<- os.Signal
	once    sync.Once
}

func (w *trigger) Write(b []byte) (int, error) {
	if strings.Contains(string(b), w.text) {
		w.once.Do(func() { w.signals <- os.Interrupt })
	}
	return len(b), nil
}

// TestCompareInterrupted ends a comparison by a signal in its first round: a report of what was
// measured until then, and the exit code of an interruption. A busy machine may never get to a
// second round, for it measures again what others have disturbed.
func TestCompareInterrupted(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("bare sockets are measured on Linux only")
	}
	t.Setenv(asPerf, "1")
	signals := make(chan os.Signal, 1)
	var stdout strings.Builder
	a := &app{stdout: &stdout, stderr: &trigger{text: "round 1", signals: signals}, signals: signals}
	code := a.run(t.Context(), []string{"compare", "--progress", "--rounds", "1000", "--each", "0.02", "--only", "^64 B SEND round trip, polling, p50$"})
	out := stdout.String()
	if code != exitInterrupted || !strings.Contains(out, "Interrupted") {
		t.Errorf("got exit code %d and\n%s\nwant %d and a report", code, out, exitInterrupted)
	}
}
