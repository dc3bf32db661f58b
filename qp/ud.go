package qp

import (
	"net/netip"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// ownQKey is the bit of a work request's Q_Key that asks for the queue pair's own Q_Key
// instead (IBTA Vol 1, 10.2.5: a controlled Q_Key).
const ownQKey = 1 << 31

// nextDatagram sends a message of UD: one packet. out.AH says where to.
func (q *QP) nextDatagram(now verbs.Instant, out *Out, w *SendWQE, fresh bool) Next {
	r := &q.req
	mtu, ok := uint32(0), false
	if q.env.AHs != nil {
		mtu, ok = q.env.AHs.AddressHandle(q.pd, w.AH)
	}
	switch {
	case !ok:
		return q.failUnreliable(now, verbs.LocQPOpErr, fresh)
	case w.Length > mtu:
		return q.failUnreliable(now, verbs.LocLenErr, fresh)
	}
	if st := q.gather(out, r.cur, w, 0, w.Length); st != verbs.WCSuccess {
		return q.failUnreliable(now, st, fresh)
	}
	if fresh {
		q.begin(1)
	}
	out.Unstable = true
	out.AH = w.AH
	p := &out.Packet
	op := roce.UDSendOnly
	if w.Opcode == verbs.SendWithImm {
		op = roce.UDSendOnlyImm
	}
	q.header(p, op, psnOf(r.nxt))
	p.DestQP = w.RemoteQPN
	p.Imm = w.ImmData
	p.Solicited = w.Flags&verbs.Solicited != 0
	p.DETH = roce.DETH{QKey: w.RemoteQKey, SrcQP: q.num}
	if w.RemoteQKey&ownQKey != 0 {
		p.DETH.QKey = q.attr.QKey
	}
	return NextPacket
}

// HandleDatagram takes in one packet of a UD queue pair; the wire has checked the same as for
// HandlePacket, the sender's address excepted, for there is no peer. from and to are the
// packet's addresses and class its traffic class: the receiver finds them in the 40 bytes of
// GRH before the payload.
//
// A packet with another Q_Key, one that finds no receive and one that does not fit into the
// oldest receive (40 bytes and the payload) is dropped and counted; the receive stays for
// the next one. PSNs mean nothing here.
func (q *QP) HandleDatagram(now verbs.Instant, p *roce.Packet, from, to netip.Addr, class uint8) {
	if debug {
		defer q.mustHold()
	}
	c := &q.env.Counters
	n := uint32(len(p.Payload))
	switch {
	case !requestsIn.has(q.state):
		c.DroppedState.Add(1)
		return
	case p.DETH.QKey != q.attr.QKey:
		c.DroppedQKey.Add(1)
		return
	case n > q.mtu:
		c.DroppedLength.Add(1)
		return
	case !q.recvReady():
		c.DroppedNoRecv.Add(1)
		return
	}
	pos := q.rq.taken
	if q.rq.at(pos).Length < uint64(roce.GRHLen+n) {
		c.DroppedLength.Add(1)
		return
	}
	var grh [roce.GRHLen]byte
	roce.PutGRH(grh[:], from, to, p.Len()+roce.ICRCLen, class)
	st := q.scatter(q.rq.sgList(pos), 0, grh[:])
	if st == verbs.WCSuccess {
		st = q.scatter(q.rq.sgList(pos), roce.GRHLen, p.Payload)
	}
	if st != verbs.WCSuccess {
		q.spoiled(now, st)
		return
	}
	wc := verbs.WC{Opcode: verbs.WCRecv, ByteLen: roce.GRHLen + n, SrcQPN: p.DETH.SrcQP, Flags: verbs.WithGRH}
	markWC(&wc, p)
	q.received(now, &wc)
}
