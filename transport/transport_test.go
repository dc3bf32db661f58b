package transport_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/internal/paths"
	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	off       = paths.NewFlag()
	wiresFlag = flag.Int("wires", 1, "how many wires the devices of tests that do not say have")
)

// open opens a device on a loopback address; they are hosts of their own, so tests do not
// disturb each other as long as they use different ones.
func open(t testing.TB, addr string, cfg transport.Config) *transport.Device {
	t.Helper()
	if ap, err := netip.ParseAddrPort(addr); err == nil {
		cfg.Bind = ap
	} else {
		cfg.Bind = netip.AddrPortFrom(netip.MustParseAddr(addr), 0)
	}
	off.Apply(&cfg)
	if cfg.Wires == 0 {
		cfg.Wires = *wiresFlag
	}
	dev, err := transport.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil && !errors.Is(err, transport.ErrClosed) {
			t.Error(err)
		}
	})
	return dev
}

func listen(t testing.TB, dev *transport.Device, port uint16) *transport.Listener {
	t.Helper()
	ln, err := dev.Listen(netip.AddrPortFrom(netip.Addr{}, port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

func register(t testing.TB, dev *transport.Device, n int, access verbs.Access) *transport.MR {
	t.Helper()
	mr, err := dev.PD().RegisterMR(make([]byte, n), access)
	if err != nil {
		t.Fatal(err)
	}
	return mr
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// pair connects two devices and returns both ends, the passive one established.
func pair(t testing.TB, a, b *transport.Device, pa, pb transport.ConnParam) (qa, qb *transport.QP) {
	t.Helper()
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() {
		req, err := ln.Next(ctx)
		if err == nil {
			qb, err = req.Accept(ctx, pb)
		}
		accepted <- err
	}()
	if pa.RemotePort == 0 {
		pa.RemotePort = b.LocalAddr().Port()
	}
	qa, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), pa)
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	if err := qb.Established(ctx); err != nil {
		t.Fatal(err)
	}
	return qa, qb
}

// TestGreetingPostedInRTR is the mission in one test: the server posts its answer as soon as
// it has accepted, in RTR, and the client receives it.
func TestGreetingPostedInRTR(t *testing.T) {
	for _, tc := range []struct{ name, a, b string }{
		{"IPv4", "127.1.1.1", "127.1.1.2"},
		{"IPv6", "[::1]:4795", "[::1]:4796"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := open(t, tc.a, transport.Config{}), open(t, tc.b, transport.Config{})
			ctx := deadline(t)
			ln := listen(t, b, 7471)
			amr, bmr := register(t, a, 64, verbs.LocalWrite), register(t, b, 64, 0)
			greeting := "posted in RTR"
			copy(bmr.Bytes(), greeting)
			var state verbs.QPState
			var wg sync.WaitGroup
			wg.Go(func() {
				req, err := ln.Next(ctx)
				if err != nil {
					t.Error(err)
					return
				}
				if got := string(req.PrivateData()[:5]); got != "hello" {
					t.Errorf("REQ brought %q", got)
				}
				q, err := req.Accept(ctx, transport.ConnParam{PrivateData: []byte("welcome")})
				if err != nil {
					t.Error(err)
					return
				}
				state = q.State()
				if err := q.PostSend(verbs.SendWR{WRID: 5, Opcode: verbs.Send, Flags: verbs.Signaled, SGList: bmr.SGL(0, len(greeting))}); err != nil {
					t.Error(err)
				}
				if wc, err := q.CQ().Next(ctx); err != nil || wc.WRID != 5 {
					t.Errorf("send completed with %v, %v", wc, err)
				}
				if err := q.Wait(ctx); err != nil {
					t.Errorf("the connection ended with %v", err)
				}
				if n, d := q.Published(); state == verbs.QPRTR && n == 1 && d <= 0 {
					t.Errorf("published %d after %v", n, d)
				}
				if err := q.Close(); err != nil {
					t.Error(err)
				}
			})
			q, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), transport.ConnParam{
				PrivateData: []byte("hello"), RemotePort: b.LocalAddr().Port(),
				Recv: []verbs.RecvWR{{WRID: 9, SGList: amr.SGL(0, 64)}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := string(q.PrivateData()[:7]); got != "welcome" {
				t.Errorf("REP brought %q", got)
			}
			wc, err := q.CQ().Next(ctx)
			if err != nil || wc.WRID != 9 {
				t.Fatalf("received %v, %v", wc, err)
			}
			if got := string(amr.Bytes()[:wc.ByteLen]); got != greeting {
				t.Errorf("got %q", got)
			}
			if err := q.Close(); err != nil {
				t.Error(err)
			}
			wg.Wait()
		})
	}
}

// TestPingPong sends back and forth in every way of waiting.
func TestPingPong(t *testing.T) {
	for _, tc := range []struct {
		name string
		spin time.Duration
	}{{"adaptive", 0}, {"blocking", -1}, {"polling", time.Hour}} {
		t.Run(tc.name, func(t *testing.T) {
			a := open(t, "127.1.2.1", transport.Config{Spin: tc.spin})
			b := open(t, "127.1.2.2", transport.Config{Spin: tc.spin})
			qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
			rounds := 2000
			if testing.Short() || raceEnabled {
				rounds = 200
			}
			ctx := deadline(t)
			side := func(q *transport.QP, dev *transport.Device, first bool) {
				mr := register(t, dev, 128, verbs.LocalWrite)
				defer mr.Close()
				recv := func(i int) {
					if err := q.PostRecv(verbs.RecvWR{WRID: uint64(i), SGList: mr.SGL(64, 64)}); err != nil {
						t.Error(err)
					}
				}
				send := func(i int) {
					copy(mr.Bytes(), fmt.Sprint(i))
					wr := verbs.SendWR{Opcode: verbs.SendWithImm, ImmData: uint32(i), SGList: mr.SGL(0, 64)}
					if i == rounds-1 && !first {
						wr.Flags = verbs.Signaled // the memory must stay until it has left
					}
					if err := q.PostSend(wr); err != nil {
						t.Error(err)
					}
				}
				recv(0)
				for i := range rounds {
					if first {
						send(i)
					}
					wc, err := q.CQ().Next(ctx)
					if err != nil || wc.ImmData != uint32(i) || wc.ByteLen != 64 {
						t.Errorf("round %d: %+v, %v", i, wc, err)
						return
					}
					recv(i + 1)
					if !first {
						send(i)
					}
				}
				if first {
					return
				}
				if wc, err := q.CQ().Next(ctx); err != nil || wc.Opcode != verbs.WCSend {
					t.Errorf("last send: %+v, %v", wc, err)
				}
			}
			var wg sync.WaitGroup
			wg.Go(func() { side(qb, b, false) })
			side(qa, a, true)
			wg.Wait()
		})
	}
}

func TestErrors(t *testing.T) {
	a, b := open(t, "127.1.3.1", transport.Config{}), open(t, "127.1.3.2", transport.Config{})
	ctx := deadline(t)
	if _, err := transport.Open(transport.Config{Bind: a.LocalAddr()}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("second device on one address: %v", err)
	}
	var reject *transport.RejectError
	if _, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7), transport.ConnParam{}); !errors.As(err, &reject) || reject.Reason != verbs.RejectInvalidServiceID {
		t.Errorf("nobody listens: %v", err)
	}
	ln := listen(t, b, 7471)
	if _, err := b.Listen(ln.Addr()); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("second listener: %v", err)
	}
	go func() {
		req, err := ln.Next(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		if err := req.Reject(0, []byte("no thanks")); err != nil {
			t.Error(err)
		}
	}()
	_, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), transport.ConnParam{})
	if !errors.As(err, &reject) || reject.Reason != verbs.RejectConsumer || string(reject.PrivateData[:9]) != "no thanks" {
		t.Errorf("rejected: %v", err)
	}
	for name, p := range map[string]transport.ConnParam{
		"private data": {PrivateData: make([]byte, 57)},
		"RetryCnt":     {RetryCnt: 8},
		"RNRRetry":     {RNRRetry: 8},
		"MTU":          {MTU: 6},
	} {
		if _, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), p); err == nil || errors.As(err, &reject) {
			t.Errorf("%s: %v", name, err)
		}
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := a.Dial(short, netip.MustParseAddrPort("127.1.3.99:7471"), transport.ConnParam{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nobody there, impatient: %v", err)
	}
	if _, err := ln.Next(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no request: %v", err)
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
	if _, err := ln.Next(ctx); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed listener: %v", err)
	}
}

func TestUnreachableHost(t *testing.T) {
	a := open(t, "127.1.4.1", transport.Config{ConnectTimeout: 200 * time.Millisecond})
	start := time.Now()
	_, err := a.Dial(deadline(t), netip.MustParseAddrPort("127.1.4.99:7471"), transport.ConnParam{})
	if !errors.Is(err, transport.ErrUnreachable) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("silent host: %v", err)
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("took %v", d)
	}
}

// TestDeviceClosedUnderEverything: waiters of every kind return, nothing leaks.
func TestDeviceClosedUnderEverything(t *testing.T) {
	a, b := open(t, "127.1.5.1", transport.Config{}), open(t, "127.1.5.2", transport.Config{})
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	ln := listen(t, b, 7472)
	ctx := deadline(t)
	var wg sync.WaitGroup
	started := make(chan struct{}, 8)
	wait := func(name string, f func() error, want error) {
		wg.Go(func() {
			started <- struct{}{}
			if err := f(); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", name, err, want)
			}
		})
	}
	wait("Next of a CQ", func() error { _, err := qb.CQ().Next(ctx); return err }, net.ErrClosed)
	wait("Wait of a QP", func() error { return qb.Wait(ctx) }, nil)
	wait("Next of a listener", func() error { _, err := ln.Next(ctx); return err }, net.ErrClosed)
	wait("NextEvent", func() error {
		for {
			if _, err := b.NextEvent(ctx); err != nil {
				return err
			}
		}
	}, net.ErrClosed)
	wait("Wait of the peer", func() error { return qa.Wait(ctx) }, nil)
	for range 5 {
		<-started
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if err := b.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closing twice: %v", err)
	}
	if err := qb.Close(); err != nil {
		t.Errorf("queue pair of a closed device: %v", err)
	}
	if _, err := b.CreateCQ(1); !errors.Is(err, net.ErrClosed) {
		t.Errorf("CreateCQ: %v", err)
	}
}

// TestDataPathAllocatesNothing posts, polls and completes without garbage.
func TestDataPathAllocatesNothing(t *testing.T) {
	if !udp.Direct {
		t.Skip("the portable socket path allocates for each datagram")
	}
	a, b := open(t, "127.1.6.1", transport.Config{}), open(t, "127.1.6.2", transport.Config{})
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	amr, bmr := register(t, a, 64, 0), register(t, b, 64, verbs.LocalWrite)
	sge, rge := amr.SGL(0, 64), bmr.SGL(0, 64)
	wc := make([]verbs.WC, 4)
	round := func() {
		if err := qb.PostRecv(verbs.RecvWR{SGList: rge}); err != nil {
			t.Fatal(err)
		}
		if err := qa.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sge}); err != nil {
			t.Fatal(err)
		}
		for qb.CQ().Poll(wc) == 0 {
		}
		for qa.CQ().Poll(wc) == 0 {
			qb.CQ().Poll(wc) // the acknowledgement leaves when the receiver looks again
		}
	}
	for range 100 {
		round()
	}
	if n := testing.AllocsPerRun(1000, round); n > 0 {
		t.Errorf("%v allocations per message", n)
	}
}

// TestWildcard: a device on all addresses answers from the one it was asked on, IPv4 and
// IPv6, and finds its own address when it dials.
func TestWildcard(t *testing.T) {
	b := open(t, "[::]:4801", transport.Config{})
	for _, addr := range []string{"127.1.13.2", "127.1.13.3", "::1"} {
		t.Run(addr, func(t *testing.T) {
			host := netip.MustParseAddr(addr)
			bind := "127.1.13.1:4802"
			if host.Is6() {
				bind = "[::1]:4802"
			}
			a := open(t, bind, transport.Config{})
			ctx := deadline(t)
			for _, tc := range []struct {
				name     string
				from, to *transport.Device
				addr     netip.Addr
			}{{"to the wildcard", a, b, host}, {"from the wildcard", b, a, a.LocalAddr().Addr()}} {
				ln := listen(t, tc.to, 7490)
				mr := register(t, tc.to, 64, verbs.LocalWrite)
				done := make(chan error, 1)
				go func() {
					req, err := ln.Next(ctx)
					if err == nil {
						var q *transport.QP
						q, err = req.Accept(ctx, transport.ConnParam{Recv: []verbs.RecvWR{{SGList: mr.SGL(0, 64)}}})
						if err == nil {
							_, err = q.CQ().Next(ctx)
							if got := q.LocalAddr().Addr(); tc.to == b && got != host {
								t.Errorf("%s: speaks from %v, was asked on %v", tc.name, got, host)
							}
							_ = q.Wait(ctx)
							_ = q.Close()
						}
					}
					done <- err
				}()
				q, err := tc.from.Dial(ctx, netip.AddrPortFrom(tc.addr, 7490), transport.ConnParam{RemotePort: tc.to.LocalAddr().Port()})
				if err != nil {
					t.Fatalf("%s: %v", tc.name, err)
				}
				if err := q.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: []byte("x")}); err != nil {
					t.Fatal(err)
				}
				if _, err := q.CQ().Next(ctx); err != nil {
					t.Errorf("%s: %v", tc.name, err)
				}
				_ = q.Close()
				if err := <-done; err != nil {
					t.Errorf("%s: %v", tc.name, err)
				}
				_ = ln.Close()
			}
			_ = a.Close()
		})
	}
}

// TestRawQueuePairs: a program that drives its queue pairs itself. Sends posted in RTR leave
// with the move to RTS; a first request raises COMM_EST and moves nothing.
func TestRawQueuePairs(t *testing.T) {
	a, b := open(t, "127.1.14.1", transport.Config{}), open(t, "127.1.14.2", transport.Config{})
	ctx := deadline(t)
	type side struct {
		dev *transport.Device
		q   *transport.QP
		cq  *transport.CQ
		mr  *transport.MR
	}
	make1 := func(dev *transport.Device) side {
		cq, err := dev.CreateCQ(64)
		if err != nil {
			t.Fatal(err)
		}
		q, err := dev.PD().CreateQP(transport.QPConfig{SendCQ: cq, RecvCQ: cq})
		if err != nil {
			t.Fatal(err)
		}
		return side{dev, q, cq, register(t, dev, 128, verbs.LocalWrite)}
	}
	sa, sb := make1(a), make1(b)
	if err := sa.q.PostSend(verbs.SendWR{Opcode: verbs.Send}); !errors.Is(err, transport.ErrBadState) {
		t.Errorf("post in RESET: %v", err)
	}
	toRTR := func(s, peer side) {
		for _, attr := range []verbs.QPAttr{
			{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags, State: verbs.QPInit, Port: 1},
			{
				Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
					verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
				State: verbs.QPRTR, AV: verbs.AV{Remote: peer.dev.LocalAddr()}, PathMTU: verbs.MTU1024,
				DestQPN: peer.q.Num(), RQPSN: 7, MinRNRTimer: 1,
			},
		} {
			if err := s.q.Modify(attr); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.q.PostRecv(verbs.RecvWR{WRID: 1, SGList: s.mr.SGL(64, 64)}); err != nil {
			t.Fatal(err)
		}
	}
	toRTS := func(s side) {
		err := s.q.Modify(verbs.QPAttr{
			Mask:  verbs.AttrState | verbs.AttrSQPSN | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic,
			State: verbs.QPRTS, SQPSN: 7, Timeout: 14, RetryCnt: 7, RNRRetry: 7,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	toRTR(sa, sb)
	toRTR(sb, sa)
	toRTS(sa)
	copy(sb.mr.Bytes(), "deferred")
	if err := sb.q.PostSend(verbs.SendWR{WRID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sb.mr.SGL(0, 8)}); err != nil {
		t.Fatal(err)
	}
	if err := sa.q.PostSend(verbs.SendWR{WRID: 3, Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: []byte("first request")}); err != nil {
		t.Fatal(err)
	}
	if wc, err := sb.cq.Next(ctx); err != nil || wc.WRID != 1 {
		t.Fatalf("request: %+v, %v", wc, err)
	}
	if ev, err := b.NextEvent(ctx); err != nil || ev.Type != verbs.EventCommEst || ev.QPN != sb.q.Num() {
		t.Errorf("event %+v, %v", ev, err)
	}
	if s := sb.q.State(); s != verbs.QPRTR {
		t.Errorf("a queue pair that nobody armed moved itself to %v", s)
	}
	if wc, err := sa.cq.Next(ctx); err != nil || wc.WRID != 3 {
		t.Errorf("requests are acknowledged in RTR: %+v, %v", wc, err)
	}
	toRTS(sb)
	if wc, err := sa.cq.Next(ctx); err != nil || wc.WRID != 1 || string(sa.mr.Bytes()[64:72]) != "deferred" {
		t.Errorf("deferred send: %+v, %v", wc, err)
	}
	if wc, err := sb.cq.Next(ctx); err != nil || wc.WRID != 2 {
		t.Errorf("its completion: %+v, %v", wc, err)
	}
	if n, wait := sb.q.Published(); n != 1 || wait <= 0 {
		t.Errorf("published %d after %v", n, wait)
	}
	if err := sa.cq.Close(); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("closing a completion queue in use: %v", err)
	}
	for _, s := range []side{sa, sb} {
		if err := errors.Join(s.q.Close(), s.cq.Close(), s.mr.Close()); err != nil {
			t.Error(err)
		}
		if err := s.q.PostSend(verbs.SendWR{Opcode: verbs.Send}); err == nil {
			t.Error("a closed queue pair takes posts")
		}
	}
}

// TestExtensionIsInvisible: devices tell each other their buffers in private data that
// programs left free, programs never see it, and a program may refuse.
func TestExtensionIsInvisible(t *testing.T) {
	a, b := open(t, "127.1.15.1", transport.Config{}), open(t, "127.1.15.2", transport.Config{})
	full56, full196 := bytes.Repeat([]byte("q"), 56), bytes.Repeat([]byte("p"), 196)
	for _, tc := range []struct {
		name     string
		req, rep []byte
		refuse   bool
	}{
		{"free", []byte("hello"), []byte("welcome"), false},
		{"refused", []byte("hello"), []byte("welcome"), true},
		{"no room in the REQ", full56, nil, false},
		{"no room in the REP", nil, full196, false},
	} {
		qa, qb := pair(t, a, b, transport.ConnParam{PrivateData: tc.req, NoExtension: tc.refuse}, transport.ConnParam{PrivateData: tc.rep})
		want := func(b []byte, n int) []byte { return append(bytes.Clone(b), make([]byte, n-len(b))...) }
		if got := qb.PrivateData(); !bytes.Equal(got, want(tc.req, 56)) {
			t.Errorf("%s: the REQ brought %q", tc.name, got)
		}
		if got := qa.PrivateData(); !bytes.Equal(got, want(tc.rep, 196)) {
			t.Errorf("%s: the REP brought %q", tc.name, got)
		}
		_, _ = qa.Close(), qb.Close()
	}
}
