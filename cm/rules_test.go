package cm

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// F06: COMM_EST counts as the RTU. The REP rests, the program sees no second Established, and a
// late RTU's private data is not lost.
func TestCommEst(t *testing.T) {
	l := at(t, func(l *lab) { l.request(); l.must(l.accept()) })
	l.must(l.Established(l.now, l.id))
	if err := l.Established(l.now, l.id); !errors.Is(err, ErrEstablished) {
		t.Errorf("second time: %v", err)
	}
	if l.Deadline() != verbs.Never {
		t.Error("the REP is still repeated")
	}
	l.now = l.now.Add(time.Minute)
	l.forge(RTU, l.rtu())
	ev, _ := l.NextEvent()
	if ev.Type != RTULate || string(ev.PrivateData) != padded("rtu", 224) {
		t.Errorf("%v %q", ev.Type, ev.PrivateData)
	}
	l.forge(RTU, l.rtu())
	if got := l.happened(); got != "-" {
		t.Errorf("a second RTU: %s", got)
	}
	if k := l.Counters(); k.CommEst.Load() != 1 || k.RTULate.Load() != 1 || k.Duplicate[RTU].Load() != 1 {
		t.Error("not counted")
	}

	// The RTU first: COMM_EST is late and harmless.
	l = at(t, func(l *lab) { l.request(); l.must(l.accept()); l.forge(RTU, l.rtu()) })
	if err := l.Established(l.now, l.id); !errors.Is(err, ErrEstablished) {
		t.Errorf("after the RTU: %v", err)
	}
}

// The codes in REQ and REP are those of Linux, whatever our own timers are; the captures compare
// the rest.
func TestWireCodes(t *testing.T) {
	l := newLab(t, Config{RetryInitial: time.Millisecond, ConnectTimeout: time.Second})
	id, err := l.Connect(l.now, ReqParams{
		Path: Path{addrB, netip.MustParseAddrPort("[::ffff:10.77.0.2]:0")}, ServiceID: tcp, Type: verbs.UC, QPN: 2, MTU: verbs.MTU4096,
		AckTimeout: 14, SRQ: true,
	})
	l.must(err)
	l.said()
	var req roce.REQ
	req.Decode(l.mads[0].MAD[24:])
	if req.RemoteCMTimeout != 20 || req.LocalCMTimeout != 20 || req.MaxCMRetries != 15 || req.PKey != 0xFFFF || !req.SRQ ||
		req.TransportService != roce.ServiceUC || req.PathMTU != verbs.MTU4096 || req.LocalCommID != uint32(id) || req.LocalCAGUID != l.cfg.GUID {
		t.Errorf("%+v", req)
	}
	want := roce.CMPath{
		LocalLID: 0xFFFF, RemoteLID: 0xFFFF, LocalGID: roce.GIDFromAddr(addrB), RemoteGID: roce.GIDFromAddr(addrA),
		FlowLabel: 7471, HopLimit: 64, AckTimeout: 14,
	}
	if req.Primary != want || req.Alternate != (roce.CMPath{}) {
		t.Errorf("path %+v, want %+v", req.Primary, want)
	}
	if got := l.mads[0].Path; got != (Path{addrB, netip.MustParseAddrPort("10.77.0.2:4791")}) {
		t.Errorf("sent on %v", got)
	}
}

func TestConnectRefuses(t *testing.T) {
	good := ReqParams{Path: Path{addrB, netip.AddrPortFrom(addrA, 0)}, ServiceID: tcp, Type: verbs.RC, QPN: 2, MTU: 1}
	for _, tc := range []struct {
		name string
		err  error
		bend func(p *ReqParams)
	}{
		{"nothing", nil, func(p *ReqParams) {}},
		{"no local address", ErrAddress, func(p *ReqParams) { p.Local = netip.Addr{} }},
		{"no remote address", ErrAddress, func(p *ReqParams) { p.Remote = netip.AddrPort{} }},
		{"unspecified", ErrAddress, func(p *ReqParams) { p.Local = netip.IPv4Unspecified() }},
		{"multicast", ErrAddress, func(p *ReqParams) { p.Remote = netip.MustParseAddrPort("224.0.0.1:1") }},
		{"broadcast", ErrAddress, func(p *ReqParams) { p.Remote = netip.MustParseAddrPort("255.255.255.255:1") }},
		{"families", ErrAddress, func(p *ReqParams) { p.Remote = netip.MustParseAddrPort("[fd00::1]:1") }},
		{"UD", ErrParam, func(p *ReqParams) { p.Type = verbs.UD }},
		{"QP 0", ErrParam, func(p *ReqParams) { p.QPN = 0 }},
		{"QP 1", ErrParam, func(p *ReqParams) { p.QPN = 1 }},
		{"QPN of multicast", ErrParam, func(p *ReqParams) { p.QPN = verbs.QPNMulticast }},
		{"QPN of 25 bits", ErrParam, func(p *ReqParams) { p.QPN = 1 << 24 }},
		{"MTU 0", ErrParam, func(p *ReqParams) { p.MTU = 0 }},
		{"MTU 6", ErrParam, func(p *ReqParams) { p.MTU = 6 }},
		{"retry count", ErrParam, func(p *ReqParams) { p.RetryCnt = 8 }},
		{"RNR retry count", ErrParam, func(p *ReqParams) { p.RNRRetry = 8 }},
		{"ack timeout", ErrParam, func(p *ReqParams) { p.AckTimeout = 32 }},
		{"PSN", ErrParam, func(p *ReqParams) { p.StartPSN = 1 << 24 }},
	} {
		l := newLab(t, Config{})
		p := good
		tc.bend(&p)
		if _, err := l.Connect(l.now, p); !errors.Is(err, tc.err) || (l.Len() != 0) != (err == nil) {
			t.Errorf("%s: %v, %d connections", tc.name, err, l.Len())
		}
	}
	for _, p := range []RepParams{{QPN: 1}, {QPN: 2, RNRRetry: 8}, {QPN: 2, StartPSN: 1 << 24}} {
		l := at(t, (*lab).request)
		if err := l.Accept(l.now, l.id, p); !errors.Is(err, ErrParam) || l.State(l.id) != ReqRcvd {
			t.Errorf("Accept of %+v: %v", p, err)
		}
	}
}

// What is checked in a REQ, and what the peer hears.
func TestREQChecks(t *testing.T) {
	ours := func(a netip.Addr) bool { return a == addrB }
	for _, tc := range []struct {
		name string
		bend func(l *lab, m *roce.REQ)
		want string
	}{
		{"nothing", func(l *lab, m *roce.REQ) {}, "-"},
		{"service", func(l *lab, m *roce.REQ) { m.ServiceID++ }, "REJ(REQ,8)"},
		{"GID", func(l *lab, m *roce.REQ) { m.Primary.RemoteGID[15]++ }, "REJ(REQ,12)"},
		{"RD", func(l *lab, m *roce.REQ) { m.TransportService = roce.ServiceRD }, "REJ(REQ,9)"},
		{"XRC", func(l *lab, m *roce.REQ) { m.TransportService, m.ExtTransport = roce.ServiceXRC, 1 }, "REJ(REQ,9)"},
		{"MTU 0", func(l *lab, m *roce.REQ) { m.PathMTU = 0 }, "REJ(REQ,26)"},
		{"MTU 6", func(l *lab, m *roce.REQ) { m.PathMTU = 6 }, "REJ(REQ,26)"},
		{"QPN", func(l *lab, m *roce.REQ) { m.LocalQPN = 1 }, "REJ(REQ,5)"},
		{"IP CM version", func(l *lab, m *roce.REQ) { m.PrivateData[0] = 0x10 }, "REJ(REQ,5)"},
		{"IP version", func(l *lab, m *roce.REQ) { m.PrivateData[1] = 0x50 }, "REJ(REQ,5)"},
	} {
		l := newLab(t, Config{Ours: ours})
		m := l.req()
		tc.bend(l, m)
		l.forge(REQ, m)
		if got := l.said(); got != tc.want {
			t.Errorf("%s: sends %s, want %s", tc.name, got, tc.want)
		}
		if (l.Len() == 0) != (tc.want != "-") {
			t.Errorf("%s: %d connections", tc.name, l.Len())
		}
		if tc.want == "-" {
			continue
		}
		var h roce.MAD
		var rej roce.REJ
		h.Decode(l.mads[0].MAD[:])
		rej.Decode(h.Data)
		if rej.LocalCommID != 0 || rej.RemoteCommID != l.peer || h.TID != l.tid {
			t.Errorf("%s: IDs %x, %x, transaction %x", tc.name, rej.LocalCommID, rej.RemoteCommID, h.TID)
		}
		gid := roce.GIDFromAddr(addrB)
		if tc.name == "GID" && (rej.InfoLen != 16 || !bytes.Equal(rej.Info[:16], gid[:])) {
			t.Errorf("additional information %x", rej.Info)
		}
	}
	l := newLab(t, Config{Ours: ours})
	if err := l.Listen(tcp); !errors.Is(err, ErrServiceInUse) {
		t.Error(err)
	}
	l.Unlisten(tcp)
	l.forge(REQ, l.req())
	if got := l.said(); got != "REJ(REQ,8)" {
		t.Errorf("after Unlisten %s", got)
	}
	l.must(l.Listen(tcp))
}

func TestMalformed(t *testing.T) {
	l := newLab(t, Config{})
	var mad [256]byte
	h := roce.NewCMMAD(roce.AttrREQ, 1)
	h.PutHeader(mad[:])
	l.req().Put(mad[24:])
	for n := range 300 {
		if n != 256 {
			l.HandleMAD(l.now, l.from, l.to, append(mad[:], mad[:]...)[:n])
		}
	}
	for _, off := range []int{0, 1, 2, 3, 16, 17} {
		bad := mad
		bad[off] ^= 0x40
		l.HandleMAD(l.now, l.from, l.to, bad[:])
	}
	if got := l.counters.Dropped[DropMalformed].Load(); got != 299+6 {
		t.Errorf("%d dropped", got)
	}
	for _, src := range []string{"0.0.0.0:1", "255.255.255.255:1", "224.1.1.1:1", "[::]:1", "[ff02::1]:1"} {
		l.HandleMAD(l.now, netip.MustParseAddrPort(src), l.to, mad[:])
	}
	l.HandleMAD(l.now, netip.AddrPort{}, l.to, mad[:])
	if got := l.counters.Dropped[DropSource].Load(); got != 6 {
		t.Errorf("%d dropped for their source", got)
	}
	// A REP with an impossible QP, or with the ID of another connection of the same peer.
	l.connect()
	rep := l.rep()
	rep.LocalQPN = 1
	l.forge(REP, rep)
	l.forge(REP, l.rep())
	l.connect()
	l.forge(REP, l.rep())
	if got := l.counters.Dropped[DropMalformed].Load(); got != 299+6+2 {
		t.Errorf("%d dropped", got)
	}
	if got := l.happened(); got != "REP_RECEIVED" {
		t.Error(got)
	}
}

func TestNames(t *testing.T) {
	for i := range 256 {
		for _, s := range []string{State(i).String(), EventType(i).String(), Message(i).String(), Drop(i).String()} {
			if s == "" {
				t.Fatalf("%d has no name", i)
			}
		}
	}
	if ConnID(0xbeef).String() != "0000beef" || Unreachable.String() != "UNREACHABLE" || DreqSent.String() != "DREQ_SENT" {
		t.Error("wrong names")
	}
	l := at(t, func(l *lab) { l.request(); l.must(l.accept()); l.must(l.Established(l.now, l.id)) })
	got := make(map[string]uint64)
	l.Counters().Each(func(name string, n uint64) { got[name] = n })
	if len(got) != 2 || got["received.REQ"] != 1 || got["comm_est"] != 1 {
		t.Errorf("%v", got)
	}
}
