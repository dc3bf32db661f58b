//go:build !doorbellportable

package udp

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxZones bounds the caches; a host with more interfaces looks names up more often.
const maxZones = 256

// zoneCache translates the zones of IPv6 addresses to interface indexes and back. Only
// the first sight of a zone asks the system. The zero value is ready.
type zoneCache struct {
	indexes map[string]uint32
	names   map[uint32]string
	// The last address with a zone, because attaching a zone costs a look-up: peers on a
	// link-local address send many datagrams in a row.
	lastRaw   [16]byte
	lastScope uint32
	lastAddr  netip.Addr
}

// index returns the interface index of a zone, 0 for none.
func (z *zoneCache) index(zone string) (uint32, error) {
	if zone == "" {
		return 0, nil
	}
	if i, ok := z.indexes[zone]; ok {
		return i, nil
	}
	var i uint32
	if ifi, err := net.InterfaceByName(zone); err == nil {
		i = uint32(ifi.Index)
	} else if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		i = uint32(n)
	} else {
		return 0, fmt.Errorf("zone %q: %w", zone, unix.ENODEV)
	}
	if z.indexes == nil || len(z.indexes) >= maxZones {
		z.indexes = make(map[string]uint32)
	}
	z.indexes[zone] = i
	return i, nil
}

// name returns the zone of an interface index, 0 giving none.
func (z *zoneCache) name(index uint32) string {
	if index == 0 {
		return ""
	}
	if n, ok := z.names[index]; ok {
		return n
	}
	n := strconv.FormatUint(uint64(index), 10)
	if ifi, err := net.InterfaceByIndex(int(index)); err == nil {
		n = ifi.Name
	}
	if z.names == nil || len(z.names) >= maxZones {
		z.names = make(map[uint32]string)
	}
	z.names[index] = n
	return n
}

// addr makes an address of what the kernel tells: unmapped, and with a zone where the
// address is only unique on its link.
func (z *zoneCache) addr(raw [16]byte, scope uint32) netip.Addr {
	a := netip.AddrFrom16(raw)
	if a.Is4In6() {
		return a.Unmap()
	}
	if scope == 0 || !(a.IsLinkLocalUnicast() || a.IsLinkLocalMulticast() || a.IsInterfaceLocalMulticast()) {
		return a
	}
	if raw == z.lastRaw && scope == z.lastScope {
		return z.lastAddr
	}
	a = a.WithZone(z.name(scope))
	z.lastRaw, z.lastScope, z.lastAddr = raw, scope, a
	return a
}
