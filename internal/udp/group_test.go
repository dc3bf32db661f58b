package udp

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// TestGroup: a socket in a group receives what is sent to it, and is told that it was sent to
// the group; one that has left does not.
func TestGroup(t *testing.T) {
	for _, bind := range []string{"0.0.0.0:0", "[::]:0"} {
		t.Run(bind, func(t *testing.T) {
			s, err := Open(Config{Bind: netip.MustParseAddrPort(bind)})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			group, local := netip.MustParseAddr("239.255.78.1"), netip.MustParseAddr("127.0.0.9")
			if err := s.Join(group, local); err != nil {
				t.Fatal(err)
			}
			send := func(text string) {
				t.Helper()
				tx := []link.Tx{{
					Gather: [][]byte{[]byte(text)}, Len: len(text), Src: local,
					Dst: netip.AddrPortFrom(group, s.LocalAddr().Port()),
				}}
				if n, err := s.Send(tx); n != 1 || err != nil {
					t.Fatal(n, err)
				}
			}
			recv := func() link.Rx {
				t.Helper()
				var rx [1]link.Rx
				for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
					n, err := s.Recv(rx[:])
					if err != nil {
						t.Fatal(err)
					}
					if n == 1 {
						return rx[0]
					}
				}
				t.Fatal("nothing arrived")
				return rx[0]
			}
			send("hello")
			if rx := recv(); rx.Dst != group || rx.Src.Addr() != local || !bytes.Equal(rx.Buf, []byte("hello")) {
				t.Errorf("received %q from %v to %v", rx.Buf, rx.Src, rx.Dst)
			}
			if err := s.Leave(group, local); err != nil {
				t.Fatal(err)
			}
			if err := s.Leave(group, local); err == nil {
				t.Error("left twice")
			}
		})
	}
}

// TestGroupRefused: what cannot be joined says why.
func TestGroupRefused(t *testing.T) {
	one, err := Open(Config{Bind: netip.MustParseAddrPort("127.0.0.1:0")})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	four, err := Open(Config{Bind: netip.MustParseAddrPort("0.0.0.0:0")})
	if err != nil {
		t.Fatal(err)
	}
	defer four.Close()
	for _, tc := range []struct {
		s            *Socket
		group, local string
		want         string
	}{
		{one, "239.255.78.1", "127.0.0.1", "bind all addresses"},
		{four, "10.0.0.1", "127.0.0.1", "not a multicast address"},
		{four, "239.255.78.1", "::1", "different IP versions"},
		{four, "ff02::1", "::1", "different IP versions"},
		{four, "239.255.78.1", "203.0.113.77", "no interface has"},
	} {
		err := tc.s.Join(netip.MustParseAddr(tc.group), netip.MustParseAddr(tc.local))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s on %s: %v, want %q", tc.group, tc.local, err, tc.want)
		}
	}
	six, err := Open(Config{Bind: netip.MustParseAddrPort("[::]:0")})
	if err != nil {
		t.Skip("no IPv6:", err)
	}
	defer six.Close()
	group, local := netip.MustParseAddr("ff02::78"), netip.MustParseAddr("::1")
	if err := six.Join(group, local); err != nil {
		t.Error(err)
	}
	if err := six.Leave(group, local); err != nil {
		t.Error(err)
	}
}
