//go:build !doorbellportable

package udp

import (
	"encoding/binary"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// look is one Recv of the wire's owner; what comes are the datagrams as text.
func (n *node) look() (text []string) {
	n.t.Helper()
	msgs := make([]link.Rx, batch)
	k, err := n.Recv(msgs)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, m := range msgs[:k] {
		text = append(text, string(m.Buf))
	}
	return text
}

func (n *node) claim() {
	n.t.Helper()
	if !n.poll.Claim() {
		n.t.Fatal("no claim")
	}
}

// What arrives during a claim is the claimant's, and then the next Recv's; a claim that is taken
// back leaves everything as it was.
func TestClaim(t *testing.T) {
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	say := func(s string) { a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), []byte(s), 0)) }
	want := func(what string, got []string, want ...string) {
		t.Helper()
		if len(got) != len(want) || len(got) > 0 && got[0] != want[0] {
			t.Fatalf("%s: %q, want %q", what, got, want)
		}
	}
	if b.poll.Claim() {
		t.Fatal("a claim before anybody has received, so that nobody knows how much may be")
	}
	want("nothing", b.look())

	b.claim()
	if b.poll.Claim() {
		t.Fatal("claimed twice")
	}
	say("one")
	want("claimed", b.look())
	b.poll.Unclaim()
	want("not claimed any more", b.look(), "one")

	b.claim()
	say("two")
	want("claimed", b.look())
	want("claimed", b.look())
	if idle, missed := b.poll.Await(); idle || missed != 2 {
		t.Fatalf("idle %v, missed %d", idle, missed)
	}
	if e := b.wait(Readable, int64(patience)); e != Readable {
		t.Fatalf("what Await has brought is not Readable: %v", e)
	}
	say("three")
	if b.poll.Claim() {
		t.Fatal("claimed before what the last one brought was received")
	}
	want("awaited", b.look(), "two")
	want("behind it", b.look(), "three")

	b.claim()
	if idle, missed := b.poll.Await(); !idle || missed != 0 {
		t.Fatalf("idle %v, missed %d", idle, missed)
	}
	want("in vain", b.look())
	say("four")
	want("after a claim in vain", b.look(), "four")
}

// A kick ends Await, whenever it comes, over every kind of address. What it is done by reaches
// nobody, and datagrams that only look like it reach those they are for.
func TestClaimKick(t *testing.T) {
	for _, bind := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0", ""} {
		t.Run(bind, func(t *testing.T) {
			n := openNode(t, bind)
			n.look()
			n.poll.Kick()
			n.claim()
			if idle, _ := n.poll.Await(); idle {
				t.Error("slept though it had been kicked")
			}
			tv := unix.NsecToTimeval(int64(patience)) // or the timeout would make up for a lost kick
			if err := unix.SetsockoptTimeval(n.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
				t.Fatal(err)
			}
			for range 50 {
				n.claim()
				var back atomic.Bool
				var kicker sync.WaitGroup
				kicker.Go(func() {
					for n.poll.state.Load() != pollReceiving && !back.Load() {
						runtime.Gosched()
					}
					n.poll.Kick()
				})
				idle, _ := n.poll.Await()
				back.Store(true)
				kicker.Wait()
				if idle {
					t.Fatal("a kick was lost")
				}
				if got := n.look(); len(got) != 0 {
					t.Fatalf("received %q", got)
				}
			}
			if got := n.Stats(); got.RxRouses == 0 || got.RxDatagrams != 0 {
				t.Errorf("%d rouses, %d datagrams", got.RxRouses, got.RxDatagrams)
			}
		})
	}
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	b.look()
	a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), nil, 0))
	b.claim()
	b.poll.Await()
	if got := b.look(); len(got) != 1 || got[0] != "" {
		t.Errorf("received %q, want another's empty datagram", got)
	}
}

// Datagrams keep their order and none gets lost when claimant, owners and kickers meet: the
// mutex is the role, which the claimant gives up while it sleeps.
func TestClaimOrder(t *testing.T) {
	const many = 20_000
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	var role sync.Mutex
	var next atomic.Uint32
	msgs := make([]link.Rx, batch)
	look := func() {
		k, err := b.Recv(msgs)
		if err != nil {
			t.Error(err)
		}
		for _, m := range msgs[:k] {
			for buf := m.Buf; len(buf) >= 4; buf = buf[4:] {
				if got, want := binary.BigEndian.Uint32(buf), next.Load(); got != want {
					t.Errorf("datagram %d, want %d", got, want)
				}
				next.Add(1)
			}
		}
	}
	look()
	over := func() bool { return next.Load() >= many || t.Failed() }
	var wg sync.WaitGroup
	wg.Go(func() { // the claimant
		for !over() {
			role.Lock()
			look()
			ok := b.poll.Claim()
			role.Unlock()
			if ok {
				b.poll.Await()
			}
		}
	})
	wg.Go(func() { // an owner that polls, and one that kicks
		for !over() {
			role.Lock()
			look()
			role.Unlock()
			b.poll.Kick()
			runtime.Gosched()
		}
	})
	for i := range uint32(many) {
		for i-next.Load() > 256 && !t.Failed() {
			runtime.Gosched()
		}
		a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), binary.BigEndian.AppendUint32(nil, i), 0))
	}
	for end := time.Now().Add(patience); !over(); time.Sleep(time.Millisecond) {
		b.poll.Kick()
		if time.Now().After(end) {
			t.Errorf("%d of %d datagrams", next.Load(), many)
		}
	}
	wg.Wait()
}

// Where one system call takes one datagram there is no claim, nor on a closed socket; an error
// that Await meets is the next Recv's business.
func TestNoClaim(t *testing.T) {
	n := openNode(t, "127.0.0.1:0", noBatch)
	n.look()
	if n.poll.Claim() {
		t.Error("a claim without recvmmsg")
	}
	k := &fakeKernel{}
	s := fakeNode(t, k, "127.0.0.1:0")
	s.sys.await = func(int, *mmsghdr, int) (int, unix.Errno) { return 0, unix.ENOMEM }
	f := adopt(t, s)
	f.look()
	f.claim()
	if idle, _ := f.poll.Await(); idle || f.Stats().RxErrors != 1 {
		t.Errorf("idle %v, %d errors", idle, f.Stats().RxErrors)
	}
	if got := f.look(); len(got) != 0 {
		t.Errorf("received %q", got)
	}
	f.claim()
	f.poll.Unclaim()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if f.poll.Claim() {
		t.Error("a claim on a closed socket")
	}
	if _, err := f.Recv(make([]link.Rx, 1)); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
