package cm

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

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

// An RTU was lost and the peer has already said goodbye: it was up and may have sent, so
// our QP's number rests as after any other connection, however many failed ones linger.
func TestTimewaitAfterLostRTU(t *testing.T) {
	l := newLab(t, Config{Backlog: 1})
	l.request()
	l.must(l.Reject(l.now, l.id, verbs.RejectConsumer, nil))
	if l.lingering != 1 {
		t.Fatal("the place is not taken")
	}
	l.peer++
	l.request()
	l.must(l.accept())
	l.said()
	l.forge(DREQ, l.dreq(ourQPN))
	if got := l.happened(); got != "DISCONNECTED" || l.State(l.id) != Timewait {
		t.Errorf("%s, now %v", got, l.State(l.id))
	}
}
