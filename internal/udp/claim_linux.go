//go:build !doorbellportable

package udp

import (
	"net/netip"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// States of claim.state.
const (
	claimNone  = iota // Recv asks the kernel
	claimHeld         // what arrives is the claimant's: Recv brings nothing
	claimFired        // Await has filled slots: for the next Recv
)

// claimTimeout is how long Await sleeps at the most, in microseconds, to which the kernel adds some
// jiffies: long enough to be rare, short enough that a kick which got lost is no worse than a nap.
const claimTimeout = 4_000

// claim is how one goroutine sleeps in the receiving call itself, which saves it a system call
// for each packet that wakes it: Poller's Claim, Await and Unclaim. While it is held nobody else
// receives, or packets would overtake each other.
type claim struct {
	state atomic.Uint32
	// missed counts calls of Recv that brought nothing because of it.
	missed atomic.Uint32

	ready, useless bool // the socket was prepared; it cannot be
	// self is the socket's own address, and to what the kernel calls it.
	self  netip.AddrPort
	to    unix.RawSockaddrInet6
	toLen uint32

	n int // slots that Await has filled; written before claimFired is
}

// prepare makes the socket one that can be waited on; false when it cannot be.
func (s *Socket) prepare() bool {
	c := &s.claim
	if c.ready || c.useless {
		return c.ready
	}
	// All other calls say that they must not block. A timeout also has signals end the call.
	err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: claimTimeout})
	if err == nil {
		err = unix.SetNonblock(s.fd, false)
	}
	c.self = s.local
	if s.wildcard { // then it carries IPv4, too, which lo has where it may lack IPv6
		c.self = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), s.local.Port())
	}
	c.toLen = s.putName(&c.to, c.self)
	c.ready, c.useless = err == nil, err != nil
	return c.ready
}

// Claim reserves what arrives for the next Await, as the owner of the wire, who then gives up the
// wire and calls Await, or takes it back by Unclaim. False when this socket offers no such
// thing: then Wait is what there is.
func (p *Poller) Claim() bool {
	s := p.sock
	if s.closed.Load() || !s.batch.on() || s.rx.want == 0 || s.claim.state.Load() != claimNone || !s.prepare() {
		return false
	}
	s.claim.missed.Store(0)
	s.claim.state.Store(claimHeld)
	return true
}

// Unclaim takes Claim back before Await. Owner of the wire.
func (p *Poller) Unclaim() { p.sock.claim.state.Store(claimNone) }

// Await sleeps until a packet has arrived, which the next Recv returns, or somebody kicks, or
// for some milliseconds, and ends the claim. It reports whether it slept in vain for the whole
// time, and how often others called Recv meanwhile. It may return early for no reason. A kick
// that comes before Await makes it return at once; one that comes while the send buffer is full
// may get lost and let it sleep.
func (p *Poller) Await() (idle bool, missed int) {
	s := p.sock
	c := &s.claim
	if !p.state.CompareAndSwap(pollAwake, pollReceiving) {
		p.state.Swap(pollAwake)
		c.state.Store(claimNone)
		return false, 0
	}
	s.rx.renew()
	n, errno := s.sys.await(s.fd, &s.rx.hdrs[0], s.rx.want)
	// Swap, not Store: reading what the last kicker wrote orders its writes before us.
	p.state.Swap(pollAwake)
	missed = int(c.missed.Load())
	if errno != 0 {
		idle = errno == unix.EAGAIN
		if !idle && errno != unix.EINTR {
			s.rxErrors.Add(1) // the next Recv finds out whether it passes
		}
		c.state.Store(claimNone)
		return idle, missed
	}
	s.rxAwaits.Add(1)
	c.n = n
	c.state.Store(claimFired)
	return false, missed
}

// take returns how many slots Await has filled, and ends that; 0 while the claim is held.
func (c *claim) take() (n int) {
	if c.state.Load() == claimHeld {
		c.missed.Add(1)
		return 0
	}
	c.state.Store(claimNone)
	return c.n
}

// rouse ends the present Await: an empty datagram from the socket to itself.
func (s *Socket) rouse() {
	c := &s.claim
	_, _, _ = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), 0, 0, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, uintptr(unsafe.Pointer(&c.to)), uintptr(c.toLen))
}
