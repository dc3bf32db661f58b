package transport

import (
	"errors"
	"fmt"
	"sync"
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

	mu     sync.Mutex   // Resize and SetLimit, one at a time
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

// Cap returns how many receives the queue has room for; Resize changes it.
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
	s.mu.Lock()
	defer s.mu.Unlock()
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

// Resize gives the queue room for at least maxWR receives, 1 to 65536, rounded up to a power of
// two, while it is in use (ibv_modify_srq with IBV_SRQ_MAX_WR): nobody who posts or receives
// waits for it, and what is posted stays, in its order. Completion queues do not grow along;
// one that is to hold a completion for each receive wants its own [CQ.Resize] first.
//
// It changes nothing and returns an error that wraps verbs.ErrBadAttr when maxWR is out of range
// or less than an armed limit, ErrQueueFull when more receives are posted and not taken than would
// fit, ErrInUse when it was called seven times before what was posted at the first was
// taken, for that memory is still in use; ErrClosed after Close.
func (s *SRQ) Resize(maxWR int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users.Load() < 0 {
		return ErrClosed
	}
	err := s.s.Resize(maxWR)
	switch {
	case errors.Is(err, qp.ErrResizes):
		return fmt.Errorf("transport: resize a shared receive queue: %w: %w", ErrInUse, err)
	case err != nil:
		return fmt.Errorf("transport: resize a shared receive queue: %w", err)
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
