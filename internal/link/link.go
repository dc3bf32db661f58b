// Package link is the seam between a wire, which knows RoCEv2 and no sockets, and
// whatever carries its datagrams: a UDP socket (internal/udp) or a simulated network
// (internal/netsim). It holds the two message shapes and the interface, nothing else.
//
// Both directions speak of trains: one buffer that holds several datagrams of equal
// size, the last one possibly shorter, as UDP segmentation offload (GSO) sends them
// and receive offload (GRO) delivers them. Segment k of a train that we send leaves
// with IPv4 Identification k; a lone datagram leaves with 0. A link without offloads
// splits a train itself and must then say so with Caps.MaxSegs = 1, so that the wire
// computes its checksums for Identification 0 and sends no trains.
package link

import "net/netip"

// Rx is one received buffer. Buf belongs to the link and is valid until the next Recv.
type Rx struct {
	// Buf holds one UDP payload, or a train of them.
	Buf []byte
	// SegSize is the size of each datagram in Buf but the last; 0 means one datagram.
	SegSize int
	// Src is where it came from, Dst the local address it was sent to; both unmapped.
	Src netip.AddrPort
	Dst netip.Addr
	// Truncated says that the datagram was longer than the buffer; drop it.
	Truncated bool
}

// Tx is one buffer to send: a datagram, or a train of them. The link keeps nothing of
// it after Send has taken it.
type Tx struct {
	// Gather is the payload in pieces, in order.
	Gather [][]byte
	// Len is the sum of the pieces.
	Len int
	// SegSize is the size of each datagram but the last; 0 means one datagram.
	SegSize int
	// Dst is the peer, Src our own address on the path (never unspecified).
	Dst netip.AddrPort
	Src netip.Addr
	// TrafficClass is the TOS byte or IPv6 traffic class; 0 is the socket's default.
	TrafficClass uint8
}

// Caps says what a link can do at this moment; it may lose abilities while it is open.
type Caps struct {
	// MaxSegs is the number of datagrams a train may hold; 1 means no trains.
	MaxSegs int
	// MaxBytes bounds the length of a train.
	MaxBytes int
	// MTU is the IP MTU of the path's first hop as far as known, 0 if not.
	MTU int
	// RecvBuffer is the effective receive buffer in the kernel's own count, 0 if unknown.
	RecvBuffer int
	// RecvTrains says that a train arrives as one buffer here (GRO).
	RecvTrains bool
	// ControlsID says that the IPv4 Identification of what we send is ours to know.
	ControlsID bool
}

// Link carries datagrams. Only the owner of the wire calls it. No method blocks.
type Link interface {
	// Recv fills msgs with what has arrived and returns how many; 0 when nothing has.
	// An error means that the link is dead; transient faults are counted and hidden.
	Recv(msgs []Rx) (int, error)
	// Send hands over msgs in order and returns how many were taken. A message that
	// cannot be sent for a reason of its own (too long, unreachable) is counted as
	// taken and lost. Fewer than len(msgs) means "would block": offer the rest again
	// later. An error means that the link is dead.
	Send(msgs []Tx) (int, error)
	// Caps returns the present abilities; cheap enough to ask before each batch.
	Caps() Caps
	// LocalAddr returns the bound address and port; the address may be unspecified.
	LocalAddr() netip.AddrPort
}
