package cm

import (
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
)

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
