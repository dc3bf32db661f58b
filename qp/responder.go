package qp

import (
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// responder is the receiving half of a reliable queue pair: it does the peer's requests in
// PSN order and owes answers.
type responder struct {
	// epsn is the sequence number expected next, msn the count of messages done.
	epsn uint64
	msn  uint32
	mode mode
	// got is how much of the present message was placed. A SEND goes to the receive WQE
	// that is taken and not retired, a WRITE to va and rkey; length is the WRITE's.
	got    uint64
	va     uint64
	rkey   uint32
	length uint32

	// What is owed: an ACK of all that was done (ackDue), a NAK (nak, 0 for none) of epsn,
	// READ responses and atomics' answers in res. fatal says that the NAK is the reason for
	// which the queue pair went to ERR: it is sent even there.
	ackDue bool
	fatal  bool
	nak    uint8
	// ackBehind counts the requests that were sent ahead of the ACK that is due.
	ackBehind uint8
	// quiet: the gap or the missing receive at epsn is reported, or about to be. What lies
	// behind it is dropped without a word until it comes; ahead is one past the newest drop.
	quiet bool
	ahead uint64

	// res remembers the last READs and atomics, so that they can be answered again:
	// a ring of depth, resN of them, the newest at resLast. It is made when the first of them
	// comes, for most connections have none. resDue counts those with answers due;
	// answering is the oldest of these, nil when it must be looked for.
	res       []resource
	depth     uint32
	resLast   uint32
	resN      uint32
	resDue    uint32
	answering *resource
}

// mode is where the responder is in the order of packets.
type mode uint8

const (
	betweenMessages mode = iota
	inSend
	inWrite
)

// start begins a life: first is the PSN expected first, depth the peer's READs and atomics
// that may be outstanding.
func (s *responder) start(first uint64, depth int) {
	res := s.res
	if cap(res) < depth {
		res = nil
	} else {
		res = res[:depth]
		clear(res)
	}
	*s = responder{epsn: first, res: res, depth: uint32(depth)}
}

// owes reports whether nextResponse has something to send.
func (s *responder) owes() bool { return s.ackDue || s.nak != 0 || s.resDue != 0 }

// maxAckBehind bounds the requests that may be sent ahead of an ACK: about one train.
const maxAckBehind = 16

// ackWaits reports whether nothing but an ACK is owed, and requests may still go first: the
// peer's program waits for our message, hardly ever for the acknowledgement of its own.
func (s *responder) ackWaits() bool {
	return s.nak == 0 && s.resDue == 0 && s.ackBehind < maxAckBehind
}

// silence forgets what is owed.
func (s *responder) silence() {
	s.ackDue, s.nak, s.fatal, s.resDue, s.answering = false, 0, false, 0, nil
	for i := range s.res {
		s.res[i].due = false
	}
}

// handleRequest takes in a request packet. The order of the checks is the standard's (IBTA
// Vol 1, 9.7.4 and 9.7.5): PSN, opcode sequence, what the queue pair allows, receive and
// READ resources, length, R_Key.
func (q *QP) handleRequest(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	q.win.arrived(uint32(len(p.Payload)))
	switch d := p.PSN.Sub(psnOf(s.epsn)); {
	case d < 0:
		q.env.Counters.Duplicates.Add(1)
		q.handleDuplicate(s.epsn+uint64(int64(d)), p)
		return
	case d > 0:
		q.env.Counters.OutOfOrder.Add(1)
		s.ahead = max(s.ahead, s.epsn+uint64(d)+1)
		if !s.quiet {
			// IBTA Vol 1, 9.7.5.1.3: one NAK for a gap, then silence until it closes.
			s.quiet, s.nak = true, roce.NakPSNSeq
		}
		return
	}
	if q.state == verbs.QPRTR {
		q.establish(now)
	}
	s.quiet = false
	if s.nak != 0 {
		// What was expected has come before the NAK of it has left. The NAK will be for what
		// is then expected, if it was dropped meanwhile: see nakInto.
		s.nak = roce.NakPSNSeq
	}
	op := p.Opcode
	if op.StartsMessage() != (s.mode == betweenMessages) ||
		s.mode == inSend && !op.IsSend() || s.mode == inWrite && !op.IsWrite() {
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	switch {
	case op.IsSend():
		q.handleSend(now, p)
	case op.IsWrite():
		q.handleWrite(now, p)
	case op == roce.RCReadRequest:
		q.handleRead(now, p)
	case op.IsAtomic():
		q.handleAtomic(now, p)
	default:
		q.refuse(now, roce.NakInvReq, EvQPReqErr) // a request that is not offered here
	}
}

// refuse answers the request at epsn with a NAK that ends the connection.
func (q *QP) refuse(now verbs.Instant, syndrome uint8, ev EventSet) {
	s := &q.resp
	s.nak, s.fatal = syndrome, true
	q.selfErr(now, ev)
}

// notReady answers the request at epsn with an RNR NAK: no receive is posted.
func (q *QP) notReady() {
	s := &q.resp
	s.nak, s.quiet = roce.RNRNak(q.attr.MinRNRTimer), true
}

// recvReady reports whether a receive WQE is there to be used.
func (q *QP) recvReady() bool {
	_, fate := q.rq.next()
	return fate == FateSend || q.srq != nil && q.stage()
}

// lengthFits checks a payload against the packet's place in its message (IBTA Vol 1,
// 9.7.4.1.6): first and middle are full, a last one is not empty, and none is longer than
// the path MTU.
func (q *QP) lengthFits(p *roce.Packet) bool {
	n := uint32(len(p.Payload))
	if !p.Opcode.EndsMessage() {
		return n == q.mtu && p.Pad == 0
	}
	return n <= q.mtu && (n > 0 || p.Opcode.Only())
}

func (q *QP) handleSend(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	starts := s.mode == betweenMessages
	if starts && !q.recvReady() {
		q.notReady()
		return
	}
	if !q.lengthFits(p) {
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	if starts {
		q.rq.take()
		s.mode, s.got = inSend, 0
	}
	pos := q.rq.retired.Load()
	n := uint64(len(p.Payload))
	if s.got+n > min(q.rq.at(pos).Length, verbs.MaxMessage) {
		q.failRecv(pos, verbs.LocLenErr)
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	if n > 0 {
		if st := q.scatter(q.rq.sgList(pos), s.got, p.Payload); st != verbs.WCSuccess {
			q.failRecv(pos, st)
			q.refuse(now, roce.NakRemOp, EvQPFatal)
			return
		}
	}
	s.got += n
	if !p.Opcode.EndsMessage() {
		q.executed(p, 1)
		return
	}
	s.mode = betweenMessages
	wc := verbs.WC{Opcode: verbs.WCRecv, ByteLen: uint32(s.got)}
	if p.Opcode.HasIETH() {
		wc.Flags, wc.InvalidatedRKey = verbs.WithInv, p.InvRKey
		if !q.env.Mem.Invalidate(q.pd, q.num, p.InvRKey) {
			// rxe's class J: the receive fails, the queue pair too, and no NAK is sent.
			q.failRecv(pos, verbs.RemInvReqErr)
			q.selfErr(now, EvQPAccessErr)
			return
		}
	}
	if q.finishRecv(now, pos, &wc, p) {
		s.msn++
		q.executed(p, 1)
	}
}

func (q *QP) handleWrite(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	if q.attr.AccessFlags&verbs.RemoteWrite == 0 {
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	if p.Opcode.ConsumesRecv() && !q.recvReady() {
		q.notReady()
		return
	}
	n := uint32(len(p.Payload))
	va, rkey, length, got := s.va, s.rkey, s.length, uint32(s.got)
	if s.mode == betweenMessages {
		va, rkey, length, got = p.RETH.VA, p.RETH.RKey, p.RETH.DMALen, 0
	}
	ends := p.Opcode.EndsMessage()
	if length > verbs.MaxMessage || !q.lengthFits(p) || n > length-got || ends != (n == length-got) {
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	if s.mode == betweenMessages && length > n {
		// The whole range is checked before the first byte is placed.
		if _, st := q.env.Mem.Remote(q.pd, q.num, rkey, va, length, verbs.RemoteWrite); st != verbs.WCSuccess {
			q.refuse(now, roce.NakRemAccess, EvQPAccessErr)
			return
		}
	}
	if n > 0 {
		b, st := q.env.Mem.Remote(q.pd, q.num, rkey, va+uint64(got), n, verbs.RemoteWrite)
		if st != verbs.WCSuccess {
			q.refuseWrite(now, p)
			return
		}
		copy(b, p.Payload)
	}
	if !ends {
		s.va, s.rkey, s.length, s.got = va, rkey, length, uint64(got+n)
		s.mode = inWrite
		q.executed(p, 1)
		return
	}
	s.mode = betweenMessages
	if length > 0 {
		q.env.Mem.Placed(q.pd, rkey)
	}
	if p.Opcode.HasImm() {
		pos := q.rq.taken
		q.rq.take()
		wc := verbs.WC{Opcode: verbs.WCRecvRDMAWithImm, ByteLen: length}
		if !q.finishRecv(now, pos, &wc, p) {
			return
		}
	}
	s.msn++
	q.executed(p, 1)
}

// refuseWrite answers a WRITE whose R_Key does not allow it. The receive that a WRITE with
// immediate would have used fails with it.
func (q *QP) refuseWrite(now verbs.Instant, p *roce.Packet) {
	if p.Opcode.HasImm() {
		q.rq.take()
		q.failRecv(q.rq.retired.Load(), verbs.LocAccessErr)
	}
	q.resp.mode = betweenMessages
	q.refuse(now, roce.NakRemAccess, EvQPAccessErr)
}

// executed moves past a request that took n sequence numbers, and notes an ACK if the peer
// asked for one. It leaves with the next NextPacket, one for all that was done until then.
func (q *QP) executed(p *roce.Packet, n uint32) {
	q.resp.epsn += uint64(n)
	if p.AckReq {
		q.resp.ackDue = true
	}
}

// finishRecv completes the receive WQE at pos, the oldest one, with success; false when its
// CQ is full, and then the peer hears that its request failed.
func (q *QP) finishRecv(now verbs.Instant, pos uint64, wc *verbs.WC, p *roce.Packet) bool {
	wc.WRID, wc.QPN, wc.SrcQPN = q.rq.at(pos).WRID, q.num, q.attr.DestQPN
	if p.Opcode.HasImm() {
		wc.ImmData = p.Imm
		wc.Flags |= verbs.WithImm
	}
	if p.Solicited {
		wc.Flags |= verbs.WithSolicited
	}
	ok := q.recvCQ.add(wc, q.env)
	q.rq.retire(1)
	if !ok {
		q.noteOverrun()
		q.refuse(now, roce.NakRemOp, EvQPFatal)
	}
	return ok
}

// failRecv completes the receive WQE at pos, the oldest one, with an error.
func (q *QP) failRecv(pos uint64, st verbs.WCStatus) {
	wc := verbs.WC{WRID: q.rq.at(pos).WRID, QPN: q.num, Status: st, Opcode: verbs.WCRecv}
	if !q.recvCQ.add(&wc, q.env) {
		q.noteOverrun()
	}
	q.rq.retire(1)
	q.resp.mode = betweenMessages
}
