package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// maxRpings bounds the connections of "rping -s -P" at a time.
const maxRpings = 64

// rpingFlags are rping's.
type rpingFlags struct {
	deviceFlags
	server, client, persistent bool
	addr                       string
	o                          linuxpeer.Rping
	verbose, debug             bool
}

func (a *app) rping() *cobra.Command {
	r := &rpingFlags{o: linuxpeer.Rping{Size: 64}}
	r.port = linuxpeer.RpingPort
	cmd := &cobra.Command{
		Use:   "rping -s|-c -a ADDR",
		Short: "Ping as rping does, with Linux at the other end or Doorbell",
		Long: `Speaks rping's protocol, as client or server: the server reads a text from the
client's memory and writes it back elsewhere. Options are rping's. The client
always compares what comes back, and exits with 1 when a ping fails.`,
		Example: `  perf rping -s -a 127.0.0.2 -v
  perf rping -c -a 127.0.0.2 --bind 127.0.0.1 -C 10 -v
With Linux:
  rping -s -a 192.0.2.2 -v                   and  perf rping -c -a 192.0.2.2 -C 10
  perf rping -s -a 192.0.2.1 -v              and  rping -c -a 192.0.2.1 -C 10 -v -V`,
		Args: atMost(0, "no operands"),
	}
	r.registerDevice(cmd)
	f := cmd.Flags()
	f.BoolVarP(&r.server, "server", "s", false, "be the server of one client")
	f.BoolVarP(&r.client, "client", "c", false, "be the client")
	f.StringVarP(&r.addr, "address", "a", "", "client: the server's `HOST[:UDPPORT]`; server: our address, as --bind")
	f.VarP(whole[uint16]{&r.port, 1, 65535}, "port", "p", "service port")
	f.VarP(whole[int]{&r.o.Count, 0, 1 << 30}, "count", "C", "pings; 0 is no end")
	f.VarP(whole[int]{&r.o.Size, linuxpeer.MinRpingSize, linuxpeer.MaxRpingSize}, "size", "S", "bytes of a ping; the server's must not be less than the client's")
	f.VarP(mtuFlag{&r.o.MTU}, "mtu", "m", "path MTU: 256 to 4096; default what the link carries")
	f.BoolVarP(&r.verbose, "verbose", "v", false, "print each ping")
	f.BoolVarP(&r.debug, "debug", "d", false, "print each step")
	f.BoolVarP(&r.persistent, "persistent", "P", false, "server: serve any number of clients until a signal comes")
	f.StringVarP(&r.bind, "source", "I", "", "client: our address, as --bind")
	f.BoolP("validate", "V", false, "accepted for rping's sake: what comes back is always compared")
	f.BoolP("own-qp", "q", false, "accepted for rping's sake")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return a.runRping(cmd.Context(), r) }
	return cmd
}

// check finds what is wrong with the flags together.
func (r *rpingFlags) check() (to target, err error) {
	switch {
	case r.server == r.client:
		return to, usageError{errors.New("rping is either server (-s) or client (-c)")}
	case r.client && r.persistent:
		return to, usageError{errors.New("-P is the server's")}
	case r.client && r.addr == "":
		return to, usageError{errors.New("the client takes the server's address: -a HOST")}
	case r.client:
		if to, err = parseTarget(r.addr); err != nil {
			return to, err
		}
		r.o.RemotePort = to.udp
	case r.addr != "":
		if r.bind != "" && r.bind != r.addr {
			return to, usageError{errors.New("the server's -a is its --bind: give one of them")}
		}
		r.bind = r.addr
	}
	_, err = r.config()
	return to, err
}

func (a *app) runRping(ctx context.Context, r *rpingFlags) error {
	to, err := r.check()
	if err != nil {
		return err
	}
	return a.onDevice(ctx, &r.deviceFlags, func(ctx context.Context, dev *device) error {
		if r.server {
			return a.rpingServer(ctx, r, dev)
		}
		return a.rpingClient(ctx, r, dev, to)
	})
}

// listening gives the options what prints pings and steps, a line at a time.
func (a *app) listening(r *rpingFlags, who string) linuxpeer.Rping {
	o := r.o
	var mu sync.Mutex // the server may have several connections
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(a.stdout, format+"\n", args...)
	}
	if r.verbose {
		o.Ping = func(_ int, data []byte) { say("%sping data: %s", who, rpingText(data)) }
	}
	if r.debug {
		o.Trace = say
	}
	return o
}

// rpingText is a ping up to its NUL, without anything that a terminal would obey.
func rpingText(data []byte) string {
	text, _, _ := strings.Cut(string(data), "\x00")
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, text)
}

func (a *app) rpingClient(ctx context.Context, r *rpingFlags, dev *device, to target) error {
	if err := to.resolve(ctx, dev.LocalAddr().Addr()); err != nil {
		return err
	}
	n, err := linuxpeer.RpingClient(ctx, dev.Device, netip.AddrPortFrom(to.addr, r.port), a.listening(r, ""))
	fmt.Fprintf(a.stdout, "%d pings of %d bytes\n", n, r.o.Size)
	switch {
	case ctx.Err() != nil:
		return errInterrupted
	case linuxpeer.IsEnd(err):
		return fmt.Errorf("%w; the server has disconnected: is its -S less than %d?", err, r.o.Size)
	case err != nil:
		return explainDial(err, to, r.port, "rping -s")
	}
	return nil
}

// rpingServer serves one client, or with -P all that come.
func (a *app) rpingServer(ctx context.Context, r *rpingFlags, dev *device) error {
	ln, err := dev.Listen(netip.AddrPortFrom(netip.Addr{}, r.port))
	if err != nil {
		return err
	}
	defer ln.Close()
	fmt.Fprintf(a.stdout, "Waiting for rping on %v, service port %d\n", dev.LocalAddr(), r.port)
	o := a.listening(r, "server ")
	serve := func(req *transport.ConnRequest) error {
		from := req.RemoteAddr().Addr()
		n, err := linuxpeer.RpingServe(ctx, dev.Device, req, o)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("%v, after %d pings: %w", from, n, err)
		}
		fmt.Fprintf(a.stdout, "%d pings of %v\n", n, from)
		return nil
	}
	if !r.persistent {
		req, err := ln.Next(ctx)
		if err == nil {
			err = serve(req)
		}
		if ctx.Err() != nil {
			return errInterrupted
		}
		return err
	}
	var clients sync.WaitGroup
	defer clients.Wait()
	places := make(chan struct{}, maxRpings)
	for {
		req, err := ln.Next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		select {
		case places <- struct{}{}:
		default:
			_ = req.Reject(verbs.RejectNoResources, nil) // it may have given up
			continue
		}
		clients.Go(func() {
			defer func() { <-places }()
			if err := serve(req); err != nil {
				fmt.Fprintln(a.stderr, "perf: "+oneLine(err.Error()))
			}
		})
	}
}
