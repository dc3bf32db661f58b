package transport

import (
	"sync"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
)

// What the wires of one device have to do with each other, when there are several: a wire that
// was sent what is another's puts it into that one's mailbox, and the connection managers
// tell each other which of a peer's queue pairs have a connection.

// Bounds of a mailbox. What does not fit is lost as by a network, and counted.
const (
	mailBytes  = 1 << 20
	mailLength = 4096
	mailNotes  = 256
)

// mailbox holds what other wires have for a wire. It is used where the system does not choose
// sockets as it should, and costs a look at full otherwise.
type mailbox struct {
	full atomic.Bool // there may be something in it; written under mu

	mu    sync.Mutex
	mail  mail // guarded by mu
	spare mail // the owner's of the wire: emptied, for the next exchange
}

type mail struct {
	bytes   []byte
	letters []letter
	stale   []cm.ConnID // connections whose peers have forgotten them
}

// letter is a datagram: size bytes from at on.
type letter struct {
	rx            link.Rx // without the buffer
	at, size, seg int
}

// put adds something and reports whether there was room, and whether the box was empty: then
// its wire's owner is to be told.
func (b *mailbox) put(add func(m *mail) bool) (first, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !add(&b.mail) {
		return false, false
	}
	return !b.full.Swap(true), true
}

// empty takes everything. The wire's owner uses it until the next call.
func (b *mailbox) empty() *mail {
	b.spare.bytes, b.spare.letters, b.spare.stale = b.spare.bytes[:0], b.spare.letters[:0], b.spare.stale[:0]
	b.mu.Lock()
	b.mail, b.spare = b.spare, b.mail
	b.full.Store(false)
	b.mu.Unlock()
	return &b.spare
}

// post puts something into the port's mailbox; false when there is no room. Under another wire's
// role.
func (p *port) post(add func(m *mail) bool) bool {
	first, ok := p.mail.put(add)
	if first {
		p.role.Ring()
	}
	return ok
}

// siblings is the other ports as a port's wire sees them.
type siblings struct{ p *port }

// HandOver gives a datagram to the wire that it is for.
func (s siblings) HandOver(to int, rx *link.Rx, b []byte, seg int) bool {
	return s.p.dev.ports[to].post(func(m *mail) bool {
		if len(m.letters) == mailLength || len(m.bytes)+len(b) > mailBytes {
			return false
		}
		l := letter{rx: *rx, at: len(m.bytes), size: len(b), seg: seg}
		l.rx.Buf = nil
		m.letters = append(m.letters, l)
		m.bytes = append(m.bytes, b...)
		return true
	})
}

func (s siblings) Claim(qp cm.PeerQP, id cm.ConnID) { s.p.dev.peers.claim(qp, s.p.index, id) }

func (s siblings) Release(qp cm.PeerQP, id cm.ConnID) { s.p.dev.peers.release(qp, s.p.index, id) }

// Stale tells the wire, if there is one but ours, whose connection a peer has forgotten. Without
// room for that the peer's next attempt tells it.
func (s siblings) Stale(qp cm.PeerQP) bool {
	owner, ok := s.p.dev.peers.find(qp)
	if !ok || owner.wire == s.p.index {
		return false
	}
	s.p.dev.ports[owner.wire].post(func(m *mail) bool {
		if len(m.stale) == mailNotes {
			return false
		}
		m.stale = append(m.stale, owner.id)
		return true
	})
	return true
}

// peerIndex knows the connection of each queue pair of a peer that has one.
type peerIndex struct {
	mu sync.Mutex // a leaf, held for a look-up: wires' owners take it
	m  map[cm.PeerQP]peerOwner
}

// peerOwner names a connection of the device.
type peerOwner struct {
	wire int
	id   cm.ConnID
}

func newPeerIndex() *peerIndex { return &peerIndex{m: make(map[cm.PeerQP]peerOwner)} }

func (x *peerIndex) claim(qp cm.PeerQP, wire int, id cm.ConnID) {
	x.mu.Lock()
	x.m[qp] = peerOwner{wire, id}
	x.mu.Unlock()
}

func (x *peerIndex) release(qp cm.PeerQP, wire int, id cm.ConnID) {
	x.mu.Lock()
	if x.m[qp] == (peerOwner{wire, id}) {
		delete(x.m, qp)
	}
	x.mu.Unlock()
}

func (x *peerIndex) find(qp cm.PeerQP) (peerOwner, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o, ok := x.m[qp]
	return o, ok
}

// sharedDriver is the driver of a wire that has siblings.
type sharedDriver struct{ driver }

// Step takes what is in the mailbox first.
func (d sharedDriver) Step() (more bool) {
	p := d.p
	if p.mail.full.Load() {
		now := p.dev.now()
		m := p.mail.empty()
		for i := range m.letters {
			l := &m.letters[i]
			p.wire.Inject(now, &l.rx, m.bytes[l.at:l.at+l.size:l.at+l.size], l.seg)
		}
		for _, id := range m.stale {
			p.wire.Stale(now, id)
		}
	}
	return d.driver.Step() || p.mail.full.Load()
}

func (d sharedDriver) Pending() bool { return d.driver.Pending() || d.p.mail.full.Load() }
