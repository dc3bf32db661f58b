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
