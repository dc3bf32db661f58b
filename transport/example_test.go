package transport_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// hello sends a message and waits for the answer.
func hello(ctx context.Context, dev *transport.Device, server netip.AddrPort) error {
	mr, err := dev.PD().RegisterMR(make([]byte, 128), verbs.LocalWrite)
	if err != nil {
		return err
	}
	defer mr.Close()
	qp, err := dev.Dial(ctx, server, transport.ConnParam{
		Recv: []verbs.RecvWR{{WRID: 1, SGList: mr.SGL(64, 64)}}, // posted before the connection can carry anything
	})
	if err != nil {
		return err
	}
	defer qp.Close()
	n := copy(mr.Bytes(), "hello, queue pair")
	if err := qp.PostSend(verbs.SendWR{Opcode: verbs.Send, SGList: mr.SGL(0, n)}); err != nil {
		return err
	}
	wc, err := qp.CQ().Next(ctx) // the SEND is unsignaled, so this is the answer
	if err != nil {
		return err
	}
	fmt.Printf("%s\n", mr.Bytes()[64:64+wc.ByteLen])
	return nil
}

// greet accepts one connection, posts a greeting in RTR and echoes one message.
func greet(ctx context.Context, dev *transport.Device, ln *transport.Listener) error {
	req, err := ln.Next(ctx)
	if err != nil {
		return err
	}
	mr, err := dev.PD().RegisterMR(make([]byte, 64), verbs.LocalWrite)
	if err != nil {
		return err
	}
	defer mr.Close()
	qp, err := req.Accept(ctx, transport.ConnParam{Recv: []verbs.RecvWR{{SGList: mr.SGL(0, 64)}}})
	if err != nil {
		return err
	}
	defer qp.Close()
	wc, err := qp.CQ().Next(ctx)
	if err != nil {
		return err
	}
	// Whether the RTU has arrived or not: this is taken and leaves as soon as it may.
	err = qp.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: mr.SGL(0, int(wc.ByteLen))})
	if err != nil {
		return err
	}
	_, err = qp.CQ().Next(ctx) // the memory is ours again
	return err
}

// Two devices in one process: loopback addresses are hosts.
func Example() {
	ctx := context.Background()
	client, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.9.1:4791")})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	server, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.9.2:4791")})
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	ln, err := server.Listen(netip.MustParseAddrPort("127.1.9.2:7471"))
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- greet(ctx, server, ln) }()
	if err := hello(ctx, client, ln.Addr()); err != nil {
		log.Fatal(err)
	}
	if err := <-done; err != nil {
		log.Fatal(err)
	}
	// Output: hello, queue pair
}

// push writes into the memory that the peer's REP named.
func push(ctx context.Context, dev *transport.Device, server netip.AddrPort, data []byte) error {
	src, err := dev.PD().RegisterMR(data, 0) // reading our own memory needs no access right
	if err != nil {
		return err
	}
	defer src.Close()
	qp, err := dev.Dial(ctx, server, transport.ConnParam{})
	if err != nil {
		return err
	}
	defer qp.Close()
	var dst verbs.RemoteMR // address and R_Key came in the REP's private data
	if err := dst.UnmarshalBinary(qp.PrivateData()); err != nil {
		return err
	}
	err = qp.PostSend(verbs.SendWR{
		WRID: 1, Opcode: verbs.RDMAWrite, Flags: verbs.Signaled,
		SGList: src.SGL(0, len(data)), RemoteAddr: dst.Addr, RKey: dst.RKey,
	})
	if err != nil {
		return err
	}
	_, err = qp.CQ().Next(ctx)
	return err // errors.Is(err, verbs.RemAccessErr) if the R_Key does not allow it
}

// An RDMA WRITE: the server's program does nothing but offer memory and look at Placed.
func ExampleMR_Placed() {
	ctx := context.Background()
	client, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.9.3:4791")})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	server, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.9.4:4791")})
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	ln, err := server.Listen(netip.MustParseAddrPort("127.1.9.4:7471"))
	if err != nil {
		log.Fatal(err)
	}
	mr, err := server.PD().RegisterMR(make([]byte, 64), verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		req, err := ln.Next(ctx)
		if err != nil {
			log.Fatal(err)
		}
		where, _ := mr.Remote().MarshalBinary()
		if _, err := req.Accept(ctx, transport.ConnParam{PrivateData: where}); err != nil {
			log.Fatal(err)
		}
	}()
	if err := push(ctx, client, ln.Addr(), []byte("placed by the peer")); err != nil {
		log.Fatal(err)
	}
	for mr.Placed() == 0 {
	}
	fmt.Printf("%s\n", mr.Bytes()[:18])
	// Output: placed by the peer
}
