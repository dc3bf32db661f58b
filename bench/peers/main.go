// Command peers measures other transports over UDP the way Doorbell measures its floors:
// quic-go by streams and by datagrams, kcp-go by streams. It is a module of its own, so that
// whoever imports Doorbell does not download them.
//
//	peers            runs every workload of every transport and prints JSON
//	peers NAME ...   is one end of a transport, which the above and perf compare start
//
// The workloads are those of package floor: a round trip of 64 bytes (Echo, window 1), the
// rate of 64-byte messages that come back with 64 under way (Echo, window 64), and bulk data
// in writes of 1 MiB (Bulk).
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// transports by their names, in the order in which they run.
var transports = []struct {
	name string
	floor.Transport
}{
	{"quic-stream", floor.Transport{Serve: serveQUICStream, Drive: driveQUICStream}},
	{"quic-datagram", floor.Transport{Serve: serveQUICDatagram, Drive: driveQUICDatagram}},
	{"kcp", floor.Transport{Serve: serveKCP, Drive: driveKCP}},
}

// workloads of every transport.
var workloads = []struct {
	name string
	p    floor.Params
}{
	{"round trip of 64 B", floor.Params{Kind: floor.Echo, Size: 64, Window: 1}},
	{"echo of 64 B, window 64", floor.Params{Kind: floor.Echo, Size: 64, Window: 64}},
	{"bulk in 1 MiB", floor.Params{Kind: floor.Bulk, Size: 1 << 20}},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return err
		}
		return all(ctx, exe, time.Second, stdout)
	}
	for _, t := range transports {
		if t.name == args[0] {
			return t.End(ctx, args[1:], stdout)
		}
	}
	return fmt.Errorf("no transport is called %q", args[0])
}

// figure is a line of the report.
type figure struct {
	Transport string  `json:"transport"`
	Workload  string  `json:"workload"`
	P50       float64 `json:"p50_us,omitempty"`
	P99       float64 `json:"p99_us,omitempty"`
	Rate      float64 `json:"msgs_per_sec,omitempty"`
	Gbps      float64 `json:"gbits_per_sec,omitempty"`
	Lost      uint64  `json:"lost,omitempty"`
	Error     string  `json:"error,omitempty"`
}

// all measures everything once, each end in a process of its own.
func all(ctx context.Context, exe string, each time.Duration, stdout io.Writer) error {
	var places [2]floor.Place
	if cpus := floor.CPUs(); len(cpus) >= 2 {
		places = [2]floor.Place{{CPU: cpus[0] + 1}, {CPU: cpus[1] + 1}}
	}
	var figures []figure
	for _, t := range transports {
		for _, w := range workloads {
			p := w.p
			p.Duration, p.Exec, p.Places = each, []string{exe, t.name}, places
			limited, cancel := context.WithTimeout(ctx, each+10*time.Second)
			r, err := floor.Ends(limited, p)
			cancel()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f := figure{Transport: t.name, Workload: w.name, Lost: r.Lost}
			switch {
			case err != nil:
				f.Error = err.Error()
			case r.P50 > 0:
				f.P50, f.P99 = float64(r.P50)/1e3, float64(r.P99)/1e3
			case p.Kind == floor.Bulk:
				f.Gbps = r.Gbps()
			default:
				f.Rate = r.Rate()
			}
			figures = append(figures, f)
		}
	}
	enc := json.NewEncoder(stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(figures)
}
