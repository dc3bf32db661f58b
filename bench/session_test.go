package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// servicePort is the same everywhere: devices have addresses of their own.
const servicePort = 18515

func open(t testing.TB, addr string, cfg transport.Config) *transport.Device {
	t.Helper()
	if ap, err := netip.ParseAddrPort(addr); err == nil {
		cfg.Bind = ap
	} else {
		cfg.Bind = netip.AddrPortFrom(netip.MustParseAddr(addr), 0)
	}
	dev, err := transport.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// outcome is what the server's end of a session saw.
type outcome struct {
	results []Result
	err     error
}

// rig is a client's device, and a server that serves until the test ends.
type rig struct {
	base     context.Context // the test's
	ctx      context.Context // a minute of it
	client   *transport.Device
	srv      *Server
	to       netip.AddrPort
	outcomes chan outcome
	// running, when not nil, is called by the server's handler before it runs a session.
	running func(s *Session)
}

func newRig(t testing.TB, client, server string, cfg transport.Config, change func(*Server)) *rig {
	t.Helper()
	r := &rig{base: t.Context(), ctx: deadline(t), client: open(t, client, cfg), outcomes: make(chan outcome, 64)}
	dev := open(t, server, cfg)
	r.to = netip.AddrPortFrom(dev.LocalAddr().Addr(), servicePort)
	listening := make(chan struct{})
	r.srv = &Server{Device: dev, Port: servicePort, Listening: func() { close(listening) }}
	r.srv.Handle = func(ctx context.Context, s *Session) {
		var o outcome
		if r.running != nil {
			r.running(s)
		}
		o.err = s.Run(ctx, func(res Result) { o.results = append(o.results, res) })
		r.outcomes <- o
	}
	if change != nil {
		change(r.srv)
	}
	ctx, cancel := context.WithCancel(r.base)
	served := make(chan error, 1)
	go func() { served <- r.srv.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	<-listening
	return r
}

func (r *rig) options(o Options) Options {
	o.RemotePort = r.srv.Device.LocalAddr().Port()
	return o
}

// run runs a test and returns what both ends have seen. Each run has a minute, so that many
// of them may take longer together on a busy machine.
func (r *rig) run(p Params, o Options) (client, server outcome) {
	ctx, cancel := context.WithTimeout(r.base, time.Minute)
	defer cancel()
	s, err := Dial(ctx, r.client, r.to, p, r.options(o))
	if err != nil {
		return outcome{err: err}, outcome{err: err}
	}
	defer s.Close()
	client.err = s.Run(ctx, func(res Result) { client.results = append(client.results, res) })
	select {
	case server = <-r.outcomes:
	case <-ctx.Done():
		server.err = ctx.Err()
	}
	return client, server
}

// good runs a test that has to succeed and checks what its results say.
func (r *rig) good(t *testing.T, p Params, o Options) []Result {
	t.Helper()
	client, server := r.run(p, o)
	if client.err != nil || server.err != nil {
		t.Fatalf("%+v: client: %v; server: %v", p, client.err, server.err)
	}
	if len(client.results) != len(p.Sizes()) || len(server.results) != len(p.Sizes()) {
		t.Fatalf("%+v: %d and %d results", p, len(client.results), len(server.results))
	}
	for i, size := range p.Sizes() {
		res := client.results[i]
		if res != server.results[i] {
			t.Errorf("the ends disagree:\n%+v\n%+v", res, server.results[i])
		}
		checkResult(t, &p, size, &res)
	}
	return client.results
}

// checkResult checks a result's arithmetic.
func checkResult(t *testing.T, p *Params, size int, r *Result) {
	t.Helper()
	if r.Size != size || r.Test != p.Test || r.Interrupted || r.Elapsed <= 0 {
		t.Errorf("%+v: result %+v", p, r)
	}
	if want := uint64(p.Iters) * uint64(p.QPs); p.Duration == 0 && r.Iters != want {
		t.Errorf("%+v: %d messages, want %d", p, r.Iters, want)
	}
	if p.Duration > 0 && (r.Elapsed < p.Duration || r.Iters == 0) {
		t.Errorf("%+v: %d messages in %v", p, r.Iters, r.Elapsed)
	}
	l := r.Latency
	if p.Test.Latency() {
		mean := time.Duration(l.Mean)
		if l.Min <= 0 || l.Min > l.Median || l.Median > l.P99 || l.P99 > l.P999 || l.P999 > l.Max || mean < l.Min || mean > l.Max {
			t.Errorf("%+v: latency %+v", p, l)
		}
		// The halves of the round trips add up to half of the time.
		if sum := l.Mean * float64(r.Iters) * 2; sum < 0.99*float64(r.Elapsed) || sum > 1.01*float64(r.Elapsed) {
			t.Errorf("%+v: round trips of %v together, elapsed %v", p, time.Duration(sum), r.Elapsed)
		}
		return
	}
	rate, directions := float64(r.Iters)/r.Elapsed.Seconds(), 1.0
	if p.Bidirectional {
		directions = 2
	}
	near := func(a, b float64) bool { return a >= 0.99*b && a <= 1.01*b }
	if directions == 1 && !near(r.Rate, rate) || r.Rate < 0.99*rate || !near(r.Average, r.Rate*float64(size)) || r.Peak < 0.99*r.Average {
		t.Errorf("%+v: result %+v, rate %v", p, r, rate)
	}
	if l != (Latency{}) {
		t.Errorf("%+v: a bandwidth test reports latency %+v", p, l)
	}
}

// TestEachTest runs both tests, by count and by time, in each way of waiting.
func TestEachTest(t *testing.T) {
	for i, tc := range []struct {
		name string
		cfg  transport.Config
		o    Options
	}{
		{"adaptive", transport.Config{}, Options{}},
		{"block", transport.Config{Spin: -1}, Options{}},
		{"poll", transport.Config{}, Options{Wait: WaitPoll}},
		{"no offload", transport.Config{NoGSO: true, NoGRO: true}, Options{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, fmt.Sprintf("127.3.1.%d", 2*i+1), fmt.Sprintf("127.3.1.%d", 2*i+2), tc.cfg, func(s *Server) { s.Options = tc.o })
			for _, test := range []Test{SendLat, SendBW} {
				p := Defaults(test)
				p.Iters = 300
				r.good(t, p, tc.o)
				p.Iters, p.Duration = 0, 20*time.Millisecond
				r.good(t, p, tc.o)
			}
		})
	}
}

func TestIPv6(t *testing.T) {
	r := newRig(t, "[::1]:4831", "[::1]:4832", transport.Config{}, nil)
	p := Defaults(SendBW)
	p.QPs, p.Iters, p.Bidirectional = 2, 100, true
	r.good(t, p, Options{})
	r.good(t, Defaults(SendLat), Options{})
}

func TestSizes(t *testing.T) {
	r := newRig(t, "127.3.2.1", "127.3.2.2", transport.Config{}, nil)
	for _, test := range []Test{SendLat, SendBW} {
		p := Defaults(test)
		p.Iters = 5
		p.All, p.Size = true, 1<<16
		if got := r.good(t, p, Options{}); len(got) != 16 {
			t.Errorf("%d sizes, want 16", len(got))
		}
		p.All = false
		for _, size := range []int{0, 1, 235, 236, 237, 4095, 4096, 4097, 1<<20 + 1} {
			p.Size = size
			r.good(t, p, Options{})
		}
	}
	p := Defaults(SendBW)
	p.MTU, p.Iters = verbs.MTU256, 20
	r.running = func(s *Session) {
		if conns, err := s.Conns(); err != nil || conns[0].MTU != verbs.MTU256 {
			t.Errorf("MTU: %+v, %v", conns, err)
		}
	}
	r.good(t, p, Options{})
}

// TestEndConditions runs counts, depths, moderations, lists and queue pairs that do not
// divide each other: every run ends, with as many messages as were asked for.
func TestEndConditions(t *testing.T) {
	r := newRig(t, "127.3.3.1", "127.3.3.2", transport.Config{}, nil)
	run := func(n int64, tx, rx, mod, qps, list int, both bool) {
		p := Defaults(SendBW)
		p.Size, p.Iters, p.TxDepth, p.RxDepth, p.CQMod, p.QPs, p.PostList, p.Bidirectional = 1024, n, tx, rx, mod, qps, list, both
		r.good(t, p, Options{})
	}
	run(3000, 12, 512, 100, 5, 1, false)
	run(500, 83, 41, 100, 1, 1, true)
	run(1, 1, 1, 1024, 16, 64, true)
	run(3, 5, 1, 5, 2, 3, true)
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 0))
	pick := func(v ...int) int { return v[rng.IntN(len(v))] }
	for range 50 {
		run(int64(pick(1, 2, 3, 7, 100, 300)), pick(1, 5, 12, 83, 128), pick(1, 2, 41, 512), pick(1, 3, 7, 100, 1000),
			pick(1, 2, 5, 16), pick(1, 2, 64), rng.IntN(2) == 0)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	// By time, where the last message is known only when the time is up.
	for range 10 {
		p := Defaults(SendBW)
		p.Iters, p.Duration, p.TxDepth, p.CQMod, p.PostList = 0, 2*time.Millisecond, pick(1, 12, 83), pick(1, 7, 100), pick(1, 64)
		p.QPs, p.Bidirectional = pick(1, 5), rng.IntN(2) == 0
		r.good(t, p, Options{})
	}
}

// TestManyClients runs several sessions on one server at the same time.
func TestManyClients(t *testing.T) {
	r := newRig(t, "127.3.4.1", "127.3.4.2", transport.Config{}, nil)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			dev := r.client
			if i > 0 {
				dev = open(t, fmt.Sprintf("127.3.4.%d", 10+i), transport.Config{})
			}
			p := Defaults(Test(1 + i%2))
			p.Iters = 200
			s, err := Dial(r.ctx, dev, r.to, p, Options{})
			if err != nil {
				t.Errorf("client %d: %v", i, err)
				return
			}
			defer s.Close()
			n := 0
			if err := s.Run(r.ctx, func(Result) { n++ }); err != nil || n != 1 {
				t.Errorf("client %d: %d results, %v", i, n, err)
			}
		})
	}
	wg.Wait()
	for range 4 {
		if o := <-r.outcomes; o.err != nil || len(o.results) != 1 {
			t.Errorf("server: %+v", o)
		}
	}
}

// TestInterrupt ends endless runs in good order: both ends report what was measured.
func TestInterrupt(t *testing.T) {
	for i, tc := range []struct {
		test Test
		both bool
	}{{SendLat, false}, {SendBW, false}, {SendBW, true}} {
		t.Run(fmt.Sprint(tc), func(t *testing.T) {
			r := newRig(t, fmt.Sprintf("127.3.5.%d", 2*i+1), fmt.Sprintf("127.3.5.%d", 2*i+2), transport.Config{}, nil)
			p := Defaults(tc.test)
			p.Iters, p.Bidirectional = MaxIters, tc.both
			s, err := Dial(r.ctx, r.client, r.to, p, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			defer time.AfterFunc(50*time.Millisecond, s.Interrupt).Stop()
			var got []Result
			err = s.Run(r.ctx, func(res Result) { got = append(got, res) })
			server := <-r.outcomes
			if !errors.Is(err, ErrInterrupted) || !errors.Is(server.err, ErrInterrupted) {
				t.Errorf("client %v, server %v", err, server.err)
			}
			// None if the warm-up was interrupted.
			if len(got) != len(server.results) || len(got) == 1 && (got[0] != server.results[0] || !got[0].Interrupted) {
				t.Errorf("client %+v, server %+v", got, server.results)
			}
		})
	}
}

// TestPeerCloses: whoever is left says so at once, in every test and on both sides.
func TestPeerCloses(t *testing.T) {
	for i, test := range []Test{SendLat, SendBW} {
		for j, clientCloses := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v client %v", test, clientCloses), func(t *testing.T) {
				n := 4*i + 2*j
				ctx, leave := context.WithCancel(deadline(t))
				outcomes := make(chan error, 1)
				r := newRig(t, fmt.Sprintf("127.3.6.%d", n+1), fmt.Sprintf("127.3.6.%d", n+2), transport.Config{}, func(srv *Server) {
					srv.Handle = func(served context.Context, s *Session) {
						if !clientCloses {
							served = ctx
						}
						outcomes <- s.Run(served, func(Result) {})
					}
				})
				p := Defaults(test)
				p.Iters = MaxIters
				s, err := Dial(r.ctx, r.client, r.to, p, Options{})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				defer time.AfterFunc(50*time.Millisecond, leave).Stop()
				clientCtx := r.ctx
				if clientCloses {
					clientCtx = ctx
				}
				left := s.Run(clientCtx, func(Result) {})
				if clientCloses {
					s.Close()
				}
				stayed := <-outcomes
				if !clientCloses {
					left, stayed = stayed, left
				}
				if !errors.Is(left, context.Canceled) || !errors.Is(stayed, ErrPeerGone) {
					t.Errorf("who left: %v; who stayed: %v", left, stayed)
				}
			})
		}
	}
}

// TestRefusals dials with what a server does not take, and expects its reason in words.
func TestRefusals(t *testing.T) {
	good := func() *hello {
		p := Defaults(SendBW)
		return &hello{version: Version, kind: helloControl, qpType: verbs.RC, session: 1, Params: p}
	}
	r := newRig(t, "127.3.7.1", "127.3.7.2", transport.Config{}, func(s *Server) {
		s.Only, s.MaxMemory, s.MaxSessions = SendBW, 4<<20, 1
	})
	dial := func(private []byte) error {
		q, err := r.client.Dial(r.ctx, r.to, transport.ConnParam{PrivateData: private})
		if err == nil {
			q.Close()
		}
		return refused(err)
	}
	for _, tc := range []struct {
		name   string
		change func(h *hello)
		want   string
	}{
		{"version", func(h *hello) { h.version = 9 }, "the client speaks version 9 of perf's exchange, this is version 1"},
		{"kind", func(h *hello) { h.kind = 7 }, "unknown kind of connection 7"},
		{"QP type", func(h *hello) { h.qpType = verbs.UD }, "connection type UD is not offered"},
		{"unknown test", func(h *hello) { h.Test = 77 }, "unknown test 77"},
		{"other test", func(h *hello) { h.Params = Defaults(SendLat) }, "this server runs send_bw, not send_lat"},
		{"size", func(h *hello) { h.Size = -1 }, "message size is 2147483647, want 0 to 1073741824"},
		{"depth", func(h *hello) { h.TxDepth = 0 }, "tx depth is 0, want 1 to 16384"},
		{"neither", func(h *hello) { h.Iters = 0 }, "one of iterations and duration must be given, not both"},
		{"huge count", func(h *hello) { h.Iters = -1 }, "iterations is 9223372036854775807, want 0 to 10000000000"},
		{"memory", func(h *hello) { h.Size = 8 << 20 }, "this test takes 8470528 bytes of memory here, above the server's limit of 4194304 (--max-memory)"},
		{"session", func(h *hello) { h.kind = helloData }, "no such session"},
	} {
		h := good()
		tc.change(h)
		var refusedErr *RefusedError
		if err := dial(h.encode()); !errors.As(err, &refusedErr) || refusedErr.Text != tc.want {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	if err := dial([]byte("GET / HTTP/1.1")); err == nil || err.Error() != "the server refuses: this is a server for perf: the private data is not perf's" {
		t.Errorf("garbage: %v", err)
	}

	// A second session finds the server busy; a surplus connection of the first is refused.
	s, err := Dial(r.ctx, r.client, r.to, good().Params, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Dial(r.ctx, r.client, r.to, good().Params, Options{}); err == nil || err.Error() != "the server refuses: busy with 1 of 1 sessions, try again" {
		t.Errorf("second session: %v", err)
	}
	s.Close()
	if o := <-r.outcomes; !errors.Is(o.err, ErrPeerGone) {
		t.Errorf("the first session ended with %v", o.err)
	}

	// The client's own checks come first, before anything is sent.
	var out *RangeError
	if _, err := Dial(r.ctx, r.client, r.to, Params{Test: SendBW, Size: -1}, Options{}); !errors.As(err, &out) {
		t.Errorf("bad parameters: %v", err)
	}
}

// TestStalled: a peer that lives and does nothing is given up in the end.
func TestStalled(t *testing.T) {
	r := newRig(t, "127.3.12.1", "127.3.12.2", transport.Config{}, func(s *Server) {
		s.Handle = func(ctx context.Context, _ *Session) { <-ctx.Done() }
	})
	for _, wait := range []Wait{WaitSleep, WaitPoll} {
		s, err := Dial(r.ctx, r.client, r.to, Defaults(SendLat), Options{Wait: wait, Stall: 100 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Run(r.ctx, func(Result) {}); !errors.Is(err, ErrStalled) {
			t.Errorf("wait %d: %v", wait, err)
		}
		s.Close()
	}
}

// TestNotPerf: something else listens on the service port.
func TestNotPerf(t *testing.T) {
	a, b := open(t, "127.3.8.1", transport.Config{}), open(t, "127.3.8.2", transport.Config{})
	ctx := deadline(t)
	ln, err := b.Listen(netip.AddrPortFrom(netip.Addr{}, servicePort))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, private := range [][]byte{nil, []byte("hello"), {0x44, 0x42, 0x50, 0x46, 9}} {
		accepted := make(chan *transport.QP, 1)
		go func() {
			req, err := ln.Next(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			q, err := req.Accept(ctx, transport.ConnParam{PrivateData: private})
			if err != nil {
				t.Error(err)
			}
			accepted <- q
		}()
		_, err := Dial(ctx, a, netip.AddrPortFrom(b.LocalAddr().Addr(), servicePort), Defaults(SendLat), Options{})
		if err == nil {
			t.Errorf("%q: connected", private)
		}
		if q := <-accepted; q != nil {
			q.Close()
		}
	}
}

// TestMisbehavingPeer: a client that breaks the exchange ends its session, with the reason.
func TestMisbehavingPeer(t *testing.T) {
	r := newRig(t, "127.3.9.1", "127.3.9.2", transport.Config{}, nil)
	start := func(s *Session, m message) error {
		s.phase.number++
		m.kind = msgStart
		return s.say(m)
	}
	for _, tc := range []struct {
		name string
		act  func(s *Session) error
		want string
	}{
		{"wrong order", func(s *Session) error { return s.say(message{kind: msgReport}) }, "the peer sent REPORT where [START BYE] was due"},
		{"too large", func(s *Session) error { return start(s, message{size: 1 << 20, count: 1}) },
			"the peer asks for 1 messages of 1048576 bytes in 0s, which was not agreed on"},
		{"no count", func(s *Session) error { return start(s, message{size: 2}) },
			"the peer asks for 0 messages of 2 bytes in 0s, which was not agreed on"},
		{"out of turn", func(s *Session) error { return s.say(message{kind: msgStart, size: 2, count: 1}) }, "the peer starts run 0 after run 0"},
		{"not a message", func(s *Session) error {
			return s.ctrl.PostSend(verbs.SendWR{Opcode: verbs.Send, InlineData: []byte("hello")})
		}, "the peer sent something that is no message of perf"},
		{"impossible figures", func(s *Session) error { return s.say(message{kind: msgDone, duration: -1}) },
			"the peer sent a DONE with figures that cannot be"},
	} {
		s, err := Dial(r.ctx, r.client, r.to, Defaults(SendBW), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := tc.act(s); err != nil {
			t.Error(err)
		}
		if o := <-r.outcomes; o.err == nil || o.err.Error() != tc.want {
			t.Errorf("%s: %v, want %q", tc.name, o.err, tc.want)
		}
		s.Close()
	}
}

// TestCorruptMessage: the receiver looks at what the warm-up brings.
func TestCorruptMessage(t *testing.T) {
	r := newRig(t, "127.3.10.1", "127.3.10.2", transport.Config{}, nil)
	for _, size := range []int{65536, 100} { // receives share memory, and they don't
		p := Defaults(SendBW)
		p.Size = size
		s, err := Dial(r.ctx, r.client, r.to, p, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range p.slots(p.TxDepth) {
			s.sendMR.Bytes()[(i+1)*size-3] ^= 1
		}
		if err := s.Run(r.ctx, func(Result) {}); err == nil {
			t.Error("the client noticed nothing")
		}
		want := fmt.Sprintf("byte %d of a message is", size-3)
		if o := <-r.outcomes; o.err == nil || !strings.HasPrefix(o.err.Error(), want) {
			t.Errorf("server: %v, want %q", o.err, want)
		}
		s.Close()
	}
}

// TestSteadyStateAllocatesNothing: five thousand more messages allocate no more, but for what
// the keep-alive and the runtime do in the meantime.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	r := newRig(t, "127.3.11.1", "127.3.11.2", transport.Config{}, nil)
	for _, test := range []Test{SendLat, SendBW} {
		mallocs := func(n int64) uint64 {
			p := Defaults(test)
			p.Size, p.Iters = 64, n
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			r.good(t, p, Options{})
			runtime.ReadMemStats(&after)
			return after.Mallocs - before.Mallocs
		}
		mallocs(1000)
		few, many := mallocs(1000), mallocs(6000)
		if many > few+500 {
			t.Errorf("%v: %d allocations for 1,000 messages, %d for 6,000", test, few, many)
		}
	}
}
