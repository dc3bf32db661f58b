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
	"sync/atomic"
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
	// running holds what the server's handler calls before it runs a session, if anything.
	running atomic.Pointer[func(s *Session)]
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
		if f := r.running.Load(); f != nil {
			(*f)(s)
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

// whenRunning sets what the server's handler calls before it runs the sessions to come.
func (r *rig) whenRunning(f func(s *Session)) { r.running.Store(&f) }

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
	iters := r.Iters
	if p.Test.Latency() {
		iters += r.Lost
	}
	if want := uint64(p.Iters) * uint64(p.QPs); p.Duration == 0 && iters != want {
		t.Errorf("%+v: %d messages, want %d", p, r.Iters, want)
	}
	if r.Lost > 0 && p.reliable() {
		t.Errorf("%+v: %d lost", p, r.Lost)
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
		// The parts of the times add up to the part of all of it.
		sum := l.Mean * float64(r.Iters) * float64(p.Test.parts())
		if sum > 1.01*float64(r.Elapsed) || r.Lost == 0 && sum < 0.99*float64(r.Elapsed) {
			t.Errorf("%+v: times of %v together, elapsed %v", p, time.Duration(sum), r.Elapsed)
		}
		return
	}
	rate := float64(r.Iters-min(r.Lost, r.Iters)) / r.Elapsed.Seconds()
	near := func(a, b float64) bool { return a >= 0.99*b && a <= 1.01*b }
	if !p.Bidirectional && !near(r.Rate, rate) || r.Rate < 0.99*rate || !near(r.Average, r.Rate*float64(size)) || r.Peak < 0.99*r.Average {
		t.Errorf("%+v: result %+v, rate %v", p, r, rate)
	}
	if l != (Latency{}) {
		t.Errorf("%+v: a bandwidth test reports latency %+v", p, l)
	}
}

// TestEachTest runs all tests, by count and by time, in each way of waiting.
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
			for _, test := range allTests() {
				if testing.Short() && i > 0 && i != int(test)%4 {
					continue // each way of waiting with some
				}
				p := Defaults(test)
				p.Iters = 200
				r.good(t, p, tc.o)
				p.Iters, p.Duration = 0, 20*time.Millisecond
				r.good(t, p, tc.o)
			}
		})
	}
}

// TestServices runs what unreliable services have, on each of them. On loopback little is lost
// of what does not exceed a socket's buffer, and whatever is lost is counted.
func TestServices(t *testing.T) {
	r := newRig(t, "127.3.13.1", "127.3.13.2", transport.Config{}, nil)
	for _, typ := range []verbs.QPType{verbs.UC, verbs.UD} {
		for _, test := range []Test{SendLat, SendBW, WriteLat, WriteBW} {
			p := Defaults(test)
			p.Type, p.Size, p.Iters = typ, 1000, 200
			if p.Check() != nil {
				continue // WRITE over UD
			}
			run := func(name string, change func(p *Params)) {
				t.Run(fmt.Sprintf("%v/%v/%s", typ, test, name), func(t *testing.T) {
					p := p
					change(&p)
					r.good(t, p, Options{})
				})
			}
			run("plain", func(*Params) {})
			run("time", func(p *Params) { p.Iters, p.Duration = 0, 5*time.Millisecond })
			run("sizes", func(p *Params) { p.All, p.Size, p.Iters = true, 4096, 20 })
			run("not inline", func(p *Params) { p.Inline = 0 })
			if !test.Latency() {
				run("both ways", func(p *Params) { p.Bidirectional, p.QPs, p.Inline = true, 3, 1000 })
			}
			if test.Verb() == VerbSend {
				run("shared", func(p *Params) { p.SRQ = true })
			}
			if typ == verbs.UC {
				run("packets", func(p *Params) { p.Size, p.MTU = 20000, verbs.MTU256 })
			}
		}
	}
}

// TestSharedReceives: all queue pairs of a side take their receives from one queue.
func TestSharedReceives(t *testing.T) {
	r := newRig(t, "127.3.14.1", "127.3.14.2", transport.Config{}, func(s *Server) { s.Options.Stall = 5 * time.Second })
	for _, test := range []Test{SendLat, SendBW} {
		p := Defaults(test)
		p.SRQ, p.Iters, p.RxDepth = true, 500, 16
		r.good(t, p, Options{})
	}
	for _, qps := range []int{2, 7} {
		p := Defaults(SendBW)
		p.SRQ, p.QPs, p.Iters, p.RxDepth, p.Size, p.Bidirectional = true, qps, 300, 30, 3000, true
		r.whenRunning(func(s *Session) {
			if s.srq == nil || s.srq.Len() != qps*30 {
				t.Errorf("the server's receives are not shared: %v", s.srq)
			}
		})
		r.good(t, p, Options{})
	}
}

// TestOutstandingReads: depths of READs that are less than what is posted, and more.
func TestOutstandingReads(t *testing.T) {
	r := newRig(t, "127.3.15.1", "127.3.15.2", transport.Config{}, nil)
	for _, test := range []Test{ReadBW, AtomicBW} {
		for _, outs := range []int{1, 3, MaxOuts} {
			p := Defaults(test)
			p.Outs, p.Iters, p.TxDepth, p.QPs, p.PostList, p.CQMod, p.Bidirectional = outs, 300, 50, 2, 7, 9, true
			if p.Swap = outs == 3 && test == AtomicBW; test == ReadBW {
				p.Size = 10000
			}
			r.whenRunning(func(s *Session) {
				for _, f := range s.flows {
					if a, err := f.qp.Attr(); err != nil || int(a.MaxQPRdAtomic) != outs || int(a.MaxDestRdAtomic) != outs {
						t.Errorf("%d READs: %d and %d, %v", outs, a.MaxQPRdAtomic, a.MaxDestRdAtomic, err)
					}
				}
			})
			r.good(t, p, Options{})
		}
	}
}

// TestLostLatency: a message that nobody answers is given up and counted, the ones after it are
// measured, and if nothing ever comes the run ends.
func TestLostLatency(t *testing.T) {
	r := newRig(t, "127.3.16.1", "127.3.16.2", transport.Config{}, func(s *Server) { s.Options.Stall = time.Hour })
	for _, tc := range []struct {
		test Test
		typ  verbs.QPType
		miss func(f *flow)
	}{
		{SendLat, verbs.UD, func(f *flow) { f.wrs[0].RemoteQKey ^= 1 }},
		{WriteLat, verbs.UC, func(f *flow) { f.wrs[0].RKey ^= 0x100 }},
	} {
		p := Defaults(tc.test)
		p.Type, p.Iters = tc.typ, 2
		s, err := Dial(r.ctx, r.client, r.to, p, Options{})
		if err != nil {
			t.Fatal(err)
		}
		tc.miss(s.flows[0])
		var got []Result
		err = s.Run(r.ctx, func(res Result) {
			got = append(got, res)
		})
		server := <-r.outcomes
		if err != nil || server.err != nil || len(got) != 1 || len(server.results) != 1 || got[0] != server.results[0] {
			t.Fatalf("%v: client %v, %+v; server %+v", tc.test, err, got, server)
		}
		if got[0].Lost != 2 || got[0].Iters != 0 || got[0].Latency != (Latency{}) {
			t.Errorf("%v: %+v", tc.test, got[0])
		}
		s.Close()

		// What comes back to life in the middle: the first is lost, then the key is right again.
		p.Iters = 50
		if s, err = Dial(r.ctx, r.client, r.to, p, Options{}); err != nil {
			t.Fatal(err)
		}
		tc.miss(s.flows[0])
		s.onLoss = func() { tc.miss(s.flows[0]); s.onLoss = nil }
		got = nil
		err = s.Run(r.ctx, func(res Result) { got = append(got, res) })
		if server := <-r.outcomes; err != nil || server.err != nil || len(got) != 1 {
			t.Fatalf("%v: client %v, server %v", tc.test, err, server.err)
		}
		checkResult(t, &p, p.Size, &got[0])
		if got[0].Iters != 50 || got[0].Lost != 0 { // it was lost in the warm-up
			t.Errorf("%v: %+v", tc.test, got[0])
		}
		s.Close()

		p.Iters = MaxIters
		if s, err = Dial(r.ctx, r.client, r.to, p, Options{Stall: time.Second}); err != nil {
			t.Fatal(err)
		}
		tc.miss(s.flows[0])
		if err := s.Run(r.ctx, func(Result) {}); !errors.Is(err, ErrStalled) {
			t.Errorf("%v: %v", tc.test, err)
		}
		s.Close()
		if o := <-r.outcomes; !errors.Is(o.err, ErrPeerGone) {
			t.Errorf("%v: the server: %v", tc.test, o.err)
		}
	}
}

// TestLostBandwidth floods a socket whose buffer is small: what did not arrive is counted by
// both ends, and neither hangs.
func TestLostBandwidth(t *testing.T) {
	r := newRig(t, "127.3.17.1", "127.3.17.2", transport.Config{RecvBuffer: 4096}, nil)
	for _, tc := range []struct {
		test Test
		typ  verbs.QPType
		size int
	}{{SendBW, verbs.UD, 4096}, {SendBW, verbs.UC, 65536}, {WriteBW, verbs.UC, 65536}} {
		lost := uint64(0)
		for range 20 { // until something is
			p := Defaults(tc.test)
			p.Type, p.Size, p.Iters, p.Bidirectional = tc.typ, tc.size, 300, tc.test == SendBW
			if res := r.good(t, p, Options{}); res[0].Lost > 0 {
				lost = res[0].Lost
				break
			}
		}
		if lost == 0 {
			t.Errorf("%v over %v: nothing was lost", tc.test, tc.typ)
		}
	}
}

// TestSizeOverUD: what does not fit into a packet between the two devices is refused.
func TestSizeOverUD(t *testing.T) {
	r := newRig(t, "127.3.18.1", "127.3.18.2", transport.Config{MaxMTU: verbs.MTU1024}, nil)
	p := Defaults(SendLat)
	p.Type, p.Size = verbs.UD, 1025
	client, _ := r.run(p, Options{})
	if client.err == nil || client.err.Error() != "message size over UD to 127.3.18.2 is 1025, want 0 to 1024" {
		t.Errorf("%v", client.err)
	}
	if o := <-r.outcomes; o.err == nil {
		t.Error("the server saw nothing of it")
	}
	p.Size = 1024
	r.good(t, p, Options{})
}

func TestIPv6(t *testing.T) {
	r := newRig(t, "[::1]:4831", "[::1]:4832", transport.Config{}, nil)
	p := Defaults(SendBW)
	p.QPs, p.Iters, p.Bidirectional = 2, 100, true
	r.good(t, p, Options{})
	for _, typ := range []verbs.QPType{verbs.RC, verbs.UC, verbs.UD} {
		p := Defaults(SendLat)
		p.Type = typ
		r.good(t, p, Options{})
	}
	r.good(t, Defaults(WriteLat), Options{})
}

func TestSizes(t *testing.T) {
	r := newRig(t, "127.3.2.1", "127.3.2.2", transport.Config{}, nil)
	for _, test := range allTests()[:ReadBW] {
		p := Defaults(test)
		p.Iters = 5
		p.All, p.Size = true, 1<<16
		if got := r.good(t, p, Options{}); len(got) != 16 {
			t.Errorf("%d sizes, want 16", len(got))
		}
		p.All = false
		if test.Verb() == VerbSend {
			p.Size = 0
			r.good(t, p, Options{})
		}
		for _, size := range []int{1, 235, 236, 237, 4095, 4096, 4097, 1<<20 + 1} {
			p.Size = size
			r.good(t, p, Options{})
		}
	}
	p := Defaults(SendBW)
	p.MTU, p.Iters = verbs.MTU256, 20
	r.whenRunning(func(s *Session) {
		if conns, err := s.Conns(); err != nil || conns[0].MTU != verbs.MTU256 {
			t.Errorf("MTU: %+v, %v", conns, err)
		}
	})
	r.good(t, p, Options{})
}

// TestEndConditions runs counts, depths, moderations, lists and queue pairs that do not
// divide each other: every run ends, with as many messages as were asked for.
func TestEndConditions(t *testing.T) {
	r := newRig(t, "127.3.3.1", "127.3.3.2", transport.Config{}, nil)
	tests := []Test{SendBW, WriteBW, ReadBW, AtomicBW}
	turn := 0
	run := func(n int64, tx, rx, mod, qps, list int, both bool) {
		turn++
		p := Defaults(tests[turn%len(tests)])
		p.Size, p.Iters, p.TxDepth, p.RxDepth, p.CQMod, p.QPs, p.PostList, p.Bidirectional = 1024, n, tx, rx, mod, qps, list, both
		if p.Test == AtomicBW {
			p.Size = AtomicSize
		}
		r.good(t, p, Options{})
	}
	run(3000, 12, 512, 100, 5, 1, false)
	run(500, 83, 41, 100, 1, 1, true)
	run(1, 1, 1, 1024, 16, 64, true)
	run(3, 5, 1, 5, 2, 3, true)
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 0))
	pick := func(v ...int) int { return v[rng.IntN(len(v))] }
	rounds := 50
	if testing.Short() {
		rounds = 12
	}
	for range rounds {
		run(int64(pick(1, 2, 3, 7, 100, 300)), pick(1, 5, 12, 83, 128), pick(1, 2, 41, 512), pick(1, 3, 7, 100, 1000),
			pick(1, 2, 5, 16), pick(1, 2, 64), rng.IntN(2) == 0)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	// By time, where the last message is known only when the time is up.
	for range 10 {
		p := Defaults(tests[rng.IntN(len(tests))])
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
	}{{SendLat, false}, {SendBW, false}, {SendBW, true}, {WriteLat, false}, {WriteBW, true}, {ReadLat, false}, {AtomicBW, false}, {ReadBW, true}} {
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
	for i, test := range allTests() {
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
		return &hello{version: Version, kind: helloControl, session: 1, Params: p}
	}
	r := newRig(t, "127.3.7.1", "127.3.7.2", transport.Config{}, func(s *Server) {
		s.Only, s.MaxMemory, s.MaxSessions = SendBW, 4<<20, 1
	})
	dial := func(private []byte) error {
		q, err := r.client.Dial(r.ctx, r.to, transport.ConnParam{PrivateData: private})
		if err == nil {
			q.Close()
		}
		return Refused(err)
	}
	for _, tc := range []struct {
		name   string
		change func(h *hello)
		want   string
	}{
		{"version", func(h *hello) { h.version = 9 }, "the client speaks version 9 of perf's exchange, this is version 2"},
		{"kind", func(h *hello) { h.kind = 7 }, "unknown kind of connection 7"},
		{"service", func(h *hello) { h.Type = 9 }, "unknown connection type QPT_9, want RC, UC or UD"},
		{"no such service", func(h *hello) { h.Params = Defaults(ReadBW); h.Type = verbs.UC }, "connection type UC has no READs and atomics: read_bw needs RC"},
		{"unknown test", func(h *hello) { h.Test = 77 }, "unknown test 77"},
		{"other test", func(h *hello) { h.Params = Defaults(SendLat) }, "this server runs send_bw, not send_lat"},
		{"size", func(h *hello) { h.Size = -1 }, "message size of send_bw over RC is 2147483647, want 0 to 1073741824"},
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
	for _, tc := range []struct {
		test   Test
		size   int
		client bool // notices
	}{
		{SendBW, 65536, false}, // receives share memory
		{SendBW, 100, false},   // and here they don't
		{WriteBW, 65536, false}, {WriteBW, 100, false}, {WriteLat, 100, false},
		{ReadBW, 65536, true}, {ReadBW, 100, true}, {ReadLat, 100, true},
	} {
		p := Defaults(tc.test)
		p.Size = tc.size
		corrupt := func(mr *transport.MR) {
			for i := range p.slots(p.TxDepth) {
				mr.Bytes()[(i+1)*tc.size-3] ^= 1
			}
		}
		r.whenRunning(func(s *Session) {
			if tc.client {
				corrupt(s.exposed)
			}
		})
		s, err := Dial(r.ctx, r.client, r.to, p, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if !tc.client {
			corrupt(s.local)
		}
		err = s.Run(r.ctx, func(Result) {})
		s.Close()
		found, left := (<-r.outcomes).err, err
		if tc.client {
			found, left = left, found
		}
		if want := fmt.Sprintf("byte %d of a message is", tc.size-3); found == nil || !strings.HasPrefix(found.Error(), want) || left == nil {
			t.Errorf("%v of %d: %v and %v, want %q", tc.test, tc.size, found, left, want)
		}
	}
}

// TestMiscounted: memory that atomics have not added up to what was asked for is found out.
func TestMiscounted(t *testing.T) {
	r := newRig(t, "127.3.19.1", "127.3.19.2", transport.Config{}, nil)
	r.whenRunning(func(s *Session) { s.exposed.Bytes()[8] ^= 2 })
	for _, swap := range []bool{false, true} {
		p := Defaults(AtomicBW)
		p.Swap, p.Iters = swap, 100
		_, server := r.run(p, Options{})
		if want := map[bool]string{false: "atomics have added up to ", true: "atomics have added up to 2, want 0"}[swap]; server.err == nil || !strings.HasPrefix(server.err.Error(), want) {
			t.Errorf("%v: %v", swap, server.err)
		}
	}
}

// TestSteadyStateAllocatesNothing: three thousand more messages allocate no more, but for what
// the keep-alive and the runtime do in the meantime.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	r := newRig(t, "127.3.11.1", "127.3.11.2", transport.Config{}, nil)
	for _, test := range allTests() {
		if testing.Short() && test.Latency() != (test.Verb() == VerbWrite) {
			continue // some loops of each kind
		}
		mallocs := func(n int64) uint64 {
			p := Defaults(test)
			p.Iters = n
			if test.Verb() != VerbAtomic {
				p.Size = 64
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			r.good(t, p, Options{})
			runtime.ReadMemStats(&after)
			return after.Mallocs - before.Mallocs
		}
		mallocs(1000)
		few, many := mallocs(1000), mallocs(4000)
		if many > few+300 {
			t.Errorf("%v: %d allocations for 1,000 messages, %d for 4,000", test, few, many)
		}
	}
}
