package netsim

import (
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/roce"
)

// TestSIDRLoss: the question or the answer is lost several times; the service is found all the
// same, once, also by a device on another UDP port; one that nobody serves, or on a host that
// is gone, is not.
func TestSIDRLoss(t *testing.T) {
	service := roce.ServiceID(roce.PSUDP, 7174)
	for lost := range 6 {
		net := New(uint64(lost))
		a, b := net.Node("10.0.0.1:5000"), net.Node("10.0.0.2")
		if err := b.Wire.ServeSIDR(service, cm.SIDRService{QPN: 0x77, QKey: QKey}); err != nil {
			t.Fatal(err)
		}
		reqs, reps := 0, 0
		net.Rules = []Rule{func(p *Packet) Verdict {
			switch roce.AttrID(p.CM()) {
			case roce.AttrSIDRReq:
				reqs++
				return Verdict{Drop: lost < 3 && reqs <= lost, Copies: 1}
			case roce.AttrSIDRRep:
				reps++
				return Verdict{Drop: reps <= 2*(lost-3), Copies: 1}
			}
			return Verdict{}
		}}
		var found []cm.Event
		ask := func(to netip.AddrPort, s roce.SID) {
			_, err := a.Wire.ResolveSIDR(net.Now(), cm.SIDRParams{Path: cm.Path{Local: a.Addr.Addr(), Remote: to}, ServiceID: s},
				func(e *cm.Event) { found = append(found, *e) })
			if err != nil {
				t.Fatal(err)
			}
		}
		ask(b.Addr, service)
		net.Run(10*time.Second, nil)
		if len(found) != 1 || found[0].SIDR.Status != roce.SIDRValid || found[0].SIDR.QPN != 0x77 || found[0].SIDR.QKey != QKey {
			t.Fatalf("%d lost: found %+v", lost, found)
		}
		ask(b.Addr, service+1)
		net.Run(time.Second, nil)
		b.Dead = true
		ask(b.Addr, service)
		if net.Run(time.Minute, func() bool { return len(found) == 3 }); len(found) != 3 ||
			found[1].SIDR.Status != roce.SIDRUnsupported || found[2].Type != cm.SIDRUnreachable {
			t.Errorf("%d lost: found %+v", lost, found[1:])
		}
	}
}
