package transport

import (
	"fmt"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// SRQConfig says how to make a shared receive queue. Zero fields take the defaults beside them.
type SRQConfig struct {
	MaxWR  int // receives; 128, at most 65536; rounded up to a power of two
	MaxSGE int // entries of an SGList; 4, at most 32
}

// SRQ is a shared receive queue: its receives serve whichever of its queue pairs gets a
// message, oldest first. All methods may be called by any goroutine.
//
// A receive completes in the completion queue of the queue pair that took it. The others stay
// when a queue pair goes to ERR or is closed, so a queue pair is ended without losing any by
// moving it to ERR, waiting for its event verbs.EventQPLastWQEReached, draining its completion
// queue and closing it.
type SRQ struct {
	pd  *PD
	s   *qp.SRQ
	num uint32

	users  atomic.Int32 // queue pairs; negative once closed
	events atomic.Uint32
}

// srqClosed is what users is below once the queue is closed.
const srqClosed = -1 << 30

// CreateSRQ makes an empty shared receive queue for queue pairs of this domain.
func (pd *PD) CreateSRQ(cfg SRQConfig) (*SRQ, error) {
	s, err := qp.NewSRQ(pd.num, cfg.MaxWR, cfg.MaxSGE)
	if err != nil {
		return nil, fmt.Errorf("transport: create a shared receive queue: %w", err)
	}
	d := pd.dev
	srq := &SRQ{pd: pd, s: s, num: d.lastNum.Add(1)}
	s.OnLow = func() { d.events.raise(srq, verbs.EventSRQLimitReached) }
	return srq, nil
}

// Num returns the queue's number, which events about it carry.
func (s *SRQ) Num() uint32 { return s.num }

// PD returns the protection domain.
func (s *SRQ) PD() *PD { return s.pd }

// Len returns how many receives are posted that no queue pair has taken.
func (s *SRQ) Len() int { return s.s.Len() }

// Cap returns how many receives the queue has room for.
func (s *SRQ) Cap() int { return s.s.Depth() }

// PostRecv posts one receive. It never blocks and allocates nothing. It returns ErrQueueFull
// when there is no room, verbs.ErrTooManySGE when the list is too long, ErrClosed after Close.
func (s *SRQ) PostRecv(wr verbs.RecvWR) error {
	wrs := [1]verbs.RecvWR{wr}
	_, err := s.PostRecvList(wrs[:])
	return err
}

// PostRecvList posts a chain of receives and returns how many were taken; err says why
// wrs[n] was not.
func (s *SRQ) PostRecvList(wrs []verbs.RecvWR) (n int, err error) {
	if s.users.Load() < 0 {
		return 0, ErrClosed
	}
	return s.s.Post(wrs)
}

// SetLimit arms the low-water mark: as soon as fewer than n receives are left there is one
// event, verbs.EventSRQLimitReached, and the mark is disarmed; at once when fewer are left
// already. 0 disarms. n is at most Cap.
func (s *SRQ) SetLimit(n int) error {
	if n < 0 || n > s.s.Depth() {
		return fmt.Errorf("transport: limit of a shared receive queue: %d, want 0 to %d", n, s.s.Depth())
	}
	if s.users.Load() < 0 {
		return ErrClosed
	}
	if s.s.SetLimit(n) {
		s.s.OnLow()
	}
	return nil
}

// attach counts a queue pair in; ErrClosed after Close.
func (s *SRQ) attach() error {
	if s == nil {
		return nil
	}
	if s.users.Add(1) <= 0 {
		s.users.Add(-1)
		return ErrClosed
	}
	return nil
}

func (s *SRQ) detach() {
	if s != nil {
		s.users.Add(-1)
	}
}

// engine returns what queue pairs take from, nil for none.
func (s *SRQ) engine() *qp.SRQ {
	if s == nil {
		return nil
	}
	return s.s
}

// Close ends the queue; the receives in it, and an event of it that nobody has read, are
// forgotten. It fails with ErrInUse while queue pairs use it. Closing twice is ErrClosed.
func (s *SRQ) Close() error {
	if s.users.CompareAndSwap(0, srqClosed) {
		s.pd.dev.events.forget(s)
		return nil
	}
	if s.users.Load() < 0 {
		return ErrClosed
	}
	return ErrInUse
}

func (s *SRQ) pending() *atomic.Uint32 { return &s.events }

func (s *SRQ) event(t verbs.EventType) verbs.Event { return verbs.Event{Type: t, SRQN: s.num} }
