//go:build linux

// Command guest is the first process of the machine that the interoperability tests talk to.
// It mounts what a Linux needs, brings up eth0 and a Soft-RoCE device on it, and then runs
// shell commands for whoever connects to its TCP port. It trusts them: the machine stands
// alone in a network namespace that the tests made.
//
// The kernel's command line says which addresses it has:
//
//	guest.ip4=10.77.0.2/24 guest.ip6=fd77::2/64 guest.mtu=1500
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Port is where commands are taken.
const port = 2222

// life bounds how long the machine stays up when its tests are gone without saying so.
const life = 2 * time.Hour

func main() {
	if err := boot(); err != nil {
		fmt.Println("guest: boot:", err)
		off()
	}
	time.AfterFunc(life, off)
	ln, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		fmt.Println("guest:", err)
		off()
	}
	fmt.Println("guest: ready")
	for {
		c, err := ln.Accept()
		if err != nil {
			fmt.Println("guest:", err)
			off()
		}
		go serve(c)
	}
}

func off() {
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF) // without the right to, nothing else helps either
	os.Exit(1)
}

// boot makes a usable system out of a bare kernel.
func boot() error {
	for _, m := range [][3]string{
		{"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"}, {"devtmpfs", "/dev", "devtmpfs"},
		{"tmpfs", "/tmp", "tmpfs"}, {"tmpfs", "/run", "tmpfs"},
	} {
		if err := syscall.Mount(m[0], m[1], m[2], 0, ""); err != nil && !errors.Is(err, syscall.EBUSY) {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	for _, v := range []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C"} {
		name, value, _ := strings.Cut(v, "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	// Registered memory is locked, and a limit of 64 KiB would be met soon.
	unlimited := syscall.Rlimit{Cur: ^uint64(0), Max: ^uint64(0)}
	const rlimitMemlock = 8
	if err := syscall.Setrlimit(rlimitMemlock, &unlimited); err != nil {
		return fmt.Errorf("memlock: %w", err)
	}
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	arg := map[string]string{"ip4": "10.77.0.2/24", "ip6": "fd77::2/64", "mtu": "1500"}
	for f := range strings.FieldsSeq(string(line)) {
		if name, value, ok := strings.Cut(f, "="); ok {
			arg[strings.TrimPrefix(name, "guest.")] = value
		}
	}
	script := strings.NewReplacer("IP4", arg["ip4"], "IP6", arg["ip6"], "MTU", arg["mtu"]).Replace(`
set -e
modprobe -a virtio_pci virtio_rng virtio_net
for i in $(seq 100); do [ -e /sys/class/net/eth0 ] && break; sleep 0.1; done
ip link set lo up
ip link set eth0 mtu MTU up
ip addr add IP4 dev eth0
ip -6 addr add IP6 dev eth0 nodad
modprobe -a ib_uverbs rdma_ucm rdma_rxe
rdma link add rxe0 type rxe netdev eth0
for i in $(seq 100); do [ -e /dev/infiniband/rdma_cm ] && [ -e /dev/infiniband/uverbs0 ] && break; sleep 0.1; done
`)
	if out, err := exec.Command("bash", "-c", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// request is what a client sends, once; frame is what it gets back, many times. The last
// frame has Done set. A client that hangs up kills what it started.
type (
	request struct{ Cmd string }
	frame   struct {
		Out  []byte `json:",omitempty"`
		Done bool   `json:",omitempty"`
		Exit int    `json:",omitempty"`
	}
)

// frames turns writes into frames.
type frames struct{ enc *json.Encoder }

func (f frames) Write(p []byte) (int, error) {
	if err := f.enc.Encode(frame{Out: p}); err != nil {
		return 0, err
	}
	return len(p), nil
}

// serve runs one command.
func serve(c net.Conn) {
	defer c.Close()
	var req request
	if err := json.NewDecoder(c).Decode(&req); err != nil {
		return
	}
	out := frames{json.NewEncoder(c)}
	cmd := exec.Command("bash", "-c", req.Cmd)
	cmd.Stdout, cmd.Stderr = out, out // equal, so one goroutine writes
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		_ = out.enc.Encode(frame{Out: []byte(err.Error()), Done: true, Exit: 127})
		return
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		var b [1]byte
		_, _ = c.Read(b[:]) // returns when the client hangs up, or we do
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}()
	_ = cmd.Wait() // the exit code says it all
	_ = out.enc.Encode(frame{Done: true, Exit: cmd.ProcessState.ExitCode()})
	c.Close()
	<-gone
}
