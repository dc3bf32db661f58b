package cm

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// State is the state of a connection. The package documentation draws the transitions.
type State uint8

// The states. Those of ib_cm are there, except that its MRA_REQ_SENT and MRA_REP_SENT are
// flags of ReqRcvd and RepRcvd, and that a DREQ is answered at once, so there is no
// DREQ_RCVD.
const (
	// Closed: the connection does not exist (any more).
	Closed State = iota
	// ReqSent: waiting for a REP, repeating the REQ.
	ReqSent
	// MRAReqRcvd: the peer asked for patience; the REQ is not repeated for a while.
	MRAReqRcvd
	// RepRcvd: the program has to call Ready.
	RepRcvd
	// ReqRcvd: the program has to call Accept or Reject.
	ReqRcvd
	// RepSent: waiting for an RTU, repeating the REP.
	RepSent
	// MRARepRcvd: the peer asked for patience; the REP is not repeated for a while.
	MRARepRcvd
	// Connected: the connection is established.
	Connected
	// DreqSent: waiting for a DREP, repeating the DREQ.
	DreqSent
	// Rejecting: our REJ ended the handshake; whatever the peer repeats gets it again.
	Rejecting
	// Timewait: over; what the peer repeats is still answered.
	Timewait
	states
)

var stateNames = [states]string{
	"CLOSED", "REQ_SENT", "MRA_REQ_RCVD", "REP_RCVD", "REQ_RCVD", "REP_SENT", "MRA_REP_RCVD",
	"ESTABLISHED", "DREQ_SENT", "REJECTING", "TIMEWAIT",
}

// String returns the state's name as ib_cm spells it.
func (s State) String() string {
	if s < states {
		return stateNames[s]
	}
	return fmt.Sprintf("STATE_%d", uint8(s))
}

// legal holds, for each state, the set of states that may follow it.
var legal = [states]uint16{
	Closed:     1<<ReqSent | 1<<ReqRcvd,
	ReqSent:    1<<MRAReqRcvd | 1<<RepRcvd | 1<<Rejecting | 1<<Timewait,
	MRAReqRcvd: 1<<ReqSent | 1<<RepRcvd | 1<<Rejecting | 1<<Timewait,
	RepRcvd:    1<<Connected | 1<<Rejecting | 1<<Timewait,
	ReqRcvd:    1<<RepSent | 1<<Rejecting | 1<<Timewait,
	RepSent:    1<<MRARepRcvd | 1<<Connected | 1<<Rejecting | 1<<Timewait,
	MRARepRcvd: 1<<RepSent | 1<<Connected | 1<<Rejecting | 1<<Timewait,
	Connected:  1<<DreqSent | 1<<Timewait,
	DreqSent:   1 << Timewait,
	Rejecting:  1 << Closed,
	Timewait:   1 << Closed,
}

// conn is one connection, from Connect or REQ to the end of its timewait.
type conn struct {
	id ConnID
	// remote is the peer's communication ID and guid its device; they are known when
	// known is set. known, remote, guid and path form the key of CM.byPeer.
	remote uint32
	guid   uint64
	// tid is the transaction ID of the handshake, dreqTID the one of the last DREQ
	// received or sent.
	tid, dreqTID uint64
	service      roce.SID
	path         Path

	localQPN, remoteQPN verbs.QPN

	state  State
	active bool // we sent the REQ
	known  bool // the peer's ID and GUID are known
	// indexed: CM.byQPN finds the connection by the peer's QP.
	indexed bool
	// destroyed: the program wants no events but TimewaitExit.
	destroyed bool
	// commEst: established by COMM_EST, the RTU has not come yet.
	commEst bool
	// patience: we sent an MRA, so the peer may be quiet for mraServiceTime.
	patience bool
	// lingers: counted in CM.lingering.
	lingers bool
	// wasUp: was once established, so its QP's packets may still be under way.
	wasUp bool
	// vouches: counted in strangers.known.
	vouches bool
	// reason is what the REJ says, or why a DREQ was sent; rejects is the message it rejects.
	reason  verbs.RejectReason
	rejects roce.CMMessage

	// listener is set while the connection takes a place in its backlog.
	listener *listener

	// began is when the present wait began, limit when it ends in vain, next when the
	// message in mad is repeated; at is the earlier of the two, the key of CM.timers, and
	// slot the place there, -1 for none.
	began, limit, next, at verbs.Instant
	backoff                time.Duration
	slot                   int32

	// pending is what NextMAD shall send, sent what it has sent before: sets of part.
	// queued: the connection is in CM.outgoing.
	pending, sent part
	queued        bool
	// mad is the REQ, REP or DREQ that is being repeated; nil otherwise.
	mad *[roce.MADLen]byte
	// private is the private data of the RTU or REJ that may have to be said again.
	private []byte
}

// peerID identifies something at a peer: its communication ID or its QP. The peer's
// address is part of it, so that a third party who claims its GUID gets nowhere.
type peerID struct {
	guid uint64
	gid  roce.GID
	n    uint32
}

func (cn *conn) peerKey() peerID {
	return peerID{cn.guid, roce.GIDFromAddr(cn.path.Remote.Addr()), cn.remote}
}

func (cn *conn) qpnKey() peerID {
	return peerID{cn.guid, roce.GIDFromAddr(cn.path.Remote.Addr()), uint32(cn.remoteQPN)}
}

// from reports whether a is the peer's address; zones are not compared, since the same
// neighbour may be reached with and without.
func (cn *conn) from(a netip.Addr) bool {
	return cn.path.Remote.Addr().WithZone("") == a.WithZone("")
}

// setState is the only place where a state changes.
func (c *CM) setState(cn *conn, to State) {
	if legal[cn.state]&(1<<to) == 0 {
		panic(fmt.Sprintf("BUG: cm: transition %v to %v", cn.state, to))
	}
	if cn.listener != nil && (to == Connected || to == Rejecting || to == Timewait) {
		cn.listener.leave()
		cn.listener = nil
	}
	cn.state = to
}

// newConn returns a connection with a fresh ID, known to the maps; nil when no ID is
// free. Probing onwards from a random number finds a free one at once, since far fewer than
// 2^32 are taken, and leaves IDs as hard to guess.
func (c *CM) newConn() *conn {
	for i, start := uint32(0), c.cfg.Rand(); i < idProbes; i++ {
		id := ConnID(c.cfg.ours(start+i*uint32(c.cfg.Wires)) & c.idMask)
		if id == 0 || c.conns[id] != nil {
			continue
		}
		cn := &conn{id: id, slot: -1, limit: verbs.Never, next: verbs.Never, at: verbs.Never}
		c.conns[id] = cn
		c.most = max(c.most, len(c.conns))
		return cn
	}
	return nil
}

// idProbes bounds the search for a free communication ID.
const idProbes = 128

// learnPeer records who the peer is and lets MADs and stale connections be found by it.
func (c *CM) learnPeer(cn *conn, guid uint64, remote uint32, qpn verbs.QPN) {
	cn.known, cn.guid, cn.remote, cn.remoteQPN = true, guid, remote, qpn
	c.byPeer[cn.peerKey()] = cn
	c.byQPN[cn.qpnKey()] = cn
	cn.indexed = true
	if c.cfg.Peers != nil {
		c.cfg.Peers.Claim(cn.qpnKey().peerQP(), cn.id)
	}
}

// end moves a connection to Rejecting or Timewait and starts the wait there. Whatever
// was being repeated is not any more.
func (c *CM) end(now verbs.Instant, cn *conn, to State) {
	cn.wasUp = cn.wasUp || cn.state == Connected || cn.state == DreqSent
	c.setState(cn, to)
	c.unrepeat(cn)
	cn.pending &= sendRTU | sendREJ | sendDREP
	if cn.indexed {
		delete(c.byQPN, cn.qpnKey())
		cn.indexed = false
		if c.cfg.Peers != nil {
			c.cfg.Peers.Release(cn.qpnKey().peerQP(), cn.id)
		}
	}
	wait := c.cfg.TimeWait
	if to == Timewait && cn.pending&sendRTU == 0 {
		cn.private = nil
	} else if to == Rejecting && cn.patience {
		// The peer will not repeat itself before the time that our MRA asked for.
		wait += mraServiceTime.Duration()
	}
	cn.limit, cn.next = now.Add(wait), verbs.Never
	c.arm(cn)
	if cn.wasUp {
		return
	}
	// A connection that never was has little to wait for. So that a flood of attempts
	// cannot pile up, only so many are kept.
	if c.lingering < c.cfg.Backlog {
		c.lingering++
		cn.lingers = true
		return
	}
	if cn.pending&sendREJ != 0 {
		c.reply(cn.path, cn.tid, REJ, func(b []byte) { c.putREJ(cn, b) })
	}
	c.free(cn)
}

// free forgets a connection whose wait is over.
func (c *CM) free(cn *conn) {
	c.setState(cn, Closed)
	if cn.lingers {
		c.lingering--
	}
	cn.limit = verbs.Never
	c.arm(cn)
	cn.pending, cn.mad, cn.private = 0, nil, nil
	c.strangers.forget(cn)
	delete(c.conns, cn.id)
	if cn.known {
		delete(c.byPeer, cn.peerKey())
	}
	if len(c.conns) == 0 {
		// A map keeps the room that it had, and grows with what comes and goes.
		if c.most >= crowd {
			c.makeMaps()
		}
		c.most = 0
	}
	c.emit(cn, Event{Type: TimewaitExit})
}
