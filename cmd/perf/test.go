package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// testFlags are the flags of one test.
type testFlags struct {
	deviceFlags
	p        bench.Params
	conn     string
	atomic   string
	gbits    bool
	json     bool
	jsonFile string
	compress string // of send_bw: messages instead of verbs, if it is not ""
	payload  string
}

// about says of each test what it does, in a line and in full.
var about = map[bench.Test][2]string{
	bench.SendLat: {"Latency of SEND: half a round trip of a message", `Sends a message back and forth and reports half of the round trips' times.`},
	bench.SendBW:  {"Bandwidth and message rate of SEND", `Sends as many messages as the depths allow and reports how fast they complete.`},
	bench.WriteLat: {"Latency of RDMA WRITE: half a round trip of a message", `Writes a message back and forth and reports half of the round trips' times. Both
ends poll the memory that the other one writes: they never sleep.`},
	bench.WriteBW: {"Bandwidth and message rate of RDMA WRITE", `Writes as many messages as the depth allows and reports how fast they complete.`},
	bench.ReadLat: {"Latency of RDMA READ: from post to completion", `Reads one message after the other and reports the times of whole operations.`},
	bench.ReadBW: {"Bandwidth and message rate of RDMA READ", `Reads as many messages at a time as -t and -o allow and reports how fast they
complete.`},
	bench.AtomicLat: {"Latency of atomics: from post to completion", `Executes one atomic of 8 bytes after the other and reports the times of whole
operations.`},
	bench.AtomicBW: {"Message rate of atomics", `Executes as many atomics of 8 bytes at a time as -t and -o allow and reports how
fast they complete.`},
}

// What tests have in common.
const (
	aboutRates = `
#iterations counts the messages of all QPs. -b adds up both directions. The peak
is the best stretch of at least a millisecond and twice the messages under way.`
	aboutLoss = `
Over UC%s messages may be lost, and nothing slows the sender down: averages are
of what arrived, and what did not is counted below the figures.`
	aboutServer = `
Without HOST it serves one client with that client's options and exits.`
)

// tests are the commands that measure.
func (a *app) tests() (cmds []*cobra.Command) {
	for t := bench.SendLat; t.Valid(); t++ {
		cmds = append(cmds, a.test(t))
	}
	return cmds
}

// test is the command of a test, with the flags that mean something in it.
func (a *app) test(test bench.Test) *cobra.Command {
	t := &testFlags{p: bench.Defaults(test), conn: "RC", atomic: "FETCH_AND_ADD"}
	verb, rates := test.Verb(), !test.Latency()
	long, options := about[test][1], "-n 10000"
	if rates {
		long, options = long+aboutRates, "-D 3"
	}
	switch verb {
	case bench.VerbSend:
		long += fmt.Sprintf(aboutLoss, " and UD")
	case bench.VerbWrite:
		long += fmt.Sprintf(aboutLoss, "")
	}
	cmd := &cobra.Command{
		Use: test.String() + " [HOST[:UDPPORT]]", Short: about[test][0], Long: long + aboutServer,
		Example: fmt.Sprintf("  perf %[1]v --bind 127.0.0.2\n  perf %[1]v 127.0.0.2 --bind 127.0.0.1 %[2]s", test, options),
		Args:    atMost(1, "one HOST[:UDPPORT]"),
	}
	t.register(cmd)
	f := cmd.Flags()
	f.VarP(whole[int64]{&t.p.Iters, 1, bench.MaxIters}, "iters", "n", "messages on each QP")
	f.VarP(seconds{&t.p.Duration, time.Millisecond, bench.MaxDuration}, "duration", "D", "run this long instead of -n messages")
	f.VarP(whole[int]{&t.p.TxDepth, 1, bench.MaxDepth}, "tx-depth", "t", "requests posted on each QP")
	f.VarP(mtuFlag{&t.p.MTU}, "mtu", "m", "path MTU: 256 to 4096; default what both devices can")
	conn, size := "connection type: RC alone has "+verb.String()+"s", "message size in bytes"
	switch verb {
	case bench.VerbSend:
		conn, size = "connection type", size+"; over UD at most the MTU, 1024 if neither -m nor -s is given"
	case bench.VerbWrite:
		conn = "connection type: RC or UC, UD has no WRITEs"
	}
	f.VarP(choice{&t.conn, []string{"RC", "UC", "UD"}}, "connection", "c", conn)
	if verb != bench.VerbAtomic {
		f.VarP(whole[int]{&t.p.Size, 0, bench.MaxSize}, "size", "s", size)
		f.BoolVarP(&t.p.All, "all", "a", false, "all sizes 2, 4, 8 and so on up to 8388608, or up to -s")
	}
	switch verb {
	case bench.VerbSend:
		f.VarP(whole[int]{&t.p.RxDepth, 1, bench.MaxDepth}, "rx-depth", "r", "receives posted on each QP")
		f.BoolVar(&t.p.SRQ, "use-srq", false, "put the receives of all QPs into one shared queue")
	case bench.VerbAtomic:
		f.VarP(choice{&t.atomic, []string{"CMP_AND_SWAP", "FETCH_AND_ADD"}}, "atomic_type", "A", "which atomic")
	}
	if verb == bench.VerbSend || verb == bench.VerbWrite {
		f.VarP(whole[int]{&t.p.Inline, 0, bench.MaxInline}, "inline_size", "I", "copy messages up to this size at post time")
	} else {
		f.VarP(whole[int]{&t.p.Outs, 1, bench.MaxOuts}, "outs", "o", "requests of a QP that may be under way")
	}
	if rates {
		f.VarP(whole[int]{&t.p.QPs, 1, bench.MaxQPs}, "qp", "q", "number of QPs")
		f.VarP(whole[int]{&t.p.CQMod, 1, bench.MaxCQMod}, "cq-mod", "Q", "requests for each completion")
		f.VarP(whole[int]{&t.p.PostList, 1, bench.MaxPostList}, "post_list", "l", "requests posted at a time")
		f.BoolVarP(&t.p.Bidirectional, "bidirectional", "b", false, "measure in both directions at once")
		f.BoolVar(&t.gbits, "report_gbits", false, "report Gb/sec instead of MiB/sec")
	}
	if test == bench.SendBW {
		t.registerMessages(cmd)
	}
	f.BoolVar(&t.json, "out_json", false, "print the report as JSON, and nothing else on stdout")
	f.StringVar(&t.jsonFile, "out_json_file", "", "write the report as JSON to `FILE`")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := t.check(cmd); err != nil {
			return err
		}
		if t.compress != "" {
			return a.messages(cmd.Context(), t, args)
		}
		if len(args) == 0 {
			return a.serveOnce(cmd.Context(), t)
		}
		to, err := parseTarget(args[0])
		if err != nil {
			return err
		}
		return a.client(cmd.Context(), t, to)
	}
	return cmd
}

// services are what -c names.
var services = map[string]verbs.QPType{"RC": verbs.RC, "UC": verbs.UC, "UD": verbs.UD}

// check finds what is wrong with the flags together.
func (t *testFlags) check(cmd *cobra.Command) error {
	f := cmd.Flags()
	if f.Changed("duration") {
		if f.Changed("iters") {
			return usageError{errors.New("-n and -D exclude each other")}
		}
		t.p.Iters = 0
	}
	t.p.Type, t.p.Swap = services[t.conn], t.atomic == "CMP_AND_SWAP"
	if !f.Changed("size") {
		if t.p.All {
			t.p.Size = bench.MaxSizeAll
		}
		if t.p.Type == verbs.UD {
			t.p.Size = min(t.p.Size, cmp.Or(t.p.MTU, verbs.MTU1024).Bytes())
		}
	}
	if t.p.Test == bench.WriteLat && (t.events || t.wait == "block") {
		return usageError{errors.New("write_lat polls memory, which wakes nobody: it goes without -e and --wait block")}
	}
	if err := t.p.Check(); err != nil {
		return usageError{err}
	}
	if err := t.checkMessages(cmd); err != nil {
		return err
	}
	_, err := t.config()
	return err
}

// output is where a test's report goes.
type output struct {
	text    io.Writer // tables for people; discards them if stdout is for JSON
	results []bench.Result
}

func (a *app) output(t *testFlags) *output {
	if t.json {
		return &output{text: io.Discard}
	}
	return &output{text: a.stdout}
}

// session runs a session, prints as results come and writes the JSON at the end.
func (a *app) session(ctx context.Context, t *testFlags, s *bench.Session, out *output) error {
	u := bandwidthUnit(t.gbits)
	if err := printHeader(out.text, s, u); err != nil {
		return err
	}
	err := s.Run(ctx, func(r bench.Result) {
		out.results = append(out.results, r)
		fmt.Fprint(out.text, row(r, u))
	})
	fmt.Fprint(out.text, rule)
	interrupted := errors.Is(err, bench.ErrInterrupted) || ctx.Err() != nil
	if err != nil && !interrupted {
		return err
	}
	if interrupted {
		err = errInterrupted
	}
	if t.json {
		err = errors.Join(err, writeJSON(a.stdout, s, out.results, u, interrupted))
	}
	if t.jsonFile != "" {
		var b strings.Builder
		err = errors.Join(err, writeJSON(&b, s, out.results, u, interrupted), os.WriteFile(t.jsonFile, []byte(b.String()), 0o644))
	}
	return err
}

// client runs a test against a server.
func (a *app) client(ctx context.Context, t *testFlags, to target) error {
	return a.onDeviceUntil(ctx, &t.deviceFlags, func(ctx context.Context, dev *device, first context.Context, _ func()) error {
		if err := to.resolve(ctx, dev.LocalAddr().Addr()); err != nil {
			return err
		}
		o := t.options()
		o.RemotePort = to.udp
		// Until the connection stands the first signal ends it all.
		dialing, dialed := context.WithCancel(ctx)
		defer context.AfterFunc(first, dialed)()
		s, err := bench.Dial(dialing, dev.Device, netip.AddrPortFrom(to.addr, t.port), t.p, o)
		if err != nil {
			if first.Err() != nil {
				return errInterrupted
			}
			return explainDial(err, to, t.port, "perf serve")
		}
		defer s.Close()
		defer context.AfterFunc(first, s.Interrupt)()
		return a.session(ctx, t, s, a.output(t))
	})
}

// onSignal returns a context that ends with the first signal; the second one calls cancel. So
// a run can end with a report, and still be ended.
func (a *app) onSignal(cancel func()) (first context.Context, stop func()) {
	first, interrupt := context.WithCancel(context.Background())
	quit := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, act := range []func(){interrupt, cancel} {
			select {
			case <-a.signals:
				act()
			case <-quit:
				return
			}
		}
	}()
	return first, func() { close(quit); <-done; interrupt() }
}

// explainDial says what a failed connection means and what to do: start the server.
func explainDial(err error, to target, port uint16, server string) error {
	udp := to.udp
	if udp == 0 {
		udp = transport.Port
	}
	at := netip.AddrPortFrom(to.addr, udp)
	var refused *bench.RefusedError
	var reject *transport.RejectError
	switch {
	case errors.As(err, &refused):
		return refused
	case errors.As(err, &reject) && reject.Reason == verbs.RejectInvalidServiceID:
		return fmt.Errorf("refused: nobody listens on service port %d of %v; start %s there, or choose another port with -p", port, at, server)
	case errors.Is(err, transport.ErrUnreachable):
		return fmt.Errorf("no answer from %v within %v: is %s running there, on that UDP port?", at, connectTimeout, server)
	}
	return err
}

// serveOnce is a test without HOST: it serves one client and exits.
func (a *app) serveOnce(ctx context.Context, t *testFlags) error {
	notes := a.stdout
	if t.json {
		notes = a.stderr
	}
	return a.onDevice(ctx, &t.deviceFlags, func(ctx context.Context, dev *device) error {
		var ran error
		served := false
		srv := &bench.Server{
			Device: dev.Device, Port: t.port, Only: t.p.Test, Once: true, MaxMemory: 1 << 32, Options: t.options(),
			Listening: func() {
				fmt.Fprintf(notes, "Waiting for a client on %v, service port %d\n", dev.LocalAddr(), t.port)
			},
			Handle: func(ctx context.Context, s *bench.Session) {
				served = true
				if ran = s.Err(); ran == nil {
					ran = a.session(ctx, t, s, a.output(t))
				}
			},
		}
		if err := srv.Serve(ctx); err != nil {
			return err
		}
		if !served || ctx.Err() != nil {
			return errors.Join(errInterrupted, ran)
		}
		return ran
	})
}
