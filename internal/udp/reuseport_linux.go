//go:build !doorbellportable

package udp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// openShared opens the first socket as Open does, which fails when anybody has the port, and
// only then lets the others in.
//
// From then on a program of the same user that sets SO_REUSEPORT, too, may bind the port, as it
// may with any program that shares one; nobody else can. Behind our sockets it is sent nothing,
// for steer names only ours. Between them it would be, so one that was as quick as that is
// looked for.
func openShared(cfg Config, n int, steer []bpf.RawInstruction) (socks []*Socket, err error) {
	defer func() {
		if err != nil {
			for _, s := range socks {
				_ = s.Close() // err is the reason to report
			}
			socks = nil
		}
	}()
	first, err := Open(cfg)
	if err != nil {
		return nil, err
	}
	socks = append(socks, first)
	if err := first.share(); err != nil {
		return socks, err
	}
	cfg.Bind, cfg.shared = first.local, true
	for len(socks) < n {
		s, err := Open(cfg)
		if err != nil {
			return socks, err
		}
		socks = append(socks, s)
	}
	if stranger(socks) {
		return socks, fmt.Errorf("udp: cannot open %v: another program has joined it: %w", first.local, unix.EADDRINUSE)
	}
	if err := first.Steer(steer); err != nil {
		first.warnf("the kernel does not choose sockets by our rule (%v): what one peer sends arrives at one socket and is handed on", err)
	}
	return socks, nil
}

// Steer replaces the program of the sockets that this one was opened with, for tests.
func (s *Socket) Steer(steer []bpf.RawInstruction) error {
	filter := make([]unix.SockFilter, len(steer))
	for i, in := range steer {
		filter[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &prog); err != nil {
		return fmt.Errorf("setsockopt SO_ATTACH_REUSEPORT_CBPF: %w", err)
	}
	return nil
}

// share lets more sockets have this one's address and port.
func (s *Socket) share() error {
	if err := s.sys.setsockopt(s.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return fmt.Errorf("setsockopt SO_REUSEPORT: %w", err)
	}
	// A socket is to hear only the groups that it has joined itself, not its siblings'. Without
	// these what it does not want is dropped later.
	if s.v6 {
		_ = s.sys.setsockopt(s.fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_ALL, 0)
	}
	if !s.v6 || s.dual {
		_ = s.sys.setsockopt(s.fd, unix.IPPROTO_IP, unix.IP_MULTICAST_ALL, 0)
	}
	return nil
}

// stranger reports whether a socket that is none of these shares their address and port, as far
// as the system shows its sockets. Before they were opened there was none.
func stranger(socks []*Socket) bool {
	ours := make(map[string]bool)
	for _, s := range socks {
		var st unix.Stat_t
		if unix.Fstat(s.fd, &st) != nil {
			return false
		}
		ours[fmt.Sprint(st.Ino)] = true
	}
	s := socks[0]
	// The thread's own tables: others of this process may be in another network namespace.
	if s.v6 && listed("/proc/thread-self/net/udp6", s.local, ours) {
		return true
	}
	return (!s.v6 || s.dual) && listed("/proc/thread-self/net/udp", s.local, ours)
}

// listed looks in one of the kernel's tables for a socket that overlaps with a and is not ours.
func listed(table string, a netip.AddrPort, ours map[string]bool) bool {
	f, err := os.Open(table)
	if err != nil {
		return false
	}
	defer f.Close()
	port := fmt.Sprintf("%04X", a.Port())
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// sl, local_address, rem_address, st, queues, timer, retrnsmt, uid, timeout, inode
		field := strings.Fields(lines.Text())
		if len(field) < 10 || ours[field[9]] {
			continue
		}
		addr, at, _ := strings.Cut(field[1], ":")
		if at == port && (a.Addr().IsUnspecified() || strings.Trim(addr, "0") == "" || addr == hexAddr(a.Addr())) {
			return true
		}
	}
	return false
}

// hexAddr writes an address as the kernel's tables do: words in the machine's order.
func hexAddr(a netip.Addr) string {
	var b strings.Builder
	for raw := a.AsSlice(); len(raw) >= 4; raw = raw[4:] {
		fmt.Fprintf(&b, "%08X", binary.NativeEndian.Uint32(raw))
	}
	return b.String()
}
