//go:build !interop

package interop

import (
	"context"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
)

func TestRstream(t *testing.T) {
	a, b := pair(t)
	addr := netip.AddrPortFrom(b.LocalAddr().Addr(), RstreamPort)
	for _, o := range []Rstream{
		{Size: 300_000, Count: 3, Iterations: 2},
		{Size: 1, Count: 500, Iterations: 1},
		{Size: 100, Count: 0, Iterations: 1},
	} {
		ln, err := transport.StreamConfig{}.Listen(b, addr)
		if err != nil {
			t.Fatal(err)
		}
		converse(t, func(ctx context.Context) error {
			s, err := transport.StreamConfig{}.Dial(ctx, a, addr)
			if err != nil {
				return err
			}
			return RstreamClient(ctx, s, o)
		}, func(ctx context.Context) error {
			s, err := ln.AcceptStream(ctx)
			if err != nil {
				return err
			}
			return RstreamServer(ctx, s, o)
		})
		if err := ln.Close(); err != nil {
			t.Error(err)
		}
	}
}
