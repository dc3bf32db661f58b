package wire

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestMulticast: each attached queue pair with the message's Q_Key gets a copy, nobody else,
// and nobody after it has gone.
func TestMulticast(t *testing.T) {
	for _, tc := range []struct{ name, us, from, group, other string }{
		{"IPv4", "10.0.0.2:4791", "10.0.0.9:4791", "239.1.1.1", "239.1.1.2"},
		{"IPv6", "[fd00::2]:4791", "[fd00::9]:4791", "ff02::77%eth0", "ff02::78"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newUDEnd(t, tc.us, 2)
			group, other := netip.MustParseAddr(tc.group), netip.MustParseAddr(tc.other)
			type member struct {
				q    *QP
				lane *qp.CQ
			}
			var ms []member
			for i := range 4 {
				m := member{lane: qp.NewCQ(16)}
				var err error
				if m.q, err = b.w.CreateQP(qp.Config{Type: verbs.UD, PD: 1, SendCQ: m.lane, RecvCQ: m.lane}); err != nil {
					t.Fatal(err)
				}
				key := uint32(7)
				if i == 3 {
					key = 8
				}
				for _, a := range []verbs.QPAttr{
					{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey, State: verbs.QPInit, Port: 1, QKey: key},
					{Mask: verbs.AttrState, State: verbs.QPRTR},
				} {
					if err := b.w.Modify(0, m.q, &a); err != nil {
						t.Fatal(err)
					}
				}
				for range 8 {
					if _, _, err := m.q.Engine().PostRecv([]verbs.RecvWR{{SGList: b.sgl(i*128, 128)}}); err != nil {
						t.Fatal(err)
					}
				}
				ms = append(ms, m)
			}
			got := func() (n [4]int) {
				for i := range ms {
					n[i] = ms[i].lane.Len()
				}
				return n
			}
			from := netip.MustParseAddrPort(tc.from)
			send := func(to netip.Addr, f func(*roce.Packet)) {
				p := roce.Packet{
					BTH:  roce.BTH{Opcode: roce.UDSendOnly, PKey: roce.DefaultPKey, DestQP: verbs.QPNMulticast},
					DETH: roce.DETH{QKey: 7, SrcQP: 20}, Payload: []byte("to all"),
				}
				if f != nil {
					f(&p)
				}
				b.inject(&p, from, netip.AddrPortFrom(to, 4791), 0)
				b.w.Step(0)
			}
			attach := func(i int, g netip.Addr) {
				if err := b.w.Attach(ms[i].q, g); err != nil {
					t.Fatal(err)
				}
			}
			send(group, nil)
			if n := b.w.Counters.DropNoQP.Load(); n != 1 {
				t.Errorf("without members: %d dropped", n)
			}
			attach(0, group)
			attach(0, group) // once
			attach(1, group)
			attach(3, group)
			attach(2, other)
			send(group, nil)
			if n := got(); n != [4]int{1, 1, 0, 0} {
				t.Errorf("copies: %v", n)
			}
			if f, to, ok := roce.GRHAddrs(b.mr.Bytes()[128:]); !ok || f != from.Addr() || to != group.WithZone("") || string(b.mr.Bytes()[128+40:][:6]) != "to all" {
				t.Errorf("from %v to %v, %q", f, to, b.mr.Bytes()[128+40:][:6])
			}
			if n := b.w.env.Counters.DroppedQKey.Load(); n != 1 {
				t.Errorf("another Q_Key: counted %d", n)
			}
			send(group, func(p *roce.Packet) { p.Opcode = roce.RCSendOnly })
			send(from.Addr(), nil)                                         // not a group
			send(group, func(p *roce.Packet) { p.DestQP = ms[0].q.Num() }) // not to the group's number
			if n := got(); n != [4]int{1, 1, 0, 0} || b.w.Counters.DropTransport.Load() != 1 ||
				b.w.Counters.DropNoQP.Load() != 2 || b.w.Counters.DropAddress.Load() != 1 {
				t.Errorf("wrong ones: copies %v", n)
			}
			b.inject(&roce.Packet{BTH: roce.BTH{Opcode: roce.UDSendOnly, PKey: roce.DefaultPKey, DestQP: verbs.QPNMulticast}, DETH: roce.DETH{QKey: 7}},
				from, netip.AddrPortFrom(group, 4791), 0)
			b.pipe.inbox[0].Buf[20] ^= 4
			b.w.Step(0)
			if b.w.Counters.DropICRC.Load() != 1 {
				t.Error("a bad ICRC passed")
			}
			if err := b.w.Detach(ms[0].q, group); err != nil {
				t.Fatal(err)
			}
			send(group, nil)
			b.w.DestroyQP(0, ms[1].q)
			send(group, nil)
			send(other, nil)
			if n := got(); n != [4]int{1, 2, 1, 0} {
				t.Errorf("after leaving: copies %v", n)
			}
			b.w.DestroyQP(0, ms[2].q)
			b.w.DestroyQP(0, ms[3].q)
			if len(b.w.groups) != 0 {
				t.Errorf("%d groups left", len(b.w.groups))
			}

			rc := newEnd(t, tc.us, 4)
			for what, err := range map[string]error{
				"RC":        rc.w.Attach(rc.qp, group),
				"unicast":   b.w.Attach(ms[0].q, from.Addr()),
				"detached":  b.w.Detach(ms[0].q, group),
				"av of one": rc.w.Modify(0, rc.qp, &verbs.QPAttr{Mask: verbs.AttrAV, AV: verbs.AV{Remote: netip.AddrPortFrom(group, 4791)}}),
			} {
				if !errors.Is(err, verbs.ErrBadAttr) {
					t.Errorf("%s: %v", what, err)
				}
			}
			if err := b.w.Attach(ms[1].q, group); !errors.Is(err, verbs.ErrBadState) {
				t.Errorf("closed: %v", err)
			}
		})
	}
}
