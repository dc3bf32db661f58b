package interop

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// UdaddyPort is udaddy's service port, in the port space of datagrams.
const UdaddyPort = 7174

// Udaddy says what a udaddy does. Both ends must be told the same. A lost message leaves both
// waiting for ever.
type Udaddy struct {
	Count int // messages each way (-C)
	Size  int // of a message in bytes (-S), at most a packet
}

// open makes a queue pair in RTR with receives for all messages.
func (o Udaddy) open(dev *transport.Device) (q *linuxpeer.RawQP, in *transport.MR, err error) {
	in, err = dev.PD().RegisterMR(make([]byte, transport.GRHLen+o.Size), verbs.LocalWrite)
	if err != nil {
		return nil, nil, err
	}
	q, err = linuxpeer.NewRaw(dev, linuxpeer.RawConfig{
		Type: verbs.UD, Cap: verbs.QPCap{MaxSendWR: o.Count, MaxRecvWR: o.Count}, QKey: transport.DefaultQKey,
	})
	if err != nil {
		_ = in.Close() // it was open
		return nil, nil, err
	}
	for range o.Count {
		if err == nil {
			err = q.PostRecv(verbs.RecvWR{SGList: in.SGL(0, transport.GRHLen+o.Size)})
		}
	}
	if err == nil {
		err = q.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTR})
	}
	if err != nil {
		q.Close()
		_ = in.Close() // it was open
		return nil, nil, err
	}
	return q, in, nil
}

// send sends all messages; the number of the queue pair goes along as immediate data.
func (o Udaddy) send(ctx context.Context, q *linuxpeer.RawQP, av verbs.AV, qpn verbs.QPN, qkey uint32) error {
	if err := q.ToRTS(linuxpeer.End{}); err != nil {
		return err
	}
	if err := q.Address(av, qpn, qkey); err != nil {
		return err
	}
	out, err := q.PD().RegisterMR(make([]byte, o.Size), 0)
	if err != nil {
		return err
	}
	defer out.Close()
	for range o.Count {
		wr := verbs.SendWR{Opcode: verbs.SendWithImm, ImmData: uint32(q.Num()), SGList: out.SGL(0, o.Size)}
		if err := q.Do(ctx, wr); err != nil {
			return err
		}
	}
	return nil
}

// UdaddyClient is "udaddy -s": it asks for the service, sends, and waits for the answers.
func UdaddyClient(ctx context.Context, dev *transport.Device, to netip.AddrPort, o Udaddy) error {
	q, in, err := o.open(dev)
	if err != nil {
		return err
	}
	defer in.Close()
	defer q.Close()
	s, err := dev.ResolveUD(ctx, to, transport.ResolveParam{})
	if err != nil {
		return err
	}
	if err := o.send(ctx, q, s.AV, s.QPN, s.QKey); err != nil {
		return err
	}
	for i := range o.Count {
		if err := q.Expect(ctx, o.Size); err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
	}
	return nil
}

// UdaddyServer is udaddy without -s, for one client: it waits for all messages and answers
// where the first came from. up, when not nil, is closed once clients can find it.
func UdaddyServer(ctx context.Context, dev *transport.Device, o Udaddy, up chan<- struct{}) error {
	q, in, err := o.open(dev)
	if err != nil {
		return err
	}
	defer in.Close()
	defer q.Close()
	s, err := dev.ServeUD(UdaddyPort, q.QP, nil)
	if err != nil {
		return err
	}
	defer s.Close()
	if up != nil {
		close(up)
	}
	var av verbs.AV
	var peer verbs.QPN
	for i := range o.Count {
		wc, err := q.Received(ctx)
		if err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
		if n := int(wc.ByteLen) - transport.GRHLen; n != o.Size || wc.Flags&verbs.WithImm == 0 {
			return fmt.Errorf("message %d has %d bytes and flags %#x, want %d bytes and an immediate", i, n, wc.Flags, o.Size)
		}
		if i == 0 {
			if av, err = transport.AVFromWC(&wc, in.Bytes()); err != nil {
				return err
			}
			peer = verbs.QPN(wc.ImmData)
		}
	}
	return o.send(ctx, q, av, peer, transport.DefaultQKey)
}
