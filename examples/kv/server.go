package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
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
	srv := &server{table: table, out: out, lastID: rand.Uint64() >> 1, gone: make(chan uint64)}
	var acceptErr error
	wg.Go(func() {
		defer cancel()
		acceptErr = srv.accept(ctx, &wg, ln)
	})
	defer wg.Wait()
	defer cancel()

	// Two clients of our own: one that puts, and may have to wait for a lock, and one that takes
	// locks off. Where all addresses are ours, the loopback address is one.
	self := dev.LocalAddr().Addr()
	if self.IsUnspecified() {
		self = netip.MustParseAddr("127.0.0.1")
	}
	var own [2]*client
	for i := range own {
		if own[i], err = dial(ctx, dev, netip.AddrPortFrom(self, port)); err != nil {
			return fmt.Errorf("connect to ourselves: %w", err)
		}
		defer own[i].close()
	}
	wg.Go(func() { srv.unlock(ctx, own[1]) })
	fmt.Fprintf(out, "listening on %v, service port %d\n", dev.LocalAddr(), port)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for n := 0; ; n++ {
		if err := own[0].put(ctx, "uptime", strconv.AppendInt(nil, int64(n), 10)); err != nil && ctx.Err() == nil {
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

// server is what its goroutines share.
type server struct {
	table  *transport.MR
	out    io.Writer
	lastID uint64      // that a client was given; accept's
	gone   chan uint64 // the ids of clients that have gone
}

// accept takes clients and tells each where the table is and what to lock with. A goroutine
// attends to each until it goes.
func (srv *server) accept(ctx context.Context, wg *sync.WaitGroup, ln *transport.Listener) error {
	for {
		req, err := ln.Next(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		where, err := srv.table.Remote().MarshalBinary()
		if err != nil {
			return err
		}
		srv.lastID++
		id := srv.lastID
		qp, err := req.Accept(ctx, transport.ConnParam{
			PrivateData: binary.BigEndian.AppendUint64(where, id),
			Access:      verbs.RemoteRead | verbs.RemoteWrite | verbs.RemoteAtomic,
		})
		if err != nil {
			fmt.Fprintf(srv.out, "%v: %v\n", req.RemoteAddr(), err)
			continue
		}
		wg.Go(func() {
			if err := attend(ctx, qp); err != nil && ctx.Err() == nil {
				fmt.Fprintf(srv.out, "%v: %v\n", qp.RemoteAddr(), err)
			}
			// From here on nothing of the client's reaches the table any more.
			_ = qp.Close()
			select {
			case srv.gone <- id:
			case <-ctx.Done():
			}
		})
	}
}

// attend returns when a client has gone. One that dies says nothing, and all its requests are
// executed by our device, so that nothing of ours would fail: it is asked every second, by a
// WRITE of no bytes, which its device acknowledges.
func attend(ctx context.Context, qp *transport.QP) error {
	for {
		second, cancel := context.WithTimeout(ctx, time.Second)
		err := qp.Wait(second)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err
		}
		if err := qp.PostSend(verbs.SendWR{Opcode: verbs.RDMAWrite, Flags: verbs.Signaled}); err != nil {
			return err
		}
		if _, err := qp.CQ().Next(ctx); err != nil {
			return err
		}
	}
}

// unlock takes off the locks of clients that have gone.
func (srv *server) unlock(ctx context.Context, c *client) {
	for {
		select {
		case id := <-srv.gone:
			if err := c.release(ctx, id); err != nil && ctx.Err() == nil {
				fmt.Fprintf(srv.out, "the locks of a client that has gone: %v\n", err)
			}
		case <-ctx.Done():
			return
		}
	}
}
