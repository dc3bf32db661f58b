package park

import (
	"context"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// Bell wakes everyone who waits for an object: a completion queue, a connection, an event
// queue. The zero value is ready. A Bell must not be copied after first use.
//
//	for {
//		if v, ok := take(); ok {
//			return v, nil
//		}
//		t := bell.Arm()
//		if ready() {
//			bell.Disarm()
//			continue
//		}
//		if err := bell.Sleep(ctx, t, -1); err != nil {
//			return nil, err
//		}
//	}
//
// Arm, Disarm and the sleeps may be called by any number of goroutines, Ring and RingVia
// by anyone.
type Bell struct {
	// seq counts the rings that found somebody armed; a Ticket is its value.
	seq atomic.Uint64
	// armed counts waiters between Arm and the end of their sleep.
	armed atomic.Int32

	// Thread sleepers: threads is 1 while one may sleep on the futex word, which changes
	// with every wake-up.
	threads atomic.Uint32
	word    atomic.Uint32

	// Channel sleepers: parked is the length of the list. due says that everyone on the
	// list is to be woken by whoever holds mu, or takes it next: so a ringer never waits
	// for mu.
	parked atomic.Int32
	due    atomic.Bool
	mu     sync.Mutex
	list   *sleeper // under mu
	spare  *sleeper // under mu; at most maxSpare
	spares int8     // under mu

	// queued says that the bell is on the list of a Waker, next what comes after it there.
	queued atomic.Bool
	next   *Bell
}

// Ticket is the moment of an Arm.
type Ticket uint64

// maxSpare bounds the sleepers that a bell keeps for its next waiters.
const maxSpare = 4

// sleeper is one goroutine that sleeps on a bell. On the list it belongs to the bell; taken
// off it by a ringer it belongs to the ringer until the token is sent.
type sleeper struct {
	wake       chan struct{} // one token a time on the list
	timer      *time.Timer   // nil until a timeout is asked for
	prev, next *sleeper
	listed     bool // under mu
}

// Arm announces a wait: rings after it count for the ticket, and what made the condition
// true before an earlier ring is visible. So look at the condition again after it, then call
// one of Disarm, Sleep and SleepThread, once.
func (b *Bell) Arm() Ticket {
	b.armed.Add(1)
	yield.Point()
	t := b.seq.Load()
	yield.Point()
	return Ticket(t)
}

// Disarm takes Arm back.
func (b *Bell) Disarm() {
	if b.armed.Add(-1) < 0 {
		panic("BUG: park: a bell disarmed that was not armed")
	}
}

// rung reports whether there was a ring since t.
func (b *Bell) rung(t Ticket) bool { return b.seq.Load() != uint64(t) }

// Ring wakes everyone who has armed. Call it after making the condition true. It never
// blocks, and costs one atomic load when nobody has armed. On a locked thread use RingVia.
func (b *Bell) Ring() { b.RingVia(nil) }

// RingVia is Ring for locked threads: thread sleepers are woken by a system call here and
// now, channel sleepers are left to the waker. A nil waker is the caller itself.
func (b *Bell) RingVia(w *Waker) {
	if b.armed.Load() != 0 {
		b.ring(w)
	}
}

func (b *Bell) ring(w *Waker) {
	yield.Point()
	b.seq.Add(1)
	yield.Point()
	if b.threads.Load() != 0 {
		b.wakeThreads()
	}
	if b.parked.Load() != 0 {
		if w != nil {
			w.wake(b)
		} else {
			b.wakeParked()
		}
	}
}

// wakeParked wakes the channel sleepers, or leaves that to the goroutine that is just now
// changing the list.
func (b *Bell) wakeParked() {
	b.due.Store(true)
	yield.Point()
	if b.mu.TryLock() {
		b.unlock()
	}
}

// unlock releases mu and does what ringers left to its holder. A ringer sets due before it
// tries the lock, and the holder looks at due after it has released it: one of them sees
// the other.
func (b *Bell) unlock() {
	for {
		var first *sleeper
		if b.due.CompareAndSwap(true, false) {
			first = b.takeAll()
		}
		yield.Point()
		b.mu.Unlock()
		yield.Point()
		for s := first; s != nil; {
			next := s.next // s is its own again once it has the token
			s.wake <- struct{}{}
			s = next
		}
		if !b.due.Load() || !b.mu.TryLock() {
			return
		}
	}
}

// takeAll takes everyone off the list. The caller holds mu and owes each a token.
func (b *Bell) takeAll() (first *sleeper) {
	first = b.list
	for s := first; s != nil; s = s.next {
		s.listed = false
	}
	b.list = nil
	b.parked.Store(0)
	return first
}

// Sleep sleeps until there was a ring since the ticket was drawn (nil), until ctx is done
// (its error), or for timeout (os.ErrDeadlineExceeded): not at all if it is 0, without end
// if it is negative. A ring is preferred to the other two. It disarms.
//
// It sleeps on a channel: not for locked threads. It allocates nothing once the bell has had
// as many sleepers as it has now, up to a few.
func (b *Bell) Sleep(ctx context.Context, t Ticket, timeout time.Duration) error {
	defer b.Disarm()
	if b.rung(t) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if timeout == 0 {
		return os.ErrDeadlineExceeded
	}
	yield.Point()
	s := b.enlist(nil)
	err := b.wait(ctx, t, s, timeout)
	if b.rung(t) {
		return nil
	}
	return err
}

// wait sleeps on s, which is listed, and gives it back.
func (b *Bell) wait(ctx context.Context, t Ticket, s *sleeper, timeout time.Duration) error {
	var expired <-chan time.Time
	if timeout > 0 {
		if s.timer == nil {
			s.timer = time.NewTimer(timeout)
		} else {
			s.timer.Reset(timeout)
		}
		expired = s.timer.C
	}
	for !b.rung(t) {
		yield.Point()
		select {
		case <-s.wake:
			if b.rung(t) {
				b.giveBack(s)
				return nil
			}
			// The token of a ring before our ticket, delivered late.
			b.enlist(s)
		case <-ctx.Done():
			b.delist(s)
			return ctx.Err()
		case <-expired:
			b.delist(s)
			return os.ErrDeadlineExceeded
		}
	}
	b.delist(s)
	return nil
}

// enlist puts s on the list, or a sleeper of the bell's choice if it is nil. The sleeper
// must look at seq afterwards and before it sleeps: a ringer looks at parked after it has
// changed seq.
func (b *Bell) enlist(s *sleeper) *sleeper {
	b.mu.Lock()
	if s == nil {
		if s = b.spare; s != nil {
			b.spare, s.next = s.next, nil
			b.spares--
		} else {
			s = &sleeper{wake: make(chan struct{}, 1)}
		}
	}
	s.prev, s.next, s.listed = nil, b.list, true
	if s.next != nil {
		s.next.prev = s
	}
	b.list = s
	b.parked.Add(1)
	b.unlock()
	return s
}

// delist takes s off the list, or takes the token of the ringer who already has, and gives
// it back.
func (b *Bell) delist(s *sleeper) {
	b.mu.Lock()
	listed := s.listed
	if listed {
		if s.prev != nil {
			s.prev.next = s.next
		} else {
			b.list = s.next
		}
		if s.next != nil {
			s.next.prev = s.prev
		}
		s.listed = false
		b.parked.Add(-1)
	}
	b.unlock()
	if !listed {
		<-s.wake
	}
	b.giveBack(s)
}

// giveBack keeps s, which is on no list and has no token coming, for the next sleeper, who may
// set its timer at once.
func (b *Bell) giveBack(s *sleeper) {
	if s.timer != nil {
		s.timer.Stop()
	}
	b.mu.Lock()
	s.prev, s.next = nil, nil
	if b.spares < maxSpare {
		s.next, b.spare = b.spare, s
		b.spares++
	}
	b.unlock()
}
