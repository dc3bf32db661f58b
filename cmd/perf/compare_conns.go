package main

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/bench/floor"
	"github.com/doorbell-rdma/doorbell/transport"
)

// Streams and messages as two processes: what the TCP floor does, by the same code, over a
// transport.Stream, and round trips and bulk of messages (transport.Conn).
var (
	streamTransport  = floor.Transport{Serve: serveStream, Drive: driveStream}
	messageTransport = floor.Transport{Serve: serveMessage, Drive: driveMessage}
)

// streamEnd and messageEnd are ends of these workloads, which compare starts.
func (a *app) streamEnd() *cobra.Command { return a.end("stream-end", streamTransport.End) }

func (a *app) messageEnd() *cobra.Command { return a.end("message-end", messageTransport.End) }

// openAt opens the device of an end.
func openAt(place floor.Place) (*transport.Device, error) {
	bind := place.Addr
	if !bind.IsValid() {
		bind = loopback[0]
	}
	return transport.Open(transport.Config{Bind: netip.AddrPortFrom(bind, 0), AnyPort: true})
}

// service is where a device's listeners are.
var service = netip.AddrPortFrom(netip.Addr{}, verbsService)

func serveStream(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) (err error) {
	dev, err := openAt(p.Places[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	ln, err := transport.StreamConfig{}.Listen(dev, service)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := ready(dev.LocalAddr()); err != nil {
		return err
	}
	s, err := ln.AcceptStream(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	return floor.ServeDuplex(s, p)
}

func driveStream(ctx context.Context, p floor.Params, to netip.AddrPort) (r floor.Result, err error) {
	dev, err := openAt(p.Places[1])
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	s, err := transport.StreamConfig{RemotePort: to.Port()}.Dial(ctx, dev, netip.AddrPortFrom(to.Addr(), verbsService))
	if err != nil {
		return r, err
	}
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	return floor.DriveDuplex(s, p)
}

// messagesFor is the configuration for messages of a workload.
func messagesFor(p *floor.Params) transport.MessageConfig {
	return transport.MessageConfig{MaxMessage: max(p.Size, 4096)}
}

func serveMessage(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) (err error) {
	dev, err := openAt(p.Places[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	ln, err := messagesFor(&p).Listen(dev, service)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := ready(dev.LocalAddr()); err != nil {
		return err
	}
	conn, err := ln.Accept(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if p.Kind == floor.Bulk {
		_, _, err := bench.ServeMessages(ctx, conn)
		return err
	}
	b := make([]byte, p.Size)
	for {
		n, err := conn.RecvInto(ctx, b)
		if err == nil {
			err = conn.Send(ctx, b[:n])
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func driveMessage(ctx context.Context, p floor.Params, to netip.AddrPort) (r floor.Result, err error) {
	dev, err := openAt(p.Places[1])
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	cfg := messagesFor(&p)
	cfg.RemotePort = to.Port()
	conn, err := cfg.Dial(ctx, dev, netip.AddrPortFrom(to.Addr(), verbsService))
	if err != nil {
		return r, err
	}
	defer conn.Close()
	if p.Kind == floor.Bulk {
		return pourMessages(ctx, conn, &p)
	}
	b := make([]byte, p.Size)
	var samples floor.Samples
	var begin, last time.Time
	for n := 0; ; n++ {
		if err := conn.Send(ctx, b); err != nil {
			return r, err
		}
		if _, err := conn.RecvInto(ctx, b); err != nil {
			return r, err
		}
		now := time.Now()
		switch {
		case n > warmRounds:
			samples.Add(now.Sub(last))
			r.Ops++
		case n == warmRounds:
			begin = now
		}
		last = now
		if n > warmRounds && (p.Iters > 0 && r.Ops == uint64(p.Iters) || p.Iters <= 0 && now.Sub(begin) >= p.Duration) {
			break
		}
	}
	r.Elapsed, r.Bytes = last.Sub(begin), r.Ops*uint64(p.Size)
	samples.Into(&r)
	return r, nil
}

// pourMessages is bulk, until the other program has received all of it.
func pourMessages(ctx context.Context, conn *transport.Conn, p *floor.Params) (r floor.Result, err error) {
	m := bench.MessageTest{Payload: make([]byte, p.Size), Iters: p.Iters, Duration: p.Duration}
	if err := m.Warm(ctx, ctx, conn); err != nil {
		return r, err
	}
	got, err := m.Run(ctx, ctx, conn)
	return floor.Result{Ops: got.Iters, Elapsed: got.Elapsed, Bytes: got.Iters * uint64(p.Size)}, err
}
