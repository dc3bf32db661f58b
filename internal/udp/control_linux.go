//go:build !doorbellportable

package udp

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// controlBytes has room for all control messages of one datagram. Received: packet
// information of both families (32 + 40 bytes on 64-bit systems), segment size (24), drop
// count (24). Sent: packet information (40), traffic class (24), segment size (24).
const controlBytes = 192

// controlBuf is a control buffer, made of words so that headers in it are aligned.
type controlBuf [controlBytes / 8]uint64

// control is what the control messages of a received buffer said.
type control struct {
	dst        netip.Addr // zero if they did not say
	segSize    int        // 0 if they did not say
	dropped    uint32     // the socket's drop count so far, if hasDropped
	hasDropped bool
}

// readControl reads the first n bytes of buf. The kernel wrote them, yet lengths are
// checked: nothing outside of buf is read whatever they say.
func (s *Socket) readControl(buf *controlBuf, n int) (c control) {
	base := unsafe.Pointer(buf)
	n = min(n, controlBytes)
	for off := 0; off+unix.SizeofCmsghdr <= n; {
		// off is a multiple of the word size and the header lies inside of buf.
		h := (*unix.Cmsghdr)(unsafe.Add(base, off))
		size := int(h.Len)
		if size < unix.SizeofCmsghdr || size > n-off {
			return c
		}
		// The structs below are read only where the message is long enough to hold them.
		data := unsafe.Add(base, off+unix.CmsgLen(0))
		size -= unix.CmsgLen(0)
		switch {
		case h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO && size >= 4:
			c.segSize = int(*(*int32)(data))
		case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL && size >= 4:
			c.dropped, c.hasDropped = *(*uint32)(data), true
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && size >= unix.SizeofInet4Pktinfo:
			// Addr is the destination in the IP header, Spec_dst the address to answer from.
			c.dst = netip.AddrFrom4((*unix.Inet4Pktinfo)(data).Addr)
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && size >= unix.SizeofInet6Pktinfo:
			p := (*unix.Inet6Pktinfo)(data)
			c.dst = s.zones.addr(p.Addr, p.Ifindex)
		}
		off += unix.CmsgSpace(size)
	}
	return c
}

// putControl appends a control message with room for size bytes of data at offset off and
// returns the data and the next offset. controlBuf has room for all that is ever put.
func putControl(buf *controlBuf, off, level, typ, size int) (data unsafe.Pointer, next int) {
	next = off + unix.CmsgSpace(size)
	if next > controlBytes {
		panic("BUG: udp: control buffer too small")
	}
	// off is a multiple of the word size, and off+CmsgSpace(size) is inside of buf.
	h := (*unix.Cmsghdr)(unsafe.Add(unsafe.Pointer(buf), off))
	h.Level, h.Type = int32(level), int32(typ)
	h.SetLen(unix.CmsgLen(size))
	return unsafe.Add(unsafe.Pointer(buf), off+unix.CmsgLen(0)), next
}
