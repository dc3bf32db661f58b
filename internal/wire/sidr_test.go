package wire

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestSIDREnds: a query's function is called once and forgotten, and never after CancelSIDR.
func TestSIDREnds(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	calls := 0
	p := cm.SIDRParams{
		Path:      cm.Path{Local: a.pipe.addr.Addr(), Remote: b.pipe.addr},
		ServiceID: roce.ServiceID(roce.PSUDP, 1),
	}
	var ids []cm.SIDRID
	for range 2 {
		id, err := a.w.ResolveSIDR(0, p, func(e *cm.Event) {
			if e.Type != cm.SIDRUnreachable {
				t.Errorf("%v", e.Type)
			}
			calls++
		})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	a.w.CancelSIDR(ids[1])
	for now := verbs.Instant(0); now < verbs.Instant(time.Minute) && now != verbs.Never; now = a.w.NextDeadline() {
		a.w.Step(now)
	}
	if calls != 1 || len(a.w.asking) != 0 {
		t.Errorf("%d calls, %d queries left", calls, len(a.w.asking))
	}
}
