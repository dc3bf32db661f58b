package cm

import (
	"encoding/binary"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// A device may have several CMs, one for each of its wires, which know nothing of each other but
// what is here: whose a MAD is, and which QP of a peer has a connection.

// Owner returns which of a number of CMs, a power of two, a MAD is for: data is what follows the
// MAD's header, attr its attribute.
//
// A message of an exchange that one of them knows carries that one's ID as the receiver's, which
// is at byte 4; a SIDR_REP has only one, at byte 0. What begins an exchange goes where the
// sender's ID says, so that repetitions of it meet the one that had the first. So does a REJ
// of somebody who never learnt our ID: it ends what his REQ began.
func Owner(attr roce.AttrID, data []byte, wires int) int {
	if len(data) < 8 {
		return 0
	}
	id := binary.BigEndian.Uint32(data[4:])
	if id == 0 || attr == roce.AttrREQ || attr == roce.AttrSIDRReq || attr == roce.AttrSIDRRep {
		id = binary.BigEndian.Uint32(data)
	}
	return int(id & uint32(wires-1))
}

// ours returns id as one of this CM's.
func (c *Config) ours(id uint32) uint32 { return id&^uint32(c.Wires-1) | uint32(c.Wire) }

// PeerQP identifies a queue pair of a peer.
type PeerQP struct {
	GUID uint64
	GID  roce.GID
	QPN  verbs.QPN
}

func (p peerID) peerQP() PeerQP { return PeerQP{p.guid, p.gid, verbs.QPN(p.n)} }

// Peers is how the CMs of a device notice that a peer uses a QP for a new connection whose old
// one another of them has (IBTA Vol 1, 12.9.8.3.1). The calls come during calls to a CM, and must
// not call back into it.
type Peers interface {
	// Claim says that a connection of the caller is with this QP, Release that it has ended.
	Claim(qp PeerQP, id ConnID)
	Release(qp PeerQP, id ConnID)
	// Stale reports whether a connection of another CM is with this QP; if so that one's
	// [CM.Stale] is to be called.
	Stale(qp PeerQP) bool
}

// Stale ends a connection of which another CM has learnt that its peer has forgotten it.
func (c *CM) Stale(now verbs.Instant, id ConnID) {
	if cn := c.conns[id]; cn != nil && cn.indexed {
		c.stale(now, cn)
	}
}
