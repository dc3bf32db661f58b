package floor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"testing"
	"time"
)

// endVar makes the test binary an end of its own, so that processes can be tested.
const endVar = "DOORBELL_FLOOR_END"

func TestMain(m *testing.M) {
	if os.Getenv(endVar) != "" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		if err := End(ctx, os.Args[1:], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if runtime.GOMAXPROCS(0) == 1 {
		runtime.GOMAXPROCS(2) // spinning ends in one process know nothing of the scheduler
	}
	os.Exit(m.Run())
}

// floors are the shapes that perf compare measures, small.
var floors = []Params{
	{Kind: PingPong, Size: 64, Iters: 200},
	{Kind: PingPong, Size: 80, Iters: 200, Block: true},
	{Kind: PingPong, Size: 80, Iters: 200, Connected: true},
	{Kind: Stream, Size: 4096 + Frame, Train: 15, Window: 255, Iters: 1000},
	{Kind: Stream, Size: 4096 + Frame, Train: 15, Window: 255, AckEvery: 60, Iters: 1000, Block: true},
	{Kind: Stream, Size: 4096 + Frame, Train: 15, Window: 255, Iters: 1000, NoCheck: true, NoCopy: true, Connected: true},
	{Kind: Stream, Size: 4096 + Frame, Train: 16, Window: 64, Iters: 1000, NoOffload: true},
	{Kind: Stream, Size: 80, Train: 128, Window: 2048, Iters: 10000},
	{Kind: Stream, Size: 80, Train: 32, Window: 64, Iters: 10000},
	{Kind: Stream, Size: 80, Train: 32, Window: 64, Iters: 1000, NoOffload: true, Block: true},
	{Kind: Stream, Size: 1040, Train: 60, Window: 600, Iters: 1000},
	{Kind: Bulk, Size: 64 << 10, Iters: 100},
	{Kind: Echo, Size: 64, Window: 64, Iters: 1000},
	{Kind: Echo, Size: 64, Iters: 200},
	{Kind: Ring, Train: 8, Iters: 100000},
	{Kind: Chan, Iters: 100000},
}

func name(p Params) string {
	s := fmt.Sprintf("%s/%d/train=%d/window=%d", p.Kind, p.Size, p.train(), p.window())
	for _, o := range []struct {
		on   bool
		name string
	}{{p.Block, "block"}, {p.NoOffload, "plain"}, {p.Connected, "connected"}, {p.NoCheck, "bare"}, {p.Exec != nil, "processes"}} {
		if o.on {
			s += "/" + o.name
		}
	}
	return s
}

// check runs a floor and looks at what must hold of any result.
func check(t *testing.T, p Params) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r, err := Run(ctx, p)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.Ops < uint64(p.Iters) || r.Elapsed <= 0 || r.Lost != 0 {
		t.Errorf("got %+v, want %d operations and none lost", r, p.Iters)
	}
	payload := 0
	switch p.Kind {
	case Stream:
		payload = p.payload()
	case Bulk, Echo:
		payload = p.Size
	case Ring, Chan:
		payload = 64
	}
	if want := r.Ops * uint64(payload); r.Bytes != want {
		t.Errorf("got %d bytes of payload in %d operations, want %d", r.Bytes, r.Ops, want)
	}
	if latency := p.Kind == PingPong || p.Kind == Echo && p.window() == 1; latency != (r.P50 > 0 && r.P50 <= r.P99) {
		t.Errorf("p50 %v and p99 %v, want them: %v", r.P50, r.P99, latency)
	}
}

func TestGoroutines(t *testing.T) {
	for _, p := range floors {
		t.Run(name(p), func(t *testing.T) { check(t, p) })
	}
}

func TestProcesses(t *testing.T) {
	t.Setenv(endVar, "1")
	for i, p := range floors {
		if testing.Short() && i%4 != 0 {
			continue
		}
		p.Exec = []string{os.Args[0]}
		if cpus := CPUs(); len(cpus) > 1 {
			p.Places = [2]Place{{CPU: cpus[0] + 1, Procs: 2}, {CPU: cpus[1] + 1}}
		}
		t.Run(name(p), func(t *testing.T) { check(t, p) })
	}
}

func TestDuration(t *testing.T) {
	for _, p := range floors {
		p.Iters, p.Duration = 0, 20*time.Millisecond
		t.Run(name(p), func(t *testing.T) {
			start := time.Now()
			r, err := Run(t.Context(), p)
			if errors.Is(err, errors.ErrUnsupported) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			// What an end measures begins with its first message, which a busy machine can hand
			// over late: only the whole run is sure to last the duration.
			if whole := time.Since(start); whole < p.Duration || r.Elapsed <= 0 || r.Elapsed > whole || r.Ops == 0 {
				t.Errorf("got %+v in %v, want at least %v", r, whole, p.Duration)
			}
		})
	}
}

func TestParamsCheck(t *testing.T) {
	ok := Params{Kind: Stream, Size: 4112, Train: 15, Window: 255, Duration: time.Second}
	for _, c := range []struct {
		name   string
		change func(*Params)
		want   string
	}{
		{"as it is", func(*Params) {}, ""},
		{"kind", func(p *Params) { p.Kind = "rdma" }, "unknown kind"},
		{"no time", func(p *Params) { p.Duration = 0 }, "one of Duration and Iters"},
		{"both", func(p *Params) { p.Iters = 5 }, "one of Duration and Iters"},
		{"no payload", func(p *Params) { p.Size = Frame }, "size is 16, want 17"},
		{"train too long", func(p *Params) { p.Train = 129; p.Size = 80; p.Window = 2048 }, "train is 129"},
		{"train too large", func(p *Params) { p.Train = 16 }, "size is 4112, want 17 to 4062"},
		{"window below a train", func(p *Params) { p.Window = 14 }, "window is 14, want 15"},
		{"acknowledged too seldom", func(p *Params) { p.AckEvery = 256 }, "acknowledgement every is 256, want 1 to 255"},
		{"ping-pong of a goodbye", func(p *Params) { *p = Params{Kind: PingPong, Size: 1, Iters: 1} }, "size is 1, want 2"},
		{"write of nothing", func(p *Params) { *p = Params{Kind: Bulk, Iters: 1} }, "size is 0, want 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := ok
			c.change(&p)
			err := p.Check()
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if _, rerr := Run(t.Context(), p); rerr == nil || rerr.Error() != err.Error() {
				t.Errorf("Run: got %v, want %v", rerr, err)
			}
		})
	}
}

// TestEndArguments holds an end to saying what is wrong with what it is told.
func TestEndArguments(t *testing.T) {
	bad, _ := json.Marshal(order{Params: Params{Kind: "rdma"}})
	for _, args := range [][]string{nil, {"{"}, {string(bad)}, {"{}", "{}"}} {
		var out strings.Builder
		if err := End(t.Context(), args, &out); err == nil || out.Len() > 0 {
			t.Errorf("%q: got %v and %q, want an error and no output", args, err, out.String())
		}
	}
}

func TestCancel(t *testing.T) {
	for _, p := range floors {
		p.Iters, p.Duration = 0, time.Hour
		t.Run(name(p), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
			defer cancel()
			r, err := Run(ctx, p)
			if p.Kind == Ring || p.Kind == Chan { // these have no other end to wait for
				return
			}
			if err == nil {
				t.Errorf("got %+v, want an error", r)
			}
		})
	}
}

func TestMode(t *testing.T) {
	for _, c := range []struct {
		before, after time.Duration
		want          Mode
	}{
		{100, 110, Fast}, {169, 169, Fast}, {170, 480, Slow}, {100, 480, Mixed}, {480, 100, Mixed}, {0, 100, Unknown}, {100, 0, Unknown},
	} {
		if got := ModeOf(c.before, c.after); got != c.want {
			t.Errorf("ModeOf(%v, %v): got %s, want %s", c.before, c.after, got, c.want)
		}
	}
	if cpus := CPUs(); len(cpus) > 1 {
		// 0 is what it says where others have one of the CPUs all the time.
		if d := Calibrate([2]int{cpus[0], cpus[1]}); d < 0 || d > time.Second {
			t.Errorf("a cache line takes %v between CPUs %d and %d", d, cpus[0], cpus[1])
		}
	}
}
