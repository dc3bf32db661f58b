package deferral

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// mustPlay plays trials of a strategy in a cell.
func mustPlay(tb testing.TB, c *Cell, s Strategy, seed uint64, n int) *tally {
	tb.Helper()
	t, err := play(c, s, seed, 0, n)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

// matrix is a small version of the sweep, with every kind of trouble in it.
func matrix() []Cell {
	var cells []Cell
	for _, c := range Cells() {
		if c.WQEs <= 16 && c.Conns <= 10 {
			cells = append(cells, c)
		}
	}
	both := Base()
	both.Axis, both.Value = "several at once", "late, lost, 5 connections of 7 WQEs"
	both.RTUDelay, both.RTULossRate, both.Conns, both.WQEs = 500*time.Microsecond, 0.3, 5, 7
	return append(cells, both)
}

// TestCellsAreSound: a sweep of some forty cells, each off the base along one axis, with
// names that tell them apart.
func TestCellsAreSound(t *testing.T) {
	cells, seen := Cells(), map[string]bool{}
	if len(cells) < 40 || cells[0].Axis != "base" {
		t.Fatalf("%d cells, the first %q", len(cells), cells[0].Axis)
	}
	plots := map[string]bool{}
	for i := range cells {
		c := &cells[i]
		name := c.Axis + ": " + c.Value
		if seen[name] {
			t.Errorf("%s: twice", name)
		}
		seen[name] = true
		if f := slug(name); c.Plot && plots[f] {
			t.Errorf("%s: its plot has another one's name %q", name, f)
		} else if c.Plot {
			plots[f] = true
		}
		if c.trials(1000) < 1 || c.batch() < 1 {
			t.Errorf("%s: %d trials in batches of %d", name, c.trials(1000), c.batch())
		}
		if c.AckOnly && c.WQEs != 1 {
			t.Errorf("%s: AckOnly is for one WQE", name)
		}
		if c.Reply && !c.Request {
			t.Errorf("%s: a reply to nothing", name)
		}
	}
}

// TestStrategiesKeepTheirPromises plays every strategy in every cell of the matrix: each
// message arrives exactly once and in order, every connection gets its messages, and only c
// breaks the rule; packets meet queue pairs that are not ready only where somebody sent too early.
func TestStrategiesKeepTheirPromises(t *testing.T) {
	trials := 30
	if testing.Short() {
		trials = 5
	}
	for _, c := range matrix() {
		for s := range NumStrategies {
			for seed := range uint64(2) {
				got := mustPlay(t, &c, s, seed, trials)
				fail := func(format string, args ...any) {
					t.Helper()
					t.Errorf("%s %s, %v, seed %d: "+format, append([]any{c.Axis, c.Value, s, seed}, args...)...)
				}
				if got.Connections != trials*c.Conns || got.Delivered+got.Undelivered != got.Connections {
					fail("%d connections, %d delivered and %d not", got.Connections, got.Delivered, got.Undelivered)
				}
				if got.Undelivered != 0 || got.Duplicated != 0 || got.Misordered != 0 {
					fail("%d undelivered, %d duplicated, %d out of order", got.Undelivered, got.Duplicated, got.Misordered)
				}
				if s != EarlyRTS && (got.Violations != 0 || got.NotReady != 0) {
					fail("%d packets before RTU and first request, %d at a queue pair not ready", got.Violations, got.NotReady)
				}
				if greets := !c.Reply; s == EarlyRTS && greets && got.Violations < got.Connections {
					fail("greeted %d times, but %d violations", got.Connections, got.Violations)
				}
				if (s == Retry) != (got.Refused > 0) {
					fail("%d posts refused", got.Refused)
				}
				for i, ns := range got.firstByte {
					if ns < int64(c.Latency) || got.lastByte[i] < ns {
						fail("connection %d: first byte after %d ns, last after %d", i, ns, got.lastByte[i])
					}
				}
			}
		}
	}
}

// TestDeferredIsNeverWorse: at the 99th percentile the deferred doorbell is never worse than
// the side queue or retries, whatever the cell. The strategies meet the same luck, so this
// holds for the samples and not only for the distributions.
func TestDeferredIsNeverWorse(t *testing.T) {
	const seed, trials = 3, 1000
	cells := matrix()
	if testing.Short() {
		cells = cells[:3]
	}
	for _, c := range cells {
		n := max(trials/c.Conns, 1)
		if c.Few {
			n = 20 // retries for seconds; the 99th percentile is the maximum then
		}
		var p99 [NumStrategies]int64
		for _, s := range []Strategy{Deferred, SideQueue, Retry} {
			got := mustPlay(t, &c, s, seed, n)
			q := quantilesOf(got.firstByte, false)
			if p99[s] = *q.Max; q.P99 != nil {
				p99[s] = *q.P99
			}
		}
		for _, s := range []Strategy{SideQueue, Retry} {
			if p99[Deferred] > p99[s] {
				t.Errorf("%s %s, seed %d: p99 of a is %v, of %v %v", c.Axis, c.Value, seed,
					time.Duration(p99[Deferred]), s, time.Duration(p99[s]))
			}
		}
	}
}

// TestWhatEarlyRTSBuysAndCosts: c saves a round trip where the peer's wire is ready within
// the REP's step, and costs a retransmission where it is not; with Linux's ack timeout that
// is two seconds.
func TestWhatEarlyRTSBuysAndCosts(t *testing.T) {
	median := func(c Cell, s Strategy) (time.Duration, *tally) {
		got := mustPlay(t, &c, s, 1, 50)
		return time.Duration(*quantilesOf(got.firstByte, false).P50), got
	}
	c := Base()
	c.ClientWire = true
	a, _ := median(c, Deferred)
	early, counts := median(c, EarlyRTS)
	if saved := a - early; saved < 2*c.Latency || saved > 3*c.Latency {
		t.Errorf("RTS before REP saves %v, want a round trip of %v", saved, 2*c.Latency)
	}
	if counts.NotReady != 0 {
		t.Errorf("%d packets met a queue pair that was not ready", counts.NotReady)
	}
	c.ClientWire = false
	if early, counts = median(c, EarlyRTS); counts.NotReady == 0 || early < 9*time.Millisecond {
		t.Errorf("%v until the first byte, %d early packets; want a retransmission", early, counts.NotReady)
	}
	c.AckTimeout, c.AckOnly = linuxAckTimeout, true
	if early, _ = median(c, EarlyRTS); early < 2*time.Second || early > 3*time.Second {
		t.Errorf("%v until the first byte with Linux's ack timeout of 2.1 s", early)
	}
}

// TestTheRTUIsWhatItTakes: with a silent client the deferred doorbell waits for the RTU, and
// with a talking one not even for that.
func TestTheRTUIsWhatItTakes(t *testing.T) {
	c := Base()
	c.RTUDelay, c.Request = 5*time.Millisecond, false
	if got := mustPlay(t, &c, Deferred, 1, 20); quantilesOf(got.firstByte, false).Min == nil || *got.min() < int64(c.RTUDelay) {
		t.Errorf("a greeting came before the RTU: %v", time.Duration(*got.min()))
	}
	c.Request = true
	got := mustPlay(t, &c, Deferred, 1, 20)
	if m := *quantilesOf(got.firstByte, false).Max; m > int64(time.Millisecond) {
		t.Errorf("the greeting waited %v for an RTU that the request overtook", time.Duration(m))
	}
	if got.CommEst != 20 {
		t.Errorf("COMM_EST %d times in 20 connections", got.CommEst)
	}
	c.RTULost, c.RTUDelay, c.DeafToCommEst = 1, 0, true
	if got := mustPlay(t, &c, SideQueue, 1, 20); *got.min() < int64(10*time.Millisecond) {
		t.Errorf("a program deaf to COMM_EST sent after %v, with the RTU lost", time.Duration(*got.min()))
	}
}

func (t *tally) min() *int64 { return quantilesOf(t.firstByte, false).Min }

// TestSameSeedSameFigures: a seed decides everything, whatever the number of workers; another
// seed decides otherwise.
func TestSameSeedSameFigures(t *testing.T) {
	run := func(seed uint64, workers int) *Report {
		r, err := Run(Config{Seed: seed, Trials: 60, Budget: -1, Workers: workers, Axis: "base", NoCosts: true})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := run(5, 1)
	if len(first.Cells) != 1 || first.Cells[0].Outcomes[0].Trials != 600 || first.Truncated {
		t.Fatalf("%d cells, %d trials", len(first.Cells), first.Cells[0].Outcomes[0].Trials)
	}
	if again := run(5, 3); !reflect.DeepEqual(first.Cells, again.Cells) {
		t.Error("the same seed gave other figures with three workers")
	}
	if other := run(6, 1); reflect.DeepEqual(first.Cells, other.Cells) {
		t.Error("another seed gave the same figures")
	}
}

// TestBudget: when time is up only first batches are played, and the report says so.
func TestBudget(t *testing.T) {
	r, err := Run(Config{Trials: 100, Budget: 1, Axis: "base", NoCosts: true})
	if err != nil {
		t.Fatal(err)
	}
	for s, o := range r.Cells[0].Outcomes {
		if o.Trials != 250 {
			t.Errorf("%v: %d trials, want the first batch", Strategy(s), o.Trials)
		}
	}
	if !r.Truncated {
		t.Error("the report does not say that it was cut short")
	}
}

// TestStop: a study that is stopped reports what it has.
func TestStop(t *testing.T) {
	stop := make(chan struct{})
	close(stop)
	r, err := Run(Config{Stop: stop})
	if err != nil || r.Costs != nil || len(r.Cells) != 0 || !r.Truncated {
		t.Errorf("stopped at once: %+v, %v", r, err)
	}
	stop = make(chan struct{})
	r, err = Run(Config{Stop: stop, Axis: "base", NoCosts: true, Workers: 1, Progress: func(done, _ int) {
		if done == 1 {
			close(stop)
		}
	}})
	if err != nil || len(r.Cells) != 1 || r.Cells[0].Outcomes[0].Trials != 250 || r.Cells[0].Outcomes[1].Trials != 0 || !r.Truncated {
		t.Fatalf("stopped after one batch: %+v, %v", r, err)
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	mustMatchSchema(t, b.Bytes())
	if _, err := r.WritePlots(t.TempDir()); err != nil {
		t.Error(err)
	}
}

// TestNoSuchAxis: asking for nothing is a mistake.
func TestNoSuchAxis(t *testing.T) {
	if _, err := Run(Config{Axis: "no such axis", NoCosts: true}); err == nil || !strings.Contains(err.Error(), "no such axis") {
		t.Errorf("error %v", err)
	}
}

// TestFailureNamesTheTrial: an error says how to play the trial again.
func TestFailureNamesTheTrial(t *testing.T) {
	c := Base()
	c.AckTimeout = 77 // refused by every queue pair
	_, err := play(&c, SideQueue, 9, 20, 1)
	if err == nil || !strings.Contains(err.Error(), "strategy b, seed 9, trials 20 to 20") {
		t.Errorf("error %v", err)
	}
}

// TestUndelivered: a connection that cannot come up is counted and not waited for.
func TestUndelivered(t *testing.T) {
	c := Base()
	c.RTULost, c.Request = 1000, false
	for _, s := range []Strategy{Deferred, SideQueue, Retry} {
		if got := mustPlay(t, &c, s, 1, 2); got.Undelivered != 2 || len(got.firstByte) != 0 {
			t.Errorf("%v: %+v", s, got.Counts)
		}
	}
}

// TestQuantiles: a quantile is shown only with ten values beyond it.
func TestQuantiles(t *testing.T) {
	sample := make([]int64, 10000)
	for i := range sample {
		sample[i] = int64(len(sample) - i)
	}
	for _, tc := range []struct {
		n              int
		p50, p99, p999 int64 // 0: not shown
	}{
		{0, 0, 0, 0}, {19, 0, 0, 0}, {20, 10, 0, 0}, {999, 500, 0, 0}, {1000, 500, 990, 0}, {9999, 5000, 9900, 0}, {10000, 5000, 9900, 9990},
	} {
		s := append([]int64(nil), sample[len(sample)-tc.n:]...)
		q := quantilesOf(s, true)
		for _, v := range []struct {
			name string
			got  *int64
			want int64
		}{{"p50", q.P50, tc.p50}, {"p99", q.P99, tc.p99}, {"p99.9", q.P999, tc.p999}, {"min", q.Min, min(int64(tc.n), 1)}, {"max", q.Max, int64(tc.n)}} {
			if (v.got == nil) != (v.want == 0) || v.got != nil && *v.got != v.want {
				t.Errorf("n %d: %s is %v, want %d", tc.n, v.name, v.got, v.want)
			}
		}
		for i, p := range q.CDF {
			if i > 0 && (p.Fraction <= q.CDF[i-1].Fraction || p.NS < q.CDF[i-1].NS) || p.Fraction != float64(p.NS)/float64(tc.n) {
				t.Fatalf("n %d: step %d of the distribution is %+v", tc.n, i, p)
			}
		}
		if tc.n > 0 && q.CDF[len(q.CDF)-1].Fraction != 1 {
			t.Errorf("n %d: the distribution ends at %+v", tc.n, q.CDF[len(q.CDF)-1])
		}
	}
}

// TestCosts: what is measured is there, and publishing does not depend on how much waited as posting does.
func TestCosts(t *testing.T) {
	c, err := measureCosts(time.Nanosecond, func() bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	timings := []Timing{c.PostRTS, c.PostRTR, c.PostPlain, c.Ring, c.Message}
	for _, w := range c.ByWQEs {
		timings = append(timings, w.Publish, w.Flush, w.FirstPacket, w.FirstFlushed)
	}
	for i, m := range timings {
		if m.Runs != minCostRuns || m.Min <= 0 || m.Median < m.Min || m.Max < m.Median {
			t.Errorf("timing %d is %+v", i, m)
		}
	}
	if len(c.ByWQEs) != len(waiting) {
		t.Errorf("%d numbers of WQEs, want %d", len(c.ByWQEs), len(waiting))
	}
}

// TestJSONOfARun: what a run writes is valid by the schema, which has no field that is not
// written.
func TestJSONOfARun(t *testing.T) {
	r, err := Run(Config{Trials: 20, Budget: time.Second, Axis: "base"})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	mustMatchSchema(t, b.Bytes())
	var d map[string]any
	if err := json.Unmarshal(b.Bytes(), &d); err != nil {
		t.Fatal(err)
	}
	d["surprise"] = 1
	b.Reset()
	if err := json.NewEncoder(&b).Encode(d); err != nil {
		t.Fatal(err)
	}
	if err := schemaError(t, b.Bytes()); err == nil {
		t.Error("the schema takes fields that it does not describe")
	}
}

// TestNames: letters and names, and no panic for what is none.
func TestNames(t *testing.T) {
	if got := Deferred.String() + EarlyRTS.Letter() + Strategy(9).String(); got != "a deferred doorbell"+"c"+"strategy 9 strategy 9" {
		t.Errorf("%q", got)
	}
	if linuxAckTimeout.Duration().Round(100*time.Millisecond) != 2100*time.Millisecond || ourAckTimeout != verbs.AckTimeoutFor(16*time.Millisecond) {
		t.Error("the ack timeouts are not what their names say")
	}
}
