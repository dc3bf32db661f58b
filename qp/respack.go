package qp

import (
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// resource remembers a READ or an atomic, so that its answer can be sent, now and again: a
// READ is read again from memory, an atomic's result is kept, for it must not happen twice
// (IBTA Vol 1, 9.7.5.1.2 and 9.4.5).
type resource struct {
	first uint64 // its sequence numbers: n from first
	va    uint64
	value uint64 // an atomic's result
	n     uint32
	rkey  uint32
	// length is a READ's length in bytes.
	length uint32
	msn    uint32
	atomic bool
	// answered: the whole answer was sent once.
	answered bool
	// due: packets next to the one that holds byte end-1 are still to be sent. from is
	// where this answer began: there stands a first or only packet.
	due        bool
	from, next uint32
	end        uint32
}

// resourceAt returns the i-th newest resource.
func (s *responder) resourceAt(i uint32) *resource {
	at := s.resLast + uint32(len(s.res)) - i
	if at >= uint32(len(s.res)) {
		at -= uint32(len(s.res))
	}
	return &s.res[at]
}

// nextSlot is where the next resource goes.
func (s *responder) nextSlot() uint32 {
	if at := s.resLast + 1; at < uint32(len(s.res)) {
		return at
	}
	return 0
}

// hasResource reports whether one more READ or atomic may be taken on. It takes the place of
// the oldest: the peer may have no more outstanding than there are slots, so it has that
// one's answer, unless it was never sent; then the peer asks for more than was agreed.
func (s *responder) hasResource() bool {
	if len(s.res) == 0 {
		if s.depth == 0 {
			return false
		}
		s.res = make([]resource, s.depth)
	}
	r := &s.res[s.nextSlot()]
	return !r.due || r.answered
}

// newResource returns the slot for it, after hasResource said yes. What is still due there is
// an answer to a late duplicate, which nobody waits for.
func (s *responder) newResource() *resource {
	s.resLast = s.nextSlot()
	s.resN = min(s.resN+1, uint32(len(s.res)))
	r := &s.res[s.resLast]
	if r.due {
		s.paid(r)
	}
	return r
}

// resize changes the number of resources and keeps the newest.
func (s *responder) resize(depth int) {
	s.depth = uint32(depth)
	if depth == len(s.res) || len(s.res) == 0 {
		return
	}
	old := *s
	s.res = make([]resource, depth)
	s.resLast, s.resN, s.resDue, s.answering = 0, 0, 0, nil
	for i := min(old.resN, uint32(depth)); i > 0; i-- {
		r := s.newResource()
		*r = *old.resourceAt(i - 1)
		if r.due {
			s.resDue++
		}
	}
}

// owe notes the answer, or a part of it, of r as due.
func (s *responder) owe(r *resource, from, end uint32) {
	r.from, r.next, r.end = from, from, end
	if !r.due {
		r.due = true
		s.resDue++
	}
	s.answering = nil
}

func (q *QP) handleRead(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	h := &p.RETH
	if q.attr.AccessFlags&verbs.RemoteRead == 0 || !s.hasResource() || h.DMALen > verbs.MaxMessage {
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	if _, st := q.env.Mem.Remote(q.pd, q.num, h.RKey, h.VA, h.DMALen, verbs.RemoteRead); st != verbs.WCSuccess {
		q.refuse(now, roce.NakRemAccess, EvQPAccessErr)
		return
	}
	r := s.newResource()
	s.msn++
	*r = resource{
		first: s.epsn, n: q.packets(h.DMALen), va: h.VA, rkey: h.RKey, length: h.DMALen, msn: s.msn,
	}
	s.owe(r, 0, r.length)
	s.epsn += uint64(r.n)
	s.ackDue = false // the answer acknowledges everything before it
}

func (q *QP) handleAtomic(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	h := &p.Atomic
	if q.attr.AccessFlags&verbs.RemoteAtomic == 0 || h.VA&7 != 0 || !s.hasResource() {
		q.refuse(now, roce.NakInvReq, EvQPReqErr)
		return
	}
	var old uint64
	var st verbs.WCStatus
	if p.Opcode == roce.RCCmpSwap {
		old, st = q.env.Mem.CompareSwap(q.pd, q.num, h.RKey, h.VA, h.Compare, h.SwapAdd)
	} else {
		old, st = q.env.Mem.FetchAdd(q.pd, q.num, h.RKey, h.VA, h.SwapAdd)
	}
	if st != verbs.WCSuccess {
		q.refuse(now, roce.NakRemAccess, EvQPAccessErr)
		return
	}
	r := s.newResource()
	s.msn++
	*r = resource{first: s.epsn, n: 1, atomic: true, value: old, msn: s.msn}
	s.owe(r, 0, 0)
	s.epsn++
	s.ackDue = false
}

// handleDuplicate answers a request that was done before (IBTA Vol 1, 9.7.5.1.2). A SEND or
// WRITE is acknowledged again and not done again; a READ is read again, as a whole or from
// where the peer misses it; an atomic's saved result is sent again. What is not remembered
// is dropped.
func (q *QP) handleDuplicate(seq uint64, p *roce.Packet) {
	s := &q.resp
	op := p.Opcode
	if op.IsSend() || op.IsWrite() {
		s.ackDue = true
		return
	}
	for i := range s.resN {
		r := s.resourceAt(i)
		if seq < r.first || seq >= r.first+uint64(r.n) {
			continue
		}
		switch {
		case r.atomic && op.IsAtomic():
			s.owe(r, 0, 0)
		case !r.atomic && op == roce.RCReadRequest && q.covers(r, uint32(seq-r.first), &p.RETH):
			from := uint32(seq - r.first)
			s.owe(r, from, from<<q.mtuShift+p.RETH.DMALen)
		default:
			q.env.Counters.DroppedOther.Add(1)
		}
		return
	}
	q.env.Counters.DroppedOther.Add(1)
}

// covers reports whether a READ request for what begins at packet i of r lies inside r. An
// R_Key is not looked at when there is nothing to read.
func (q *QP) covers(r *resource, i uint32, h *roce.RETH) bool {
	off := i << q.mtuShift
	if r.length == 0 || h.DMALen == 0 {
		return r.length == h.DMALen
	}
	return h.RKey == r.rkey && h.VA == r.va+uint64(off) && h.DMALen <= r.length-off
}

// nextResponse fills out with what the responder owes, in the order of PSNs; false when
// that turns out to be nothing.
func (q *QP) nextResponse(now verbs.Instant, out *Out) bool {
	s := &q.resp
	c := &q.env.Counters
	if s.resDue != 0 {
		q.answer(now, out)
		return true
	}
	p := &out.Packet
	if s.nak == roce.NakPSNSeq && s.epsn >= s.ahead {
		s.nak, s.ackDue = 0, true // the batch that brought the gap closed it, too
	}
	switch {
	case s.nak != 0:
		q.nakInto(p, s.epsn)
		return true
	case s.ackDue:
		s.ackDue = false
		q.header(p, roce.RCAck, psnOf(s.epsn-1))
		p.AETH = roce.AETH{Syndrome: roce.AckNoCredit, MSN: s.msn & 0xFFFFFF}
		c.AcksSent.Add(1)
		return true
	}
	return false
}

// nakInto sends the NAK that is due, of seq; it acknowledges everything before.
func (q *QP) nakInto(p *roce.Packet, seq uint64) {
	s := &q.resp
	c := &q.env.Counters
	s.quiet = true
	q.header(p, roce.RCAck, psnOf(seq))
	p.AETH = roce.AETH{Syndrome: s.nak, MSN: s.msn & 0xFFFFFF}
	if roce.IsRNR(s.nak) {
		c.RNRNaksSent.Add(1)
	} else {
		c.NaksSent.Add(1)
	}
	s.nak, s.fatal, s.ackDue = 0, false, false
}

// readOpcodes are the opcodes of a READ response by its place: middle, last, first, only.
var readOpcodes = [4]roce.Opcode{
	roce.RCReadRespMiddle, roce.RCReadRespLast, roce.RCReadRespFirst, roce.RCReadRespOnly,
}

// answer sends the next packet of the oldest READ or atomic whose answer is due.
func (q *QP) answer(now verbs.Instant, out *Out) {
	s := &q.resp
	r := s.oldestDue()
	p := &out.Packet
	if r.atomic {
		q.header(p, roce.RCAtomicAck, psnOf(r.first))
		p.AETH = roce.AETH{Syndrome: roce.AckNoCredit, MSN: r.msn & 0xFFFFFF}
		p.AtomicAck = r.value
		s.paid(r)
		return
	}
	off := r.next << q.mtuShift
	n := min(r.end-off, q.mtu)
	b, st := q.env.Mem.Remote(q.pd, q.num, r.rkey, r.va+uint64(off), n, verbs.RemoteRead)
	if st != verbs.WCSuccess {
		// The region went away under the READ.
		seq := r.first + uint64(r.next)
		s.silence()
		s.nak, s.fatal = roce.NakRemAccess, true
		q.selfErr(now, EvQPAccessErr)
		q.nakInto(p, seq)
		return
	}
	place := 0
	if r.next == r.from {
		place = 2
	}
	if off+n == r.end {
		place++
	}
	q.header(p, readOpcodes[place], psnOf(r.first+uint64(r.next)))
	if place != 0 {
		p.AETH = roce.AETH{Syndrome: roce.AckNoCredit, MSN: r.msn & 0xFFFFFF}
	}
	out.add(b)
	out.Unstable = true
	if r.next++; off+n == r.end {
		s.paid(r)
	}
}

func (s *responder) paid(r *resource) {
	r.due, r.answered = false, true
	s.resDue--
	s.answering = nil
}

// oldestDue returns the oldest resource with an answer due; there is one.
func (s *responder) oldestDue() *resource {
	if s.answering != nil {
		return s.answering
	}
	for i := s.resN; i > 0; i-- {
		if r := s.resourceAt(i - 1); r.due {
			s.answering = r
			return r
		}
	}
	panic("BUG: qp: answers are counted as due and none is")
}
