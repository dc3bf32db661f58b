package cm

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// HandleMAD takes a MAD that QP1 received: from is where the datagram came from, to our
// address that it was sent to, mad its 256 bytes, of which nothing is kept. It
// never fails: what is wrong is dropped and counted.
func (c *CM) HandleMAD(now verbs.Instant, from netip.AddrPort, to netip.Addr, mad []byte) {
	from, to = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), to.Unmap()
	var m roce.MAD
	if m.Decode(mad) != nil || !m.IsCM() || m.AttrID < roce.AttrREQ || m.AttrID > roce.AttrAPR {
		c.drop(DropMalformed)
		return
	}
	if !unicast(from.Addr()) {
		c.drop(DropSource)
		return
	}
	c.counters.Received[m.AttrID-roce.AttrREQ].Add(1)
	in := input{now: now, from: from, to: to, tid: m.TID}
	switch m.AttrID {
	case roce.AttrREQ:
		var msg roce.REQ
		_ = msg.Decode(m.Data)
		c.handleREQ(in, &msg)
	case roce.AttrMRA:
		c.handleMRA(in, message[roce.MRA](m.Data))
	case roce.AttrREJ:
		c.handleREJ(in, message[roce.REJ](m.Data))
	case roce.AttrREP:
		var msg roce.REP
		_ = msg.Decode(m.Data)
		c.handleREP(in, &msg)
	case roce.AttrRTU:
		var msg roce.RTU
		_ = msg.Decode(m.Data)
		c.handleRTU(in, &msg)
	case roce.AttrDREQ:
		var msg roce.DREQ
		_ = msg.Decode(m.Data)
		c.handleDREQ(in, &msg)
	case roce.AttrDREP:
		var msg roce.DREP
		_ = msg.Decode(m.Data)
		c.handleDREP(in, &msg)
	case roce.AttrSIDRReq:
		c.handleSIDRReq(in, message[roce.SIDRReq](m.Data))
	case roce.AttrLAP:
		c.handleLAP(in, message[roce.LAP](m.Data))
	case roce.AttrSIDRRep:
		c.handleSIDRRep(in, message[roce.SIDRRep](m.Data))
	default: // APR: we never ask
		c.drop(DropUnknown)
	}
	c.debugCheck()
}

// message decodes what a MAD holds. Decode fails for a wrong length only, and a MAD's data has
// the right one. It allocates: the messages that every connection has do without it.
func message[M any, P interface {
	*M
	Decode(b []byte) error
}](data []byte) *M {
	m := new(M)
	_ = P(m).Decode(data)
	return m
}

// input is what is known about a MAD besides its message.
type input struct {
	now  verbs.Instant
	from netip.AddrPort
	to   netip.Addr
	tid  uint64
}

// handleREQ checks a REQ in the order of ib_cm: repeated? stale? for us? wanted?
func (c *CM) handleREQ(in input, m *roce.REQ) {
	gid := roce.GIDFromAddr(in.from.Addr())
	if cn := c.byPeer[peerID{m.LocalCAGUID, gid, m.LocalCommID}]; cn != nil {
		c.counters.Duplicate[REQ].Add(1)
		c.repeatedREQ(in, cn)
		return
	}
	back := sender(in.from, in.to, in.tid)
	reject := func(reason verbs.RejectReason, info []byte) {
		rej := roce.REJ{
			RemoteCommID: m.LocalCommID, Message: roce.MessageREQ, Reason: reason, Info: info, InfoLen: uint8(len(info)),
		}
		c.reply(back, in.tid, REJ, rej.Put)
	}
	// IBTA Vol 1, 12.9.8.3.1: the same QP in a new REQ means that the old connection is
	// dead at the other end.
	if old := c.byQPN[peerID{m.LocalCAGUID, gid, uint32(m.LocalQPN)}]; old != nil {
		reject(verbs.RejectStaleConn, nil)
		c.stale(in.now, old)
		return
	}
	if c.cfg.Peers != nil && c.cfg.Peers.Stale(PeerQP{m.LocalCAGUID, gid, m.LocalQPN}) {
		reject(verbs.RejectStaleConn, nil)
		return
	}
	if want := roce.AddrFromGID(m.Primary.RemoteGID); c.cfg.Ours != nil && !c.cfg.Ours(want) {
		ours := roce.GIDFromAddr(in.to)
		reject(verbs.RejectInvalidGID, ours[:])
		return
	}
	l := c.listeners[m.ServiceID]
	if l == nil {
		reject(verbs.RejectInvalidServiceID, nil)
		return
	}
	info := ReqInfo{
		Type: verbs.RC, QPN: m.LocalQPN, StartPSN: m.StartingPSN, MTU: m.PathMTU,
		ResponderResources: m.ResponderResources, InitiatorDepth: m.InitiatorDepth,
		RetryCnt: m.RetryCount, RNRRetry: m.RNRRetryCount, AckTimeout: m.Primary.AckTimeout, SRQ: m.SRQ,
		FlowLabel: m.Primary.FlowLabel, GUID: m.LocalCAGUID,
	}
	room, header := reqPrivateRoom(m.ServiceID)
	var ip roce.IPCMHeader
	switch {
	case m.TransportService == roce.ServiceUC:
		info.Type = verbs.UC
	case m.TransportService != roce.ServiceRC || m.ExtTransport != 0:
		reject(verbs.RejectInvalidTransportType, nil)
		return
	}
	switch {
	case !m.PathMTU.Valid():
		reject(verbs.RejectInvalidMTU, nil)
		return
	case !goodQPN(m.LocalQPN) || header > 0 && ip.Decode(m.PrivateData) != nil:
		reject(verbs.RejectUnsupportedRequest, nil)
		return
	case c.events.len() >= maxEventsPerBacklog*c.cfg.Backlog:
		c.drop(DropEvents)
		return
	case !l.total.enter(c.strangers.room(c.cfg.Backlog, in.from.Addr())):
		c.drop(DropBacklog)
		return
	}
	cn := c.newConn()
	if cn == nil {
		l.total.n.Add(-1)
		c.drop(DropIDs)
		return
	}
	info.SrcPort, info.Src, info.Dst = ip.SrcPort, ip.Src, ip.Dst
	cn.path, cn.tid, cn.service = back, in.tid, m.ServiceID
	cn.listener = l
	l.halfOpen++
	c.setState(cn, ReqRcvd)
	c.learnPeer(cn, m.LocalCAGUID, m.LocalCommID, m.LocalQPN)
	cn.began, cn.limit = in.now, in.now.Add(c.cfg.RequestTimeout)
	c.arm(cn)
	c.emit(cn, Event{Type: ReqReceived, Req: info, PrivateData: slices.Clone(m.PrivateData[header : header+room])})
}

// repeatedREQ answers a REQ whose connection exists.
func (c *CM) repeatedREQ(in input, cn *conn) {
	switch cn.state {
	case ReqRcvd:
		c.beg(in.now, cn)
	case Rejecting:
		if !cn.active {
			// Whoever repeats the REQ has not seen a REP and does not know our ID: say it so
			// that it is understood, as giveUp does.
			if cn.rejects = roce.MessageREQ; cn.reason == verbs.RejectTimeout {
				cn.reason = verbs.RejectConsumer
			}
			c.send(cn, sendREJ)
		}
	case Timewait:
		rej := roce.REJ{RemoteCommID: cn.remote, Message: roce.MessageREQ, Reason: verbs.RejectStaleConn}
		c.reply(cn.path, in.tid, REJ, rej.Put)
	case RepSent:
		c.strangers.credit() // the REP has its own timer
	}
	// MRARepRcvd, Connected, DreqSent: the REP has arrived.
}

// beg answers a repeated message with an MRA when the program takes its time. A
// repetition that comes soon needs none, and it is better not sent: after an MRA the
// peer is quiet, so what we then send and the network loses is missed later.
func (c *CM) beg(now verbs.Instant, cn *conn) {
	if cn.patience || now.Sub(cn.began) >= c.cfg.RetryMax {
		cn.patience = true
		c.send(cn, sendMRA)
	}
}

// stale ends a connection whose peer uses its QP for a new one.
func (c *CM) stale(now verbs.Instant, cn *conn) {
	switch cn.state {
	case Connected:
		cn.reason = verbs.RejectStaleConn
		c.disconnect(now, cn, nil)
	case ReqRcvd, RepRcvd, RepSent, MRARepRcvd:
		c.emit(cn, Event{Type: Rejected, Reason: verbs.RejectStaleConn})
		c.end(now, cn, Timewait)
	}
}

// find returns the connection that a MAD from the peer names by our ID and its own,
// or nil and the reason to drop the MAD. The peer's ID is not compared while we do not know it.
func (c *CM) find(in input, ours, theirs uint32) (*conn, Drop) {
	cn := c.conns[ConnID(ours)]
	switch {
	case cn == nil || cn.known && cn.remote != theirs:
		return nil, DropUnknown
	case !cn.from(in.from.Addr()):
		return nil, DropPeer
	}
	return cn, 0
}

// handleMRA lets the present wait last longer.
func (c *CM) handleMRA(in input, m *roce.MRA) {
	cn, why := c.find(in, m.RemoteCommID, m.LocalCommID)
	switch {
	case cn == nil:
		c.drop(why)
	case cn.tid != in.tid:
		c.drop(DropTID)
	case cn.state == ReqSent && m.Message == roce.MessageREQ:
		c.setState(cn, MRAReqRcvd)
		c.prolong(in.now, cn, m.ServiceTimeout, c.cfg.ConnectTimeout)
	case cn.state == RepSent && m.Message == roce.MessageREP:
		c.setState(cn, MRARepRcvd)
		c.prolong(in.now, cn, m.ServiceTimeout, c.cfg.AcceptTimeout)
	case cn.state == MRAReqRcvd && m.Message == roce.MessageREQ,
		cn.state == MRARepRcvd && m.Message == roce.MessageREP:
		c.counters.Duplicate[MRA].Add(1)
	default:
		c.drop(DropState)
	}
}

// prolong makes the present wait last for the time that an MRA asks for, at most
// ServiceMax, and lets patience begin anew after it. But nobody waits longer than
// total plus ServiceMax, however many MRAs come. Code 0 asks for nothing.
func (c *CM) prolong(now verbs.Instant, cn *conn, code verbs.AckTimeout, total time.Duration) {
	until := now.Add(min(code.Duration(), c.cfg.ServiceMax))
	cn.next = max(cn.next, until)
	cn.limit = max(cn.limit, min(until.Add(total), cn.began.Add(total).Add(c.cfg.ServiceMax)))
	c.arm(cn)
}

// handleREP takes the answer to our REQ, once; repeated ones get their RTU again.
func (c *CM) handleREP(in input, m *roce.REP) {
	cn, why := c.find(in, m.RemoteCommID, m.LocalCommID)
	switch {
	case cn == nil:
		c.drop(why)
		return
	case !cn.active:
		c.drop(DropUnknown)
		return
	case cn.tid != in.tid:
		c.drop(DropTID)
		return
	}
	switch cn.state {
	case ReqSent, MRAReqRcvd:
		c.acceptREP(in, cn, m)
		return
	case RepRcvd:
		c.beg(in.now, cn)
	case Connected:
		c.send(cn, sendRTU)
	case Rejecting:
		// Given up before this REP, so now the peer's ID is known to the REJ.
		if !cn.known {
			cn.remote = m.LocalCommID
		}
		c.send(cn, sendREJ)
	default:
		c.drop(DropState)
		return
	}
	c.counters.Duplicate[REP].Add(1)
}

// acceptREP takes the first REP.
func (c *CM) acceptREP(in input, cn *conn, m *roce.REP) {
	gid := roce.GIDFromAddr(in.from.Addr())
	if !goodQPN(m.LocalQPN) || c.byPeer[peerID{m.LocalCAGUID, gid, m.LocalCommID}] != nil {
		c.drop(DropMalformed)
		return
	}
	old := c.byQPN[peerID{m.LocalCAGUID, gid, uint32(m.LocalQPN)}]
	if old != nil || c.cfg.Peers != nil && c.cfg.Peers.Stale(PeerQP{m.LocalCAGUID, gid, m.LocalQPN}) {
		// As with a REQ: the peer's QP is new, so the old connection is dead there. Linux
		// rejects the REP as well, and so the program has to try again.
		cn.remote = m.LocalCommID
		cn.reason, cn.rejects = verbs.RejectStaleConn, roce.MessageREP
		c.emit(cn, Event{Type: Rejected, Reason: verbs.RejectStaleConn})
		c.send(cn, sendREJ)
		c.end(in.now, cn, Rejecting)
		if old != nil {
			c.stale(in.now, old)
		}
		return
	}
	c.setState(cn, RepRcvd)
	c.unrepeat(cn)
	c.learnPeer(cn, m.LocalCAGUID, m.LocalCommID, m.LocalQPN)
	cn.began, cn.limit = in.now, in.now.Add(c.cfg.RequestTimeout)
	c.arm(cn)
	c.emit(cn, Event{
		Type: RepReceived,
		Rep: RepInfo{
			QPN: m.LocalQPN, StartPSN: m.StartingPSN, ResponderResources: m.ResponderResources,
			InitiatorDepth: m.InitiatorDepth, RNRRetry: m.RNRRetryCount, TargetAckDelay: m.TargetAckDelay,
			SRQ: m.SRQ, GUID: m.LocalCAGUID,
		},
		PrivateData: slices.Clone(m.PrivateData),
	})
}

// handleRTU establishes the passive side. When COMM_EST was first, the RTU's private data
// still reaches the program.
func (c *CM) handleRTU(in input, m *roce.RTU) {
	cn, why := c.find(in, m.RemoteCommID, m.LocalCommID)
	switch {
	case cn == nil:
		c.drop(why)
		return
	case cn.active:
		c.drop(DropUnknown)
		return
	case cn.tid != in.tid:
		c.drop(DropTID)
		return
	}
	switch cn.state {
	case RepSent, MRARepRcvd:
		c.strangers.credit()
		c.establish(cn)
		c.emit(cn, Event{Type: Established, PrivateData: slices.Clone(m.PrivateData)})
	case Connected, DreqSent:
		if !cn.commEst {
			c.counters.Duplicate[RTU].Add(1)
			return
		}
		cn.commEst = false
		c.counters.RTULate.Add(1)
		c.emit(cn, Event{Type: RTULate, PrivateData: slices.Clone(m.PrivateData)})
	case Rejecting:
		// Our REJ and the RTU crossed, or the REJ was lost and the peer believes itself connected.
		c.counters.Duplicate[RTU].Add(1)
		cn.rejects = roce.MessageOther
		c.send(cn, sendREJ)
	default:
		c.drop(DropState)
	}
}

// handleREJ ends a connection that the peer refuses or has given up.
//
// Which one? ib_cm finds "timeout" by the sender's GUID, which it carries, and the
// sender's ID, since whoever timed out may not know our ID; everything else by our ID and,
// unless a REQ is refused, the sender's.
func (c *CM) handleREJ(in input, m *roce.REJ) {
	var cn *conn
	if m.Reason == verbs.RejectTimeout && m.InfoLen >= 8 {
		guid := binary.BigEndian.Uint64(m.Info)
		cn = c.byPeer[peerID{guid, roce.GIDFromAddr(in.from.Addr()), m.LocalCommID}]
	}
	if cn == nil {
		if cn = c.conns[ConnID(m.RemoteCommID)]; cn != nil && cn.known && cn.remote != m.LocalCommID &&
			!(m.Message == roce.MessageREQ && cn.active && m.LocalCommID == 0) {
			cn = nil
		}
	}
	switch {
	case cn == nil:
		c.drop(DropUnknown)
		return
	case !cn.from(in.from.Addr()):
		c.drop(DropPeer)
		return
	case cn.tid != in.tid:
		c.drop(DropTID)
		return
	}
	if cn.active && m.Message == roce.MessageREQ && cn.state != ReqSent && cn.state != MRAReqRcvd {
		// The REQ was answered, so this is about a repetition of it. Whoever takes back a REP
		// says that he rejects something else.
		c.counters.Duplicate[REJ].Add(1)
		return
	}
	switch cn.state {
	case ReqSent, MRAReqRcvd, RepRcvd, ReqRcvd, RepSent, MRARepRcvd:
		c.emit(cn, Event{Type: Rejected, Reason: m.Reason, PrivateData: slices.Clone(m.PrivateData)})
		c.end(in.now, cn, Timewait)
	case Connected, DreqSent:
		// The peer missed our RTU for good, or lost its QP.
		c.disconnected(in.now, cn, m.Reason, m.PrivateData)
	default:
		c.counters.Duplicate[REJ].Add(1)
	}
}

// disconnected reports the end of an established connection.
func (c *CM) disconnected(now verbs.Instant, cn *conn, reason verbs.RejectReason, private []byte) {
	c.emit(cn, Event{Type: Disconnected, Reason: reason, PrivateData: slices.Clone(private)})
	c.end(now, cn, Timewait)
}

// handleDREQ answers every DREQ with a DREP, so that a peer whose DREP was lost, or that
// remembers what we have forgotten, can go on.
func (c *CM) handleDREQ(in input, m *roce.DREQ) {
	cn, why := c.find(in, m.RemoteCommID, m.LocalCommID)
	switch {
	case cn == nil && why == DropPeer:
		c.drop(DropPeer)
		return
	case cn == nil || !cn.known:
		drep := roce.DREP{LocalCommID: m.RemoteCommID, RemoteCommID: m.LocalCommID}
		c.reply(sender(in.from, in.to, in.tid), in.tid, DREP, drep.Put)
		return
	}
	switch cn.state {
	case RepSent, MRARepRcvd, Connected, DreqSent, Rejecting, Timewait:
	default:
		c.drop(DropState)
		return
	}
	if m.RemoteQPN != cn.localQPN {
		c.drop(DropQPN)
		return
	}
	cn.dreqTID = in.tid
	c.send(cn, sendDREP)
	if cn.state == Rejecting || cn.state == Timewait {
		c.counters.Duplicate[DREQ].Add(1)
		return
	}
	// In RepSent our RTU was lost, yet the peer has been up and may have sent.
	cn.wasUp = true
	c.disconnected(in.now, cn, cn.reason, m.PrivateData)
}

// handleDREP ends the wait for it.
func (c *CM) handleDREP(in input, m *roce.DREP) {
	cn, why := c.find(in, m.RemoteCommID, m.LocalCommID)
	switch {
	case cn == nil:
		c.drop(why)
	case cn.state == DreqSent:
		c.disconnected(in.now, cn, cn.reason, m.PrivateData)
	case cn.state == Timewait:
		c.counters.Duplicate[DREP].Add(1)
	default:
		c.drop(DropState)
	}
}

// handleLAP refuses an alternate path: there are none in RoCE.
func (c *CM) handleLAP(in input, m *roce.LAP) {
	cn, why := c.find(in, m.RemoteCommID, m.LocalCommID)
	switch {
	case cn == nil:
		c.drop(why)
	case cn.state != Connected:
		c.drop(DropState)
	default:
		apr := roce.APR{LocalCommID: uint32(cn.id), RemoteCommID: cn.remote, Status: roce.APRUnsupported}
		c.reply(cn.path, in.tid, APR, apr.Put)
	}
}
