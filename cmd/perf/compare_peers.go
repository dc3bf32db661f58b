package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// peerRows compares with other transports. Those over UDP and reliable, which is what Doorbell
// is, have marks; datagrams that may be lost and what runs over TCP are there to know.
func peerRows(group string) []pairing {
	rtt := floor.Params{Kind: floor.Echo, Size: 64, Window: 1}
	echo := floor.Params{Kind: floor.Echo, Size: 64, Window: 64}
	bulk := floor.Params{Kind: floor.Bulk, Size: 1 << 20}
	row := func(name string, ours, theirs measurement, value string, mark, reach float64) pairing {
		return pairing{group, name, ours, theirs, value, mark, reach, true}
	}
	const times, rates = 0.2, 5 // what "five times ahead" is for each
	return []pairing{
		row("64 B round trip against quic-go, p50", sendLat, goPeer("quic-stream", "round trip", rtt), p50, 1, times),
		row("64 B round trip against quic-go datagrams, p50", sendLat, goPeer("quic-datagram", "round trip", rtt), p50, 1, times),
		row("64 B round trip against kcp-go, p50", sendLat, goPeer("kcp", "round trip", rtt), p50, 1, times),
		row("64 B round trip against ofi_rxd, p50 to mean", sendLat, libfabric(64, 5000), p50, 1, times),
		row("64 B round trip against UCX over TCP, p50", sendLat, ucx("tag_lat", 64, 10000), p50, 0, 0),
		row("64 B round trip against TCP, p50", sendLat, tcpEcho1, p50, 0, 0),
		row("64 B echo, window 64, against quic-go", verbsEcho, goPeer("quic-stream", "echo", echo), mps, 1, rates),
		row("64 B echo, window 64, against quic-go datagrams", verbsEcho, goPeer("quic-datagram", "echo", echo), mps, 1, rates),
		row("64 B echo, window 64, against kcp-go", verbsEcho, goPeer("kcp", "echo", echo), mps, 1, rates),
		row("1 MiB against quic-go", sendBulk, goPeer("quic-stream", "bulk", bulk), gbps, 1, rates),
		row("1 MiB against quic-go datagrams", sendBulk, goPeer("quic-datagram", "bulk", bulk), gbps, 1, rates),
		row("1 MiB against kcp-go", sendBulk, goPeer("kcp", "bulk", bulk), gbps, 1, rates),
		row("1 MiB against ofi_rxd", sendBulk, libfabric(1<<20, 50), gbps, 1, rates),
		row("1 MiB against UCX over TCP", sendBulk, ucx("tag_bw", 1<<20, 400), gbps, 0, 0),
	}
}

// goPeer is a transport of bench/peers.
func goPeer(name, workload string, p floor.Params) measurement {
	return measurement{name: name + ", " + workload, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		exe, err := e.peersProgram(ctx)
		if err != nil {
			return nil, err
		}
		for i := range p.Places {
			p.Places[i] = e.places[i]
			p.Places[i].Procs = 0 // the runtime's choice: with more they are slower
		}
		return e.ends(ctx, []string{exe, name}, p)
	}}
}

// ends runs two processes that keep to floor's protocol, where everything runs if p says no
// places.
func (e *arena) ends(ctx context.Context, argv []string, p floor.Params) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, startGrace+e.c.each)
	defer cancel()
	p.Exec, p.Duration = argv, e.c.each
	if p.Places == [2]floor.Place{} {
		p.Places = e.places
	}
	for i := range p.Places {
		p.Places[i].Addr = loopback[i]
	}
	r, err := floor.Ends(ctx, p)
	if err != nil {
		return nil, err
	}
	return values(r)
}

// peersProgram finds or builds the program of bench/peers, once.
func (e *arena) peersProgram(ctx context.Context) (string, error) {
	if e.peers == "" && e.peersErr == nil {
		e.peers, e.peersErr = e.buildPeers(ctx)
	}
	return e.peers, e.peersErr
}

func (e *arena) buildPeers(ctx context.Context) (string, error) {
	info, err := os.Stat(e.c.peers)
	if err != nil {
		return "", skipf("no %s here; name it by --peers, or leave it out by --no-peers", e.c.peers)
	}
	if !info.IsDir() {
		return filepath.Abs(e.c.peers)
	}
	exe := filepath.Join(e.temp, "peers")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", exe, ".")
	cmd.Dir = e.c.peers
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", skipf("building %s: %s", e.c.peers, lastLine(string(out), err))
	}
	return exe, nil
}

// tool is a program of another transport, which waits for itself to call.
type tool struct {
	name           string
	server, client []string // arguments
	env            []string
	parse          func(output string) (map[string]float64, error)
}

// libfabric is fi_pingpong over the reliable layer on top of UDP. It tells the mean of half a
// round trip.
func libfabric(size, rounds int) measurement {
	name := "libfabric udp;ofi_rxd, " + strconv.Itoa(size) + " B"
	return measurement{name: name, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		port, err := freeTCPPort()
		if err != nil {
			return nil, err
		}
		args := []string{"-p", "udp;ofi_rxd", "-e", "rdm", "-I", strconv.Itoa(rounds), "-S", strconv.Itoa(size)}
		return e.tool(ctx, tool{
			name: "fi_pingpong", server: append([]string{"-B", port}, args...),
			client: append(append([]string{"-P", port}, args...), loopbackName),
			parse:  func(out string) (map[string]float64, error) { return parsePingPong(out, size) },
		})
	}}
}

// loopbackName is where tools of others listen: all addresses.
const loopbackName = "127.0.0.1"

// parsePingPong reads the line of figures:
//
//	bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
//	64      5k      =5k      625k        0.18s      3.57      17.91       0.06
func parsePingPong(out string, size int) (map[string]float64, error) {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	f := strings.Fields(lines[len(lines)-1])
	if len(f) != 8 {
		return nil, fmt.Errorf("fi_pingpong printed %q", lines[len(lines)-1])
	}
	half, err := strconv.ParseFloat(f[6], 64)
	if err != nil || half <= 0 {
		return nil, fmt.Errorf("fi_pingpong: %q microseconds", f[6])
	}
	return map[string]float64{p50: 2 * half, gbps: float64(size) * 8 / half / 1e3}, nil
}

// ucx is ucx_perftest over TCP: it has no transport over UDP without a NIC.
func ucx(test string, size, rounds int) measurement {
	return measurement{name: "UCX tcp " + test, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		port, err := freeTCPPort()
		if err != nil {
			return nil, err
		}
		return e.tool(ctx, tool{
			name: "ucx_perftest", server: []string{"-p", port}, env: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=lo"},
			client: []string{"-p", port, "-t", test, "-s", strconv.Itoa(size), "-n", strconv.Itoa(rounds), loopbackName},
			parse:  parseUCX,
		})
	}}
}

// parseUCX reads the last line of the table: iterations, microseconds of half a round trip
// (median, mean, mean of all), MB/s, and messages per second.
//
//	Final:     20000      7.652     8.467     8.467        7.21       7.21      118102      118102
func parseUCX(out string) (map[string]float64, error) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) != 9 || f[0] != "Final:" {
			continue
		}
		half, err1 := strconv.ParseFloat(f[2], 64)
		rate, err2 := strconv.ParseFloat(f[6], 64)
		if err1 != nil || err2 != nil || half <= 0 || rate <= 0 {
			return nil, fmt.Errorf("ucx_perftest printed %q", strings.TrimSpace(line))
		}
		return map[string]float64{p50: 2 * half, gbps: rate * (1 << 20) * 8 / 1e9}, nil
	}
	return nil, errors.New("ucx_perftest printed no final line")
}

// tool runs both ends of a tool. It does not say when its server listens, so the client calls
// until somebody is there.
func (e *arena) tool(ctx context.Context, t tool) (map[string]float64, error) {
	path, err := exec.LookPath(t.name)
	if err != nil {
		return nil, skipf("%s is not installed", t.name)
	}
	ctx, cancel := context.WithTimeout(ctx, startGrace)
	defer cancel() // kills what still runs
	start := func(end int, args []string, out *bytes.Buffer) (*exec.Cmd, error) {
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.WaitDelay = time.Second
		cmd.Env = append(os.Environ(), t.env...)
		cmd.Stdout, cmd.Stderr = out, out
		return cmd, e.places[end].Start(cmd)
	}
	var served bytes.Buffer
	server, err := start(0, t.server, &served)
	if err != nil {
		return nil, err
	}
	defer func() {
		cancel()
		_ = server.Wait()
	}()
	for {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("%s did not end: %w", t.name, ctx.Err())
		}
		var out bytes.Buffer
		client, err := start(1, t.client, &out)
		if err != nil {
			return nil, err
		}
		if err := client.Wait(); err == nil {
			return t.parse(out.String())
		} else if !strings.Contains(out.String(), "refused") {
			return nil, fmt.Errorf("%s: %s", t.name, lastLine(out.String(), err))
		}
	}
}

// freeTCPPort finds a port for a tool's own exchange.
func freeTCPPort() (string, error) {
	ln, err := net.Listen("tcp", net.JoinHostPort(loopbackName, "0"))
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return strconv.Itoa(ln.Addr().(*net.TCPAddr).Port), nil
}
