package roce

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strconv"
)

// GID is a global identifier: in RoCEv2 an IPv6 address, or an IPv4 address mapped
// into one (::ffff:a.b.c.d).
type GID [16]byte

// GIDFromAddr returns an address as a GID; a zone is dropped. The invalid Addr gives the
// zero GID.
func GIDFromAddr(a netip.Addr) GID { return a.As16() }

// AddrFromGID returns a GID as an address, unmapped.
func AddrFromGID(g GID) netip.Addr { return netip.AddrFrom16(g).Unmap() }

// String prints the address that the GID is.
func (g GID) String() string { return AddrFromGID(g).String() }

// PortSpace is an rdma_cm port space (enum rdma_ucm_port_space).
type PortSpace uint16

// The port spaces of RDMA_PS services.
const (
	PSIPoIB PortSpace = 0x0002
	PSTCP   PortSpace = 0x0106
	PSUDP   PortSpace = 0x0111
	PSIB    PortSpace = 0x013F
)

// String names the port space.
func (ps PortSpace) String() string { return string(ps.appendText(nil)) }

func (ps PortSpace) appendText(b []byte) []byte {
	switch ps {
	case PSIPoIB:
		return append(b, "ipoib"...)
	case PSTCP:
		return append(b, "tcp"...)
	case PSUDP:
		return append(b, "udp"...)
	case PSIB:
		return append(b, "ib"...)
	}
	return appendHex(append(b, "ps_0x"...), uint64(ps), 4)
}

// SID is a service ID. Those of rdma_cm hold a port space in bits 31-16 and a port in
// bits 15-0, the rest being zero.
type SID uint64

// ServiceID returns the service ID of a port.
func ServiceID(ps PortSpace, port uint16) SID { return SID(ps)<<16 | SID(port) }

// PortSpace returns the port space; it means something when IsIP holds.
func (id SID) PortSpace() PortSpace { return PortSpace(id >> 16) }

// Port returns the port; it means something when IsIP holds.
func (id SID) Port() uint16 { return uint16(id) }

// IsIP reports a service ID of rdma_cm, whose private data begins with an [IPCMHeader]:
// 0x0000000001 in the upper 40 bits.
func (id SID) IsIP() bool { return id>>24 == 1 }

// String prints tcp:7471 or the like for rdma_cm, and 16 hex digits for others.
func (id SID) String() string { return string(id.appendText(nil)) }

func (id SID) appendText(b []byte) []byte {
	if id.IsIP() {
		b = append(id.PortSpace().appendText(b), ':')
		return strconv.AppendUint(b, uint64(id.Port()), 10)
	}
	return appendHex(append(b, "0x"...), uint64(id), 16)
}

// IPCMHeaderLen is what rdma_cm puts in front of the user's private data in REQ and
// SIDR_REQ.
const IPCMHeaderLen = 36

// ErrIPCM: the private data does not begin with an rdma_cm header of version 0.
var ErrIPCM = errors.New("roce: malformed RDMA IP CM header")

// IPCMHeader tells the passive side who connects (IBTA annex A11):
//
//	0      version, 0
//	1      IP version(4) reserved(4)
//	2-3    source port
//	4-19   source address, IPv4 in the last 4 bytes
//	20-35  destination address, likewise
type IPCMHeader struct {
	// Src and Dst are unmapped after Decode.
	Src, Dst netip.Addr
	// SrcPort is the connecting side's port in its port space.
	SrcPort uint16
}

// Decode reads the first 36 bytes of private data; it fails with ErrIPCM.
func (h *IPCMHeader) Decode(b []byte) error {
	if len(b) < IPCMHeaderLen || b[0] != 0 {
		return ErrIPCM
	}
	switch b[1] >> 4 {
	case 4:
		h.Src = netip.AddrFrom4([4]byte(b[16:20]))
		h.Dst = netip.AddrFrom4([4]byte(b[32:36]))
	case 6:
		h.Src = AddrFromGID(GID(b[4:20]))
		h.Dst = AddrFromGID(GID(b[20:36]))
	default:
		return ErrIPCM
	}
	h.SrcPort = binary.BigEndian.Uint16(b[2:])
	return nil
}

// Put writes 36 bytes. Two IPv4 addresses, mapped or not, are written as IPv4.
func (h *IPCMHeader) Put(b []byte) {
	b = b[:IPCMHeaderLen]
	clear(b)
	binary.BigEndian.PutUint16(b[2:], h.SrcPort)
	src, dst := h.Src.Unmap(), h.Dst.Unmap()
	if src.Is4() && dst.Is4() {
		b[1] = 4 << 4
		s, d := src.As4(), dst.As4()
		copy(b[16:], s[:])
		copy(b[32:], d[:])
		return
	}
	b[1] = 6 << 4
	s, d := src.As16(), dst.As16()
	copy(b[4:], s[:])
	copy(b[20:], d[:])
}
