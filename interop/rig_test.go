//go:build interop && linux

package interop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Where everybody is. The guest's GID table has fe80:: at index 0, then these in order.
const (
	cacheDir  = ".cache"
	guestPort = 2222
	gid4      = 1
	gid6      = 2
)

var (
	host4  = netip.MustParseAddr("10.77.0.1")
	host6  = netip.MustParseAddr("fd77::1")
	guest4 = netip.MustParseAddr("10.77.0.2")
	guest6 = netip.MustParseAddr("fd77::2")
)

// rig is a guest under QEMU, joined to this process's network namespace by a tap on a bridge:
//
//	this process --- br0 --- tap0 === eth0, rxe0 of the guest
//
// There is one for all tests, which run one after the other. A test that wants guests to talk
// to each other boots another one, tap1 on the same bridge, and stops it.
type rig struct {
	n    int // which guest, from 1 on
	qemu *exec.Cmd
	down chan struct{} // closed when QEMU has ended
	mtu  int           // of the link
}

var theRig *rig

// inner marks the process that runs inside the network namespace.
const inner = "DOORBELL_INTEROP_INNER"

// TestMain runs the tests in a network namespace of their own: it starts this program once
// more, there. The namespace, and all that is in it, goes when the last process in it does.
func TestMain(m *testing.M) {
	if os.Getenv(inner) == "" {
		os.Exit(outside())
	}
	code := func() int {
		if err := bridge(); err != nil {
			fmt.Fprintln(os.Stderr, "interop:", err)
			return 1
		}
		r, err := boot(1)
		if err != nil {
			fmt.Fprintln(os.Stderr, "interop:", err)
			return 1
		}
		defer r.stop()
		theRig = r
		return m.Run()
	}()
	os.Exit(code)
}

// outside prepares what needs the outer network and runs the tests inside.
func outside() int {
	_ = os.Remove(tableFile) // the last run's
	_ = os.Remove(rxeTable)
	if os.Getuid() != 0 {
		fmt.Println("interop: skipped: needs root, for a network namespace and a tap device")
		return 0
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		fmt.Println("interop: skipped: no tap devices:", err)
		return 0
	}
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		return 1
	}
	// The kernel kills the child when the thread that made it dies, so that one has to stay.
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inner+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1)
	case errors.Is(err, syscall.EPERM):
		fmt.Println("interop: skipped: may not make a network namespace:", err)
		return 0
	}
	fmt.Fprintln(os.Stderr, "interop:", err)
	return 1
}

// prepare makes the image and what goes on top of it.
func prepare() error {
	image := exec.Command("sh", "image.sh", cacheDir)
	image.Stdout, image.Stderr = os.Stderr, os.Stderr
	if err := image.Run(); err != nil {
		return fmt.Errorf("image.sh: %w", err)
	}
	work, err := os.MkdirTemp(cacheDir, "guest.")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", filepath.Join(work, "init"), "./guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build ./guest: %w: %s", err, out)
	}
	files := map[string]string{"init": filepath.Join(work, "init")}
	sources, err := filepath.Glob("testdata/*.c")
	if err != nil {
		return err
	}
	for _, src := range sources {
		name := strings.TrimSuffix(filepath.Base(src), ".c")
		bin := filepath.Join(work, name)
		if out, err := exec.Command("gcc", "-O1", "-Wall", "-o", bin, src, "-lrdmacm", "-libverbs").CombinedOutput(); err != nil {
			return fmt.Errorf("gcc %s: %w: %s", src, err, out)
		}
		files["usr/bin/"+name] = bin
	}
	over, err := cpio(files)
	if err != nil {
		return err
	}
	base, err := os.ReadFile(filepath.Join(cacheDir, "base.cpio"))
	if err != nil {
		return err
	}
	// Of two archives in a row the kernel unpacks the second over the first. Under a name of
	// its own first: another run may be booting from the old one.
	tmp := filepath.Join(work, "initrd")
	if err := os.WriteFile(tmp, append(base, over...), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(cacheDir, "initrd.cpio"))
}

// cpio packs files, name to source, as executables into an archive of the "newc" format.
func cpio(files map[string]string) ([]byte, error) {
	var b bytes.Buffer
	entry := func(name string, mode int, data []byte) {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
			b.Len()+1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
		b.WriteString(name + "\x00")
		for b.Len()%4 != 0 {
			b.WriteByte(0)
		}
		b.Write(data)
		for b.Len()%4 != 0 {
			b.WriteByte(0)
		}
	}
	for name, src := range files {
		data, err := os.ReadFile(src)
		if err != nil {
			return nil, err
		}
		entry(name, syscall.S_IFREG|0o755, data)
	}
	entry("TRAILER!!!", 0, nil)
	return b.Bytes(), nil
}

// run runs a command of this machine.
func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// script runs commands, one a line.
func script(lines string) error {
	for line := range strings.Lines(lines) {
		if f := strings.Fields(line); len(f) > 0 {
			if err := run(f[0], f[1:]...); err != nil {
				return err
			}
		}
	}
	return nil
}

// The nth guest has number n+1 in all its addresses.
func (r *rig) tap() string       { return fmt.Sprintf("tap%d", r.n-1) }
func (r *rig) mac() string       { return fmt.Sprintf("52:54:00:77:00:%02x", r.n+1) }
func (r *rig) addr4() netip.Addr { return netip.AddrFrom4([4]byte{10, 77, 0, byte(r.n + 1)}) }
func (r *rig) addr6() string     { return fmt.Sprintf("fd77::%x", r.n+1) }

// Who is where is told, not asked: a burst that has to wait for the answer loses packets, and
// over UC and UD nobody repeats them.
func (r *rig) hostNeighbour() string {
	return fmt.Sprintf("ip neigh replace %s lladdr %s dev br0 nud permanent\n", r.addr6(), r.mac())
}

const guestNeighbour = "ip neigh replace fd77::1 lladdr 52:54:00:77:00:01 dev eth0 nud permanent\n"

// bridge makes the bridge and this side's addresses on it.
func bridge() error {
	return script(`
		ip link set lo up
		ip link add br0 type bridge forward_delay 0 mcast_snooping 0
		ip link set br0 address 52:54:00:77:00:01
		sysctl -qw net.ipv6.conf.br0.accept_dad=0
		ip link set br0 up
		ip addr add 10.77.0.1/24 dev br0
		ip -6 addr add fd77::1/64 dev br0 nodad`)
}

// boot makes the tap of the nth guest, from 1 on, and starts it.
func boot(n int) (*rig, error) {
	start := time.Now()
	r := &rig{n: n, down: make(chan struct{}), mtu: 1500}
	err := script(fmt.Sprintf(`
		ip tuntap add %[1]s mode tap
		sysctl -qw net.ipv6.conf.%[1]s.disable_ipv6=1
		ip link set %[1]s master br0 up
		%[2]s`, r.tap(), r.hostNeighbour()))
	if err != nil {
		return nil, err
	}
	console := filepath.Join(cacheDir, "console.log")
	if n > 1 {
		console = filepath.Join(cacheDir, fmt.Sprintf("console%d.log", n))
	}
	r.qemu = exec.Command("qemu-system-x86_64", "-M", "pc", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-accel", "tcg", "-cpu", "max", "-m", "768",
		"-kernel", filepath.Join(cacheDir, "vmlinuz"), "-initrd", filepath.Join(cacheDir, "initrd.cpio"),
		"-append", fmt.Sprintf("console=ttyS0 quiet rdinit=/init edd=off panic=-1 mitigations=off nokaslr audit=0 no_timer_check tsc=reliable "+
			"guest.ip4=%v/24 guest.ip6=%s/64 guest.mtu=1500", r.addr4(), r.addr6()),
		"-device", "virtio-rng-pci", "-netdev", "tap,id=n0,ifname="+r.tap()+",script=no,downscript=no,vhost=off",
		"-device", "virtio-net-pci,netdev=n0,mac="+r.mac()+",romfile=", "-serial", "file:"+console)
	r.qemu.Stderr = os.Stderr
	r.qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // see outside
		err := r.qemu.Start()
		started <- err
		if err == nil {
			_ = r.qemu.Wait() // stop wants to know that it ended, not how
		}
		close(r.down)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("qemu: %w", err)
	}
	for deadline := start.Add(3 * time.Minute); ; {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		out, err := r.guest(ctx, guestNeighbour+"uname -r")
		cancel()
		if err == nil {
			fmt.Fprintf(os.Stderr, "interop: guest %d up after %v, Linux %s\n", n, time.Since(start).Round(100*time.Millisecond), strings.TrimSpace(out))
			return r, nil
		}
		select {
		case <-r.down:
			err = errors.New("QEMU has ended")
		case <-time.After(100 * time.Millisecond):
			if time.Now().Before(deadline) {
				continue
			}
		}
		r.stop()
		log, _ := os.ReadFile(console) // empty says something too
		return nil, fmt.Errorf("the guest did not come up: %w\n%s", err, log)
	}
}

func (r *rig) stop() {
	_ = r.qemu.Process.Kill() // it may have ended already
	<-r.down
}

// setMTU sets the MTU of the whole link: 1500 carries a path MTU of 1024, 4200 one of 4096.
func (r *rig) setMTU(t *testing.T, mtu int) {
	t.Helper()
	if r.mtu == mtu {
		return
	}
	if err := script(fmt.Sprintf("ip link set %[2]s mtu %[1]d\nip link set br0 mtu %[1]d", mtu, r.tap())); err != nil {
		t.Fatal(err)
	}
	again := ""
	if mtu >= 1280 { // below that, Linux takes the IPv6 addresses away
		again = "ip -6 addr replace " + r.addr6() + "/64 dev eth0 nodad; " + guestNeighbour
		if err := script("ip -6 addr replace fd77::1/64 dev br0 nodad\n" + r.hostNeighbour()); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := r.guest(t.Context(), fmt.Sprintf("set -e; ip link set eth0 mtu %d; %s", mtu, again)); err != nil {
		t.Fatalf("guest's MTU: %v: %s", err, out)
	}
	r.mtu = mtu
}

// A process is a command that runs in the guest.
type process struct {
	conn net.Conn
	done chan struct{} // closed when it has ended
	// What it said and how it ended; the reader's until done is closed.
	out bytes.Buffer
	err error
}

// start runs a shell command in the guest.
func (r *rig) start(ctx context.Context, cmd string) (*process, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(r.addr4(), guestPort).String())
	if err != nil {
		return nil, err
	}
	if err := json.NewEncoder(c).Encode(map[string]string{"Cmd": cmd}); err != nil {
		c.Close()
		return nil, err
	}
	p := &process{conn: c, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		dec := json.NewDecoder(c)
		for {
			var f struct {
				Out  []byte
				Done bool
				Exit int
			}
			if err := dec.Decode(&f); err != nil {
				p.err = fmt.Errorf("guest: %w", err)
				return
			}
			p.out.Write(f.Out)
			if f.Done {
				if f.Exit != 0 {
					p.err = fmt.Errorf("exit code %d", f.Exit)
				}
				return
			}
		}
	}()
	return p, nil
}

// wait waits for the command to end, or kills it when ctx does, and returns what it said.
func (p *process) wait(ctx context.Context) (string, error) {
	defer p.conn.Close()
	select {
	case <-p.done:
	case <-ctx.Done():
		select {
		case <-p.done: // a result wins
		default:
			p.conn.Close()
			<-p.done
			return p.out.String(), fmt.Errorf("still running: %w", ctx.Err())
		}
	}
	return p.out.String(), p.err
}

// kill ends the command.
func (p *process) kill() {
	p.conn.Close()
	<-p.done
}

// guest runs a shell command in the guest and returns what it said.
func (r *rig) guest(ctx context.Context, cmd string) (string, error) {
	p, err := r.start(ctx, cmd)
	if err != nil {
		return "", err
	}
	return p.wait(ctx)
}
