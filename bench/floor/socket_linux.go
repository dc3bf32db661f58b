package floor

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket is a UDP socket over IPv4 used by bare system calls. It belongs to one thread.
//
// The pointers that the kernel is given reach into the socket itself or into slices that its
// users keep: heap memory, which does not move, alive for as long as the call takes.
type socket struct {
	fd        int
	block     bool // sleep in the calls that receive
	connected bool
	peer      unix.RawSockaddrInet4
	peerLen   uint32
	stop      atomic.Bool
	release   func()
}

// socketTimeout is how often a sleeping receiver looks whether it should stop.
const socketTimeout = 50 * time.Millisecond

// openSocket binds a socket to an address, port 0 being any, and holds the calling goroutine
// to its thread until close.
func openSocket(ctx context.Context, p *Params, at netip.AddrPort) (*socket, error) {
	if !at.Addr().Is4() {
		return nil, fmt.Errorf("floor: %v: bare sockets are measured over IPv4", at.Addr())
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := &socket{fd: fd, block: p.Block}
	fail := func(what string, err error) (*socket, error) {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError(what, err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
		return fail("bind", err)
	}
	for _, o := range []struct{ force, plain, size int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, p.RecvBuffer}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, 0},
	} {
		size, opt := o.size, o.plain
		if size == 0 {
			size = 4 << 20
			if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, size) == nil {
				continue
			}
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, size); err != nil {
			return fail("setsockopt", err)
		}
	}
	if s.block {
		tv := unix.NsecToTimeval(int64(socketTimeout))
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
			return fail("setsockopt", err)
		}
	}
	undo := context.AfterFunc(ctx, func() { s.stop.Store(true) })
	runtime.LockOSThread()
	s.release = func() {
		runtime.UnlockOSThread()
		undo()
	}
	return s, nil
}

func (s *socket) close() {
	_ = unix.Close(s.fd)
	s.release()
}

// local is where the socket is bound.
func (s *socket) local() (netip.AddrPort, error) {
	sa, err := unix.Getsockname(s.fd)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
	}
	in := sa.(*unix.SockaddrInet4) // it was bound to one
	return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port)), nil
}

// aim makes an address the one to send to.
func (s *socket) aim(to netip.AddrPort) {
	s.peer = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().As4()}
	p := (*[2]byte)(unsafe.Pointer(&s.peer.Port)) // big-endian in memory
	p[0], p[1] = byte(to.Port()>>8), byte(to.Port())
}

// connect connects the socket to where it aims.
func (s *socket) connect() error {
	p := (*[2]byte)(unsafe.Pointer(&s.peer.Port))
	err := unix.Connect(s.fd, &unix.SockaddrInet4{Port: int(p[0])<<8 | int(p[1]), Addr: s.peer.Addr})
	s.connected = err == nil
	return os.NewSyscallError("connect", err)
}

// safepoint is a call with a frame: where the runtime can stop a loop that is otherwise made
// of system calls which it knows nothing of. Without it a collection waits for ever.
//
//go:noinline
func safepoint() {}

// send sends one datagram, or a train if the socket has a segment size.
func (s *socket) send(b []byte) error {
	var name uintptr
	var nameLen uintptr
	if !s.connected {
		name, nameLen = uintptr(unsafe.Pointer(&s.peer)), unsafe.Sizeof(s.peer)
	}
	for {
		_, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, name, nameLen)
		if e == 0 {
			return nil
		}
		if err := s.again("sendto", e); err != nil {
			return err
		}
	}
}

// sendMsg sends what a message header describes, to where it says.
func (s *socket) sendMsg(m *unix.Msghdr) error {
	for {
		_, _, e := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(m)), unix.MSG_DONTWAIT)
		if e == 0 {
			return nil
		}
		if err := s.again("sendmsg", e); err != nil {
			return err
		}
	}
}

// sendMsgs sends many datagrams.
func (s *socket) sendMsgs(m []mmsghdr) error {
	for len(m) > 0 {
		n, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), unix.MSG_DONTWAIT, 0, 0)
		if e == 0 {
			m = m[n:]
			continue
		}
		if err := s.again("sendmmsg", e); err != nil {
			return err
		}
	}
	return nil
}

// recv receives one datagram, sleeping or spinning until there is one.
func (s *socket) recv(b []byte) (int, error) {
	for {
		n, e := s.tryRecv(b, false)
		if e == 0 {
			return n, nil
		}
		if err := s.again("recvfrom", e); err != nil {
			return 0, err
		}
	}
}

// recvFirst receives the first datagram and aims at its sender.
func (s *socket) recvFirst(b []byte) (int, error) {
	for {
		n, e := s.tryRecv(b, true)
		if e == 0 {
			return n, nil
		}
		if err := s.again("recvfrom", e); err != nil {
			return 0, err
		}
	}
}

// tryRecv receives one datagram. A call that may sleep is announced to the scheduler; one
// that cannot does without, which is 30 ns less and keeps sysmon from taking the P away.
func (s *socket) tryRecv(b []byte, name bool) (int, unix.Errno) {
	var from, fromLen uintptr
	if name {
		s.peerLen = uint32(unsafe.Sizeof(s.peer))
		from, fromLen = uintptr(unsafe.Pointer(&s.peer)), uintptr(unsafe.Pointer(&s.peerLen))
	}
	if s.block {
		n, _, e := unix.Syscall6(unix.SYS_RECVFROM, uintptr(s.fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), 0, from, fromLen)
		return int(n), e
	}
	n, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(s.fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, from, fromLen)
	return int(n), e
}

// recvMsgs receives at least one datagram or train, and at most one for each header.
func (s *socket) recvMsgs(m []mmsghdr) (int, error) {
	for {
		var n uintptr
		var e unix.Errno
		if s.block {
			n, _, e = unix.Syscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), unix.MSG_WAITFORONE, 0, 0)
		} else {
			n, _, e = unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), unix.MSG_DONTWAIT, 0, 0)
		}
		if e == 0 {
			return int(n), nil
		}
		if err := s.again("recvmmsg", e); err != nil {
			return 0, err
		}
	}
}

// again returns nil if a call that failed is to be tried again. ECONNREFUSED is the answer to
// an earlier datagram, sent when the peer had not been there yet or was gone.
func (s *socket) again(call string, e unix.Errno) error {
	switch {
	case s.stop.Load():
		return errEnded
	case e == unix.EAGAIN, e == unix.EINTR, e == unix.ECONNREFUSED:
		safepoint()
		return nil
	}
	return fmt.Errorf("floor: %w", os.NewSyscallError(call, e))
}

// mmsghdr is struct mmsghdr of recvmmsg(2); Go pads it as C does.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
}
