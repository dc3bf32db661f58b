package udp

import (
	"errors"
	"fmt"

	"golang.org/x/sys/windows"
)

const (
	msgTruncated = 0 // an error tells, see tooLong

	recvLimit = "the system's limit for UDP receive buffers to %d"
	sendLimit = "the system's limit for UDP send buffers to %d"

	ipDontFragment   = 14 // IP_DONTFRAGMENT, ws2ipdef.h
	ipv6DontFragment = 14 // IPV6_DONTFRAG, ws2ipdef.h
)

// dontFragment makes the system set DF and refuse what is longer than the MTU.
func dontFragment(fd uintptr, v6, dual bool) error {
	if v6 {
		if err := windows.SetsockoptInt(windows.Handle(fd), windows.IPPROTO_IPV6, ipv6DontFragment, 1); err != nil {
			return fmt.Errorf("setsockopt IPV6_DONTFRAG: %w", err)
		}
	}
	if !v6 || dual {
		if err := windows.SetsockoptInt(windows.Handle(fd), windows.IPPROTO_IP, ipDontFragment, 1); err != nil {
			return fmt.Errorf("setsockopt IP_DONTFRAGMENT: %w", err)
		}
	}
	return nil
}

// tooLong says that a datagram was cut: the buffer is full, and the rest is gone.
func tooLong(err error) bool { return errors.Is(err, windows.WSAEMSGSIZE) }

// buffers returns the effective buffers of a socket, 0 where unknown.
func buffers(fd uintptr) (recv, send int) {
	recv, _ = windows.GetsockoptInt(windows.Handle(fd), windows.SOL_SOCKET, windows.SO_RCVBUF)
	send, _ = windows.GetsockoptInt(windows.Handle(fd), windows.SOL_SOCKET, windows.SO_SNDBUF)
	return recv, send
}

// faultOf sorts an error of a send.
func faultOf(err error) sendFault {
	switch {
	case errors.Is(err, windows.WSAEMSGSIZE):
		return faultTooLong
	case errors.Is(err, windows.WSAENOBUFS):
		return faultNoBuffers
	case errors.Is(err, windows.WSAEACCES):
		return faultNotPermitted
	case errors.Is(err, windows.WSAECONNREFUSED), errors.Is(err, windows.WSAECONNRESET):
		return faultRefused
	case errors.Is(err, windows.WSAENETUNREACH), errors.Is(err, windows.WSAENETDOWN):
		return faultNetUnreachable
	case errors.Is(err, windows.WSAEHOSTUNREACH), errors.Is(err, windows.WSAEHOSTDOWN):
		return faultHostUnreachable
	case errors.Is(err, windows.WSAEINVAL), errors.Is(err, windows.WSAEADDRNOTAVAIL), errors.Is(err, windows.WSAEAFNOSUPPORT):
		return faultInvalid
	}
	return faultOther
}
