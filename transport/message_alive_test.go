package transport_test

import (
	"errors"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestMessageKeepAlive: a peer whose process dies without a word is found out by a side that
// only receives, and by one that is in no call at all.
func TestMessageKeepAlive(t *testing.T) {
	a, b := open(t, "127.2.30.1", transport.Config{}), open(t, "127.2.30.2", transport.Config{})
	cfg := transport.MessageConfig{KeepAlive: 5 * time.Millisecond, RetryCnt: 1, AckTimeout: 20 * time.Millisecond, Linger: -1}
	x, y := conns(t, a, b, cfg, transport.MessageConfig{Linger: -1})
	idle, _ := conns(t, a, b, cfg, transport.MessageConfig{Linger: -1})
	ctx := deadline(t)
	if err := y.Send(ctx, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Recv(ctx); err != nil {
		t.Fatal(err)
	}
	transport.Kill(b)
	if _, err := x.Recv(ctx); !errors.Is(err, transport.ErrDisconnected) || !errors.Is(err, verbs.RetryExcErr) {
		t.Errorf("receiving from a dead peer: %v", err)
	}
	waitCounter(t, a, "the idle connection's end", func() bool { return transport.Failed(idle) })
	if err := idle.Send(ctx, nil); !errors.Is(err, transport.ErrDisconnected) {
		t.Errorf("sending to a dead peer: %v", err)
	}
}

// TestMessageKeepAliveIsQuiet: keepalives take no receive of a peer whose program does nothing,
// and no room of this side's; a negative KeepAlive is none.
func TestMessageKeepAliveIsQuiet(t *testing.T) {
	a, b := open(t, "127.2.31.1", transport.Config{}), open(t, "127.2.31.2", transport.Config{})
	often := transport.MessageConfig{KeepAlive: time.Millisecond, Buffers: 1}
	x, y := conns(t, a, b, often, transport.MessageConfig{KeepAlive: -1, Buffers: 1})
	before := a.Counters()["qp_packets_sent"]
	waitCounter(t, a, "keepalives", func() bool { return a.Counters()["qp_packets_sent"] >= before+30 })
	ctx := deadline(t)
	for i := range 50 {
		if err := x.Send(ctx, payload(i, 1000)); err != nil {
			t.Fatal(err)
		}
		if p, err := y.Recv(ctx); err != nil || len(p) != 1000 {
			t.Fatal(len(p), err)
		}
	}
	if n := b.Counters()["qp_rnr_naks_sent"]; n != 0 {
		t.Errorf("%d messages found no receive", n)
	}
	if transport.Asks(y) || !transport.Asks(x) {
		t.Error("keepalives where none are wanted, or none where they are")
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if transport.Asks(x) {
		t.Error("a closed connection asks on")
	}
}

// TestMessageOvertaken: a goroutine that has looked in vain and is about to sleep, or sleeps,
// while another takes the completions that it waits for, looks again: it would not find them in
// the queue.
func TestMessageOvertaken(t *testing.T) {
	a, b := open(t, "127.2.32.1", transport.Config{}), open(t, "127.2.32.2", transport.Config{})
	x, y := conns(t, a, b, transport.MessageConfig{KeepAlive: -1}, transport.MessageConfig{KeepAlive: -1})
	ctx := deadline(t)
	looks, rung := transport.Overtake(x, func() {
		if err := y.Send(ctx, []byte("news")); err != nil {
			t.Error(err)
		}
	})
	if !looks {
		t.Error("who was about to sleep would sleep, with a message there")
	}
	if !rung {
		t.Error("who slept would sleep on, with a message there")
	}
	if p, err := x.Recv(ctx); err != nil || string(p) != "news" {
		t.Error(p, err)
	}
}
