package transport_test

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// pingPong bounces empty messages over a queue pair of two devices, each end in a goroutine that
// waits for each of its completions.
func pingPong(t *testing.T, qa, qb *transport.QP, rounds int) {
	t.Helper()
	ctx := deadline(t)
	for range rounds {
		for _, q := range []*transport.QP{qa, qb} {
			if err := q.PostRecv(verbs.RecvWR{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	send := verbs.SendWR{Opcode: verbs.Send}
	end := func(q *transport.QP, first bool) error {
		for i := range rounds {
			if i > 0 || !first {
				if wc, err := q.CQ().Next(ctx); err != nil || wc.Status != verbs.WCSuccess {
					t.Errorf("round %d: %v, %v", i, wc.Status, err)
					return err
				}
			}
			if err := q.PostSend(send); err != nil {
				return err
			}
		}
		return nil
	}
	done := make(chan error)
	go func() { done <- end(qb, false) }()
	if err := end(qa, true); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestWaiterReceives: the only waiter of a device sleeps in the receiving call.
func TestWaiterReceives(t *testing.T) {
	if !udp.Direct {
		t.Skip("the portable socket path has a goroutine that receives")
	}
	const rounds = 500
	cfg := transport.Config{Spin: -1, Wires: 1}
	a, b := open(t, "127.1.42.1", cfg), open(t, "127.1.42.2", cfg)
	depth := transport.ConnParam{Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: rounds}}
	qa, qb := pair(t, a, b, depth, depth)
	pingPong(t, qa, qb, rounds)
	for _, d := range []*transport.Device{a, b} {
		if n := d.Counters()["udp_rx_awaits"]; n == 0 {
			t.Error("no message came by a sleep in the receiving call")
		}
	}
}

// TestWaiterLeavesPackets: when others looked at the socket again and again while the waiter kept
// the packets, it leaves them alone for many sleeps; after a sleep in vain until the end of that
// wait.
func TestWaiterLeavesPackets(t *testing.T) {
	if !udp.Direct {
		t.Skip("the portable socket path has a goroutine that receives")
	}
	d := open(t, "127.1.42.3", transport.Config{Spin: -1, Wires: 1})
	for _, c := range []struct {
		name       string
		idle       bool
		missed     int
		until      time.Duration
		most, want int
	}{
		{"nobody looked", false, 0, time.Hour, 10, 10},
		{"the thread looked", false, 2, time.Hour, 10, 10},
		{"somebody polls", false, 1000, time.Hour, 2000, 2000 - 1024},
		{"in vain", true, 0, time.Hour, 10, 0},
		{"a deadline that was moved", false, 0, time.Millisecond, 10, 10},
	} {
		if got := transport.ClaimsAfter(t, d, c.idle, c.missed, c.until, c.most); got != c.want {
			t.Errorf("%s: %d claims, want %d", c.name, got, c.want)
		}
	}
}
