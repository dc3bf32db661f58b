//go:build !linux

package floor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
)

var errSystem = fmt.Errorf("floor: bare sockets are measured on Linux only: %w", errors.ErrUnsupported)

func ping(context.Context, Params, netip.AddrPort) (Result, error) { return Result{}, errSystem }

func pong(context.Context, Params, func(netip.AddrPort) error) error { return errSystem }

func source(context.Context, Params, netip.AddrPort) (Result, error) { return Result{}, errSystem }

func sink(context.Context, Params, func(netip.AddrPort) error) error { return errSystem }

// Start starts a command; only on Linux can it be held to a CPU or put into a namespace.
func (p Place) Start(cmd *exec.Cmd) error {
	if p.CPU != 0 || p.NetNS != "" {
		return fmt.Errorf("CPUs and namespaces: %w", errors.ErrUnsupported)
	}
	if cmd.Env == nil && p.Procs > 0 {
		cmd.Env = append(os.Environ(), p.Env()...)
	}
	return cmd.Start()
}

// CPUs returns nil: on this system processes are not held to CPUs.
func CPUs() []int { return nil }

func pin(int) (func(), error) { return nil, errors.ErrUnsupported }
