package cm

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func TestPrivateDataLimits(t *testing.T) {
	all := bytes.Repeat([]byte{0xA5}, 65535)
	other := roce.SID(0x0200_0000_0000_0001) // not rdma_cm: no header in the private data
	for _, tc := range []struct {
		name string
		m    Message
		max  int
		off  int // where private data starts in the MAD
		call func(l *lab, private []byte) error
		at   func(l *lab)
	}{
		{"Connect", REQ, 56, 24 + 140 + 36, func(l *lab, p []byte) error {
			_, err := l.Connect(l.now, ReqParams{Path: Path{addrB, netip.AddrPortFrom(addrA, 0)}, ServiceID: tcp, Type: verbs.RC, QPN: 2, MTU: 1, PrivateData: p})
			return err
		}, func(l *lab) {}},
		{"Connect to another service", REQ, 92, 24 + 140, func(l *lab, p []byte) error {
			_, err := l.Connect(l.now, ReqParams{Path: Path{addrB, netip.AddrPortFrom(addrA, 0)}, ServiceID: other, Type: verbs.RC, QPN: 2, MTU: 1, PrivateData: p})
			return err
		}, func(l *lab) {}},
		{"Accept", REP, 196, 24 + 36, func(l *lab, p []byte) error {
			return l.Accept(l.now, l.id, RepParams{QPN: ourQPN, PrivateData: p})
		}, (*lab).request},
		{"Reject", REJ, 148, 24 + 84, func(l *lab, p []byte) error {
			return l.Reject(l.now, l.id, verbs.RejectConsumer, p)
		}, (*lab).request},
		{"Ready", RTU, 224, 24 + 8, func(l *lab, p []byte) error {
			return l.Ready(l.now, l.id, p)
		}, func(l *lab) { l.connect(); l.forge(REP, l.rep()) }},
		{"Disconnect", DREQ, 220, 24 + 12, func(l *lab, p []byte) error {
			return l.Disconnect(l.now, l.id, p)
		}, func(l *lab) { l.request(); l.must(l.accept()); l.must(l.Established(l.now, l.id)) }},
	} {
		for _, n := range []int{0, 1, tc.max - 1, tc.max, tc.max + 1, 255, 256, 65535} {
			l := at(t, tc.at)
			before := l.State(l.id)
			private := bytes.Clone(all[:n])
			err := tc.call(l, private)
			clear(private) // it was copied
			if n > tc.max {
				if !errors.Is(err, ErrPrivateData) || l.said() != "-" || l.State(l.id) != before {
					t.Errorf("%s with %d bytes: %v, sends %s, %v to %v", tc.name, n, err, l.said(), before, l.State(l.id))
				}
				if l.Len() > 1 {
					t.Errorf("%s with %d bytes leaves a connection", tc.name, n)
				}
				continue
			}
			if said := l.said(); err != nil || !strings.HasPrefix(said, tc.m.String()) {
				t.Fatalf("%s with %d bytes: %v, sends %s", tc.name, n, err, said)
			}
			got := l.mads[0].MAD[tc.off:]
			if len(got) != tc.max || !bytes.Equal(got[:n], all[:n]) || bytes.Count(got[n:], []byte{0}) != tc.max-n {
				t.Errorf("%s with %d bytes: on the wire %d bytes: %x", tc.name, n, len(got), got)
			}
		}
	}
}

// The private data that events bring is whole, and remains when the receive buffer is reused.
func TestPrivateDataReceived(t *testing.T) {
	full := func(n int) []byte { return bytes.Repeat([]byte{0x5A}, n) }
	l := newLab(t, Config{})
	check := func(typ EventType, n int) {
		t.Helper()
		ev, ok := l.NextEvent()
		if !ok || ev.Type != typ || !bytes.Equal(ev.PrivateData, full(n)) {
			t.Errorf("%v with %x, want %v with %d bytes", ev.Type, ev.PrivateData, typ, n)
		}
		l.id = ev.Conn
	}
	req := l.req()
	copy(req.PrivateData[36:], full(56))
	l.forge(REQ, req)
	check(ReqReceived, 56)
	l.must(l.accept())
	l.forge(RTU, &roce.RTU{LocalCommID: l.peer, RemoteCommID: uint32(l.id), PrivateData: full(224)})
	check(Established, 224)
	dreq := l.dreq(ourQPN)
	dreq.PrivateData = full(220)
	l.forge(DREQ, dreq)
	check(Disconnected, 220)

	l.peer++ // the ID before is in timewait
	l.connect()
	rep := l.rep()
	rep.PrivateData = full(196)
	l.forge(REP, rep)
	check(RepReceived, 196)
	rej := l.rej(roce.MessageOther, verbs.RejectConsumer)
	rej.PrivateData = full(148)
	l.forge(REJ, rej)
	check(Rejected, 148)

	other := roce.SID(0x0200_0000_0000_0001)
	l.must(l.Listen(other))
	l.peer = 1
	req = l.req()
	req.ServiceID, req.PrivateData = other, full(92)
	l.forge(REQ, req)
	check(ReqReceived, 92)
}

// A repeated REP gets the RTU again with its private data, also long after.
func TestRTUIsRepeatedWithPrivateData(t *testing.T) {
	l := at(t, func(l *lab) { l.connect(); l.forge(REP, l.rep()) })
	l.must(l.Ready(l.now, l.id, []byte("some words")))
	for i := range 3 {
		if i > 0 {
			l.now = l.now.Add(time.Hour)
			l.forge(REP, l.rep())
		}
		if said := l.said(); said != "RTU" {
			t.Fatalf("sends %s", said)
		}
		if got := l.mads[0].MAD[24+8:]; string(got) != padded("some words", 224) {
			t.Errorf("RTU %d has %q", i, got)
		}
	}
	if d, r := l.counters.Duplicate[REP].Load(), l.counters.Retransmitted[RTU].Load(); d != 2 || r != 2 {
		t.Errorf("%d duplicates, %d repeated", d, r)
	}
}

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

// The peer's UDP port is the one in the transaction ID only when it is also the source port.
func TestPeerPort(t *testing.T) {
	tid := uint64(tidMagic)<<48 | 5000<<32 | 77
	for _, tc := range []struct {
		src  uint16
		tid  uint64
		want uint16
	}{
		{5000, tid, 5000}, {5001, tid, 4791}, {55410, 0x2_8000_0001, 4791}, {5000, 5000 << 32, 4791}, {5000, tid ^ 1<<63, 4791}, {4791, 0, 4791},
	} {
		l := newLab(t, Config{})
		l.from, l.tid = netip.AddrPortFrom(addrA, tc.src), tc.tid
		answers := func(what string) {
			t.Helper()
			l.said()
			if len(l.mads) != 1 || l.mads[0].Remote != netip.AddrPortFrom(addrA, tc.want) || l.mads[0].Local != addrB {
				t.Errorf("%s from port %d with transaction %x answered: %v, want port %d", what, tc.src, tc.tid, l.mads, tc.want)
			}
		}
		m := l.req()
		m.ServiceID++
		l.forge(REQ, m)
		answers("REQ for nobody")
		l.forge(DREQ, l.dreq(1))
		answers("DREQ for nobody")
		l.forge(SIDRReq, &roce.SIDRReq{})
		answers("SIDR_REQ")
		l.request()
		l.must(l.accept())
		answers("REQ")
	}
	// And ours is told.
	l := newLab(t, Config{UDPPort: 5123})
	l.connect()
	if l.tid>>32 != tidMagic<<16|5123 {
		t.Errorf("transaction ID %x", l.tid)
	}
}

// Two devices on other ports than 4791 find each other.
func TestOtherPorts(t *testing.T) {
	nw := newNetwork(t, 3)
	a, b := nw.add(addrA, Config{UDPPort: 5001}), nw.add(addrA, Config{UDPPort: 5002})
	b.must(b.Listen(tcp))
	_, idb := connect(a, b)
	b.must(b.Disconnect(nw.now, idb, nil))
	a.want(Disconnected)
	b.want(Disconnected)
}

// A device may connect to itself.
func TestSelf(t *testing.T) {
	nw := newNetwork(t, 3)
	a := nw.add(addrA, Config{})
	a.must(a.Listen(tcp))
	out, err := a.Connect(nw.now, reqTo(a, a))
	a.must(err)
	in := a.want(ReqReceived).Conn
	a.must(a.Accept(nw.now, in, repParams))
	a.want(RepReceived)
	a.must(a.Ready(nw.now, out, nil))
	a.want(Established)
	a.must(a.Disconnect(nw.now, in, nil))
	a.want(Disconnected)
	a.want(Disconnected)
	a.want(TimewaitExit)
	a.want(TimewaitExit)
}

// Zones do not keep neighbours apart, and IPv4-mapped addresses are IPv4.
func TestAddressForms(t *testing.T) {
	l := newLab(t, Config{})
	l.from, l.to = netip.MustParseAddrPort("[fe80::1%eth0]:55410"), netip.MustParseAddr("fe80::2%eth0")
	l.request()
	l.must(l.accept())
	l.said()
	if got := l.mads[0].Remote; got != netip.MustParseAddrPort("[fe80::1%eth0]:4791") {
		t.Errorf("answered to %v", got)
	}
	l.from = netip.MustParseAddrPort("[fe80::1]:55410")
	l.forge(RTU, l.rtu())
	if got := l.happened(); got != "ESTABLISHED" {
		t.Error(got)
	}
	l = newLab(t, Config{})
	l.from, l.to = netip.MustParseAddrPort("[::ffff:10.77.0.2]:55410"), netip.MustParseAddr("::ffff:10.77.0.3")
	l.request()
	l.must(l.accept())
	l.said()
	if got := l.mads[0].Path; got != (Path{addrB, netip.AddrPortFrom(addrA, 4791)}) {
		t.Errorf("answered on %v", got)
	}
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

// F56: a slow program. The peer hears an MRA when it repeats itself after a second, not before, and waits.
func TestSlowAccept(t *testing.T) {
	nw, a, b := pair(t, Config{ConnectTimeout: 500 * ms, RetryMax: 200 * ms})
	_, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	id := b.want(ReqReceived).Conn
	nw.advance(199 * ms)
	if n := b.count(MRA); n != 0 {
		t.Errorf("%d MRAs at once", n)
	}
	nw.advance(13 * time.Second) // three times what an MRA asks for
	if mras, reqs := b.count(MRA), a.count(REQ); mras < 3 || mras > 5 || reqs > 11 {
		t.Errorf("%d MRAs for %d REQs", mras, reqs)
	}
	a.quiet()
	b.must(b.Accept(nw.now, id, repParams))
	a.want(RepReceived)
}

// A slow active side: the REP is answered with an MRA and rests.
func TestSlowReady(t *testing.T) {
	nw, a, b := pair(t, Config{AcceptTimeout: 500 * ms, RetryMax: 200 * ms})
	ida, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	b.must(b.Accept(nw.now, b.want(ReqReceived).Conn, repParams))
	a.want(RepReceived)
	nw.advance(9 * time.Second)
	if n := a.count(MRA); n < 2 || n > 4 {
		t.Errorf("%d MRAs", n)
	}
	b.quiet()
	a.must(a.Ready(nw.now, ida, nil))
	b.want(Established)
}

// F56: an MRA stretches the wait in which it comes and no later one, and all of them together are bounded.
func TestMRABounds(t *testing.T) {
	t.Run("one wait", func(t *testing.T) {
		l := at(t, (*lab).connect)
		began := l.now
		l.forge(MRA, l.mra(roce.MessageREQ, 18)) // 1.07 s
		wait := verbs.AckTimeout(18).Duration()
		if got := l.Deadline(); got != began.Add(wait) {
			t.Errorf("waits %v", got.Sub(began))
		}
		l.forge(MRA, l.mra(roce.MessageREQ, 31))
		if got := l.Deadline(); got != began.Add(wait) || l.counters.Duplicate[MRA].Load() != 1 {
			t.Errorf("a second MRA: waits %v", got.Sub(began))
		}
		l.now = l.Deadline()
		l.HandleTimeout(l.now)
		if got := l.said(); got != "REQ" {
			t.Errorf("then sends %s", got)
		}
		if got := l.Deadline().Sub(l.now); got != 2*DefaultRetryInitial {
			t.Errorf("the next wait is %v", got)
		}
	})
	t.Run("code 0", func(t *testing.T) {
		l := at(t, (*lab).connect)
		before := l.Deadline()
		l.forge(MRA, l.mra(roce.MessageREQ, 0))
		if l.Deadline() != before {
			t.Error("it asks for nothing and gets something")
		}
	})
	t.Run("code 31", func(t *testing.T) {
		l := at(t, (*lab).connect)
		l.forge(MRA, l.mra(roce.MessageREQ, 31)) // 2.4 hours
		if got := l.Deadline().Sub(l.now); got != DefaultServiceMax {
			t.Errorf("waits %v", got)
		}
	})
	for _, m := range []roce.CMMessage{roce.MessageREQ, roce.MessageREP} {
		t.Run("without end, "+m.String(), func(t *testing.T) {
			l := at(t, func(l *lab) {
				if m == roce.MessageREQ {
					l.connect()
					return
				}
				l.request()
				l.must(l.accept())
			})
			began := l.now
			for l.happened() == "-" {
				l.said()
				l.forge(MRA, l.mra(m, 20))
				l.now = l.Deadline()
				l.HandleTimeout(l.now)
			}
			if got := l.now.Sub(began); got != DefaultConnectTimeout+DefaultServiceMax {
				t.Errorf("ends after %v", got)
			}
		})
	}
}

// After an MRA of ours the peer is quiet for long, so our REJ is kept for as long.
func TestRejectAfterMRA(t *testing.T) {
	l := at(t, (*lab).request)
	l.now = l.now.Add(time.Second)
	l.forge(REQ, l.req())
	l.must(l.Reject(l.now, l.id, verbs.RejectConsumer, []byte("no")))
	if got := l.said(); got != "REJ(REQ,28)" {
		t.Fatal(got)
	}
	for i := range 2 {
		var rej roce.REJ
		rej.Decode(l.mads[0].MAD[24:])
		if rej.LocalCommID != uint32(l.id) || string(rej.PrivateData[:3]) != "no\x00" {
			t.Errorf("%d: %+v", i, rej)
		}
		if i == 0 {
			l.now = l.now.Add(mraServiceTime.Duration())
			l.HandleTimeout(l.now)
			l.forge(REQ, l.req())
			l.said()
		}
	}
	if got := l.happened(); got != "-" {
		t.Error(got)
	}
}

// The same QP in a new REQ: the old connection is dead at the other end, and both are ended.
func TestStaleConnection(t *testing.T) {
	nw, a, b := pair(t, Config{})
	connect(a, b)
	// A forgets everything and comes back with the same GUID and QP.
	guid := a.cfg.GUID
	a.CM = New(Config{GUID: guid, Rand: nw.rnd.Uint32})
	clear(a.last)
	id, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	if ev := a.want(Rejected); ev.Reason != verbs.RejectStaleConn || ev.Conn != id {
		t.Errorf("%+v", ev)
	}
	if ev := b.want(Disconnected); ev.Reason != verbs.RejectStaleConn {
		t.Errorf("reason %v", ev.Reason)
	}
	a.want(TimewaitExit)
	b.want(TimewaitExit)
	connect(a, b)
}

// The same in a REP.
func TestStaleREP(t *testing.T) {
	l := at(t, func(l *lab) { l.connect(); l.forge(REP, l.rep()); l.must(l.Ready(l.now, l.id, nil)) })
	old := l.id
	l.connect()
	l.said()
	l.peer++
	l.forge(REP, l.rep())
	if got := l.said(); got != "REJ(REP,10) DREQ" {
		t.Errorf("sends %s", got)
	}
	if got := l.happened(); got != "REJECTED(10)" {
		t.Error(got)
	}
	if l.State(old) != DreqSent || l.State(l.id) != Rejecting {
		t.Errorf("old %v, new %v", l.State(old), l.State(l.id))
	}
	// A third party with the same GUID and QPN, but another address, ends nothing.
	l = at(t, func(l *lab) { l.request(); l.must(l.accept()); l.forge(RTU, l.rtu()) })
	old = l.id
	l.from = netip.MustParseAddrPort("10.66.6.6:4791")
	l.peer++
	l.request()
	if l.State(old) != Connected {
		t.Error("a stranger ended the connection")
	}
}

// F17: Destroy says what is proper once and is done with it in TimeWait; nothing else is heard of the connection.
func TestDestroy(t *testing.T) {
	for _, s := range situations {
		if s.state == Closed {
			continue
		}
		l := at(t, s.reach)
		l.Destroy(l.now, l.id)
		l.Destroy(l.now, l.id)
		if said := l.said(); strings.Contains(said, " ") {
			t.Errorf("%s: sends %s", s.name, said)
		}
		// Whatever still arrives makes no event.
		for _, in := range inputs[2:18] {
			in.do(l)
		}
		end := l.now.Add(DefaultTimeWait)
		for l.Deadline() <= end {
			l.HandleTimeout(l.Deadline())
		}
		if got := l.happened(); got != "TIMEWAIT_EXIT" {
			t.Errorf("%s: %s", s.name, got)
		}
		if l.Len() != 0 {
			t.Errorf("%s: still %v", s.name, l.State(l.id))
		}
	}
}

// What is destroyed before its first message has left says nothing that the peer cannot understand.
func TestDestroyBeforeSending(t *testing.T) {
	l := newLab(t, Config{})
	l.connect()
	l.Destroy(l.now, l.id)
	if got := l.said(); got != "-" {
		t.Errorf("instead of a REQ %s", got)
	}
	l.request()
	l.must(l.accept())
	l.Destroy(l.now, l.id)
	if got := l.said(); got != "REJ(REQ,28)" {
		t.Errorf("instead of a REP %s", got)
	}
	l = at(t, func(l *lab) { l.connect(); l.forge(REP, l.rep()) })
	l.must(l.Ready(l.now, l.id, []byte("ready")))
	l.must(l.Disconnect(l.now, l.id, []byte("bye")))
	l.Destroy(l.now, l.id)
	if got := l.said(); got != "RTU DREQ" {
		t.Fatalf("sends %s", got)
	}
	if string(l.mads[0].MAD[32:37]) != "ready" || string(l.mads[1].MAD[36:39]) != "bye" {
		t.Error("private data lost")
	}
	// Events that wait when the program loses interest are not delivered.
	l = newLab(t, Config{})
	l.connect()
	l.said()
	l.forge(REP, l.rep())
	l.Destroy(l.now, l.id)
	if got := l.happened(); got != "-" {
		t.Error(got)
	}
}

// A rejected or timed-out request is refused again when the peer repeats it, in words it understands.
func TestRejectIsRepeated(t *testing.T) {
	l := at(t, func(l *lab) { l.request(); l.must(l.accept()) })
	for l.State(l.id) == RepSent {
		l.now = l.Deadline()
		l.HandleTimeout(l.now)
	}
	if got := l.happened(); got != "UNREACHABLE" {
		t.Error(got)
	}
	if got := l.said(); !strings.HasSuffix(got, "REJ(other,4)") {
		t.Errorf("sends %s", got)
	}
	var rej roce.REJ
	rej.Decode(l.mads[len(l.mads)-1].MAD[24:])
	if rej.InfoLen != 8 || !bytes.Equal(rej.Info[:8], guidBytes(l.cfg.GUID)) {
		t.Errorf("a timeout carries our GUID: %+v", rej)
	}
	l.forge(REQ, l.req())
	if got := l.said(); got != "REJ(REQ,28)" {
		t.Errorf("sends %s", got)
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
