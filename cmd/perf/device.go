package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/transport"
)

// connectTimeout is how long a client waits for an answer to its first datagram.
const connectTimeout = 5 * time.Second

// deviceFlags say how to open the device.
type deviceFlags struct {
	bind    string
	wait    string
	events  bool
	noGSO   bool
	noGRO   bool
	rcvbuf  int
	sndbuf  int
	wires   int
	capture string
	port    uint16
}

// register adds the flags of perftest's kind of commands.
func (d *deviceFlags) register(cmd *cobra.Command) {
	d.registerDevice(cmd)
	f := cmd.Flags()
	d.wait, d.port = "adaptive", 18515
	f.VarP(whole[uint16]{&d.port, 1, 65535}, "port", "p", "service port, which rdma_cm calls a port too")
	f.Var(choice{&d.wait, []string{"poll", "adaptive", "block"}}, "wait", "how to wait: poll without end, poll for 50 us and then sleep, or sleep")
	f.BoolVarP(&d.events, "events", "e", false, "sleep on completion events: --wait block")
	f.BoolP("CPU-freq", "F", false, "accepted for perftest's sake")
	f.BoolP("rdma_cm", "R", false, "accepted for perftest's sake: connections are always made by rdma_cm's protocol")
}

// registerDevice adds the flags of the device alone.
func (d *deviceFlags) registerDevice(cmd *cobra.Command) {
	f := cmd.Flags()
	d.wires = 1
	f.StringVar(&d.bind, "bind", "", "our `ADDR[:UDPPORT]`; default all addresses, UDP port 4791")
	f.BoolVar(&d.noGSO, "no-gso", false, "send datagrams one by one, without segmentation offload")
	f.BoolVar(&d.noGRO, "no-gro", false, "receive datagrams one by one, without receive offload")
	f.Var(whole[int]{&d.rcvbuf, 0, 1 << 30}, "rcvbuf", "socket receive buffer in bytes; 0 asks for 4 MiB")
	f.Var(whole[int]{&d.sndbuf, 0, 1 << 30}, "sndbuf", "socket send buffer in bytes; 0 asks for 4 MiB")
	f.Var(whole[int]{&d.wires, 1, 16}, "wires", "sockets and threads of the device, for many queue pairs and more than two cores; 1, 2, 4, 8 or 16")
	f.StringVar(&d.capture, "capture", "", "write all packets of this device to `FILE.pcap`; slows it down")
}

// options returns what the flags say about waiting.
func (d *deviceFlags) options() bench.Options {
	if d.wait == "poll" && !d.events {
		return bench.Options{Wait: bench.WaitPoll}
	}
	return bench.Options{}
}

// config checks the flags and makes a device's configuration of them.
func (d *deviceFlags) config() (transport.Config, error) {
	cfg := transport.Config{
		Wires: d.wires, RecvBuffer: d.rcvbuf, SendBuffer: d.sndbuf, NoGSO: d.noGSO, NoGRO: d.noGRO, ConnectTimeout: connectTimeout,
	}
	if d.wait == "block" || d.events {
		cfg.Spin = -1
	}
	if d.bind != "" {
		addr, err := parseBind(d.bind)
		if err != nil {
			return cfg, usageError{fmt.Errorf("invalid argument %q for \"--bind\" flag: %w", d.bind, err)}
		}
		cfg.Bind = addr
	}
	return cfg, nil
}

// device is an open device and its capture, if any.
type device struct {
	*transport.Device
	capture *captureFile
}

// open opens the device that the flags describe and says on stderr what the system did not
// grant.
func (a *app) open(d *deviceFlags) (*device, error) {
	cfg, err := d.config()
	if err != nil {
		return nil, err
	}
	out := &device{}
	if d.capture != "" {
		if out.capture, err = createCapture(d.capture); err != nil {
			return nil, err
		}
		cfg.Tap = out.capture.packet
	}
	out.Device, err = transport.Open(cfg)
	if err != nil {
		if out.capture != nil {
			err = errors.Join(err, out.capture.close())
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; on loopback give each end an address, such as --bind 127.0.0.1 and --bind 127.0.0.2", err)
		}
		return nil, err
	}
	for _, w := range out.Warnings() {
		fmt.Fprintln(a.stderr, "perf: warning: "+w)
	}
	return out, nil
}

// onDevice opens a device, runs something on it and closes it. A signal ends ctx.
func (a *app) onDevice(ctx context.Context, d *deviceFlags, run func(ctx context.Context, dev *device) error) error {
	return a.onDeviceUntil(ctx, d, func(ctx context.Context, dev *device, first context.Context, cancel func()) error {
		defer context.AfterFunc(first, cancel)()
		return run(ctx, dev)
	})
}

// onDeviceUntil is onDevice for what ends by itself after the first signal, which ends first;
// the second one ends ctx, and so does cancel.
func (a *app) onDeviceUntil(ctx context.Context, d *deviceFlags, run func(ctx context.Context, dev *device, first context.Context, cancel func()) error) (err error) {
	dev, err := a.open(d)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first, stop := a.onSignal(cancel)
	defer stop()
	return run(ctx, dev, first, cancel)
}

// close closes the device and then the capture, which has all packets by then.
func (d *device) close() error {
	skipped := d.Counters()["tap_skipped"]
	err := d.Close()
	if d.capture == nil {
		return err
	}
	err = errors.Join(err, d.capture.close())
	if err == nil && skipped > 0 {
		err = fmt.Errorf("%s lacks %d packets: they came faster than they could be written", d.capture.name, skipped)
	}
	return err
}

// parseBind reads ADDR[:UDPPORT], IPv6 in brackets if a port follows.
func parseBind(s string) (netip.AddrPort, error) {
	host, port, err := splitHost(s)
	if err != nil {
		return netip.AddrPort{}, err
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return netip.AddrPort{}, errors.New("want ADDR or ADDR:UDPPORT, IPv6 as [ADDR]:UDPPORT")
	}
	return netip.AddrPortFrom(addr, port), nil
}

// splitHost separates HOST from UDPPORT; port is 0 if there is none.
func splitHost(s string) (host string, port uint16, err error) {
	host, text := s, ""
	switch {
	case strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]"):
		host = s[1 : len(s)-1]
	case strings.HasPrefix(s, "["), strings.Count(s, ":") == 1:
		if host, text, err = net.SplitHostPort(s); err != nil {
			return "", 0, errors.New("want HOST or HOST:UDPPORT, IPv6 as [ADDR]:UDPPORT")
		}
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return "", 0, fmt.Errorf("UDP port %q, want 1 to 65535", text)
		}
		port = uint16(n)
	}
	if host == "" {
		return "", 0, errors.New("the host is missing")
	}
	return host, port, nil
}

// target is the server of a client.
type target struct {
	name string
	addr netip.Addr
	udp  uint16 // 0 means 4791
}

// parseTarget reads HOST[:UDPPORT]; a name is looked up by resolve.
func parseTarget(s string) (target, error) {
	host, port, err := splitHost(s)
	if err != nil {
		return target{}, usageError{fmt.Errorf("host %q: %w", s, err)}
	}
	t := target{name: host, udp: port}
	t.addr, _ = netip.ParseAddr(host) // else it is a name
	if t.addr.IsUnspecified() || t.addr.IsMulticast() {
		return target{}, usageError{fmt.Errorf("host %q: not the address of one host", s)}
	}
	return t, nil
}

// resolve looks a name up, and prefers the IP version that we are bound to.
func (t *target) resolve(ctx context.Context, local netip.Addr) error {
	if t.addr.IsValid() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", t.name)
	if err != nil {
		return fmt.Errorf("no address for host %q: %w", t.name, err)
	}
	for _, a := range addrs {
		a = a.Unmap()
		if !t.addr.IsValid() || a.Is4() && (local.Is4() || local.IsUnspecified()) {
			t.addr = a
		}
		if !local.IsUnspecified() && a.Is4() == local.Is4() {
			t.addr = a
			break
		}
	}
	return nil
}
