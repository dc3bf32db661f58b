package udp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// tap sees what crosses the loopback interface, IP headers included.
func tap(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no capture without privilege (CAP_NET_RAW): %v", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Skip(err)
	}
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], unix.ETH_P_IP)
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16(b[:]), Ifindex: lo.Index}); err != nil {
		t.Skipf("cannot capture on lo: %v", err)
	}
	tv := unix.NsecToTimeval(int64(patience))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	return fd
}

// only has the kernel show the tap nothing but UDP datagrams over IPv4 to a port: whatever
// else floods the loopback interface at that moment cannot push them out of its buffer.
func only(t *testing.T, fd int, port uint16) {
	t.Helper()
	raw, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 9, Size: 1}, // protocol
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_UDP, SkipTrue: 3},
		bpf.LoadAbsolute{Off: 22, Size: 2}, // destination port, behind a header without options
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(port), SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 17},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		t.Fatal(err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		t.Fatal(err)
	}
}

// ipv4To waits for the next packet to dst and returns its header and payload.
func ipv4To(t *testing.T, fd int, dst netip.AddrPort) []byte {
	t.Helper()
	buf := make([]byte, 70000)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		p := buf[:n]
		if n >= 28 && p[0] == 0x45 && p[9] == unix.IPPROTO_UDP && netip.AddrFrom4([4]byte(p[16:20])) == dst.Addr() &&
			binary.BigEndian.Uint16(p[22:]) == dst.Port() {
			return p
		}
	}
	t.Fatal("nothing captured")
	return nil
}

// The invariant CRC covers Identification and DF: Linux must write 0 and DF into each lone
// datagram, from every kind of socket, and into the first of a train.
func TestIdentification(t *testing.T) {
	fd := tap(t)
	for _, tc := range []struct{ name, bind string }{
		{"one address", "127.0.0.1:0"}, {"all IPv4", "0.0.0.0:0"}, {"all", "[::]:0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := openNode(t, tc.bind), openNode(t, "127.0.0.2:0", noGRO)
			only(t, fd, b.LocalAddr().Port())
			src := netip.MustParseAddr("127.0.0.1")
			m := tx(src, b.LocalAddr(), []byte("0123"), 0)
			m.TrafficClass = 0x28
			batch := []link.Tx{m, m, tx(src, b.LocalAddr(), pattern(1200), 0)}
			for range 2 {
				a.send(batch...)
				for i := range batch {
					p := ipv4To(t, fd, b.LocalAddr())
					id, frag := binary.BigEndian.Uint16(p[4:]), binary.BigEndian.Uint16(p[6:])
					if id != 0 || frag != 0x4000 {
						t.Errorf("datagram %d: Identification %#x, flags and offset %#x; want 0 and DF", i, id, frag)
					}
					if len(batch[i].Gather[0])+28 != len(p) || p[1] != batch[i].TrafficClass {
						t.Errorf("datagram %d: %d bytes, TOS %#x", i, len(p), p[1])
					}
				}
			}
			a.send(tx(src, b.LocalAddr(), pattern(500), 100))
			p := ipv4To(t, fd, b.LocalAddr())
			if id, frag := binary.BigEndian.Uint16(p[4:]), binary.BigEndian.Uint16(p[6:]); id != 0 || frag != 0x4000 {
				t.Errorf("train: Identification %#x, flags and offset %#x", id, frag)
			}
		})
	}
}

// rdma_rxe sends UDP checksum 0, over IPv6 too, where it is forbidden by default.
func TestZeroChecksum(t *testing.T) {
	for _, bind := range []string{"[::1]:0", "[::]:0"} {
		n := openNode(t, bind)
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Skip(err)
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_NO_CHECK6_TX, 1); err != nil {
			t.Fatal(err)
		}
		to := &unix.SockaddrInet6{Addr: [16]byte{15: 1}, Port: int(n.LocalAddr().Port())}
		if err := unix.Sendto(fd, []byte("rxe"), 0, to); err != nil {
			t.Fatal(err)
		}
		if g := n.recv(1)[0]; string(g.data) != "rxe" {
			t.Errorf("got %q", g.data)
		}
	}
}

// A destination where nobody listens does not disturb what goes elsewhere.
func TestDeadPeer(t *testing.T) {
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	s, err := Open(Config{Bind: netip.MustParseAddrPort("127.0.0.3:0")})
	if err != nil {
		t.Fatal(err)
	}
	dead := s.LocalAddr()
	s.Close()
	for range 20 {
		a.send(tx(a.LocalAddr().Addr(), dead, []byte("x"), 0), tx(a.LocalAddr().Addr(), b.LocalAddr(), []byte("y"), 0))
		if g := b.recv(1)[0]; string(g.data) != "y" {
			t.Fatalf("got %q", g.data)
		}
	}
	if st := a.Stats(); st.TxErrors.Total() != 0 || st.RxErrors != 0 {
		t.Errorf("stats %+v", st)
	}
}
