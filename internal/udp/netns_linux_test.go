package udp

import (
	"net/netip"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// inNetns runs f in a network namespace of its own whose only interface is a loopback
// with the given MTU. Sockets that f opens stay in it.
func inNetns(t *testing.T, mtu int, f func(t *testing.T)) {
	t.Helper()
	done := make(chan string)
	go func() {
		// Never unlocked: the thread, which is in the wrong namespace, dies with us.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- "no network namespace without privilege: " + err.Error()
			return
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			done <- err.Error()
			return
		}
		defer unix.Close(fd)
		ifr, err := unix.NewIfreq("lo")
		if err != nil {
			done <- err.Error()
			return
		}
		ifr.SetUint32(uint32(mtu))
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFMTU, ifr); err != nil {
			done <- err.Error()
			return
		}
		ifr.SetUint16(unix.IFF_UP | unix.IFF_LOOPBACK | unix.IFF_RUNNING)
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
			done <- err.Error()
			return
		}
		defer close(done)
		f(t)
	}()
	if why := <-done; why != "" {
		t.Skip(why)
	}
}

// F09, for real: what is longer than the interface's MTU is refused, and only that; so is
// what has no route.
func TestSmallMTU(t *testing.T) {
	for _, tc := range []struct {
		bind   string
		header int
		nobody string
	}{{"127.0.0.1:0", 28, "192.0.2.1:4791"}, {"[::1]:0", 48, "[2001:db8::1]:4791"}} {
		var a, b *node
		inNetns(t, 1500, func(t *testing.T) {
			s, err := Open(Config{Bind: netip.MustParseAddrPort(tc.bind)})
			if err != nil {
				t.Error(err)
				return
			}
			r, err := Open(Config{Bind: netip.MustParseAddrPort(tc.bind)})
			if err != nil {
				s.Close()
				t.Error(err)
				return
			}
			a, b = adopt(t, s), adopt(t, r)
		})
		if t.Failed() {
			return
		}
		if mtu := a.Caps().MTU; mtu != 1500 {
			t.Errorf("%s: MTU %d", tc.bind, mtu)
		}
		src, to := a.LocalAddr().Addr(), b.LocalAddr()
		on := a.Stats().GSO.On
		fits := 1500 - tc.header
		msg := func(n, seg int) link.Tx { return tx(src, to, pattern(n), seg) }
		a.send(msg(fits, 0), msg(fits+1, 0), msg(1, 0), msg(3*fits+10, fits), msg(3*(fits+1), fits+1), msg(2, 0),
			tx(src, netip.MustParseAddrPort(tc.nobody), pattern(5), 0), msg(3, 0))
		var got []int
		for _, g := range b.recv(8) {
			got = append(got, len(g.data))
		}
		want := []int{fits, 1, fits, fits, fits, 10, 2, 3}
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("%s: got lengths %v, want %v", tc.bind, got, want)
			}
		}
		// The second train's datagrams are all too long; over IPv6 the errno of a missing
		// route depends on the source address.
		s := a.Stats()
		if s.TxErrors.TooLong != 1+3 || s.TxErrors.Total() != 1+3+1 {
			t.Errorf("%s: counted %+v", tc.bind, s.TxErrors)
		}
		if tc.header == 28 && s.TxErrors.NetUnreachable+s.TxErrors.Invalid != 1 {
			t.Errorf("%s: counted %+v", tc.bind, s.TxErrors)
		}
		if s.GSO.On != on {
			t.Errorf("%s: GSO %v", tc.bind, s.GSO)
		}
	}
}
