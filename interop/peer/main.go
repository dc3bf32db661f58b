// Command peer plays one end of a conversation with a Linux RDMA tool, on Doorbell: for trying
// it against a machine with Soft-RoCE or a network card.
//
//	peer -bind 192.0.2.1 rping 192.0.2.2        the client of "rping -s -S 100"
//	peer -bind 192.0.2.1 rping                  the server of "rping -c -a 192.0.2.1 -S 100 -C 10"
//	peer -bind 192.0.2.1 ib_send_bw 192.0.2.2   the client of "ib_send_bw -s 100 -n 10"
//	peer -bind 192.0.2.1 -R ib_send_bw          the server of "ib_send_bw -R -s 100 -n 10 192.0.2.1"
//
// With HOST it is the client, without the server of one client. It speaks from -bind; the
// tools that exchange addresses over TCP do so over the address that HOST names.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/interop"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const usage = `usage: peer -bind ADDR [options] TOOL [HOST]

TOOL is rping, rdma (rdma_client, rdma_server), ucmatose, ibv_rc_pingpong, ibv_uc_pingpong,
ibv_ud_pingpong, ib_send_bw, ib_send_lat, ib_write_bw, ib_write_lat, ib_read_bw, ib_read_lat, ib_atomic_bw or
ib_atomic_lat. With HOST it is the client, without the server of one client. Both ends must
be given the same size and count.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	bind  netip.Addr
	host  netip.Addr // invalid for a server
	size  int
	count int
	mtu   verbs.MTU
	cm    bool
	typ   verbs.QPType
	tool  string
}

func parse(args []string, out io.Writer) (o options, err error) {
	f := flag.NewFlagSet("peer", flag.ContinueOnError)
	f.SetOutput(out)
	f.Usage = func() {
		fmt.Fprint(out, usage)
		f.PrintDefaults()
	}
	f.TextVar(&o.bind, "bind", netip.Addr{}, "our `address`; UDP port 4791 must be free there")
	f.IntVar(&o.size, "s", 100, "message size in bytes")
	f.IntVar(&o.count, "n", 10, "number of messages, or of pings (rping -C, ucmatose -C)")
	bytes := f.Int("m", 1024, "path MTU in bytes, 256 to 4096")
	f.BoolVar(&o.cm, "R", false, "ib_*: connect by the connection manager, as the tools do with -R")
	service := f.String("c", "RC", "ib_*: service, RC, UC or UD")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	var ok bool
	if o.typ, ok = map[string]verbs.QPType{"RC": verbs.RC, "UC": verbs.UC, "UD": verbs.UD}[*service]; !ok {
		return o, fmt.Errorf("-c %s: a service is RC, UC or UD", *service)
	}
	if o.mtu, ok = verbs.MTUForBytes(*bytes); !ok {
		return o, fmt.Errorf("-m %d: a path MTU is 256, 512, 1024, 2048 or 4096", *bytes)
	}
	if !o.bind.IsValid() || f.NArg() < 1 || f.NArg() > 2 {
		f.Usage()
		return o, errors.New("-bind and TOOL are required")
	}
	o.tool = f.Arg(0)
	if f.NArg() == 2 {
		if o.host, err = netip.ParseAddr(f.Arg(1)); err != nil {
			return o, err
		}
	}
	return o, nil
}

// run is the whole program.
func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args, out)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	dev, err := transport.Open(transport.Config{Bind: netip.AddrPortFrom(o.bind, 0)})
	if err != nil {
		return err
	}
	// Given a moment, a device repeats a DREQ that got lost; we are content with telling once.
	defer dev.Close()
	for _, w := range dev.Warnings() {
		fmt.Fprintln(out, "peer:", w)
	}
	if err := o.talk(ctx, dev); err != nil {
		return fmt.Errorf("%s: %w", o.tool, err)
	}
	fmt.Fprintf(out, "peer: %s: done\n", o.tool)
	return nil
}

// talk has the conversation.
func (o options) talk(ctx context.Context, dev *transport.Device) error {
	client := o.host.IsValid()
	listen := func(port uint16, serve func(*transport.Listener) error) error {
		ln, err := dev.Listen(netip.AddrPortFrom(o.bind, port))
		if err != nil {
			return err
		}
		defer ln.Close()
		return serve(ln)
	}
	listenTCP := func(port uint16, serve func(net.Listener) error) error {
		ln, err := net.Listen("tcp", netip.AddrPortFrom(o.bind, port).String())
		if err != nil {
			return err
		}
		defer ln.Close()
		return serve(ln)
	}
	to := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(o.host, port) }

	switch o.tool {
	case "rping":
		p := linuxpeer.Rping{Size: o.size, Count: o.count, MTU: o.mtu}
		if client {
			_, err := linuxpeer.RpingClient(ctx, dev, to(linuxpeer.RpingPort), p)
			return err
		}
		return listen(linuxpeer.RpingPort, func(ln *transport.Listener) error {
			_, err := linuxpeer.RpingServer(ctx, dev, ln, p)
			return err
		})
	case "rdma":
		if client {
			return interop.RDMAClient(ctx, dev, to(interop.RDMAPort), o.mtu)
		}
		return listen(interop.RDMAPort, func(ln *transport.Listener) error {
			_, err := interop.RDMAServer(ctx, dev, ln, o.mtu)
			return err
		})
	case "ucmatose":
		u := interop.Ucmatose{Connections: 1, Count: o.count, Size: o.size, MTU: o.mtu}
		if client {
			return interop.UcmatoseClient(ctx, dev, to(interop.RDMAPort), u)
		}
		return listen(interop.RDMAPort, func(ln *transport.Listener) error { return interop.UcmatoseServer(ctx, dev, ln, u) })
	case "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong":
		typ := map[string]verbs.QPType{"ibv_rc_pingpong": verbs.RC, "ibv_uc_pingpong": verbs.UC, "ibv_ud_pingpong": verbs.UD}[o.tool]
		p := linuxpeer.Pingpong{Type: typ, Size: o.size, Count: o.count, MTU: o.mtu, Check: true}
		if client {
			_, err := linuxpeer.PingpongClient(ctx, dev, to(linuxpeer.PingpongPort), p)
			return err
		}
		return listenTCP(linuxpeer.PingpongPort, func(ln net.Listener) error {
			_, err := linuxpeer.PingpongServer(ctx, dev, ln, p)
			return err
		})
	}
	test, ok := strings.CutPrefix(o.tool, "ib_")
	if !ok {
		return errors.New("there is no such tool; see -help")
	}
	p := interop.Perftest{Test: test, Type: o.typ, Size: o.size, Count: o.count, MTU: o.mtu, CM: o.cm}
	switch {
	case client:
		return interop.PerftestClient(ctx, dev, to(interop.PerftestPort), p)
	case o.cm:
		return listen(interop.PerftestPort, func(ln *transport.Listener) error { return interop.PerftestServer(ctx, dev, ln, nil, p) })
	default:
		return listenTCP(interop.PerftestPort, func(ln net.Listener) error { return interop.PerftestServer(ctx, dev, nil, ln, p) })
	}
}
