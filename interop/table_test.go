//go:build interop && linux

package interop

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/internal/paths"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var keep = flag.Bool("keep", false, "keep the captures of conversations that passed, too")

var full = flag.Bool("full", false, "every tool with every MTU and every loss; else two tools with these, and all tools without")

var off = paths.NewFlag()

// patience bounds one conversation. Linux waits up to 7 s before it repeats a message of the
// connection manager, 2 s before data, and a guest without KVM on a busy machine is slow.
const patience = 90 * time.Second

// env is what a conversation has around it.
type env struct {
	*testing.T
	ctx         context.Context
	dev         *transport.Device
	host, guest netip.Addr
	mtu         verbs.MTU
	lost        string // the name of the loss
}

// A tool is a Linux program, or a pair of them, and our counterparts.
type tool struct {
	name string
	// active: we are the client, the program serves. passive: the other way round.
	active, passive func(e *env) error
	// v4 says why it speaks IPv4 only; "" when it does not.
	v4 string
	// exchange says that MTU and queue pairs are told over TCP, so that no packet of the
	// connection manager can get lost and the path MTU may be below the link's.
	exchange bool
	// unreliable says that a lost packet may end the conversation for good.
	unreliable bool
	// kinds are the kinds of packets in losses that it uses beside ACK.
	kinds string
}

// tools are the rows of the table.
func tools() []tool {
	rows := []tool{
		{name: "rping", active: rpingActive, passive: rpingPassive, kinds: "CM SEND READ"},
		{name: "rdma_client and rdma_server", active: rdmaActive, passive: rdmaPassive, kinds: "CM SEND"},
		{name: "ucmatose", active: ucmatoseActive, passive: ucmatosePassive, kinds: "CM SEND"},
		{name: "ibv_rc_pingpong", active: pingpongActive(verbs.RC), passive: pingpongPassive(verbs.RC), exchange: true, kinds: "SEND"},
		{name: "ibv_ud_pingpong", active: pingpongActive(verbs.UD), passive: pingpongPassive(verbs.UD), exchange: true, unreliable: true},
		{name: "ibv_uc_pingpong", active: pingpongActive(verbs.UC), passive: pingpongPassive(verbs.UC), exchange: true, unreliable: true},
	}
	for _, test := range []string{"send_bw", "send_lat", "write_bw", "write_lat", "read_bw", "read_lat", "atomic_bw", "atomic_lat"} {
		kind := map[string]string{"send": "SEND", "write": "", "read": "READ", "atomic": "atomic"}[Perftest{Test: test}.verb()]
		o := Perftest{Test: test, Size: 5000, Count: 300}
		if o.latency() {
			o.Size, o.Count = 64, 100
		}
		cm := o
		cm.CM = true
		rows = append(rows,
			tool{name: "ib_" + test + " -R", active: cm.active, passive: cm.passive, v4: "perftest 6.06 resolves IPv4 addresses only", kinds: "CM SEND " + kind},
			tool{name: "ib_" + test, active: o.active, passive: o.passive, exchange: true, kinds: kind})
	}
	// Nothing slows these down, and the tap and the guest's card have room for some hundred packets.
	for _, o := range []Perftest{
		{Test: "send_bw", Type: verbs.UC, Size: 5000, Count: 40}, {Test: "send_lat", Type: verbs.UC, Size: 64, Count: 100},
		{Test: "write_bw", Type: verbs.UC, Size: 5000, Count: 40}, {Test: "write_lat", Type: verbs.UC, Size: 64, Count: 100},
		{Test: "send_bw", Type: verbs.UD, Size: 250, Count: 100}, {Test: "send_lat", Type: verbs.UD, Size: 64, Count: 100},
	} {
		rows = append(rows, tool{
			name: fmt.Sprintf("ib_%s -c %v", o.Test, o.Type), active: o.active, passive: o.passive, exchange: true, unreliable: true,
		})
	}
	swap := Perftest{Test: "atomic_bw", Count: 300, CM: true, Swap: true}
	return append(rows,
		tool{name: "ib_atomic_bw -R -A CMP_AND_SWAP", active: swap.active, passive: swap.passive, v4: "perftest 6.06 resolves IPv4 addresses only", kinds: "CM SEND atomic"},
		tool{name: "ibv_srq_pingpong", active: srqActive, passive: srqPassive, exchange: true, unreliable: true},
		tool{name: "udaddy", active: udaddyActive, passive: udaddyPassive, unreliable: true},
	)
}

// uses says whether a kind of packet occurs in the tool's conversation.
func (l tool) uses(kind string) bool {
	if l.unreliable {
		return false
	}
	switch kind {
	case "0.5%":
		return true
	case "ACK":
		return l.kinds != "READ" && l.kinds != "atomic" // their answers acknowledge, too
	case "REQ", "REP", "RTU", "DREQ":
		return strings.Contains(l.kinds, "CM")
	case "SEND":
		return strings.Contains(l.kinds, "SEND")
	}
	first, _, _ := strings.Cut(kind, " ")
	return strings.Contains(l.kinds, first)
}

// linkMTU is the MTU of a link that gives a path MTU. Linux has two formulas that differ by
// some bytes of headers; these suit both.
var linkMTU = map[verbs.MTU]int{verbs.MTU256: 400, verbs.MTU512: 700, verbs.MTU1024: 1500, verbs.MTU2048: 2200, verbs.MTU4096: 4200}

// TestTools is the table: tool, side, IP version, path MTU, loss.
func TestTools(t *testing.T) {
	for _, l := range tools() {
		t.Run(strings.ReplaceAll(l.name, " ", "_"), func(t *testing.T) {
			for _, side := range []string{"active", "passive"} {
				for _, ip := range []string{"IPv4", "IPv6"} {
					t.Run(side+"/"+ip, func(t *testing.T) {
						if ip == "IPv6" && l.v4 != "" {
							note(l.name, side, ip, "", "skipped: "+l.v4)
							t.Skip(l.v4)
						}
						l.column(t, side, ip)
					})
				}
			}
		})
	}
}

// column runs one side of a tool over one IP version with all MTUs and losses that are due.
func (l tool) column(t *testing.T, side, ip string) {
	clean := loss{name: "none"}
	t.Run("mtu=1024", func(t *testing.T) { l.row(t, side, ip, verbs.MTU1024, clean) })
	// The two that are tried with everything in short runs: one with all that the connection
	// manager does, one with queue pairs that the program drives.
	chosen := l.name == "rping" || l.name == "ibv_rc_pingpong"
	if *full || chosen {
		for m := verbs.MTU256; m <= verbs.MTU4096; m++ {
			if m != verbs.MTU1024 {
				t.Run(fmt.Sprintf("mtu=%v", m), func(t *testing.T) { l.row(t, side, ip, m, clean) })
			}
		}
	}
	if *full || (chosen || l.name == "ib_atomic_bw -R") && ip == "IPv4" {
		for _, s := range losses {
			if l.uses(s.name) {
				t.Run("lost="+strings.ReplaceAll(s.name, " ", "_"), func(t *testing.T) { l.row(t, side, ip, verbs.MTU1024, s) })
			}
		}
	}
}

// open opens a device that is closed when the test ends.
func open(t *testing.T, addr netip.Addr) *transport.Device {
	t.Helper()
	cfg := transport.Config{Bind: netip.AddrPortFrom(addr, 0), ConnectTimeout: 30 * time.Second}
	off.Apply(&cfg)
	dev, err := transport.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	return dev
}

// row is one conversation.
func (l tool) row(t *testing.T, side, ip string, mtu verbs.MTU, s loss) {
	what := "path MTU " + mtu.String()
	if s.name != "none" {
		what += ", lost " + s.name
	}
	link := linkMTU[mtu]
	if ip == "IPv6" && link < 1280 {
		if side == "passive" && !l.exchange {
			const why = "Linux takes the path MTU from the link, and IPv6 wants a link of at least 1280"
			note(l.name, side, ip, what, "skipped: "+why)
			t.Skip(why)
		}
		link = 1500
	}
	start := time.Now()
	t.Cleanup(func() {
		result := "pass"
		if t.Failed() {
			result = "FAIL"
		}
		note(l.name, side, ip, what, fmt.Sprintf("%s (%.1f s)", result, time.Since(start).Seconds()))
	})
	theRig.setMTU(t, link)
	if s.name != "none" {
		lose(t, s)
	}
	e := newEnv(t, ip)
	e.mtu, e.lost = mtu, s.name
	talk := l.active
	if side == "passive" {
		talk = l.passive
	}
	if err := talk(e); err != nil {
		t.Errorf("%v\ncounters: %v", err, counters(e.dev))
	}
	if s.name == "none" {
		return
	}
	n := lost(t)
	t.Logf("lost %d packets, took %v", n, time.Since(start).Round(time.Millisecond))
	if n == 0 && s.random == 0 {
		t.Errorf("no %s was lost, so this tested nothing", s.name)
	}
}

// tableFile is where the results go, a line each.
var tableFile = filepath.Join(cacheDir, "table")

// note adds a line to the table.
func note(tool, side, ip, what, result string) {
	f, err := os.OpenFile(tableFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return // the tests say the same
	}
	defer f.Close()
	fmt.Fprintf(f, "%-32s %-7s %-4s  %-34s %s\n", tool, side, ip, what, result)
}

// newEnv gives a test its device, its deadline, and a capture that is kept when it fails.
func newEnv(t *testing.T, ip string) *env {
	t.Helper()
	e := &env{T: t, host: host4, guest: guest4, mtu: verbs.MTU1024}
	if ip == "IPv6" {
		e.host, e.guest = host6, guest6
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	e.ctx = ctx
	capture(t)
	e.dev = open(t, e.host)
	return e
}

// capture writes what passes the tap into a file, and keeps it when the test fails.
func capture(t *testing.T) {
	t.Helper()
	dir := filepath.Join(cacheDir, "captures")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, strings.NewReplacer("/", "_", "%", "").Replace(t.Name())+".pcap")
	cmd := exec.Command("tcpdump", "-i", "tap0", "-s", "0", "-B", "16384", "-U", "--immediate-mode", "-Z", "root", "-w", file, "udp port 4791")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("tcpdump: %v", err)
	}
	var b [1]byte
	_, _ = stderr.Read(b[:]) // its first words are that it is listening
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT) // it writes what it has and ends
		_ = cmd.Wait()
		if !t.Failed() && !*keep {
			_ = os.Remove(file)
			return
		}
		t.Logf("capture: interop/%s", file)
	})
}

// counters are the device's that are not zero.
func counters(dev *transport.Device) map[string]uint64 {
	c := dev.Counters()
	for k, v := range c {
		if v == 0 || strings.HasPrefix(k, "role_") || strings.HasPrefix(k, "udp_") {
			delete(c, k)
		}
	}
	return c
}

// to is a service of the guest's.
func (e *env) to(port uint16) netip.AddrPort { return netip.AddrPortFrom(e.guest, port) }

// serve starts a program in the guest and waits until it listens: with the connection manager
// when port is one of a service, else on TCP.
func (e *env) serve(cmd string, port uint16, cm bool) (*process, error) {
	p, err := theRig.start(e.ctx, cmd)
	if err != nil {
		return nil, err
	}
	e.Cleanup(p.kill)
	if err := e.listening(e.ctx, port, cm); err != nil {
		p.kill()
		return nil, fmt.Errorf("%s: %w: %s", cmd, err, p.out.String())
	}
	return p, nil
}

// listening waits until a program in the guest listens.
func (e *env) listening(ctx context.Context, port uint16, cm bool) error {
	look := fmt.Sprintf(`[[ -n $(ss -Hltn "sport = :%d") ]]`, port)
	if cm {
		look = fmt.Sprintf(`[[ $(rdma resource show cm_id) == *LISTEN*:%d* ]]`, port)
	}
	out, err := theRig.guest(ctx, fmt.Sprintf(`for i in {1..600}; do %s && exit; sleep 0.05; done; echo nobody listens; exit 1`, look))
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// listen listens for connections.
func (e *env) listen(port uint16) *transport.Listener {
	ln, err := e.dev.Listen(netip.AddrPortFrom(e.host, port))
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { _ = ln.Close() })
	return ln
}

func (e *env) listenTCP(port uint16) net.Listener {
	ln, err := net.Listen("tcp", netip.AddrPortFrom(host4, port).String())
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { _ = ln.Close() })
	return ln
}

// finish joins our end's error with the program's and looks for what it must have said. The
// program gets a moment when we have failed, for it may say why.
func (e *env) finish(ours error, p *process, says ...string) error {
	ctx := e.ctx
	if ours != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
	}
	out, err := p.wait(ctx)
	out = clip(out)
	if ours != nil || err != nil {
		return fmt.Errorf("we: %v; the program: %v\n%s", ours, err, out) //nolint:errorlint // nil must show, too
	}
	for _, s := range says {
		if !strings.Contains(out, s) {
			return fmt.Errorf("the program did not say %q:\n%s", s, out)
		}
	}
	return nil
}

// clip shortens what a program said: rping prints everything it pings.
func clip(out string) string {
	const width = 120
	var b strings.Builder
	for line := range strings.Lines(strings.TrimSpace(out)) {
		line = strings.TrimSuffix(line, "\n")
		if len(line) > width {
			line = line[:width] + "..."
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}

// Each tool, both sides.

var rpingOptions = linuxpeer.Rping{Size: 5000, Count: 10}

func rpingActive(e *env) error {
	p, err := e.serve(fmt.Sprintf("rping -s -a %v -v -S %d", e.guest, rpingOptions.Size), linuxpeer.RpingPort, true)
	if err != nil {
		return err
	}
	o := rpingOptions
	o.MTU = e.mtu
	_, err = linuxpeer.RpingClient(e.ctx, e.dev, e.to(linuxpeer.RpingPort), o)
	return e.finish(err, p, pingData(o.Count)...)
}

func rpingPassive(e *env) error {
	ln := e.listen(linuxpeer.RpingPort)
	o := rpingOptions
	p, err := theRig.start(e.ctx, fmt.Sprintf("rping -c -a %v -v -V -S %d -C %d", e.host, o.Size, o.Count))
	if err != nil {
		return err
	}
	// rping forgets its connection as soon as it has sent the DREQ: should that be lost, there
	// is no second. Linux's own server would wait for ever.
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	if e.lost == "DREQ" {
		go func() {
			select {
			case <-p.done:
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	n, err := linuxpeer.RpingServer(ctx, e.dev, ln, o)
	if e.lost == "DREQ" && errors.Is(err, context.Canceled) {
		err = nil
	}
	if err == nil && n != o.Count {
		err = fmt.Errorf("served %d pings, want %d", n, o.Count)
	}
	return e.finish(err, p, pingData(o.Count)...)
}

// pingData is what rping -v says of each ping; its exit code says little.
func pingData(n int) (says []string) {
	for i := range n {
		says = append(says, fmt.Sprintf("ping data: rdma-ping-%d: ", i))
	}
	return says
}

func rdmaActive(e *env) error {
	p, err := e.serve(fmt.Sprintf("rdma_server -s %v -p %d", e.guest, RDMAPort), RDMAPort, true)
	if err != nil {
		return err
	}
	return e.finish(RDMAClient(e.ctx, e.dev, e.to(RDMAPort), e.mtu), p, "rdma_server: end 0")
}

func rdmaPassive(e *env) error {
	ln := e.listen(RDMAPort)
	p, err := theRig.start(e.ctx, fmt.Sprintf("rdma_client -s %v -p %d", e.host, RDMAPort))
	if err != nil {
		return err
	}
	_, err = RDMAServer(e.ctx, e.dev, ln, e.mtu)
	return e.finish(err, p, "rdma_client: end 0")
}

func (o Ucmatose) args() string {
	return fmt.Sprintf("-p %d -c %d -C %d -S %d", RDMAPort, o.Connections, o.Count, o.Size)
}

var ucmatoseOptions = Ucmatose{Connections: 3, Count: 10, Size: 3000}

func ucmatoseActive(e *env) error {
	o := ucmatoseOptions
	p, err := e.serve(fmt.Sprintf("ucmatose -b %v %s", e.guest, o.args()), RDMAPort, true)
	if err != nil {
		return err
	}
	o.MTU = e.mtu
	return e.finish(UcmatoseClient(e.ctx, e.dev, e.to(RDMAPort), o), p, "return status 0")
}

func ucmatosePassive(e *env) error {
	ln := e.listen(RDMAPort)
	o := ucmatoseOptions
	p, err := theRig.start(e.ctx, fmt.Sprintf("ucmatose -s %v %s", e.host, o.args()))
	if err != nil {
		return err
	}
	return e.finish(UcmatoseServer(e.ctx, e.dev, ln, o), p, "return status 0")
}

// gid is the index of the guest's GID for the IP version.
func (e *env) gid() int {
	if e.guest.Is4() {
		return gid4
	}
	return gid6
}

func (e *env) pingpong(typ verbs.QPType) (linuxpeer.Pingpong, string) {
	o := linuxpeer.Pingpong{Type: typ, Size: 10000, Count: 50, MTU: e.mtu, Check: true}
	args := fmt.Sprintf(" -m %d", e.mtu.Bytes())
	if typ == verbs.UD { // a message is a packet of what the port can do
		o.Size, args = min(1024, e.mtu.Bytes()), ""
	}
	return o, fmt.Sprintf("ibv_%s_pingpong -c -d rxe0 -g %d -s %d -n %d%s",
		strings.ToLower(typ.String()), e.gid(), o.Size, o.Count, args)
}

func pingpongActive(typ verbs.QPType) func(e *env) error {
	return func(e *env) error {
		o, cmd := e.pingpong(typ)
		p, err := e.serve(cmd, linuxpeer.PingpongPort, false)
		if err != nil {
			return err
		}
		_, err = linuxpeer.PingpongClient(e.ctx, e.dev, netip.AddrPortFrom(guest4, linuxpeer.PingpongPort), o)
		return e.finish(err, p, "iters in")
	}
}

func pingpongPassive(typ verbs.QPType) func(e *env) error {
	return func(e *env) error {
		ln := e.listenTCP(linuxpeer.PingpongPort)
		o, cmd := e.pingpong(typ)
		p, err := theRig.start(e.ctx, fmt.Sprintf("%s %v", cmd, host4))
		if err != nil {
			return err
		}
		_, err = linuxpeer.PingpongServer(e.ctx, e.dev, ln, o)
		return e.finish(err, p, "iters in")
	}
}

func (e *env) srqPingpong() (linuxpeer.Pingpong, string) {
	o := linuxpeer.Pingpong{Type: verbs.RC, QPs: 8, Size: 3000, Count: 100, MTU: e.mtu}
	return o, fmt.Sprintf("ibv_srq_pingpong -d rxe0 -g %d -q %d -s %d -n %d -m %d", e.gid(), o.QPs, o.Size, o.Count, e.mtu.Bytes())
}

func srqActive(e *env) error {
	o, cmd := e.srqPingpong()
	p, err := e.serve(cmd, linuxpeer.PingpongPort, false)
	if err != nil {
		return err
	}
	_, err = linuxpeer.PingpongClient(e.ctx, e.dev, netip.AddrPortFrom(guest4, linuxpeer.PingpongPort), o)
	return e.finish(err, p, "iters in")
}

func srqPassive(e *env) error {
	ln := e.listenTCP(linuxpeer.PingpongPort)
	o, cmd := e.srqPingpong()
	p, err := theRig.start(e.ctx, fmt.Sprintf("%s %v", cmd, host4))
	if err != nil {
		return err
	}
	_, err = linuxpeer.PingpongServer(e.ctx, e.dev, ln, o)
	return e.finish(err, p, "iters in")
}

var udaddyOptions = Udaddy{Count: 10, Size: 100}

func udaddyActive(e *env) error {
	o := udaddyOptions
	p, err := e.serve(fmt.Sprintf("udaddy -b %v -C %d -S %d", e.guest, o.Count, o.Size), UdaddyPort, true)
	if err != nil {
		return err
	}
	return e.finish(UdaddyClient(e.ctx, e.dev, e.to(UdaddyPort), o), p, "return status 0")
}

func udaddyPassive(e *env) error {
	o := udaddyOptions
	up, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- UdaddyServer(e.ctx, e.dev, o, up) }()
	select {
	case <-up:
	case err := <-done:
		return err
	}
	p, err := theRig.start(e.ctx, fmt.Sprintf("udaddy -s %v -C %d -S %d", e.host, o.Count, o.Size))
	if err != nil {
		return err
	}
	return e.finish(<-done, p, "return status 0")
}

func (o Perftest) command(e *env) string {
	args := fmt.Sprintf("ib_%s -F -d rxe0 -n %d", o.Test, o.Count)
	if o.verb() != "atomic" {
		args += fmt.Sprintf(" -s %d", o.Size)
	}
	if o.Swap {
		args += " -A CMP_AND_SWAP"
	}
	if o.CM {
		return args + " -R"
	}
	if o.Type != 0 {
		args += fmt.Sprintf(" -c %v", o.Type)
	}
	return args + fmt.Sprintf(" -x %d -m %d", e.gid(), e.mtu.Bytes())
}

func (o Perftest) active(e *env) error {
	p, err := e.serve(o.command(e), PerftestPort, o.CM)
	if err != nil {
		return err
	}
	o.MTU = e.mtu
	o.Ready = func(ctx context.Context) error { return e.listening(ctx, PerftestPort, true) }
	return e.finish(PerftestClient(e.ctx, e.dev, netip.AddrPortFrom(guest4, PerftestPort), o), p)
}

func (o Perftest) passive(e *env) error {
	var ln *transport.Listener
	var tcp net.Listener
	if o.CM {
		ln = e.listen(PerftestPort)
	} else {
		tcp = e.listenTCP(PerftestPort)
	}
	p, err := theRig.start(e.ctx, fmt.Sprintf("%s %v", o.command(e), host4))
	if err != nil {
		return err
	}
	o.MTU = e.mtu
	return e.finish(PerftestServer(e.ctx, e.dev, ln, tcp, o), p)
}
