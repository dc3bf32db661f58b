package qp

import (
	"fmt"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// maxRdAtomic is the largest number of READs and atomics outstanding in one direction.
const maxRdAtomic = 128

// edge is what one transition asks of the attributes: by transport, those it requires and
// those it also allows. CUR_STATE and STATE need no entry where they are always allowed.
type edge struct {
	legal              bool
	required, optional attrSets
}

// attrSets holds a set of attributes for each transport.
type attrSets struct{ rc, uc, ud verbs.AttrMask }

func (s *attrSets) of(t verbs.QPType) verbs.AttrMask {
	switch t {
	case verbs.RC:
		return s.rc
	case verbs.UC:
		return s.uc
	}
	return s.ud
}

// transitions is the table of legal moves (IBTA Vol 1, 11.2.5.2 and Linux's qp_state_table).
// Moves to RESET, which are always legal, and to ERR, which are legal but from RESET, take
// no attributes and are filled in by edgeOf. RTS to SQE happens only by itself.
var transitions = [verbs.QPStates][verbs.QPStates]edge{
	verbs.QPReset: {
		verbs.QPInit: {legal: true, required: attrSets{
			rc: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
			uc: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
			ud: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey,
		}},
	},
	verbs.QPInit: {
		verbs.QPInit: {legal: true, optional: attrSets{
			rc: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
			uc: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
			ud: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey,
		}},
		verbs.QPRTR: {legal: true, required: attrSets{
			rc: verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
				verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
			uc: verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN,
		}, optional: attrSets{
			rc: verbs.AttrPKeyIndex | verbs.AttrAccessFlags | verbs.AttrAltPath,
			uc: verbs.AttrPKeyIndex | verbs.AttrAccessFlags | verbs.AttrAltPath,
			ud: verbs.AttrPKeyIndex | verbs.AttrQKey,
		}},
	},
	verbs.QPRTR: {
		verbs.QPRTS: {legal: true, required: attrSets{
			rc: verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry |
				verbs.AttrMaxQPRdAtomic | verbs.AttrSQPSN,
			uc: verbs.AttrSQPSN,
			ud: verbs.AttrSQPSN,
		}, optional: attrSets{
			rc: verbs.AttrCurState | verbs.AttrAccessFlags | verbs.AttrMinRNRTimer |
				verbs.AttrAltPath | verbs.AttrPathMigState,
			uc: verbs.AttrCurState | verbs.AttrAccessFlags | verbs.AttrAltPath | verbs.AttrPathMigState,
			ud: verbs.AttrCurState | verbs.AttrQKey,
		}},
	},
	verbs.QPRTS: {
		verbs.QPRTS: {legal: true, optional: attrSets{
			rc: verbs.AttrCurState | verbs.AttrAccessFlags | verbs.AttrMinRNRTimer |
				verbs.AttrAltPath | verbs.AttrPathMigState,
			uc: verbs.AttrCurState | verbs.AttrAccessFlags | verbs.AttrAltPath | verbs.AttrPathMigState,
			ud: verbs.AttrCurState | verbs.AttrQKey,
		}},
		verbs.QPSQD: {legal: true, optional: attrSets{
			rc: verbs.AttrEnSQDAsyncNotify, uc: verbs.AttrEnSQDAsyncNotify, ud: verbs.AttrEnSQDAsyncNotify,
		}},
	},
	verbs.QPSQD: {
		verbs.QPSQD: {legal: true, optional: attrSets{
			rc: verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags | verbs.AttrAV |
				verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic |
				verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer | verbs.AttrAltPath | verbs.AttrPathMigState,
			uc: verbs.AttrPKeyIndex | verbs.AttrAccessFlags | verbs.AttrAV | verbs.AttrAltPath | verbs.AttrPathMigState,
			ud: verbs.AttrPKeyIndex | verbs.AttrQKey,
		}},
		verbs.QPRTS: {legal: true, optional: attrSets{
			rc: verbs.AttrCurState | verbs.AttrAccessFlags | verbs.AttrMinRNRTimer |
				verbs.AttrAltPath | verbs.AttrPathMigState,
			uc: verbs.AttrCurState | verbs.AttrAccessFlags | verbs.AttrAltPath | verbs.AttrPathMigState,
			ud: verbs.AttrCurState | verbs.AttrQKey,
		}},
	},
	verbs.QPSQE: {
		verbs.QPRTS: {legal: true, optional: attrSets{
			uc: verbs.AttrCurState | verbs.AttrAccessFlags,
			ud: verbs.AttrCurState | verbs.AttrQKey,
		}},
	},
}

func edgeOf(from, to verbs.QPState) edge {
	switch {
	case to >= verbs.QPStates:
		return edge{}
	case to == verbs.QPReset, to == verbs.QPErr && from != verbs.QPReset:
		return edge{legal: true}
	}
	return transitions[from][to]
}

// attrRanges are the attributes whose value has a range of its own, in the order of their
// mask bits: the largest valid value and how to read the given one.
var attrRanges = [...]struct {
	bit  verbs.AttrMask
	most uint32
	of   func(*verbs.QPAttr) uint32
}{
	{verbs.AttrPKeyIndex, 0, func(a *verbs.QPAttr) uint32 { return uint32(a.PKeyIndex) }},
	{verbs.AttrTimeout, uint32(verbs.MaxAckTimeout), func(a *verbs.QPAttr) uint32 { return uint32(a.Timeout) }},
	{verbs.AttrRetryCnt, 7, func(a *verbs.QPAttr) uint32 { return uint32(a.RetryCnt) }},
	{verbs.AttrRNRRetry, 7, func(a *verbs.QPAttr) uint32 { return uint32(a.RNRRetry) }},
	{verbs.AttrRQPSN, uint32(verbs.PSNMask), func(a *verbs.QPAttr) uint32 { return uint32(a.RQPSN) }},
	{verbs.AttrMaxQPRdAtomic, maxRdAtomic, func(a *verbs.QPAttr) uint32 { return uint32(a.MaxQPRdAtomic) }},
	{verbs.AttrMinRNRTimer, uint32(verbs.MaxRNRTimer), func(a *verbs.QPAttr) uint32 { return uint32(a.MinRNRTimer) }},
	{verbs.AttrSQPSN, uint32(verbs.PSNMask), func(a *verbs.QPAttr) uint32 { return uint32(a.SQPSN) }},
	{verbs.AttrMaxDestRdAtomic, maxRdAtomic, func(a *verbs.QPAttr) uint32 { return uint32(a.MaxDestRdAtomic) }},
	{verbs.AttrDestQPN, uint32(verbs.QPNMask), func(a *verbs.QPAttr) uint32 { return uint32(a.DestQPN) }},
}

func badAttr(m verbs.AttrMask, format string, args ...any) error {
	return fmt.Errorf("%w: %v: %s", verbs.ErrBadAttr, m, fmt.Sprintf(format, args...))
}

// checkAttr finds out whether a would be accepted in state from; it changes nothing.
func (q *QP) checkAttr(from verbs.QPState, a *verbs.QPAttr) error {
	if a.Mask&verbs.AttrState == 0 {
		return badAttr(verbs.AttrState, "missing")
	}
	e := edgeOf(from, a.State)
	if !e.legal {
		return fmt.Errorf("%w: %v to %v", verbs.ErrBadState, from, a.State)
	}
	required, optional := e.required.of(q.typ), e.optional.of(q.typ)
	given := a.Mask &^ verbs.AttrState
	if missing := required &^ given; missing != 0 {
		return badAttr(missing, "required from %v to %v", from, a.State)
	}
	if extra := given &^ (required | optional); extra != 0 {
		return badAttr(extra, "not allowed from %v to %v", from, a.State)
	}
	if given&verbs.AttrCurState != 0 && a.CurState != from {
		return badAttr(verbs.AttrCurState, "%v, but the state is %v", a.CurState, from)
	}
	if m := given & (verbs.AttrAltPath | verbs.AttrPathMigState); m != 0 {
		return badAttr(m, "path migration is not offered")
	}
	return checkRanges(a, given)
}

func checkRanges(a *verbs.QPAttr, given verbs.AttrMask) error {
	for i := range attrRanges {
		r := &attrRanges[i]
		if given&r.bit == 0 {
			continue
		}
		if v := r.of(a); v > r.most {
			return badAttr(r.bit, "%d exceeds %d", v, r.most)
		}
	}
	if given&verbs.AttrPort != 0 && a.Port != 1 {
		return badAttr(verbs.AttrPort, "%d; a device has port 1 only", a.Port)
	}
	if given&verbs.AttrAccessFlags != 0 && a.AccessFlags&^verbs.AccessAll != 0 {
		return badAttr(verbs.AttrAccessFlags, "unknown flags in %#x", uint16(a.AccessFlags))
	}
	if given&verbs.AttrPathMTU != 0 && !a.PathMTU.Valid() {
		return badAttr(verbs.AttrPathMTU, "code %d is not in 1..5", uint8(a.PathMTU))
	}
	if given&verbs.AttrAV != 0 && !a.AV.Remote.Addr().IsValid() {
		return badAttr(verbs.AttrAV, "no remote address")
	}
	return nil
}

// setAttr copies the attributes that a names.
func (q *QP) setAttr(a *verbs.QPAttr) {
	b := &q.attr
	m := a.Mask
	set := func(bit verbs.AttrMask, f func()) {
		if m&bit != 0 {
			f()
		}
	}
	set(verbs.AttrEnSQDAsyncNotify, func() { b.EnSQDAsyncNotify = a.EnSQDAsyncNotify })
	set(verbs.AttrAccessFlags, func() { b.AccessFlags = a.AccessFlags })
	set(verbs.AttrPKeyIndex, func() { b.PKeyIndex = a.PKeyIndex })
	set(verbs.AttrPort, func() { b.Port = a.Port })
	set(verbs.AttrQKey, func() { b.QKey = a.QKey })
	set(verbs.AttrAV, func() { b.AV = a.AV })
	set(verbs.AttrPathMTU, func() { b.PathMTU = a.PathMTU })
	set(verbs.AttrTimeout, func() { b.Timeout = a.Timeout })
	set(verbs.AttrRetryCnt, func() { b.RetryCnt = a.RetryCnt })
	set(verbs.AttrRNRRetry, func() { b.RNRRetry = a.RNRRetry })
	set(verbs.AttrRQPSN, func() { b.RQPSN = a.RQPSN })
	set(verbs.AttrMaxQPRdAtomic, func() { b.MaxQPRdAtomic = a.MaxQPRdAtomic })
	set(verbs.AttrMinRNRTimer, func() { b.MinRNRTimer = a.MinRNRTimer })
	set(verbs.AttrSQPSN, func() { b.SQPSN = a.SQPSN })
	set(verbs.AttrMaxDestRdAtomic, func() { b.MaxDestRdAtomic = a.MaxDestRdAtomic })
	set(verbs.AttrDestQPN, func() { b.DestQPN = a.DestQPN })
	// The mask tells a reader which attributes were ever set in this life.
	b.Mask |= m &^ verbs.AttrCurState
}

// Modify changes the state and the attributes that a.Mask names (ibv_modify_qp). When it
// fails nothing has changed, and the error wraps verbs.ErrBadState (no such transition, or
// a send queue still draining) or verbs.ErrBadAttr and names the attribute.
//
// A queue pair that moves itself (an error, the first request in RTR) raises events; one
// that is moved by Modify does not, SQ_DRAINED excepted.
func (q *QP) Modify(now verbs.Instant, a *verbs.QPAttr) error {
	if q.closed {
		return fmt.Errorf("%w: the queue pair is closed", verbs.ErrBadState)
	}
	from := q.state
	if err := q.checkAttr(from, a); err != nil {
		return err
	}
	if from == verbs.QPSQD && a.State == verbs.QPRTS && !q.drained() {
		return fmt.Errorf("%w: the send queue is still draining", verbs.ErrBadState)
	}
	switch a.State {
	case verbs.QPReset:
		q.moveTo(verbs.QPReset)
		q.forget()
		return nil
	case verbs.QPErr:
		q.enterErr(now)
		return nil
	}
	// Attributes first: the step that opens the gate must find them in place.
	q.setAttr(a)
	switch {
	case from == verbs.QPInit && a.State == verbs.QPRTR:
		q.enterRTR(now)
	case from == verbs.QPRTR && a.State == verbs.QPRTS:
		q.enterRTS(now)
	case from == verbs.QPRTS && a.State == verbs.QPSQD:
		q.notifySQ = a.Mask&verbs.AttrEnSQDAsyncNotify != 0 && a.EnSQDAsyncNotify
		q.moveTo(verbs.QPSQD)
		q.checkDrained()
	case from == verbs.QPSQD && a.State == verbs.QPSQD:
		q.resp.resize(int(q.attr.MaxDestRdAtomic))
	case from == verbs.QPSQD && a.State == verbs.QPRTS:
		// Nothing is started, so nothing of the old depth is outstanding.
		q.req.reads, q.req.readHead = ringOf(q.req.reads, int(q.attr.MaxQPRdAtomic)), 0
		q.req.rnrLeft = min(q.req.rnrLeft, q.attr.RNRRetry)
		q.moveTo(verbs.QPRTS)
	default:
		q.moveTo(a.State)
	}
	return nil
}

// ArmRTS checks a as attributes of the move from RTR to RTS and keeps them: the first valid
// request that arrives in RTR then makes that move, before it looks for a receive, and
// raises EvToRTS and EvCommEst. It may be called in INIT and RTR; RESET disarms. The error
// is Modify's.
func (q *QP) ArmRTS(a *verbs.QPAttr) error {
	if q.closed || q.state != verbs.QPInit && q.state != verbs.QPRTR {
		return fmt.Errorf("%w: arming RTS in %v", verbs.ErrBadState, q.state)
	}
	b := *a
	b.Mask |= verbs.AttrState
	b.State = verbs.QPRTS
	if err := q.checkAttr(verbs.QPRTR, &b); err != nil {
		return err
	}
	q.armed = &b
	return nil
}

// moveTo changes the state of both queues. It returns how many sends had waited.
func (q *QP) moveTo(to verbs.QPState) (waiting uint64) {
	q.state = to
	q.rq.move(to)
	return q.sq.move(to)
}

// enterRTR starts the responder.
func (q *QP) enterRTR(now verbs.Instant) {
	mtu := q.attr.PathMTU
	if q.typ == verbs.UD {
		mtu = q.udMTU
	}
	q.mtu = uint32(mtu.Bytes())
	q.mtuShift = uint8(mtu) + 7
	q.resp.start(seqBase+uint64(q.attr.RQPSN), int(q.attr.MaxDestRdAtomic))
	q.rtrAt = now
	q.moveTo(verbs.QPRTR)
}

// enterRTS starts the requester and, in one atomic step, publishes everything that was
// posted in RTR.
func (q *QP) enterRTS(now verbs.Instant) {
	q.startRequester()
	q.armed = nil
	n := q.moveTo(verbs.QPRTS)
	wait := max(now.Sub(q.rtrAt), 0)
	q.deferred.Store(n)
	q.deferredNs.Store(int64(wait))
	if n > 0 {
		c := &q.env.Counters
		c.Deferred.Add(n)
		c.Publications.Add(1)
		c.DeferredNanos.Add(uint64(wait / time.Nanosecond))
	}
}

// establish is what the first valid request in RTR does (IBTA Vol 1, 9.9.2.1 and o11-5.2.1:
// a request may arrive before the program knows that the connection is up). It comes before
// anything can complete, so that no program sees the completion in RTR.
func (q *QP) establish(now verbs.Instant) {
	if !q.commEst {
		q.commEst = true
		q.events |= EvCommEst
	}
	if q.armed == nil {
		return
	}
	q.setAttr(q.armed)
	q.enterRTS(now)
	q.events |= EvToRTS
	q.env.Counters.CommEst.Add(1)
}

// forget clears what a life leaves behind, its completions excepted.
func (q *QP) forget() {
	q.unsend()
	q.attr = verbs.QPAttr{}
	q.req = requester{cur: q.sq.taken}
	q.req.idle()
	q.resp = responder{res: q.resp.res[:0]}
	q.armed, q.rtrAt = nil, 0
	q.commEst, q.notifySQ = false, false
	q.last = lastWQE{}
	q.mtu, q.mtuShift = 0, 0
	q.deadline = verbs.Never
}

// drained reports whether no send is started and unfinished.
func (q *QP) drained() bool { return q.sq.retired.Load() == q.sq.taken }

// checkDrained raises SQ_DRAINED when it is due and was asked for.
func (q *QP) checkDrained() {
	if q.state == verbs.QPSQD && q.notifySQ && q.drained() {
		q.notifySQ = false
		q.events |= EvSQDrained
	}
}
