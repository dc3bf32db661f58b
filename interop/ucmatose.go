package interop

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Ucmatose says what a ucmatose does. Both ends must be told the same.
type Ucmatose struct {
	Connections int // -c, at least 1
	Count       int // messages each way and connection (-C); 0 means connect and disconnect only
	Size        int // of a message in bytes (-S)
	MTU         verbs.MTU
}

// param is what both ends bring into a connection: receives for all messages, posted before
// anything can come, for ucmatose as a client lets nobody repeat a message that found none.
func (o Ucmatose) param(buf *transport.MR) transport.ConnParam {
	p := transport.ConnParam{
		MTU: o.MTU, ResponderResources: 1, InitiatorDepth: 1, RetryCnt: 5, RNRRetry: -1, SQSigAll: true,
		Cap: verbs.QPCap{MaxSendWR: max(o.Count, 1), MaxRecvWR: max(o.Count, 1)},
	}
	for range o.Count {
		p.Recv = append(p.Recv, verbs.RecvWR{SGList: buf.SGL(0, o.Size)})
	}
	return p
}

// run runs one end of all connections, each in a goroutine of its own.
func (o Ucmatose) run(dev *transport.Device, one func(in, out *transport.MR) error) error {
	errs := make(chan error)
	for range o.Connections {
		go func() {
			in, err := dev.PD().RegisterMR(make([]byte, max(o.Size, 1)), verbs.LocalWrite)
			if err != nil {
				errs <- err
				return
			}
			defer in.Close()
			out, err := dev.PD().RegisterMR(make([]byte, max(o.Size, 1)), 0)
			if err != nil {
				errs <- err
				return
			}
			defer out.Close()
			errs <- one(in, out)
		}()
	}
	var all error
	for range o.Connections {
		all = errors.Join(all, <-errs)
	}
	return all
}

// send posts all messages.
func (o Ucmatose) send(e *linuxpeer.Endpoint, out *transport.MR) error {
	for range o.Count {
		if err := e.PostSend(verbs.SendWR{Opcode: verbs.Send, SGList: out.SGL(0, o.Size)}); err != nil {
			return err
		}
	}
	return nil
}

// finish waits until all messages have left, or come.
func (o Ucmatose) finish(ctx context.Context, e *linuxpeer.Endpoint, recv bool) error {
	for i := range o.Count {
		next := e.Sent
		if recv {
			next = e.Received
		}
		wc, err := next(ctx)
		if err != nil {
			return fmt.Errorf("message %d of %d: %w", i+1, o.Count, err)
		}
		if recv && int(wc.ByteLen) != o.Size {
			return fmt.Errorf("message %d has %d bytes, want %d", i+1, wc.ByteLen, o.Size)
		}
	}
	return nil
}

// UcmatoseClient is "ucmatose -s": over each connection it first takes the server's messages,
// then sends as many, and waits for the server to disconnect.
func UcmatoseClient(ctx context.Context, dev *transport.Device, to netip.AddrPort, o Ucmatose) error {
	return o.run(dev, func(in, out *transport.MR) error {
		qp, err := dev.Dial(ctx, to, o.param(in))
		if err != nil {
			return err
		}
		defer qp.Close()
		e := &linuxpeer.Endpoint{QP: qp}
		if err := o.finish(ctx, e, true); err != nil {
			return fmt.Errorf("receiving: %w", err)
		}
		if err := o.send(e, out); err != nil {
			return err
		}
		if err := o.finish(ctx, e, false); err != nil {
			return fmt.Errorf("sending: %w", err)
		}
		return e.Disconnected(ctx)
	})
}

// UcmatoseServer is ucmatose without -s. It sends first, and does not wait for anything to
// begin with that: its messages are posted in RTR.
func UcmatoseServer(ctx context.Context, dev *transport.Device, ln *transport.Listener, o Ucmatose) error {
	return o.run(dev, func(in, out *transport.MR) error {
		req, err := ln.Next(ctx)
		if err != nil {
			return err
		}
		qp, err := req.Accept(ctx, o.param(in))
		if err != nil {
			return err
		}
		defer qp.Close()
		e := &linuxpeer.Endpoint{QP: qp}
		if err := o.send(e, out); err != nil {
			return err
		}
		if err := e.Established(ctx); err != nil {
			return err
		}
		if err := o.finish(ctx, e, false); err != nil {
			return fmt.Errorf("sending: %w", err)
		}
		if err := o.finish(ctx, e, true); err != nil {
			return fmt.Errorf("receiving: %w", err)
		}
		return nil
	})
}
