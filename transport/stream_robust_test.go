package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/rsocket"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// dropLink loses what a device sends, trains whole, with probability p.
type dropLink struct {
	link.Link
	rnd *rand.Rand
	p   float64
}

func (l *dropLink) Send(msgs []link.Tx) (int, error) {
	for i := range msgs {
		if l.rnd.Float64() < l.p {
			continue
		}
		if n, err := l.Link.Send(msgs[i : i+1]); n == 0 || err != nil {
			return i, err
		}
	}
	return len(msgs), nil
}

func drop(d *transport.Device, seed uint64, p float64) {
	transport.Interpose(d, func(l link.Link) link.Link {
		return &dropLink{Link: l, rnd: rand.New(rand.NewPCG(seed, 7)), p: p}
	})
}

// within runs f and fails when it does not return.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s does not return", what)
	}
}

// TestStreamClosing: for each way in which one side ends, what the other may still do.
func TestStreamClosing(t *testing.T) {
	a, b := open(t, "127.1.53.1", transport.Config{}), open(t, "127.1.53.2", transport.Config{})
	small := transport.StreamConfig{SendBuffer: 8192, RecvBuffer: 8192}
	readAll := func(s *transport.Stream) ([]byte, error) {
		got, err := io.ReadAll(s)
		return got, err
	}
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, x, y *transport.Stream)
	}{
		{"write and close at once", func(t *testing.T, x, y *transport.Stream) {
			want := noise(1, 300<<10)
			go func() {
				if _, err := x.Write(want); err != nil {
					t.Error(err)
				}
				_ = x.Close()
			}()
			if got, err := readAll(y); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if _, err := y.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("write to a peer that has closed: %v", err)
			}
		}},
		{"half-close", func(t *testing.T, x, y *transport.Stream) {
			want := noise(2, 200<<10)
			go func() {
				if got, err := readAll(y); err != nil || string(got) != "request" {
					t.Errorf("%q, %v", got, err)
				}
				if _, err := y.Write(want); err != nil {
					t.Error(err)
				}
				if err := y.CloseWrite(); err != nil {
					t.Error(err)
				}
			}()
			if _, err := x.Write([]byte("request")); err != nil {
				t.Error(err)
			}
			if err := x.CloseWrite(); err != nil {
				t.Error(err)
			}
			if _, err := x.Write([]byte("more")); !errors.Is(err, syscall.EPIPE) {
				t.Errorf("write after CloseWrite: %v", err)
			}
			if got, err := readAll(x); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		}},
		{"CloseWrite ends a blocked Write", func(t *testing.T, x, _ *transport.Stream) {
			done := make(chan error)
			go func() {
				_, err := x.Write(make([]byte, 1<<20))
				done <- err
			}()
			waitBlocked(x)
			if err := x.CloseWrite(); err != nil {
				t.Error(err)
			}
			if err := <-done; !errors.Is(err, syscall.EPIPE) {
				t.Error(err)
			}
		}},
		{"CloseRead ends a blocked Read", func(t *testing.T, x, _ *transport.Stream) {
			done := make(chan error)
			go func() {
				_, err := x.Read(make([]byte, 10))
				done <- err
			}()
			if err := x.CloseRead(); err != nil {
				t.Error(err)
			}
			if err := <-done; !errors.Is(err, io.EOF) {
				t.Error(err)
			}
		}},
		{"CloseRead lets the peer go on", func(t *testing.T, x, y *transport.Stream) {
			if err := x.CloseRead(); err != nil {
				t.Error(err)
			}
			done := make(chan error)
			go func() {
				_, err := y.Write(make([]byte, 100_000))
				done <- err
			}()
			for end := time.After(time.Minute); ; {
				select {
				case err := <-done:
					if err != nil {
						t.Error(err)
					}
					return
				case <-end:
					t.Fatal("the peer's Write does not return")
				default:
					if _, err := x.Write([]byte{1}); err != nil {
						t.Fatal(err)
					}
					_ = y.SetReadDeadline(time.Now().Add(time.Minute))
					if _, err := y.Read(make([]byte, 100)); err != nil {
						t.Fatal(err)
					}
				}
			}
		}},
		{"close under a peer's blocked Write", func(t *testing.T, x, y *transport.Stream) {
			done := make(chan error)
			go func() {
				_, err := y.Write(make([]byte, 1<<20))
				done <- err
			}()
			waitBlocked(y)
			_ = x.Close()
			if err := <-done; !errors.Is(err, syscall.ECONNRESET) {
				t.Error(err)
			}
		}},
		{"close under own calls", func(t *testing.T, x, _ *transport.Stream) {
			done := make(chan error)
			go func() {
				_, err := x.Write(make([]byte, 1<<20))
				done <- err
			}()
			go func() {
				_, err := x.Read(make([]byte, 10))
				done <- err
			}()
			waitBlocked(x)
			if err := x.Close(); err != nil {
				t.Error(err)
			}
			for range 2 {
				if err := <-done; !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
			}
			for name, call := range map[string]func() error{
				"Close": x.Close, "CloseRead": x.CloseRead, "CloseWrite": x.CloseWrite,
				"SetDeadline": func() error { return x.SetDeadline(time.Now()) },
				"Read":        func() error { _, err := x.Read(nil); return err },
				"Write":       func() error { _, err := x.Write(nil); return err },
				"ReadFrom":    func() error { _, err := x.ReadFrom(strings.NewReader("x")); return err },
				"WriteTo":     func() error { _, err := x.WriteTo(io.Discard); return err },
			} {
				var op *net.OpError
				if err := call(); !errors.Is(err, net.ErrClosed) || !errors.As(err, &op) || op.Net != "rdma" {
					t.Errorf("%s after Close: %v", name, err)
				}
			}
		}},
		{"both close", func(t *testing.T, x, y *transport.Stream) {
			var wg sync.WaitGroup
			for _, s := range []*transport.Stream{x, y} {
				wg.Go(func() {
					if err := s.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			x, y := streamPair(t, a, b, small)
			within(t, tc.name, func() { tc.run(t, x, y) })
			x, y = streamPair(t, a, b, small)
			within(t, tc.name+", the other way", func() { tc.run(t, y, x) })
		})
	}
}

// waitBlocked waits until the peer's buffer is full, as far as one can tell from outside: a
// write that may not wait takes nothing.
func waitBlocked(s *transport.Stream) {
	for transport.StreamRoom(s) {
		time.Sleep(time.Millisecond)
	}
}

func TestStreamDeadlines(t *testing.T) {
	a, b := open(t, "127.1.54.1", transport.Config{}), open(t, "127.1.54.2", transport.Config{})
	x, y := streamPair(t, a, b, transport.StreamConfig{SendBuffer: 8192, RecvBuffer: 8192})
	timeout := func(err error) bool {
		var ne net.Error
		return errors.Is(err, os.ErrDeadlineExceeded) && errors.As(err, &ne) && ne.Timeout()
	}
	read := func() error { _, err := x.Read(make([]byte, 10)); return err }
	blocked := func(call func() error) <-chan error {
		done := make(chan error, 1)
		go func() { done <- call() }()
		return done
	}
	// From another goroutine: long, then short, then past.
	done := blocked(read)
	for _, d := range []time.Duration{time.Hour, 20 * time.Millisecond} {
		if err := x.SetReadDeadline(time.Now().Add(d)); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; !timeout(err) {
		t.Errorf("a deadline set while blocked: %v", err)
	}
	if err := read(); !timeout(err) {
		t.Errorf("a deadline that is over: %v", err)
	}
	// Taken back: the read goes on.
	_ = x.SetReadDeadline(time.Time{})
	done = blocked(read)
	_ = x.SetWriteDeadline(time.Now().Add(-time.Second)) // does not concern it
	select {
	case err := <-done:
		t.Fatalf("a write deadline ended a read: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	if _, err := x.Write([]byte("x")); !timeout(err) {
		t.Errorf("a write deadline that is over: %v", err)
	}
	if _, err := y.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	// In the middle of a large write: what was taken arrives, and the stream goes on.
	_ = x.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
	want := noise(3, 1<<20)
	n, err := x.Write(want)
	if !timeout(err) || n == 0 || n == len(want) {
		t.Fatalf("wrote %d, %v", n, err)
	}
	_ = x.SetWriteDeadline(time.Now().Add(time.Hour))
	go func() {
		if _, err := x.Write(want[n:]); err != nil {
			t.Error(err)
		}
		_ = x.CloseWrite()
	}()
	if got, err := io.ReadAll(y); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	// Many at once, under use.
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 0))
			for range 200 {
				_ = x.SetDeadline(time.Now().Add(time.Duration(rnd.IntN(2000)-1000) * time.Microsecond))
			}
		})
	}
	wg.Go(func() {
		for range 200 {
			_ = read()
		}
	})
	wg.Go(func() {
		for range 200 {
			_, _ = y.Write([]byte("x"))
			_, _ = x.Write([]byte("x"))
		}
	})
	_ = y.SetWriteDeadline(time.Now().Add(10 * time.Second))
	within(t, "hammering deadlines", func() {
		// The last deadline of x may be a future one, and its read wait until then: it is near.
		wg.Wait()
	})
}

// TestStreamsOfClosedDevice: a device closed under many streams in use ends every call.
func TestStreamsOfClosedDevice(t *testing.T) {
	count := 1000
	if raceEnabled || testing.Short() {
		count = 100
	}
	a, b := open(t, "127.1.55.1", transport.Config{}), open(t, "127.1.55.2", transport.Config{})
	cfg := transport.StreamConfig{SendBuffer: 4096, RecvBuffer: 4096, Messages: 16}
	ln, err := cfg.Listen(b, netip.AddrPortFrom(netip.Addr{}, streamPort))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ours, theirs := make([]*transport.Stream, count), make([]*transport.Stream, count)
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for i := range theirs {
			c, err := ln.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			theirs[i] = c.(*transport.Stream)
		}
	}()
	for i := range ours {
		if ours[i], err = cfg.Dial(t.Context(), a, netip.AddrPortFrom(b.LocalAddr().Addr(), streamPort)); err != nil {
			t.Fatal(err)
		}
	}
	<-accepted
	var wg, peers, under sync.WaitGroup
	end := func(wg *sync.WaitGroup, what string, call func() (int64, error), want ...error) {
		under.Add(1)
		wg.Go(func() {
			under.Done()
			_, err := call()
			if !slices.ContainsFunc(want, func(w error) bool { return errors.Is(err, w) }) {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
	for i := range ours {
		switch s := ours[i]; i % 4 {
		case 0:
			end(&wg, "Read", func() (int64, error) { n, err := s.Read(make([]byte, 1)); return int64(n), err }, net.ErrClosed)
		case 1:
			end(&wg, "Write", func() (n int64, err error) {
				for b := make([]byte, 1<<20); err == nil; { // the peer may take in one before the end
					_, err = s.Write(b)
				}
				return 0, err
			}, net.ErrClosed)
		case 2:
			end(&wg, "WriteTo", func() (int64, error) { return s.WriteTo(io.Discard) }, net.ErrClosed)
		case 3:
			end(&wg, "ReadFrom", func() (int64, error) { return s.ReadFrom(endless{}) }, net.ErrClosed)
		}
		// A peer is told once. Where that gets lost it will learn when it sends.
		end(&peers, "the peer's Read", func() (int64, error) { return io.Copy(io.Discard, theirs[i]) }, syscall.ECONNRESET, net.ErrClosed)
	}
	under.Wait()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	within(t, "a call on a closed device", wg.Wait)
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	within(t, "a peer's call on a closed device", peers.Wait)
	within(t, "Close", func() {
		for i := range ours {
			_ = ours[i].Close()
			_ = theirs[i].Close()
		}
	})
	if _, err := cfg.Dial(t.Context(), a, netip.AddrPortFrom(b.LocalAddr().Addr(), streamPort)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("dialing from a closed device: %v", err)
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// TestStreamPeerVanishes: a peer that dies in mid-stream is found out by what is sent to it,
// or by a keepalive.
func TestStreamPeerVanishes(t *testing.T) {
	for i, tc := range []struct {
		name string
		cfg  transport.StreamConfig
		call func(s *transport.Stream) error
	}{
		{"write", transport.StreamConfig{}, func(s *transport.Stream) error { _, err := s.ReadFrom(endless{}); return err }},
		{"keepalive", transport.StreamConfig{KeepAlive: 20 * time.Millisecond}, func(s *transport.Stream) error {
			_, err := s.Read(make([]byte, 1))
			return err
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := open(t, fmt.Sprintf("127.1.56.%d", 2*i+1), transport.Config{}), open(t, fmt.Sprintf("127.1.56.%d", 2*i+2), transport.Config{})
			tc.cfg.AckTimeout = 4 * time.Millisecond
			x, _ := streamPair(t, a, b, tc.cfg)
			if _, err := x.Write([]byte("are you there")); err != nil {
				t.Fatal(err)
			}
			transport.Kill(b)
			within(t, tc.name, func() {
				err := tc.call(x)
				if !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("%v, want ECONNRESET", err)
				}
				t.Log(err)
			})
			within(t, "Close", func() { _ = x.Close() })
		})
	}
}

// TestStreamLoss: both directions at once over a network that loses 1 %.
func TestStreamLoss(t *testing.T) {
	const seed = 1
	a, b := open(t, "127.1.57.1", transport.Config{}), open(t, "127.1.57.2", transport.Config{})
	drop(a, seed, 0.01)
	drop(b, seed+1, 0.01)
	size := 2 << 20
	if raceEnabled || testing.Short() {
		size = 300_000
	}
	for round := range 3 {
		x, y := streamPair(t, a, b, transport.StreamConfig{SendBuffer: 30_000, RecvBuffer: 50_000})
		var wg sync.WaitGroup
		for i, way := range [][2]*transport.Stream{{x, y}, {y, x}} {
			want := noise(uint64(10*round+i), size)
			wg.Go(func() {
				if _, err := way[0].Write(want); err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
				_ = way[0].CloseWrite()
			})
			wg.Go(func() {
				if got, err := io.ReadAll(way[1]); err != nil || !bytes.Equal(got, want) {
					t.Errorf("seed %d: %d bytes, %v", seed, len(got), err)
				}
			})
		}
		within(t, "transfer", wg.Wait)
		_ = x.Close()
		_ = y.Close()
	}
	n := a.Counters()
	t.Logf("%d packets, %d sent again", n["qp_packets_sent"], n["qp_retransmits"])
}

// hostile is a peer made of raw verbs.
type hostile struct {
	t    *testing.T
	qp   *transport.QP
	mr   *transport.MR
	peer rsocket.ConnData
}

// newHostile accepts a stream as itself and returns both.
func newHostile(t *testing.T, a, b *transport.Device, hello rsocket.ConnData) (*transport.Stream, *hostile, error) {
	t.Helper()
	ctx := deadline(t)
	ln := listen(t, b, streamPort)
	defer ln.Close()
	h := &hostile{t: t, mr: register(t, b, 1<<20, verbs.LocalWrite|verbs.RemoteWrite)}
	t.Cleanup(func() { _ = h.mr.Close() })
	if hello.Target.Length == 0 {
		hello.Target = rsocket.Buffer{Addr: h.mr.Addr(), RKey: h.mr.RKey(), Length: 2}
	}
	if hello.Data.Length == 0 {
		hello.Data = rsocket.Buffer{Addr: h.mr.Addr() + 4096, RKey: h.mr.RKey(), Length: 8192}
	}
	accepted := make(chan error, 1)
	go func() {
		req, err := ln.Next(ctx)
		if err == nil {
			h.peer, err = rsocket.ParseConnData(req.PrivateData())
		}
		if err == nil {
			h.qp, err = req.Accept(ctx, transport.ConnParam{PrivateData: hello.Append(nil), Recv: make([]verbs.RecvWR, 100)})
		}
		accepted <- err
	}()
	s, err := transport.StreamConfig{RecvBuffer: 8192, Messages: 16, Linger: -1}.Dial(ctx, a, netip.AddrPortFrom(b.LocalAddr().Addr(), streamPort))
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.qp.Close() })
	if err == nil {
		t.Cleanup(func() { _ = s.Close() })
	}
	return s, h, err
}

// write sends a WRITE with immediate of n bytes to an address, and waits until it is there.
func (h *hostile) write(imm uint32, at rsocket.Buffer, n int) {
	h.t.Helper()
	h.post(verbs.SendWR{
		Opcode: verbs.RDMAWriteWithImm, ImmData: imm, SGList: h.mr.SGL(1<<19, n), RemoteAddr: at.Addr, RKey: at.RKey,
	})
}

func (h *hostile) post(wr verbs.SendWR) {
	h.t.Helper()
	wr.Flags = verbs.Signaled
	if err := h.qp.PostSend(wr); err != nil {
		h.t.Fatal(err)
	}
	for {
		wc, err := h.qp.CQ().Next(h.t.Context())
		if err != nil {
			h.t.Fatal(err)
		}
		if !wc.Opcode.IsRecv() {
			return
		}
	}
}

// TestStreamHostilePeer: what no rsocket would do ends the stream with an error that says
// so, and nothing else.
func TestStreamHostilePeer(t *testing.T) {
	a, b := open(t, "127.1.58.1", transport.Config{}), open(t, "127.1.58.2", transport.Config{})
	good, goodPeer := streamPair(t, a, b, transport.StreamConfig{})
	entry := func(h *hostile, addr uint64, length uint32) {
		m := h.mr.Bytes()[1<<19:]
		for i := range 8 {
			m[i] = byte(addr >> (8 * i))
		}
		m[12], m[13], m[14], m[15] = byte(length), byte(length>>8), byte(length>>16), byte(length>>24)
	}
	second := func(h *hostile) rsocket.Buffer {
		return rsocket.Buffer{Addr: h.peer.Target.Addr + 16, RKey: h.peer.Target.RKey}
	}
	for _, tc := range []struct {
		name string
		want string // in the error
		do   func(h *hostile)
	}{
		{"reserved operation", "reserved operation", func(h *hostile) { h.write(0x20000001, h.peer.Data, 1) }},
		{"lies about a length", "says 100 bytes and brings 50", func(h *hostile) { h.write(100, h.peer.Data, 50) }},
		{"DATA of nothing", "without data", func(h *hostile) { h.write(0, h.peer.Data, 0) }},
		{"I/O map", "I/O map", func(h *hostile) { h.write(0xC0000000, h.peer.Target, 24) }},
		{"beyond its credits", "beyond its 16 credits", func(h *hostile) {
			for range 17 {
				h.write(1, h.peer.Data, 1)
			}
		}},
		{"beyond its buffers", "where", func(h *hostile) {
			for range 3 {
				h.write(4096, h.peer.Data, 4096)
			}
		}},
		{"empty buffer", "length 0", func(h *hostile) { entry(h, 4096, 0); h.write(0x80000064, second(h), 16) }},
		{"wrapping buffer", "wraps around", func(h *hostile) { entry(h, ^uint64(0), 16); h.write(0x80000064, second(h), 16) }},
		{"credits for nothing", "grants credits", func(h *hostile) { h.write(0x80000065, h.peer.Data, 0) }},
		{"a message instead", "where only WRITEs", func(h *hostile) {
			h.post(verbs.SendWR{Opcode: verbs.SendWithImm, ImmData: 1})
		}},
		{"a message without immediate", "where only WRITEs", func(h *hostile) { h.post(verbs.SendWR{Opcode: verbs.Send}) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, h, err := newHostile(t, a, b, rsocket.ConnData{Credits: 0x64})
			if err != nil {
				t.Fatal(err)
			}
			tc.do(h)
			within(t, "Read", func() {
				// What came before is data.
				if _, err = io.Copy(io.Discard, s); !errors.Is(err, transport.ErrStreamProtocol) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("Read: %v", err)
				}
				if _, err := s.Write([]byte("x")); !errors.Is(err, transport.ErrStreamProtocol) {
					t.Errorf("Write: %v", err)
				}
				if err := h.qp.Wait(t.Context()); err != nil {
					t.Errorf("the peer is told: %v", err)
				}
			})
		})
	}
	t.Run("a buffer that does not exist", func(t *testing.T) {
		s, _, err := newHostile(t, a, b, rsocket.ConnData{Credits: 100, Data: rsocket.Buffer{Addr: 1 << 60, RKey: 1, Length: 1 << 20}})
		if err != nil {
			t.Fatal(err)
		}
		within(t, "ReadFrom", func() {
			if _, err := s.ReadFrom(endless{}); !errors.Is(err, syscall.ECONNRESET) || !errors.Is(err, verbs.RemAccessErr) {
				t.Errorf("writing into it: %v", err)
			}
		})
	})
	t.Run("connection data", func(t *testing.T) {
		for _, hello := range []rsocket.ConnData{
			{Credits: 0},
			{Credits: 1, Data: rsocket.Buffer{Addr: ^uint64(0), Length: 100}},
			{Credits: 1, Target: rsocket.Buffer{Addr: 1, Length: 1}},
		} {
			if _, _, err := newHostile(t, a, b, hello); !errors.Is(err, transport.ErrStreamProtocol) {
				t.Errorf("%+v: %v", hello, err)
			}
		}
	})
	// Another stream between the same devices has not noticed.
	if _, err := good.Write([]byte("hello")); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(io.LimitReader(goodPeer, 5)); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestStreamIdle: streams hold no goroutine, and closed ones nothing.
func TestStreamIdle(t *testing.T) {
	a, b := open(t, "127.1.59.1", transport.Config{}), open(t, "127.1.59.2", transport.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, qps0, objects0 := transport.Tables(a)
	for range 20 {
		x, y, err := openStreams(ctx, a, b, transport.StreamConfig{SendBuffer: 4096, RecvBuffer: 4096})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := x.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		if n, err := y.Read(make([]byte, 9)); n != 1 || err != nil {
			t.Error(n, err)
		}
		_ = y.Close()
		_ = x.Close()
	}
	if _, qps, objects := transport.Tables(a); qps != qps0 || objects != objects0 {
		t.Errorf("%d queue pairs and %d objects left, %d and %d before", qps, objects, qps0, objects0)
	}
}

// TestStreamAllocs: nothing is allocated for a message in steady state, with deadlines set
// for each.
func TestStreamAllocs(t *testing.T) {
	if raceEnabled || !transport.Direct {
		t.Skip("the race detector, or package net, allocates")
	}
	a, b := open(t, "127.1.60.1", transport.Config{}), open(t, "127.1.60.2", transport.Config{})
	x, y := streamPair(t, a, b, transport.StreamConfig{SendBuffer: 1 << 16, RecvBuffer: 1 << 16})
	go func() { _, _ = io.Copy(y, y) }()
	buf := make([]byte, 3000)
	turn := func() {
		_ = x.SetDeadline(time.Now().Add(time.Minute))
		if _, err := x.Write(buf); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(x, buf); err != nil {
			t.Fatal(err)
		}
	}
	for range 500 {
		turn()
	}
	if n := testing.AllocsPerRun(500, turn); n >= 1 {
		t.Errorf("%v allocations for a message there and back", n)
	}
}
