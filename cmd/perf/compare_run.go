package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// loopback are the addresses of a pair on this machine.
var loopback = [2]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 2}), netip.AddrFrom4([4]byte{127, 0, 0, 1})}

// values makes a measurement's values of a floor's result.
func values(r floor.Result) (map[string]float64, error) {
	if r.Ops == 0 {
		return nil, errors.New("nothing was measured")
	}
	v := map[string]float64{gbps: r.Gbps(), mps: r.Rate() / 1e6, each: float64(r.Each())}
	if r.P50 > 0 {
		v[p50], v[p99] = float64(r.P50)/usec, float64(r.P99)/usec
	}
	if r.Lost > 0 {
		v["lost"] = float64(r.Lost)
	}
	return v, nil
}

// floor runs a floor as two processes; flags are those of [app.end].
func (e *arena) floor(ctx context.Context, p floor.Params, flags ...string) (map[string]float64, error) {
	return e.floorAt(ctx, e.places, loopback, p, flags...)
}

func (e *arena) floorAt(ctx context.Context, places [2]floor.Place, addrs [2]netip.Addr, p floor.Params, flags ...string) (map[string]float64, error) {
	p.Exec, p.Places, p.Duration = append([]string{e.exe, "floor-end"}, flags...), places, e.c.each
	for i := range addrs {
		p.Places[i].Addr = addrs[i]
	}
	r, err := floor.Run(ctx, p)
	if errors.Is(err, errors.ErrUnsupported) {
		return nil, skipf("%v", err)
	}
	if err != nil {
		return nil, err
	}
	return values(r)
}

// oneCPU is both ends on the CPU of the first.
func (e *arena) oneCPU() [2]floor.Place { return [2]floor.Place{e.places[0], e.places[0]} }

func oneCPUFloor(p floor.Params) func(context.Context, *arena) (map[string]float64, error) {
	return func(ctx context.Context, e *arena) (map[string]float64, error) {
		if len(e.cpus) < 2 {
			return nil, skipf("processes cannot be held to CPUs here")
		}
		return e.floorAt(ctx, e.oneCPU(), loopback, p)
	}
}

// startGrace is how long the two processes of a test may take beyond what they measure.
const startGrace = 20 * time.Second

// product runs one of Doorbell's tests as two processes, by this program's own command line.
func (e *arena) product(ctx context.Context, places [2]floor.Place, test string, flags ...[]string) (map[string]float64, error) {
	return e.productAt(ctx, places, loopback, test, flags...)
}

func (e *arena) productAt(ctx context.Context, places [2]floor.Place, addrs [2]netip.Addr, test string, flags ...[]string) (map[string]float64, error) {
	if !e.tests[test] {
		return nil, skipf("this build has no %s", test)
	}
	ctx, cancel := context.WithTimeout(ctx, startGrace+e.c.each)
	defer cancel() // kills what still runs
	port, err := freePort(addrs[0], places[0].NetNS != "")
	if err != nil {
		return nil, err
	}
	line := func(end int, more ...string) []string {
		args := []string{test, "--bind", netip.AddrPortFrom(addrs[end], port).String()}
		return append(append(args, slices.Concat(flags...)...), more...)
	}
	server := exec.CommandContext(ctx, e.exe, line(0)...)
	server.WaitDelay = time.Second
	var complaint bytes.Buffer
	server.Stderr = &complaint
	out, err := server.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := places[0].Start(server); err != nil {
		return nil, err
	}
	lines := bufio.NewReader(out)
	if _, err := lines.ReadString('\n'); err != nil { // it listens
		cancel()
		_ = server.Wait()
		return nil, fmt.Errorf("%s: the server did not start: %s", test, lastLine(complaint.String(), err))
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, lines)
	}()
	more := []string{"--out_json", "-D", strconv.FormatFloat(e.c.each.Seconds(), 'f', -1, 64), netip.AddrPortFrom(addrs[0], port).String()}
	if !strings.HasSuffix(test, "_lat") {
		more = append(more, "--report_gbits")
	}
	client := exec.CommandContext(ctx, e.exe, line(1, more...)...)
	client.WaitDelay = time.Second
	var report, clientComplaint bytes.Buffer
	client.Stdout, client.Stderr = &report, &clientComplaint
	err = places[1].Start(client)
	if err == nil {
		err = client.Wait()
	}
	if err != nil {
		cancel()
	}
	<-drained
	serverErr := server.Wait()
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %s", test, lastLine(clientComplaint.String(), err))
	case serverErr != nil:
		return nil, fmt.Errorf("%s: the server: %s", test, lastLine(complaint.String(), serverErr))
	}
	return reportValues(test, report.Bytes())
}

// lastLine is what a process said when it failed, else how it ended.
func lastLine(complaint string, err error) string {
	lines := strings.Split(strings.TrimSpace(complaint), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return strings.TrimPrefix(last, "perf: ")
	}
	return err.Error()
}

// reportValues reads a test's JSON report. As in perftest the times of SEND and WRITE are of
// half a round trip, those of READ and atomics of a whole one.
func reportValues(test string, doc []byte) (map[string]float64, error) {
	var r struct {
		Info struct {
			BWUnit string `json:"BW_unit"`
		} `json:"test_info"`
		Results struct {
			Average *float64 `json:"BW_average"`
			Rate    *float64 `json:"MsgRate"`
			Typical *float64 `json:"t_typical"`
			P99     *float64 `json:"percentile_99"`
		} `json:"results"`
	}
	if err := json.Unmarshal(doc, &r); err != nil {
		return nil, fmt.Errorf("%s: its report: %w", test, err)
	}
	v := map[string]float64{}
	if x := r.Results; strings.HasSuffix(test, "_lat") {
		if x.Typical == nil || x.P99 == nil {
			return nil, fmt.Errorf("%s: its report has no times", test)
		}
		trip := 2.0
		if !strings.HasPrefix(test, "send") && !strings.HasPrefix(test, "write") {
			trip = 1
		}
		v[p50], v[p99] = trip**x.Typical, trip**x.P99
	} else {
		if x.Average == nil || x.Rate == nil || r.Info.BWUnit != bandwidthUnit(true).name {
			return nil, fmt.Errorf("%s: its report has no rates in %s", test, bandwidthUnit(true).name)
		}
		v[gbps], v[mps] = *x.Average, *x.Rate
	}
	for name, x := range v {
		if x <= 0 {
			return nil, fmt.Errorf("%s: its %s is %v", test, name, x)
		}
	}
	return v, nil
}

// freePort finds a UDP port that nobody has at an address, so that a comparison does not meet
// other devices at the usual one. In a namespace of our own every port is free.
func freePort(at netip.Addr, own bool) (uint16, error) {
	if own {
		return 4791, nil
	}
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Port(), nil
}
