package qp

import (
	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// SendWQE is a work queue entry of a send queue. It holds no pointers; its SGEs and inline
// data live in the queue's arrays at the same position.
type SendWQE struct {
	WRID       uint64
	RemoteAddr uint64
	CompareAdd uint64
	Swap       uint64
	// Length is the message's length in bytes, at most verbs.MaxMessage.
	Length uint32
	// RKey is the target's key, the key to invalidate or the one to bind.
	RKey    uint32
	ImmData uint32
	// AH, RemoteQPN and RemoteQKey address a UD message.
	AH         verbs.AH
	RemoteQPN  verbs.QPN
	RemoteQKey uint32
	Opcode     verbs.Opcode
	Flags      verbs.SendFlags
	BindAccess verbs.Access
	// NumSGE is the number of SGEs; 0 with Inline set in Flags: the data is in the slot.
	NumSGE uint8
}

// Fate is what the wire must do with the oldest entry it has not taken yet.
type Fate uint8

const (
	// FateWait: nothing to take, or the gate is closed.
	FateWait Fate = iota
	// FateSend: hand it to the requester.
	FateSend
	// FateFlush: complete it with WR_FLUSH_ERR.
	FateFlush
	// FateForget: dispose of it without a completion.
	FateForget
)

// SendQueue is a ring of WQEs with a gate: the deferred doorbell.
//
// In RTR and SQD posts are taken and wait; the move to RTS publishes all of them in one
// atomic step, in the order of posting; in RTS they go out at once; in SQE and ERR they are
// flushed; in RESET and INIT they are refused.
//
// Post and InUse may be called by any goroutine, everything else by the wire's owner only.
type SendQueue struct {
	wqes      []SendWQE
	sges      []verbs.SGE
	inline    []byte
	maxSGE    int
	maxInline int
	mem       Memory
	pd        PD
	ops       opSet
	sigAll    bool
	datagrams bool   // UD: each request says where it goes
	mtu       uint32 // bound of a message where the type has one (UD), else MaxMessage
	gate
}

// sendRefuse are the states in which posting a send is an error.
var sendRefuse = states(verbs.QPReset, verbs.QPInit)

// sendGateClosed are the states in which a posted send waits without a doorbell.
var sendGateClosed = states(verbs.QPRTR, verbs.QPSQD)

// opSet is a set of verbs.Opcode, a bit each.
type opSet uint16

// sendOps are the operations each QP type offers.
func sendOps(t verbs.QPType) opSet {
	const (
		sends  = 1<<verbs.Send | 1<<verbs.SendWithImm
		writes = 1<<verbs.RDMAWrite | 1<<verbs.RDMAWriteWithImm
		rcOnly = 1<<verbs.RDMARead | 1<<verbs.AtomicCmpAndSwp | 1<<verbs.AtomicFetchAdd |
			1<<verbs.LocalInv | 1<<verbs.BindMW | 1<<verbs.SendWithInv
	)
	switch t {
	case verbs.RC:
		return sends | writes | rcOnly
	case verbs.UC:
		return sends | writes | 1<<verbs.BindMW
	default:
		return sends
	}
}

// newSendQueue makes a queue in RESET. start is the first position, for tests that begin
// near a wrap; positions never restart while the queue exists.
func newSendQueue(t verbs.QPType, qpCap verbs.QPCap, sigAll bool, mem Memory, pd PD, start uint64) *SendQueue {
	q := &SendQueue{
		maxSGE: qpCap.MaxSendSGE, maxInline: qpCap.MaxInlineData,
		mem: mem, pd: pd, ops: sendOps(t), sigAll: sigAll, mtu: verbs.MaxMessage,
		datagrams: t == verbs.UD,
	}
	q.init(qpCap.MaxSendWR, start)
	q.wqes = make([]SendWQE, q.depth)
	q.sges = make([]verbs.SGE, int(q.depth)*q.maxSGE)
	q.inline = make([]byte, int(q.depth)*q.maxInline)
	return q
}

// Post puts a chain of work requests into the queue and returns how many were taken. The
// chain becomes visible to the wire whole. When a request is malformed or the queue runs
// full, those before it are taken, err says why wrs[n] was not, and nothing of it or of
// those after it remains.
//
// ring tells the caller to ring the doorbell: to mark the queue pair ready on its wire. It
// is false while the gate is closed, for then the move to RTS rings for all, unless the
// queue pair has begun another life meanwhile.
//
// Post never blocks, allocates nothing, reads no clock and makes no system call.
func (q *SendQueue) Post(wrs []verbs.SendWR) (n int, ring bool, err error) {
	valid := 0
	for valid < len(wrs) {
		if err = q.check(&wrs[valid]); err != nil {
			break
		}
		valid++
	}
	if valid == 0 {
		if err != nil && sendRefuse.has(q.stateNow()) {
			err = verbs.ErrBadState
		}
		return 0, false, err
	}
	pos, took, full := q.reserve(uint64(valid), sendRefuse)
	if full != nil {
		return 0, false, full
	}
	for i := range took {
		q.write(pos+i, &wrs[i])
	}
	q.publish(pos, took)
	if int(took) < valid {
		err = verbs.ErrQueueFull
	}
	return int(took), q.mustRing(pos, sendGateClosed), err
}

// check finds everything that can be wrong with a request before a slot is reserved. Keys
// are not looked at, except for inline data: like an adapter, the wire looks them up when
// it gets there, and a bad one completes with LOC_PROT_ERR.
func (q *SendQueue) check(wr *verbs.SendWR) error {
	if wr.Opcode > 15 || q.ops>>wr.Opcode&1 == 0 {
		return verbs.ErrBadOpcode
	}
	if len(wr.SGList) > q.maxSGE {
		return verbs.ErrTooManySGE
	}
	n := uint64(len(wr.InlineData))
	for i := range wr.SGList {
		n += uint64(wr.SGList[i].Length)
	}
	switch wr.Opcode {
	case verbs.AtomicCmpAndSwp, verbs.AtomicFetchAdd:
		if n != 8 || len(wr.SGList) != 1 {
			return verbs.ErrBadWR
		}
	case verbs.LocalInv:
		if n != 0 {
			return verbs.ErrBadWR
		}
	case verbs.BindMW:
		if len(wr.SGList) > 1 || wr.InlineData != nil || wr.Flags&verbs.Inline != 0 || n > 1<<32-1 {
			return verbs.ErrBadWR
		}
		return nil
	}
	if q.datagrams && (wr.AH == 0 || wr.RemoteQPN > verbs.QPNMask) {
		return verbs.ErrBadWR
	}
	if n > uint64(q.mtu) {
		return verbs.ErrTooLong
	}
	if wr.InlineData == nil && wr.Flags&verbs.Inline == 0 {
		return nil
	}
	return q.checkInline(wr, n)
}

// inlineOps are the operations whose data may be inline: those that send any.
const inlineOps = opSet(1<<verbs.Send | 1<<verbs.SendWithImm | 1<<verbs.SendWithInv |
	1<<verbs.RDMAWrite | 1<<verbs.RDMAWriteWithImm)

func (q *SendQueue) checkInline(wr *verbs.SendWR, n uint64) error {
	if inlineOps>>wr.Opcode&1 == 0 || wr.InlineData != nil && len(wr.SGList) != 0 {
		return verbs.ErrBadWR
	}
	if n > uint64(q.maxInline) {
		return verbs.ErrInlineTooBig
	}
	for i := range wr.SGList {
		s := &wr.SGList[i]
		if _, st := q.mem.Local(q.pd, s.LKey, s.Addr, s.Length, 0); st != verbs.WCSuccess {
			return verbs.ErrBadKey
		}
	}
	return nil
}

// write fills a reserved slot. Nothing here can fail.
func (q *SendQueue) write(pos uint64, wr *verbs.SendWR) {
	i := pos & q.mask
	w := &q.wqes[i]
	w.WRID, w.RemoteAddr, w.CompareAdd, w.Swap = wr.WRID, wr.RemoteAddr, wr.CompareAdd, wr.Swap
	w.RKey, w.ImmData = wr.RKey, wr.ImmData
	if wr.Opcode == verbs.SendWithInv || wr.Opcode == verbs.LocalInv {
		w.RKey = wr.InvalidateRKey
	}
	w.AH, w.RemoteQPN, w.RemoteQKey = wr.AH, wr.RemoteQPN, wr.RemoteQKey
	w.Opcode, w.Flags, w.NumSGE = wr.Opcode, wr.Flags, uint8(len(wr.SGList))
	w.BindAccess = wr.BindAccess
	if q.sigAll {
		w.Flags |= verbs.Signaled
	}
	yield.Point()
	if wr.InlineData != nil || wr.Flags&verbs.Inline != 0 {
		q.writeInline(i, w, wr)
		return
	}
	n := uint32(0)
	sges := q.sges[int(i)*q.maxSGE:]
	for j := range wr.SGList {
		sges[j] = wr.SGList[j]
		n += wr.SGList[j].Length
	}
	w.Length = n
}

func (q *SendQueue) writeInline(i uint64, w *SendWQE, wr *verbs.SendWR) {
	buf := q.inline[int(i)*q.maxInline:][:q.maxInline]
	n := copy(buf, wr.InlineData)
	for j := range wr.SGList {
		s := &wr.SGList[j]
		// A region closed since check leaves zeros: its owner broke the contract that
		// memory of a posted request stays registered.
		b, _ := q.mem.Local(q.pd, s.LKey, s.Addr, s.Length, 0)
		m := n + copy(buf[n:], b)
		n += int(s.Length)
		clear(buf[m:n])
	}
	w.Flags |= verbs.Inline
	w.NumSGE = 0
	w.Length = uint32(n)
}

// InUse returns how many slots are taken: posted, in flight or waiting for a poster of an
// earlier life. Any goroutine.
func (q *SendQueue) InUse() int { return q.inUse() }

// Depth returns the number of slots.
func (q *SendQueue) Depth() int { return int(q.depth) }

// move changes the state and seals the fate of what the old life leaves behind. It returns
// how many entries had been reserved and not yet taken: on the way to RTS, how many this
// one step publishes.
func (q *SendQueue) move(to verbs.QPState) (waiting uint64) {
	from := q.state
	reserved := q.setState(to)
	switch {
	case to == verbs.QPReset:
		q.reset(reserved)
	case from == verbs.QPSQE && to == verbs.QPRTS:
		q.sealed.Store(reserved)
	}
	return reserved - max(q.taken, q.sealed.Load())
}

// next says what to do with the oldest entry not taken yet and where it is.
func (q *SendQueue) next() (pos uint64, fate Fate) {
	if !q.readable() {
		return q.taken, FateWait
	}
	switch {
	case q.taken < q.resetCut:
		return q.taken, FateForget
	case q.taken < q.sealed.Load():
		return q.taken, FateFlush
	}
	switch q.state {
	case verbs.QPRTS:
		return q.taken, FateSend
	case verbs.QPErr, verbs.QPSQE:
		return q.taken, FateFlush
	}
	return q.taken, FateWait
}

// take moves the entry at taken to the wire; its slot stays in use until retire.
func (q *SendQueue) take() { q.taken++ }

// retire frees the n oldest slots that were taken.
func (q *SendQueue) retire(n uint64) {
	q.free(n)
	if q.retired.Load() > q.taken {
		panic("BUG: qp: a send slot retired that was never taken")
	}
}

// at returns the entry at a position between retired and taken, or at taken when next says so.
func (q *SendQueue) at(pos uint64) *SendWQE { return &q.wqes[pos&q.mask] }

// sgList returns the SGEs of the entry at pos.
func (q *SendQueue) sgList(pos uint64) []verbs.SGE {
	i := int(pos & q.mask)
	return q.sges[i*q.maxSGE:][:q.wqes[i].NumSGE]
}

// inlineData returns the inline data of the entry at pos.
func (q *SendQueue) inlineData(pos uint64) []byte {
	i := int(pos & q.mask)
	return q.inline[i*q.maxInline:][:q.wqes[i].Length]
}
