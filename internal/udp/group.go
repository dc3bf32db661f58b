package udp

import (
	"fmt"
	"net"
	"net/netip"
)

// Join makes the socket receive what is sent to a multicast group on the interface that has
// the address local; Linux allows 20 groups a socket unless sysctl net.ipv4.igmp_max_memberships
// says otherwise. Only a socket bound to all addresses receives for groups. Not concurrently
// with Close.
func (s *Socket) Join(group, local netip.Addr) error {
	return s.membership("join", group, local, true)
}

// Leave undoes a Join.
func (s *Socket) Leave(group, local netip.Addr) error {
	return s.membership("leave", group, local, false)
}

func (s *Socket) membership(what string, group, local netip.Addr, join bool) error {
	group, local = group.Unmap(), local.Unmap()
	err := error(nil)
	switch {
	case !group.IsMulticast():
		err = fmt.Errorf("not a multicast address")
	case !s.wildcard:
		err = fmt.Errorf("a socket bound to %v does not receive for groups: bind all addresses", s.local.Addr())
	case group.Is4() != local.Is4() || group.Is4() && s.v6 && !s.dual || group.Is6() && !s.v6:
		err = fmt.Errorf("not reachable from %v with a socket bound to %v: different IP versions", local, s.local.Addr())
	}
	if err == nil {
		var ifi *net.Interface
		if ifi, err = interfaceWith(local); err == nil {
			err = s.setMembership(group, ifi, join)
		}
	}
	if err != nil {
		return fmt.Errorf("udp: %s %v on %v: %w", what, group, local, err)
	}
	return nil
}

// interfaceWith returns the interface that has an address. Loopback is special: 127.0.0.2 is
// local although no interface lists it.
func interfaceWith(addr netip.Addr) (*net.Interface, error) {
	ifs, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for i := range ifs {
		ifi := &ifs[i]
		if addr.IsLoopback() {
			if ifi.Flags&net.FlagLoopback != 0 {
				return ifi, nil
			}
			continue
		}
		if zone := addr.Zone(); zone != "" && zone != ifi.Name && zone != fmt.Sprint(ifi.Index) {
			continue
		}
		as, err := ifi.Addrs()
		if err != nil {
			continue
		}
		for _, a := range as {
			if p, ok := a.(*net.IPNet); ok && p.IP.Equal(addr.AsSlice()) {
				return ifi, nil
			}
		}
	}
	return nil, fmt.Errorf("no interface has the address %v", addr)
}
