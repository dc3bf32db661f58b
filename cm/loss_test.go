package cm

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// lose loses the nth MADs of a kind that a node sends, 0 meaning all of them.
func lose(who *node, m Message, nth ...int) func(*packet) []time.Duration {
	return func(p *packet) []time.Duration {
		for _, n := range nth {
			if p.from == who && p.msg == m && (n == p.nth || n == 0) {
				return nil
			}
		}
		return []time.Duration{ms}
	}
}

// programs lets A and B do what programs do: accept, get ready. Errors are theirs to ignore: the peer may
// have given up between event and call.
func programs(a, b *node) {
	a.program = func(ev Event) {
		if ev.Type == RepReceived {
			a.must(a.Ready(a.net.now, ev.Conn, []byte("ready")))
		}
	}
	b.program = func(ev Event) {
		if ev.Type == ReqReceived {
			b.must(b.Accept(b.net.now, ev.Conn, b.repParams()))
		}
	}
}

// types lists the types of the events that a node has had.
func (n *node) types() string {
	s := ""
	for _, ev := range n.events {
		if s != "" {
			s += " "
		}
		s += ev.Type.String()
	}
	n.events = nil
	return s
}

// One lost MAD, the first or the first two of any kind, disturbs nothing: both sides see what they
// see without loss.
func TestOneLossIsRepaired(t *testing.T) {
	for _, closer := range []string{"active", "passive", "both"} {
		for m := REQ; m <= DREP; m++ {
			for _, fromA := range []bool{true, false} {
				for _, losses := range [][]int{{1}, {1, 2}, {2}} {
					t.Run(fmt.Sprintf("%s/%v/%v/%v", closer, m, fromA, losses), func(t *testing.T) {
						nw, a, b := pair(t, Config{})
						programs(a, b)
						from := b
						if fromA {
							from = a
						}
						nw.verdict = lose(from, m, losses...)
						ida, err := a.Connect(nw.now, reqTo(a, b))
						a.must(err)
						var idb ConnID
						nw.runUntil("B established", func() bool {
							for _, ev := range b.events {
								idb = ev.Conn
								if ev.Type == Established {
									return true
								}
							}
							return false
						})
						if nw.now > verbs.Instant(0).Add(200*ms) {
							t.Errorf("established after %v", time.Duration(nw.now))
						}
						if closer != "passive" {
							a.must(a.Disconnect(nw.now, ida, nil))
						}
						if closer != "active" {
							b.must(b.Disconnect(nw.now, idb, nil))
						}
						nw.advance(10 * time.Second)
						if got, want := a.types(), "REP_RECEIVED DISCONNECTED TIMEWAIT_EXIT"; got != want {
							t.Errorf("A: %s", got)
						}
						if got, want := b.types(), "REQ_RECEIVED ESTABLISHED DISCONNECTED TIMEWAIT_EXIT"; got != want {
							t.Errorf("B: %s", got)
						}
						if a.Len()+b.Len() != 0 {
							t.Error("connections remain")
						}
					})
				}
			}
		}
	}
}

// When one kind never gets through, both sides learn it in time and forget everything.
func TestTotalLoss(t *testing.T) {
	for _, tc := range []struct {
		lost  Message
		fromA bool
		a, b  string
		// sent is how often the lost message is sent at the least and at the most.
		least, most int
	}{
		{REQ, true, "UNREACHABLE TIMEWAIT_EXIT", "", 9, 12},
		// The REJ that ends A's patience reaches B by A's GUID and ID.
		{REP, false, "UNREACHABLE TIMEWAIT_EXIT", "REQ_RECEIVED REJECTED TIMEWAIT_EXIT", 9, 12},
		{RTU, true, "REP_RECEIVED DISCONNECTED TIMEWAIT_EXIT", "REQ_RECEIVED UNREACHABLE TIMEWAIT_EXIT", 9, 12},
		{DREQ, true, "REP_RECEIVED DISCONNECTED TIMEWAIT_EXIT", "REQ_RECEIVED ESTABLISHED", 5, 7},
		{DREP, false, "REP_RECEIVED DISCONNECTED TIMEWAIT_EXIT", "REQ_RECEIVED ESTABLISHED DISCONNECTED TIMEWAIT_EXIT", 5, 7},
	} {
		t.Run(tc.lost.String(), func(t *testing.T) {
			nw, a, b := pair(t, Config{})
			programs(a, b)
			from := b
			if tc.fromA {
				from = a
			}
			nw.verdict = lose(from, tc.lost, 0)
			began := nw.now
			ida, err := a.Connect(nw.now, reqTo(a, b))
			a.must(err)
			if tc.lost >= DREQ {
				nw.advance(100 * ms)
				began = nw.now
				a.must(a.Disconnect(nw.now, ida, nil))
			}
			nw.runUntil("end of A", func() bool { return a.Len() == 0 })
			if d := nw.now.Sub(began); d > 6*time.Second {
				t.Errorf("took %v", d)
			}
			nw.advance(10 * time.Second)
			if got := a.types(); got != tc.a {
				t.Errorf("A: %s, want %s", got, tc.a)
			}
			if got := b.types(); got != tc.b {
				t.Errorf("B: %s, want %s", got, tc.b)
			}
			if n := from.count(tc.lost); n < tc.least || n > tc.most {
				t.Errorf("%v sent %d times, want %d to %d", tc.lost, n, tc.least, tc.most)
			}
			for _, n := range nw.nodes {
				if got := n.counters.Sent[tc.lost].Load(); got != uint64(n.count(tc.lost)) {
					t.Errorf("counted %d", got)
				}
			}
			if re := from.counters.Retransmitted[tc.lost].Load(); tc.lost != DREP && tc.lost != RTU && re != uint64(from.count(tc.lost)-1) {
				t.Errorf("%d of %d retransmitted", re, from.count(tc.lost))
			}
		})
	}
}

// Each message arriving twice or three times, at once or later, changes nothing.
func TestDuplicates(t *testing.T) {
	for _, delay := range []time.Duration{0, 5 * ms, 100 * ms, 400 * ms} {
		t.Run(delay.String(), func(t *testing.T) {
			nw, a, b := pair(t, Config{})
			programs(a, b)
			nw.verdict = func(*packet) []time.Duration { return []time.Duration{ms, ms + delay, ms + 2*delay} }
			ida, err := a.Connect(nw.now, reqTo(a, b))
			a.must(err)
			nw.advance(10 * ms)
			a.must(a.Disconnect(nw.now, ida, nil))
			nw.advance(10 * time.Second)
			if got, want := a.types(), "REP_RECEIVED DISCONNECTED TIMEWAIT_EXIT"; got != want {
				t.Errorf("A: %s", got)
			}
			got := b.types()
			if want := "REQ_RECEIVED ESTABLISHED DISCONNECTED TIMEWAIT_EXIT"; got != want && delay < 400*ms {
				t.Errorf("B: %s", got)
			}
			// One answer for each, so no message can multiply.
			if n := a.count(REQ); n != 1 {
				t.Errorf("%d REQs", n)
			}
			if n := b.count(DREP); n > 3*a.count(DREQ) {
				t.Errorf("%d DREPs for %d DREQs", n, a.count(DREQ))
			}
		})
	}
}

// Whatever a network does to many connections, each ends, in order, and nothing remains. Both
// sides agree on whether an established connection existed unless the network kept it from them.
func TestBadNetwork(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			nw := newNetwork(t, seed)
			cfg := Config{RequestTimeout: 3 * time.Second, ServiceMax: 5 * time.Second}
			nw.add(addrA, cfg)
			nw.add(addrB, cfg)
			loss := nw.rnd.IntN(60)
			nw.verdict = func(*packet) (fate []time.Duration) {
				for nw.rnd.IntN(100) >= loss && len(fate) < 3 {
					fate = append(fate, time.Duration(nw.rnd.IntN(int(60*ms))))
				}
				return fate
			}
			established := 0
			for _, n := range nw.nodes {
				n.must(n.Listen(tcp))
				n.program = func(ev Event) {
					n.events = nil
					var err error
					switch dice := nw.rnd.IntN(12); {
					case ev.Type == ReqReceived && dice == 0:
						err = n.Reject(nw.now, ev.Conn, verbs.RejectConsumer, []byte("no"))
					case ev.Type == ReqReceived && dice < 10:
						p := repParams
						p.QPN = verbs.QPN(2 + nw.rnd.IntN(1000))
						err = n.Accept(nw.now, ev.Conn, p)
					case ev.Type == RepReceived && dice < 11:
						established++
						err = n.Ready(nw.now, ev.Conn, nil)
					case ev.Type == Established && dice < 4:
						err = n.Disconnect(nw.now, ev.Conn, nil)
					case dice == 11:
						n.Destroy(nw.now, ev.Conn)
					}
					if err != nil && !errors.Is(err, ErrState) {
						t.Fatal(err)
					}
				}
			}
			var ids [2][]ConnID
			for i := range 150 {
				nw.advance(time.Duration(nw.rnd.IntN(int(30 * ms))))
				k := i & 1
				n, peer := nw.nodes[k], nw.nodes[1-k]
				p := reqTo(n, peer)
				p.QPN = verbs.QPN(2 + nw.rnd.IntN(1000))
				id, err := n.Connect(nw.now, p)
				n.must(err)
				ids[k] = append(ids[k], id)
				old := ids[k][nw.rnd.IntN(len(ids[k]))]
				switch nw.rnd.IntN(4) {
				case 0:
					n.Disconnect(nw.now, old, nil)
				case 1:
					n.Destroy(nw.now, old)
				}
			}
			for k, n := range nw.nodes {
				for _, id := range ids[k] {
					n.Destroy(nw.now, id)
				}
			}
			nw.advance(20 * time.Second)
			// Passive ends of which no DREQ was heard remain.
			for _, n := range nw.nodes {
				for id, cn := range n.conns {
					if cn.state != Connected || cn.active {
						t.Errorf("%v remains in %v", id, cn.state)
					}
					n.Destroy(nw.now, id)
				}
			}
			nw.advance(20 * time.Second)
			for _, n := range nw.nodes {
				if n.Len() != 0 || len(n.byPeer) != 0 || len(n.byQPN) != 0 || len(n.timers) != 0 || len(n.last) != 0 {
					t.Errorf("%d connections, %d by peer, %d by QPN, %d timers, %d without TimewaitExit remain",
						n.Len(), len(n.byPeer), len(n.byQPN), len(n.timers), len(n.last))
				}
			}
			if established == 0 {
				t.Error("not one connection was made")
			}
		})
	}
}
