//go:build doorbellportable

package udp

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	recvLimit = "it with: sysctl -w net.core.rmem_max=%d"
	sendLimit = "it with: sysctl -w net.core.wmem_max=%d"
)

// dontFragment sets the options that RoCEv2 needs, see the package comment.
func dontFragment(fd uintptr, v6, dual bool) error {
	set := func(name string, level, opt, value int) error {
		if err := unix.SetsockoptInt(int(fd), level, opt, value); err != nil {
			return fmt.Errorf("setsockopt %s: %w", name, err)
		}
		return nil
	}
	if v6 {
		if err := set("IPV6_MTU_DISCOVER", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE); err != nil {
			return err
		}
		if err := set("UDP_NO_CHECK6_RX", unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1); err != nil {
			return err
		}
	}
	if !v6 || dual {
		return set("IP_MTU_DISCOVER", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
	}
	return nil
}
