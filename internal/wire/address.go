package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// ErrNoAH: every address handle is in use.
var ErrNoAH = errors.New("wire: no address handle left")

// route is the way to one address and port: all that a packet's transmission needs to know
// beside the packet. A connected queue pair has one, an address handle is one.
type route struct {
	dst    netip.AddrPort // where packets go
	src    netip.Addr     // and from which of our addresses
	class  uint8
	txPath roce.Path
}

func (w *Wire) routeTo(av *verbs.AV) route {
	return route{
		dst: av.Remote, src: av.Local, class: av.TrafficClass,
		txPath: roce.NewPath(netip.AddrPortFrom(av.Local, w.local.Port()), av.Remote),
	}
}

// Address handles are numbered like this, so that 0 is none and a handle that was destroyed
// names nothing until its slot has been used 4095 more times:
//
//	31       20 19        0
//	+----------+-----------+
//	| variant  | slot + 1  |
//	+----------+-----------+
//
// The numbers depend on nothing but the order of calls, so several wires that are told the
// same in the same order have the same handles.
const (
	ahSlotBits = 20
	// MaxAH is the number of address handles of one wire.
	MaxAH = 1<<ahSlotBits - 1
)

// addressHandle is where a UD message goes.
type addressHandle struct {
	route
	ah  verbs.AH
	pd  qp.PD
	mtu uint32
}

// ahTable finds address handles by number. Owner of the wire only.
type ahTable struct {
	slots []ahSlot
	free  []uint32 // oldest first
	max   int
}

type ahSlot struct {
	handle  *addressHandle
	variant uint32
}

func (t *ahTable) add(h *addressHandle) error {
	var i uint32
	switch {
	case len(t.free) > 0:
		i, t.free = t.free[0], t.free[1:]
	case len(t.slots) < t.max:
		i = uint32(len(t.slots))
		t.slots = append(t.slots, ahSlot{})
	default:
		return ErrNoAH
	}
	s := &t.slots[i]
	h.ah = verbs.AH(s.variant<<ahSlotBits | (i + 1))
	s.variant++
	s.handle = h
	return nil
}

// find returns the handle with this number, or nil.
func (t *ahTable) find(ah verbs.AH) *addressHandle {
	i := uint32(ah)&MaxAH - 1
	if i >= uint32(len(t.slots)) {
		return nil
	}
	if h := t.slots[i].handle; h != nil && h.ah == ah {
		return h
	}
	return nil
}

func (t *ahTable) remove(h *addressHandle) {
	i := uint32(h.ah)&MaxAH - 1
	t.slots[i].handle = nil
	t.free = append(t.free, i)
}

// AddressHandle implements qp.AddressHandles.
func (t *ahTable) AddressHandle(pd qp.PD, ah verbs.AH) (mtu uint32, ok bool) {
	h := t.find(ah)
	if h == nil || h.pd != pd {
		return 0, false
	}
	return h.mtu, true
}

// CreateAH makes an address handle: where UD messages that name it go. av's local address may
// be left out on a wire that is bound to one. mtu is what the path carries; 0, and what is more than the
// wire's largest, mean that. It fails with an error that wraps verbs.ErrBadAttr, or ErrNoAH.
func (w *Wire) CreateAH(pd qp.PD, av verbs.AV, mtu verbs.MTU) (verbs.AH, error) {
	if err := w.checkAV(&av); err != nil {
		return 0, err
	}
	if mtu == 0 || mtu > w.cfg.MaxMTU {
		mtu = w.cfg.MaxMTU
	}
	h := &addressHandle{route: w.routeTo(&av), pd: pd, mtu: uint32(mtu.Bytes())}
	if err := w.ahs.add(h); err != nil {
		return 0, err
	}
	return h.ah, nil
}

// DestroyAH ends an address handle. A posted request that still names it fails with
// LOC_QP_OP_ERR. The error wraps verbs.ErrBadAttr: there is no such handle.
func (w *Wire) DestroyAH(ah verbs.AH) error {
	h := w.ahs.find(ah)
	if h == nil {
		return fmt.Errorf("%w: address handle %#x", verbs.ErrBadAttr, uint32(ah))
	}
	w.ahs.remove(h)
	return nil
}

// source is somebody who sent us a datagram lately: what the ICRC of the next one begins
// with, and the IPv4 Identifications so far.
type source struct {
	from netip.AddrPort
	to   netip.Addr
	path roce.Path
	ids  idRun
}

// sources is a cache of them. It is small and forgets whoever has another's place: a packet
// of an unknown source costs a computation, and nobody's memory.
type sources struct {
	seed  uint64
	slots [1 << sourceBits]source
}

const sourceBits = 6

// find returns the source at an address; to is ours, port too. Both addresses must be of one
// family.
func (c *sources) find(from netip.AddrPort, to netip.Addr, port uint16) *source {
	a := from.Addr().As16()
	h := c.seed ^ binary.NativeEndian.Uint64(a[:8]) ^ bits.RotateLeft64(binary.NativeEndian.Uint64(a[8:]), 17) ^ uint64(from.Port())<<48
	s := &c.slots[h*0x9E3779B97F4A7C15>>(64-sourceBits)]
	if s.from != from || s.to != to {
		*s = source{from: from, to: to, path: roce.NewPath(from, netip.AddrPortFrom(to, port))}
	}
	return s
}
