package cm

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var update = flag.Bool("update", false, "write testdata anew")

// situations are all states in all their variants, and how to get there.
var situations = []struct {
	name  string
	state State
	reach func(l *lab)
}{
	{"REQ_SENT", ReqSent, func(l *lab) { l.connect() }},
	{"MRA_REQ_RCVD", MRAReqRcvd, func(l *lab) { l.connect(); l.forge(MRA, l.mra(roce.MessageREQ, 20)) }},
	{"REP_RCVD", RepRcvd, func(l *lab) { l.connect(); l.forge(REP, l.rep()) }},
	{"REP_RCVD, slow", RepRcvd, func(l *lab) { l.connect(); l.forge(REP, l.rep()); l.now = l.now.Add(time.Second) }},
	{"ESTABLISHED, active", Connected, func(l *lab) {
		l.connect()
		l.forge(REP, l.rep())
		l.must(l.Ready(l.now, l.id, []byte("rtu")))
	}},
	{"DREQ_SENT, active", DreqSent, func(l *lab) {
		l.connect()
		l.forge(REP, l.rep())
		l.must(l.Ready(l.now, l.id, nil))
		l.must(l.Disconnect(l.now, l.id, nil))
	}},
	{"TIMEWAIT, active", Timewait, func(l *lab) {
		l.connect()
		l.forge(REP, l.rep())
		l.must(l.Ready(l.now, l.id, nil))
		l.must(l.Disconnect(l.now, l.id, nil))
		l.forge(DREP, l.drep())
	}},
	{"TIMEWAIT, rejected", Timewait, func(l *lab) { l.connect(); l.said(); l.forge(REJ, l.rej(roce.MessageREQ, verbs.RejectConsumer)) }},
	{"REJECTING, active", Rejecting, func(l *lab) { l.connect(); l.said(); l.Destroy(l.now, l.id) }},
	{"REQ_RCVD", ReqRcvd, func(l *lab) { l.request() }},
	{"REQ_RCVD, slow", ReqRcvd, func(l *lab) { l.request(); l.now = l.now.Add(time.Second) }},
	{"REP_SENT", RepSent, func(l *lab) { l.request(); l.must(l.accept()) }},
	{"MRA_REP_RCVD", MRARepRcvd, func(l *lab) { l.request(); l.must(l.accept()); l.forge(MRA, l.mra(roce.MessageREP, 20)) }},
	{"ESTABLISHED, RTU", Connected, func(l *lab) { l.request(); l.must(l.accept()); l.forge(RTU, l.rtu()) }},
	{"ESTABLISHED, COMM_EST", Connected, func(l *lab) { l.request(); l.must(l.accept()); l.must(l.Established(l.now, l.id)) }},
	{"DREQ_SENT, passive", DreqSent, func(l *lab) {
		l.request()
		l.must(l.accept())
		l.must(l.Established(l.now, l.id))
		l.must(l.Disconnect(l.now, l.id, nil))
	}},
	{"TIMEWAIT, passive", Timewait, func(l *lab) {
		l.request()
		l.must(l.accept())
		l.forge(RTU, l.rtu())
		l.forge(DREQ, l.dreq(ourQPN))
	}},
	{"REJECTING, passive", Rejecting, func(l *lab) { l.request(); l.must(l.Reject(l.now, l.id, verbs.RejectConsumer, nil)) }},
	{"CLOSED", Closed, func(l *lab) { l.id = 0xdead }},
}

// inputs are all messages, calls, and the passing of time. A call returns its error.
var inputs = []struct {
	name string
	do   func(l *lab) error
}{
	{"REQ", func(l *lab) error { l.forge(REQ, l.req()); return nil }},
	{"REQ, same QP", func(l *lab) error { l.peer++; l.forge(REQ, l.req()); l.peer--; return nil }},
	{"MRA of REQ", func(l *lab) error { l.forge(MRA, l.mra(roce.MessageREQ, 20)); return nil }},
	{"MRA of REP", func(l *lab) error { l.forge(MRA, l.mra(roce.MessageREP, 20)); return nil }},
	{"MRA of other", func(l *lab) error { l.forge(MRA, l.mra(roce.MessageOther, 20)); return nil }},
	{"REJ of REQ", func(l *lab) error { l.forge(REJ, l.rej(roce.MessageREQ, verbs.RejectConsumer)); return nil }},
	{"REJ of REP", func(l *lab) error { l.forge(REJ, l.rej(roce.MessageREP, verbs.RejectConsumer)); return nil }},
	{"REJ of other", func(l *lab) error { l.forge(REJ, l.rej(roce.MessageOther, verbs.RejectConsumer)); return nil }},
	{"REJ, timeout", func(l *lab) error { l.forge(REJ, l.rej(roce.MessageOther, verbs.RejectTimeout)); return nil }},
	{"REP", func(l *lab) error { l.forge(REP, l.rep()); return nil }},
	{"RTU", func(l *lab) error { l.forge(RTU, l.rtu()); return nil }},
	{"DREQ", func(l *lab) error { l.forge(DREQ, l.dreq(ourQPN)); return nil }},
	{"DREQ, other QP", func(l *lab) error { l.forge(DREQ, l.dreq(ourQPN+1)); return nil }},
	{"DREP", func(l *lab) error { l.forge(DREP, l.drep()); return nil }},
	{"LAP", func(l *lab) error { l.forge(LAP, l.lap()); return nil }},
	{"APR", func(l *lab) error { l.forge(APR, l.apr()); return nil }},
	{"SIDR_REQ", func(l *lab) error { l.forge(SIDRReq, &roce.SIDRReq{RequestID: 1}); return nil }},
	{"SIDR_REP", func(l *lab) error { l.forge(SIDRRep, &roce.SIDRRep{RequestID: 1}); return nil }},
	{"Accept", func(l *lab) error { return l.accept() }},
	{"Reject", func(l *lab) error { return l.Reject(l.now, l.id, verbs.RejectConsumer, nil) }},
	{"Ready", func(l *lab) error { return l.Ready(l.now, l.id, nil) }},
	{"Established", func(l *lab) error { return l.Established(l.now, l.id) }},
	{"Disconnect", func(l *lab) error { return l.Disconnect(l.now, l.id, nil) }},
	{"Destroy", func(l *lab) error { l.Destroy(l.now, l.id); return nil }},
	{"timer", func(l *lab) error {
		if d := l.Deadline(); d != verbs.Never {
			l.HandleTimeout(d)
		}
		return nil
	}},
	{"long silence", func(l *lab) error {
		for l.Deadline() != verbs.Never {
			if l.State(l.id) != Closed {
				l.now = l.Deadline()
			}
			l.HandleTimeout(l.now)
			l.said()
		}
		return nil
	}},
}

// at returns a lab in a situation, with what led there said and told.
func at(t testing.TB, reach func(*lab)) *lab {
	l := newLab(t, Config{})
	reach(l)
	l.said()
	l.happened()
	l.check()
	for d := range drops {
		if n := l.counters.Dropped[d].Load(); n != 0 {
			t.Fatalf("%d dropped on the way: %v", n, d)
		}
	}
	return l
}

// Every state meets every message, call and timer; testdata/matrix.txt says what must come of it.
func TestEveryStateEveryInput(t *testing.T) {
	var got bytes.Buffer
	for _, s := range situations {
		fmt.Fprintf(&got, "%s\n", s.name)
		for _, in := range inputs {
			l := at(t, s.reach)
			if st := l.State(l.id); st != s.state {
				t.Fatalf("%s: in %v", s.name, st)
			}
			err := in.do(l)
			l.check()
			said := l.said()
			if strings.Count(said, " ") > 1 {
				t.Errorf("%s: %s causes %s", s.name, in.name, said)
			}
			fmt.Fprintf(&got, "\t%-15s %-15s -> %-13s sends %-16s events %-20s drops %s\n", in.name, word(err), l.State(l.id), said, l.happened(), l.dropped())
			l.check()
		}
	}
	const file = "testdata/matrix.txt"
	if *update {
		if err := os.WriteFile(file, got.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	g, w := strings.Split(got.String(), "\n"), strings.Split(string(want), "\n")
	situation := ""
	for i := range max(len(g), len(w)) {
		switch {
		case i >= len(g) || i >= len(w):
			t.Fatalf("%d lines, want %d", len(g), len(w))
		case g[i] != w[i]:
			t.Errorf("%s\ngot  %s\nwant %s", situation, g[i], w[i])
		}
		if !strings.HasPrefix(g[i], "\t") {
			situation = g[i]
		}
	}
}

// A MAD that is wrong in its addresses, IDs or transaction ID changes no connection, in no state.
func TestEveryStateForgedInput(t *testing.T) {
	stranger := netip.MustParseAddrPort("10.66.6.6:55410")
	for _, s := range situations {
		for _, in := range inputs[:16] {
			for _, f := range []struct {
				name  string
				forge func(l *lab)
			}{
				{"stranger", func(l *lab) { l.from = stranger }},
				{"their ID", func(l *lab) { l.peer ^= 0x100 }},
				{"our ID", func(l *lab) { l.id ^= 0x100 }},
				{"transaction ID", func(l *lab) { l.tid ^= 1 }},
				{"GUID", func(l *lab) { l.guid ^= 1 }},
				{"QPN", func(l *lab) { l.qpn ^= 1 }},
			} {
				// What need not be right: a DREQ, a DREP or a LAP makes an exchange of its own, only a REQ or
				// REP tells GUID and QPN, and the peer's ID is unknown before the REP.
				begins := strings.HasPrefix(in.name, "DRE") || in.name == "LAP" || strings.HasPrefix(in.name, "REQ")
				early := s.state == ReqSent || s.state == MRAReqRcvd || s.name == "REJECTING, active" || s.name == "TIMEWAIT, rejected"
				switch {
				case f.name == "transaction ID" && begins, f.name == "GUID", f.name == "QPN",
					f.name == "their ID" && (early || in.name == "REQ, same QP" || in.name == "REQ"),
					// A refused REQ has no ID of the refuser's; a timeout needs none of ours.
					f.name == "their ID" && in.name == "REJ of REQ",
					f.name == "our ID" && in.name == "REJ, timeout", f.name == "our ID" && strings.HasPrefix(in.name, "REQ"):
					continue
				}
				l := at(t, s.reach)
				id, state := l.id, l.State(l.id)
				deadline := l.Deadline()
				f.forge(l)
				in.do(l)
				l.check()
				if got := l.State(id); got != state {
					t.Errorf("%s, %s with wrong %s: now %v", s.name, in.name, f.name, got)
				}
				if got := l.Deadline(); got != deadline && !strings.HasPrefix(in.name, "REQ") {
					t.Errorf("%s, %s with wrong %s: deadline %v, was %v", s.name, in.name, f.name, got, deadline)
				}
				if got := l.happened(); got != "-" && got != "REQ_RECEIVED" {
					t.Errorf("%s, %s with wrong %s: %s", s.name, in.name, f.name, got)
				}
				said := l.said()
				ok := said == "-" || strings.HasPrefix(in.name, "DREQ") && said == "DREP" && f.name != "stranger" ||
					in.name == "REQ" || in.name == "REQ, same QP"
				if s.state == Closed && strings.HasPrefix(in.name, "DREQ") {
					ok = said == "DREP"
				}
				if !ok {
					t.Errorf("%s, %s with wrong %s: sends %s", s.name, in.name, f.name, said)
				}
			}
		}
	}
}
