//go:build !linux || doorbellportable

package udp

import (
	"errors"
	"fmt"

	"golang.org/x/net/bpf"
)

func openShared(_ Config, n int, _ []bpf.RawInstruction) ([]*Socket, error) {
	return nil, fmt.Errorf("udp: %d sockets on one port: %w: it takes Linux, and a build without doorbellportable", n, errors.ErrUnsupported)
}

// Steer replaces the program of sockets that were opened together; here there are none.
func (s *Socket) Steer([]bpf.RawInstruction) error {
	return fmt.Errorf("udp: %w", errors.ErrUnsupported)
}
