package linuxpeer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Endpoint is a queue pair whose completions are wanted by kind: the programs wait for a
// message, or for something of theirs to be done, while the other may come first. One
// goroutine uses it.
type Endpoint struct {
	*transport.QP
	// To is where sends go and what messages begin with, over UD.
	To Datagram

	sends, recvs []verbs.WC
}

// Datagram addresses the messages of a UD queue pair. The zero value is for the others.
type Datagram struct {
	AH   verbs.AH
	QPN  verbs.QPN
	QKey uint32
	// Head is how much there is in front of a received message, in bytes.
	Head int
}

// PostSend posts one send, to where this endpoint's sends go.
func (e *Endpoint) PostSend(wr verbs.SendWR) error {
	wr.AH, wr.RemoteQPN, wr.RemoteQKey = e.To.AH, e.To.QPN, e.To.QKey
	return e.QP.PostSend(wr)
}

// Sent waits for the completion of a send, WRITE, READ or atomic.
func (e *Endpoint) Sent(ctx context.Context) (verbs.WC, error) { return e.next(ctx, false) }

// Received waits for a message.
func (e *Endpoint) Received(ctx context.Context) (verbs.WC, error) { return e.next(ctx, true) }

func (e *Endpoint) next(ctx context.Context, recv bool) (verbs.WC, error) {
	for {
		list := &e.sends
		if recv {
			list = &e.recvs
		}
		if len(*list) > 0 {
			wc := (*list)[0]
			*list = (*list)[1:]
			return wc, wc.Err()
		}
		wc, err := e.CQ().Next(ctx)
		switch {
		case err != nil && wc.Status == verbs.WCSuccess:
			return wc, err // no completion at all
		case err != nil:
			// Only its status means anything: it ends whatever is waited for.
			return wc, err
		case wc.Opcode.IsRecv():
			e.recvs = append(e.recvs, wc)
		default:
			e.sends = append(e.sends, wc)
		}
	}
}

// Do posts a signaled request and waits until it is done.
func (e *Endpoint) Do(ctx context.Context, wr verbs.SendWR) error {
	wr.Flags |= verbs.Signaled
	if err := e.PostSend(wr); err != nil {
		return fmt.Errorf("%v: %w", wr.Opcode, err)
	}
	if _, err := e.Sent(ctx); err != nil {
		return fmt.Errorf("%v: %w", wr.Opcode, err)
	}
	return nil
}

// Expect waits for a message of n bytes.
func (e *Endpoint) Expect(ctx context.Context, n int) error {
	wc, err := e.Received(ctx)
	if err != nil {
		return fmt.Errorf("waiting for a message: %w", err)
	}
	if got := int(wc.ByteLen) - e.To.Head; got != n {
		return fmt.Errorf("a message of %d bytes, want %d", got, n)
	}
	return nil
}

// Disconnected waits for the peer to end the connection.
func (e *Endpoint) Disconnected(ctx context.Context) error {
	if err := e.Wait(ctx); err != nil {
		return fmt.Errorf("waiting for the peer to disconnect: %w", err)
	}
	return nil
}

// Linger gives a peer that disconnects by itself a while to do so. Meanwhile, if the
// acknowledgement of its last message was lost, it gets another: a queue pair that is closed
// answers nothing any more, and rxe, told to retry 7 times, retries for ever.
func (e *Endpoint) Linger(ctx context.Context, while time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, while)
	defer cancel()
	_ = e.Wait(ctx) // however it ends, we are done
}

// IsEnd says whether an error is how a connection looks that its peer has ended.
func IsEnd(err error) bool {
	return errors.Is(err, verbs.WRFlushErr) || errors.Is(err, transport.ErrDisconnected)
}
