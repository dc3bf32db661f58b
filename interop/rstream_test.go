//go:build interop && linux

package interop

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// rstreams are what is tried: transfers larger than the buffers, and many small ones, which
// live on credits.
var rstreams = map[string]Rstream{
	"large": {Size: 300_000, Count: 6, Iterations: 2},
	"small": {Size: 100, Count: 900, Iterations: 1},
}

func (o Rstream) args() string {
	return fmt.Sprintf("-p %d -S %d -C %d -I %d -T v", RstreamPort, o.Size, o.Count, o.Iterations)
}

func (o Rstream) active(e *env) error {
	p, err := e.serve(fmt.Sprintf("rstream -b %v %s", e.guest, o.args()), RstreamPort, true)
	if err != nil {
		return err
	}
	s, err := transport.StreamConfig{MTU: e.mtu}.Dial(e.ctx, e.dev, e.to(RstreamPort))
	if err == nil {
		err = RstreamClient(e.ctx, s, o)
	}
	return e.finish(err, p, "Gb/sec")
}

func (o Rstream) passive(e *env) error {
	ln, err := transport.StreamConfig{MTU: e.mtu}.Listen(e.dev, netip.AddrPortFrom(e.host, RstreamPort))
	if err != nil {
		return err
	}
	defer ln.Close()
	p, err := theRig.start(e.ctx, fmt.Sprintf("rstream -s %v %s", e.host, o.args()))
	if err != nil {
		return err
	}
	s, err := ln.AcceptStream(e.ctx)
	if err == nil {
		err = RstreamServer(e.ctx, s, o)
	}
	return e.finish(err, p, "Gb/sec")
}

// TestRstream: a Linux program's rsocket on the other end of a stream.
func TestRstream(t *testing.T) {
	for name, o := range rstreams {
		row := tool{name: "rstream -T v, " + name, active: o.active, passive: o.passive, kinds: "CM"}
		for _, side := range []string{"active", "passive"} {
			for _, ip := range []string{"IPv4", "IPv6"} {
				for _, l := range []loss{{name: "none"}, losses[0]} {
					t.Run(name+"/"+side+"/"+ip+"/lost="+l.name, func(t *testing.T) {
						row.row(t, side, ip, verbs.MTU1024, l)
					})
				}
			}
		}
	}
}
