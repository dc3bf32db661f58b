package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

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

// serve offers a table until ctx ends.
func serve(ctx context.Context, dev *transport.Device, port uint16, out io.Writer) error {
	table, err := dev.PD().RegisterMR(make([]byte, entries*entryLen),
		verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite|verbs.RemoteAtomic)
	if err != nil {
		return err
	}
	defer table.Close()
	ln, err := dev.Listen(netip.AddrPortFrom(netip.Addr{}, port))
	if err != nil {
		return err
	}
	defer ln.Close()

	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var acceptErr error
	wg.Go(func() {
		defer cancel()
		acceptErr = accept(ctx, &wg, ln, table, out)
	})
	defer wg.Wait()
	defer cancel()

	// A client of our own; where all addresses are ours, the loopback address is one.
	self := dev.LocalAddr().Addr()
	if self.IsUnspecified() {
		self = netip.MustParseAddr("127.0.0.1")
	}
	c, err := dial(ctx, dev, netip.AddrPortFrom(self, port))
	if err != nil {
		return fmt.Errorf("connect to ourselves: %w", err)
	}
	defer c.close()
	fmt.Fprintf(out, "listening on %v, service port %d\n", dev.LocalAddr(), port)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for n := 0; ; n++ {
		if err := c.put(ctx, "uptime", strconv.AppendInt(nil, int64(n), 10)); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			cancel()
			wg.Wait()
			return acceptErr
		case <-tick.C:
		}
	}
}

// accept takes clients and tells them where the table is. A goroutine waits for each to go.
func accept(ctx context.Context, wg *sync.WaitGroup, ln *transport.Listener, table *transport.MR, out io.Writer) error {
	where, err := table.Remote().MarshalBinary()
	if err != nil {
		return err
	}
	for {
		req, err := ln.Next(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		qp, err := req.Accept(ctx, transport.ConnParam{
			PrivateData: where,
			Access:      verbs.RemoteRead | verbs.RemoteWrite | verbs.RemoteAtomic,
		})
		if err != nil {
			fmt.Fprintf(out, "%v: %v\n", req.RemoteAddr(), err)
			continue
		}
		wg.Go(func() {
			defer qp.Close()
			if err := qp.Wait(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, transport.ErrClosed) {
				fmt.Fprintf(out, "%v: %v\n", qp.RemoteAddr(), err)
			}
		})
	}
}
