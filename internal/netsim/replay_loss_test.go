package netsim

import (
	"encoding/binary"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// The captures with loss were taken at host A: they show all that A sent, also what the
// network then dropped, and of B's answers those that arrived. To play B one must know what
// reached it. explain finds that out: it lets a model of rxe's responder, PSNs only, take
// in A's packets, each either lost or not, each answer either lost or in the capture, and
// keeps the explanation with the fewest losses. The whole capture of the answers must come
// out of it, and then the model's answers, with those that were lost, are what ours are
// compared with.

// story is an explanation from some point on.
type story struct {
	cost    int
	lost    bool   // the packet at this point
	visible []bool // the answers to it
	next    point
}

// point is the state of the model before packet i of A's and with answer j of B's not seen yet.
type point struct {
	i, j  int
	epsn  verbs.PSN
	quiet bool
}

const impossible = 1 << 30

// teller explains.
type teller struct {
	b       *endpoint
	answers []*frame // of B in the capture
	known   map[point]*story
	// lostCost is what a lost packet of A's costs; a lost answer costs 3.
	lostCost int
}

// modelled is an answer of the model; again says that it repeats one.
type modelled struct {
	p     roce.Packet
	again bool
}

// tale is what explain found out.
type tale struct {
	lost    map[*frame]bool
	answers []*frame
}

// explain returns which of A's packets never reached endpoint b, and what b answered. When
// lostCost is less than 3 it believes in lost packets rather than lost answers.
func explain(t testing.TB, b *endpoint, lostCost int) *tale {
	t.Helper()
	x := &teller{b: b, known: map[point]*story{}, lostCost: lostCost}
	for _, f := range b.out {
		if f.p.Opcode.IsResponse() {
			x.answers = append(x.answers, f)
		}
	}
	at := point{epsn: b.recvPSN}
	s := x.from(at)
	if s.cost >= impossible {
		t.Fatal("no losses explain the capture")
	}
	lost, answers := map[*frame]bool{}, []*frame(nil)
	for ; at.i < len(b.in); s = x.from(at) {
		f := b.in[at.i]
		if s.lost {
			lost[f] = true
		} else {
			all, _ := x.answer(at)
			j := at.j
			for k := range all {
				if s.visible[k] {
					answers = append(answers, x.answers[j])
					j++
				} else {
					answers = append(answers, unseen(b, f, &all[k].p))
				}
			}
		}
		at = s.next
	}
	t.Logf("%d of %d packets of A and %d of %d answers of B were lost", len(lost), len(b.in), len(answers)-len(x.answers), len(answers))
	return &tale{lost, answers}
}

// unseen makes an answer to f that was lost. What it said, if anything, is what the other
// answers of this PSN say.
func unseen(b *endpoint, f *frame, p *roce.Packet) *frame {
	g := &frame{n: f.n, at: f.at, src: f.dst, dst: f.src, p: *p}
	said := payloads(b.out, p.PSN)
	switch {
	case p.Opcode == roce.RCAck:
	case len(said) == 0:
		g.unknown = true
	case p.Opcode == roce.RCAtomicAck:
		g.p.AtomicAck = binary.NativeEndian.Uint64(said[0])
	default:
		g.p.Payload, g.p.Pad = said[0], roce.PadCount(len(said[0]))
	}
	return g
}

// from returns the best story from a point on.
func (x *teller) from(at point) *story {
	if s := x.known[at]; s != nil {
		return s
	}
	best := &story{cost: impossible}
	x.known[at] = best
	if at.i == len(x.b.in) {
		if at.j == len(x.answers) {
			best.cost = 0
		}
		return best
	}
	skip := at
	skip.i++
	if s := x.from(skip); s.cost+x.lostCost < best.cost {
		*best = story{cost: s.cost + x.lostCost, lost: true, next: skip}
	}
	all, next := x.answer(at)
	x.see(at, all, nil, next, 0, best)
	return best
}

// see tries which of the answers that are left over after those in visible are in the
// capture.
func (x *teller) see(at point, all []modelled, visible []bool, next point, cost int, best *story) {
	if cost >= best.cost {
		return
	}
	if len(visible) == len(all) {
		if s := x.from(next); s.cost+cost < best.cost {
			*best = story{cost: s.cost + cost, visible: append([]bool(nil), visible...), next: next}
		}
		return
	}
	a := &all[len(visible)]
	x.see(at, all, append(visible, false), next, cost+3, best) // first: it was lost, and not late
	if next.j < len(x.answers) && x.answers[next.j].n > x.b.in[at.i].n && a.is(&x.answers[next.j].p) {
		seen := next
		seen.j++
		x.see(at, all, append(visible, true), seen, cost, best)
	}
}

// is reports whether a captured answer is this one.
func (a *modelled) is(p *roce.Packet) bool {
	if a.p.PSN != p.PSN {
		return false
	}
	if a.again && a.p.Opcode.IsReadResponse() && p.Opcode.IsReadResponse() {
		return true // rxe goes on with the opcodes of the first try
	}
	return a.p.Opcode == p.Opcode && a.p.AETH == p.AETH
}

// answer is the model: what rxe answers to packet i, and the state after it.
func (x *teller) answer(at point) (all []modelled, next point) {
	f := x.b.in[at.i]
	p := &f.p
	next = at
	next.i++
	ack := func(syndrome uint8, psn verbs.PSN) {
		all = append(all, modelled{p: roce.Packet{
			BTH:  roce.BTH{Opcode: roce.RCAck, PKey: roce.DefaultPKey, DestQP: x.b.peer, PSN: psn},
			AETH: roce.AETH{Syndrome: syndrome, MSN: x.msn(next.epsn)},
		}})
	}
	d := p.PSN.Sub(at.epsn)
	again := d < 0
	switch {
	case d > 0:
		if !at.quiet {
			next.quiet = true
			ack(roce.NakPSNSeq, at.epsn)
		}
		return all, next
	case d == 0:
		next.quiet = false
		next.epsn = at.epsn.Next()
	}
	switch op := p.Opcode; {
	case op == roce.RCReadRequest:
		n := max(1, (int(p.RETH.DMALen)+x.b.mtu.Bytes()-1)/x.b.mtu.Bytes())
		if !again {
			next.epsn = at.epsn.Add(n)
		}
		for i := range n {
			q := modelled{again: again}
			q.p.BTH = roce.BTH{Opcode: roce.RCReadRespMiddle, PKey: roce.DefaultPKey, DestQP: x.b.peer, PSN: p.PSN.Add(i)}
			switch {
			case n == 1:
				q.p.Opcode = roce.RCReadRespOnly
			case i == 0:
				q.p.Opcode = roce.RCReadRespFirst
			case i == n-1:
				q.p.Opcode = roce.RCReadRespLast
			}
			if q.p.Opcode != roce.RCReadRespMiddle {
				q.p.AETH = roce.AETH{Syndrome: roce.AckNoCredit, MSN: x.msn(next.epsn)}
			}
			all = append(all, q)
		}
	case op.IsAtomic():
		q := modelled{again: again}
		q.p.BTH = roce.BTH{Opcode: roce.RCAtomicAck, PKey: roce.DefaultPKey, DestQP: x.b.peer, PSN: p.PSN}
		q.p.AETH = roce.AETH{Syndrome: roce.AckNoCredit, MSN: x.msn(p.PSN.Next())}
		all = append(all, q)
	case again:
		ack(roce.AckNoCredit, next.epsn.Add(-1))
	case p.AckReq:
		ack(roce.AckNoCredit, p.PSN)
	}
	return all, next
}

// msn is how many messages lie whole before a PSN.
func (x *teller) msn(psn verbs.PSN) (n uint32) {
	for _, m := range x.b.recvs {
		if !psn.Before(m.psn.Add(m.n)) {
			n++
		}
	}
	return n
}
