//go:build !doorbellportable

package udp

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// byFirst chooses the socket that the first byte of the payload names.
func byFirst(t *testing.T) []bpf.RawInstruction {
	t.Helper()
	p, err := bpf.Assemble([]bpf.Instruction{bpf.LoadAbsolute{Off: 0, Size: 1}, bpf.RetA{}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func openSeveral(t *testing.T, bind string, n int, steer []bpf.RawInstruction) []*Socket {
	t.Helper()
	socks, err := OpenShared(Config{Bind: netip.MustParseAddrPort(bind)}, n, steer)
	if err != nil {
		t.Skipf("cannot bind %v: %v", bind, err)
	}
	t.Cleanup(func() {
		for _, s := range socks {
			_ = s.Close()
		}
	})
	return socks
}

// next waits for what a socket receives.
func next(t *testing.T, s *Socket) link.Rx {
	t.Helper()
	p, err := NewPoller(s)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var rx [1]link.Rx
	for range 10 {
		if n, err := s.Recv(rx[:]); err != nil {
			t.Fatal(err)
		} else if n == 1 {
			return rx[0]
		}
		if _, err := p.Wait(Readable, int64(time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	t.Fatal("nothing received")
	return link.Rx{}
}

// The program sees the UDP payload from its first byte on, on both IP versions, and chooses a
// train's socket by the train's first datagram.
func TestSteer(t *testing.T) {
	for _, c := range []struct{ bind, from, to string }{
		{"127.40.0.1:0", "127.40.0.2:0", "127.40.0.1"},
		{"[::1]:0", "[::1]:0", "::1"},
		{"[::]:0", "127.40.0.2:0", "127.40.0.3"},
		{"[::]:0", "[::1]:0", "::1"},
		{"0.0.0.0:0", "127.40.0.2:0", "127.40.0.3"},
	} {
		t.Run(c.bind+" from "+c.from, func(t *testing.T) {
			const n = 4
			socks := openSeveral(t, c.bind, n, byFirst(t))
			from, err := Open(Config{Bind: netip.MustParseAddrPort(c.from)})
			if err != nil {
				t.Skip(err)
			}
			defer from.Close()
			to := netip.AddrPortFrom(netip.MustParseAddr(c.to), socks[0].LocalAddr().Port())
			send := func(b []byte, seg int) {
				t.Helper()
				k, err := from.Send([]link.Tx{{Gather: [][]byte{b}, Len: len(b), SegSize: seg, Dst: to, Src: from.LocalAddr().Addr()}})
				if k != 1 || err != nil {
					t.Fatalf("sent %d: %v", k, err)
				}
			}
			for round := range 2 * n {
				i := round % n
				send([]byte{byte(i), 1, 2, 3, byte(round)}, 0)
				if rx := next(t, socks[i]); len(rx.Buf) != 5 || rx.Buf[4] != byte(round) {
					t.Fatalf("socket %d got % x", i, rx.Buf)
				}
				if from.Caps().MaxSegs < 4 {
					continue
				}
				train := make([]byte, 400)
				train[0], train[100], train[200], train[300] = byte(i), 3, 3, 3
				send(train, 100)
				if rx := next(t, socks[i]); len(rx.Buf) != 400 && len(rx.Buf) != 100 {
					t.Fatalf("socket %d got %d bytes of a train", i, len(rx.Buf))
				}
				for range 3 {
					_, _ = socks[i].Recv(make([]link.Rx, 8)) // the rest of a train that was split
				}
			}
		})
	}
}

// A second one gets "address in use", whether it wants one socket or several, and whichever it
// binds; and the port is free again afterwards.
func TestSharedPortIsTaken(t *testing.T) {
	socks := openSeveral(t, "127.40.1.1:0", 3, byFirst(t))
	at := socks[0].LocalAddr()
	for _, s := range socks {
		if s.LocalAddr() != at {
			t.Fatalf("bound %v and %v", at, s.LocalAddr())
		}
	}
	for _, n := range []int{1, 2} {
		for _, bind := range []netip.AddrPort{at, netip.AddrPortFrom(netip.IPv4Unspecified(), at.Port())} {
			if _, err := OpenShared(Config{Bind: bind}, n, byFirst(t)); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("%d more on %v: %v, want EADDRINUSE", n, bind, err)
			}
		}
	}
	for _, s := range socks {
		_ = s.Close()
	}
	again, err := OpenShared(Config{Bind: at}, 2, byFirst(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range again {
		_ = s.Close()
	}
}

// A program of the same user that shares ports, too, and is quick, is noticed; one that comes
// later is sent nothing.
func TestStrangerInSharedPort(t *testing.T) {
	for _, bind := range []string{"127.40.2.1:0", "[::1]:0", "[::]:0"} {
		t.Run(bind, func(t *testing.T) {
			socks := openSeveral(t, bind, 2, byFirst(t))
			if stranger(socks) {
				t.Fatal("a stranger among ours")
			}
			if _, err := unix.Getsockname(socks[0].fd); err != nil {
				t.Fatal(err)
			}
			if f, err := openWith(Config{Bind: socks[0].LocalAddr(), shared: true}, kernel); err != nil {
				t.Fatal(err)
			} else {
				defer f.Close()
			}
			if !stranger(socks) {
				t.Fatal("a stranger was not noticed")
			}
			to := socks[0].LocalAddr()
			if to.Addr().IsUnspecified() {
				to = netip.AddrPortFrom(netip.IPv6Loopback(), to.Port())
			}
			from, err := Open(Config{Bind: netip.AddrPortFrom(to.Addr(), 0)})
			if err != nil {
				t.Fatal(err)
			}
			defer from.Close()
			for i := range 16 {
				if n, err := from.Send([]link.Tx{{Gather: [][]byte{{byte(i % 2)}}, Len: 1, Dst: to, Src: to.Addr()}}); n != 1 || err != nil {
					t.Fatal(n, err)
				}
				next(t, socks[i%2])
			}
		})
	}
}

func TestSteerRefused(t *testing.T) {
	// A program that the kernel cannot accept: it does not return.
	socks := openSeveral(t, "127.40.3.1:0", 2, []bpf.RawInstruction{{Op: 0x28, K: 0}})
	if w := socks[0].Warnings(); len(w) == 0 {
		t.Error("no warning")
	}
}
