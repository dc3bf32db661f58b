package wire

import (
	"encoding/binary"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Siblings is the other wires of a port, as one of them sees them. The calls come during a
// step, under the caller's owner: they must not block or keep slices.
type Siblings interface {
	// HandOver gives a datagram to the wire that it is for, whose owner is to call Inject;
	// false when it has no room.
	HandOver(to int, rx *link.Rx, b []byte, seg int) bool
	// The owner of the wire that Stale finds is to call Wire.Stale.
	cm.Peers
}

// Offsets in a management datagram: BTH, DETH, MAD.
const (
	gsiAttr = roce.BTHLen + roce.DETHLen + 16
	gsiData = roce.BTHLen + roce.DETHLen + roce.MADHeaderLen
)

// Owner returns which of a port's wires, a power of two, a UDP payload is for. It is what a
// program in the kernel computes to choose the socket, so it looks at as little as possible and
// has an answer for everything: what is short or wrong is whoever's.
func Owner(b []byte, wires int) int {
	if len(b) < 8 {
		return 0
	}
	n := verbs.QPN(binary.BigEndian.Uint32(b[4:]) & 0xFFFFFF)
	switch {
	case n != verbs.QPNGSI:
		return int(n>>Shift) & (wires - 1)
	case len(b) < gsiData+8:
		return 0
	}
	return cm.Owner(roce.AttrID(binary.BigEndian.Uint16(b[gsiAttr:])), b[gsiData:], wires)
}

// misdirected gives a datagram to the wire that it is for, and reports whether that is another.
// The system picks the socket by the same rule, so this is for what it did not look into: a train
// that a network adapter made of packets of two queue pairs, a system that refused the rule.
func (w *Wire) misdirected(to int, rx *link.Rx, b []byte, seg int) bool {
	if to == w.cfg.Index || to >= w.cfg.Wires {
		return false
	}
	w.Counters.Misdirected.Add(1)
	if !w.cfg.Siblings.HandOver(to, rx, b, seg) {
		w.Counters.DropMisdirected.Add(1)
	}
	return true
}

// Inject receives a datagram that another wire was sent: b, the datagram at place seg of rx's
// train. A step is to follow.
func (w *Wire) Inject(now verbs.Instant, rx *link.Rx, b []byte, seg int) {
	w.receiveDatagram(now, rx, b, seg)
}

// Stale ends a connection whose peer uses its queue pair for a new one, of which another wire
// has heard. A step is to follow.
func (w *Wire) Stale(now verbs.Instant, id cm.ConnID) {
	w.cm.Stale(now, id)
	w.cmEvents(now)
}
