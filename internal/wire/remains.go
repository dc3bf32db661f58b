package wire

import (
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// remains are what a reliable queue pair leaves behind: enough to acknowledge once more what it
// had done. Who reads the last message and closes at once sends its acknowledgement first,
// but that may be lost; then the peer repeats a message that has arrived to a queue pair
// that is gone, and learns too late, as RETRY_EXC_ERR, or, as Linux rxe told to retry seven times,
// never, that it arrived. The standard leaves that to timewait, in which a queue pair is
// silent (IBTA Vol 1, 12.9.8.4); an answer in its place is one that had been given anyway.
type remains struct {
	num   verbs.QPN
	peer  verbs.QPN
	next  verbs.PSN // what lies before it was done
	msn   uint32
	until verbs.Instant
	route route
}

// remainsLast is how long. Linux asks for ack timeouts of half a second to a second, and the first
// repetitions may be lost, too.
const remainsLast = 5 * time.Second

// leave notes the remains of a queue pair that is about to be destroyed. They stay in its
// slot of the table, which is used again only after others.
func (w *Wire) leave(now verbs.Instant, q *QP) *remains {
	next, msn, ok := q.q.Done()
	if !ok || q.peer == nil {
		return nil
	}
	return &remains{
		num: q.Num(), peer: q.q.Attr().DestQPN, next: next, msn: msn, until: now.Add(remainsLast), route: q.route,
	}
}

// receiveLate handles a datagram for a queue pair that does not exist.
func (w *Wire) receiveLate(now verbs.Instant, rx *link.Rx, b []byte, seg int) {
	r := w.qps.remains(w.in.DestQP)
	if r == nil || now > r.until {
		w.Counters.DropNoQP.Add(1)
		return
	}
	if rx.Src.Addr() != r.route.dst.Addr() || rx.Dst != r.route.src {
		w.Counters.DropAddress.Add(1)
		return
	}
	path := roce.NewPath(rx.Src, netip.AddrPortFrom(rx.Dst, w.local.Port()))
	var run *idRun
	if p := w.peers[r.route.dst]; p != nil {
		run = &p.ids
	}
	id, ok := w.checkICRC(&path, run, b, seg)
	w.tap(now, rx, id, b)
	if !ok {
		w.Counters.DropICRC.Add(1)
		return
	}
	// A READ or an atomic that is asked for again gets no answer: memory may be gone, and so
	// are results. Nor does what was never done.
	p := &w.in
	if !(p.Opcode.IsSend() || p.Opcode.IsWrite()) || p.Opcode.Transport() != roce.TransportRC || !p.AckReq || p.PSN.Sub(r.next) >= 0 {
		w.Counters.DropNoQP.Add(1)
		return
	}
	w.env.Counters.Duplicates.Add(1)
	w.ackLate(now, r)
}

// ackLate acknowledges everything that was done. When the link takes nothing the peer will ask
// again.
func (w *Wire) ackLate(now verbs.Instant, r *remains) {
	t := &w.tx
	if !t.flush(now) {
		return
	}
	p := roce.Packet{BTH: roce.BTH{
		Opcode: roce.RCAck, MigReq: true, PKey: roce.DefaultPKey, DestQP: r.peer, PSN: (r.next - 1) & verbs.PSNMask,
	}, AETH: roce.AETH{Syndrome: roce.AckNoCredit, MSN: r.msn}}
	w.env.Counters.AcksSent.Add(1)
	w.env.Counters.PacketsSent.Add(1)
	to := &r.route
	t.lone(now, &p, nil, &to.txPath, link.Tx{Dst: to.dst, Src: to.src, TrafficClass: to.class})
	t.flush(now)
}
