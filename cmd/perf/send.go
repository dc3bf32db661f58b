package main

import (
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
	gbits    bool
	json     bool
	jsonFile string
}

func (a *app) sendLat() *cobra.Command {
	t := &testFlags{p: bench.Defaults(bench.SendLat)}
	cmd := &cobra.Command{
		Use:   "send_lat [HOST[:UDPPORT]]",
		Short: "Latency of SEND: half a round trip of a message",
		Long: `Sends a message back and forth and reports half of the round trips' times.
Without HOST it serves one client with that client's options and exits.`,
		Example: `  perf send_lat --bind 127.0.0.2
  perf send_lat 127.0.0.2 --bind 127.0.0.1 -s 64 -n 10000`,
	}
	return a.test(cmd, t)
}

func (a *app) sendBW() *cobra.Command {
	t := &testFlags{p: bench.Defaults(bench.SendBW)}
	cmd := &cobra.Command{
		Use:   "send_bw [HOST[:UDPPORT]]",
		Short: "Bandwidth and message rate of SEND",
		Long: `Sends as many messages as the depths allow and reports how fast they complete.
#iterations counts the messages of all QPs. -b adds up both directions. The peak
is the best stretch of at least a millisecond and twice the messages under way.
Without HOST it serves one client with that client's options and exits.`,
		Example: `  perf send_bw --bind 127.0.0.2
  perf send_bw 127.0.0.2 --bind 127.0.0.1 -s 65536 -D 3`,
	}
	f := cmd.Flags()
	f.VarP(whole[int]{&t.p.QPs, 1, bench.MaxQPs}, "qp", "q", "number of QPs")
	f.VarP(whole[int]{&t.p.CQMod, 1, bench.MaxCQMod}, "cq-mod", "Q", "sends for each completion")
	f.VarP(whole[int]{&t.p.PostList, 1, bench.MaxPostList}, "post_list", "l", "sends posted at a time")
	f.BoolVarP(&t.p.Bidirectional, "bidirectional", "b", false, "send in both directions")
	f.BoolVar(&t.gbits, "report_gbits", false, "report Gb/sec instead of MiB/sec")
	return a.test(cmd, t)
}

// test adds what all tests have in common.
func (a *app) test(cmd *cobra.Command, t *testFlags) *cobra.Command {
	t.register(cmd)
	t.conn = "RC"
	f := cmd.Flags()
	f.VarP(whole[int]{&t.p.Size, 0, bench.MaxSize}, "size", "s", "message size in bytes")
	f.VarP(whole[int64]{&t.p.Iters, 1, bench.MaxIters}, "iters", "n", "messages on each QP")
	f.VarP(seconds{&t.p.Duration, time.Millisecond, bench.MaxDuration}, "duration", "D", "run this long instead of -n messages")
	f.VarP(whole[int]{&t.p.TxDepth, 1, bench.MaxDepth}, "tx-depth", "t", "sends posted on each QP")
	f.VarP(whole[int]{&t.p.RxDepth, 1, bench.MaxDepth}, "rx-depth", "r", "receives posted on each QP")
	f.BoolVarP(&t.p.All, "all", "a", false, "all sizes 2, 4, 8 and so on up to 8388608, or up to -s")
	f.VarP(mtuFlag{&t.p.MTU}, "mtu", "m", "path MTU: 256 to 4096; default what both devices can")
	f.VarP(whole[int]{&t.p.Inline, 0, bench.MaxInline}, "inline_size", "I", "copy messages up to this size at post time")
	f.VarP(choice{&t.conn, []string{"RC"}}, "connection", "c", "connection type")
	f.BoolVar(&t.json, "out_json", false, "print the report as JSON, and nothing else on stdout")
	f.StringVar(&t.jsonFile, "out_json_file", "", "write the report as JSON to `FILE`")
	cmd.Args = atMost(1, "one HOST[:UDPPORT]")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := t.check(cmd); err != nil {
			return err
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

// check finds what is wrong with the flags together.
func (t *testFlags) check(cmd *cobra.Command) error {
	f := cmd.Flags()
	if f.Changed("duration") {
		if f.Changed("iters") {
			return usageError{errors.New("-n and -D exclude each other")}
		}
		t.p.Iters = 0
	}
	if t.p.All && !f.Changed("size") {
		t.p.Size = bench.MaxSizeAll
	}
	if err := t.p.Check(); err != nil {
		return usageError{err}
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
func (a *app) client(ctx context.Context, t *testFlags, to target) (err error) {
	dev, err := a.open(&t.deviceFlags)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first, stop := a.onSignal(cancel)
	defer stop()

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
		return explainDial(err, to, t.port)
	}
	defer s.Close()
	defer context.AfterFunc(first, s.Interrupt)()
	return a.session(ctx, t, s, a.output(t))
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

// explainDial says what a failed connection means and what to do.
func explainDial(err error, to target, port uint16) error {
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
		return fmt.Errorf("refused: nobody listens on service port %d of %v; start perf serve there, or choose another port with -p", port, at)
	case errors.Is(err, transport.ErrUnreachable):
		return fmt.Errorf("no answer from %v within %v: is perf running there, on that UDP port?", at, connectTimeout)
	}
	return err
}

// serveOnce is a test without HOST: it serves one client and exits.
func (a *app) serveOnce(ctx context.Context, t *testFlags) (err error) {
	dev, err := a.open(&t.deviceFlags)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first, stop := a.onSignal(cancel)
	defer stop()
	defer context.AfterFunc(first, cancel)()

	notes := a.stdout
	if t.json {
		notes = a.stderr
	}
	var ran error
	served := false
	srv := &bench.Server{
		Device: dev.Device, Port: t.port, Only: t.p.Test, Once: true, MaxMemory: 1 << 32, Options: t.options(),
		Handle: func(ctx context.Context, s *bench.Session) {
			served = true
			if ran = s.Err(); ran == nil {
				ran = a.session(ctx, t, s, a.output(t))
			}
		},
	}
	srv.Listening = func() { fmt.Fprintf(notes, "Waiting for a client on %v, service port %d\n", dev.LocalAddr(), t.port) }
	if err := srv.Serve(ctx); err != nil {
		return err
	}
	if !served || first.Err() != nil {
		return errors.Join(errInterrupted, ran)
	}
	return ran
}
