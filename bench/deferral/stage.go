package deferral

import (
	"container/heap"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/netsim"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const (
	service = roce.SID(0x0106_0000 | 7471)
	// firstPort is the port that a trial's first connection shows.
	firstPort = 1024
	// patience is how long a trial waits for all messages; grace how long it then watches
	// out for more; goodbye how long the connections get to end.
	patience = 30 * time.Second
	grace    = 100 * time.Millisecond
	goodbye  = 2 * time.Second
)

// stage is a network with a client a and a server b, on which a strategy plays the trials
// of a batch, one after the other. Whatever goes wrong that is not the network's doing ends it.
type stage struct {
	cell     *Cell
	strategy Strategy
	net      *netsim.Net
	a, b     *netsim.Node
	lanes    [2]*qp.CQ
	memory   [2]*mr.Region
	traffic  traffic
	chain    []verbs.SendWR
	recvs    [2][]verbs.RecvWR
	wcs      [64]verbs.WC
	agenda   agenda
	order    uint64

	// Of the present trial.

	conns          []*conn
	byServer       map[cm.ConnID]*conn
	byQP           [2]map[verbs.QPN]*conn // a's, b's
	client, server thread
	luck           *rand.Rand // of the server's retries
	pending        int        // messages that have not arrived
	failed         int        // connections that came to nothing

	tally tally
}

// conn is one connection and what became of it.
type conn struct {
	index  int
	aq, bq *wire.QP
	ac, bc *wire.Conn
	// kept says that messages wait in the program-side queue.
	kept bool
	// heard says that the RTU or a request has reached the server, so that it may send.
	heard bool
	// requested says that the request's completion was seen.
	requested bool
	// Times; zero for never.
	accepted, rts, sent, first, last verbs.Instant
	next                             uint32 // message expected next
	failed                           bool
	// What is known of each direction's requests: from a, from b.
	highest [2]verbs.PSN
	any     [2]bool
	sentAt  [2]verbs.Instant
	rtus    int
	repAt   verbs.Instant
	rep     bool
}

// newStage makes a network for a batch. The seed decides what is random on it but for a
// trial's luck.
func newStage(cell *Cell, strategy Strategy, seed uint64) (*stage, error) {
	s := &stage{cell: cell, strategy: strategy, net: netsim.New(seed)}
	s.net.Latency = cell.Latency
	s.traffic.stage = s
	s.net.Rules = []netsim.Rule{s.traffic.rule}
	s.a, s.b = s.net.Node("10.0.0.1"), s.net.Node("10.0.0.2")
	depth := max(4*cell.WQEs, 16*cell.Conns, 256)
	for i, n := range []*netsim.Node{s.a, s.b} {
		s.lanes[i] = qp.NewCQ(depth)
		s.memory[i] = n.Register(make([]byte, 64), verbs.LocalWrite)
	}
	for i := range cell.WQEs {
		s.chain = append(s.chain, verbs.SendWR{WRID: uint64(i), Opcode: verbs.SendWithImm, ImmData: uint32(i), InlineData: message[:]})
		s.recvs[0] = append(s.recvs[0], verbs.RecvWR{SGList: s.sgl(0)})
	}
	s.recvs[0] = append(s.recvs[0], verbs.RecvWR{SGList: s.sgl(0)}) // one more: a duplicate would be seen
	s.recvs[1] = []verbs.RecvWR{{SGList: s.sgl(1)}, {SGList: s.sgl(1)}}
	s.hook()
	return s, s.b.Wire.Listen(service)
}

// message is what the server sends.
var message = [32]byte{'w', 'e', 'l', 'c', 'o', 'm', 'e'}

func (s *stage) sgl(i int) []verbs.SGE {
	return []verbs.SGE{{Addr: s.memory[i].Addr(), Length: 64, LKey: s.memory[i].Key()}}
}

// hook connects the nodes' events with the two programs.
func (s *stage) hook() {
	s.b.OnConnRequest = func(bc *wire.Conn, req *cm.Event) {
		c := s.conns[req.Req.SrcPort-firstPort]
		c.bc = bc
		bc.Tag, s.byServer[bc.ID()] = c, c
		s.server.event(func() { s.accept(c) })
	}
	s.a.OnConnEvent = func(ac *wire.Conn, t verbs.EventType, _ []byte) {
		c, _ := ac.Tag.(*conn)
		switch {
		case c == nil:
		case t == verbs.EventConnectResponse:
			s.client.event(func() { s.ready(c) })
		case t == verbs.EventEstablished && s.cell.Request:
			s.client.event(func() { s.request(c) })
		case t != verbs.EventEstablished:
			s.fail(c)
		}
	}
	s.b.OnConnEvent = func(bc *wire.Conn, t verbs.EventType, _ []byte) {
		c, _ := bc.Tag.(*conn)
		switch {
		case c == nil:
		case t == verbs.EventEstablished:
			c.heard = true
			if s.strategy == Deferred {
				c.rts = s.now() // the wire has moved it, in this very step
			}
			s.server.event(func() { s.established(c) })
		case t == verbs.EventRTU:
			c.heard = true
		default:
			s.fail(c)
		}
	}
	s.b.OnQPEvent = func(q *wire.QP, t verbs.EventType) {
		c := s.byQP[1][q.Num()]
		if c == nil || t != verbs.EventCommEst {
			return
		}
		c.heard = true
		s.tally.CommEst++
		if s.strategy != Deferred && !s.cell.DeafToCommEst {
			s.server.event(func() { s.commEst(c) })
		}
	}
	s.a.OnCompletions = func(lane *qp.CQ) { s.completions(lane, 0, s.arrived) }
	s.b.OnCompletions = func(lane *qp.CQ) {
		s.completions(lane, 1, func(c *conn, _ *verbs.WC) {
			c.heard = true
			if c.requested {
				s.tally.Duplicated++
			}
			c.requested = true
			if s.cell.Reply {
				s.speak(c)
			}
		})
	}
}

// completions takes in a lane's completions. Those of earlier trials' queue pairs, flushed,
// mean nothing.
func (s *stage) completions(lane *qp.CQ, side int, received func(*conn, *verbs.WC)) {
	for {
		n := lane.Poll(s.wcs[:])
		if n == 0 {
			return
		}
		for i := range s.wcs[:n] {
			wc := &s.wcs[i]
			c := s.byQP[side][wc.QPN]
			switch {
			case c == nil:
			case wc.Status != verbs.WCSuccess:
				s.fail(c)
			case wc.Opcode.IsRecv():
				received(c, wc)
			}
		}
	}
}

// arrived takes in a message at the client.
func (s *stage) arrived(c *conn, wc *verbs.WC) {
	switch {
	case wc.ImmData < c.next:
		s.tally.Duplicated++
		return
	case wc.ImmData > c.next || wc.ByteLen != uint32(len(message)):
		s.tally.Misordered++
		return
	}
	if c.next == 0 {
		c.first = s.now()
	}
	if c.next++; int(c.next) == s.cell.WQEs {
		c.last = s.now()
	}
	if !c.failed {
		s.pending--
	}
}

// fail gives a connection up: what has not arrived will not.
func (s *stage) fail(c *conn) {
	if !c.failed {
		c.failed = true
		s.failed++
		s.pending -= s.cell.WQEs - int(c.next)
	}
}

func (s *stage) param() wire.ConnParam {
	p := netsim.Defaults()
	p.Timeout = s.cell.AckTimeout
	return p
}

// ready is the client's program with the REP in its hands.
func (s *stage) ready(c *conn) {
	for _, to := range []verbs.QPState{verbs.QPRTR, verbs.QPRTS} {
		attr := c.ac.Attr(to)
		s.must(s.a.Wire.Modify(s.now(), c.aq, &attr))
	}
	s.must(s.a.Wire.Ready(s.now(), c.ac, nil))
	if s.cell.Request {
		s.request(c)
	}
}

func (s *stage) request(c *conn) {
	_, err := s.a.Send(c.aq, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte("request")})
	s.must(err)
}

// trial plays one trial: opens all connections, waits for the messages, watches out for more
// than was sent, and cleans up.
func (s *stage) trial(seed uint64) {
	cell := s.cell
	s.conns = make([]*conn, cell.Conns)
	s.byServer = make(map[cm.ConnID]*conn, cell.Conns)
	s.byQP = [2]map[verbs.QPN]*conn{make(map[verbs.QPN]*conn, cell.Conns), make(map[verbs.QPN]*conn, cell.Conns)}
	s.traffic.begin(seed)
	s.client = thread{stage: s, wake: cell.ClientWake, handle: cell.Handle, luck: rand.New(rand.NewPCG(seed, luckOfClient))}
	s.server = thread{stage: s, wake: cell.ServerWake, handle: cell.Handle, luck: rand.New(rand.NewPCG(seed, luckOfServer))}
	s.luck = rand.New(rand.NewPCG(seed, luckOfRetries))
	s.pending, s.failed = cell.Conns*cell.WQEs, 0
	early := s.early()
	for i := range s.conns {
		s.dial(i)
	}
	s.run(patience, func() bool { return s.pending == 0 })
	s.run(grace, nil)
	s.tally.NotReady += s.early() - early
	s.settle()
	s.hangup()
}

// dial begins a connection.
func (s *stage) dial(i int) {
	c := &conn{index: i}
	s.conns[i] = c
	c.aq = s.a.QP(s.lanes[0], verbs.QPCap{MaxSendWR: 2, MaxRecvWR: len(s.recvs[0]), MaxRecvSGE: 1, MaxSendSGE: 1})
	c.bq = s.b.QP(s.lanes[1], verbs.QPCap{MaxSendWR: s.cell.WQEs, MaxRecvWR: len(s.recvs[1]), MaxRecvSGE: 1, MaxSendSGE: 1})
	s.byQP[0][c.aq.Num()], s.byQP[1][c.bq.Num()] = c, c
	_, err := s.a.Recv(c.aq, s.recvs[0]...)
	s.must(err)
	_, err = s.b.Recv(c.bq, s.recvs[1]...)
	s.must(err)
	p := s.param()
	p.Raw = !s.cell.ClientWire
	c.ac, err = s.a.Wire.Dial(s.now(), c.aq, wire.DialParam{
		Path: s.a.Path(s.b), Service: service, SrcPort: uint16(firstPort + i), ConnParam: p,
	})
	s.must(err)
	c.ac.Tag = c
}

// early counts the packets that came to a queue pair which was not ready for them.
func (s *stage) early() (n uint64) {
	for _, w := range []*wire.Wire{s.a.Wire, s.b.Wire} {
		n += w.QPCounters().DroppedState.Load() + w.Counters.DropNoQP.Load() + w.Counters.DropAddress.Load()
	}
	return n
}

// settle adds what became of the connections to the tally.
func (s *stage) settle() {
	t := &s.tally
	for _, c := range s.conns {
		t.Connections++
		if int(c.next) < s.cell.WQEs {
			t.Undelivered++
			continue
		}
		t.Delivered++
		t.firstByte = append(t.firstByte, int64(c.first.Sub(c.accepted)))
		t.lastByte = append(t.lastByte, int64(c.last.Sub(c.accepted)))
		t.toWire = append(t.toWire, int64(c.sent.Sub(c.rts)))
	}
}

// hangup ends the trial's connections and makes sure that nothing is left.
func (s *stage) hangup() {
	s.byQP = [2]map[verbs.QPN]*conn{} // what is flushed from now on is not ours
	for _, c := range s.conns {
		c.ac.Tag = nil
		if c.bc != nil {
			c.bc.Tag = nil
		}
		s.a.Wire.Hangup(s.now(), c.ac)
		s.a.Wire.DestroyQP(s.now(), c.aq)
	}
	s.run(goodbye, nil)
	for _, c := range s.conns {
		if c.bc != nil {
			s.b.Wire.Destroy(s.now(), c.bc)
		}
		s.b.Wire.DestroyQP(s.now(), c.bq)
	}
	s.agenda = s.agenda[:0]
	s.run(goodbye, nil)
	if n := s.a.Wire.Conns() + s.b.Wire.Conns() + s.a.Wire.QPs() + s.b.Wire.QPs(); n != 0 {
		s.must(fmt.Errorf("%d connections and queue pairs are left", n))
	}
	s.a.Log, s.b.Log = s.a.Log[:0], s.b.Log[:0]
}

// must ends the trials for an error that no strategy should meet. play recovers it.
func (s *stage) must(err error) {
	if err != nil {
		panic(stageError{err})
	}
}

// stageError carries an error out of the calls of a simulation.
type stageError struct{ error }

// play plays trials from first on.
func play(cell *Cell, strategy Strategy, seed uint64, first, n int) (t *tally, err error) {
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(stageError)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("deferral: %s %s, strategy %s, seed %d, trials %d to %d: %w",
				cell.Axis, cell.Value, strategy.Letter(), seed, first, first+n-1, e.error)
		}
	}()
	s, err := newStage(cell, strategy, mix(seed, uint64(first)))
	if err != nil {
		return nil, err
	}
	for i := range n {
		s.trial(mix(seed, uint64(first+i)))
		s.tally.Trials++
	}
	sum := s.tally // a copy: the stage goes
	return &sum, nil
}

// mix makes a seed of two numbers (SplitMix64's finisher).
func mix(a, b uint64) uint64 {
	z := a + (b+1)*0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// Streams of a trial's luck.
const (
	luckOfClient = iota + 1
	luckOfServer
	luckOfRetries
	luckOfRTUs
	luckOfPackets // and the three numbers behind it
)

func (s *stage) now() verbs.Instant { return s.net.Now() }

// uniform draws a time below d.
func (s *stage) uniform(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return time.Duration(s.luck.Int64N(int64(d)))
}

// thread is a program's thread for events: it sleeps until one comes, and handles them one
// after the other.
type thread struct {
	stage        *stage
	wake, handle time.Duration
	luck         *rand.Rand
	busy         verbs.Instant
}

// event has f run when the thread has come to it.
func (t *thread) event(f func()) {
	now := t.stage.now()
	// Drawn whether needed or not, so that all strategies draw alike.
	wake := t.wake/2 + exponential(t.luck, t.wake/2)
	if t.busy <= now {
		t.busy = now.Add(wake)
	}
	t.busy = t.busy.Add(t.handle)
	t.stage.at(t.busy, f)
}

// exponential draws a time with a mean, at most ten times the mean.
func exponential(r *rand.Rand, mean time.Duration) time.Duration {
	return time.Duration(min(r.ExpFloat64(), 10) * float64(mean))
}

// agenda is what programs will do, by time.
type agenda []item

type item struct {
	at    verbs.Instant
	order uint64
	f     func()
}

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	return a[i].at < a[j].at || a[i].at == a[j].at && a[i].order < a[j].order
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(item)) }
func (a *agenda) Pop() any {
	old := *a
	x := old[len(old)-1]
	*a = old[:len(old)-1]
	return x
}

// at has f run at a time, outside of any step.
func (s *stage) at(t verbs.Instant, f func()) {
	s.order++
	heap.Push(&s.agenda, item{t, s.order, f})
}

// run lets network and programs go on until done, at most for limit of virtual time.
func (s *stage) run(limit time.Duration, done func() bool) {
	end := s.now().Add(limit)
	for {
		for len(s.agenda) > 0 && s.agenda[0].at <= s.now() {
			heap.Pop(&s.agenda).(item).f()
		}
		until := end
		if len(s.agenda) > 0 {
			until = min(end, s.agenda[0].at)
		}
		over := false
		s.net.Run(until.Sub(s.now()), func() bool {
			over = done != nil && done()
			return over || len(s.agenda) > 0 && s.agenda[0].at < until
		})
		if over || s.now() >= end && (len(s.agenda) == 0 || s.agenda[0].at > end) {
			return
		}
	}
}

// commIDs returns the two IDs at the beginning of a CM message: the sender's and the receiver's.
func commIDs(mad []byte) (local, remote cm.ConnID) {
	return cm.ConnID(binary.BigEndian.Uint32(mad[24:])), cm.ConnID(binary.BigEndian.Uint32(mad[28:]))
}
