package roce

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
)

// MaxPseudo is the largest pseudo header in bytes: that of IPv6.
const MaxPseudo = 56

const (
	pseudoLen4 = 8 + 20 + 8
	pseudoLen6 = 8 + 40 + 8

	ipLenOff   = 10 // total length in IPv4; in IPv6 the payload length is at ip6LenOff
	ip6LenOff  = 12
	bthMaskOff = 4 // the BTH byte that counts as 0xFF: FECN, BECN, reserved

	dontFragment = 0x4000
)

// Path is the part of the invariant CRC that two endpoints have in common: the pseudo
// header, which is 8 bytes of 0xFF, the IP header and the UDP header, fields that routers
// change being set to ones (IBTA annex A17):
//
//	IPv4: 8 x FF | 45 FF len(2) ID(2) 40 00 FF 11 FF FF src(4) dst(4)              | sport dport len FF FF
//	IPv6: 8 x FF | 6F FF FF FF len(2) 11 FF src(16) dst(16)                        | sport dport len FF FF
//
// Two fields differ from packet to packet: the lengths, and the IPv4 Identification;
// DF is taken to be set. A Path is a value and is never changed by its methods, so it may
// be copied and used by many goroutines. The zero Path is useless; use [NewPath].
//
// The methods that take a udpPayloadLen mean everything behind the UDP header, the ICRC
// included. It must be at most 65507.
type Path struct {
	// reg is the CRC register behind the pseudo header whose lengths and ID are zero.
	reg    uint32
	v6     bool
	pseudo [MaxPseudo]byte
}

// NewPath returns the path from src to dst, ports included. IPv4-mapped addresses are
// unmapped and zones ignored. Addresses that are invalid or of different families are the
// caller's bug and panic.
func NewPath(src, dst netip.AddrPort) Path {
	var p Path
	s, d := src.Addr().Unmap(), dst.Addr().Unmap()
	if !s.IsValid() || !d.IsValid() || s.Is4() != d.Is4() {
		panic("BUG: roce: path between " + src.String() + " and " + dst.String())
	}
	b := p.pseudo[:]
	for i := range b {
		b[i] = 0xFF
	}
	p.v6 = !s.Is4()
	if p.v6 {
		b[8] = 0x6F
		b[12], b[13] = 0, 0
		b[14] = 17
		s16, d16 := s.As16(), d.As16()
		copy(b[16:], s16[:])
		copy(b[32:], d16[:])
	} else {
		b[8] = 0x45
		binary.BigEndian.PutUint32(b[ipLenOff:], 0)
		binary.BigEndian.PutUint16(b[14:], dontFragment)
		b[17] = 17
		s4, d4 := s.As4(), d.As4()
		copy(b[20:], s4[:])
		copy(b[24:], d4[:])
	}
	n := p.PseudoLen()
	udp := b[n-8 : n]
	binary.BigEndian.PutUint16(udp, src.Port())
	binary.BigEndian.PutUint16(udp[2:], dst.Port())
	binary.BigEndian.PutUint16(udp[4:], 0)
	p.reg = crcShort(^uint32(0), b[:n])
	return p
}

// IPv6 reports whether the path has no IPv4 Identification to know.
func (p *Path) IPv6() bool { return p.v6 }

// PseudoLen is the length of the pseudo header: 36 or 56 bytes.
func (p *Path) PseudoLen() int {
	if p.v6 {
		return pseudoLen6
	}
	return pseudoLen4
}

// PutPseudo writes the pseudo header of one packet to dst, which needs PseudoLen bytes.
// ipID is ignored on IPv6.
func (p *Path) PutPseudo(dst []byte, udpPayloadLen int, ipID uint16) {
	n := copy(dst[:p.PseudoLen()], p.pseudo[:])
	udpLen := uint16(udpPayloadLen + 8)
	binary.BigEndian.PutUint16(dst[n-4:], udpLen)
	if p.v6 {
		binary.BigEndian.PutUint16(dst[ip6LenOff:], udpLen)
		return
	}
	binary.BigEndian.PutUint16(dst[ipLenOff:], udpLen+20)
	binary.BigEndian.PutUint16(dst[ipLenOff+2:], ipID)
}

// ICRCStaged returns the ICRC of a packet that lies behind its pseudo header in buf
// (BTH to pad), in one pass. It writes 0xFF into BTH byte 4 for that time and puts back
// what was there. [Path.ICRC] needs neither pseudo header nor patch and is faster.
func ICRCStaged(buf []byte, pseudoLen int) uint32 {
	masked := &buf[pseudoLen+bthMaskOff]
	was := *masked
	*masked = 0xFF
	sum := crc32.ChecksumIEEE(buf)
	*masked = was
	return sum
}

// far4 and far6 say what a 32-bit difference at the IP length field has become at the
// end of the pseudo header: one table for each of its bytes, of which IPv6 has two.
var far4, far6 = func() (t4, t6 [4][256]uint32) {
	fill := func(t *[4][256]uint32, bytes, zeros int) {
		for k := range bytes {
			for i := range 256 {
				r := uint32(i) << (8 * k)
				for range zeros {
					r = r>>8 ^ slicing[0][byte(r)]
				}
				t[k][i] = r
			}
		}
	}
	fill(&t4, 4, pseudoLen4-ipLenOff)
	fill(&t6, 2, pseudoLen6-ip6LenOff)
	return t4, t6
}()

// start returns the CRC register behind the pseudo header. The lengths and the ID are
// zero in p.reg, so their contributions are looked up and added.
func (p *Path) start(udpPayloadLen int, ipID uint16) uint32 {
	l := udpPayloadLen + 8
	// The UDP length is 4 bytes from the end: a register over 4 zero bytes.
	r := p.reg ^ slicing[3][byte(l>>8)] ^ slicing[2][byte(l)]
	if p.v6 {
		return r ^ far6[0][byte(l>>8)] ^ far6[1][byte(l)]
	}
	l += 20
	return r ^ far4[0][byte(l>>8)] ^ far4[1][byte(l)] ^ far4[2][byte(ipID>>8)] ^ far4[3][byte(ipID)]
}

// crcBTH advances register r over the 12 bytes of a BTH, masking byte 4.
func crcBTH(r uint32, b []byte) uint32 {
	_ = b[BTHLen-1]
	r = crcWord(r, binary.LittleEndian.Uint64(b)|0xFF<<(8*bthMaskOff))
	return crcZero4(r ^ binary.LittleEndian.Uint32(b[8:]))
}

// ICRC returns the ICRC of a packet in one piece: b is BTH to pad, without the ICRC and
// at least 12 bytes long. b is only read. ipID is ignored on IPv6.
func (p *Path) ICRC(b []byte, ipID uint16) uint32 {
	r := crcBTH(p.start(len(b)+ICRCLen, ipID), b)
	return ^crcLong(r, b[BTHLen:])
}

// ICRCState is an ICRC in the making, for a packet in several pieces. The zero value is
// useless; [Path.ICRCStart] makes one.
type ICRCState struct {
	reg uint32
}

// ICRCStart begins the ICRC of a packet whose first piece is hdr: at least the 12 bytes
// of the BTH, usually with the extension headers, only read. udpPayloadLen is the length
// of all pieces and of the ICRC.
func (p *Path) ICRCStart(udpPayloadLen int, ipID uint16, hdr []byte) ICRCState {
	r := crcBTH(p.start(udpPayloadLen, ipID), hdr)
	return ICRCState{reg: crcLong(r, hdr[BTHLen:])}
}

// Update goes over the next piece, of any length: payload, or the pad.
func (s *ICRCState) Update(piece []byte) { s.reg = crcLong(s.reg, piece) }

// Sum returns the ICRC of what has been gone over; more may follow.
func (s *ICRCState) Sum() uint32 { return ^s.reg }

// PutICRC writes an ICRC as the wire has it: 4 bytes, the least significant first, alone
// among all fields.
func PutICRC(dst []byte, sum uint32) { binary.LittleEndian.PutUint32(dst, sum) }

// Check verifies the ICRC at the end of a received UDP payload, given its IPv4
// Identification (ignored on IPv6). b is only read; too short a datagram is wrong.
func (p *Path) Check(b []byte, ipID uint16) bool {
	n := len(b) - ICRCLen
	return n >= BTHLen && binary.LittleEndian.Uint32(b[n:]) == p.ICRC(b[:n], ipID)
}

// Solve verifies the ICRC of a received UDP payload whose IPv4 Identification is unknown
// (an ordinary socket does not show it), and finds the Identification. The CRC is linear:
// the received ICRC differs from the one for ID 0 by what the ID's two bytes contribute,
// and that difference taken back to where they stand must be those two bytes and nothing
// else. So 16 bits of the 32 still check the packet: a damaged one passes once in 65536
// times, with a random ID. On IPv6 it is Check, and ipID is 0.
//
// It costs one pass over b and about ten nanoseconds. A caller who can predict the ID
// tries Check first and so keeps all 32 bits.
func (p *Path) Solve(b []byte) (ipID uint16, ok bool) {
	n := len(b) - ICRCLen
	if n < BTHLen {
		return 0, false
	}
	diff := binary.LittleEndian.Uint32(b[n:]) ^ p.ICRC(b[:n], 0)
	if p.v6 {
		return 0, diff == 0
	}
	// The register's low byte meets the ID's first byte.
	const idToEnd = pseudoLen4 - ipLenOff - 2
	diff = crcRewind(diff, idToEnd+n)
	return uint16(diff<<8 | diff>>8&0xFF), diff>>16 == 0
}
