package qp

import (
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// ucLateness is how far behind the expected PSN a packet of UC is taken for a late one, a
// duplicate or overtaken, and dropped. The standard's UC knows no duplicates, because its
// fabric makes none; UDP may. What is further behind is a sender that has begun anew.
const ucLateness = 1 << 16

// nextUC sends a packet of a SEND or WRITE. It asks for no answer: there is none.
func (q *QP) nextUC(now verbs.Instant, out *Out, w *SendWQE, fresh bool) Next {
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
	if st := q.gather(out, r.cur, w, off, min(w.Length-off, q.mtu)); st != verbs.WCSuccess {
		return q.failUnreliable(now, st, fresh)
	}
	if fresh {
		q.begin(n)
	}
	out.Unstable = true
	p := &out.Packet
	place, last := 0, i+1 == n
	if i == 0 {
		place = 2
	}
	if last {
		place++
	}
	q.header(p, ucBase|sendOpcodes[w.Opcode][place], psnOf(r.nxt))
	if p.Opcode.HasRETH() {
		p.RETH = roce.RETH{VA: w.RemoteAddr, RKey: w.RKey, DMALen: w.Length}
	}
	if last {
		p.Imm = w.ImmData
		p.Solicited = w.Flags&verbs.Solicited != 0 && solicitedOps>>w.Opcode&1 != 0
	}
	return NextPacket
}

// ucBase makes a UC opcode of the RC opcode of the same operation.
const ucBase = roce.Opcode(roce.TransportUC << 5)

// handleUC takes in a packet (IBTA Vol 1, 9.8.2 and 9.8.3). A gap in the PSNs, a packet out
// of its message's order and whatever else is wrong end the present message: what it used
// of a receive's memory is left behind, the receive itself serves the next message, and that
// begins with the next first or only packet. Nobody is told.
func (q *QP) handleUC(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	c := &q.env.Counters
	op := p.Opcode
	d := p.PSN.Sub(psnOf(s.epsn))
	if d < 0 && d >= -ucLateness {
		c.Duplicates.Add(1)
		return
	}
	if d != 0 {
		c.OutOfOrder.Add(1)
		q.cutShort()
	}
	s.epsn = seqBase + uint64(p.PSN) + 1
	if op.StartsMessage() || s.mode == inSend && !op.IsSend() || s.mode == inWrite && !op.IsWrite() {
		q.cutShort()
	}
	if !op.StartsMessage() && s.mode == betweenMessages {
		c.DroppedOther.Add(1) // the rest of a message that has lost a part
		return
	}
	if q.state == verbs.QPRTR {
		q.establish(now)
	}
	switch {
	case !q.lengthFits(p):
		q.abandon(&c.DroppedLength)
	case op.IsSend():
		q.takeUCSend(now, p)
	default:
		q.takeUCWrite(now, p)
	}
}

// cutShort ends a message that lacks a part.
func (q *QP) cutShort() {
	if q.resp.mode != betweenMessages {
		q.abandon(&q.env.Counters.DroppedMessages)
	}
}

// takeUCSend places a packet of a SEND, which the order of packets allows.
func (q *QP) takeUCSend(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	c := &q.env.Counters
	if s.mode == betweenMessages {
		if !q.recvReady() {
			q.abandon(&c.DroppedNoRecv)
			return
		}
		s.mode, s.got = inSend, 0
	}
	pos := q.rq.taken
	n := uint64(len(p.Payload))
	if s.got+n > min(q.rq.at(pos).Length, verbs.MaxMessage) {
		q.abandon(&c.DroppedLength)
		return
	}
	if st := q.scatter(q.rq.sgList(pos), s.got, p.Payload); st != verbs.WCSuccess {
		q.spoiled(now, st)
		return
	}
	s.got += n
	if p.Opcode.EndsMessage() {
		s.mode = betweenMessages
		q.receivedUC(now, p, verbs.WCRecv, uint32(s.got))
	}
}

// takeUCWrite places a packet of a WRITE, which the order of packets allows. Memory that the
// peer may not write is not written, and nobody is told.
func (q *QP) takeUCWrite(now verbs.Instant, p *roce.Packet) {
	s := &q.resp
	c := &q.env.Counters
	if s.mode == betweenMessages {
		h := &p.RETH
		if q.attr.AccessFlags&verbs.RemoteWrite == 0 {
			q.abandon(&c.DroppedAccess)
			return
		}
		if h.DMALen > verbs.MaxMessage {
			q.abandon(&c.DroppedLength)
			return
		}
		// The whole range is checked before the first byte is placed.
		if _, st := q.env.Mem.Remote(q.pd, q.num, h.RKey, h.VA, h.DMALen, verbs.RemoteWrite); st != verbs.WCSuccess {
			q.abandon(&c.DroppedAccess)
			return
		}
		s.mode, s.va, s.rkey, s.length, s.got = inWrite, h.VA, h.RKey, h.DMALen, 0
	}
	ends := p.Opcode.EndsMessage()
	n := uint32(len(p.Payload))
	rest := s.length - uint32(s.got)
	switch {
	case n > rest || ends != (n == rest):
		q.abandon(&c.DroppedLength)
		return
	case p.Opcode.ConsumesRecv() && !q.recvReady():
		q.abandon(&c.DroppedNoRecv)
		return
	}
	b, st := q.env.Mem.Remote(q.pd, q.num, s.rkey, s.va+s.got, n, verbs.RemoteWrite)
	if st != verbs.WCSuccess {
		q.abandon(&c.DroppedAccess)
		return
	}
	copy(b, p.Payload)
	s.got += uint64(n)
	if !ends {
		return
	}
	s.mode = betweenMessages
	if s.length > 0 {
		q.env.Mem.Placed(q.pd, s.rkey)
	}
	if p.Opcode.HasImm() {
		q.receivedUC(now, p, verbs.WCRecvRDMAWithImm, s.length)
	}
}

// receivedUC completes a receive at the end of its message.
func (q *QP) receivedUC(now verbs.Instant, p *roce.Packet, op verbs.WCOpcode, length uint32) {
	wc := verbs.WC{Opcode: op, ByteLen: length, SrcQPN: q.attr.DestQPN}
	markWC(&wc, p)
	q.received(now, &wc)
}
