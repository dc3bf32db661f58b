//go:build !doorbellportable

package udp

import (
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// setMembership joins or leaves. A dual socket takes the option of IPv4 as well.
func (s *Socket) setMembership(group netip.Addr, ifi *net.Interface, join bool) error {
	if group.Is4() {
		opt := unix.IP_DROP_MEMBERSHIP
		if join {
			opt = unix.IP_ADD_MEMBERSHIP
		}
		m := unix.IPMreqn{Multiaddr: group.As4(), Ifindex: int32(ifi.Index)}
		return os.NewSyscallError("setsockopt", unix.SetsockoptIPMreqn(s.fd, unix.IPPROTO_IP, opt, &m))
	}
	opt := unix.IPV6_LEAVE_GROUP
	if join {
		opt = unix.IPV6_JOIN_GROUP
	}
	m := unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(ifi.Index)}
	return os.NewSyscallError("setsockopt", unix.SetsockoptIPv6Mreq(s.fd, unix.IPPROTO_IPV6, opt, &m))
}
