package cm

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// ConnID names a connection on this side: its local communication ID, random and never 0. With
// several CMs its low bits name the CM (Config.Wire).
type ConnID uint32

// String prints eight hex digits, as captures show communication IDs.
func (id ConnID) String() string { return fmt.Sprintf("%08x", uint32(id)) }

// Path is where a peer is.
type Path struct {
	// Local is our own address.
	Local netip.Addr
	// Remote is the peer's address and the UDP port that MADs and packets go to; to
	// Connect, port 0 means 4791.
	Remote netip.AddrPort
}

// Out is a MAD to be sent from QP1 to QP1.
type Out struct {
	Path
	MAD [roce.MADLen]byte
}

// CM is a connection manager; see the package documentation.
type CM struct {
	cfg    Config
	idMask uint32 // 0xFFFFFFFF; tests make it smaller

	listeners map[roce.SID]*listener
	// conns holds every connection there is, byPeer those whose peer is known, under the
	// peer's communication ID, and byQPN those that are alive, under the peer's QP.
	conns         map[ConnID]*conn
	byPeer, byQPN map[peerID]*conn
	// most is how many connections there were at a time since there were none.
	most int
	// lingering counts ended connections that never were established.
	lingering int
	strangers strangers

	// services are those that SIDR answers for, queries those that are being asked for;
	// queryAt is when one of these has something to do, or earlier.
	services map[roce.SID]SIDRService
	queries  map[SIDRID]*query
	queryAt  verbs.Instant

	timers   timerHeap
	events   fifo[queuedEvent]
	outgoing fifo[*conn]
	replies  fifo[reply]

	counters Counters
}

// listener is a service ID that accepts REQs.
type listener struct {
	// halfOpen counts its connections between REQ and RTU here, total those of all CMs that
	// listen together.
	halfOpen int
	total    *HalfOpen
}

// HalfOpen counts the connections between REQ and RTU of a service that several CMs listen for.
type HalfOpen struct{ n atomic.Int32 }

// enter takes a place if there are fewer than room.
func (h *HalfOpen) enter(room int) bool {
	if h.n.Add(1) <= int32(room) {
		return true
	}
	h.n.Add(-1)
	return false
}

// leave gives the place of a connection back.
func (l *listener) leave() {
	l.halfOpen--
	l.total.n.Add(-1)
}

// New returns a CM without connections or listeners. Config.Rand must be set.
func New(cfg Config) *CM {
	if cfg.Rand == nil {
		panic("BUG: cm: Config.Rand is nil")
	}
	c := &CM{
		cfg: cfg.withDefaults(), idMask: ^uint32(0), strangers: strangers{share: cfg.Wires},
		listeners: make(map[roce.SID]*listener),
		queryAt:   verbs.Never,
	}
	c.makeMaps()
	return c
}

func (c *CM) makeMaps() {
	c.conns, c.byPeer, c.byQPN = make(map[ConnID]*conn), make(map[peerID]*conn), make(map[peerID]*conn)
}

// crowd is how many connections make it worth while to give their maps back.
const crowd = 1024

// Listen lets REQs for a service ID in. It fails with ErrServiceInUse.
func (c *CM) Listen(service roce.SID) error { return c.ListenShared(service, new(HalfOpen)) }

// ListenShared is Listen for one of several CMs that share a backlog: total is the same for all.
func (c *CM) ListenShared(service roce.SID, total *HalfOpen) error {
	if c.listeners[service] != nil {
		return ErrServiceInUse
	}
	c.listeners[service] = &listener{total: total}
	return nil
}

// Unlisten ends what Listen began: further REQs are rejected. Requests that ReqReceived
// announced remain and want their answer.
func (c *CM) Unlisten(service roce.SID) { delete(c.listeners, service) }

// Len returns the number of connections, those in timewait included.
func (c *CM) Len() int { return len(c.conns) }

// HalfOpen returns the number of a listener's connections between REQ and RTU.
func (c *CM) HalfOpen(service roce.SID) int {
	if l := c.listeners[service]; l != nil {
		return l.halfOpen
	}
	return 0
}

// State returns the state of a connection, Closed when there is none.
func (c *CM) State(id ConnID) State {
	if cn := c.conns[id]; cn != nil {
		return cn.state
	}
	return Closed
}

// tidMagic marks transaction IDs that tell a UDP port.
const tidMagic = 0xD0BE

// newTID returns a transaction ID of our own: magic, UDP port, 32 random bits.
func (c *CM) newTID() uint64 {
	return tidMagic<<48 | uint64(c.cfg.UDPPort)<<32 | uint64(c.cfg.Rand())
}

// sender returns where to answer a MAD that belongs to no connection: the address it
// came from, and the port that its transaction ID tells, if that is the port it
// came from, else 4791.
func sender(from netip.AddrPort, to netip.Addr, tid uint64) Path {
	port := uint16(roce.Port)
	if tid>>48 == tidMagic && uint16(tid>>32) == from.Port() {
		port = from.Port()
	}
	return Path{Local: to, Remote: netip.AddrPortFrom(from.Addr(), port)}
}

// unicast reports whether an address can be a host's.
func unicast(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}
