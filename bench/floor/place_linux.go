package floor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Start starts a command at the place: a child inherits the CPUs and the network namespace of
// the thread that forks it.
func (p Place) Start(cmd *exec.Cmd) (err error) {
	if cmd.Env == nil && p.Procs > 0 {
		cmd.Env = append(os.Environ(), p.Env()...)
	}
	if p.CPU == 0 && p.NetNS == "" {
		return cmd.Start()
	}
	runtime.LockOSThread()
	intact := true
	defer func() {
		// A thread that could not be put back must not serve other goroutines: it ends
		// with this one if it is not unlocked.
		if intact {
			runtime.UnlockOSThread()
		}
	}()
	if p.CPU > 0 {
		var old, one unix.CPUSet
		one.Set(p.CPU - 1)
		if err := unix.SchedGetaffinity(0, &old); err != nil {
			return fmt.Errorf("CPUs allowed: %w", err)
		}
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("CPU %d: %w", p.CPU-1, err)
		}
		defer func() {
			if e := unix.SchedSetaffinity(0, &old); e != nil {
				intact, err = false, errors.Join(err, e)
			}
		}()
	}
	if p.NetNS != "" {
		back, err := enter(p.NetNS)
		if err != nil {
			return err
		}
		defer func() {
			if e := back(); e != nil {
				intact, err = false, errors.Join(err, e)
			}
		}()
	}
	return cmd.Start()
}

// enter moves the calling thread into a network namespace; back returns it.
func enter(name string) (back func() error, err error) {
	old, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	ns, err := os.Open(filepath.Join("/run/netns", name))
	if err != nil {
		_ = old.Close()
		return nil, err
	}
	defer ns.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		_ = old.Close()
		return nil, fmt.Errorf("network namespace %s: %w", name, err)
	}
	return func() error {
		defer old.Close()
		return unix.Setns(int(old.Fd()), unix.CLONE_NEWNET)
	}, nil
}

// CPUs returns the numbers of the CPUs that this process may use.
func CPUs() []int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	var cpus []int
	for i := range 1024 { // as many as a CPUSet holds
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	return cpus
}

// pin holds the calling thread to a CPU until undo.
func pin(cpu int) (undo func(), err error) {
	var old, one unix.CPUSet
	one.Set(cpu)
	if err := unix.SchedGetaffinity(0, &old); err != nil {
		return nil, err
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return nil, fmt.Errorf("CPU %d: %w", cpu, err)
	}
	return func() { _ = unix.SchedSetaffinity(0, &old) }, nil
}
