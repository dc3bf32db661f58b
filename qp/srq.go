package qp

import (
	"fmt"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// SRQ is a shared receive queue: receives that the queue pairs of one protection domain take
// from as their messages come, oldest first.
//
//	posters (any goroutine)                   owners of wires
//	Post, PostRecv ---> [ w w w w w ] ---try-lock---> a queue pair's own receive queue, depth 1
//	                    (srqRing)
//
// A queue pair that needs a receive moves the oldest one here to its own receive queue, whose
// only slot it is; from there on everything is as without an SRQ. What a queue pair took is
// its own: it is used, or flushed when the queue pair goes to ERR, and lost when that is
// reset or destroyed first. What nobody took stays.
//
// Takers are the owners of the queue pairs' wires; a try-lock keeps them apart. One that
// finds it held treats the queue as empty, for a wire's owner must not wait: its peer comes
// back after an RNR NAK. With one wire there is one taker.
type SRQ struct {
	// OnLow, when not nil, is called once for each SetLimit when fewer receives are left than
	// that said: by a wire's owner during a step, so it must not block. Set it before use.
	OnLow func()

	// Set when the queue is made, then only read.

	pd     PD
	maxSGE int

	// tail is where posters begin to look for the newest ring, head where takers do for the
	// oldest: see srqRing. They change with Resize only.
	tail, head atomic.Pointer[srqRing]
	_          [128]byte

	// taken counts the receives that queue pairs ever took: written under busy, read by posters.
	taken atomic.Uint64
	busy  atomic.Bool
	// limit is the low-water mark; 0 when it is not armed.
	limit atomic.Int64
	_     [128]byte
}

// NewSRQ makes an empty queue for depth receives, rounded up to a power of two, of at most
// maxSGE entries each; zeros take the defaults of verbs.QPCap. It fails with an error that
// wraps verbs.ErrBadAttr when one is out of range.
func NewSRQ(pd PD, depth, maxSGE int) (*SRQ, error) {
	c, err := resolveCap(verbs.QPCap{MaxRecvWR: depth, MaxRecvSGE: maxSGE})
	if err != nil {
		return nil, err
	}
	return newSRQ(pd, c, 0), nil
}

// newSRQ makes a queue whose positions begin at start. They have 63 bits and never come around.
func newSRQ(pd PD, c verbs.QPCap, start uint64) *SRQ {
	s := &SRQ{pd: pd, maxSGE: c.MaxRecvSGE}
	r := newSRQRing(c.MaxRecvWR, s.maxSGE)
	r.reserved.Store(start << 1)
	s.taken.Store(start)
	s.tail.Store(r)
	s.head.Store(r)
	return s
}

// Depth returns the number of slots, MaxSGE the longest SGList. Any goroutine.
func (s *SRQ) Depth() int {
	r, _ := s.newest()
	return int(r.depth)
}

// MaxSGE returns the largest number of SGEs of a receive. Any goroutine.
func (s *SRQ) MaxSGE() int { return s.maxSGE }

// Len returns how many receives are posted and not taken. Any goroutine.
func (s *SRQ) Len() int {
	taken := s.taken.Load() // first: it never passes reserved
	yield.Point()
	r, end := s.newest()
	return int(min(end-taken, r.depth))
}

// Post puts a chain of receives into the queue and returns how many were taken; those before
// a malformed one or the end of the room are, and err says why wrs[n] was not. It never
// blocks and allocates nothing. Any goroutine.
func (s *SRQ) Post(wrs []verbs.RecvWR) (n int, err error) {
	valid := 0
	for valid < len(wrs) {
		if len(wrs[valid].SGList) > s.maxSGE {
			err = verbs.ErrTooManySGE
			break
		}
		valid++
	}
	if valid == 0 {
		return 0, err
	}
	r, pos, took := s.reserve(uint64(valid))
	for i := range took {
		at := (pos + i) & r.mask
		writeRecv(&r.wqes[at], r.sges[int(at)*s.maxSGE:], &wrs[i])
	}
	for i := took; i > 0; i-- {
		yield.Point()
		r.slots.Publish(pos + i - 1)
	}
	if int(took) < valid {
		err = verbs.ErrQueueFull
	}
	return int(took), err
}

// reserve takes up to n slots in a row of r for the caller; 0 when there is no room.
func (s *SRQ) reserve(n uint64) (r *srqRing, pos, took uint64) {
	for {
		r, pos = s.newest()
		// taken may have passed pos since; then the room is overstated and the swap fails.
		took = min(n, r.depth-(pos-s.taken.Load()))
		if took == 0 {
			return r, pos, 0
		}
		yield.Point()
		if r.reserved.CompareAndSwap(pos<<1, (pos+took)<<1) {
			return r, pos, took
		}
	}
}

// take moves the oldest receive to w and sges and reports whether there was one. Owner of a
// wire only.
func (s *SRQ) take(w *RecvWQE, sges []verbs.SGE) bool {
	if !s.busy.CompareAndSwap(false, true) {
		return false
	}
	yield.Point()
	pos := s.taken.Load()
	r := s.head.Load()
	ok := r.slots.Readable(pos)
	if !ok {
		// Only now, so as not to look each time at a word that posters write.
		r = s.oldest(pos)
		ok = r.slots.Readable(pos)
	}
	if ok {
		i := int(pos & r.mask)
		*w = r.wqes[i]
		copy(sges, r.sges[i*s.maxSGE:][:w.NumSGE])
		yield.Point()
		s.taken.Store(pos + 1)
	}
	s.busy.Store(false)
	return ok
}

// SetLimit arms the limit: when fewer than n receives are left, the queue is low, once, and
// then the limit is disarmed (IBTA Vol 1, 10.2.9). It returns true when that
// is so already, and then the event is the caller's to raise. 0 disarms. Any goroutine.
func (s *SRQ) SetLimit(n int) (low bool) {
	s.limit.Store(int64(n))
	yield.Point()
	return s.low()
}

// low reports, once for each SetLimit, that fewer receives are left than the limit says.
func (s *SRQ) low() bool {
	l := s.limit.Load()
	if l == 0 || int64(s.Len()) >= l {
		return false
	}
	yield.Point()
	return s.limit.CompareAndSwap(l, 0)
}

// checkSRQ finds out whether a queue pair may use the queue.
func checkSRQ(cfg *Config) error {
	if cfg.SRQ != nil && cfg.SRQ.pd != cfg.PD {
		return fmt.Errorf("%w: SRQ: of another protection domain", verbs.ErrBadAttr)
	}
	return nil
}

// stage moves the oldest receive of the SRQ to the queue pair's own queue; false when there
// is none.
func (q *QP) stage() bool {
	s, rq := q.srq, q.rq
	if rq.inUse() != 0 {
		panic("BUG: qp: the place for a shared receive is not free")
	}
	// Only the owner posts here, so the slot is written before it is reserved: there may be
	// nothing to post.
	i := int(rq.taken & rq.mask)
	ok := s.take(&rq.wqes[i], rq.sges[i*rq.maxSGE:])
	if s.low() {
		q.env.Low = append(q.env.Low, s)
	}
	if !ok {
		return false
	}
	pos, _, err := rq.reserve(1, recvRefuse)
	if err != nil {
		panic("BUG: qp: a shared receive was taken in RESET")
	}
	rq.publish(pos, 1)
	return true
}

// lastWQE is how far a queue pair with an SRQ is from having flushed the last receive that
// it took.
type lastWQE struct {
	raised bool
	// waits: the last completion waits for the commit that follows number at.
	waits bool
	at    uint64
}

// noteLastWQE raises EvLastWQEReached, once, when the queue pair is in ERR, holds no receive
// any more, and the completions of all it held are visible: then the program may drain the
// completion queue and destroy the queue pair without losing a receive (IBTA Vol 1, 10.2.9).
// Events come before the completions of their step, so this one waits for a later step; the
// deadline makes the wire come back for it.
func (q *QP) noteLastWQE(now verbs.Instant) {
	l := &q.last
	if q.srq == nil || q.state != verbs.QPErr || l.raised || q.rq.inUse() != 0 {
		return
	}
	if q.recvCQ.dirty && (!l.waits || l.at == q.recvCQ.commits) {
		l.waits, l.at = true, q.recvCQ.commits
		q.deadline = now
		return
	}
	l.raised = true
	q.events |= EvLastWQEReached
}
