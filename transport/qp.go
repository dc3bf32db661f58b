package transport

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// QPConfig says how to make a queue pair that the program drives itself.
type QPConfig struct {
	// Type is the service: RC, UC or UD; 0 means RC.
	Type verbs.QPType
	// SendCQ and RecvCQ are required; they may be the same.
	SendCQ, RecvCQ *CQ
	// SRQ, when not nil, is where receives come from, one of the same domain; PostRecv is an
	// error then.
	SRQ      *SRQ
	Cap      verbs.QPCap
	SQSigAll bool
}

// QP is a queue pair. All methods may be called by any goroutine.
//
// A send that is posted in RTR is taken and waits; it leaves, with all others and in order,
// when the queue pair reaches RTS. On a connection that happens when the RTU arrives or, if
// that comes first, the peer's first message.
type QP struct {
	dev  *Device
	port *port
	pd   *PD
	wq   *wire.QP
	eng  *qp.QP

	sendCQ, recvCQ *CQ
	srq            *SRQ  // nil for none
	ownCQs         []*CQ // made for this queue pair, closed with it

	conn *wire.Conn // nil when the program drives the queue pair
	link connLink

	// away is the CMID that serves the queue pair from another wire, nil for none: a program makes
	// its queue pair without knowing on which wire the request came in.
	away atomic.Pointer[CMID]

	groups []membership // multicast, guarded by the device's groupMu

	mu      sync.Mutex
	closed  bool
	events  atomic.Uint32 // pending asynchronous events, see events.go
	rtuData []byte        // what a late RTU brought
}

// CreateQP makes a queue pair in RESET for a program that drives it with Modify.
func (pd *PD) CreateQP(cfg QPConfig) (*QP, error) {
	if cfg.SendCQ == nil || cfg.RecvCQ == nil {
		return nil, errors.New("transport: CreateQP: SendCQ and RecvCQ are required")
	}
	if cfg.Type == 0 {
		cfg.Type = verbs.RC
	}
	return pd.dev.newQP(pd, cfg, nil)
}

// newQP makes a queue pair on a wire, nil for whose turn it is.
func (d *Device) newQP(pd *PD, cfg QPConfig, p *port) (*QP, error) {
	if err := cfg.SRQ.attach(); err != nil {
		return nil, err
	}
	if p == nil {
		p = d.pickPort()
	}
	q := &QP{dev: d, port: p, pd: pd, sendCQ: cfg.SendCQ, recvCQ: cfg.RecvCQ, srq: cfg.SRQ}
	cfg.SendCQ.attach(p)
	cfg.RecvCQ.attach(p)
	err := p.do(func() (err error) {
		q.wq, err = p.wire.CreateQP(qp.Config{
			Type: cfg.Type, Cap: cfg.Cap, SQSigAll: cfg.SQSigAll, PD: pd.num,
			SendCQ: cfg.SendCQ.lanes[p.index], RecvCQ: cfg.RecvCQ.lanes[p.index], SRQ: cfg.SRQ.engine(),
		})
		if err == nil {
			q.wq.Tag = q
			q.eng = q.wq.Engine()
		}
		return err
	})
	if err == nil && !d.track(q) {
		_ = p.do(func() error { p.wire.DestroyQP(d.now(), q.wq); return nil })
		err = ErrClosed
	}
	if err != nil {
		q.releaseCQs()
		return nil, err
	}
	return q, nil
}

// releaseCQs ends the claims to what the queue pair is built on.
func (q *QP) releaseCQs() {
	q.sendCQ.detach(q.port)
	q.recvCQ.detach(q.port)
	q.srq.detach()
	for _, c := range q.ownCQs {
		_ = c.Close() // nobody else can use it
	}
}

// Num returns the queue pair's number.
func (q *QP) Num() verbs.QPN { return q.eng.Num() }

// State returns the present state.
func (q *QP) State() verbs.QPState { return q.eng.State() }

// PD returns the protection domain.
func (q *QP) PD() *PD { return q.pd }

// CQ returns the completion queue of sends and receives; when they differ, that of receives.
func (q *QP) CQ() *CQ { return q.recvCQ }

// SendCQ returns the completion queue of the send queue.
func (q *QP) SendCQ() *CQ { return q.sendCQ }

// SRQ returns the shared receive queue, nil when there is none.
func (q *QP) SRQ() *SRQ { return q.srq }

// Cap returns the queue pair's true sizes; those of receives are 0 with an SRQ.
func (q *QP) Cap() verbs.QPCap { return q.eng.Cap() }

// PostSend posts one send. It never blocks and allocates nothing. It returns ErrQueueFull
// when the queue has no free slot, ErrBadState in RESET and INIT, and one of verbs' errors
// when the request is malformed; then nothing was posted. In SQE and ERR the request is taken
// and completes with WR_FLUSH_ERR.
func (q *QP) PostSend(wr verbs.SendWR) error {
	// The array does not escape: the engine copies what it needs.
	wrs := [1]verbs.SendWR{wr}
	_, ring, err := q.eng.PostSend(wrs[:])
	if ring {
		q.port.ring(q.wq)
	}
	return err
}

// PostSendList posts a chain that becomes visible to the wire whole. It returns how many
// requests were taken; err says why wrs[n] was not, and those after it were not looked at.
func (q *QP) PostSendList(wrs []verbs.SendWR) (n int, err error) {
	n, ring, err := q.eng.PostSend(wrs)
	if ring {
		q.port.ring(q.wq)
	}
	return n, err
}

// PostRecv posts one receive, in any state but RESET. Errors are those of PostSend; with an
// SRQ it is verbs.ErrBadWR. Receives are used in their order: one that goes ahead of others
// that are still being posted by other goroutines is there for messages when those are.
func (q *QP) PostRecv(wr verbs.RecvWR) error {
	wrs := [1]verbs.RecvWR{wr}
	_, ring, err := q.eng.PostRecv(wrs[:])
	if ring {
		q.port.ring(q.wq)
	}
	return err
}

// PostRecvList posts a chain of receives and returns how many were taken.
func (q *QP) PostRecvList(wrs []verbs.RecvWR) (n int, err error) {
	n, ring, err := q.eng.PostRecv(wrs)
	if ring {
		q.port.ring(q.wq)
	}
	return n, err
}

// Modify changes attributes and state. On a queue pair that Dial or Accept made only a move
// to ERR is allowed, and on UC one from SQE to RTS; anything else is ErrManaged. A modify that fails changes nothing. A program that moves a
// connection to ERR tells its peer when it closes the queue pair.
func (q *QP) Modify(a verbs.QPAttr) error {
	if q.conn != nil && (a.Mask != verbs.AttrState ||
		a.State != verbs.QPErr && (a.State != verbs.QPRTS || q.State() != verbs.QPSQE)) {
		return ErrManaged
	}
	return q.port.do(func() error { return q.port.wire.Modify(q.dev.now(), q.wq, &a) })
}

// Attr returns the present attributes.
func (q *QP) Attr() (a verbs.QPAttr, err error) {
	err = q.port.do(func() error { a = q.port.wire.Attr(q.wq); return nil })
	return a, err
}

// Published tells about the last deferral: how many sends the move to RTS published in one
// step, and the time from RTR to it; both 0 when nothing was deferred.
func (q *QP) Published() (deferred uint64, wait time.Duration) { return q.eng.Published() }

// RemoteAddr returns the peer's address and UDP port; invalid when there is none.
func (q *QP) RemoteAddr() netip.AddrPort {
	if q.conn == nil {
		return netip.AddrPort{}
	}
	return q.conn.Path.Remote
}

// LocalAddr returns our address on the path to the peer and our UDP port.
func (q *QP) LocalAddr() netip.AddrPort {
	addr := q.port.wire.LocalAddr()
	if q.conn == nil {
		return addr
	}
	return netip.AddrPortFrom(q.conn.Path.Local, addr.Port())
}

// Close ends the queue pair, at once: a connection's peer is told (DREQ, repeated until it
// answers), what is posted is forgotten without completions, and posting fails from now on.
// Completions that are already there can still be polled. A program that must know whether
// its last sends arrived waits for their completions first. Closing twice is ErrClosed.
func (q *QP) Close() error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return ErrClosed
	}
	q.closed = true
	q.mu.Unlock()
	q.dev.untrack(q)
	q.leaveAll()
	err := q.port.do(func() error {
		now := q.dev.now()
		if q.conn != nil {
			q.port.wire.Hangup(now, q.conn)
		}
		q.port.wire.DestroyQP(now, q.wq)
		return nil
	})
	q.dev.unbind(q.Num())
	q.dev.events.forget(q)
	q.link.end(ErrClosed)
	q.releaseCQs()
	if errors.Is(err, ErrClosed) {
		return nil // the device went first
	}
	return err
}

// Wait blocks until the connection has ended and returns how: nil after a DREQ or Close,
// ErrUnreachable or a RejectError when it never came about, ctx.Err() when ctx ends first.
func (q *QP) Wait(ctx context.Context) error { return q.link.waitDown(ctx) }

// Established blocks until the connection is established: on the active side it is when Dial
// returns; on the passive side the RTU or the peer's first message establishes it.
func (q *QP) Established(ctx context.Context) error { return q.link.waitUp(ctx) }

// PrivateData returns what the peer sent along: on the active side with the REP (196 bytes),
// on the passive side with the REQ (56 bytes), zero-padded.
func (q *QP) PrivateData() []byte { return q.link.privateData() }

// shut ends waiters when the device closes.
func (q *QP) shut() { q.link.end(ErrClosed) }
