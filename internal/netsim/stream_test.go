package netsim

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// stream sends numbered messages one way and checks that they arrive exactly once, in
// order, byte for byte.
type stream struct {
	t        *testing.T
	seed     uint64
	net      *Net
	a, b     *Node
	aq, bq   *wire.QP
	aMR, bMR *mr.Region
	depth    int
	size     int

	posted, sent, received int
	failed                 bool
}

func newStream(t *testing.T, seed uint64, net *Net, a, b *Node, depth, size int, p wire.ConnParam) *stream {
	t.Helper()
	s := &stream{t: t, seed: seed, net: net, a: a, b: b, depth: depth, size: size}
	c := verbs.QPCap{MaxSendWR: depth, MaxRecvWR: 2 * depth}
	aLane, bLane := qp.NewCQ(4*depth), qp.NewCQ(4*depth)
	s.aq, s.bq = a.QP(aLane, c), b.QP(bLane, c)
	s.aMR = a.Register(make([]byte, depth*size), 0)
	s.bMR = b.Register(make([]byte, 2*depth*size), verbs.LocalWrite)
	for i := range 2 * depth {
		s.recv(i)
	}
	if _, _, err := net.Connect(a, b, s.aq, s.bq, p); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	a.OnCompletions, b.OnCompletions = s.onSent, s.onReceived
	return s
}

func (s *stream) recv(i int) {
	if _, err := s.b.Recv(s.bq, verbs.RecvWR{WRID: uint64(i), SGList: sgl(s.bMR, i*s.size, s.size)}); err != nil {
		s.t.Fatalf("seed %d: recv: %v", s.seed, err)
	}
}

// length of message n: from 8 to size bytes, any remainder modulo 4.
func (s *stream) length(n int) int { return 8 + (n*7919)%(s.size-7) }

func fill(b []byte, n int) {
	binary.BigEndian.PutUint64(b, uint64(n))
	for i := 8; i < len(b); i++ {
		b[i] = byte(n*31 + i)
	}
}

func (s *stream) post(total int) {
	for s.posted < total && s.posted-s.sent < s.depth {
		i := s.posted % s.depth
		n := s.length(s.posted)
		fill(s.aMR.Bytes()[i*s.size:][:n], s.posted)
		_, err := s.a.Send(s.aq, verbs.SendWR{
			WRID: uint64(s.posted), Opcode: verbs.SendWithImm, ImmData: uint32(s.posted), Flags: verbs.Signaled,
			SGList: sgl(s.aMR, i*s.size, n),
		})
		if err != nil {
			s.t.Fatalf("seed %d: send %d: %v", s.seed, s.posted, err)
		}
		s.posted++
	}
}

func (s *stream) onSent(l *qp.CQ) {
	var wc [32]verbs.WC
	for n := l.Poll(wc[:]); n > 0; n = l.Poll(wc[:]) {
		for _, c := range wc[:n] {
			if c.Status != verbs.WCSuccess || c.WRID != uint64(s.sent) {
				s.t.Errorf("seed %d: send completion %d (%v), want %d", s.seed, c.WRID, c.Status, s.sent)
				s.failed = true
				return
			}
			s.sent++
		}
	}
}

func (s *stream) onReceived(l *qp.CQ) {
	var wc [32]verbs.WC
	for n := l.Poll(wc[:]); n > 0; n = l.Poll(wc[:]) {
		for _, c := range wc[:n] {
			s.check(&c)
			s.received++
			s.recv(int(c.WRID))
		}
	}
}

func (s *stream) check(c *verbs.WC) {
	n := s.received
	b := s.bMR.Bytes()[int(c.WRID)*s.size:][:s.size]
	want := make([]byte, s.length(n))
	fill(want, n)
	switch {
	case c.Status != verbs.WCSuccess || c.ImmData != uint32(n) || c.Flags&verbs.WithImm == 0:
		s.t.Errorf("seed %d: receive %d: %v, immediate %d", s.seed, n, c.Status, c.ImmData)
	case int(c.ByteLen) != len(want) || string(b[:len(want)]) != string(want):
		s.t.Errorf("seed %d: receive %d: %d bytes, want %d, or other bytes", s.seed, n, c.ByteLen, len(want))
	default:
		return
	}
	s.failed = true
}

func (s *stream) run(total int, limit time.Duration) {
	s.t.Helper()
	s.post(total)
	ok := s.net.Run(limit, func() bool {
		s.post(total)
		return s.failed || s.received == total && s.sent == total
	})
	if !ok || s.failed {
		s.t.Fatalf("seed %d: posted %d, sent %d, received %d of %d after %v; dropped %d", s.seed,
			s.posted, s.sent, s.received, total, time.Duration(s.net.Now()), s.net.Dropped)
	}
}

// TestMillionMessagesUnderFaults: 1 % of packets dropped, duplicated and reordered; every
// message arrives exactly once, in order, with its bytes.
func TestMillionMessagesUnderFaults(t *testing.T) {
	total, seeds := 100_000, uint64(10)
	if testing.Short() || raceEnabled {
		total, seeds = 3000, 3
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			net := New(seed)
			net.Faults = Faults{Drop: 0.01, Duplicate: 0.01, Reorder: 0.01}
			a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
			p := Defaults()
			p.MTU = verbs.MTU(1 + seed%5)
			s := newStream(t, seed, net, a, b, 64, 600, p)
			s.run(total, time.Hour)
			if net.Dropped == 0 || net.Duplicated == 0 || net.Reordered == 0 {
				t.Errorf("seed %d: no faults were injected", seed)
			}
			t.Logf("seed %d: %d messages, %d packets dropped, %d duplicated, %d reordered, %d retransmitted", seed,
				total, net.Dropped, net.Duplicated, net.Reordered, a.Wire.QPCounters().Retransmits.Load())
		})
	}
}

// TestStreamIsDeterministic: the same seed gives the same packets at the same times.
func TestStreamIsDeterministic(t *testing.T) {
	run := func() (sum uint64, at verbs.Instant) {
		h := fnv.New64a()
		net := New(42)
		net.Faults = Faults{Drop: 0.02, Duplicate: 0.02, Reorder: 0.02, Corrupt: 0.01}
		net.Rules = []Rule{func(p *Packet) Verdict { h.Write(p.Payload); return Verdict{} }}
		a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
		newStream(t, 42, net, a, b, 16, 3000, Defaults()).run(500, time.Minute)
		return h.Sum64(), net.Now()
	}
	s1, t1 := run()
	s2, t2 := run()
	if s1 != s2 || t1 != t2 {
		t.Errorf("two runs differ: %x at %d, %x at %d", s1, t1, s2, t2)
	}
}

// TestForeignIDs: a peer whose IPv4 Identifications run like those of Linux; every ICRC is
// checked all the same.
func TestForeignIDs(t *testing.T) {
	net := New(5)
	net.RunIDs = true
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	s := newStream(t, 5, net, a, b, 16, 2000, Defaults())
	s.run(2000, time.Minute)
	if n := b.Wire.Counters.DropICRC.Load(); n != 0 {
		t.Errorf("%d good packets failed the ICRC", n)
	}
	if n := b.Wire.Counters.SolvedIDs.Load(); n == 0 || n > 200 {
		t.Errorf("%d Identifications solved, want some, and most predicted", n)
	}
}

// TestCorruptionNeverArrives: with a tenth of all packets damaged, nothing damaged is delivered.
func TestCorruptionNeverArrives(t *testing.T) {
	net := New(6)
	net.Faults.Corrupt = 0.1
	a, b := net.Node("fd00::1"), net.Node("fd00::2")
	newStream(t, 6, net, a, b, 16, 2000, Defaults()).run(3000, time.Minute)
	if b.Wire.Counters.DropICRC.Load() == 0 {
		t.Error("no packet failed the ICRC")
	}
}

// TestPeerDies: a peer that falls silent is noticed within the retry budget.
func TestPeerDies(t *testing.T) {
	net := New(8)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	p := Defaults()
	s := newStream(t, 8, net, a, b, 16, 100, p)
	s.run(100, time.Minute)
	b.Dead = true
	var status verbs.WCStatus
	a.OnCompletions = func(l *qp.CQ) {
		var wc [1]verbs.WC
		if l.Poll(wc[:]) == 1 && status == 0 {
			status = wc[0].Status
		}
	}
	start := net.Now()
	s.post(101)
	budget := 8 * p.Timeout.Duration()
	if !net.Run(4*budget, func() bool { return status != 0 }) {
		t.Fatal("the death was never noticed")
	}
	if d := net.Now().Sub(start); status != verbs.RetryExcErr || d < budget/2 || d > 2*budget {
		t.Errorf("%v after %v, want RETRY_EXC_ERR after about %v", status, d, budget)
	}
}
