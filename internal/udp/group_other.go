//go:build !linux || doorbellportable

package udp

import (
	"errors"
	"net"
	"net/netip"

	"golang.org/x/net/ipv6"
)

// setMembership joins or leaves.
func (s *Socket) setMembership(group netip.Addr, ifi *net.Interface, join bool) error {
	uc, ok := s.conn.(*net.UDPConn)
	if !ok || s.p4 == nil {
		return errors.ErrUnsupported
	}
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(group, 0))
	switch {
	case group.Is4() && join:
		return s.p4.JoinGroup(ifi, to)
	case group.Is4():
		return s.p4.LeaveGroup(ifi, to)
	case join:
		return ipv6.NewPacketConn(uc).JoinGroup(ifi, to)
	default:
		return ipv6.NewPacketConn(uc).LeaveGroup(ifi, to)
	}
}
