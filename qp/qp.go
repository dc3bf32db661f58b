package qp

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Config says what a queue pair is made of.
type Config struct {
	Num  verbs.QPN
	Type verbs.QPType
	Cap  verbs.QPCap // zero fields take the defaults that verbs.QPCap documents
	// SQSigAll makes every send signaled.
	SQSigAll bool
	PD       PD
	// SendCQ and RecvCQ are lanes of the wire that will own the queue pair; required; they
	// may be the same.
	SendCQ, RecvCQ *CQ
	// SRQ, when not nil, is where receives come from; it must be of the same PD. Cap's sizes of
	// the receive queue mean nothing then.
	SRQ *SRQ
	// MTU bounds the messages of UD, which are one packet; 0 means 4096. RC and UC have the
	// path MTU of their peer instead.
	MTU verbs.MTU
}

// Limits of a queue pair's size beyond those in verbs.QPCap.
const (
	maxWR     = 1 << 16
	maxSGE    = 32
	maxInline = 1024
)

const _ = uint(MaxGather - maxSGE) // a packet's payload fits the gather list

// QP is a queue pair: the state machine, the two queues, a requester that turns send WQEs
// into packets and answers into completions, and a responder that does the peer's requests.
//
// PostSend, PostRecv, State, Num, Type, Cap and Published may be called by any goroutine,
// everything else by the owner of the wire only. Inside, PSNs are counted in 64 bits
// (sequence numbers whose low 24 bits are the PSN), so that nothing ever wraps or is
// compared modulo anything; only the way in from a packet is modular (extend).
type QP struct {
	num    verbs.QPN
	typ    verbs.QPType
	qpCap  verbs.QPCap
	pd     PD
	env    *Env
	sendCQ *CQ
	recvCQ *CQ
	sq     *SendQueue
	rq     *RecvQueue
	srq    *SRQ
	last   lastWQE
	// spans runs parallel to the send queue: which PSNs the WQE in a slot takes.
	spans []span

	attr     verbs.QPAttr
	events   EventSet
	deadline verbs.Instant

	// armed are the RTS attributes for the move that the first request makes; rtrAt is when
	// RTR was entered; commEst says that COMM_EST was raised in this life.
	armed    *verbs.QPAttr
	rtrAt    verbs.Instant
	state    verbs.QPState // the same as in both queues
	commEst  bool
	notifySQ bool // raise EvSQDrained once drained
	closed   bool

	mtu      uint32
	mtuShift uint8
	udMTU    verbs.MTU

	win  *Window
	req  requester
	resp responder

	deferred   atomic.Uint64
	deferredNs atomic.Int64
}

// span is the PSN range of a send WQE that was started: n sequence numbers from first.
type span struct {
	first uint64
	n     uint32
}

func (s *span) end() uint64 { return s.first + uint64(s.n) }

// seqBase is added to a starting PSN to make a sequence number, so that the numbers just
// before the first one exist too. It is a multiple of 2^24.
const seqBase = 1 << 32

// psnOf returns the 24 bits that travel.
func psnOf(seq uint64) verbs.PSN { return verbs.PSN(seq) & verbs.PSNMask }

// extend returns the sequence number nearest to ref that has this PSN.
func extend(ref uint64, psn verbs.PSN) uint64 {
	return ref + uint64(int64(psn.Sub(psnOf(ref))))
}

// New makes a queue pair in RESET. It fails with an error that wraps verbs.ErrBadAttr when
// a size is out of range, a CQ is missing or the type is not offered.
func New(cfg Config, env *Env) (*QP, error) {
	if cfg.Type != verbs.RC && cfg.Type != verbs.UC && cfg.Type != verbs.UD {
		return nil, fmt.Errorf("%w: TYPE: %v is not RC, UC or UD", verbs.ErrBadAttr, cfg.Type)
	}
	if cfg.MTU != 0 && !cfg.MTU.Valid() {
		return nil, fmt.Errorf("%w: MTU: code %d is not in 1..5", verbs.ErrBadAttr, uint8(cfg.MTU))
	}
	if cfg.SendCQ == nil || cfg.RecvCQ == nil {
		return nil, fmt.Errorf("%w: CQ: a queue pair needs a send and a receive CQ", verbs.ErrBadAttr)
	}
	if cfg.Num > verbs.QPNMask {
		return nil, fmt.Errorf("%w: NUM: %#x exceeds 24 bits", verbs.ErrBadAttr, uint32(cfg.Num))
	}
	if err := checkSRQ(&cfg); err != nil {
		return nil, err
	}
	c, err := resolveCap(cfg.Cap)
	if err != nil {
		return nil, err
	}
	return newAt(cfg, c, env, 0), nil
}

// newAt makes a queue pair whose queue positions begin at start, for tests of their wrap.
func newAt(cfg Config, c verbs.QPCap, env *Env, start uint64) *QP {
	q := &QP{
		num: cfg.Num, typ: cfg.Type, qpCap: c, pd: cfg.PD, env: env,
		sendCQ: cfg.SendCQ, recvCQ: cfg.RecvCQ,
		sq:       newSendQueue(cfg.Type, c, cfg.SQSigAll, env.Mem, cfg.PD, start),
		deadline: verbs.Never,
	}
	q.qpCap.MaxSendWR = q.sq.Depth()
	if q.srq = cfg.SRQ; q.srq == nil {
		q.rq = newRecvQueue(c, start)
		q.qpCap.MaxRecvWR = q.rq.Depth()
	} else {
		q.rq = newRecvQueue(verbs.QPCap{MaxRecvWR: 1, MaxRecvSGE: q.srq.maxSGE}, start)
		q.qpCap.MaxRecvWR, q.qpCap.MaxRecvSGE = 0, 0
	}
	if q.typ == verbs.UD {
		if q.udMTU = cfg.MTU; q.udMTU == 0 {
			q.udMTU = verbs.MTU4096
		}
		q.sq.mtu = uint32(q.udMTU.Bytes())
	}
	q.spans = make([]span, q.sq.Depth())
	q.win = NewWindow(WindowConfig{})
	q.forget()
	return q
}

// resolveCap fills in defaults and checks limits.
func resolveCap(c verbs.QPCap) (verbs.QPCap, error) {
	for _, f := range []struct {
		name      string
		v         *int
		def, most int
	}{
		{"MaxSendWR", &c.MaxSendWR, 128, maxWR},
		{"MaxRecvWR", &c.MaxRecvWR, 128, maxWR},
		{"MaxSendSGE", &c.MaxSendSGE, 4, maxSGE},
		{"MaxRecvSGE", &c.MaxRecvSGE, 4, maxSGE},
		{"MaxInlineData", &c.MaxInlineData, 64, maxInline},
	} {
		switch {
		case *f.v == 0:
			*f.v = f.def
		case *f.v < 0 && f.v == &c.MaxInlineData:
			*f.v = 0
		case *f.v < 0 || *f.v > f.most:
			return c, fmt.Errorf("%w: CAP: %s %d is not in 1..%d", verbs.ErrBadAttr, f.name, *f.v, f.most)
		}
	}
	return c, nil
}

// PostSend puts a chain of send requests into the send queue: see [SendQueue.Post]. Any
// goroutine.
func (q *QP) PostSend(wrs []verbs.SendWR) (n int, ring bool, err error) { return q.sq.Post(wrs) }

// PostRecv puts a chain of receive requests into the receive queue: see [RecvQueue.Post].
// With an SRQ it is ErrBadWR. Any goroutine.
func (q *QP) PostRecv(wrs []verbs.RecvWR) (n int, ring bool, err error) {
	if q.srq != nil {
		return 0, false, verbs.ErrBadWR
	}
	return q.rq.Post(wrs)
}

// State returns the present state. Any goroutine.
func (q *QP) State() verbs.QPState { return q.sq.stateNow() }

// Num returns the queue pair's number. Any goroutine.
func (q *QP) Num() verbs.QPN { return q.num }

// SRQ returns the shared receive queue, nil when there is none. Any goroutine.
func (q *QP) SRQ() *SRQ { return q.srq }

// Type returns the transport service. Any goroutine.
func (q *QP) Type() verbs.QPType { return q.typ }

// Cap returns the sizes, rounded up to what they really are. Any goroutine.
func (q *QP) Cap() verbs.QPCap { return q.qpCap }

// Published tells how many WQEs the last move from RTR to RTS published and how long after
// the move to RTR that was; zeros before the first. Any goroutine.
func (q *QP) Published() (deferred uint64, wait time.Duration) {
	return q.deferred.Load(), time.Duration(q.deferredNs.Load())
}

// Attr returns the attributes and the state (ibv_query_qp).
func (q *QP) Attr() verbs.QPAttr {
	a := q.attr
	a.State, a.CurState = q.state, q.state
	return a
}

// SetWindow gives the queue pair the window that all queue pairs of its wire to this peer
// share. Call it before the move to RTS; until then a window of its own stands in. When the
// path changes later, in SQD, what is in flight on the old path is sent again on the new one.
func (q *QP) SetWindow(w *Window) {
	q.goBack()
	q.win = w
}

// Deadline is when HandleTimeout wants to be called; verbs.Never for never.
func (q *QP) Deadline() verbs.Instant { return q.deadline }

// TakeEvents returns the events that are pending, and clears them.
func (q *QP) TakeEvents() EventSet {
	e := q.events
	q.events = 0
	return e
}

// Hurries reports whether something may be due to the peer that its program waits for: more than
// an acknowledgement of what it sent.
func (q *QP) Hurries() bool { return q.resp.nak != 0 || q.resp.resDue != 0 }

// Done returns the PSN that the responder expects next and how many messages it has done: what
// it takes to acknowledge all of them again. False when the queue pair is not reliable or has
// no peer in this life.
func (q *QP) Done() (next verbs.PSN, msn uint32, ok bool) {
	s := &q.resp
	return psnOf(s.epsn), s.msn & 0xFFFFFF, q.typ == verbs.RC && s.epsn >= seqBase
}

// Close forgets everything, as a move to RESET does, and gives back what was charged to the
// window. Posting fails afterwards, and Modify too.
func (q *QP) Close(verbs.Instant) {
	q.moveTo(verbs.QPReset)
	q.forget()
	q.events = 0
	q.closed = true
}

// HandlePacket takes in one packet. The wire has checked the ICRC, the P_Key, the addresses
// and that the opcode's transport is the queue pair's. p and its payload are used only
// during the call. What is wrong with it becomes a NAK, a state or a counter, never an error.
func (q *QP) HandlePacket(now verbs.Instant, p *roce.Packet) {
	if debug {
		defer q.mustHold()
	}
	if p.Opcode.IsResponse() {
		if !answersIn.has(q.state) {
			q.env.Counters.DroppedState.Add(1)
			return
		}
		q.handleResponse(now, p)
		return
	}
	if !requestsIn.has(q.state) {
		q.env.Counters.DroppedState.Add(1)
		return
	}
	switch q.typ {
	case verbs.RC:
		q.handleRequest(now, p)
	case verbs.UC:
		q.handleUC(now, p)
	default:
		panic("BUG: qp: a packet of UD without its addresses")
	}
}

var (
	// requestsIn are the states in which the peer's requests are served.
	requestsIn = states(verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPSQE)
	// answersIn are the states in which answers to our own requests mean something, and
	// requests may leave: in SQD those that were started.
	answersIn = states(verbs.QPRTS, verbs.QPSQD)
)

// NextPacket fills out with the next packet to send: what the responder owes comes first,
// then requests. Once the packet is sent or copied, and before anything else is asked of the
// queue pair, Sent says so. out.Packet.Payload and Pad stay empty.
func (q *QP) NextPacket(now verbs.Instant, out *Out) Next {
	if debug {
		defer q.mustHold()
	}
	out.reset()
	if q.resp.owes() {
		if q.resp.ackWaits() && q.typ == verbs.RC && answersIn.has(q.state) {
			if q.nextRequest(now, out) == NextPacket {
				q.resp.ackBehind++
				return NextPacket
			}
			out.reset()
		}
		if q.nextResponse(now, out) {
			q.resp.ackBehind = 0
			return NextPacket
		}
	}
	if !answersIn.has(q.state) {
		return NextNothing
	}
	if q.typ != verbs.RC {
		return q.nextUnreliable(now, out)
	}
	return q.nextRequest(now, out)
}

// Sent says that what NextPacket handed out was sent, or copied where out is Unstable: its memory
// is not read any more. Of a reliable queue pair the peer's acknowledgement frees a request; of
// the others the next poster may have its slot as soon as this returns.
func (q *QP) Sent(now verbs.Instant) {
	if q.typ != verbs.RC {
		q.departed(now)
	}
}

// header fills the fields that all our packets share.
func (q *QP) header(p *roce.Packet, op roce.Opcode, psn verbs.PSN) {
	p.Opcode = op
	// IBTA Vol 1, 17.2.8: without a pending migration MigReq is sent as 1.
	p.MigReq = true
	p.PKey = roce.DefaultPKey
	p.DestQP = q.attr.DestQPN
	p.PSN = psn
}
