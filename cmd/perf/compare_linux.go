package main

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// quiet tells how much of the CPUs others used between begin and end.
type quiet struct {
	pids              []int   // processes of ours that go on living
	busy, total, ours float64 // seconds
	ok                bool
}

func (q *quiet) begin() { *q = readQuiet(q.pids) }

// end returns a part of all CPUs: 0 if none, or if the system does not tell.
func (q *quiet) end() float64 {
	now := readQuiet(q.pids)
	if !q.ok || !now.ok || now.total <= q.total {
		return 0
	}
	return max(0, (now.busy-q.busy)-(now.ours-q.ours)) / (now.total - q.total)
}

func readQuiet(pids []int) quiet {
	q := quiet{pids: pids}
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return q
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return q
	}
	const hertz = 100 // USER_HZ, on every architecture that Go knows
	for i, f := range fields[1:9] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return q
		}
		q.total += n / hertz
		if i != 3 && i != 4 { // idle and waiting for input
			q.busy += n / hertz
		}
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) != nil {
			return q
		}
		q.ours += float64(unix.TimevalToNsec(u.Utime)+unix.TimevalToNsec(u.Stime)) / 1e9
	}
	for _, pid := range pids {
		q.ours += busyTime(pid)
	}
	q.ok = true
	return q
}

// busyTime is how many seconds the threads of a process ran, to the nanosecond.
func busyTime(pid int) (sum float64) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		ran, _, _ := strings.Cut(string(text), " ")
		ns, _ := strconv.ParseFloat(ran, 64)
		sum += ns / 1e9
	}
	return sum
}

// resident is how much memory this process has, in bytes; 0 if the system does not tell.
func resident() int64 {
	text, _ := os.ReadFile("/proc/self/statm")
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	n, _ := strconv.ParseInt(fields[1], 10, 64)
	return n * int64(os.Getpagesize())
}

// available is how much memory there is to be had, in bytes; 0 if the system does not tell.
func available() int64 {
	text, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n << 10
		}
	}
	return 0
}

// kernelAndCPU names both.
func kernelAndCPU() (kernel, cpu string) {
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Release[:])
	}
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return kernel, strings.TrimSpace(value)
		}
	}
	return kernel, cpu
}

// namespaces are two network namespaces and a veth pair between them.
type namespaces struct {
	names [2]string
	addrs [2]netip.Addr
	err   error // why there are none
}

// between returns the namespaces of an MTU, made at the first call.
func (e *arena) between(ctx context.Context, mtu int) (*namespaces, error) {
	n := e.spaces[mtu]
	if n == nil {
		n = makeNamespaces(ctx, mtu)
		e.spaces[mtu] = n
	}
	return n, n.err
}

func makeNamespaces(ctx context.Context, mtu int) *namespaces {
	n := &namespaces{addrs: [2]netip.Addr{netip.AddrFrom4([4]byte{10, 91, 47, 2}), netip.AddrFrom4([4]byte{10, 91, 47, 1})}}
	if os.Geteuid() != 0 {
		n.err = skipf("namespaces need root")
		return n
	}
	if _, err := exec.LookPath("ip"); err != nil {
		n.err = skipf("namespaces need ip of iproute2")
		return n
	}
	for i := range n.names {
		n.names[i] = fmt.Sprintf("doorbell-%d-%d-%d", os.Getpid(), mtu, i)
		if n.err = ip(ctx, "netns", "add", n.names[i]); n.err != nil {
			n.names[i] = ""
			n.remove()
			return n
		}
	}
	m := strconv.Itoa(mtu)
	for _, args := range [][]string{
		{"-n", n.names[0], "link", "add", "veth0", "mtu", m, "type", "veth", "peer", "name", "veth0", "mtu", m, "netns", n.names[1]},
		{"-n", n.names[0], "addr", "add", n.addrs[0].String() + "/24", "dev", "veth0"},
		{"-n", n.names[1], "addr", "add", n.addrs[1].String() + "/24", "dev", "veth0"},
		{"-n", n.names[0], "link", "set", "veth0", "up"},
		{"-n", n.names[1], "link", "set", "veth0", "up"},
	} {
		if n.err = ip(ctx, args...); n.err != nil {
			n.remove()
			return n
		}
	}
	return n
}

// ip runs iproute2; that a machine does not let us is a reason to skip.
func ip(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput()
	if err != nil {
		return skipf("ip %s: %s", strings.Join(args, " "), bytes.TrimSpace(out))
	}
	return nil
}

// remove removes the namespaces, and with them what is in them.
func (n *namespaces) remove() {
	for i, name := range n.names {
		if name != "" {
			_ = ip(context.Background(), "netns", "del", name)
			n.names[i] = ""
		}
	}
}

// placesIn puts the two ends into namespaces.
func (e *arena) placesIn(n *namespaces) [2]floor.Place {
	places := e.places
	for i := range places {
		places[i].NetNS = n.names[i]
	}
	return places
}

// floorBetween runs a floor between two namespaces.
func (e *arena) floorBetween(ctx context.Context, mtu int, p floor.Params) (map[string]float64, error) {
	n, err := e.between(ctx, mtu)
	if err != nil {
		return nil, err
	}
	return e.floorAt(ctx, e.placesIn(n), n.addrs, p)
}

// productBetween runs a test between two namespaces.
func (e *arena) productBetween(ctx context.Context, mtu int, test string, flags ...[]string) (map[string]float64, error) {
	n, err := e.between(ctx, mtu)
	if err != nil {
		return nil, err
	}
	return e.productAt(ctx, e.placesIn(n), n.addrs, test, flags...)
}
