package wire

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Bounds of one step: so much is done before the owner is asked whether to go on.
const (
	recvBatch   = 64  // received buffers, each at most one GRO train
	packetsEach = 128 // packets from one queue pair before the next has its turn: a train
	bytesEach   = 256 << 10
	turns       = 256 // queue pair turns
)

// Upcalls is what a wire tells its owner's side. The calls come during a step, under the
// owner: they must not block, call back into the wire, or keep slices they are given.
type Upcalls interface {
	// ConnRequest: a peer wants to connect to a service that Listen named. c is answered
	// with Accept or Reject. req lives only during the call; its private data may be kept.
	ConnRequest(c *Conn, req *cm.Event)
	// ConnEvent: EventEstablished, EventRejected, EventUnreachable, EventConnectError,
	// EventDisconnected, EventTimewaitExit or EventRTU happened to c; c.PrivateData and
	// c.Reason say more.
	ConnEvent(c *Conn, t verbs.EventType, private []byte)
	// QPEvent: an asynchronous event of a queue pair.
	QPEvent(q *QP, t verbs.EventType)
	// Completions: completions became visible in a lane; solicited if one of them was
	// asked for with Solicited, or is an error.
	Completions(lane *qp.CQ, solicited bool)
}

// Tap sees every datagram that a wire sends or receives, before anything is checked. It
// must not block or keep the slices.
type Tap interface {
	// Packet: id is the IPv4 Identification, as sent or as believed on receipt.
	Packet(now verbs.Instant, out bool, src, dst netip.AddrPort, id uint16, pieces [][]byte)
}

// Config says what a wire is made of. Link, Mem, Upcalls and Rand are required.
type Config struct {
	Link    link.Link
	Mem     qp.Memory
	Upcalls Upcalls
	// Rand returns numbers that peers cannot predict.
	Rand func() uint32
	// Index is the wire's number on its port, below Wires.
	Index int
	// Wires is how many the port has: a power of two up to MaxWires; 0 means 1. With more than
	// one Siblings is required.
	Wires    int
	Siblings Siblings
	// GUID identifies the device to connection managers.
	GUID uint64
	// CM sets the timers of connection management; GUID, UDPPort and Rand are filled in.
	CM cm.Config
	// MaxMTU is the largest path MTU to agree to; 0 means 4096.
	MaxMTU verbs.MTU
	// Tap may be nil.
	Tap Tap
}

// Counters are totals since the wire was opened. Written by the owner, read by anyone.
type Counters struct {
	DatagramsIn, DatagramsOut, BytesIn, BytesOut atomic.Uint64
	// TrainsOut counts sends of more than one datagram, TrainsIn likewise.
	TrainsOut, TrainsIn atomic.Uint64
	// Drops of received datagrams, by reason.
	DropTruncated, DropDecode, DropPKey, DropNoQP, DropTransport, DropAddress, DropICRC, DropQKey, DropGSI atomic.Uint64
	// Misdirected counts datagrams that were another wire's of the port and were given to it,
	// DropMisdirected those that it had no room for.
	Misdirected, DropMisdirected atomic.Uint64
	// SolvedIDs counts datagrams whose IPv4 Identification had to be solved for, FarIDs
	// those solved far from the peer's earlier ones, and those refused for it (DropICRC).
	SolvedIDs, FarIDs atomic.Uint64
	// SendBlocked counts how often the link took less than was offered.
	SendBlocked atomic.Uint64
	// DropBlocked counts trains dropped because memory in them was to be let go of while the
	// link was blocked.
	DropBlocked atomic.Uint64
	Steps       atomic.Uint64
}

// Wire is one wire; see the package comment. Make one with New.
type Wire struct {
	cfg   Config
	link  link.Link
	local netip.AddrPort
	cm    *cm.CM
	env   qp.Env
	up    Upcalls
	// Counters may be read by anyone.
	Counters Counters

	ready  readyList
	qps    qpTable
	ahs    ahTable
	from   sources
	asking map[cm.SIDRID]func(*cm.Event)
	groups map[netip.Addr][]*QP // attached to multicast groups
	run    runQueue
	timers timers
	peers  map[netip.AddrPort]*peer
	conns  map[cm.ConnID]*Conn
	tx     transmitter
	gsiPSN verbs.PSN
	rx     [recvBatch]link.Rx
	in     roce.Packet
	out    qp.Out
	mad    cm.Out
	full   bool // the last receive filled its batch
	owing  bool // the last step left its answers to the next one
	unsent int  // datagrams received since anything was last sent
	hurry  bool // among what is to be sent is more than acknowledgements
	failed error
}

// New makes a wire over an open link.
func New(cfg Config) (*Wire, error) {
	if cfg.Link == nil || cfg.Mem == nil || cfg.Upcalls == nil || cfg.Rand == nil {
		return nil, errors.New("wire: Link, Mem, Upcalls and Rand are required")
	}
	cfg.Wires = max(cfg.Wires, 1)
	if cfg.Wires > MaxWires || cfg.Wires&(cfg.Wires-1) != 0 {
		return nil, fmt.Errorf("wire: one of %d wires, want a power of two up to %d", cfg.Wires, MaxWires)
	}
	if cfg.Index < 0 || cfg.Index >= cfg.Wires {
		return nil, fmt.Errorf("wire: index %d, want 0 to %d", cfg.Index, cfg.Wires-1)
	}
	if cfg.Wires > 1 && cfg.Siblings == nil {
		return nil, errors.New("wire: Siblings is required")
	}
	if cfg.MaxMTU == 0 {
		cfg.MaxMTU = verbs.MTU4096
	}
	if !cfg.MaxMTU.Valid() {
		return nil, fmt.Errorf("wire: path MTU code %d, want 1 to 5", uint8(cfg.MaxMTU))
	}
	w := &Wire{
		cfg: cfg, link: cfg.Link, local: cfg.Link.LocalAddr(), up: cfg.Upcalls,
		qps:   newQPTable(uint32(cfg.Index), cfg.Rand()),
		peers: make(map[netip.AddrPort]*peer),
		conns: make(map[cm.ConnID]*Conn),
	}
	w.env.Mem, w.env.AHs = cfg.Mem, &w.ahs
	w.ahs.max = MaxAH
	w.from.seed = uint64(cfg.Rand())<<32 | uint64(cfg.Rand())
	cc := cfg.CM
	cc.GUID, cc.UDPPort, cc.Rand = cfg.GUID, w.local.Port(), cfg.Rand
	cc.Wire, cc.Wires = cfg.Index, cfg.Wires
	if cfg.Wires > 1 {
		cc.Peers = cfg.Siblings
	}
	if a := w.local.Addr(); !a.IsUnspecified() {
		cc.Ours = func(b netip.Addr) bool { return a == b }
	}
	w.cm = cm.New(cc)
	w.tx.init(w)
	return w, nil
}

// QPCounters returns the counters of the queue pairs. Anyone may read them.
func (w *Wire) QPCounters() *qp.Counters { return &w.env.Counters }

// CMCounters returns the counters of the connection manager. Anyone may read them.
func (w *Wire) CMCounters() *cm.Counters { return w.cm.Counters() }

// LocalAddr returns the link's address. Anyone may ask.
func (w *Wire) LocalAddr() netip.AddrPort { return w.local }

// Err returns why the link died, or nil.
func (w *Wire) Err() error { return w.failed }

// Conns returns the number of connections, those in timewait included.
func (w *Wire) Conns() int { return len(w.conns) }

// QPs returns the number of queue pairs.
func (w *Wire) QPs() int { return w.qps.live }

// Step does a bounded amount of whatever there is to do: takes what posters left, lets
// deadlines pass, receives, answers, sends, and makes events and completions visible. It returns how much it did; 0 means that nothing is left until a datagram, a
// Ring or NextDeadline.
//
// A step that makes received messages visible, or has placed data that a program may look for,
// ends there, and leaves the acknowledgements to a later
// one or to Transmit: they are not on the path to the message's reader. An acknowledgement
// leaves together with what the reader posts, or when the link has nothing more to receive,
// or after answerAfter datagrams: so a stream is acknowledged once for many trains.
func (w *Wire) Step(now verbs.Instant) (work int) {
	w.Counters.Steps.Add(1)
	posted := w.takeReady()
	work += posted + w.expire(now)
	if w.owing && (posted > 0 || w.unsent >= answerAfter) {
		work += w.transmit(now)
	}
	n := w.receive(now)
	w.unsent += n
	work += n
	if work == 0 && w.idle() {
		return 0 // as most steps of one who polls end
	}
	if visible := w.deliver(now); (visible || n > 0 && !w.hurry) && w.run.n > 0 {
		w.owing = true
		return work
	}
	work += w.transmit(now)
	w.deliver(now)
	return work
}

// idle reports whether neither transmit nor deliver would find anything.
func (w *Wire) idle() bool {
	return w.run.n == 0 && w.run.touched == nil && len(w.tx.msgs) == 0 && w.tx.later.n == 0 &&
		len(w.env.Dirty) == 0 && len(w.env.Low) == 0 && !w.cm.Pending()
}

// answerAfter is how many datagrams may be received while answers wait.
const answerAfter = 128

// answerFirst sends what the last step left to the next one, before a queue pair that may owe
// it is ended: who has read the last message may hang up at once, and the peer is still to
// learn that the message arrived.
func (w *Wire) answerFirst(now verbs.Instant) {
	if w.owing {
		w.transmit(now)
	}
}

// Transmit is the sending half of a step, for a poster that borrows the wire: it takes what
// posters left and sends it, and receives nothing.
func (w *Wire) Transmit(now verbs.Instant) (work int) {
	work = w.takeReady() + w.transmit(now)
	w.deliver(now)
	return work
}

// Pending reports whether a step would find something to do without any packet or deadline.
func (w *Wire) Pending() bool {
	return w.failed == nil && w.tx.deadline() == verbs.Never && (w.run.n > 0 || w.cm.Pending()) || !w.ready.empty()
}

// More reports whether the last step may have left something undone because of a bound.
func (w *Wire) More() bool { return w.full || w.Pending() }

// Shutdown says goodbye to the peers of all connections, once, and forgets everything. The
// wire must not be used afterwards.
func (w *Wire) Shutdown(now verbs.Instant) {
	for _, c := range w.conns {
		w.Destroy(now, c)
	}
	w.transmit(now)
	w.qps.each(func(q *QP) { w.DestroyQP(now, q) })
	if w.failed == nil {
		w.failed = errShutdown
	}
}

var errShutdown = errors.New("wire: shut down")

// NextDeadline returns when Step must be called again at the latest; verbs.Never for no
// such time. It may be earlier than anything really happens.
func (w *Wire) NextDeadline() verbs.Instant {
	return min(w.timers.next(), w.cm.Deadline(), w.tx.deadline())
}

// ExactDeadline is NextDeadline by one who has the time to look whether the timers that seem to come
// up next do.
func (w *Wire) ExactDeadline() verbs.Instant {
	w.timers.refresh(8)
	return w.NextDeadline()
}

// Ring marks a queue pair ready: its queues have something new. Any goroutine; no locks, no
// allocation. It returns true for the first mark since the owner last looked: then, and only
// then, somebody may have to wake the owner.
func (w *Wire) Ring(q *QP) bool { return w.ready.push(q) }

func (w *Wire) takeReady() (work int) {
	for q := w.ready.takeAll(); q != nil; {
		next := q.nextReady
		q.nextReady = nil
		q.marked.Store(false) // before its queues are looked at; see readyList
		w.schedule(q)
		q = next
		work++
	}
	return work
}

// expire lets the deadlines up to now pass.
func (w *Wire) expire(now verbs.Instant) (work int) {
	for range turns {
		q := w.timers.pop(now)
		if q == nil {
			break
		}
		if q.q.Deadline() <= now {
			q.q.HandleTimeout(now)
			w.schedule(q)
			w.touch(q)
			if q.peer != nil {
				w.wakeBlocked(q.peer) // what went back is no longer in flight
				q.peer.note()
			}
			work++
		}
		if at := q.appeal.until; at != 0 && at <= now {
			w.endAppeal(now, q)
			work++
		}
		w.timers.update(q, q.deadline())
	}
	if w.cm.Deadline() <= now {
		w.cm.HandleTimeout(now)
		w.cmEvents(now)
		work++
	}
	return work
}

// schedule puts q at the end of the run queue, once.
func (w *Wire) schedule(q *QP) {
	if !q.queued && !q.closed {
		q.queued = true
		w.run.push(q)
	}
}

// deliver makes events and then completions visible, and reports whether there were any of
// the latter.
func (w *Wire) deliver(now verbs.Instant) (completions bool) {
	for q := w.run.touched; q != nil; {
		next := q.nextTouched
		q.nextTouched, q.touched = nil, false
		if set := q.q.TakeEvents(); set != 0 {
			w.qpEvents(now, q, set)
		}
		if q.appeal.until != 0 {
			w.hear(now, q)
		}
		q = next
	}
	w.run.touched = nil
	for i, s := range w.env.Low {
		if s.OnLow != nil {
			s.OnLow()
		}
		w.env.Low[i] = nil
	}
	w.env.Low = w.env.Low[:0]
	completions = len(w.env.Dirty) > 0
	for i, lane := range w.env.Dirty {
		w.up.Completions(lane, lane.Commit())
		w.env.Dirty[i] = nil
	}
	w.env.Dirty = w.env.Dirty[:0]
	return completions
}

// touch remembers that q may have events for deliver.
func (w *Wire) touch(q *QP) {
	if !q.touched {
		q.touched = true
		q.nextTouched = w.run.touched
		w.run.touched = q
	}
}

// runQueue is a FIFO of queue pairs with something to do, and the list of those touched in
// this step.
type runQueue struct {
	first, last *QP
	n           int
	touched     *QP
}

func (r *runQueue) push(q *QP) {
	q.nextRun = nil
	if r.last == nil {
		r.first = q
	} else {
		r.last.nextRun = q
	}
	r.last = q
	r.n++
}

func (r *runQueue) pop() *QP {
	q := r.first
	r.first = q.nextRun
	if r.first == nil {
		r.last = nil
	}
	q.nextRun = nil
	r.n--
	return q
}
