package udp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// Limits that hold on every system.
const (
	// defaultBuffer is asked for when Config leaves a buffer's size open.
	defaultBuffer = 4 << 20
	// maxPayload is the longest UDP payload over IPv4; IPv6 would allow 20 bytes more.
	maxPayload = 65507
	// maxTrainBytes is what Caps offers for a train. Near the top the Linux stack cuts a
	// train into its datagrams before the receiver sees it, so some room is left.
	maxTrainBytes = 65000
	// batch is the number of messages per system call and of receive slots.
	batch = 32
)

// Config says how to open a socket. The zero value binds a free port on all addresses.
type Config struct {
	// Bind is the local address and port. An unspecified address means all local ones:
	// 0.0.0.0 all of IPv4, :: both families, and no address at all (the zero netip.Addr)
	// :: where IPv6 exists, else 0.0.0.0. Port 0 lets the system choose.
	Bind netip.AddrPort
	// RecvBuffer and SendBuffer are the socket buffers in bytes to ask for. 0 means 4 MiB,
	// negative leaves the system's default. Getting less is a warning, not an error.
	RecvBuffer, SendBuffer int
	// NoGSO and NoGRO keep off the sending and receiving of trains, NoBatch the system
	// calls for several messages. For kernels and drivers that offer them broken.
	NoGSO, NoGRO, NoBatch bool

	shared bool // of several on one port, and not the first
}

// bufferSize resolves RecvBuffer and SendBuffer; 0 means leave it.
func bufferSize(n int) int {
	switch {
	case n == 0:
		return defaultBuffer
	case n < 0:
		return 0
	}
	return n
}

// Socket is an unconnected UDP socket. Recv and Send belong to the owner of the wire, one
// goroutine at a time, and so does Close: nobody may be in another method that touches
// the socket, or hold a buffer from Recv, when it is closed. Caps, LocalAddr, Stats and
// Warnings may be called by anyone at any time.
type Socket struct {
	counters
	local  netip.AddrPort // unmapped; the address may be unspecified
	mtu    int            // of the interface that holds local's address, 0 if unknown
	closed atomic.Bool

	warnMu   sync.Mutex
	warnings []string // guarded by warnMu

	platform
}

var _ link.Link = (*Socket)(nil)

// Open opens and binds a socket. A port that somebody else holds is an error that
// matches [syscall.EADDRINUSE].
func Open(cfg Config) (*Socket, error) {
	cfg.Bind = netip.AddrPortFrom(cfg.Bind.Addr().Unmap(), cfg.Bind.Port())
	s, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("udp: cannot open %v: %w%s", bindName(cfg.Bind), err, advice(err, cfg.Bind))
	}
	s.mtu = InterfaceMTU(s.local.Addr())
	return s, nil
}

// bindName prints a bind address, the open one too.
func bindName(a netip.AddrPort) string {
	if !a.Addr().IsValid() {
		return fmt.Sprintf("port %d on all addresses", a.Port())
	}
	return a.String()
}

// advice says what to do about an error of Open, or nothing.
func advice(err error, a netip.AddrPort) string {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return "; another program, or the kernel's rdma_rxe (port 4791), holds it: choose another port, another address or a network namespace of its own"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "; no interface has this address: choose one of this host's, or bind all of them"
	case errors.Is(err, syscall.EACCES) && a.Port() != 0 && a.Port() < 1024:
		return "; ports below 1024 are for privileged programs: choose a higher one"
	case errors.Is(err, syscall.EAFNOSUPPORT):
		return "; this system lacks the address family: bind an address of the other one"
	case errors.Is(err, syscall.EMFILE):
		return "; too many open files: raise the limit (ulimit -n)"
	}
	return ""
}

// LocalAddr returns the bound address and port; the address may be unspecified.
func (s *Socket) LocalAddr() netip.AddrPort { return s.local }

// Caps returns the present abilities.
func (s *Socket) Caps() link.Caps {
	c := link.Caps{MaxSegs: 1, MaxBytes: maxTrainBytes, MTU: s.mtu, RecvBuffer: s.recvBuffer, ControlsID: controlsID}
	if s.gso.on() {
		c.MaxSegs = s.maxSegs
	}
	c.RecvTrains = s.gro.on()
	return c
}

// Stats returns the present counters.
func (s *Socket) Stats() Stats { return s.snapshot() }

// Warnings returns what a person should know and has not been returned before: buffers
// that the system cut, abilities that were lost. Most of it is there after Open.
func (s *Socket) Warnings() []string {
	s.warnMu.Lock()
	defer s.warnMu.Unlock()
	w := s.warnings
	s.warnings = nil
	return w
}

// warnf adds a warning. The number of places that warn bounds the list: each warns once.
func (s *Socket) warnf(format string, args ...any) {
	s.warnMu.Lock()
	defer s.warnMu.Unlock()
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

// warnBuffer warns if a buffer got smaller than wanted; both in the units of Config.
func (s *Socket) warnBuffer(which, sysctl string, want, got int) {
	if got < want {
		s.warnf("%s buffer is %d bytes instead of %d: bursts will be lost; %s", which, got, want, fmt.Sprintf(sysctl, want))
	}
}

// segments returns the number of datagrams in n bytes of segSize each (0: one).
func segments(n, segSize int) int {
	if segSize <= 0 || n <= segSize {
		return 1
	}
	return (n + segSize - 1) / segSize
}

// InterfaceMTU returns the MTU of the interface that has addr, 0 if none or all have it.
// Loopback is special: 127.0.0.2 is local although no interface lists it.
func InterfaceMTU(addr netip.Addr) int {
	if !addr.IsValid() || addr.IsUnspecified() {
		return 0
	}
	ifi, err := interfaceWith(addr)
	if err != nil {
		return 0
	}
	return ifi.MTU
}

// Route asks the system which local address it would send from to dst, and the MTU of
// the interface that has it (0 if unknown). Sends nothing. For a socket bound to all
// addresses the caller needs it to fill link.Tx.Src when it speaks first.
func Route(dst netip.Addr) (src netip.Addr, mtu int, err error) {
	dst = dst.Unmap()
	// Any port will do, connecting a UDP socket sends nothing; this one is discard.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, 9)))
	if err != nil {
		return netip.Addr{}, 0, fmt.Errorf("udp: no route to %v: %w", dst, err)
	}
	defer c.Close()
	src = c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	return src, InterfaceMTU(src), nil
}
