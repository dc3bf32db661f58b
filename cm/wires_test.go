package cm

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// What an exchange's messages say leads to the one CM that has it, and its repetitions to the same.
func TestOwner(t *testing.T) {
	ids := func(local, remote uint32) []byte {
		b := make([]byte, roce.CMMessageLen)
		binary.BigEndian.PutUint32(b, local)
		binary.BigEndian.PutUint32(b[4:], remote)
		return b
	}
	for _, tc := range []struct {
		name string
		attr roce.AttrID
		data []byte
		want int
	}{
		{"a REQ by its sender's ID, whatever stands in the reserved field", roce.AttrREQ, ids(0x12345676, 0xFFFFFFFF), 2},
		{"a REP by ours", roce.AttrREP, ids(0x12345676, 0x80000001), 1},
		{"an RTU by ours", roce.AttrRTU, ids(0, 0x80000003), 3},
		{"a DREQ by ours", roce.AttrDREQ, ids(7, 0x80000000), 0},
		{"a REJ of a REQ, of one who has no ID", roce.AttrREJ, ids(0, 0x80000002), 2},
		{"a REJ of one who never learnt ours: where his REQ went", roce.AttrREJ, ids(0x12345676, 0), 2},
		{"a SIDR_REQ by its sender's ID", roce.AttrSIDRReq, ids(0x11, 0xFFFF0000), 1},
		{"a SIDR_REP by ours", roce.AttrSIDRRep, ids(0x13, 0), 3},
		{"too short", roce.AttrREQ, []byte{1, 2, 3}, 0},
	} {
		if got := Owner(tc.attr, tc.data, 4); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
		if got := Owner(tc.attr, tc.data, 1); got != 0 {
			t.Errorf("%s: %d of one", tc.name, got)
		}
	}
}

// IDs say whose they are, also when many are taken.
func TestIDsOfWires(t *testing.T) {
	n := uint32(0)
	c := New(Config{Wire: 2, Wires: 4, Rand: func() uint32 { n += 3; return n }})
	for range 400 {
		cn := c.newConn()
		if cn == nil {
			t.Fatal("no ID")
		}
		if cn.id&3 != 2 {
			t.Fatalf("ID %v", cn.id)
		}
	}
}

// siblingPeers is what two CMs of a device know together.
type siblingPeers struct {
	owner map[PeerQP]int
	ids   map[PeerQP]ConnID
	stale []ConnID // told to the other
}

type sibling struct {
	*siblingPeers
	me int
}

func (s sibling) Claim(qp PeerQP, id ConnID) { s.owner[qp], s.ids[qp] = s.me, id }

func (s sibling) Release(qp PeerQP, id ConnID) {
	if s.ids[qp] == id {
		delete(s.owner, qp)
		delete(s.ids, qp)
	}
}

func (s sibling) Stale(qp PeerQP) bool {
	if at, ok := s.owner[qp]; !ok || at == s.me {
		return false
	}
	s.siblingPeers.stale = append(s.siblingPeers.stale, s.ids[qp])
	return true
}

// A peer that uses its QP for a new connection is told that the old one is in the way, and that
// one ends, though another CM has it; the next attempt succeeds. The backlog is one for both.
func TestStaleConnectionOfAnotherCM(t *testing.T) {
	known := &siblingPeers{owner: make(map[PeerQP]int), ids: make(map[PeerQP]ConnID)}
	var backlog HalfOpen
	var bs [2]*CM
	for i := range bs {
		n := uint32(100)
		bs[i] = New(Config{GUID: 2, Wire: i, Wires: 2, Backlog: 4, Peers: sibling{known, i}, Rand: func() uint32 { n += 2; return n }})
		if err := bs[i].ListenShared(tcp, &backlog); err != nil {
			t.Fatal(err)
		}
	}
	// The peer's device before and after it has forgotten everything; the low bit of its IDs leads to
	// one CM or the other.
	peer := func(ids uint32) *CM { return New(Config{GUID: 1, Rand: func() uint32 { ids += 2; return ids }}) }
	old, young := peer(0x1000), peer(0x2001)
	now := verbs.Instant(0)
	var out Out
	deliver := func(a *CM) (answers []roce.AttrID) {
		for a.NextMAD(&out) {
			var m roce.MAD
			if err := m.Decode(out.MAD[:]); err != nil {
				t.Fatal(err)
			}
			b := bs[Owner(m.AttrID, m.Data, 2)]
			b.HandleMAD(now, netip.AddrPortFrom(addrA, 4791), addrB, out.MAD[:])
			for b.NextMAD(&out) {
				if err := m.Decode(out.MAD[:]); err != nil {
					t.Fatal(err)
				}
				answers = append(answers, m.AttrID)
				a.HandleMAD(now, netip.AddrPortFrom(addrB, 4791), addrA, out.MAD[:])
			}
		}
		return answers
	}
	request := func(a *CM, qpn verbs.QPN) {
		t.Helper()
		_, err := a.Connect(now, ReqParams{
			Path: Path{Local: addrA, Remote: netip.AddrPortFrom(addrB, 4791)}, ServiceID: tcp, Type: verbs.RC, QPN: qpn, MTU: verbs.MTU1024,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	next := func(c *CM) Event {
		t.Helper()
		e, ok := c.NextEvent()
		if !ok {
			t.Fatal("no event")
		}
		return e
	}
	request(old, 77)
	deliver(old)
	first := next(bs[0])
	if first.Type != ReqReceived {
		t.Fatalf("event %v", first.Type)
	}
	request(young, 77)
	if got := deliver(young); len(got) != 1 || got[0] != roce.AttrREJ {
		t.Fatalf("answered with %v, want a REJ", got)
	}
	if e := next(young); e.Type != Rejected || e.Reason != verbs.RejectStaleConn {
		t.Fatalf("event %v, %v", e.Type, e.Reason)
	}
	if len(known.stale) != 1 || known.stale[0] != first.Conn {
		t.Fatalf("told of %v, want %v", known.stale, first.Conn)
	}
	bs[0].Stale(now, first.Conn)
	if e := next(bs[0]); e.Type != Rejected || e.Reason != verbs.RejectStaleConn {
		t.Fatalf("event %v, %v", e.Type, e.Reason)
	}
	request(young, 77)
	deliver(young)
	if e := next(bs[1]); e.Type != ReqReceived {
		t.Fatalf("event %v", e.Type)
	}
	// A stranger may fill three quarters of the backlog, here and there together.
	for i := range 4 {
		a := peer(0x4000 + 0x100*uint32(i) + uint32(i%2))
		request(a, verbs.QPN(200+i))
		deliver(a)
	}
	if n := bs[0].HalfOpen(tcp) + bs[1].HalfOpen(tcp); n != 3 || backlog.n.Load() != 3 {
		t.Errorf("%d half-open, counted %d, want 3", n, backlog.n.Load())
	}
	for _, b := range bs {
		b.check()
	}
}
