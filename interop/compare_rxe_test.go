//go:build interop && linux

package interop

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/doorbell-rdma/doorbell/verbs"
)

var (
	compareRxe  = flag.Bool("compare-rxe", false, "measure Doorbell beside rxe between two guests, on a machine that has nothing else to do")
	compareOnly = flag.String("only", "", "of -compare-rxe: only rows that match this `regexp`")
	rounds      = flag.Int("rounds", 5, "of -compare-rxe: runs of each side for each row")
)

// rxeTable is where -compare-rxe leaves its table.
var rxeTable = filepath.Join(cacheDir, "compare-rxe")

// A contest is a test of perftest's that two guests run by turns with Linux's program over
// rxe and with ours over the kernel's UDP.
type contest struct {
	test        string // perftest's name without ib_
	size, count int
	depth       int // messages under way; 0 in latency tests
	mtu         verbs.MTU
	events      bool // sleep on completions, instead of polling for them
}

func (c contest) latency() bool { return strings.HasSuffix(c.test, "_lat") }

func (c contest) String() string {
	size := fmt.Sprintf("%d B", c.size)
	switch {
	case c.size >= 1<<20:
		size = fmt.Sprintf("%d MiB", c.size>>20)
	case c.size >= 1<<10:
		size = fmt.Sprintf("%d KiB", c.size>>10)
	}
	how := "polling"
	if c.events {
		how = "events"
	}
	return fmt.Sprintf("%s, %s, %s, MTU %v", c.test, size, how, c.mtu)
}

// contests are the rows of the table. write_lat has no completion to sleep on, and ib_write_bw
// with events does not end over rxe. Under emulation a packet takes some tens of microseconds
// at least, so counts are small.
func contests() (rows []contest) {
	for _, events := range []bool{false, true} {
		for _, test := range []string{"send_lat", "write_lat"} {
			if !events || test == "send_lat" {
				rows = append(rows, contest{test: test, size: 64, count: 500, mtu: verbs.MTU1024, events: events})
			}
		}
		for _, test := range []string{"send_bw", "write_bw"} {
			if events && test == "write_bw" {
				continue
			}
			rows = append(rows,
				contest{test: test, size: 64 << 10, count: 200, depth: 64, mtu: verbs.MTU1024, events: events},
				contest{test: test, size: 1 << 20, count: 20, depth: 8, mtu: verbs.MTU1024, events: events})
		}
	}
	for _, test := range []string{"send_bw", "write_bw"} {
		rows = append(rows, contest{test: test, size: 1 << 20, count: 30, depth: 8, mtu: verbs.MTU4096})
	}
	return rows
}

// A contender is what runs a contest: the commands of both ends.
type contender struct {
	name string
	ours bool
	// command is the server's; the client's has a host behind it.
	command func(c contest, bind netip.Addr) string
	// host is how the client calls the server.
	host func(netip.Addr) string
	// ready looks whether the server listens, in the server's guest.
	ready string
}

const (
	// oursPort is Doorbell's UDP port, as 4791 is rxe's.
	oursPort = 4792
	// said is what a server says, in its guest.
	said = "/tmp/said"
)

var contenders = [2]contender{{
	name: "Doorbell", ours: true,
	command: func(c contest, bind netip.Addr) string {
		wait := "--wait poll"
		if c.events {
			wait = "-e"
		}
		return fmt.Sprintf("/tmp/perf %s --bind %v:%d %s %s", c.test, bind, oursPort, wait, c.args())
	},
	host:  func(a netip.Addr) string { return netip.AddrPortFrom(a, oursPort).String() },
	ready: "[[ $(<" + said + ") == *Waiting* ]]", // and maybe a warning before
}, {
	name: "rxe",
	command: func(c contest, _ netip.Addr) string {
		cmd := fmt.Sprintf("ib_%s -F -d rxe0 -x %d %s", c.test, gid4, c.args())
		if c.events {
			cmd += " -e"
		}
		return cmd
	},
	host:  netip.Addr.String,
	ready: fmt.Sprintf(`[[ -n $(ss -Hltn "sport = :%d") ]]`, PerftestPort),
}}

// args are the options that both sides understand alike.
func (c contest) args() string {
	args := fmt.Sprintf("-s %d -n %d -m %d", c.size, c.count, c.mtu.Bytes())
	if c.depth > 0 {
		args += fmt.Sprintf(" -t %d", c.depth)
	}
	return args
}

// TestCompareRxe measures Doorbell beside rxe: between the same two guests, over the same
// virtual link, by turns. Both are emulated, so absolute figures mean nothing and ratios
// something: what takes instructions is as expensive for one as for the other.
func TestCompareRxe(t *testing.T) {
	if !*compareRxe {
		t.Skip("only with -compare-rxe")
	}
	only, err := regexp.Compile(*compareOnly)
	if err != nil {
		t.Fatal(err)
	}
	server := theRig
	client, err := boot(2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.stop)
	installPerf(t, server, client)
	kernel, err := server.guest(t.Context(), "uname -r")
	if err != nil {
		t.Fatal(err)
	}
	rows := contests()
	rows = slices.DeleteFunc(rows, func(c contest) bool { return !only.MatchString(c.String()) })
	out := rxeReport{kernel: strings.TrimSpace(kernel), rows: make([]rxeRow, len(rows))}
	for round := range *rounds {
		out.rounds = round + 1
		for n, c := range rows {
			for _, r := range []*rig{server, client} {
				r.setMTU(t, linkMTU[c.mtu])
			}
			row := &out.rows[n]
			row.contest = c
			for i := range contenders {
				i ^= round & 1 // whoever comes second has the warmer machine
				v, err := c.run(t.Context(), &contenders[i], server, client)
				switch {
				case err == nil:
					row.got[i] = append(row.got[i], v)
					fmt.Fprintf(os.Stderr, "interop: %v: %s %.2f\n", c, contenders[i].name, v)
				case contenders[i].ours:
					t.Errorf("%v: %v", c, err)
				default: // the table says so
					fmt.Fprintf(os.Stderr, "interop: %v: %s: %v\n", c, contenders[i].name, err)
				}
			}
		}
		// As far as it goes: this takes long.
		if err := os.WriteFile(rxeTable, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("\n%v", &out)
}

// installPerf brings the command into the guests, by a TCP connection.
func installPerf(t *testing.T, guests ...*rig) {
	t.Helper()
	perf := filepath.Join(t.TempDir(), "perf")
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", perf, "../cmd/perf")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH=amd64")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	ln, err := net.Listen("tcp", netip.AddrPortFrom(host4, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, r := range guests {
		sent := make(chan error, 1)
		go func() { sent <- sendFile(ln, perf) }()
		_, port, err := net.SplitHostPort(ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		out, err := r.guest(t.Context(), fmt.Sprintf("cat </dev/tcp/%v/%s >/tmp/perf && chmod +x /tmp/perf", host4, port))
		if err = errors.Join(err, <-sent); err != nil {
			t.Fatalf("perf into guest %d: %v: %s", r.n, err, out)
		}
	}
}

// sendFile sends a file to whoever connects first.
func sendFile(ln net.Listener, name string) error {
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(c, f)
	return err
}

// run is one run of a side: a median in us, or an average in MiB/s.
func (c contest) run(ctx context.Context, s *contender, server, client *rig) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	serve := s.command(c, server.addr4())
	if _, err := server.guest(ctx, "rm -f "+said); err != nil { // or the last server's would seem to be ready
		return 0, err
	}
	p, err := server.start(ctx, fmt.Sprintf("exec %s >%s 2>&1", serve, said))
	if err != nil {
		return 0, err
	}
	defer p.kill()
	wait := fmt.Sprintf("for i in {1..600}; do %s && exit; sleep 0.05; done; echo nobody listens; cat %s; exit 1", s.ready, said)
	if out, err := server.guest(ctx, wait); err != nil {
		return 0, fmt.Errorf("%s: %w: %s", serve, err, out)
	}
	out, err := client.guest(ctx, s.command(c, client.addr4())+" "+s.host(server.addr4()))
	if err != nil {
		why, _ := server.guest(ctx, "cat "+said) // of use if it is there
		return 0, fmt.Errorf("client: %w\n%s\nserver:\n%s", err, out, why)
	}
	if _, err := p.wait(ctx); err != nil {
		return 0, fmt.Errorf("server: %w", err)
	}
	return c.result(out)
}

// result finds the figure in a report; the columns of both programs are the same.
func (c contest) result(out string) (float64, error) {
	column := 3 // average bandwidth, after the peak
	if c.latency() {
		column = 4 // typical, after the least and the most
	}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) > column && f[0] == strconv.Itoa(c.size) && f[1] == strconv.Itoa(c.count) {
			return strconv.ParseFloat(f[column], 64)
		}
	}
	return 0, fmt.Errorf("no line for %d bytes in\n%s", c.size, out)
}

// rxeReport is the table.
type rxeReport struct {
	kernel string
	rounds int // that are done
	rows   []rxeRow
}

// rxeRow is a contest and what its runs have measured, in the order of contenders.
type rxeRow struct {
	contest contest
	got     [2][]float64
}

// betterBy is the ratio of rates, or of times upside down; 0 without both.
func (r *rxeRow) betterBy() float64 {
	ours, rxe := r.got[0], r.got[1]
	switch {
	case len(ours) == 0 || len(rxe) == 0:
		return 0
	case r.contest.latency():
		return median(rxe) / median(ours)
	}
	return median(ours) / median(rxe)
}

// verdict is what to think of it when each side should have had so many runs.
func (r *rxeRow) verdict(runs int) string {
	v := "MISS"
	switch by := r.betterBy(); {
	case by == 0:
		v = "failed"
	case by >= 2:
		v = "pass, reaches"
	case by >= 1:
		v = "pass"
	}
	if a, b := len(r.got[0]), len(r.got[1]); a < runs || b < runs {
		v += fmt.Sprintf("; of %d runs %d and %d succeeded", runs, a, b)
	}
	return v
}

// String is the table as far as it goes.
func (out *rxeReport) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Doorbell beside rxe of Linux %s: two guests of one CPU each under QEMU, without KVM, by turns; medians, least and most\n"+
		"of %d runs. A latency is half a round trip, the median of a run; a bandwidth the average of one. The mark is 1, the aim 2.\n\n",
		out.kernel, out.rounds)
	tab := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tab, "test\tDoorbell\trxe\tunit\tbetter by\tverdict")
	for i := range out.rows {
		r := &out.rows[i]
		unit := "MiB/s"
		if r.contest.latency() {
			unit = "us"
		}
		fmt.Fprintf(tab, "%v\t%s\t%s\t%s\t%.2f\t%s\n", r.contest, figure(r.got[0]), figure(r.got[1]), unit, r.betterBy(), r.verdict(out.rounds))
	}
	_ = tab.Flush() // a strings.Builder takes everything
	return b.String()
}

// figure is a median, and from what to what.
func figure(v []float64) string {
	if len(v) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.4g (%.4g-%.4g)", median(v), slices.Min(v), slices.Max(v))
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}
