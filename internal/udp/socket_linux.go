//go:build !doorbellportable

package udp

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// controlsID: Linux writes Identification 0 on an unconnected socket that never fragments,
// and 0, 1, 2, … into the datagrams of a train.
const controlsID = true

// platform is the Linux side of a Socket. All of it belongs to the owner of the wire.
type platform struct {
	sys      sys
	fd       int
	v6       bool // an AF_INET6 socket
	dual     bool // an AF_INET6 socket that carries IPv4 too
	wildcard bool // bound to all addresses: PKTINFO both ways
	maxSegs  int  // datagrams in a train, as the kernel allows
	rx       rxSlots
	claim    claim
	tx       txBatch
	zones    zoneCache
}

func open(cfg Config) (*Socket, error) { return openWith(cfg, kernel) }

// openWith opens a socket on the given kernel.
func openWith(cfg Config, k sys) (*Socket, error) {
	bind := cfg.Bind
	if !bind.Addr().IsValid() {
		cfg.Bind = netip.AddrPortFrom(netip.IPv6Unspecified(), bind.Port())
		s, err := openWith(cfg, k)
		// No IPv6 in the kernel, or none configured: then all addresses are IPv4 addresses.
		if !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return s, err
		}
		cfg.Bind = netip.AddrPortFrom(netip.IPv4Unspecified(), bind.Port())
		return openWith(cfg, k)
	}
	v6 := bind.Addr().Is6()
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	wildcard := bind.Addr().IsUnspecified()
	s := &Socket{platform: platform{sys: k, fd: fd, v6: v6, dual: v6 && wildcard, wildcard: wildcard}}
	if err := s.setUp(cfg); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if err := s.rx.init(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	s.tx.init()
	return s, nil
}

// setUp sets the options, binds, and asks for the abilities.
func (s *Socket) setUp(cfg Config) error {
	type option struct {
		name              string
		level, opt, value int
	}
	var must []option
	if s.v6 {
		only := 1
		if s.dual {
			only = 0
		}
		must = append(must,
			option{"IPV6_V6ONLY", unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only},
			option{"IPV6_MTU_DISCOVER", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE},
			option{"IPV6_RECVERR", unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 0},
			// rdma_rxe sends UDP checksum 0 over IPv6 too; without this the kernel drops all of it.
			option{"UDP_NO_CHECK6_RX", unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1})
	}
	if !s.v6 || s.dual {
		must = append(must,
			option{"IP_MTU_DISCOVER", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE},
			option{"IP_RECVERR", unix.IPPROTO_IP, unix.IP_RECVERR, 0})
	}
	switch {
	case s.wildcard && s.v6: // tells IPv4 destinations as well, mapped
		must = append(must, option{"IPV6_RECVPKTINFO", unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1})
	case s.wildcard:
		must = append(must, option{"IP_PKTINFO", unix.IPPROTO_IP, unix.IP_PKTINFO, 1})
	}
	for _, o := range must {
		if err := s.sys.setsockopt(s.fd, o.level, o.opt, o.value); err != nil {
			return fmt.Errorf("setsockopt %s: %w", o.name, err)
		}
	}
	if err := s.sys.setsockopt(s.fd, unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1); err != nil {
		s.warnf("the kernel does not tell how many datagrams it drops (SO_RXQ_OVFL: %v)", err)
	}
	s.recvBuffer = s.setBuffer("receive", "net.core.rmem_max", cfg.RecvBuffer, unix.SO_RCVBUF, unix.SO_RCVBUFFORCE)
	s.sendBuffer = s.setBuffer("send", "net.core.wmem_max", cfg.SendBuffer, unix.SO_SNDBUF, unix.SO_SNDBUFFORCE)
	s.probe(cfg)
	if cfg.shared {
		if err := s.share(); err != nil {
			return err
		}
	}
	if err := s.bind(cfg.Bind); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	return nil
}

// setBuffer asks for a buffer and returns what it became in the kernel's own count: the
// kernel doubles the figure to leave room for its bookkeeping. Privileged programs get
// past the system's limit.
func (s *Socket) setBuffer(which, sysctl string, ask, opt, force int) int {
	want := bufferSize(ask)
	get := func() int {
		n, err := s.sys.getsockopt(s.fd, unix.SOL_SOCKET, opt)
		if err != nil {
			return 0
		}
		return n
	}
	if want == 0 {
		return get()
	}
	// Errors show in what get returns.
	_ = s.sys.setsockopt(s.fd, unix.SOL_SOCKET, opt, want)
	if get()/2 < want {
		_ = s.sys.setsockopt(s.fd, unix.SOL_SOCKET, force, want)
	}
	got := get()
	s.warnBuffer(which, "set sysctl -w "+sysctl+"=%d", want, got/2)
	return got
}

// probe finds out which offloads there are. UDP_SEGMENT is only read: set on the socket, it
// would apply to every send.
func (s *Socket) probe(cfg Config) {
	const off = "switched off by the configuration"
	if cfg.NoBatch {
		s.batch.giveUp(off)
	}
	s.maxSegs = 1
	if cfg.NoGSO {
		s.gso.giveUp(off)
	} else if _, err := s.sys.getsockopt(s.fd, unix.SOL_UDP, unix.UDP_SEGMENT); err != nil {
		s.gso.giveUp(fmt.Sprintf("the kernel does not know UDP_SEGMENT: %v", err))
	} else {
		s.maxSegs = s.sys.maxSegs()
	}
	if cfg.NoGRO {
		s.gro.giveUp(off)
	} else if err := s.sys.setsockopt(s.fd, unix.SOL_UDP, unix.UDP_GRO, 1); err != nil {
		s.gro.giveUp(fmt.Sprintf("the kernel does not know UDP_GRO: %v", err))
	}
}

func (s *Socket) bind(a netip.AddrPort) error {
	var sa unix.Sockaddr
	if s.v6 {
		zone, err := s.zones.index(a.Addr().Zone())
		if err != nil {
			return err
		}
		sa = &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port()), ZoneId: zone}
	} else {
		sa = &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	if err := unix.Bind(s.fd, sa); err != nil {
		return err
	}
	got, err := unix.Getsockname(s.fd)
	if err != nil {
		return err
	}
	port := a.Port()
	switch got := got.(type) {
	case *unix.SockaddrInet4:
		port = uint16(got.Port)
	case *unix.SockaddrInet6:
		port = uint16(got.Port)
	}
	s.local = netip.AddrPortFrom(a.Addr(), port)
	return nil
}

// Close closes the socket and gives its memory back; buffers from Recv are gone with it.
// A second call does nothing.
func (s *Socket) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	s.rx.free()
	if err := unix.Close(s.fd); err != nil {
		return fmt.Errorf("udp: close %v: %w", s.local, err)
	}
	return nil
}
