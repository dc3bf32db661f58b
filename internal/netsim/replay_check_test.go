package netsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// play runs the capture: frames is all of it, in order.
func (r *replay) play(frames []*frame) {
	r.t.Helper()
	shift := time.Duration(0) // how far we are behind the capture
	waiting := false          // packets wait in the inbox for those that follow
	flush := func() {
		if waiting {
			waiting = false
			r.settle()
		}
	}
	for _, f := range frames {
		if isCM(f) && r.cm != nil {
			flush()
			if at := verbs.Instant(f.at + shift); at > r.now {
				r.until(at, nil)
			}
			r.cm.handle(f)
		}
		if isCM(f) || r.lost[f] {
			continue
		}
		s := r.sideOf(f)
		if s == nil {
			continue
		}
		ours := f.src.Addr() == r.us
		posts := ours && s.posted < len(s.sends) && s.sends[s.posted].first == f
		if ours && !posts {
			flush()
			continue
		}
		if at := verbs.Instant(f.at + shift); !waiting && at > r.now {
			r.until(at, nil)
		}
		if posts {
			flush()
			r.post(s)
			r.settle()
			continue
		}
		if !r.possible(s, f) {
			flush()
			was := r.now
			for !r.until(r.now.Add(time.Millisecond), func() bool { return r.possible(s, f) }) {
				if !r.lossless || r.now.Sub(was) > 20*time.Second {
					r.t.Fatalf("%v answers what we never sent", f)
				}
				r.invent(s, f)
			}
			shift += r.now.Sub(was)
		}
		r.prepare(s, f)
		r.inbox = append(r.inbox, f)
		r.fed++
		waiting = true
		if !r.together {
			flush()
		}
	}
	flush()
	r.until(r.now.Add(time.Minute), func() bool {
		for _, s := range r.qps {
			if len(s.status) < len(s.outcomes()) {
				return false
			}
		}
		return true
	})
}

// possible reports whether the peer can have sent f, if it is an answer: we have sent what it
// answers, and once more after each RNR NAK.
func (r *replay) possible(s *side, f *frame) bool {
	p := &f.p
	if !p.Opcode.IsResponse() || p.PSN.Before(s.sendPSN) {
		return true
	}
	n := s.covered[p.PSN]
	if p.Opcode == roce.RCAck && roce.IsRNR(p.AETH.Syndrome) {
		return n > s.fedRNR[p.PSN]
	}
	return n > 0
}

// invent makes up an ACK that rxe would have sent: our window was smaller than rxe's, and so we
// asked for an answer in the middle of a message, where rxe did not.
func (r *replay) invent(s *side, like *frame) {
	var ask *roce.Packet
	for _, g := range s.did {
		if g.p.Opcode.IsRequest() {
			ask = &g.p
		}
	}
	if ask == nil || !ask.AckReq || ask.Opcode.EndsMessage() {
		return
	}
	p := roce.Packet{BTH: roce.BTH{Opcode: roce.RCAck, PKey: roce.DefaultPKey, DestQP: s.num, PSN: ask.PSN}}
	p.AETH.Syndrome = roce.AckNoCredit
	for _, m := range s.sends {
		if !ask.PSN.Before(m.psn.Add(m.n)) {
			p.AETH.MSN++
		}
	}
	b := p.Append(nil)
	path := roce.NewPath(like.src, like.dst)
	b = binary.LittleEndian.AppendUint32(b, path.ICRC(b, 77))
	r.inbox = append(r.inbox, &frame{src: like.src, dst: like.dst, raw: b, p: p})
	r.invented++
}

// prepare does what the program on our side had done by the time that Linux looked at f.
func (r *replay) prepare(s *side, f *frame) {
	p := &f.p
	if p.Opcode.IsResponse() {
		if p.Opcode == roce.RCAck && roce.IsRNR(p.AETH.Syndrome) {
			s.fedRNR[p.PSN] = s.covered[p.PSN]
			s.restUntil = r.now.Add(roce.RNRTimerOf(p.AETH.Syndrome).Duration())
		}
		return
	}
	i := slices.IndexFunc(s.recvs, func(m *message) bool {
		return m.holds(p.PSN) && (s.typ != verbs.UD || m.first == f)
	})
	if s.typ == verbs.RC && p.PSN != s.expected || i < 0 {
		return // a duplicate, ahead of a gap, or a message whose end is not in the capture
	}
	m := s.recvs[i]
	refused := s.refused(m)
	if m.consumes && m.consumesAt == p.PSN {
		if s.notReady(f) {
			return
		}
		size := int(m.length)
		if s.typ == verbs.UD {
			size += roce.GRHLen
		}
		if refused != 0 {
			size = tooSmall
		}
		r.receive(s, size)
	}
	if refused != 0 {
		return
	}
	s.expected = p.PSN.Next()
	if sh := r.mem.byRKey[m.rkey]; sh != nil && m.length > 0 {
		r.shadow(s, sh, m, p)
	}
	if m.op == verbs.RDMARead {
		s.expected = m.psn.Add(m.n)
	}
}

// tooSmall is a receive for messages that Linux found too long for theirs; it fits those
// before them.
const tooSmall = 512

// notReady reports whether Linux answered this transmission with an RNR NAK.
func (e *endpoint) notReady(f *frame) bool {
	for _, g := range e.in {
		if g.n > f.n && g.p.PSN == f.p.PSN && g.p.Opcode == f.p.Opcode {
			return e.rnrBetween(f, g.n)
		}
	}
	return e.rnrBetween(f, 1<<30)
}

func (e *endpoint) rnrBetween(f *frame, end int) bool {
	for _, g := range e.out {
		if g.n > f.n && g.n < end && g.p.PSN == f.p.PSN && g.p.Opcode == roce.RCAck && roce.IsRNR(g.p.AETH.Syndrome) {
			return true
		}
	}
	return false
}

// shadow does to the shadow what a request does to memory. What Linux read, but no request
// wrote, its program wrote: ours does the same, now.
func (r *replay) shadow(s *side, sh *shared, m *message, p *roce.Packet) {
	poke := func(off uint64, b []byte) {
		if !bytes.Equal(sh.shadow[off:][:len(b)], b) {
			copy(sh.shadow[off:], b)
			copy(sh.Bytes()[off:], b)
			sh.pokes++
		}
	}
	off := m.va - sh.va
	switch {
	case m.op == verbs.RDMARead:
		for i := range m.n {
			if all := s.answered(m.psn.Add(i)); len(all) > 0 {
				poke(off+uint64(i*s.mtu.Bytes()), all[0])
			}
		}
	case p.Opcode.IsAtomic():
		if all := s.answered(p.PSN); len(all) > 0 {
			poke(off, all[0])
		}
		word := sh.shadow[off:][:8]
		v := binary.NativeEndian.Uint64(word)
		if m.op == verbs.AtomicFetchAdd {
			v += p.Atomic.SwapAdd
		} else if v == p.Atomic.Compare {
			v = p.Atomic.SwapAdd
		}
		binary.NativeEndian.PutUint64(word, v)
	default:
		copy(sh.shadow[off+uint64(p.PSN.Sub(m.psn)*s.mtu.Bytes()):], p.Payload)
	}
}

// answered returns what this end of the capture answered to a READ or atomic with this PSN.
func (e *endpoint) answered(psn verbs.PSN) [][]byte { return payloads(e.out, psn) }

// outcomes are how the sends of this end must complete. Those that the capture leaves open are
// not in it, and neither is what comes after them.
func (e *endpoint) outcomes() (all []verbs.WCStatus) {
	failed := false
	for _, m := range e.sends {
		st, ok := e.outcome(m)
		switch {
		case failed:
			st = verbs.WRFlushErr
		case !ok:
			return all
		}
		failed = failed || st != verbs.WCSuccess
		all = append(all, st)
	}
	return all
}

func (e *endpoint) outcome(m *message) (st verbs.WCStatus, known bool) {
	if e.typ != verbs.RC {
		return verbs.WCSuccess, true
	}
	last := m.psn.Add(m.n - 1)
	whole := true
	for i := range m.n {
		if len(payloads(e.in, m.psn.Add(i))) == 0 {
			whole = false
		}
	}
	if m.op == verbs.RDMARead || m.op == verbs.AtomicCmpAndSwp || m.op == verbs.AtomicFetchAdd {
		if whole {
			return verbs.WCSuccess, true
		}
	}
	rnrs := 0
	for _, f := range e.in {
		p := &f.p
		if !p.Opcode.IsResponse() {
			continue
		}
		done := p.PSN.Next() // the first that is not acknowledged by it
		if p.Opcode == roce.RCAck && !roce.IsAck(p.AETH.Syndrome) {
			done = p.PSN
			if m.holds(p.PSN) {
				switch p.AETH.Syndrome {
				case roce.NakInvReq:
					return verbs.RemInvReqErr, true
				case roce.NakRemAccess:
					return verbs.RemAccessErr, true
				case roce.NakRemOp:
					return verbs.RemOpErr, true
				}
				if roce.IsRNR(p.AETH.Syndrome) {
					rnrs++
				}
			}
		}
		if last.Before(done) && m.op != verbs.RDMARead && m.op != verbs.AtomicCmpAndSwp && m.op != verbs.AtomicFetchAdd {
			return verbs.WCSuccess, true
		}
	}
	if e.rnr < 7 && rnrs == int(e.rnr)+1 {
		return verbs.RNRRetryExcErr, true
	}
	if e.transmissions(m.psn) == int(e.retry)+1 && len(e.in) == 0 {
		return verbs.RetryExcErr, true
	}
	return 0, false
}

func (e *endpoint) transmissions(psn verbs.PSN) (n int) {
	for _, f := range e.out {
		if f.p.PSN == psn && f.p.Opcode.IsRequest() {
			n++
		}
	}
	return n
}

// row is what a replay compared.
type row struct {
	fed, answers, merged, requests, again, completions int
	notes                                              []string
}

// check compares what we did with what Linux did.
func (r *replay) check(x *row) {
	for _, s := range r.qps {
		r.checkAnswers(s, x)
		r.checkRequests(s, x)
		r.checkSends(s, x)
		r.checkReceives(s, x)
	}
	for k, sh := range r.mem.byRKey {
		if !bytes.Equal(sh.Bytes(), sh.shadow) {
			r.t.Errorf("the memory of R_Key %#x is not what the requests make of it", k)
		}
	}
	c := &r.wire.Counters
	for _, drop := range []*atomic.Uint64{
		&c.DropTruncated, &c.DropDecode, &c.DropPKey, &c.DropNoQP, &c.DropTransport, &c.DropAddress, &c.DropICRC, &c.DropQKey, &c.DropGSI,
	} {
		if n := drop.Load(); n != 0 {
			r.t.Errorf("the wire dropped %d packets: %+v", n, c)
		}
	}
	x.fed += r.fed
	if r.invented > 0 {
		x.note(fmt.Sprintf("%d ACKs made up", r.invented))
	}
}

// answers returns what the host that a side plays answered.
func (s *side) answers() []*frame {
	if s.told != nil {
		return s.told
	}
	return slices.DeleteFunc(slices.Clone(s.out), func(f *frame) bool { return !f.p.Opcode.IsResponse() })
}

// line is an answer as it counts: what differs only because it is ours is left out.
func line(p *roce.Packet) string {
	q := *p
	q.MigReq, q.AckReq = false, false
	return fmt.Sprintf("%v %x", &q, p.Payload)
}

// covers reports whether the answer b makes the earlier answer a unnecessary: a is an ACK, or
// a NAK of a gap that b shows to be closed, and b acknowledges as much.
func (r *replay) coversAnswer(a, b *roce.Packet) bool {
	if a.Opcode != roce.RCAck {
		return false
	}
	done := func(p *roce.Packet) verbs.PSN { // the first PSN that p does not acknowledge
		if p.Opcode == roce.RCAck && !roce.IsAck(p.AETH.Syndrome) {
			return p.PSN
		}
		if p.Opcode != roce.RCAck {
			return p.PSN // a READ's or atomic's answer: all before it
		}
		return p.PSN.Next()
	}
	switch {
	case !r.together && !r.truncated:
		return false // one by one, each is answered
	case roce.IsAck(a.AETH.Syndrome):
		return !done(b).Before(done(a))
	case a.AETH.Syndrome == roce.NakPSNSeq:
		return done(a).Before(done(b))
	}
	return false
}

// checkAnswers compares our answers with Linux's, in order. Ours may be fewer: one ACK for
// several. rxe answers what is in flight behind an RNR NAK with a NAK of a gap, once, where
// the standard wants silence; ours is silent.
func (r *replay) checkAnswers(s *side, x *row) {
	var want []*frame
	for _, f := range s.answers() {
		if n := len(want); n > 0 && f.p.AETH.Syndrome == roce.NakPSNSeq && f.p.Opcode == roce.RCAck {
			if last := &want[n-1].p; last.Opcode == roce.RCAck && roce.IsRNR(last.AETH.Syndrome) && last.PSN == f.p.PSN {
				continue
			}
		}
		want = append(want, f)
	}
	var last *roce.Packet
	for _, g := range s.did {
		if !g.p.Opcode.IsResponse() {
			continue
		}
		x.answers++
		// The answer to a READ, whichever part of it, is a first, middles and a last, or an only.
		within := last != nil && (last.Opcode == roce.RCReadRespFirst || last.Opcode == roce.RCReadRespMiddle)
		continues := g.p.Opcode.IsReadResponse() && !g.p.Opcode.StartsMessage()
		if within != continues || within && g.p.PSN != last.PSN.Next() {
			r.t.Errorf("at %v we answer %v after %v", time.Duration(g.at), &g.p, last)
			return
		}
		for {
			if len(want) == 0 {
				r.t.Errorf("at %v we answer %v, Linux nothing", time.Duration(g.at), &g.p)
				return
			}
			w := &want[0].p
			if r.same(s, want[0], g, x) {
				want = want[1:]
				break
			}
			if !r.coversAnswer(w, &g.p) {
				r.t.Errorf("at %v we answer %v,\nLinux %v", time.Duration(g.at), &g.p, want[0])
				return
			}
			want = want[1:]
			x.merged++
		}
		last = &g.p
	}
	if r.silent {
		if last != nil || len(want) != 1 {
			r.t.Errorf("we answer %v, Linux %v", last, want)
		}
		x.note("rxe answers, we do not")
		return
	}
	for _, f := range want {
		if last == nil || !r.coversAnswer(&f.p, last) {
			r.t.Errorf("Linux answers %v, we nothing", f)
			return
		}
		x.merged++
	}
}

// same reports whether our answer is Linux's.
func (r *replay) same(s *side, linux *frame, our *sent, x *row) bool {
	w, g := linux.p, our.p
	if w.Opcode == roce.RCAck && roce.IsAck(w.AETH.Syndrome) && w.PSN.Before(g.PSN) && g.PSN.Before(our.done) {
		// The rest of a batch was done by the time that the ACK left: it acknowledges a part of
		// the message that follows, too. rxe's requester takes note and goes on.
		w.PSN = g.PSN
	}
	if w.Opcode.IsReadResponse() && g.Opcode.IsReadResponse() && s.askedAgain(w.PSN) {
		// rxe puts its present MSN into the answer to a duplicate, ours is the request's, and
		// it goes on with the opcodes of the first try, where ours begins with first or only,
		// as the standard asks and rxe's requester accepts.
		w.Opcode, w.AETH = g.Opcode, g.AETH
		x.note("a READ's answer to a duplicate has its own opcodes and MSN")
	}
	if linux.unknown {
		w.Payload, w.Pad, w.AtomicAck = g.Payload, g.Pad, g.AtomicAck
	}
	if w.Opcode == roce.RCAck && w.AETH.Syndrome == roce.NakRemOp && g.AETH.Syndrome == roce.NakInvReq {
		for _, m := range s.recvs {
			if m.holds(w.PSN) && m.holds(g.PSN) && m.length > tooSmall {
				w.AETH.Syndrome, w.PSN = g.AETH.Syndrome, g.PSN
				x.note("too long a SEND: rxe's NAK is 0x63, ours 0x61 as in the standard")
			}
		}
	}
	return line(&w) == line(&g)
}

// askedAgain reports whether the READ with a response of this PSN came more than once.
func (e *endpoint) askedAgain(psn verbs.PSN) bool {
	n := 0
	for _, m := range e.recvs {
		for _, f := range e.in {
			if m.holds(psn) && f.p.Opcode == roce.RCReadRequest && m.holds(f.p.PSN) {
				n++
			}
		}
	}
	return n > 1
}

// rowHead and line make a table of rows.
var rowHead = fmt.Sprintf("%-32s %-10s %4s %8s %7s %9s %6s %12s\n", "capture", "role", "fed", "answers", "merged", "requests", "again", "completions")

func (x *row) line(name, role string) string {
	return fmt.Sprintf("%-32s %-10s %4d %8d %7d %9d %6d %12d ok %s\n",
		name, role, x.fed, x.answers, x.merged, x.requests, x.again, x.completions, strings.Join(x.notes, "; "))
}

func (x *row) note(s string) {
	if !slices.Contains(x.notes, s) {
		x.notes = append(x.notes, s)
	}
}

// checkRequests compares our request packets with Linux's by their PSN: how often and when a
// packet is sent again is each one's own affair.
func (r *replay) checkRequests(s *side, x *row) {
	want := map[verbs.PSN]*frame{}
	for _, f := range s.out {
		if f.p.Opcode.IsRequest() && want[f.p.PSN] == nil {
			want[f.p.PSN] = f
		}
	}
	next := s.sendPSN
	for _, g := range s.did {
		p := g.p
		if !p.Opcode.IsRequest() {
			continue
		}
		i := slices.IndexFunc(s.sends, func(m *message) bool { return m.holds(p.PSN) })
		if i < 0 {
			r.t.Errorf("at %v we send %v, which belongs to no message", time.Duration(g.at), &p)
			return
		}
		m := s.sends[i]
		w := want[p.PSN]
		var ref roce.Packet
		switch {
		case w != nil && p.PSN == m.psn || m.op != verbs.RDMARead:
			if w == nil {
				r.t.Errorf("at %v we send %v, Linux never", time.Duration(g.at), &p)
				return
			}
			ref = w.p
		default: // the rest of a READ
			ref = m.first.p
			off := p.PSN.Sub(m.psn) * s.mtu.Bytes()
			ref.PSN = p.PSN
			ref.RETH.VA += uint64(off)
			ref.RETH.DMALen -= uint32(off)
		}
		if ref.AckReq && !p.AckReq {
			r.t.Errorf("at %v we do not ask for an answer to %v", time.Duration(g.at), &p)
		}
		if s.typ != verbs.RC && p.AckReq {
			r.t.Errorf("at %v we ask for an answer to %v", time.Duration(g.at), &p)
		}
		if got, want := line(&p), line(&ref); got != want {
			r.t.Errorf("at %v we send\n%v, Linux\n%v", time.Duration(g.at), got, want)
			return
		}
		if p.PSN == next {
			x.requests++
			next = next.Next()
			if m.op == verbs.RDMARead {
				next = m.psn.Add(m.n)
			}
		} else if p.PSN.Before(next) {
			x.again++
		} else {
			r.t.Errorf("at %v we send %v before %v", time.Duration(g.at), &p, next)
			return
		}
	}
	if n := s.posted; n > 0 && len(s.outcomes()) >= n && s.outcomes()[n-1] != verbs.WRFlushErr && next != s.sends[n-1].psn.Add(s.sends[n-1].n) {
		r.t.Errorf("we have sent up to %v only", next)
	}
}

// checkSends compares the completions of sends.
func (r *replay) checkSends(s *side, x *row) {
	want := s.outcomes()
	if len(want) > s.posted {
		want = want[:s.posted]
	}
	if len(s.status) != len(want) {
		r.t.Errorf("%d of %d sends completed: %v", len(s.status), len(want), s.status)
		return
	}
	for i, wc := range s.status {
		m := s.sends[i]
		x.completions++
		if wc.WRID != uint64(2*i) || wc.Status != want[i] {
			r.t.Errorf("send %d (%v) completes as %+v, want %v", i, m.first, wc, want[i])
			return
		}
		if wc.Status == verbs.RetryExcErr {
			// IBTA Vol 1, 9.7.6.1.3: not before the timeouts, and each at most four times as long.
			all := time.Duration(s.retry+1) * s.timeout.Duration()
			if d := s.lastDone.Sub(s.did[0].at); d < all || d > 4*all {
				r.t.Errorf("we give up after %v, want %v at the least", d, all)
			}
		}
		if wc.Status != verbs.WCSuccess || m.length == 0 {
			continue
		}
		got := s.regions[i].Bytes()[:m.length]
		for j := 0; j < m.n && m.data == nil; j++ {
			part := got[j*s.mtu.Bytes():]
			part = part[:min(len(part), s.mtu.Bytes())]
			if !slices.ContainsFunc(payloads(s.in, m.psn.Add(j)), func(b []byte) bool { return bytes.Equal(b, part) }) {
				r.t.Errorf("send %d (%v) read %x in packet %d, which nobody sent", i, m.first, part, j)
			}
		}
	}
}

// checkReceives compares what was received with what the peer sent.
func (r *replay) checkReceives(s *side, x *row) {
	n := 0
	for _, m := range s.recvs {
		last := m.psn.Add(m.n - 1)
		if !m.consumes || n == len(s.buffers) || s.typ == verbs.RC && !last.Before(s.expected) && s.refused(m) == 0 {
			continue
		}
		if n >= len(s.received) {
			r.t.Errorf("%v was not received", m.first)
			return
		}
		wc, buf := s.received[n], s.buffers[n].Bytes()
		n++
		x.completions++
		if s.refused(m) != 0 {
			if wc.Status == verbs.WCSuccess {
				r.t.Errorf("%v was received, Linux refused it", m.first)
			}
			continue
		}
		if m.op == verbs.SendWithInv {
			continue
		}
		want := verbs.WC{WRID: uint64(2*n - 1), ByteLen: m.length, QPN: s.num, SrcQPN: s.peer, Opcode: verbs.WCRecv}
		if m.op == verbs.RDMAWriteWithImm {
			want.Opcode = verbs.WCRecvRDMAWithImm
		}
		if m.hasImm {
			want.ImmData = m.imm
			want.Flags |= verbs.WithImm
		}
		if m.solicited {
			want.Flags |= verbs.WithSolicited
		}
		if s.typ == verbs.UD {
			want.Flags |= verbs.WithGRH
			want.ByteLen += roce.GRHLen
			want.SrcQPN = m.first.p.DETH.SrcQP
			buf = buf[roce.GRHLen:]
		}
		if wc != want {
			r.t.Errorf("%v was received as\n%+v, want\n%+v", m.first, wc, want)
			return
		}
		if m.op != verbs.RDMAWriteWithImm && !bytes.Equal(buf[:m.length], m.data) {
			r.t.Errorf("%v was received with other contents", m.first)
			return
		}
	}
	if n < len(s.received) {
		if wc := s.received[n]; wc.Status != verbs.WRFlushErr {
			r.t.Errorf("received %+v, which nobody sent", wc)
		}
	}
}
