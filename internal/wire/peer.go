package wire

import (
	"net/netip"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/qp"
)

// peer is what a wire keeps about the device at one address and port: the window that all
// queue pairs towards it share, and the run of IPv4 Identifications it was seen to use.
type peer struct {
	addr   netip.AddrPort
	window *qp.Window
	refs   int
	// blocked is a FIFO of queue pairs that wait for room in the window.
	blockedFirst, blockedLast *QP
	ids                       idRun
	agreed                    extension // as last agreed on with one of its connections
	// busy: something is under way to the peer. Written by the owner, read by posters.
	busy atomic.Bool
}

// note brings busy up to date.
func (p *peer) note() {
	if b := p.window.Used() > 0; b != p.busy.Load() {
		p.busy.Store(b)
	}
}

// PeerBusy reports whether something is under way to the queue pair's peer, so that its
// answer will soon make the owner look. Any goroutine.
func (q *QP) PeerBusy() bool {
	p := q.posterPeer.Load()
	return p != nil && p.busy.Load()
}

func (w *Wire) joinPeer(q *QP) {
	p := w.peers[q.dst]
	if p == nil {
		p = &peer{addr: q.dst, window: qp.NewWindow(qp.WindowConfig{})}
		w.peers[q.dst] = p
	}
	p.refs++
	q.peer = p
	q.posterPeer.Store(p)
	q.q.SetWindow(p.window)
}

func (w *Wire) leavePeer(q *QP) {
	p := q.peer
	if p == nil {
		return
	}
	q.peer = nil
	q.posterPeer.Store(nil)
	if q.blocked {
		p.unblock(q)
	}
	p.refs--
	if p.refs == 0 {
		delete(w.peers, p.addr)
	} else {
		w.wakeBlocked(p) // the leaver gave back what it had in flight
	}
}

// block puts q at the end of those that wait for room.
func (p *peer) block(q *QP) {
	if q.blocked {
		return
	}
	q.blocked, q.nextBlocked = true, nil
	if p.blockedLast == nil {
		p.blockedFirst = q
	} else {
		p.blockedLast.nextBlocked = q
	}
	p.blockedLast = q
}

func (p *peer) unblock(q *QP) {
	var prev *QP
	for at := p.blockedFirst; at != nil; prev, at = at, at.nextBlocked {
		if at != q {
			continue
		}
		if prev == nil {
			p.blockedFirst = q.nextBlocked
		} else {
			prev.nextBlocked = q.nextBlocked
		}
		if p.blockedLast == q {
			p.blockedLast = prev
		}
		q.blocked, q.nextBlocked = false, nil
		return
	}
}

// wakeBlocked schedules two of those who wait for room, the oldest, when there is some. One that
// finds it used up again lines up again; what it leaves is for the next.
func (w *Wire) wakeBlocked(p *peer) {
	if p.blockedFirst == nil || !p.window.HasRoom() {
		return
	}
	for range 2 {
		q := p.blockedFirst
		if q == nil {
			break
		}
		p.unblock(q)
		w.schedule(q)
	}
}
