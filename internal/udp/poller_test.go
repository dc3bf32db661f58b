package udp

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

const forever = int64(1 << 62)

func (n *node) wait(want Events, timeoutNs int64) Events {
	n.t.Helper()
	e, err := n.poll.Wait(want, timeoutNs)
	if err != nil {
		n.t.Fatal(err)
	}
	return e
}

// waitFor waits until the socket is in a state; early returns are allowed.
func (n *node) waitFor(want Events) {
	n.t.Helper()
	for range 1000 {
		if n.wait(want, forever) == want {
			return
		}
	}
	n.t.Fatal("a thousand early returns")
}

func TestPollerReadiness(t *testing.T) {
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	if e := b.wait(Readable, 0); e != 0 {
		t.Errorf("empty socket: %v", e)
	}
	if e := b.wait(Readable|Writable, 0); e != Writable {
		t.Errorf("empty socket: %v, want Writable", e)
	}
	a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), []byte("x"), 0))
	b.waitFor(Readable)
	if e := b.wait(Readable, forever); e != Readable {
		t.Errorf("readiness is a level: got %v the second time", e)
	}
	if e := b.wait(0, 1000); e != 0 {
		t.Errorf("wanted nothing, got %v", e)
	}
	if n, err := b.Recv(make([]link.Rx, 4)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	// Perhaps early and empty-handed, but not ready, and not for ever.
	if e := b.wait(Readable, 1000); e != 0 {
		t.Errorf("after the last datagram: %v", e)
	}
}

func TestPollerTimeout(t *testing.T) {
	n := openNode(t, "127.0.0.1:0")
	for _, d := range []time.Duration{time.Nanosecond, 50 * time.Microsecond, 3 * time.Millisecond} {
		start := time.Now()
		n.wait(Readable, int64(d))
		if e := time.Since(start); e < d {
			t.Errorf("waited %v of %v", e, d)
		}
	}
}

// A kick before Wait, or during it, ends it, and one kick ends one sleep.
func TestPollerKick(t *testing.T) {
	n := openNode(t, "127.0.0.1:0")
	n.poll.Kick()
	n.poll.Kick()
	n.wait(Readable, forever)
	n.wait(0, int64(time.Millisecond))
	go n.poll.Kick()
	n.wait(0, forever)

	// A kick wakes once, twice if it came late; after that sleep is sleep again.
	const nap = 2 * time.Millisecond
	early := 0
	for range 10 {
		start := time.Now()
		if n.wait(Readable, int64(nap)); time.Since(start) < nap {
			early++
		}
	}
	if early > 2 {
		t.Errorf("%d of 10 sleeps ended early after one kick", early)
	}
}

// No kick is lost: a producer that publishes and kicks always gets its answer, however the
// two interleave, and what it published is seen.
func TestPollerKickStress(t *testing.T) {
	n := openNode(t, "127.0.0.1:0")
	const producers, rounds = 3, 2000
	var posted [producers]atomic.Uint64
	var done atomic.Int64
	var wg sync.WaitGroup
	ack := make([]chan struct{}, producers)
	for i := range producers {
		ack[i] = make(chan struct{}, 1)
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer n.poll.Kick()
			defer done.Add(1)
			for range rounds {
				posted[i].Add(1)
				n.poll.Kick()
				<-ack[i] // a lost kick stops us here, and the test by its timeout
			}
		}()
	}
	var seen [producers]uint64
	for done.Load() < producers {
		for i := range producers {
			if v := posted[i].Load(); v != seen[i] {
				seen[i] = v
				ack[i] <- struct{}{}
			}
		}
		if done.Load() < producers {
			n.wait(Readable, forever)
		}
	}
	wg.Wait()
	for i := range producers {
		if seen[i] != rounds {
			t.Errorf("producer %d: saw %d of %d", i, seen[i], rounds)
		}
	}
}

// A poller may be closed while somebody kicks.
func TestPollerCloseAmidKicks(t *testing.T) {
	for range 200 {
		s, err := Open(Config{NoGSO: true})
		if err != nil {
			t.Fatal(err)
		}
		p, err := NewPoller(s)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(p.Kick)
		}
		if _, err := p.Wait(Readable, forever); err != nil {
			t.Error(err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		s.Close()
	}
}
