package interop

import (
	"context"
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// RDMAPort is the default service port of rdma_client, rdma_server and ucmatose.
const RDMAPort = 7471

// rdmaMessage is the length of the only message that rdma_client and rdma_server send.
const rdmaMessage = 16

// RDMAClient is rdma_client: it sends 16 bytes, waits for 16 bytes, and disconnects, or
// lets the server.
func RDMAClient(ctx context.Context, dev *transport.Device, to netip.AddrPort, mtu verbs.MTU) error {
	buf, err := dev.PD().RegisterMR(make([]byte, rdmaMessage), verbs.LocalWrite)
	if err != nil {
		return err
	}
	defer buf.Close()
	qp, err := dev.Dial(ctx, to, transport.ConnParam{MTU: mtu, Recv: []verbs.RecvWR{{SGList: buf.SGL(0, rdmaMessage)}}})
	if err != nil {
		return err
	}
	defer qp.Close()
	e := &linuxpeer.Endpoint{QP: qp}
	if err := e.Do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, rdmaMessage)}); err != nil {
		return err
	}
	if err := e.Expect(ctx, rdmaMessage); err != nil {
		return err
	}
	e.Linger(ctx, clientLinger)
	return nil
}

// How long the ends wait for each other to disconnect: a Linux server does when its message
// is acknowledged, a client when it has that message. The client's time is for some of the
// retries that our REQ asks for, the server's for some of those that rdma_cm asks for.
const (
	clientLinger = time.Second
	serverLinger = 10 * time.Second
)

// RDMAServer is rdma_server for one connection, except that it does not wait: it posts its
// message as soon as it has accepted, in RTR, and leaves it to the queue pair when that may
// go. It returns how many sends were deferred, 1 or, when the connection was up already, 0.
func RDMAServer(ctx context.Context, dev *transport.Device, ln *transport.Listener, mtu verbs.MTU) (deferred uint64, err error) {
	req, err := ln.Next(ctx)
	if err != nil {
		return 0, err
	}
	return rdmaServe(ctx, dev, req, mtu)
}

// rdmaServe is RDMAServer for a request that has come.
func rdmaServe(ctx context.Context, dev *transport.Device, req *transport.ConnRequest, mtu verbs.MTU) (deferred uint64, err error) {
	buf, err := dev.PD().RegisterMR(make([]byte, rdmaMessage), verbs.LocalWrite)
	if err != nil {
		return 0, err
	}
	defer buf.Close()
	qp, err := req.Accept(ctx, transport.ConnParam{MTU: mtu, Recv: []verbs.RecvWR{{SGList: buf.SGL(0, rdmaMessage)}}})
	if err != nil {
		return 0, err
	}
	defer qp.Close()
	e := &linuxpeer.Endpoint{QP: qp}
	if err := e.Do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, rdmaMessage)}); err != nil {
		return 0, err
	}
	deferred, _ = qp.Published()
	if err := e.Expect(ctx, rdmaMessage); err != nil {
		return deferred, err
	}
	e.Linger(ctx, serverLinger)
	return deferred, nil
}
