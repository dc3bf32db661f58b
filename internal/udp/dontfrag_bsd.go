//go:build darwin || freebsd

package udp

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	recvLimit = "kern.ipc.maxsockbuf, which bounds it, above %d"
	sendLimit = recvLimit
)

// dontFragment makes the system set DF and refuse what is longer than the MTU.
func dontFragment(fd uintptr, v6, dual bool) error {
	if v6 {
		if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1); err != nil {
			return fmt.Errorf("setsockopt IPV6_DONTFRAG: %w", err)
		}
	}
	if !v6 || dual {
		// macOS sets DF for both families by the option of the socket's own family.
		if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_DONTFRAG, 1); err != nil && !dual {
			return fmt.Errorf("setsockopt IP_DONTFRAG: %w", err)
		}
	}
	return nil
}
