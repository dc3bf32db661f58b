// Echo sends messages to a server that sends them back: the shortest program that uses Doorbell
// without knowing verbs or byte streams. In two terminals:
//
//	go run ./examples/echo -serve -bind 127.0.0.2
//	go run ./examples/echo -bind 127.0.0.1 127.0.0.2 hello doorbell
//
// Each argument behind the host is a message; without any, each line of the standard input is
// one. The server runs until it is interrupted. -compress s2 or zstd, given on both sides,
// compresses what is worth it.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"sync"

	"github.com/doorbell-rdma/doorbell/transport"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "echo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	flags := flag.NewFlagSet("echo", flag.ContinueOnError)
	flags.SetOutput(out)
	var (
		serving  = flags.Bool("serve", false, "serve until interrupted")
		bind     = flags.String("bind", "", "our address; all of them by default")
		port     = flags.Uint("p", 7480, "service port")
		compress = flags.String("compress", "none", "none, s2 or zstd")
	)
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	cfg, err := config(*compress)
	if err != nil {
		return err
	}
	if *port == 0 || *port > 65535 {
		return fmt.Errorf("service port %d, want 1 to 65535", *port)
	}
	if *serving == (flags.NArg() > 0) {
		return errors.New("want either -serve or a host")
	}
	dev, err := open(*bind)
	if err != nil {
		return err
	}
	defer dev.Close()
	if *serving {
		return serve(ctx, dev, cfg, uint16(*port), out)
	}
	host, err := netip.ParseAddr(flags.Arg(0))
	if err != nil {
		return err
	}
	conn, err := cfg.Dial(ctx, dev, netip.AddrPortFrom(host, uint16(*port)))
	if err != nil {
		return err
	}
	defer conn.Close()
	if flags.NArg() > 1 {
		for _, s := range flags.Args()[1:] {
			if err := say(ctx, conn, []byte(s), out); err != nil {
				return err
			}
		}
		return nil
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if err := say(ctx, conn, lines.Bytes(), out); err != nil {
			return err
		}
	}
	return lines.Err()
}

func config(compress string) (c transport.MessageConfig, err error) {
	for _, m := range []transport.Compression{transport.CompressNone, transport.CompressS2, transport.CompressZstd} {
		if m.String() == compress {
			c.Compression = m
			return c, nil
		}
	}
	return c, fmt.Errorf("-compress %s, want none, s2 or zstd", compress)
}

func open(bind string) (*transport.Device, error) {
	var cfg transport.Config
	if bind != "" {
		addr, err := netip.ParseAddr(bind)
		if err != nil {
			return nil, err
		}
		cfg.Bind = netip.AddrPortFrom(addr, 0)
	}
	return transport.Open(cfg)
}

// say sends a message and prints what comes back.
func say(ctx context.Context, conn *transport.Conn, p []byte, out io.Writer) error {
	if err := conn.Send(ctx, p); err != nil {
		return err
	}
	answer, err := conn.Recv(ctx)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\n", answer)
	return err
}

// serve echoes on every connection until ctx ends.
func serve(ctx context.Context, dev *transport.Device, cfg transport.MessageConfig, port uint16, out io.Writer) error {
	ln, err := cfg.Listen(dev, netip.AddrPortFrom(netip.Addr{}, port))
	if err != nil {
		return err
	}
	defer ln.Close()
	fmt.Fprintf(out, "listening on %v, service port %d\n", dev.LocalAddr(), port)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, err := ln.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil // interrupted, which is how a server ends
			}
			return err
		}
		wg.Go(func() {
			defer conn.Close()
			if err := echo(ctx, conn); ctx.Err() == nil && !errors.Is(err, io.EOF) {
				fmt.Fprintf(out, "%v: %v\n", conn.RemoteAddr(), err)
			}
		})
	}
}

// echo sends back what arrives, from one registered buffer to another, and returns why it ended.
func echo(ctx context.Context, conn *transport.Conn) error {
	for {
		msg, err := conn.RecvBuffer(ctx)
		if err != nil {
			return err
		}
		err = conn.Send(ctx, msg.Bytes())
		msg.Release()
		if err != nil {
			return err
		}
	}
}
