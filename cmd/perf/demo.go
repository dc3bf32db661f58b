package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func (a *app) demo() *cobra.Command {
	runFor := 2 * time.Second
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show the deferred doorbell and measure a little, in ten seconds",
		Long: `Opens two devices in this process, on loopback addresses, without any set-up:
a server's greeting, posted before the server may send, waits for its doorbell;
then latency and bandwidth between the two are measured.`,
		Example: `  perf demo`,
		Args:    atMost(0, "no operands"),
	}
	cmd.Flags().VarP(seconds{&runFor, time.Millisecond, time.Minute}, "duration", "D", "how long to measure latency, and bandwidth")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithCancel(cmd.Context())
		defer cancel()
		first, stop := a.onSignal(cancel)
		defer stop()
		defer context.AfterFunc(first, cancel)()
		err := a.runDemo(ctx, runFor)
		if ctx.Err() != nil {
			return errInterrupted
		}
		return err
	}
	return cmd
}

// demoHosts are pairs of addresses to try, in order: others may be running the demo, and not
// every system has more than one loopback address.
var demoHosts = [][2]netip.AddrPort{
	{netip.MustParseAddrPort("127.0.0.1:4791"), netip.MustParseAddrPort("127.0.0.2:4791")},
	{netip.MustParseAddrPort("127.77.0.1:4791"), netip.MustParseAddrPort("127.77.0.2:4791")},
	{netip.MustParseAddrPort("127.77.1.1:4791"), netip.MustParseAddrPort("127.77.1.2:4791")},
	{netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.1:0")},
}

// openPair opens a client and a server on the first pair of addresses that is free.
func openPair(tap func(*transport.TapPacket)) (client, server *transport.Device, err error) {
	var errs []error
	for _, hosts := range demoHosts {
		client, err = transport.Open(transport.Config{Bind: hosts[0], AnyPort: true})
		if err == nil {
			server, err = transport.Open(transport.Config{Bind: hosts[1], AnyPort: true, Tap: tap})
			if err == nil {
				return client, server, nil
			}
			_ = client.Close()
		}
		errs = append(errs, err)
	}
	return nil, nil, fmt.Errorf("no two addresses to run the demo on: %w", errors.Join(errs...))
}

const demoPort = 18515

func (a *app) runDemo(ctx context.Context, runFor time.Duration) error {
	p := func(format string, args ...any) { fmt.Fprintf(a.stdout, format+"\n", args...) }
	tape := &tape{}
	client, server, err := openPair(tape.record)
	if err != nil {
		return err
	}
	defer client.Close()
	defer server.Close()
	p("Two devices in one process, no set-up: client %v, server %v.", client.LocalAddr(), server.LocalAddr())
	p("RoCEv2 over ordinary UDP sockets; the times below are the server's.")
	p("")
	p("1. A greeting waits for its doorbell")
	p("   Between REP and RTU the server's queue pair is in RTR: it may receive, not send. Posting is")
	p("   allowed all the same, and needs no care: the send waits in its queue and leaves with the RTU.")
	p("")
	g, err := greet(ctx, client, server, tape)
	if err != nil {
		return err
	}
	for _, e := range g.events {
		p("   %8.1f us  %-17s %s", float64(e.at.Nanoseconds())/usec, e.who, e.what)
	}
	n := server.Counters()
	p("")
	p("   %d send was deferred and published in one step, %.1f us after RTR.", g.deferred, float64(g.waited.Nanoseconds())/usec)
	p("   The server's counters: deferred %d, publications %d, retransmitted %d.",
		n["qp_deferred"], n["qp_publications"], n["qp_retransmits"])
	if g.attempts > 1 {
		p("   (Connection %d: in the earlier ones the RTU was faster than the program.)", g.attempts)
	}
	// Measure without the tap, which copies every packet.
	if err := errors.Join(client.Close(), server.Close()); err != nil {
		return err
	}
	if client, server, err = openPair(nil); err != nil {
		return err
	}
	defer client.Close()
	defer server.Close()
	p("")
	p("2. Latency: 64-byte SENDs back and forth for %v", runFor)
	lat := bench.Defaults(bench.SendLat)
	lat.Size, lat.Iters, lat.Duration = 64, 0, runFor
	r, err := measure(ctx, client, server, lat)
	if err != nil {
		return err
	}
	l := r.Latency
	us := func(d time.Duration) float64 { return float64((2 * d).Nanoseconds()) / usec }
	p("   %d round trips: median %.1f us, 99%% %.1f us, 99.9%% %.1f us, fastest %.1f us",
		r.Iters, us(l.Median), us(l.P99), us(l.P999), us(l.Min))
	p("")
	p("3. Bandwidth: 64 KiB SENDs, 128 under way, for %v", runFor)
	bw := bench.Defaults(bench.SendBW)
	bw.Iters, bw.Duration, bw.CQMod = 0, runFor, 16
	if r, err = measure(ctx, client, server, bw); err != nil {
		return err
	}
	p("   %d messages: %.2f Gb/s, %.0f MiB/s; both ends and their checksums on this machine's %s",
		r.Iters, r.Average*8/1e9, r.Average/(1<<20), cores())
	p("")
	p("Next: perf serve --bind 127.0.0.2, and in another shell perf send_lat 127.0.0.2 --bind 127.0.0.1")
	return errors.Join(client.Close(), server.Close())
}

// measure runs a test between two devices of this process.
func measure(ctx context.Context, client, server *transport.Device, params bench.Params) (r bench.Result, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var served error
	srv := &bench.Server{Device: server, Port: demoPort, Once: true, Handle: func(ctx context.Context, s *bench.Session) {
		served = s.Run(ctx, func(bench.Result) {})
	}}
	var wg sync.WaitGroup
	listening := make(chan error, 1)
	srv.Listening = func() { listening <- nil }
	wg.Go(func() {
		if err := srv.Serve(ctx); err != nil {
			listening <- err
		}
	})
	err = <-listening
	if err == nil {
		to := netip.AddrPortFrom(server.LocalAddr().Addr(), demoPort)
		var s *bench.Session
		if s, err = bench.Dial(ctx, client, to, params, bench.Options{RemotePort: server.LocalAddr().Port()}); err == nil {
			err = s.Run(ctx, func(got bench.Result) { r = got })
			s.Close()
		}
	}
	if err != nil {
		cancel()
	}
	wg.Wait()
	return r, errors.Join(err, served)
}

// greeting is what was seen of a connection whose server answered before it might send.
type greeting struct {
	events   []event
	attempts int
	deferred uint64
	waited   time.Duration
}

// event is a line of the demo's diary.
type event struct {
	time time.Time
	at   time.Duration // since the first
	who  string
	what string
}

// greet connects until the server's post has met RTR, which is nearly always at once: now and
// then the RTU is faster than the goroutine that posts.
func greet(ctx context.Context, client, server *transport.Device, tape *tape) (*greeting, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ln, err := server.Listen(netip.AddrPortFrom(netip.Addr{}, demoPort))
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	for n := 1; ; n++ {
		tape.rewind()
		g, err := greetOnce(ctx, ln, client, server, tape)
		if err != nil {
			return nil, err
		}
		if g.deferred > 0 && g.inOrder() {
			g.attempts = n
			return g, nil
		}
	}
}

// inOrder reports whether the diary shows the post before the RTU. A packet's time is when
// the device began to look for packets, so it may be told too early when the processor was
// taken away in between.
func (g *greeting) inOrder() bool {
	at := func(what string) int {
		return slices.IndexFunc(g.events, func(e event) bool { return strings.HasPrefix(e.what, what) })
	}
	return at("posts") < at("CM_RTU")
}

const greetingText = "hello from a queue pair in RTR"

func greetOnce(ctx context.Context, ln *transport.Listener, client, server *transport.Device, tape *tape) (*greeting, error) {
	text, err := server.PD().RegisterMR([]byte(greetingText), 0)
	if err != nil {
		return nil, err
	}
	defer text.Close()
	inbox, err := client.PD().RegisterMR(make([]byte, 64), verbs.LocalWrite)
	if err != nil {
		return nil, err
	}
	defer inbox.Close()

	g := &greeting{}
	note := func(who, format string, args ...any) {
		g.events = append(g.events, event{time: time.Now(), who: who, what: fmt.Sprintf(format, args...)})
	}
	var srvQP *transport.QP
	var serverErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		req, err := ln.Next(ctx)
		if err != nil {
			serverErr = err
			return
		}
		qp, err := req.Accept(ctx, transport.ConnParam{})
		if err != nil {
			serverErr = err
			return
		}
		srvQP = qp
		note("server", "posts its greeting in state %v: PostSend returns nil, nothing leaves", qp.State())
		serverErr = qp.PostSend(verbs.SendWR{WRID: 1, Opcode: verbs.Send, Flags: verbs.Signaled, SGList: text.SGL(0, len(greetingText))})
	})
	qp, err := client.Dial(ctx, netip.AddrPortFrom(server.LocalAddr().Addr(), demoPort), transport.ConnParam{
		RemotePort: server.LocalAddr().Port(),
		Recv:       []verbs.RecvWR{{WRID: 2, SGList: inbox.SGL(0, 64)}},
	})
	wg.Wait()
	if srvQP != nil {
		defer srvQP.Close()
	}
	if err == nil {
		defer qp.Close()
	}
	if err := errors.Join(err, serverErr); err != nil {
		return nil, err
	}
	wc, err := qp.CQ().Next(ctx)
	if err != nil {
		return nil, err
	}
	note("client", "received %q", inbox.Bytes()[:wc.ByteLen])
	if _, err := srvQP.CQ().Next(ctx); err != nil {
		return nil, err
	}
	g.deferred, g.waited = srvQP.Published()
	packets, err := tape.until(ctx, roce.RCSendOnly)
	if err != nil {
		return nil, err
	}
	g.events = append(g.events, packets...)
	slices.SortStableFunc(g.events, func(a, b event) int { return a.time.Compare(b.time) })
	for i := range g.events {
		g.events[i].at = g.events[i].time.Sub(g.events[0].time)
	}
	return g, nil
}

// tape keeps the packets that the server's tap has seen.
type tape struct {
	mu      sync.Mutex
	events  []event
	opcodes []roce.Opcode
	more    chan struct{} // closed when something is added
}

func (t *tape) rewind() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.events, t.opcodes, t.more = nil, nil, make(chan struct{})
}

// meaning explains the packets of the demo.
var meaning = map[string]string{
	"CM_REQ":    "asks for a connection",
	"CM_REP":    "accepts; its queue pair is in RTR now",
	"CM_RTU":    "ready to use: the queue pair moves to RTS, the doorbell rings",
	"SEND_ONLY": "the greeting leaves",
	"ACK":       "it has arrived",
}

// record is a transport.Config.Tap.
func (t *tape) record(p *transport.TapPacket) {
	var pkt roce.Packet
	if pkt.Decode(p.Payload) != nil {
		return
	}
	line := pkt.String()
	name := line
	for i, r := range line {
		if r == ' ' {
			name = line[:i]
			break
		}
	}
	what, ok := meaning[name]
	if !ok {
		return // the end of an earlier connection
	}
	who := "client -> server"
	if p.Out {
		who = "server -> client"
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.events = append(t.events, event{time: p.Time, who: who, what: fmt.Sprintf("%-9s %s", name, what)})
	t.opcodes = append(t.opcodes, pkt.Opcode)
	if t.more != nil {
		close(t.more)
	}
	t.more = make(chan struct{})
}

// until waits for a packet of an opcode and returns what was seen up to it.
func (t *tape) until(ctx context.Context, op roce.Opcode) ([]event, error) {
	for {
		t.mu.Lock()
		i, more := slices.Index(t.opcodes, op), t.more
		events := slices.Clone(t.events)
		t.mu.Unlock()
		if i >= 0 {
			return events[:i+1], nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func cores() string {
	if n := runtime.NumCPU(); n != 1 {
		return fmt.Sprintf("%d cores", n)
	}
	return "one core"
}
