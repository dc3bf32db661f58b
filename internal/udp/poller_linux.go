//go:build !doorbellportable

package udp

import (
	"fmt"
	"math"
	"net"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// States of Poller.state.
const (
	pollAwake     = iota // the thread is not in Wait, and nobody has kicked
	pollAsleep           // the thread is in ppoll, or about to be
	pollReceiving        // the thread is in Await's recvmmsg, or about to be
	pollKicked           // somebody has kicked since the thread last left Wait or Await
)

// Poller lets a wire's thread sleep until its socket has something, somebody kicks, or
// time is up. Wait and Close belong to the thread, Kick to everybody.
//
// It uses ppoll and not epoll: there are two descriptors, so epoll saves nothing; what to
// wait for is an argument and costs no system call to change; timeouts are nanoseconds on
// every kernel; and while nobody sleeps, the socket has no waiter registered, so that a
// datagram's arrival does not pay for one. Readiness is a level, not an edge: what arrived
// before Wait makes Wait return at once.
type Poller struct {
	sock  *Socket
	event int    // eventfd, until Close
	one   uint64 // what a kick adds to it; never changes
	state atomic.Uint32

	// Owned by the thread. What the kernel reads and writes is here and not on the stack,
	// because it would be moved to the heap anew for each call.
	fds     [2]unix.PollFd // socket, eventfd
	timeout unix.Timespec
	count   uint64 // what the eventfd held
	closed  bool
	// owed counts writes to the eventfd that kickers have decided on and that have not
	// been read back: Close waits for them, or they would hit whoever gets the number next.
	owed uint64
}

// NewPoller makes a poller for a socket. Close it before the socket.
func NewPoller(s *Socket) (*Poller, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("udp: eventfd: %w", err)
	}
	p := &Poller{sock: s, event: fd, one: 1}
	p.fds[0].Fd = int32(s.fd)
	p.fds[1] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	return p, nil
}

// Wait sleeps until the socket is in one of the wanted states, somebody kicks, or
// timeoutNs have passed (0: only look; negative: no limit), and returns the states that
// the socket is in, of those wanted. It may return early and empty-handed. No event is
// wanted when want is 0: then the socket does not disturb.
//
// A kick that comes before Wait makes it return at once. What was written before the kick
// is visible after the Wait that it ended. An error is for good, [net.ErrClosed] after Close.
func (p *Poller) Wait(want Events, timeoutNs int64) (Events, error) {
	if p.closed {
		return 0, net.ErrClosed
	}
	p.fds[0].Events = 0
	if want&Readable != 0 {
		if p.sock.claim.state.Load() == claimFired {
			return Readable, nil
		}
		p.fds[0].Events |= unix.POLLIN
	}
	if want&Writable != 0 {
		p.fds[0].Events |= unix.POLLOUT
	}
	fds := p.fds[:]
	if want == 0 {
		fds = fds[1:] // POLLERR cannot be unwanted
	}
	asleep := timeoutNs != 0 && p.state.CompareAndSwap(pollAwake, pollAsleep)
	if !asleep {
		timeoutNs = 0 // kicked, or not meant to sleep
	}
	n, errno := p.ppoll(fds, timeoutNs)
	// Swap, not Store: reading what the last kicker wrote orders its writes before us.
	if p.state.Swap(pollAwake) == pollKicked && asleep {
		p.owed++
	}
	if errno != 0 {
		if errno == unix.EINTR || errno == unix.EAGAIN || errno == unix.ENOMEM {
			return 0, nil
		}
		return 0, fmt.Errorf("udp: ppoll: %w", errno)
	}
	if n == 0 {
		return 0, nil
	}
	if p.fds[1].Revents != 0 {
		// The counter may also have been written late, for a sleep that had already ended;
		// then this Wait ended early, no more.
		p.drain()
	}
	if want == 0 {
		return 0, nil
	}
	got := p.fds[0].Revents
	if got&unix.POLLNVAL != 0 {
		return 0, net.ErrClosed
	}
	var e Events
	// An error that is pending on the socket is taken by the next call, which then works.
	if got&(unix.POLLIN|unix.POLLERR|unix.POLLHUP) != 0 {
		e |= Readable
	}
	if got&(unix.POLLOUT|unix.POLLERR|unix.POLLHUP) != 0 {
		e |= Writable
	}
	return e & want, nil
}

// ppoll sleeps in the kernel, through Syscall so that the scheduler knows, or only looks.
func (p *Poller) ppoll(fds []unix.PollFd, timeoutNs int64) (int, unix.Errno) {
	for i := range fds {
		fds[i].Revents = 0
	}
	var ts *unix.Timespec
	if timeoutNs >= 0 {
		// A 32-bit system counts seconds up to 2038; nobody waits that long.
		p.timeout = unix.NsecToTimespec(min(timeoutNs, math.MaxInt32*int64(1e9)))
		ts = &p.timeout
	}
	base := unsafe.Pointer(unsafe.SliceData(fds))
	if timeoutNs == 0 {
		n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(base), uintptr(len(fds)), uintptr(unsafe.Pointer(ts)), 0, 0, 0)
		return int(n), errno
	}
	n, _, errno := unix.Syscall6(unix.SYS_PPOLL, uintptr(base), uintptr(len(fds)), uintptr(unsafe.Pointer(ts)), 0, 0, 0)
	return int(n), errno
}

// drain takes what is in the eventfd.
func (p *Poller) drain() {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(p.event), uintptr(unsafe.Pointer(&p.count)), unsafe.Sizeof(p.count))
	if errno == 0 && n == unsafe.Sizeof(p.count) {
		p.owed -= p.count
	}
}

// Kick makes the present or the next Wait or Await return. It never blocks and anyone may call
// it at any time; it costs a system call only when the thread sleeps, and does nothing after
// Close. A call that found the thread in Await must be over before the socket is closed.
func (p *Poller) Kick() {
	switch p.state.Swap(pollKicked) {
	case pollAsleep:
		// Cannot fail: the counter has room for 2^64-2 kicks, and Close waits for us.
		_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(p.event), uintptr(unsafe.Pointer(&p.one)), unsafe.Sizeof(p.one))
	case pollReceiving:
		p.sock.rouse()
	}
}

// Close gives the eventfd back. A second call does nothing.
func (p *Poller) Close() error {
	if p.closed {
		return nil
	}
	p.closed = true
	for p.owed > 0 {
		// The kicker is between its two steps and needs nothing from us.
		if _, errno := p.ppoll(p.fds[1:], -1); errno == 0 {
			p.drain()
		}
	}
	if err := unix.Close(p.event); err != nil {
		return fmt.Errorf("udp: close eventfd: %w", err)
	}
	return nil
}
