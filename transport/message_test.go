package transport_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const messagePort = 7480

// conns connects two devices for messages and closes both ends when the test is over.
func conns(t testing.TB, a, b *transport.Device, ca, cb transport.MessageConfig) (x, y *transport.Conn) {
	t.Helper()
	ctx := deadline(t)
	ln, err := cb.Listen(b, netip.AddrPortFrom(netip.Addr{}, messagePort))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() {
		var err error
		y, err = ln.Accept(ctx)
		accepted <- err
	}()
	if ca.RemotePort == 0 {
		ca.RemotePort = b.LocalAddr().Port()
	}
	x, err = ca.Dial(ctx, a, netip.AddrPortFrom(b.LocalAddr().Addr(), messagePort))
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = x.Close() // tests may have closed it
		_ = y.Close()
	})
	return x, y
}

// payload returns n bytes that depend on i: compressible if i is even.
func payload(i, n int) []byte {
	b := make([]byte, n)
	if i%2 == 0 {
		copy(b, bytes.Repeat(fmt.Appendf(nil, "message %d of some, ", i), n/16+1))
		return b
	}
	src := rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)})
	_, _ = src.Read(b)
	return b
}

func TestMessagesEveryForm(t *testing.T) {
	sizes := []int{0, 1, 255, 256, 257, 1000, 4096, 5000, 65535, 65536}
	n := 0
	for _, c := range []struct{ a, b, want transport.Compression }{
		{transport.CompressNone, transport.CompressNone, transport.CompressNone},
		{transport.CompressS2, transport.CompressS2, transport.CompressS2},
		{transport.CompressZstd, transport.CompressS2, transport.CompressZstd},
		{transport.CompressS2, transport.CompressNone, transport.CompressNone},
	} {
		t.Run(fmt.Sprintf("%v to %v", c.a, c.b), func(t *testing.T) {
			n++
			a := open(t, fmt.Sprintf("127.2.%d.1", n), transport.Config{})
			b := open(t, fmt.Sprintf("127.2.%d.2", n), transport.Config{})
			x, y := conns(t, a, b, transport.MessageConfig{Compression: c.a}, transport.MessageConfig{Compression: c.b})
			if x.Compression() != c.want || x.MaxMessage() != 65536 {
				t.Fatalf("compression %v, at most %d bytes", x.Compression(), x.MaxMessage())
			}
			ctx := deadline(t)
			done := make(chan error, 1)
			go func() { done <- echoEveryForm(ctx, y) }()
			for i, size := range append(sizes, sizes...) {
				want := payload(i/len(sizes), size)
				if err := sendForm(ctx, x, i, want); err != nil {
					t.Fatalf("%d bytes: send: %v", size, err)
				}
				got, err := recvForm(ctx, x, i+i/3)
				if err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%d bytes: received %d, %v, equal %v", size, len(got), err, bytes.Equal(got, want))
				}
			}
			if err := x.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, io.EOF) {
				t.Errorf("the echo ended with %v", err)
			}
		})
	}
}

// sendForm sends by one of the two ways, recvForm receives by one of three.
func sendForm(ctx context.Context, c *transport.Conn, i int, p []byte) error {
	if i%2 == 0 {
		return c.Send(ctx, p)
	}
	b, err := c.Alloc(ctx, c.MaxMessage())
	if err != nil {
		return err
	}
	b.Resize(copy(b.Bytes(), p))
	return c.SendBuffer(ctx, b)
}

func recvForm(ctx context.Context, c *transport.Conn, i int) ([]byte, error) {
	switch i % 3 {
	case 0:
		return c.Recv(ctx)
	case 1:
		p := make([]byte, c.MaxMessage())
		n, err := c.RecvInto(ctx, p)
		return p[:n], err
	}
	b, err := c.RecvBuffer(ctx)
	if err != nil {
		return nil, err
	}
	defer b.Release()
	return bytes.Clone(b.Bytes()), nil
}

func echoEveryForm(ctx context.Context, c *transport.Conn) error {
	for i := 0; ; i++ {
		p, err := recvForm(ctx, c, i)
		if err != nil {
			return err
		}
		if err := sendForm(ctx, c, i/2, p); err != nil {
			return err
		}
	}
}

// TestMessagesBothWays: many goroutines send and receive at both ends, through few buffers and
// many; every message arrives once, each sender's in order, and none finds the receive queue
// empty.
func TestMessagesBothWays(t *testing.T) {
	const senders = 3
	for i, buffers := range []struct{ a, b int }{{1, 1}, {1, 7}, {2, 3}, {5, 4}, {32, 64}} {
		t.Run(fmt.Sprintf("%d and %d buffers", buffers.a, buffers.b), func(t *testing.T) {
			count := 400
			if raceEnabled || testing.Short() {
				count = 300
			}
			a := open(t, fmt.Sprintf("127.2.%d.1", 10+i), transport.Config{})
			b := open(t, fmt.Sprintf("127.2.%d.2", 10+i), transport.Config{})
			x, y := conns(t, a, b, transport.MessageConfig{Buffers: buffers.a, MaxMessage: 3000}, transport.MessageConfig{Buffers: buffers.b, MaxMessage: 2000})
			if x.MaxMessage() != 2000 || y.MaxMessage() != 2000 {
				t.Fatalf("longest messages %d and %d, want the smaller 2000", x.MaxMessage(), y.MaxMessage())
			}
			ctx := deadline(t)
			var wg sync.WaitGroup
			for _, c := range []*transport.Conn{x, y} {
				for s := range senders {
					wg.Go(func() {
						for n := range count {
							p := payload(n, 8+(n*37+s)%1500)
							binary.BigEndian.PutUint32(p, uint32(s))
							binary.BigEndian.PutUint32(p[4:], uint32(n))
							if err := sendForm(ctx, c, n+s, p); err != nil {
								t.Errorf("send: %v", err)
								return
							}
						}
					})
				}
				wg.Go(func() { // one receiver, so that order can be seen
					var next [senders]uint32
					for n := range senders * count {
						p, err := recvForm(ctx, c, n)
						if err != nil {
							t.Errorf("receive: %v", err)
							return
						}
						s, i := binary.BigEndian.Uint32(p), binary.BigEndian.Uint32(p[4:])
						want := payload(int(i), 8+int(i*37+s)%1500)
						if s >= senders || next[s] != i || !bytes.Equal(p[8:], want[8:]) {
							t.Errorf("message %d of sender %d out of order or damaged", i, s)
							return
						}
						next[s]++
					}
				})
			}
			wg.Wait()
			for _, d := range []*transport.Device{a, b} {
				if n := d.Counters()["qp_rnr_naks_sent"]; n != 0 {
					t.Errorf("%d messages found no receive", n)
				}
			}
		})
	}
}

// TestMessagesManyReceivers: several goroutines receive from one connection, and post receives
// again side by side; each message comes to one of them, and none finds the queue empty.
func TestMessagesManyReceivers(t *testing.T) {
	const receivers = 4
	count := 2000
	if yield.Enabled {
		count *= 20
	}
	a, b := open(t, "127.2.16.1", transport.Config{}), open(t, "127.2.16.2", transport.Config{})
	x, y := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{Buffers: 8})
	ctx := deadline(t)
	seen := make([]atomic.Int32, count)
	var wg sync.WaitGroup
	for range receivers {
		wg.Go(func() {
			for {
				p, err := y.Recv(ctx)
				if errors.Is(err, io.EOF) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				seen[binary.BigEndian.Uint32(p)].Add(1)
			}
		})
	}
	var p [4]byte
	for i := range count {
		binary.BigEndian.PutUint32(p[:], uint32(i))
		if err := x.Send(ctx, p[:]); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	for i := range seen {
		if n := seen[i].Load(); n != 1 {
			t.Fatalf("message %d was received %d times", i, n)
		}
	}
	if n := b.Counters()["qp_rnr_naks_sent"]; n != 0 {
		t.Errorf("%d messages found no receive", n)
	}
}

// TestMessageBackpressure: a sender gets as far as its peer's buffers reach, is stopped by its
// context without losing or doubling anything, and goes on when the peer consumes.
func TestMessageBackpressure(t *testing.T) {
	a, b := open(t, "127.2.17.1", transport.Config{}), open(t, "127.2.17.2", transport.Config{})
	const buffers = 5
	x, y := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{Buffers: buffers})
	ctx := deadline(t)
	for i := range buffers {
		if err := x.Send(ctx, []byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if err := x.Send(short, []byte{99}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a message beyond the peer's buffers: %v", err)
	}
	held, err := y.RecvBuffer(ctx)
	if err != nil || held.Bytes()[0] != 0 {
		t.Fatal(held, err)
	}
	// Held is not consumed: three more consumed make the report that lets three more go.
	for i := 1; i <= 3; i++ {
		if p, err := y.Recv(ctx); err != nil || p[0] != byte(i) {
			t.Fatal(p, err)
		}
	}
	for i := buffers; i < buffers+3; i++ {
		if err := x.Send(ctx, []byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	short2, cancel2 := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel2()
	if err := x.Send(short2, []byte{99}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a message for the buffer that is held: %v", err)
	}
	held.Release()
	held.Release() // once is enough; twice changes nothing
	for i := 4; i < buffers+3; i++ {
		if p, err := y.Recv(ctx); err != nil || p[0] != byte(i) {
			t.Fatal(p, err)
		}
	}
	if n := b.Counters()["qp_rnr_naks_sent"]; n != 0 {
		t.Errorf("%d messages found no receive", n)
	}
}

func TestMessageTooLong(t *testing.T) {
	a, b := open(t, "127.2.18.1", transport.Config{}), open(t, "127.2.18.2", transport.Config{})
	x, y := conns(t, a, b, transport.MessageConfig{MaxMessage: 500}, transport.MessageConfig{MaxMessage: 300})
	ctx := deadline(t)
	for _, err := range []error{
		x.Send(ctx, make([]byte, 301)),
		func() error { _, err := y.Alloc(ctx, 301); return err }(),
	} {
		if !errors.Is(err, transport.ErrMessageTooLong) || !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("got %v, want ErrMessageTooLong", err)
		}
	}
	if err := x.Send(ctx, payload(1, 300)); err != nil {
		t.Fatal(err)
	}
	if n, err := y.RecvInto(ctx, make([]byte, 299)); n != 300 || !errors.Is(err, io.ErrShortBuffer) {
		t.Errorf("a short buffer: %d, %v", n, err)
	}
	p := make([]byte, 1000)
	if n, err := y.RecvInto(ctx, p); err != nil || !bytes.Equal(p[:n], payload(1, 300)) {
		t.Errorf("the message after all: %d bytes, %v", n, err)
	}
}

// TestMessageAllocLimits: buffers in the program's hands are its own, and given back they serve
// again.
func TestMessageAllocLimits(t *testing.T) {
	a, b := open(t, "127.2.19.1", transport.Config{}), open(t, "127.2.19.2", transport.Config{})
	x, y := conns(t, a, b, transport.MessageConfig{Buffers: 2}, transport.MessageConfig{})
	ctx := deadline(t)
	b1, err := x.Alloc(ctx, 1000)
	if err != nil {
		t.Fatal(err)
	}
	b2, err := x.Alloc(ctx, 1000)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := x.Alloc(short, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a third of two buffers: %v", err)
	}
	if err := x.Send(ctx, []byte("small ones need none")); err != nil {
		t.Fatal(err)
	}
	freed := make(chan error, 1)
	go func() {
		// Without a context that can end: a sleeper who has one looks up now and then.
		b, err := x.Alloc(context.Background(), 7)
		if err == nil {
			b.Release()
		}
		freed <- err
	}()
	time.Sleep(5 * time.Millisecond) // so that it does wait, asleep; correct either way
	b1.Release()
	select {
	case err := <-freed:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("a buffer was released, and nobody woke")
	}
	if err := x.SendBuffer(ctx, b1); err == nil {
		t.Error("a released buffer was sent")
	}
	if err := y.SendBuffer(ctx, b2); err == nil {
		t.Error("another connection's buffer was sent")
	}
	copy(b2.Bytes(), payload(1, 1000))
	if err := x.SendBuffer(ctx, b2); err != nil {
		t.Fatal(err)
	}
	if _, err := y.Recv(ctx); err != nil {
		t.Fatal(err)
	}
	if p, err := y.Recv(ctx); err != nil || !bytes.Equal(p, payload(1, 1000)) {
		t.Fatal(len(p), err)
	}
}

func TestMessageClose(t *testing.T) {
	a, b := open(t, "127.2.20.1", transport.Config{}), open(t, "127.2.20.2", transport.Config{})
	ctx := deadline(t)
	t.Run("everything sent arrives, then EOF", func(t *testing.T) {
		x, y := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{})
		for i := range 20 {
			if err := x.Send(ctx, payload(i, 5000)); err != nil {
				t.Fatal(err)
			}
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
		if err := x.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closing twice: %v", err)
		}
		for i := range 20 {
			if p, err := y.Recv(ctx); err != nil || !bytes.Equal(p, payload(i, 5000)) {
				t.Fatalf("message %d: %d bytes, %v", i, len(p), err)
			}
		}
		for range 2 {
			if _, err := y.Recv(ctx); !errors.Is(err, io.EOF) {
				t.Errorf("after the end: %v", err)
			}
		}
		if err := y.Send(ctx, []byte("anybody?")); !errors.Is(err, transport.ErrDisconnected) {
			t.Errorf("sending to a peer that has closed: %v", err)
		}
		for what, err := range map[string]error{
			"Send": x.Send(ctx, nil), "SendBuffer": second(x.Alloc(ctx, 1)), "Recv": second(x.Recv(ctx)),
			"RecvInto": second(x.RecvInto(ctx, nil)), "RecvBuffer": second(x.RecvBuffer(ctx)),
		} {
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s after Close: %v", what, err)
			}
		}
	})
	t.Run("calls that wait return", func(t *testing.T) {
		x, y := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{Buffers: 1})
		_ = y
		if err := x.Send(ctx, nil); err != nil {
			t.Fatal(err)
		}
		errs := make(chan error, 4)
		go func() { errs <- second(x.Recv(ctx)) }()
		go func() { errs <- second(x.RecvBuffer(ctx)) }()
		go func() { errs <- x.Send(ctx, nil) }()
		go func() { errs <- x.Send(ctx, make([]byte, 4000)) }()
		time.Sleep(10 * time.Millisecond) // so that most of them do wait; correct either way
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			if err := <-errs; !errors.Is(err, net.ErrClosed) {
				t.Errorf("a call in Close: %v", err)
			}
		}
	})
	t.Run("both at once", func(t *testing.T) {
		for range 20 {
			x, y := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{})
			var wg sync.WaitGroup
			for _, c := range []*transport.Conn{x, y} {
				wg.Go(func() {
					if err := errors.Join(c.Send(ctx, []byte("bye")), c.Close()); err != nil && !errors.Is(err, transport.ErrDisconnected) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		}
	})
	t.Run("before the RTU", func(t *testing.T) {
		x, y := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{})
		if err := errors.Join(y.Send(ctx, []byte("greeting")), y.Close()); err != nil {
			t.Fatal(err)
		}
		if p, err := x.Recv(ctx); err != nil || string(p) != "greeting" {
			t.Fatal(p, err)
		}
	})
	if conns, qps, _ := transport.Tables(a); qps != 0 {
		t.Errorf("%d queue pairs and %d connections are left", qps, conns)
	}
}

func second[T any](_ T, err error) error { return err }

func TestMessagePeerGone(t *testing.T) {
	ctx := deadline(t)
	quick := transport.MessageConfig{RetryCnt: 1, AckTimeout: 20 * time.Millisecond, Linger: 50 * time.Millisecond}
	t.Run("killed", func(t *testing.T) {
		a, b := open(t, "127.2.21.1", transport.Config{}), open(t, "127.2.21.2", transport.Config{})
		x, _ := conns(t, a, b, quick, transport.MessageConfig{Linger: -1})
		transport.Kill(b)
		if err := x.Send(ctx, []byte("hello?")); err != nil {
			t.Fatal(err)
		}
		_, err := x.Recv(ctx)
		if !errors.Is(err, transport.ErrDisconnected) || !errors.Is(err, verbs.RetryExcErr) {
			t.Errorf("receiving from a dead peer: %v", err)
		}
		if err := x.Send(ctx, []byte("hello?")); !errors.Is(err, transport.ErrDisconnected) {
			t.Errorf("sending to a dead peer: %v", err)
		}
	})
	t.Run("its device closed", func(t *testing.T) {
		a, b := open(t, "127.2.22.1", transport.Config{}), open(t, "127.2.22.2", transport.Config{})
		x, y := conns(t, a, b, quick, transport.MessageConfig{})
		if err := y.Send(ctx, []byte("last words")); err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 1)
		go func() { got <- second(y.Recv(ctx)) }()
		if p, err := x.Recv(ctx); err != nil || string(p) != "last words" {
			t.Fatal(p, err)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-got; !errors.Is(err, net.ErrClosed) {
			t.Errorf("a call while its device closes: %v", err)
		}
		if err := y.Send(ctx, nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("sending on a closed device: %v", err)
		}
		if _, err := x.Recv(ctx); !errors.Is(err, transport.ErrDisconnected) {
			t.Errorf("the other side: %v", err)
		}
	})
}

func TestMessageConfigErrors(t *testing.T) {
	dev := open(t, "127.2.23.1", transport.Config{})
	ctx := deadline(t)
	for name, c := range map[string]transport.MessageConfig{
		"Buffers": {Buffers: 4097}, "negative Buffers": {Buffers: -1}, "MaxMessage": {MaxMessage: 1<<30 + 1},
		"negative MaxMessage": {MaxMessage: -1}, "together": {MaxMessage: 1 << 30, Buffers: 2}, "Compression": {Compression: 3},
	} {
		if _, err := c.Dial(ctx, dev, netip.MustParseAddrPort("127.2.23.2:1")); err == nil {
			t.Errorf("%s: Dial took it", name)
		}
		if _, err := c.Listen(dev, netip.AddrPortFrom(netip.Addr{}, messagePort)); err == nil {
			t.Errorf("%s: Listen took it", name)
		}
	}
}

// TestMessageForeigners: what does not speak the protocol is told so, and does not disturb
// those who do.
func TestMessageForeigners(t *testing.T) {
	a, b := open(t, "127.2.24.1", transport.Config{}), open(t, "127.2.24.2", transport.Config{})
	ctx := deadline(t)
	ln, err := b.ListenConn(netip.AddrPortFrom(netip.Addr{}, messagePort))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() { accepted <- second(ln.Accept(ctx)) }()
	to := netip.AddrPortFrom(b.LocalAddr().Addr(), messagePort)
	for name, private := range map[string][]byte{
		"none": nil, "other": []byte("GET / HTTP/1.0"), "version": []byte("Dmsg\x02\x00\x00\x20\x00\x01\x00\x00"),
		"no buffers": []byte("Dmsg\x01\x00\x00\x00\x00\x01\x00\x00"), "2 GiB": []byte("Dmsg\x01\x00\x00\x20\x80\x00\x00\x00"),
	} {
		_, err := a.Dial(ctx, to, transport.ConnParam{PrivateData: private})
		var rej *transport.RejectError
		if !errors.As(err, &rej) || rej.Reason != verbs.RejectConsumer || !bytes.Contains(rej.PrivateData, []byte("exchange messages")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	x, err := a.DialConn(ctx, to)
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	_ = x.Close()

	verbsLn := listen(t, b, messagePort+1)
	go func() {
		if req, err := verbsLn.Next(ctx); err == nil {
			_, _ = req.Accept(ctx, transport.ConnParam{PrivateData: []byte("something else")})
		}
	}()
	if _, err := a.DialConn(ctx, netip.AddrPortFrom(to.Addr(), messagePort+1)); !errors.Is(err, transport.ErrNotMessages) {
		t.Errorf("dialing another service: %v", err)
	}
	_ = ln.Close()
	if _, err := ln.Accept(ctx); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	if _, err := a.DialConn(ctx, to); err == nil {
		t.Error("connected to a closed listener")
	}
}

// TestMessageLiars: a peer that breaks the rules loses its connection, with an error that says
// what it did, and nothing else happens.
func TestMessageLiars(t *testing.T) {
	const data, packed, credit, end = 1, 2, 3, 4
	block := append([]byte{1, 0, 0, 1, 0, 0, 0, 0, 20}, make([]byte, 20)...) // S2, 256 bytes in 20
	bomb := append([]byte{1, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 20}, make([]byte, 20)...)
	type msg struct {
		imm     uint32
		payload []byte
		plain   bool // no immediate
	}
	repeat := func(n int, m msg) (ms []msg) {
		for range n {
			ms = append(ms, m)
		}
		return ms
	}
	a, b := open(t, "127.2.25.1", transport.Config{}), open(t, "127.2.25.2", transport.Config{})
	good, alsoGood := conns(t, a, b, transport.MessageConfig{}, transport.MessageConfig{})
	ctx := deadline(t)
	const buffers = 3
	for _, tc := range []struct {
		name   string
		msgs   []msg
		accept transport.Compression
		ok     int // good messages before
	}{
		{"no immediate", []msg{{plain: true}}, 0, 0},
		{"kind 0", []msg{{imm: 0}}, 0, 0},
		{"kind 5", []msg{{imm: 5}}, 0, 0},
		{"reserved bits", []msg{{imm: data | 1<<8}}, 0, 0},
		{"a second message that is bad", []msg{{imm: data}, {imm: 77}}, 0, 1},
		{"consumed what was not sent", []msg{{imm: data | 1<<16}}, 0, 0},
		{"consumed 65535", []msg{{imm: credit | 65535<<16}}, 0, 0},
		{"credit with a payload", []msg{{imm: credit, payload: []byte("x")}}, 0, 0},
		{"end with a payload", []msg{{imm: end, payload: []byte("x")}}, 0, 0},
		{"message after the end", []msg{{imm: end}, {imm: data}}, 0, 0},
		{"beyond its credits", repeat(buffers+1, msg{imm: data}), 0, buffers},
		{"compressed, not agreed", []msg{{imm: packed, payload: block}}, transport.CompressNone, 0},
		{"no block", []msg{{imm: packed, payload: []byte("abc")}}, transport.CompressS2, 0},
		{"a block that is nonsense", []msg{{imm: packed, payload: block}}, transport.CompressS2, 0},
		{"a block of 4 GiB", []msg{{imm: packed, payload: bomb}}, transport.CompressS2, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ln, err := transport.MessageConfig{Buffers: buffers, MaxMessage: 1000, Compression: tc.accept}.
				Listen(b, netip.AddrPortFrom(netip.Addr{}, messagePort+2))
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			dialed := make(chan *transport.QP, 1)
			go func() {
				qp, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), messagePort+2), transport.ConnParam{
					PrivateData: []byte("Dmsg\x01\x03\x00\x20\x00\x01\x00\x00"),
				})
				if err != nil {
					t.Error(err)
				}
				dialed <- qp
			}()
			victim, err := ln.Accept(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer victim.Close()
			liar := <-dialed
			if liar == nil {
				t.FailNow()
			}
			defer liar.Close()
			for _, m := range tc.msgs {
				wr := verbs.SendWR{Opcode: verbs.SendWithImm, ImmData: m.imm, InlineData: m.payload}
				if m.plain {
					wr.Opcode = verbs.Send
				}
				if err := liar.PostSend(wr); err != nil {
					t.Fatal(err)
				}
			}
			n := 0
			for ; err == nil; n++ {
				// Not before everything has arrived, or credits come back.
				if n == 0 && len(tc.msgs) > buffers {
					waitCounter(t, b, "liar's messages", func() bool { return transport.Arrived(victim) >= len(tc.msgs) })
				}
				_, err = victim.Recv(ctx)
			}
			if errors.Is(err, io.EOF) { // what follows an end is seen by the next call
				waitCounter(t, b, "the message after the end", func() bool {
					transport.Arrived(victim)
					err = victim.Send(ctx, nil)
					return errors.Is(err, transport.ErrMessageProtocol)
				})
			}
			if !errors.Is(err, transport.ErrMessageProtocol) || n-1 != tc.ok {
				t.Errorf("after %d messages, want %d: %v", n-1, tc.ok, err)
			}
			if err := victim.Send(ctx, nil); !errors.Is(err, transport.ErrMessageProtocol) {
				t.Errorf("sending afterwards: %v", err)
			}
			if err := liar.Wait(ctx); err != nil {
				t.Errorf("the liar was told: %v", err)
			}
		})
	}
	if err := good.Send(ctx, []byte("still here")); err != nil {
		t.Fatal(err)
	}
	if p, err := alsoGood.Recv(ctx); err != nil || string(p) != "still here" {
		t.Fatal(p, err)
	}
}

func waitCounter(t *testing.T, d *transport.Device, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%s: not in time; counters %v", what, d.Counters())
		}
	}
}

// lossyData loses datagrams of a device at random, none of the connection manager's.
type lossyData struct {
	link.Link
	rnd *rand.Rand
	p   float64
}

func (l *lossyData) Send(msgs []link.Tx) (int, error) {
	for i := range msgs {
		if cmKind(&msgs[i]) == 0 && l.rnd.Float64() < l.p {
			continue
		}
		if n, err := l.Link.Send(msgs[i : i+1]); err != nil || n == 0 {
			return i, err
		}
	}
	return len(msgs), nil
}

// TestMessagesUnderLoss: loss is repaired below, and credits and ends that were lost with it.
func TestMessagesUnderLoss(t *testing.T) {
	const seed = 1
	a, b := open(t, "127.2.26.1", transport.Config{}), open(t, "127.2.26.2", transport.Config{})
	for i, d := range []*transport.Device{a, b} {
		transport.Interpose(d, func(l link.Link) link.Link {
			return &lossyData{Link: l, rnd: rand.New(rand.NewPCG(seed, uint64(i))), p: 0.05}
		})
	}
	x, y := conns(t, a, b, transport.MessageConfig{Buffers: 4}, transport.MessageConfig{Buffers: 4, Compression: transport.CompressS2})
	ctx := deadline(t)
	count := 600
	if testing.Short() {
		count = 150
	}
	done := make(chan error, 1)
	go func() {
		for i := range count {
			if err := x.Send(ctx, payload(i, i*13%9000)); err != nil {
				done <- err
				return
			}
		}
		done <- x.Close()
	}()
	for i := range count {
		p, err := recvForm(ctx, y, i)
		if err != nil || !bytes.Equal(p, payload(i, i*13%9000)) {
			t.Fatalf("seed %d: message %d: %d bytes, %v", seed, i, len(p), err)
		}
	}
	if _, err := y.Recv(ctx); !errors.Is(err, io.EOF) {
		t.Errorf("seed %d: the end: %v", seed, err)
	}
	if err := <-done; err != nil {
		t.Errorf("seed %d: %v", seed, err)
	}
}

// TestIdleMessageConnections: they hold no goroutine, and when closed leave nothing behind.
func TestIdleMessageConnections(t *testing.T) {
	a, b := open(t, "127.2.27.1", transport.Config{}), open(t, "127.2.27.2", transport.Config{})
	before := runtime.NumGoroutine()
	var all []*transport.Conn
	small := transport.MessageConfig{Buffers: 2, MaxMessage: 1000}
	for range 50 {
		x, y := conns(t, a, b, small, small)
		all = append(all, x, y)
	}
	waitCounter(t, a, "goroutines", func() bool { return runtime.NumGoroutine() <= before })
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, qps, objects := transport.Tables(a); qps != 0 || objects != 0 {
		t.Errorf("%d queue pairs, %d objects are left", qps, objects)
	}
}

func TestMessagesAllocateNothing(t *testing.T) {
	if raceEnabled || !transport.Direct {
		t.Skip("under the race detector a sync.Pool forgets at random, and package net allocates")
	}
	a, b := open(t, "127.2.28.1", transport.Config{}), open(t, "127.2.28.2", transport.Config{})
	ctx := context.Background()
	for _, comp := range []transport.Compression{transport.CompressNone, transport.CompressS2} {
		cfg := transport.MessageConfig{Compression: comp}
		x, y := conns(t, a, b, cfg, cfg)
		for _, size := range []int{64, 4000} {
			msg, buf := payload(0, size), make([]byte, 4096)
			round := func() {
				if err := x.Send(ctx, msg); err != nil {
					t.Fatal(err)
				}
				bb, err := y.RecvBuffer(ctx)
				if err != nil {
					t.Fatal(err)
				}
				back, err := y.Alloc(ctx, len(bb.Bytes()))
				if err != nil {
					t.Fatal(err)
				}
				copy(back.Bytes(), bb.Bytes())
				bb.Release()
				if err := y.SendBuffer(ctx, back); err != nil {
					t.Fatal(err)
				}
				if n, err := x.RecvInto(ctx, buf); n != size || err != nil {
					t.Fatal(n, err)
				}
			}
			for range 50 {
				round()
			}
			if got := testing.AllocsPerRun(200, round); got >= 1 {
				t.Errorf("%v, %d bytes: %v allocations a round trip", comp, size, got)
			}
		}
	}
}

// TestMessageProperty: any sequence of sends and receives is a queue.
func TestMessageProperty(t *testing.T) {
	a, b := open(t, "127.2.29.1", transport.Config{}), open(t, "127.2.29.2", transport.Config{})
	ctx := deadline(t)
	rapid.Check(t, func(rt *rapid.T) {
		buffers := rapid.IntRange(1, 6).Draw(rt, "buffers")
		cfg := transport.MessageConfig{Buffers: buffers, MaxMessage: 2000, Compression: transport.Compression(rapid.IntRange(0, 2).Draw(rt, "compression"))}
		x, y := conns(t, a, b, cfg, cfg)
		defer x.Close()
		defer y.Close()
		queue := map[*transport.Conn][]int{} // by receiver
		held := map[*transport.Conn][]*transport.Buffer{}
		for i := range rapid.IntRange(1, 40).Draw(rt, "steps") {
			from, to := x, y
			if rapid.Bool().Draw(rt, "back") {
				from, to = y, x
			}
			switch op := rapid.IntRange(0, 3).Draw(rt, "op"); {
			case op == 0 && len(held[to]) > 0:
				held[to][0].Release()
				held[to] = held[to][1:]
			case op <= 2 && len(queue[to])+len(held[to]) < buffers/2:
				// Up to half of the buffers a send never waits: what is not reported is the other half.
				if err := sendForm(ctx, from, op, payload(i, i*50)); err != nil {
					rt.Fatal(err)
				}
				queue[to] = append(queue[to], i)
			case len(queue[to]) > 0:
				i := queue[to][0]
				queue[to] = queue[to][1:]
				bb, err := to.RecvBuffer(ctx)
				if err != nil || !bytes.Equal(bb.Bytes(), payload(i, i*50)) {
					rt.Fatalf("message %d: %v", i, err)
				}
				held[to] = append(held[to], bb)
			default:
				short, cancel := context.WithTimeout(ctx, time.Microsecond)
				if _, err := to.Recv(short); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) {
					rt.Fatalf("nothing was sent: %v", err)
				}
				cancel()
			}
		}
	})
}

// netipPort and addrOf name a service port, of ours and of a device.
func netipPort(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.Addr{}, port) }

func addrOf(d *transport.Device, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(d.LocalAddr().Addr(), port)
}
