package transport

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// CMID is a connection of a program that drives its queue pair itself (struct rdma_cm_id with a
// queue pair that rdma_cm did not make). The connection manager exchanges the messages and
// tells what happened; the program moves its queue pair with [QP.Modify]. [Device.Dial] and
// [ConnRequest.Accept] do all of this by themselves and are what most programs want.
//
//	active                               passive
//	CreateCMID                           Listener.Next, CreateCMID
//	RESET -> INIT, receives              RESET -> INIT, receives
//	Connect                   --REQ-->   INIT -> RTR
//	CONNECT_RESPONSE          <--REP--   Accept
//	INIT -> RTR -> RTS
//	Establish                 --RTU-->   ESTABLISHED: RTR -> RTS
//	                       --request-->  or COMM_EST first: Notify, RTR -> RTS
//
// [CMID.InitQPAttr] has the attributes for each move. The other end may be any RoCEv2 peer: a
// CMID, Dial or Accept, or Linux's rdma_cm.
//
// The queue pair stays the program's: when the connection ends it moves it to ERR itself, to
// have what is posted flushed, and closes it. All methods may be called by any goroutine.
type CMID struct {
	dev    *Device
	param  wire.ConnParam
	path   cm.Path
	remote netip.AddrPort // what RemoteAddr returns
	// service is whom an active side asks for.
	service roce.SID

	mu     sync.Mutex // a leaf: taken under a wire's role too
	port   *port      // nil until Connect
	conn   *wire.Conn // likewise
	events []CMEvent  // bounded: each kind comes at most once
	closed bool
	wake   chan struct{} // holds one token while events may have something
	done   chan struct{} // closed by Close and with the device
}

// CMEvent is something that happened to a connection (struct rdma_cm_event). Its type is one of
//
//	verbs.EventConnectResponse  the REP is in (active): move to RTR and RTS, then Establish, or Reject
//	verbs.EventEstablished      the RTU is in, or Notify was called (passive): move to RTS
//	verbs.EventCommEst          a first request has arrived in RTR: call Notify
//	verbs.EventRTU              the RTU came after Notify, with its private data (Doorbell's own event)
//	verbs.EventRejected         refused, or given up by the peer; Reason says why
//	verbs.EventUnreachable      no REP or RTU within Config.ConnectTimeout, or this program took minutes
//	verbs.EventDisconnected     it was established and has ended: by a DREQ, or Reason says why
//	verbs.EventTimewaitExit     nothing of the connection is left; the queue pair may serve another
//
// A REQ is not among them: it comes out of [Listener.Next].
type CMEvent struct {
	Type verbs.EventType
	// Reason is set for EventRejected, and for EventDisconnected without a DREQ: then it is
	// verbs.RejectTimeout when our own DREQ was not answered.
	Reason verbs.RejectReason
	// PrivateData is what the message brought, zero-padded to what it has room for: REP 196,
	// RTU 224, REJ 148, DREQ 220, DREP 224 bytes. Nil when no message did it.
	PrivateData []byte
}

// Private data limits in bytes of the RTU and the DREQ.
const (
	MaxEstablishPrivateData  = roce.RTUPrivateLen
	MaxDisconnectPrivateData = roce.DREQPrivateLen
)

// CreateCMID prepares a connection to a service port at a host, as Dial would make it, for a
// queue pair that the program drives (rdma_create_id and rdma_resolve_addr). Nothing is sent
// yet.
//
// Of p everything that makes a queue pair (Recv, Prepare, PD, SendCQ, RecvCQ, SRQ, Cap,
// SQSigAll) must be unset, for the program makes its own; Type is that of the queue pair.
func (d *Device) CreateCMID(to netip.AddrPort, p ConnParam) (*CMID, error) {
	if to.Port() == 0 {
		return nil, errors.New("transport: CreateCMID: service port 0")
	}
	path, err := d.path(to.Addr(), p.RemotePort)
	if err != nil {
		return nil, err
	}
	id := &CMID{
		dev: d, path: path, remote: netip.AddrPortFrom(path.Remote.Addr(), to.Port()),
		service: roce.ServiceID(roce.PSTCP, to.Port()),
	}
	if err := id.init(p, MaxDialPrivateData); err != nil {
		return nil, err
	}
	return id, nil
}

// CreateCMID takes the request over for a program that drives its queue pair itself: it is
// answered with Accept or Reject of the CMID from now on. p is as in Device.CreateCMID.
//
// A request whose path MTU is larger than p allows is rejected, and the error returned; other
// errors leave the request as it was.
func (r *ConnRequest) CreateCMID(p ConnParam) (*CMID, error) {
	id := &CMID{dev: r.dev, path: r.conn.Path, remote: r.RemoteAddr(), port: r.port, conn: r.conn}
	if p.Type == 0 {
		p.Type = r.Type()
	}
	if err := id.init(p, MaxAcceptPrivateData); err != nil {
		return nil, err
	}
	err := r.port.do(func() error {
		err := r.port.wire.Negotiate(r.conn, id.param)
		if err == nil {
			r.conn.Tag = id
		}
		return err
	})
	if err != nil {
		id.shut()
		id.dev.untrack(id)
		if errors.Is(err, wire.ErrMTU) {
			_ = r.Reject(verbs.RejectInvalidMTU, nil) // the peer gives up by itself if this fails
		}
		return nil, connErr("CreateCMID", err)
	}
	return id, nil
}

// init resolves the parameters and makes the device know the ID.
func (id *CMID) init(p ConnParam, maxPrivate int) error {
	if p.Recv != nil || p.Prepare != nil || p.PD != nil || p.SendCQ != nil || p.RecvCQ != nil || p.SRQ != nil ||
		p.Cap != (verbs.QPCap{}) || p.SQSigAll {
		return errors.New("transport: CreateCMID: the program makes the queue pair itself; Recv, Prepare, PD, SendCQ, RecvCQ, SRQ, Cap and SQSigAll must be unset")
	}
	if p.Type == 0 {
		p.Type = verbs.RC
	}
	var err error
	if id.param, err = p.resolve(maxPrivate, id.dev.maxMTU); err != nil {
		return err
	}
	id.param.MTU = min(id.param.MTU, id.dev.pathMTU(id.path.Local))
	id.param.PrivateData = append([]byte(nil), p.PrivateData...)
	id.param.Raw = true
	id.wake, id.done = make(chan struct{}, 1), make(chan struct{})
	if !id.dev.track(id) {
		return ErrClosed
	}
	return nil
}

// connErr makes what the layers below say about a connection's state ErrBadState.
func connErr(call string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, wire.ErrConnState), errors.Is(err, cm.ErrState), errors.Is(err, cm.ErrUnknownConn):
		err = fmt.Errorf("%w of the connection", ErrBadState)
	case errors.Is(err, cm.ErrPrivateData):
		err = fmt.Errorf("%w: %w", ErrPrivateData, err)
	}
	return fmt.Errorf("transport: %s: %w", call, err)
}

// use runs f under the role of the connection's wire; ErrBadState before Connect.
func (id *CMID) use(call string, f func(p *port, c *wire.Conn) error) error {
	id.mu.Lock()
	p, c, closed := id.port, id.conn, id.closed
	id.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case c == nil:
		return fmt.Errorf("transport: %s: %w: Connect comes first", call, ErrBadState)
	}
	return connErr(call, p.do(func() error { return f(p, c) }))
}

// Connect sends a REQ for a queue pair (rdma_connect), which must be the device's, RC or UC, and
// should be in INIT by now with its receives posted. CONNECT_RESPONSE, REJECTED or UNREACHABLE follows within
// Config.ConnectTimeout. ctx bounds the call, not the connection. A CMID connects once.
func (id *CMID) Connect(ctx context.Context, q *QP) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := id.check("connect", q); err != nil {
		return err
	}
	p := q.port
	return connErr("connect", p.do(func() error {
		id.mu.Lock()
		closed, used := id.closed, id.conn != nil
		id.mu.Unlock()
		switch {
		case closed:
			return ErrClosed
		case used:
			return wire.ErrConnState
		}
		c, err := p.wire.Dial(id.dev.now(), q.wq, wire.DialParam{
			Path: id.path, Service: id.service, SrcPort: id.dev.ephemeralPort(), ConnParam: id.param,
		})
		if err == nil {
			c.Tag = id
			id.mu.Lock()
			id.port, id.conn = p, c
			id.mu.Unlock()
		}
		return err
	}))
}

// check says what keeps a queue pair from serving this connection.
func (id *CMID) check(call string, q *QP) error {
	switch {
	case q.dev != id.dev:
		return fmt.Errorf("transport: %s: the queue pair belongs to another device", call)
	case q.conn != nil:
		return ErrManaged
	case q.eng.Type() != verbs.RC && q.eng.Type() != verbs.UC:
		return fmt.Errorf("transport: %s: the queue pair is %v; a connection is RC or UC", call, q.eng.Type())
	}
	return nil
}

// Accept answers the request with a REP (rdma_accept). The queue pair must be in RTR, with the
// attributes of InitQPAttr: the peer may send as soon as it has the REP. Sends may be posted from
// RTR on; they leave with the move to RTS. ESTABLISHED or UNREACHABLE follows within
// Config.ConnectTimeout; COMM_EST may come first.
func (id *CMID) Accept(ctx context.Context, q *QP) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := id.check("accept", q); err != nil {
		return err
	}
	var conn *wire.Conn
	err := id.use("accept", func(p *port, c *wire.Conn) error {
		// IBTA Vol 1, 12.9.7.2: the passive side's QP is in RTR when the REP leaves, or the first
		// request finds it deaf.
		if !receiving(q) {
			return fmt.Errorf("%w: the queue pair is in %v, and receives from RTR on", ErrBadState, q.State())
		}
		if err := p.wire.AcceptRaw(id.dev.now(), c, q.wq, id.param.PrivateData); err != nil || q.port == p {
			return err
		}
		q.away.Store(id)
		conn = c
		return nil
	})
	if err == nil && conn != nil {
		_ = q.port.do(func() error { q.port.wire.Agree(q.wq, conn); return nil }) // closed: nothing will be sent
	}
	return err
}

func receiving(q *QP) bool {
	s := q.State()
	return s == verbs.QPRTR || s == verbs.QPRTS
}

// Establish answers the REP with an RTU (rdma_establish) once the queue pair is in RTS. private,
// at most 224 bytes, reaches the peer's ESTABLISHED event. A peer who repeats his REP gets the
// same RTU again without further calls. No ESTABLISHED event follows here.
func (id *CMID) Establish(private []byte) error {
	return id.use("establish", func(p *port, c *wire.Conn) error {
		return p.wire.Ready(id.dev.now(), c, private)
	})
}

// Notify tells the connection manager of an asynchronous event of the queue pair (rdma_notify):
// verbs.EventCommEst, which counts as the RTU, so that the REP is not repeated any more. An
// ESTABLISHED event follows, unless the RTU was faster or the connection has ended since: then
// nothing does, and that is no error (rdma_notify says EISCONN and EINVAL, and programs are told
// to ignore them). ErrBadState: on the active side, before Accept, or another event.
func (id *CMID) Notify(event verbs.EventType) error {
	if event != verbs.EventCommEst {
		return fmt.Errorf("transport: notify: %w: %v is not for the connection manager", ErrBadState, event)
	}
	return id.use("notify", func(p *port, c *wire.Conn) error { return p.wire.Notify(id.dev.now(), c) })
}

// Reject refuses (rdma_reject): the request, or on the active side the REP, or on second
// thoughts what Accept granted, before its RTU. private is at most 148 bytes; a reason of 0
// means verbs.RejectConsumer. No event follows.
func (id *CMID) Reject(reason verbs.RejectReason, private []byte) error {
	if reason == 0 {
		reason = verbs.RejectConsumer
	}
	return id.use("reject", func(p *port, c *wire.Conn) error {
		return p.wire.Reject(id.dev.now(), c, reason, private)
	})
}

// Disconnect sends a DREQ (rdma_disconnect), with at most 220 bytes of private data.
// DISCONNECTED follows when the peer has answered or will not, within a second, and
// TIMEWAIT_EXIT half a second later. The queue pair is the program's to move to ERR.
func (id *CMID) Disconnect(private []byte) error {
	return id.use("disconnect", func(p *port, c *wire.Conn) error {
		return p.wire.Disconnect(id.dev.now(), c, private)
	})
}

// Close forgets the connection (rdma_destroy_id): a peer who believes in it is told (a DREQ,
// repeated until it answers, or a REJ), no further events come, waiters return ErrClosed. The
// queue pair is not touched; it can serve another connection after half a second. Closing
// twice is ErrClosed.
func (id *CMID) Close() error {
	err := id.use("close", func(p *port, c *wire.Conn) error {
		p.wire.Hangup(id.dev.now(), c)
		return nil
	})
	if !id.end() {
		return ErrClosed
	}
	id.dev.untrack(id)
	if err != nil && !errors.Is(err, ErrBadState) && !errors.Is(err, ErrClosed) {
		return err
	}
	return nil
}

// end closes the waiters' channel, once; false when that was done before.
func (id *CMID) end() bool {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.closed {
		return false
	}
	id.closed = true
	close(id.done)
	return true
}

// shut ends waiters when the device closes.
func (id *CMID) shut() { id.end() }

// InitQPAttr returns the attributes for the queue pair's move to a state (rdma_init_qp_attr):
// INIT at any time; RTR and RTS on the passive side at any time, on the active side from
// CONNECT_RESPONSE on, for the REP names them. Before that, and for other states, it is
// ErrBadState. Programs may change what they know better, such as MinRNRTimer or Timeout.
func (id *CMID) InitQPAttr(state verbs.QPState) (a verbs.QPAttr, err error) {
	switch state {
	case verbs.QPInit:
		return verbs.QPAttr{
			Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
			State: verbs.QPInit, Port: 1, AccessFlags: id.param.Access,
		}, nil
	case verbs.QPRTR, verbs.QPRTS:
	default:
		return a, fmt.Errorf("transport: InitQPAttr: %w: no attributes for %v come from the connection manager", ErrBadState, state)
	}
	err = id.use("InitQPAttr", func(_ *port, c *wire.Conn) error {
		if !c.Passive() && !c.Replied() {
			return wire.ErrConnState
		}
		a = c.Attr(state)
		return nil
	})
	return a, err
}

// RemoteAddr returns the peer's address; its port is the service port on the active side, on the
// passive side the source port that the REQ names.
func (id *CMID) RemoteAddr() netip.AddrPort { return id.remote }

// NextEvent waits for the connection's next event (rdma_get_cm_event). It returns ErrClosed
// after Close, ctx.Err() when ctx ends first; an event that is there wins over both. Events
// that nobody reads do not pile up: each kind comes at most once.
func (id *CMID) NextEvent(ctx context.Context) (CMEvent, error) {
	for {
		if e, ok := id.take(); ok {
			return e, nil
		}
		select {
		case <-id.wake:
		case <-id.done:
			return CMEvent{}, ErrClosed
		case <-ctx.Done():
			return CMEvent{}, ctx.Err()
		}
	}
}

func (id *CMID) take() (e CMEvent, ok bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if len(id.events) == 0 {
		return e, false
	}
	e = id.events[0]
	id.events = id.events[1:]
	if len(id.events) > 0 {
		id.signal() // there may be more than one reader
	}
	return e, true
}

func (id *CMID) signal() {
	select {
	case id.wake <- struct{}{}:
	default:
	}
}

// raise queues an event. It runs under the wire's role.
func (id *CMID) raise(e CMEvent) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if !id.closed {
		id.events = append(id.events, e)
		id.signal()
	}
}
