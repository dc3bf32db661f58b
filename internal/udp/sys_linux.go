//go:build !doorbellportable

package udp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is struct mmsghdr of recvmmsg(2): 64 bytes on 64-bit systems, 32 on others; Go
// pads it as C does, since the alignment of Msghdr is that of a pointer.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32 // bytes received or sent, written by the kernel
}

// sys is what a socket asks of the kernel. Tests put in a kernel that fails on demand.
//
// All memory that the pointers reach (messages, iovecs, names, control buffers) is part
// of slices that the Socket allocates once and keeps: it is on the heap, which does not
// move, and alive as long as the Socket is.
type sys struct {
	recvmmsg   func(fd int, msgs *mmsghdr, n int) (int, unix.Errno)
	await      func(fd int, msgs *mmsghdr, n int) (int, unix.Errno) // recvmmsg that blocks
	recvmsg    func(fd int, msg *unix.Msghdr) (int, unix.Errno)
	sendmmsg   func(fd int, msgs *mmsghdr, n int) (int, unix.Errno)
	sendmsg    func(fd int, msg *unix.Msghdr) (int, unix.Errno)
	setsockopt func(fd, level, opt, value int) error
	getsockopt func(fd, level, opt int) (int, error)
	// maxSegs finds out how many datagrams the kernel takes in one train.
	maxSegs func() int
}

// kernel is the real one. The calls but await cannot block, so they do without the scheduler's
// bookkeeping (RawSyscall): that is 30 ns less per call and keeps the scheduler from
// taking the P away in the middle of a spin. The callers bound how long one call copies.
var kernel = sys{
	recvmmsg: func(fd int, msgs *mmsghdr, n int) (int, unix.Errno) {
		r, _, e := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(msgs)), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
		return int(r), e
	},
	await: func(fd int, msgs *mmsghdr, n int) (int, unix.Errno) {
		r, _, e := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(msgs)), uintptr(n), unix.MSG_WAITFORONE, 0, 0)
		return int(r), e
	},
	recvmsg: func(fd int, msg *unix.Msghdr) (int, unix.Errno) {
		r, _, e := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(msg)), unix.MSG_DONTWAIT)
		return int(r), e
	},
	sendmmsg: func(fd int, msgs *mmsghdr, n int) (int, unix.Errno) {
		r, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(msgs)), uintptr(n), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		return int(r), e
	},
	sendmsg: func(fd int, msg *unix.Msghdr) (int, unix.Errno) {
		r, _, e := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return int(r), e
	},
	setsockopt: unix.SetsockoptInt,
	getsockopt: unix.GetsockoptInt,
	maxSegs:    probeMaxSegs,
}

// The kernel's UDP_MAX_SEGMENTS was 64 until Linux 6.9 and is 128 since; distributions
// have carried the change to older versions, so the version does not tell.
const (
	oldMaxSegs = 64
	newMaxSegs = 128
)

// probeMaxSegs sends a train of 128 one-byte datagrams from a socket of its own to itself
// over loopback. The answer is 64 when it is refused or cannot be tried.
func probeMaxSegs() int {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err != nil {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return oldMaxSegs
		}
		to = &unix.SockaddrInet6{Addr: [16]byte{15: 1}}
	}
	defer unix.Close(fd)
	if unix.Bind(fd, to) != nil {
		return oldMaxSegs
	}
	if to, err = unix.Getsockname(fd); err != nil {
		return oldMaxSegs
	}
	if unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, 1) != nil {
		return oldMaxSegs
	}
	if unix.Sendto(fd, make([]byte, newMaxSegs), 0, to) != nil {
		return oldMaxSegs
	}
	return newMaxSegs
}
