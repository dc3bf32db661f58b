//go:build unix && (!linux || doorbellportable)

package udp

import (
	"errors"

	"golang.org/x/sys/unix"
)

const msgTruncated = unix.MSG_TRUNC | unix.MSG_CTRUNC

// tooLong says that a datagram was cut; here a flag tells instead.
func tooLong(error) bool { return false }

// buffers returns the effective buffers of a socket, 0 where unknown.
func buffers(fd uintptr) (recv, send int) {
	recv, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
	send, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
	return recv, send
}

// faultOf sorts an error of a send.
func faultOf(err error) sendFault {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return faultOther
	}
	switch errno {
	case unix.EMSGSIZE:
		return faultTooLong
	case unix.ENOBUFS, unix.ENOMEM:
		return faultNoBuffers
	case unix.EPERM, unix.EACCES:
		return faultNotPermitted
	case unix.ECONNREFUSED:
		return faultRefused
	case unix.ENETUNREACH, unix.ENETDOWN:
		return faultNetUnreachable
	case unix.EHOSTUNREACH, unix.EHOSTDOWN:
		return faultHostUnreachable
	case unix.EINVAL, unix.EADDRNOTAVAIL, unix.EAFNOSUPPORT:
		return faultInvalid
	}
	return faultOther
}
