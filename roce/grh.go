package roce

import (
	"encoding/binary"
	"net/netip"
)

// PutGRH writes the 40 bytes that a UD receive buffer holds in front of the payload. On
// RoCEv2 they are made of the IP header (annex A17): IPv6 fills them; of IPv4's,
// bytes 0-19 are zero and bytes 20-39 are the header, its checksum being what programs
// tell the two apart by. What an ordinary socket does not show is written as it usually
// is: IPv4 ID 0, DF, flow label 0, TTL and hop limit 64.
//
// from and to are the packet's addresses, of one family after unmapping; udpPayloadLen is
// as in [Path]. dst needs room for 40 bytes.
func PutGRH(dst []byte, from, to netip.Addr, udpPayloadLen int, trafficClass uint8) {
	const udpHeader, hopLimit, protoUDP = 8, 64, 17
	dst = dst[:GRHLen]
	clear(dst)
	from, to = from.Unmap(), to.Unmap()
	if from.Is6() {
		binary.BigEndian.PutUint32(dst, 6<<28|uint32(trafficClass)<<20)
		binary.BigEndian.PutUint16(dst[4:], uint16(udpHeader+udpPayloadLen))
		dst[6], dst[7] = protoUDP, hopLimit
		s, d := from.As16(), to.As16()
		copy(dst[8:], s[:])
		copy(dst[24:], d[:])
		return
	}
	ip := dst[20:]
	ip[0], ip[1] = 0x45, trafficClass
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+udpHeader+udpPayloadLen))
	binary.BigEndian.PutUint16(ip[6:], dontFragment)
	ip[8], ip[9] = hopLimit, protoUDP
	s, d := from.As4(), to.As4()
	copy(ip[12:], s[:])
	copy(ip[16:], d[:])
	binary.BigEndian.PutUint16(ip[10:], ^sum16(ip))
}

// GRHAddrs returns the addresses in a GRH, to answer a datagram; ok is false when b, of
// which 40 bytes are read, is neither of the two forms. It is how ibv_init_ah_from_wc
// finds the sender.
func GRHAddrs(b []byte) (from, to netip.Addr, ok bool) {
	if len(b) < GRHLen {
		return from, to, false
	}
	if ip := b[20:GRHLen]; ip[0] == 0x45 && sum16(ip) == 0xFFFF {
		return netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:])), true
	}
	if b[0]>>4 == 6 {
		return netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:])), true
	}
	return from, to, false
}

// sum16 is the ones' complement sum of an even number of bytes (RFC 1071).
func sum16(b []byte) uint16 {
	var sum uint32
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	sum = sum>>16 + sum&0xFFFF
	return uint16(sum>>16 + sum)
}
