package bench

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
)

// messagePair connects two devices for a message test.
func messagePair(t *testing.T, client, server string, cfg transport.MessageConfig) (x, y *transport.Conn) {
	t.Helper()
	devA, devB := open(t, client, transport.Config{}), open(t, server, transport.Config{})
	ctx := deadline(t)
	ln, err := cfg.Listen(devB, netip.AddrPortFrom(netip.Addr{}, servicePort))
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
	x, err = cfg.Dial(ctx, devA, netip.AddrPortFrom(devB.LocalAddr().Addr(), servicePort))
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = x.Close() // tests may have closed it
		_ = y.Close()
	})
	return x, y
}

func TestMessageTest(t *testing.T) {
	x, y := messagePair(t, "127.3.57.1", "127.3.57.2", transport.MessageConfig{Compression: transport.CompressS2})
	ctx := deadline(t)
	type served struct {
		messages, size uint64
		err            error
	}
	done := make(chan served, 1)
	go func() {
		n, size, err := ServeMessages(ctx, y)
		done <- served{n, size, err}
	}()
	m := MessageTest{Payload: Payload("text", 3000), Iters: 700}
	if err := m.Warm(ctx, ctx, x); err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(ctx, ctx, x)
	if err != nil || r.Iters != 700 || r.Size != 3000 || r.Elapsed <= 0 || r.Interrupted {
		t.Errorf("%+v, %v", r, err)
	}
	if got, want := r.Average, r.Rate*3000; got != want || want*r.Elapsed.Seconds() < 2.09e6 {
		t.Errorf("average %v, rate %v", got, r.Rate)
	}
	interrupt, cancel := context.WithCancel(ctx)
	time.AfterFunc(20*time.Millisecond, cancel)
	m = MessageTest{Payload: Payload("random", 10), Duration: time.Hour}
	if r, err = m.Run(ctx, interrupt, x); !errors.Is(err, ErrInterrupted) || !r.Interrupted {
		t.Errorf("interrupted: %+v, %v", r, err)
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if s := <-done; s.err != nil || s.messages != 1400+r.Iters || s.size != 1400*3000+10*r.Iters {
		t.Errorf("the server has %+v", s)
	}
}

func TestMessageTestLies(t *testing.T) {
	x, y := messagePair(t, "127.3.58.1", "127.3.58.2", transport.MessageConfig{})
	ctx := deadline(t)
	go func() {
		for {
			p, err := y.Recv(ctx)
			if err != nil {
				return
			}
			if len(p) == 0 {
				_ = y.Send(ctx, report(3, 30, 0)) // the client sees what is wrong with it
			}
		}
	}()
	m := MessageTest{Payload: Payload("zero", 10), Iters: 4}
	if _, err := m.Run(ctx, ctx, x); err == nil {
		t.Error("a server that lost a message was believed")
	}
	_ = y.Close()
	if _, err := m.Run(ctx, ctx, x); !errors.Is(err, ErrPeerGone) {
		t.Errorf("a server that has gone: %v", err)
	}
}

func TestPayload(t *testing.T) {
	for _, sort := range Payloads {
		if got := len(Payload(sort, 1234)); got != 1234 {
			t.Errorf("%s: %d bytes", sort, got)
		}
	}
	if Payload("other", 5) != nil {
		t.Error("a sort that is none")
	}
}
