package qp

import (
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// requester is the sending half of a reliable queue pair. WQEs between the send queue's
// retired and taken are started; each has a span of sequence numbers, and the spans follow
// each other without a gap:
//
//	        una          nxt                max
//	---------+------------+------------------+-------->  sequence numbers
//	 answered  in flight    to be sent again   never sent
//
// una lies in the oldest started WQE, nxt in the one at cur; going back sets nxt to una.
// A READ request is one packet, but takes as many numbers as its response has packets.
type requester struct {
	una, nxt, max uint64
	cur           uint64
	// asked ends what an answer is due for: one past the last packet that was sent with
	// AckReq, as READs and atomics are, since going back. When it is not beyond una nobody
	// owes us anything.
	asked   uint64
	askedAt verbs.Instant // when that packet left
	// unasked counts the packets and their cost since then.
	unasked     uint32
	unaskedCost int64
	charge      int64 // in the window for [una, nxt)
	inbound     uint32
	readChunk   uint32

	// reads is a ring of the ends of READ and atomic requests in flight, oldest at readHead. It
	// is made when the first of them leaves, for most connections have none.
	reads    []uint64
	readHead uint32
	readN    uint32
	failed   verbs.WCStatus // a local error found at failedAt; it waits for those before
	failedAt uint64
	wentBack uint64 // una+1 when a NAK last sent us back there; 0 for never
	rttOn    bool   // a round trip is being measured:
	rttSeq   uint64 // from the packet with this number
	rttAt    verbs.Instant
	retries  uint8
	rnrLeft  uint8
	backoff  uint8
	// probe: the peer is silent, and una alone is sent again, to hear whether it, or only the
	// answer, is missing (as RFC 5682 does for TCP).
	probe    bool
	rnrWait  bool
	rnrUntil verbs.Instant
	// The timers, Never when they are not set: of early retransmission, of the ack timeout,
	// and of a READ that waits for room in our own receive buffer since readWait.
	earlyAt, ackAt verbs.Instant
	readWait       verbs.Instant
	heard          bool // the peer has answered something in this life
	fullAcked      bool // and that was, or was behind, a packet of full size
	pathMTURaised  bool
}

// askEvery is the number of packets after which an answer is asked for in mid-message.
const askEvery = 32

// idle clears the timers.
func (r *requester) idle() {
	r.earlyAt, r.ackAt, r.readWait = verbs.Never, verbs.Never, verbs.Never
	r.rnrWait = false
}

// startRequester begins a life in RTS.
func (q *QP) startRequester() {
	first := seqBase + uint64(q.attr.SQPSN)
	q.req = requester{
		una: first, nxt: first, max: first, asked: first, cur: q.sq.taken,
		reads: ringOf(q.req.reads, int(q.attr.MaxQPRdAtomic)), readChunk: q.win.readChunk(q.mtu),
		retries: 0, rnrLeft: q.attr.RNRRetry,
	}
	q.req.idle()
}

// ringOf returns a ring of n elements in the old one if that has room, else nil.
func ringOf(old []uint64, n int) []uint64 {
	if cap(old) >= n {
		return old[:n]
	}
	return nil
}

// packets returns how many packets a message of length bytes takes: at least one.
func (q *QP) packets(length uint32) uint32 {
	return max(1, uint32((uint64(length)+uint64(q.mtu)-1)>>q.mtuShift))
}

// isRead reports operations whose answer is data, and which only that answer completes.
func isRead(op verbs.Opcode) bool {
	return op == verbs.RDMARead || op == verbs.AtomicCmpAndSwp || op == verbs.AtomicFetchAdd
}

// isLocal reports operations that send nothing; Service does them.
func isLocal(op verbs.Opcode) bool { return op == verbs.LocalInv || op == verbs.BindMW }

// sendOpcodes are the wire's opcodes for a message by its place: middle, last, first, only.
var sendOpcodes = [...][4]roce.Opcode{
	verbs.Send:             {roce.RCSendMiddle, roce.RCSendLast, roce.RCSendFirst, roce.RCSendOnly},
	verbs.SendWithImm:      {roce.RCSendMiddle, roce.RCSendLastImm, roce.RCSendFirst, roce.RCSendOnlyImm},
	verbs.SendWithInv:      {roce.RCSendMiddle, roce.RCSendLastInv, roce.RCSendFirst, roce.RCSendOnlyInv},
	verbs.RDMAWrite:        {roce.RCWriteMiddle, roce.RCWriteLast, roce.RCWriteFirst, roce.RCWriteOnly},
	verbs.RDMAWriteWithImm: {roce.RCWriteMiddle, roce.RCWriteLastImm, roce.RCWriteFirst, roce.RCWriteOnlyImm},
}

// solicitedOps are the operations on which the Solicited flag means something.
const solicitedOps = opSet(1<<verbs.Send | 1<<verbs.SendWithImm | 1<<verbs.SendWithInv | 1<<verbs.RDMAWriteWithImm)

// nextRequest cuts the next request packet from the WQE at cur, which it starts if need be.
func (q *QP) nextRequest(now verbs.Instant, out *Out) Next {
	r := &q.req
	if r.rnrWait || r.failed != verbs.WCSuccess && r.cur == r.failedAt {
		return NextNothing
	}
	fresh := r.cur == q.sq.taken
	if fresh {
		if _, fate := q.sq.next(); fate != FateSend {
			return NextNothing
		}
	}
	w := q.sq.at(r.cur)
	if fresh {
		// In the order of the queue: nothing starts before a local operation is done, and
		// a fenced WQE waits for every READ and atomic before it.
		if isLocal(w.Opcode) || w.Flags&verbs.Fence != 0 && r.readN > 0 {
			return NextNothing
		}
	}
	if isRead(w.Opcode) {
		return q.nextReadRequest(now, out, w, fresh)
	}
	return q.nextData(now, out, w, fresh)
}

// begin gives the WQE at cur its span when its first packet leaves: from then on it is
// started, and SQD lets it finish.
func (q *QP) begin(n uint32) {
	*q.spanAt(q.req.cur) = span{first: q.req.nxt, n: n}
	q.sq.take()
}

func (q *QP) spanAt(pos uint64) *span { return &q.spans[pos&q.sq.mask] }

// nextData sends a packet of a SEND or WRITE.
func (q *QP) nextData(now verbs.Instant, out *Out, w *SendWQE, fresh bool) Next {
	r := &q.req
	first, n := r.nxt, uint32(0)
	if fresh {
		n = q.packets(w.Length)
	} else {
		s := q.spanAt(r.cur)
		first, n = s.first, s.n
	}
	i := uint32(r.nxt - first)
	off := i << q.mtuShift
	size := min(w.Length-off, q.mtu)
	cost := q.win.cost(size)
	if !q.mayFly(cost) && q.mustWait(cost) {
		return q.blocked(cost)
	}
	if st := q.gather(out, r.cur, w, off, size); st != verbs.WCSuccess {
		if fresh {
			q.begin(n)
		}
		q.failLocal(now, st)
		return NextNothing
	}
	if fresh {
		q.begin(n)
	}

	p := &out.Packet
	place := 0
	last := i+1 == n
	if i == 0 {
		place = 2
	}
	if last {
		place++
	}
	q.header(p, sendOpcodes[w.Opcode][place], psnOf(r.nxt))
	if i == 0 && p.Opcode.HasRETH() {
		p.RETH = roce.RETH{VA: w.RemoteAddr, RKey: w.RKey, DMALen: w.Length}
	}
	if last {
		p.Imm = w.ImmData
		p.InvRKey = w.RKey
		p.Solicited = w.Flags&verbs.Solicited != 0 && solicitedOps>>w.Opcode&1 != 0
	}
	// An answer is asked for at the end of a message, often enough in a long one, and by
	// whatever the window lets no other packet follow.
	p.AckReq = last || r.unasked+1 >= askEvery || 2*(r.unaskedCost+cost) >= q.win.most(cost) || !q.fliesAfter(cost)
	q.sent(now, 1, cost, p.AckReq)
	if n == 1 && size <= datagramFree && r.charge == cost {
		q.win.passing(q.win.used - cost)
	}
	if last {
		r.cur++
	}
	return NextPacket
}

// bound is how many PSNs the queue pair may have unanswered.
func (q *QP) bound() uint64 {
	if q.req.probe {
		return 1
	}
	return uint64(q.win.cfg.PSNs)
}

// fits reports whether the window has room for a packet of this cost. What follows packets that
// asked for no answer is not stopped by politeness, but by the next that asks.
func (q *QP) fits(cost int64) bool {
	most := q.win.limit
	if q.req.unasked == 0 {
		most = q.win.most(cost)
	}
	return q.win.used+cost <= most
}

// mayFly reports whether a packet of this cost is within the queue pair's bound of PSNs and
// the peer's window.
func (q *QP) mayFly(cost int64) bool {
	return q.req.nxt-q.req.una < q.bound() && q.fits(cost)
}

// blocked is the answer when mayFly said no: the window's room comes back from anywhere,
// the queue pair's own bound only with a packet for it.
func (q *QP) blocked(cost int64) Next {
	if q.fits(cost) {
		return NextNothing
	}
	q.win.refuse(cost)
	q.env.Counters.WindowBlocked.Add(1)
	return NextBlocked
}

// fliesAfter reports whether after a packet of this cost a full one could follow.
func (q *QP) fliesAfter(cost int64) bool {
	full := q.win.cost(q.mtu)
	return q.req.nxt+1-q.req.una < q.bound() && q.win.used+cost+full <= q.win.most(full)
}

// mustWait says whether a packet that may not fly has to wait. While the peer owes nobody an
// answer one may always leave, whatever the windows say, and asks for one: so nothing ever
// waits for an acknowledgement that nobody was asked for. In a window that others fill there
// will be one: who fills it has asked.
func (q *QP) mustWait(cost int64) bool {
	r := &q.req
	return r.asked > r.una || !q.fits(cost) && q.win.used > r.charge
}

// sent moves the requester past a packet that takes n numbers.
func (q *QP) sent(now verbs.Instant, n uint32, cost int64, ask bool) {
	r := &q.req
	again := r.nxt < r.max
	psn := r.nxt
	r.nxt += uint64(n)
	if r.nxt > r.max {
		r.max = r.nxt
	}
	r.charge += cost
	q.win.charge(cost)
	r.unasked++
	r.unaskedCost += cost
	if again {
		q.env.Counters.Retransmits.Add(1)
	}
	if ask {
		r.asked, r.askedAt = r.nxt, now
		r.unasked, r.unaskedCost = 0, 0
		if !again && !r.rttOn {
			r.rttOn, r.rttSeq, r.rttAt = true, psn, now
		}
	}
	q.armAck(now, ask)
}

// failLocal notes that the WQE at cur cannot be sent. Those before it are still to be
// answered, so that completions stay in order; then it fails.
func (q *QP) failLocal(now verbs.Instant, st verbs.WCStatus) {
	r := &q.req
	r.failed, r.failedAt = st, r.cur
	if r.cur == q.sq.retired.Load() {
		q.failOldest(now, st)
	}
}
