package wire

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// QP is a queue pair on its wire: the engine and what the wire keeps about it.
type QP struct {
	q *qp.QP
	w *Wire
	// Tag is the owner's side's to use.
	Tag any

	marked     atomic.Bool          // on the ready list
	nextReady  *QP                  // owned by whoever's push set marked, then by the wire's owner
	posterPeer atomic.Pointer[peer] // the same as peer, for posters

	// The rest belongs to the wire's owner.

	queued, touched, closed bool
	failed                  bool // moved itself to ERR, and the peer is to hear of it
	appeal                  appeal
	nextRun, nextTouched    *QP

	heapIndex int
	heapAt    verbs.Instant

	peer        *peer
	nextBlocked *QP
	blocked     bool

	route            // to the peer, when connected
	rxPath roce.Path // valid for source port rxPort
	rxPort uint16

	groups []netip.Addr // multicast groups it is attached to

	conn *Conn // nil unless the connection manager knows it
}

// Num returns the queue pair's number. Anyone.
func (q *QP) Num() verbs.QPN { return q.q.Num() }

// Wire returns the wire it belongs to. Anyone.
func (q *QP) Wire() *Wire { return q.w }

// State returns the present state. Anyone.
func (q *QP) State() verbs.QPState { return q.q.State() }

// Engine returns the engine, for the calls that anyone may make: posting and asking.
func (q *QP) Engine() *qp.QP { return q.q }

// CreateQP makes a queue pair in RESET; its number is cfg.Num's new value.
func (w *Wire) CreateQP(cfg qp.Config) (*QP, error) {
	q := &QP{w: w, heapIndex: -1}
	n, err := w.qps.alloc(q)
	if err != nil {
		return nil, err
	}
	cfg.Num = n
	if cfg.MTU == 0 || cfg.MTU > w.cfg.MaxMTU {
		cfg.MTU = w.cfg.MaxMTU
	}
	if q.q, err = qp.New(cfg, &w.env); err != nil {
		w.qps.release(n, nil)
		return nil, err
	}
	return q, nil
}

// DestroyQP forgets a queue pair: what is posted vanishes without completions, its number
// rests before it is used again. For a while its remains still acknowledge what it had done.
func (w *Wire) DestroyQP(now verbs.Instant, q *QP) {
	if q.closed {
		return
	}
	w.answerFirst(now)
	w.sayFailed(now, q)
	if q.appeal.until != 0 {
		w.endAppeal(now, q)
	}
	if q.conn != nil {
		q.conn.qp = nil
		q.conn = nil
	}
	left := w.leave(now, q)
	q.q.Close(now)
	w.timers.remove(q)
	w.leavePeer(q)
	w.detachAll(q)
	w.qps.release(q.Num(), left)
	// It may still be on the lists; they skip it.
	q.closed = true
}

// Modify changes a queue pair's attributes and state for a program that drives it itself.
func (w *Wire) Modify(now verbs.Instant, q *QP, a *verbs.QPAttr) error {
	if a.Mask&verbs.AttrAV != 0 {
		if err := w.checkAV(&a.AV); err != nil {
			return err
		}
		if a.AV.Remote.Addr().IsMulticast() {
			return fmt.Errorf("%w: AV: %v is not one peer's address", verbs.ErrBadAttr, a.AV.Remote)
		}
	}
	if a.Mask&verbs.AttrState != 0 && (a.State == verbs.QPErr || a.State == verbs.QPReset) {
		w.answerFirst(now)
	}
	if err := q.q.Modify(now, a); err != nil {
		return err
	}
	if a.Mask&verbs.AttrAV != 0 {
		w.setAV(q, &a.AV)
	}
	if a.Mask&verbs.AttrState != 0 && a.State == verbs.QPReset {
		w.leavePeer(q)
	}
	w.after(q)
	return nil
}

// Attr returns the queue pair's attributes (ibv_query_qp).
func (w *Wire) Attr(q *QP) verbs.QPAttr { return q.q.Attr() }

// after looks at what a call into the engine left to do.
func (w *Wire) after(q *QP) {
	w.touch(q)
	w.schedule(q)
	w.hurry = w.hurry || q.q.Hurries()
	w.timers.update(q, q.q.Deadline())
	if q.peer != nil {
		w.wakeBlocked(q.peer)
	}
}

// checkAV completes an address vector and refuses one that cannot work.
func (w *Wire) checkAV(av *verbs.AV) error {
	remote := netip.AddrPortFrom(av.Remote.Addr().Unmap(), av.Remote.Port())
	if remote.Port() == 0 {
		remote = netip.AddrPortFrom(remote.Addr(), roce.Port)
	}
	if !remote.Addr().IsValid() || remote.Addr().IsUnspecified() {
		return fmt.Errorf("%w: AV: remote address %v", verbs.ErrBadAttr, av.Remote)
	}
	av.Remote = remote
	local := av.Local.Unmap()
	if !local.IsValid() {
		local = w.local.Addr()
	}
	if local.IsUnspecified() {
		return fmt.Errorf("%w: AV: a wire bound to %v needs a local address", verbs.ErrBadAttr, w.local)
	}
	if local.Is4() != remote.Addr().Is4() {
		return fmt.Errorf("%w: AV: %v and %v are of different IP versions", verbs.ErrBadAttr, local, remote.Addr())
	}
	av.Local = local
	return nil
}

// setAV points a queue pair at its peer.
func (w *Wire) setAV(q *QP, av *verbs.AV) {
	w.leavePeer(q)
	q.route = w.routeTo(av)
	q.rxPort = q.dst.Port()
	q.rxPath = roce.NewPath(q.dst, netip.AddrPortFrom(q.src, w.local.Port()))
	w.joinPeer(q)
}
