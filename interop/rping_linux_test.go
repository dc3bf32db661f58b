//go:build interop && linux

package interop

import (
	"context"

	"github.com/doorbell-rdma/doorbell/transport"
	"net/netip"
	"testing"
	"time"
)

func TestFirst(t *testing.T) {
	r := theRig
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dev, err := transport.Open(transport.Config{Bind: netip.AddrPortFrom(host4, 0)})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	p, err := r.start(ctx, "rping -s -S 100 -v -a 0.0.0.0")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := r.guest(ctx, "rdma res show cm_id; for i in $(seq 200); do [[ $(rdma res show cm_id) == *LISTEN*:7174* ]] && break; sleep 0.05; done; rdma res show cm_id; rdma link"); err != nil {
		t.Fatal(err, out)
	} else {
		t.Log(out)
	}
	if err := RpingClient(ctx, dev, netip.AddrPortFrom(guest4, RpingPort), Rping{Size: 100, Count: 5}); err != nil {
		t.Error(err)
	}
	out, err := p.wait(ctx)
	t.Log(out, err)
	t.Log(dev.Counters())
}
