package qp

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Who was refused is woken when a quarter of the window is free, or all of it.
func TestWindowRoom(t *testing.T) {
	for _, c := range []struct {
		used, need int64
		want       bool
	}{{0, 1000, true}, {7500, 100, true}, {7501, 100, false}, {9900, 100, false}, {6500, 3500, true}, {6501, 3500, false}, {0, 20000, true}} {
		w := NewWindow(WindowConfig{Initial: 10000, Max: 10000})
		w.charge(c.used)
		w.refuse(c.need)
		if got := w.HasRoom(); got != c.want {
			t.Errorf("%d used of 10000, %d wanted: room %v", c.used, c.need, got)
		}
	}
}

// A packet is lost when something sent later was acknowledged, or when the peer is silent; until
// then it waits behind others.
func TestWindowQueued(t *testing.T) {
	w := NewWindow(WindowConfig{})
	ms := func(n int) verbs.Instant { return verbs.Instant(n) * verbs.Instant(time.Millisecond) }
	w.sample(ms(11), time.Millisecond) // of a packet sent at 10 ms
	w.heardAt = ms(20)
	for _, c := range []struct {
		now, sent int
		want      bool
	}{{21, 11, true}, {22, 20, true}, {21, 10, false}, {21, 9, false}, {20 + 100, 11, false}} {
		if got := w.queued(ms(c.now), ms(c.sent)); got != c.want {
			t.Errorf("sent at %d ms, now %d: queued %v", c.sent, c.now, got)
		}
	}
}
