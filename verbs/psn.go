package verbs

import "fmt"

// QPN is a queue pair number: 24 bits. 0 is reserved (SMI), 1 is the GSI that
// carries connection management, [QPNMulticast] addresses a multicast group.
type QPN uint32

const (
	// QPNGSI is the general services interface, QP1.
	QPNGSI QPN = 1
	// QPNMulticast is the destination of every multicast packet.
	QPNMulticast QPN = 0xFFFFFF
	// QPNMask covers the 24 bits that exist on the wire.
	QPNMask QPN = 0xFFFFFF
)

// String prints the number as rdma tools do: 0x followed by six hex digits.
func (n QPN) String() string { return fmt.Sprintf("0x%06x", uint32(n)) }

// PSN is a packet sequence number: 24 bits, modulo 2^24. PSNs are ordered only
// relative to each other (IBTA Vol 1, 9.7.2): compare them with [PSN.Before]
// and [PSN.Sub], never with <.
type PSN uint32

// PSNMask covers the 24 bits of a PSN.
const PSNMask PSN = 0xFFFFFF

// Add returns the PSN n after p; n may be negative.
func (p PSN) Add(n int) PSN { return (p + PSN(uint32(int32(n)))) & PSNMask }

// Next returns the PSN after p.
func (p PSN) Next() PSN { return (p + 1) & PSNMask }

// Sub returns p-q as a signed 24-bit difference in [-2^23, 2^23).
func (p PSN) Sub(q PSN) int { return int(int32(uint32(p-q)<<8) >> 8) }

// Before reports whether p lies in the 2^23 numbers before q.
func (p PSN) Before(q PSN) bool { return p.Sub(q) < 0 }

// String prints six hex digits, as captures and scenario files show PSNs.
func (p PSN) String() string { return fmt.Sprintf("%06x", uint32(p)) }
