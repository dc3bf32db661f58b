package cm

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// What Linux writes into every REQ and REP, and we too, whatever our own timers are
// (facts of ib_cm and rdma_cm; seen in captures of rdma_rxe).
const (
	maxCMRetries  = 15 // CMA_MAX_CM_RETRIES
	hopLimit      = 64
	permissiveLID = 0xFFFF
	defaultPKey   = 0xFFFF
)

// Time codes that Linux writes, likewise.
const (
	responseTimeout verbs.AckTimeout = 20 // CMA_CM_RESPONSE_TIMEOUT
	targetAckDelay  verbs.AckTimeout = 15 // rdma_rxe's
	// DefaultAckTimeout is what a REQ says when ReqParams.AckTimeout is 0: 2.1 s.
	DefaultAckTimeout verbs.AckTimeout = 19
)

// MaxReqPrivate is the private data that a REQ of rdma_cm has room for: 56 bytes.
const MaxReqPrivate = roce.REQPrivateLen - roce.IPCMHeaderLen

// ReqParams is what Connect needs to know.
type ReqParams struct {
	Path
	ServiceID roce.SID
	// SrcPort is our port in the service's port space, as the peer will see it. It means
	// nothing for service IDs that are not of rdma_cm.
	SrcPort uint16
	// Type is RC or UC.
	Type verbs.QPType
	QPN  verbs.QPN
	// StartPSN is the PSN that we expect first (our RQPSN): what the peer must start
	// sending with. It is not the one that we send first; that one comes in the REP.
	StartPSN verbs.PSN
	MTU      verbs.MTU
	// ResponderResources is how many READs and atomics of the peer we serve at a time,
	// InitiatorDepth how many we want to have outstanding.
	ResponderResources, InitiatorDepth uint8
	// RetryCnt and RNRRetry are for the peer's QP: 0 to 7.
	RetryCnt, RNRRetry uint8
	// AckTimeout is for the peer's QP; 0 means DefaultAckTimeout.
	AckTimeout verbs.AckTimeout
	SRQ        bool
	// PrivateData is at most MaxReqPrivate bytes, 92 for services that are not of
	// rdma_cm. It is copied.
	PrivateData []byte
}

// RepParams is what Accept needs to know.
type RepParams struct {
	QPN verbs.QPN
	// StartPSN is the PSN that we expect first; see ReqParams.
	StartPSN                           verbs.PSN
	ResponderResources, InitiatorDepth uint8
	// RNRRetry is for the peer's QP: 0 to 7.
	RNRRetry uint8
	SRQ      bool
	// PrivateData is at most 196 bytes. It is copied.
	PrivateData []byte
}

// fits checks private data against what a message has room for.
func fits(private []byte, room int) error {
	if len(private) > room {
		return fmt.Errorf("%w: %d bytes, room for %d", ErrPrivateData, len(private), room)
	}
	return nil
}

// goodQPN reports whether n can be a connection's QP: 24 bits, none of the special ones.
func goodQPN(n verbs.QPN) bool { return n > verbs.QPNGSI && n < verbs.QPNMulticast }

// reqPrivateRoom is what a REQ for a service has room for, and how many bytes of IP CM
// header stand before it.
func reqPrivateRoom(id roce.SID) (room, header int) {
	if id.IsIP() {
		return MaxReqPrivate, roce.IPCMHeaderLen
	}
	return roce.REQPrivateLen, 0
}

// Connect sends a REQ. A RepReceived, Rejected or Unreachable event follows within
// ConnectTimeout (and what MRAs add to it). Errors: ErrAddress, ErrParam,
// ErrPrivateData, ErrNoIDs.
func (c *CM) Connect(now verbs.Instant, p ReqParams) (ConnID, error) {
	local, remote := p.Local.Unmap(), p.Remote.Addr().Unmap()
	if !unicast(local) || !unicast(remote) || local.Is4() != remote.Is4() {
		return 0, fmt.Errorf("%w: from %v to %v", ErrAddress, p.Local, p.Remote)
	}
	port := p.Remote.Port()
	if port == 0 {
		port = roce.Port
	}
	service := roce.ServiceRC
	switch p.Type {
	case verbs.RC:
	case verbs.UC:
		service = roce.ServiceUC
	default:
		return 0, fmt.Errorf("%w: QP type %v", ErrParam, p.Type)
	}
	if p.AckTimeout == 0 {
		p.AckTimeout = DefaultAckTimeout
	}
	switch {
	case !goodQPN(p.QPN):
		return 0, fmt.Errorf("%w: QPN %v", ErrParam, p.QPN)
	case !p.MTU.Valid():
		return 0, fmt.Errorf("%w: MTU code %d", ErrParam, uint8(p.MTU))
	case p.RetryCnt > 7 || p.RNRRetry > 7:
		return 0, fmt.Errorf("%w: retry counts %d, %d", ErrParam, p.RetryCnt, p.RNRRetry)
	case p.AckTimeout > verbs.MaxAckTimeout:
		return 0, fmt.Errorf("%w: ack timeout code %d", ErrParam, p.AckTimeout)
	case p.StartPSN > verbs.PSNMask:
		return 0, fmt.Errorf("%w: starting PSN %v", ErrParam, p.StartPSN)
	}
	room, header := reqPrivateRoom(p.ServiceID)
	if err := fits(p.PrivateData, room); err != nil {
		return 0, err
	}
	cn := c.newConn()
	if cn == nil {
		return 0, ErrNoIDs
	}
	cn.active, cn.service, cn.localQPN = true, p.ServiceID, p.QPN
	cn.path = Path{Local: local, Remote: netip.AddrPortFrom(remote, port)}
	cn.tid = c.newTID()

	var private [roce.REQPrivateLen]byte
	var flow uint32
	if header > 0 {
		h := roce.IPCMHeader{Src: local, Dst: remote, SrcPort: p.SrcPort}
		h.Put(private[:])
		// Linux: the label of a RoCEv2 path is made from both ports.
		flow = (uint32(p.SrcPort)*31 + uint32(p.ServiceID.Port())) & 0xFFFFF
	}
	copy(private[header:], p.PrivateData)
	req := roce.REQ{
		LocalCommID: uint32(cn.id), ServiceID: p.ServiceID, LocalCAGUID: c.cfg.GUID, LocalQPN: p.QPN,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth,
		RemoteCMTimeout: responseTimeout, LocalCMTimeout: responseTimeout,
		TransportService: service, StartingPSN: p.StartPSN, RetryCount: p.RetryCnt, PKey: defaultPKey,
		PathMTU: p.MTU, RNRRetryCount: p.RNRRetry, MaxCMRetries: maxCMRetries, SRQ: p.SRQ,
		Primary: roce.CMPath{
			LocalLID: permissiveLID, RemoteLID: permissiveLID,
			LocalGID: roce.GIDFromAddr(local), RemoteGID: roce.GIDFromAddr(remote),
			FlowLabel: flow, HopLimit: hopLimit, AckTimeout: p.AckTimeout,
		},
		PrivateData: private[:],
	}
	c.setState(cn, ReqSent)
	c.startRepeating(now, cn, REQ, cn.tid, c.cfg.ConnectTimeout, req.Put)
	return cn.id, nil
}

// Accept answers a ReqReceived with a REP. Established, RTULate (when Established was
// called before), Rejected, Unreachable or Disconnected follows. Errors: ErrUnknownConn,
// ErrState (also when the peer gave up meanwhile), ErrParam, ErrPrivateData.
func (c *CM) Accept(now verbs.Instant, id ConnID, p RepParams) error {
	cn := c.conns[id]
	switch {
	case cn == nil:
		return ErrUnknownConn
	case cn.state != ReqRcvd:
		return ErrState
	case !goodQPN(p.QPN):
		return fmt.Errorf("%w: QPN %v", ErrParam, p.QPN)
	case p.RNRRetry > 7:
		return fmt.Errorf("%w: RNR retry count %d", ErrParam, p.RNRRetry)
	case p.StartPSN > verbs.PSNMask:
		return fmt.Errorf("%w: starting PSN %v", ErrParam, p.StartPSN)
	}
	if err := fits(p.PrivateData, roce.REPPrivateLen); err != nil {
		return err
	}
	cn.localQPN = p.QPN
	cn.pending &^= sendMRA
	rep := roce.REP{
		LocalCommID: uint32(cn.id), RemoteCommID: cn.remote, LocalQPN: p.QPN, StartingPSN: p.StartPSN,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth,
		TargetAckDelay: targetAckDelay, RNRRetryCount: p.RNRRetry, SRQ: p.SRQ, LocalCAGUID: c.cfg.GUID,
		PrivateData: p.PrivateData,
	}
	c.setState(cn, RepSent)
	c.startRepeating(now, cn, REP, cn.tid, c.cfg.AcceptTimeout, rep.Put)
	return nil
}

// Reject refuses a connection that is not established: a request (ReqReceived), a REP
// (RepReceived), or, on second thoughts, what Accept granted, before its RTU. While our REQ
// is unanswered the peer knows nothing that could be rejected: use Destroy. No event but
// TimewaitExit follows. Errors: ErrUnknownConn, ErrState, ErrPrivateData (at most 148 bytes).
func (c *CM) Reject(now verbs.Instant, id ConnID, reason verbs.RejectReason, private []byte) error {
	cn := c.conns[id]
	if cn == nil {
		return ErrUnknownConn
	}
	switch cn.state {
	case RepRcvd, ReqRcvd, RepSent, MRARepRcvd:
	default:
		return ErrState
	}
	if err := fits(private, roce.REJPrivateLen); err != nil {
		return err
	}
	c.giveUp(now, cn, reason, private)
	return nil
}

// giveUp ends a handshake with a REJ, which says the reason as well as the state allows.
func (c *CM) giveUp(now verbs.Instant, cn *conn, reason verbs.RejectReason, private []byte) {
	cn.reason, cn.rejects, cn.private = reason, roce.MessageOther, compact(private)
	mute := false
	switch cn.state {
	case ReqSent, MRAReqRcvd:
		if cn.sent&sendAgain == 0 {
			c.end(now, cn, Timewait) // not even the REQ has left
			return
		}
		// Without the peer's ID only "timeout" can be understood: it carries our GUID.
		cn.reason = verbs.RejectTimeout
	case RepRcvd:
		cn.rejects = roce.MessageREP
	case ReqRcvd:
		cn.rejects = roce.MessageREQ
		if reason == verbs.RejectTimeout {
			// Linux looks a "timeout" up by our GUID and ID, and knows neither.
			cn.reason = verbs.RejectConsumer
		}
	case RepSent, MRARepRcvd:
		if cn.sent&sendAgain == 0 {
			cn.rejects = roce.MessageREQ // the REP has not left
		}
		mute = reason == verbs.RejectTimeout && !c.strangers.afford(now, cn)
	}
	if mute {
		c.counters.Withheld.Add(1) // said when the peer says something
	} else {
		c.send(cn, sendREJ)
	}
	c.end(now, cn, Rejecting)
}

// Ready sends the RTU: the active side's QP is in RTS. The connection is established;
// each repeated REP is answered with the same RTU. Errors: ErrUnknownConn, ErrState,
// ErrEstablished, ErrPrivateData (at most 224 bytes).
func (c *CM) Ready(now verbs.Instant, id ConnID, private []byte) error {
	cn := c.conns[id]
	switch {
	case cn == nil:
		return ErrUnknownConn
	case cn.state == Connected:
		return ErrEstablished
	case cn.state != RepRcvd:
		return ErrState
	}
	if err := fits(private, roce.RTUPrivateLen); err != nil {
		return err
	}
	cn.private = compact(private)
	cn.pending &^= sendMRA
	c.establish(cn)
	c.send(cn, sendRTU)
	return nil
}

// Established tells the CM that the peer's first message has arrived (COMM_EST) and
// counts as an RTU: the REP is not repeated any more. An RTU that comes later makes an
// RTULate event. Errors mirror ib_cm_notify: ErrEstablished when an RTU was first, ErrState in
// any other state than REP sent, ErrUnknownConn.
func (c *CM) Established(now verbs.Instant, id ConnID) error {
	cn := c.conns[id]
	if cn == nil {
		return ErrUnknownConn
	}
	switch cn.state {
	case RepSent, MRARepRcvd:
		cn.commEst = true
		c.counters.CommEst.Add(1)
		c.establish(cn)
		return nil
	case Connected:
		return ErrEstablished
	}
	return ErrState
}

// establish ends the handshake well.
func (c *CM) establish(cn *conn) {
	c.setState(cn, Connected)
	c.strangers.meet(cn)
	c.unrepeat(cn)
	cn.limit = verbs.Never
	c.arm(cn)
}

// Disconnect sends a DREQ; Disconnected follows within DisconnectTimeout. Errors:
// ErrUnknownConn, ErrState (not established, or ending already), ErrPrivateData (at most
// 220 bytes).
func (c *CM) Disconnect(now verbs.Instant, id ConnID, private []byte) error {
	cn := c.conns[id]
	switch {
	case cn == nil:
		return ErrUnknownConn
	case cn.state != Connected:
		return ErrState
	}
	if err := fits(private, roce.DREQPrivateLen); err != nil {
		return err
	}
	c.disconnect(now, cn, private)
	return nil
}

// disconnect sends the DREQ of an established connection and repeats it.
func (c *CM) disconnect(now verbs.Instant, cn *conn, private []byte) {
	c.setState(cn, DreqSent)
	c.startRepeating(now, cn, DREQ, c.dreqTID(cn), c.cfg.DisconnectTimeout, dreqOf(cn, private).Put)
}

// dreqOf returns the DREQ that ends cn.
func dreqOf(cn *conn, private []byte) *roce.DREQ {
	return &roce.DREQ{
		LocalCommID: uint32(cn.id), RemoteCommID: cn.remote, RemoteQPN: cn.remoteQPN, PrivateData: private,
	}
}

// dreqTID returns the transaction ID of a DREQ of ours: the handshake's again if that
// was ours, as Linux does it, otherwise a new one.
func (c *CM) dreqTID(cn *conn) uint64 {
	if cn.active {
		return cn.tid
	}
	return c.newTID()
}

// Destroy forgets a connection in whatever state it is, at once: it says once what is
// proper (REJ before it is established, DREQ afterwards) and waits for nothing. Only
// TimewaitExit follows, after TimeWait. Unknown IDs are ignored.
func (c *CM) Destroy(now verbs.Instant, id ConnID) {
	cn := c.conns[id]
	if cn == nil || cn.destroyed {
		return
	}
	cn.destroyed = true
	switch cn.state {
	case ReqSent, MRAReqRcvd, RepRcvd, ReqRcvd, RepSent, MRARepRcvd:
		c.giveUp(now, cn, verbs.RejectConsumer, nil)
	case Connected:
		c.disconnect(now, cn, nil)
		fallthrough
	case DreqSent:
		mad, unsent := cn.mad, cn.pending&sendAgain != 0
		c.end(now, cn, Timewait)
		if unsent {
			cn.mad = mad
			c.send(cn, sendAgain)
		}
	}
}

// compact copies private data without the zeros at its end, which the wire adds again;
// nil when nothing is left.
func compact(private []byte) []byte {
	n := len(private)
	for n > 0 && private[n-1] == 0 {
		n--
	}
	if n == 0 {
		return nil
	}
	return append(make([]byte, 0, n), private[:n]...)
}

// guidBytes returns a GUID as it is on the wire.
func guidBytes(guid uint64) []byte { return binary.BigEndian.AppendUint64(nil, guid) }
