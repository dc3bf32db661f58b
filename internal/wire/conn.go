package wire

import (
	"errors"
	"fmt"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Conn is one connection: what the connection manager knows it by, and the queue pair that
// it opens. The wire moves the queue pair; programs only see it in RTR or RTS.
//
// There is a second kind of consumer, who drives the queue pair itself (ConnParam.Raw), as
// programs above a plain ib_cm do: the wire then moves nothing and tells everything.
//
//	active:  Dial, EventConnectResponse: Attr(RTR), Attr(RTS), Ready
//	passive: ConnRequest: Negotiate, Attr(RTR), AcceptRaw; EventEstablished, or EventCommEst
//	         and Notify: Attr(RTS)
//
//	active:  Dial --REQ-->      <--REP-- RTR, RTS, --RTU-->   EventEstablished
//	passive: <--REQ-- ConnRequest, Accept: RTR, --REP-->      <--RTU-- or a first request: RTS, EventEstablished
type Conn struct {
	// Tag is the owner's side's to use.
	Tag any
	// Path is where the peer is; set once.
	Path cm.Path
	// Reason says why, after EventRejected, and after EventDisconnected when the end was not an
	// orderly one.
	Reason verbs.RejectReason
	// Req is what the peer's REQ said (passive), Rep what its REP said (active).
	Req cm.ReqInfo
	Rep cm.RepInfo

	id       cm.ConnID
	w        *Wire
	qp       *QP
	typ      verbs.QPType
	passive  bool
	state    connState
	startPSN verbs.PSN
	params   ConnParam
	peerExt  extension // what the peer's REQ or REP offered
	offered  bool      // it did
}

type connState uint8

const (
	connIdle        connState = iota
	connConnecting            // REQ sent
	connRequested             // REQ received, no answer yet
	connAccepted              // REP sent
	connEstablished           // both may send
	connDown                  // rejected, unreachable or disconnected
)

// ID returns the local communication ID.
func (c *Conn) ID() cm.ConnID { return c.id }

// Type returns the service that the connection is for: RC or UC.
func (c *Conn) Type() verbs.QPType { return c.typ }

// Passive reports whether the peer asked for the connection.
func (c *Conn) Passive() bool { return c.passive }

// QP returns the queue pair, nil before Accept and after DestroyQP.
func (c *Conn) QP() *QP { return c.qp }

// ConnParam is what a side brings into a connection. Zero fields take the defaults beside
// them.
type ConnParam struct {
	// PrivateData travels in the REQ (at most 56 bytes) or REP (at most 196).
	PrivateData []byte
	// ResponderResources is how many READs and atomics of the peer we serve at a time,
	// InitiatorDepth how many of ours may be outstanding; 0 to 128.
	ResponderResources, InitiatorDepth uint8
	// RetryCnt and RNRRetry are sent to the peer and used by it; 0 to 7.
	RetryCnt, RNRRetry uint8
	// Timeout is our queue pair's ack timeout code, MinRNRTimer what our RNR NAKs say.
	Timeout     verbs.AckTimeout
	MinRNRTimer verbs.RNRTimer
	// MTU is the path MTU to ask for (active) or the largest to agree to (passive).
	MTU verbs.MTU
	// Access is what the peer may do through the queue pair.
	Access verbs.Access
	// Raw says that the caller drives the queue pair.
	Raw bool
	// NoExtension keeps the last 16 bytes of the private data free of our extension, for
	// protocols that own them.
	NoExtension bool
}

// Errors of connections.
var (
	ErrConnState = errors.New("wire: the connection's state does not allow this")
	ErrMTU       = errors.New("wire: the peer's path MTU is larger than this side's")
	ErrType      = errors.New("wire: the queue pair's type is not the one that the peer asked for")
)

// DialParam names whom to connect to.
type DialParam struct {
	Path    cm.Path
	Service roce.SID
	SrcPort uint16 // the rdma_cm port that the IP CM header shows
	ConnParam
}

// Dial sends a REQ for a queue pair in INIT, which belongs to the connection from now on.
func (w *Wire) Dial(now verbs.Instant, q *QP, p DialParam) (*Conn, error) {
	if !p.Raw && q.State() != verbs.QPInit || q.conn != nil {
		return nil, fmt.Errorf("wire: dial: %w", verbs.ErrBadState)
	}
	c := &Conn{w: w, qp: q, typ: q.q.Type(), Path: p.Path, startPSN: verbs.PSN(w.cfg.Rand()) & verbs.PSNMask, params: p.ConnParam}
	id, err := w.cm.Connect(now, cm.ReqParams{
		Path: p.Path, ServiceID: p.Service, SrcPort: p.SrcPort, Type: q.q.Type(),
		QPN: q.Num(), StartPSN: c.startPSN, MTU: min(p.MTU, w.cfg.MaxMTU),
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth,
		RetryCnt: p.RetryCnt, RNRRetry: p.RNRRetry, AckTimeout: p.Timeout, SRQ: q.q.SRQ() != nil,
		PrivateData: w.offer(p.PrivateData, cm.MaxReqPrivate, uint32(q.Num()), p.Service.IsIP() && !p.NoExtension),
	})
	if err != nil {
		return nil, err
	}
	c.params.MTU = min(p.MTU, w.cfg.MaxMTU)
	c.params.PrivateData = nil
	c.id, c.state = id, connConnecting
	q.conn = c
	w.conns[id] = c
	return c, nil
}

// Listen makes REQs for a service become ConnRequest calls.
func (w *Wire) Listen(service roce.SID) error { return w.cm.Listen(service) }

// ListenShared is Listen for one of several wires that share a backlog; see cm.CM.ListenShared.
func (w *Wire) ListenShared(service roce.SID, total *cm.HalfOpen) error {
	return w.cm.ListenShared(service, total)
}

// Unlisten stops that; requests not answered yet are the caller's to reject.
func (w *Wire) Unlisten(service roce.SID) { w.cm.Unlisten(service) }

// Accept brings a queue pair in INIT to RTR and sends the REP. The attributes of RTS are
// armed at once: the RTU or the first request, whichever comes first, completes the move.
func (w *Wire) Accept(now verbs.Instant, c *Conn, q *QP, p ConnParam) error {
	if c.state != connRequested {
		return fmt.Errorf("accept: %w", ErrConnState)
	}
	if q.State() != verbs.QPInit || q.conn != nil {
		return fmt.Errorf("wire: accept: %w", verbs.ErrBadState)
	}
	if q.q.Type() != c.typ {
		return ErrType
	}
	if err := w.Negotiate(c, p); err != nil {
		return err
	}
	rtr, rts := c.Attr(verbs.QPRTR), c.Attr(verbs.QPRTS)
	if err := w.Modify(now, q, &rtr); err != nil {
		return err
	}
	if err := q.q.ArmRTS(&rts); err != nil {
		return err
	}
	if err := w.sendREP(now, c, q, p.PrivateData); err != nil {
		reset := verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPReset}
		return errors.Join(err, w.Modify(now, q, &reset))
	}
	return nil
}

// Negotiate settles what our REP will say, so that Attr knows it; Accept does it itself.
func (w *Wire) Negotiate(c *Conn, p ConnParam) error {
	if c.state != connRequested {
		return fmt.Errorf("negotiate: %w", ErrConnState)
	}
	if c.Req.MTU > min(p.MTU, w.cfg.MaxMTU) {
		return ErrMTU
	}
	c.startPSN, c.params = verbs.PSN(w.cfg.Rand())&verbs.PSNMask, p
	c.params.PrivateData = nil
	c.params.MTU = c.Req.MTU
	c.params.ResponderResources = min(p.ResponderResources, c.Req.InitiatorDepth)
	c.params.InitiatorDepth = min(p.InitiatorDepth, c.Req.ResponderResources)
	return nil
}

// AcceptRaw sends the REP for a queue pair that the caller has moved to where it wants it,
// usually RTR, with the attributes of Negotiate.
//
// The queue pair may be another wire's, for the program made it before it knew the wire of the
// connection. Then the connection does not know it (QP returns nil), and the caller calls
// Agree under that wire's owner.
func (w *Wire) AcceptRaw(now verbs.Instant, c *Conn, q *QP, private []byte) error {
	if c.state != connRequested || !c.params.Raw {
		return fmt.Errorf("accept: %w", ErrConnState)
	}
	if q.w == w && q.conn != nil {
		return fmt.Errorf("wire: accept: %w", verbs.ErrBadState)
	}
	if q.q.Type() != c.typ {
		return ErrType
	}
	return w.sendREP(now, c, q, private)
}

// Agree has a queue pair of this wire use what the peer offered to a connection of another.
func (w *Wire) Agree(q *QP, c *Conn) {
	if c.offered && !c.params.NoExtension {
		w.agree(q, c.peerExt)
	}
}

func (w *Wire) sendREP(now verbs.Instant, c *Conn, q *QP, private []byte) error {
	with := w.offer(private, roce.REPPrivateLen, uint32(q.Num()), c.offered && !c.params.NoExtension)
	if len(with) > len(private) && q.w == w {
		w.agree(q, c.peerExt)
	}
	err := w.cm.Accept(now, c.id, cm.RepParams{
		QPN: q.Num(), StartPSN: c.startPSN,
		ResponderResources: c.params.ResponderResources, InitiatorDepth: c.params.InitiatorDepth,
		RNRRetry: c.params.RNRRetry, SRQ: q.q.SRQ() != nil, PrivateData: with,
	})
	if err == nil {
		c.state = connAccepted
		if q.w == w {
			c.qp, q.conn = q, c
		}
	}
	return err
}

// Ready tells the peer of a raw connection that our queue pair is in RTS: the RTU.
func (w *Wire) Ready(now verbs.Instant, c *Conn, private []byte) error {
	if c.state != connConnecting || !c.params.Raw {
		return fmt.Errorf("ready: %w", ErrConnState)
	}
	if c.qp != nil && c.offered && !c.params.NoExtension {
		w.agree(c.qp, c.peerExt)
	}
	if err := w.cm.Ready(now, c.id, private); err != nil {
		return err
	}
	c.state = connEstablished
	return nil
}

// Notify says that a raw connection's queue pair has had its first request (EventCommEst):
// it counts as the RTU. EventEstablished follows, unless the RTU was faster, or the connection
// has ended since: events take their time, and being late with one is no mistake.
func (w *Wire) Notify(now verbs.Instant, c *Conn) error {
	switch {
	case !c.passive || c.state == connRequested:
		return fmt.Errorf("notify: %w", ErrConnState)
	case c.state != connAccepted:
		return nil
	}
	if err := w.cm.Established(now, c.id); err != nil {
		return err
	}
	w.established(c, nil)
	return nil
}

// Reject answers a request with a REJ and forgets the connection; of a raw connection also a
// REP, or on second thoughts what AcceptRaw granted, as long as the RTU is not in.
func (w *Wire) Reject(now verbs.Instant, c *Conn, reason verbs.RejectReason, private []byte) error {
	if c.state != connRequested && !(c.params.Raw && (c.state == connConnecting || c.state == connAccepted)) {
		return fmt.Errorf("reject: %w", ErrConnState)
	}
	if err := w.cm.Reject(now, c.id, reason, private); err != nil {
		return err
	}
	c.state = connDown
	w.forget(c)
	return nil
}

// Disconnect sends a DREQ and moves the queue pair to ERR, which flushes what is posted.
// EventDisconnected follows when the peer has answered or will not.
func (w *Wire) Disconnect(now verbs.Instant, c *Conn, private []byte) error {
	if c.state != connEstablished && c.state != connAccepted {
		return fmt.Errorf("disconnect: %w", ErrConnState)
	}
	w.answerFirst(now)
	if err := w.cm.Disconnect(now, c.id, private); err != nil {
		return err
	}
	w.toErr(now, c)
	return nil
}

// Destroy forgets a connection in any state, telling the peer once what is proper. No
// further calls about it come.
func (w *Wire) Destroy(now verbs.Instant, c *Conn) {
	if w.conns[c.id] != c {
		return
	}
	w.answerFirst(now)
	w.toErr(now, c)
	w.cm.Destroy(now, c.id)
	w.forget(c)
}

// Hangup ends a connection whose queue pair is about to be destroyed: an established peer is
// told with a DREQ, which is repeated until it answers; others as Destroy does. Calls about c
// may still come.
func (w *Wire) Hangup(now verbs.Instant, c *Conn) {
	if w.Disconnect(now, c, nil) != nil && c.state != connDown {
		w.Destroy(now, c)
		return
	}
	c.state = connDown
}

func (w *Wire) forget(c *Conn) {
	delete(w.conns, c.id)
	if c.qp != nil {
		c.qp.conn = nil
	}
}

// Replied reports whether the peer's REP is in (active side).
func (c *Conn) Replied() bool { return c.Rep.QPN != 0 }

// Attr returns the attributes that bring the queue pair to RTR or RTS, as far as they are
// known by then: those to RTR need the peer's REP or our Negotiate (ib_cm_init_qp_attr).
func (c *Conn) Attr(s verbs.QPState) verbs.QPAttr {
	p := &c.params
	switch {
	case s == verbs.QPRTR && c.passive:
		return c.rtrAttr(c.Req.QPN, p.ResponderResources)
	case s == verbs.QPRTR:
		return c.rtrAttr(c.Rep.QPN, min(p.ResponderResources, c.Rep.InitiatorDepth))
	case c.passive:
		return c.rtsAttr(c.Req.StartPSN, p.InitiatorDepth, c.Req.RetryCnt, c.Req.RNRRetry)
	default:
		return c.rtsAttr(c.Rep.StartPSN, min(p.InitiatorDepth, c.Rep.ResponderResources), p.RetryCnt, c.Rep.RNRRetry)
	}
}

// rtrAttr is the move INIT -> RTR.
func (c *Conn) rtrAttr(peer verbs.QPN, resources uint8) verbs.QPAttr {
	mask := verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN
	if c.typ == verbs.RC {
		mask |= verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer
	}
	return verbs.QPAttr{
		Mask:  mask,
		State: verbs.QPRTR, PathMTU: c.params.MTU, DestQPN: peer,
		AV:    verbs.AV{Remote: c.Path.Remote, Local: c.Path.Local},
		RQPSN: c.startPSN, MaxDestRdAtomic: resources, MinRNRTimer: c.params.MinRNRTimer,
	}
}

// rtsAttr is the move RTR -> RTS. The PSN to start with and the RNR retry count are the
// peer's word, each side's REQ or REP naming what the other must do.
func (c *Conn) rtsAttr(psn verbs.PSN, depth, retry, rnrRetry uint8) verbs.QPAttr {
	mask := verbs.AttrState | verbs.AttrSQPSN
	if c.typ == verbs.RC {
		mask |= verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic
	}
	return verbs.QPAttr{
		Mask:  mask,
		State: verbs.QPRTS, SQPSN: psn, Timeout: c.params.Timeout, RetryCnt: retry & 7, RNRRetry: rnrRetry & 7,
		MaxQPRdAtomic: depth,
	}
}

// cmEvents carries what the connection manager found out to the queue pairs, and then to
// whoever listens.
func (w *Wire) cmEvents(now verbs.Instant) {
	for {
		e, ok := w.cm.NextEvent()
		if !ok {
			return
		}
		if e.Type == cm.ReqReceived {
			c := &Conn{w: w, id: e.Conn, typ: e.Req.Type, Path: e.Path, Req: e.Req, passive: true, state: connRequested}
			w.conns[e.Conn] = c
			c.peerExt, c.offered = parseExtension(e.PrivateData, uint32(e.Req.QPN))
			w.up.ConnRequest(c, &e)
			continue
		}
		if e.Type == cm.SIDRResolved || e.Type == cm.SIDRUnreachable {
			w.resolved(&e)
			continue
		}
		if c := w.conns[e.Conn]; c != nil {
			w.connEvent(now, c, &e)
		}
	}
}

func (w *Wire) connEvent(now verbs.Instant, c *Conn, e *cm.Event) {
	switch e.Type {
	case cm.RepReceived:
		w.repReceived(now, c, e)
	case cm.Established:
		// The RTU: the usual way from RTR to RTS.
		if q := c.qp; q != nil && !c.params.Raw && q.State() == verbs.QPRTR {
			rts := c.Attr(verbs.QPRTS)
			if err := w.Modify(now, q, &rts); err != nil {
				panic("BUG: wire: armed attributes refused: " + err.Error())
			}
		}
		w.established(c, e.PrivateData)
	case cm.RTULate:
		w.up.ConnEvent(c, verbs.EventRTU, e.PrivateData)
	case cm.Rejected:
		c.Reason = e.Reason
		w.down(now, c, verbs.EventRejected, e.PrivateData)
	case cm.Unreachable:
		w.down(now, c, verbs.EventUnreachable, nil)
	case cm.Disconnected:
		c.Reason = e.Reason
		if e.Reason != 0 || !w.appeals(now, c, e.PrivateData) {
			w.down(now, c, verbs.EventDisconnected, e.PrivateData)
		}
	case cm.TimewaitExit:
		if q := c.qp; q != nil && q.appeal.until != 0 {
			w.endAppeal(now, q)
		}
		w.up.ConnEvent(c, verbs.EventTimewaitExit, nil)
		w.forget(c)
	}
}

// repReceived brings the active side to RTS and answers with the RTU. The queue pair is in
// RTS before the RTU leaves, so whatever the peer sends on it is welcome.
func (w *Wire) repReceived(now verbs.Instant, c *Conn, e *cm.Event) {
	q := c.qp
	if q == nil || c.state != connConnecting {
		return
	}
	c.Rep = e.Rep
	c.peerExt, c.offered = parseExtension(e.PrivateData, uint32(e.Rep.QPN))
	if c.params.Raw {
		w.up.ConnEvent(c, verbs.EventConnectResponse, e.PrivateData)
		return
	}
	rtr, rts := c.Attr(verbs.QPRTR), c.Attr(verbs.QPRTS)
	err := w.Modify(now, q, &rtr)
	if err == nil {
		if c.offered && !c.params.NoExtension {
			w.agree(q, c.peerExt)
		}
		err = w.Modify(now, q, &rts)
	}
	if err == nil {
		err = w.cm.Ready(now, c.id, nil)
	}
	if err != nil {
		// The REP's values cannot be used, or the program moved its queue pair away.
		_ = w.cm.Reject(now, c.id, verbs.RejectConsumer, nil)
		w.down(now, c, verbs.EventConnectError, nil)
		return
	}
	w.established(c, e.PrivateData)
}

func (w *Wire) established(c *Conn, private []byte) {
	if c.state == connEstablished || c.state == connDown {
		return
	}
	c.state = connEstablished
	w.up.ConnEvent(c, verbs.EventEstablished, private)
}

// down ends a connection: the queue pair goes to ERR and flushes.
func (w *Wire) down(now verbs.Instant, c *Conn, t verbs.EventType, private []byte) {
	c.state = connDown
	w.toErr(now, c)
	w.up.ConnEvent(c, t, private)
}

func (w *Wire) toErr(now verbs.Instant, c *Conn) {
	q := c.qp
	if q == nil || c.params.Raw {
		return
	}
	switch q.State() {
	case verbs.QPReset, verbs.QPErr:
		return
	}
	a := verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}
	if err := w.Modify(now, q, &a); err != nil {
		panic("BUG: wire: move to ERR refused: " + err.Error())
	}
}

// qpEvents carries what a queue pair did by itself to the connection manager, and what
// programs should know to them.
func (w *Wire) qpEvents(now verbs.Instant, q *QP, set qp.EventSet) {
	c := q.conn
	if c != nil && set&qp.EvToRTS != 0 && c.state == connAccepted {
		// COMM_EST acts as the RTU. The connection manager may have heard the RTU in the
		// same step; then it says so and nothing is lost.
		_ = w.cm.Established(now, c.id)
		w.established(c, nil)
	}
	set.Each(func(t verbs.EventType) { w.up.QPEvent(q, t) })
	if c != nil && set&qp.EvToErr != 0 {
		q.failed = true
		w.schedule(q)
	}
}

// sayFailed tells the peer that a queue pair has failed and is of no more use. It comes after
// what the queue pair itself still has to say: a peer that heard the DREQ before the NAK would
// never know which of its requests was refused, and why.
func (w *Wire) sayFailed(now verbs.Instant, q *QP) {
	c := q.conn
	if q.failed && c != nil && !c.params.Raw && (c.state == connEstablished || c.state == connAccepted) {
		_ = w.cm.Disconnect(now, c.id, nil)
	}
	q.failed = false
}

// Conn returns the connection that the queue pair serves, nil for none. Owner only.
func (q *QP) Conn() *Conn { return q.conn }

// Held is what a wire holds on to.
type Held struct {
	// Conns are the connections that the wire knows, CMConns those that the connection manager
	// does, timewait included, HalfOpen a listener's between REQ and RTU.
	Conns, CMConns, HalfOpen int
	// QPs are queue pairs, Peers the addresses that have a window.
	QPs, Peers int
}

// Held returns what there is at the moment, for who looks for leaks. Owner only.
func (w *Wire) Held(service roce.SID) Held {
	return Held{
		Conns: len(w.conns), CMConns: w.cm.Len(), HalfOpen: w.cm.HalfOpen(service), QPs: w.qps.live, Peers: len(w.peers),
	}
}
