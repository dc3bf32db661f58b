package qp

import "github.com/doorbell-rdma/doorbell/verbs"

// PD is the number of a protection domain. Every lookup compares it: memory of another
// domain does not exist for a queue pair.
type PD uint32

// Memory is how a queue pair reaches registered memory. Slices that it returns are used
// only inside the step in which they were asked for, with one exception: what NextPacket
// gathers is read until the wire has handed the packet to its link.
//
// Local may also be called by a poster that copies inline data, from any goroutine, so
// implementations look up without locks. An n of 0 is always allowed and returns an
// empty slice without looking at key or address (IBTA Vol 1, 9.7.4.1.5 and 10.6.3).
type Memory interface {
	// Local returns n bytes at addr of the region with this L_Key, or the completion
	// status of the work request that named them: LocProtErr when the key is unknown,
	// of another PD, without the access right, or when the range leaves the region.
	Local(pd PD, lkey uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus)
	// Remote does the same for an R_Key that a peer sent to queue pair qpn, which matters for
	// memory windows: they open memory to the queue pair they were bound on. RemAccessErr
	// when refused.
	Remote(pd PD, qpn verbs.QPN, rkey uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus)
	// Placed records that one RDMA WRITE into the region of rkey is complete; its bytes
	// are visible to whoever then sees the region's count grow.
	Placed(pd PD, rkey uint32)
	// CompareSwap and FetchAdd act on the 8 bytes at addr, which the caller has found
	// aligned, in one atomic step, and return the value before. They check the key for
	// RemoteAtomic as Remote does.
	CompareSwap(pd PD, qpn verbs.QPN, rkey uint32, addr, compare, swap uint64) (uint64, verbs.WCStatus)
	FetchAdd(pd PD, qpn verbs.QPN, rkey uint32, addr, add uint64) (uint64, verbs.WCStatus)
	// Invalidate takes away the remote access of rkey (SEND with invalidate that arrived on
	// queue pair qpn, or its own LOCAL_INV); false when the key does not exist or may not be
	// invalidated.
	Invalidate(pd PD, qpn verbs.QPN, rkey uint32) bool
	// Bind does a BIND_MW of queue pair qpn; false when it is refused, and then nothing has
	// changed.
	Bind(pd PD, qpn verbs.QPN, b *Bind) bool
}

// Bind is what a BIND_MW work request asks for: that the memory window of RKey's upper 24
// bits opens Length bytes at Addr of LKey's region for Access, to whoever knows RKey. A
// Length of 0 takes back what the window opened.
type Bind struct {
	RKey, LKey uint32
	Addr       uint64
	Length     uint32
	Access     verbs.Access
}
