package bench

import (
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
)

// BenchmarkDialAccept connects and closes one queue pair after the other over the loopback:
// the connection manager, the queue pairs' moves and the goroutines that wait for them.
func BenchmarkDialAccept(b *testing.B) {
	devA, devB := open(b, "127.3.44.1", transport.Config{}), open(b, "127.3.44.2", transport.Config{})
	ctx := deadline(b)
	ln, err := devB.Listen(netip.AddrPortFrom(netip.Addr{}, servicePort))
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	type accepted struct {
		qp  *transport.QP
		err error
	}
	accepts := make(chan accepted)
	go func() {
		for {
			req, err := ln.Next(ctx)
			if err != nil {
				close(accepts)
				return
			}
			qp, err := req.Accept(ctx, transport.ConnParam{})
			accepts <- accepted{qp, err}
		}
	}()
	to := netip.AddrPortFrom(devB.LocalAddr().Addr(), servicePort)
	b.ReportAllocs()
	for b.Loop() {
		qp, err := devA.Dial(ctx, to, transport.ConnParam{})
		if err != nil {
			b.Fatal(err)
		}
		other := <-accepts
		if other.err != nil {
			b.Fatal(other.err)
		}
		if err := other.qp.Established(ctx); err != nil {
			b.Fatal(err)
		}
		qp.Close()
		other.qp.Close()
	}
}
