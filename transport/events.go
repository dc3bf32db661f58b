package transport

import (
	"context"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// eventKinds numbers the events that can be pending on an object, a bit each.
var eventKinds = [...]verbs.EventType{
	verbs.EventCQErr, verbs.EventQPFatal, verbs.EventQPReqErr, verbs.EventQPAccessErr, verbs.EventCommEst,
	verbs.EventSQDrained, verbs.EventQPLastWQEReached, verbs.EventPathMTU,
	verbs.EventEstablished, verbs.EventRTU, verbs.EventDisconnected,
	verbs.EventSRQLimitReached,
}

// source is what events are about: a queue pair, a completion queue or a shared receive queue.
type source interface {
	// pending returns the set of its events that nobody has read.
	pending() *atomic.Uint32
	// event makes the event to read.
	event(t verbs.EventType) verbs.Event
}

// gone is the bit of an object that was closed: no events of it are queued any more.
const gone = 1 << 31

const _ = uint(31 - len(eventKinds)) // the kinds' bits lie below it

// eventQueue holds the objects with pending events. An event that is raised again before
// anybody read it is one event, and closed objects leave, so a queue that nobody reads is
// bounded by the objects that there are.
type eventQueue struct {
	mu    sync.Mutex
	queue []source
	dead  int           // closed ones of queue, and of those that raise is about to add
	wake  chan struct{} // holds one token while queue may have something
}

func (e *eventQueue) raise(q source, t verbs.EventType) {
	i := slices.Index(eventKinds[:], t)
	if i < 0 {
		return
	}
	if q.pending().Or(1<<i) != 0 {
		return // on the queue already, or closed
	}
	e.mu.Lock()
	if q.pending().Load()&gone == 0 {
		e.queue = append(e.queue, q)
	} else {
		e.dead-- // closed since, and counted as one that is on the queue
	}
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// take returns one event, false when there is none.
func (e *eventQueue) take() (source, verbs.EventType, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.queue) > 0 {
		q := e.queue[0]
		set := q.pending().Load()
		if set&gone != 0 {
			e.queue = e.queue[1:]
			e.dead--
			continue
		}
		if set == 0 {
			e.queue = e.queue[1:]
			continue
		}
		i := bits.TrailingZeros32(set)
		if q.pending().And(^uint32(1<<i)) == 1<<i {
			e.queue = e.queue[1:]
		}
		return q, eventKinds[i], true
	}
	e.queue = nil
	return nil, 0, false
}

// forget drops what is pending of an object that was closed, and what is raised later. So
// that it costs no search, closed objects stay on the queue until they are the larger part.
func (e *eventQueue) forget(q source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if q.pending().Or(gone)&^gone == 0 {
		return
	}
	e.dead++
	if n := len(e.queue); e.dead >= n || e.dead > 64 && e.dead > n/2 {
		e.queue = slices.DeleteFunc(e.queue, func(q source) bool { return q.pending().Load()&gone != 0 })
		if e.dead -= n - len(e.queue); len(e.queue) == 0 {
			e.queue = nil
		}
	}
}

// NextEvent waits for an asynchronous event of any of the device's queue pairs, completion
// queues and shared receive queues and returns it; its QPN, CQN or SRQN says whose. Nobody has
// to read events: what is not read does not pile up, and is forgotten with its object. It
// returns ErrClosed when the device is closed, ctx.Err() when ctx ends first.
func (d *Device) NextEvent(ctx context.Context) (verbs.Event, error) {
	for {
		if q, t, ok := d.events.take(); ok {
			ev := q.event(t)
			// There may be more, and more than one reader.
			select {
			case d.events.wake <- struct{}{}:
			default:
			}
			return ev, nil
		}
		select {
		case <-d.events.wake:
		case <-d.done:
			return verbs.Event{}, ErrClosed
		case <-ctx.Done():
			return verbs.Event{}, ctx.Err()
		}
	}
}

func (q *QP) pending() *atomic.Uint32 { return &q.events }

func (q *QP) event(t verbs.EventType) verbs.Event {
	ev := verbs.Event{Type: t, QPN: q.Num()}
	if t == verbs.EventRTU {
		q.mu.Lock()
		ev.PrivateData = q.rtuData
		q.mu.Unlock()
	}
	return ev
}

// upcalls is what a port's wire tells the device. It runs under the wire's role, so it only
// sets bits, closes channels and rings bells.
type upcalls struct{ p *port }

func (u upcalls) ConnRequest(c *wire.Conn, req *cm.Event) {
	d := u.p.dev
	r := &ConnRequest{dev: d, port: u.p, conn: c, private: req.PrivateData, srcPort: req.Req.SrcPort}
	c.Tag = r
	d.mu.RLock()
	l := d.listeners[req.Service]
	d.mu.RUnlock()
	if l != nil && (!l.addr.Addr().IsValid() || l.addr.Addr().IsUnspecified() || l.addr.Addr() == c.Path.Local) && l.offer(r) {
		return
	}
	// Not for this listener, or it has just gone: refused, but not from within the step.
	go func() { _ = r.Reject(verbs.RejectInvalidServiceID, nil) }()
}

func (u upcalls) ConnEvent(c *wire.Conn, t verbs.EventType, private []byte) {
	var q *QP
	switch tag := c.Tag.(type) {
	case *QP:
		q = tag
	case *CMID:
		tag.raise(CMEvent{Type: t, Reason: c.Reason, PrivateData: private})
		return
	case *ConnRequest:
		tag.gone.Store(true)
		return
	default:
		return
	}
	switch t {
	case verbs.EventEstablished:
		if q.conn == nil || !c.Passive() {
			q.link.established(private)
		} else {
			q.link.established(nil) // what the REQ brought stays
		}
		u.p.dev.events.raise(q, t)
	case verbs.EventRTU:
		q.mu.Lock()
		q.rtuData = private
		q.mu.Unlock()
		u.p.dev.events.raise(q, t)
	case verbs.EventRejected:
		q.link.end(&RejectError{Reason: c.Reason, PrivateData: private})
	case verbs.EventUnreachable:
		q.link.end(ErrUnreachable)
	case verbs.EventConnectError:
		q.link.end(ErrBadState)
	case verbs.EventDisconnected:
		q.link.end(nil)
		u.p.dev.events.raise(q, t)
	}
}

func (u upcalls) QPEvent(wq *wire.QP, t verbs.EventType) {
	if q, ok := wq.Tag.(*QP); ok {
		if t == verbs.EventCQErr {
			q.sendCQ.failed(u.p.index)
			q.recvCQ.failed(u.p.index)
			return
		}
		u.p.dev.events.raise(q, t)
		if t == verbs.EventCommEst {
			u.commEst(wq)
		}
	}
}

// commEst tells the program that drives the queue pair of a connection. Whoever reads the
// device's events hears it too; telling the connection manager twice is harmless.
func (u upcalls) commEst(wq *wire.QP) {
	if c := wq.Conn(); c != nil {
		if id, ok := c.Tag.(*CMID); ok {
			id.raise(CMEvent{Type: verbs.EventCommEst})
		}
	} else if id := wq.Tag.(*QP).away.Swap(nil); id != nil {
		id.raise(CMEvent{Type: verbs.EventCommEst})
	}
}

func (u upcalls) Completions(lane *qp.CQ, solicited bool) {
	c := lane.Tag.(*CQ)
	c.bell.RingVia(u.p.dev.waker)
	c.notify.completed(solicited, u.p.dev.waker)
	if w := u.p.watch; w != nil {
		w.completed(c)
	}
}
