package cm

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// flood sends count REQs for a service from forged addresses, a new one each, and returns how
// many MADs came back.
func (n *node) flood(rnd *rand.Rand, count int, service roce.SID) (sent int) {
	var mad [roce.MADLen]byte
	h := roce.NewCMMAD(roce.AttrREQ, 0)
	h.PutHeader(mad[:])
	(&lab{CM: n.CM, from: netip.AddrPortFrom(addrA, 1), to: addrB, qpn: 2}).req().Put(mad[24:])
	for range count {
		binary.BigEndian.PutUint64(mad[8:], rnd.Uint64())
		binary.BigEndian.PutUint32(mad[24:], rnd.Uint32())
		binary.BigEndian.PutUint64(mad[32:], uint64(service))
		binary.BigEndian.PutUint64(mad[40:], rnd.Uint64())
		binary.BigEndian.PutUint32(mad[56:], (2+rnd.Uint32N(1<<23))<<8)
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32())}), 4791)
		n.HandleMAD(n.net.now, from, addrB, mad[:])
		sent += n.drain()
	}
	return sent
}

// drain takes what is to be sent and counts it; nobody gets it.
func (n *node) drain() (sent int) {
	var out Out
	for n.NextMAD(&out) {
		sent++
	}
	return sent
}

// A flood of forged REQs that a program accepts as fast as it can is answered with one REP each
// and a ration of repetitions, far fewer than it has sent itself; newcomers get in when the
// flood ends, and who was connected before also while it lasts.
func TestFloodIsNotAmplified(t *testing.T) {
	nw, a, b := pair(t, Config{Backlog: 1024})
	nw.checks = false
	programs(a, b)
	// a is at home at b.
	p := reqTo(a, b)
	_, err := a.Connect(nw.now, p)
	a.must(err)
	nw.advance(10 * ms)
	accept := func() {
		for ev, ok := b.NextEvent(); ok; ev, ok = b.NextEvent() {
			if ev.Type == ReqReceived {
				if err := b.Accept(nw.now, ev.Conn, RepParams{QPN: 77}); err != nil && !errors.Is(err, ErrState) {
					t.Fatal(err) // ErrState: a has given up already
				}
			}
		}
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	const seconds, rate = 20, 20_000
	reqs, answers := 0, 0
	for step := range seconds * 100 {
		answers += b.flood(rnd, rate/100, tcp)
		reqs += rate / 100
		accept()
		nw.now = nw.now.Add(10 * ms)
		for b.Deadline() <= nw.now {
			b.HandleTimeout(nw.now)
		}
		answers += b.drain()
		accept()
		if step%100 == 50 {
			b.check()
			// Strangers fill their share, and the one who is known gets in at once.
			if h := b.HalfOpen(tcp); h != 768 {
				t.Fatalf("step %d: %d half-open", step, h)
			}
			p.QPN++
			var out Out
			id, err := a.Connect(nw.now, p)
			a.must(err)
			for a.NextMAD(&out) {
				b.HandleMAD(nw.now, netip.AddrPortFrom(addrA, 4791), addrB, out.MAD[:])
			}
			if h := b.HalfOpen(tcp); h != 769 {
				t.Fatalf("step %d: a known address found no place: %d half-open", step, h)
			}
			a.Destroy(nw.now, id)
			for a.NextMAD(&out) {
				b.HandleMAD(nw.now, netip.AddrPortFrom(addrA, 4791), addrB, out.MAD[:])
			}
		}
	}
	admitted := int(b.counters.Sent[REP].Load() - b.counters.Retransmitted[REP].Load())
	repeated := int(b.counters.Retransmitted[REP].Load())
	t.Logf("%d REQs: %d admitted, %d REPs repeated, %d withheld, %d answers", reqs, admitted, repeated, b.counters.Withheld.Load(), answers)
	if limit := purse + seconds*200 + seconds; repeated > limit || answers > admitted+limit {
		t.Errorf("%d REPs repeated, %d answers to %d admitted, want at most %d beyond one each", repeated, answers, admitted, limit)
	}
	if answers > reqs/10 {
		t.Errorf("%d answers to %d REQs", answers, reqs)
	}
	if b.counters.Withheld.Load() == 0 {
		t.Error("nothing was withheld")
	}
	// The flood ends, its half-open connections time out, and nothing of it remains.
	nw.now = nw.now.Add(DefaultAcceptTimeout + time.Second)
	for b.Deadline() <= nw.now {
		b.HandleTimeout(nw.now)
		b.drain()
		accept()
	}
	nw.now = nw.now.Add(DefaultTimeWait + time.Second)
	for b.Deadline() <= nw.now {
		b.HandleTimeout(nw.now)
	}
	accept()
	b.check()
	if b.Len() != 1 || b.HalfOpen(tcp) != 0 || len(b.strangers.known) != 1 {
		t.Errorf("%d connections, %d half-open, %d known addresses remain", b.Len(), b.HalfOpen(tcp), len(b.strangers.known))
	}
}

// An address is known from its first established connection until the last one's timewait ends.
func TestKnownAddress(t *testing.T) {
	nw, a, b := pair(t, Config{Backlog: 4, TimeWait: 50 * ms})
	programs(a, b)
	room := func() int { return b.strangers.room(4, addrA) }
	if room() != 3 {
		t.Errorf("a stranger's share is %d", room())
	}
	p := reqTo(a, b)
	var ids []ConnID
	for range 2 {
		p.QPN++
		id, err := a.Connect(nw.now, p)
		a.must(err)
		ids = append(ids, id)
		nw.advance(5 * ms)
	}
	if room() != 4 || b.strangers.room(4, addrB) != 3 {
		t.Errorf("known: %d, another: %d", room(), b.strangers.room(4, addrB))
	}
	for i, want := range []int{4, 3} {
		a.must(a.Disconnect(nw.now, ids[i], nil))
		nw.advance(10 * ms)
		if room() != 4 {
			t.Error("forgotten in timewait")
		}
		nw.advance(60 * ms)
		if room() != want {
			t.Errorf("after %d of 2: %d", i+1, room())
		}
	}
}

// The purse: spent, refilled by time and by what peers send, never beyond what it holds.
func TestPurse(t *testing.T) {
	var s strangers
	cn := &conn{path: Path{addrB, netip.AddrPortFrom(addrA, 4791)}}
	now := verbs.Instant(time.Hour)
	drain := func() (n int) {
		for s.afford(now, cn) {
			n++
		}
		return n
	}
	if n := drain(); n != purse {
		t.Errorf("at first: %d", n)
	}
	now = now.Add(50*time.Millisecond + refill/2)
	if n := drain(); n != 10 {
		t.Errorf("after 50 ms: %d", n)
	}
	now = now.Add(refill / 2)
	if n := drain(); n != 1 {
		t.Errorf("the other half: %d", n)
	}
	s.credit()
	s.credit()
	if n := drain(); n != 2 {
		t.Errorf("two credits: %d", n)
	}
	now = now.Add(time.Hour)
	for range 10 {
		s.credit()
	}
	if n := drain(); n != purse {
		t.Errorf("after an hour: %d", n)
	}
	s.meet(cn)
	if !s.afford(now, cn) {
		t.Error("a known peer is rationed")
	}
}
