package main

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"github.com/gopacket/gopacket/layers"

	"github.com/doorbell-rdma/doorbell/roce"
)

// datagram is a UDP datagram of a capture, with the headers that its ICRC covers.
type datagram struct {
	src, dst netip.AddrPort
	ip, udp  []byte
	payload  []byte // BTH to ICRC
	length   int    // of the payload before the capture cut it
	cut      bool
}

const (
	protoUDP      = 17
	etherIPv4     = 0x0800
	etherIPv6     = 0x86DD
	etherVLAN     = 0x8100
	etherQinQ     = 0x88A8
	linkLinuxSLL2 = layers.LinkType(276)
)

// dissect finds the datagram to RoCEv2's UDP port, or to any, in a frame; false if there is
// none, or only a fragment of one.
func dissect(b []byte, link layers.LinkType, anyPort bool) (d datagram, ok bool) {
	ip, ok := network(b, link)
	if !ok || len(ip) < 20 {
		return d, false
	}
	var src, dst netip.Addr
	var rest []byte
	var length int // of what follows the IP header
	switch ip[0] >> 4 {
	case 4:
		n := int(ip[0]&0xF) * 4
		if n < 20 || len(ip) < n || ip[9] != protoUDP || binary.BigEndian.Uint16(ip[6:])&0x3FFF != 0 {
			return d, false
		}
		src, dst = netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
		d.ip, rest, length = ip[:n], ip[n:], int(binary.BigEndian.Uint16(ip[2:]))-n
	case 6:
		// RoCEv2 has no extension headers.
		if len(ip) < 40 || ip[6] != protoUDP {
			return d, false
		}
		src, dst = netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
		d.ip, rest, length = ip[:40], ip[40:], int(binary.BigEndian.Uint16(ip[4:]))
	default:
		return d, false
	}
	if len(rest) < 8 {
		return d, false
	}
	port := binary.BigEndian.Uint16(rest[2:])
	if port != roce.Port && !anyPort {
		return d, false
	}
	d.udp, d.payload, d.length = rest[:8], rest[8:], length-8
	d.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(rest))
	d.dst = netip.AddrPortFrom(dst, port)
	// A short frame has padding behind the datagram, a capture may lack its end.
	if d.cut = d.length > len(d.payload); !d.cut {
		d.payload = d.payload[:max(d.length, 0)]
	}
	return d, true
}

// network strips the link layer.
func network(b []byte, link layers.LinkType) (ip []byte, ok bool) {
	ether := func(typeAt int) ([]byte, bool) {
		for len(b) >= typeAt+2 {
			switch binary.BigEndian.Uint16(b[typeAt:]) {
			case etherIPv4, etherIPv6:
				return b[typeAt+2:], true
			case etherVLAN, etherQinQ:
				typeAt += 4
			default:
				return nil, false
			}
		}
		return nil, false
	}
	switch link {
	case layers.LinkTypeEthernet:
		return ether(12)
	case layers.LinkTypeLinuxSLL:
		return ether(14)
	case linkLinuxSLL2:
		if len(b) < 20 {
			return nil, false
		}
		if t := binary.BigEndian.Uint16(b); t == etherIPv4 || t == etherIPv6 {
			return b[20:], true
		}
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		if len(b) > 4 {
			return b[4:], true
		}
	case layers.LinkTypeRaw, 12, 14, layers.LinkTypeIPv4, layers.LinkTypeIPv6:
		return b, true
	}
	return nil, false
}

// icrc reports whether the ICRC is right: a CRC-32 over eight bytes of ones, the headers with
// what routers change set to ones, and the payload (IBTA Vol 1, A17.3.3). It goes by the
// headers as captured, whatever they are, where package roce knows only those that RoCEv2
// senders write.
func (d *datagram) icrc() bool {
	n := len(d.payload) - roce.ICRCLen
	if n < roce.BTHLen {
		return false
	}
	var b [8 + 60 + 8 + roce.BTHLen]byte
	h := b[:0]
	for range 8 {
		h = append(h, 0xFF)
	}
	h = append(h, d.ip...)
	if ip := h[8:]; ip[0]>>4 == 4 {
		ip[1], ip[8], ip[10], ip[11] = 0xFF, 0xFF, 0xFF, 0xFF // TOS, TTL, checksum
	} else {
		ip[0] |= 0x0F // traffic class and flow label
		ip[1], ip[2], ip[3], ip[7] = 0xFF, 0xFF, 0xFF, 0xFF
	}
	h = append(h, d.udp...)
	h[len(h)-2], h[len(h)-1] = 0xFF, 0xFF // checksum
	h = append(h, d.payload[:roce.BTHLen]...)
	h[len(h)-roce.BTHLen+4] = 0xFF // FECN, BECN
	sum := crc32.Update(crc32.ChecksumIEEE(h), crc32.IEEETable, d.payload[roce.BTHLen:n])
	return sum == binary.LittleEndian.Uint32(d.payload[n:])
}
