package park

import (
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// States of the one word that a sleeper and its wakers share.
//
//	         Arm             Sleep
//	awake --------> armed ----------> asleep
//	  ^               |                  |
//	  +---------------+------------------+
//	   Disarm, timeout: the sleeper; Wake: any waker, who owes a wake-up if it was asleep
const (
	awake uint32 = iota
	armed
	asleep
)

// Parker lets one ordinary goroutine sleep until another wakes it. It sleeps on a channel:
// on a thread that is locked use ThreadParker. The zero value is ready and awake.
//
// Arm, Disarm and Sleep belong to the sleeper, Wake to anyone. In a synctest bubble all of
// them must be called inside.
type Parker struct {
	word atomic.Uint32
	// wake passes one token per sleep that a waker ended. Made by the sleeper in its first Arm.
	wake  chan struct{}
	timer *time.Timer
}

// Arm announces a sleep: from here on every Wake is noticed. Look at the condition again
// after it, then call Sleep or Disarm.
func (p *Parker) Arm() {
	if p.wake == nil {
		p.wake = make(chan struct{}, 1)
	}
	p.word.Store(armed)
	yield.Point()
}

// Disarm takes Arm back.
func (p *Parker) Disarm() { p.word.Store(awake) }

// Sleep sleeps until there was a Wake since Arm, or for timeout: not at all if it is 0,
// without end if it is negative. It reports whether there was a Wake, and disarms.
func (p *Parker) Sleep(timeout time.Duration) bool {
	if !p.word.CompareAndSwap(armed, asleep) {
		return true
	}
	yield.Point()
	if p.waitToken(timeout) {
		return true
	}
	if p.word.Swap(awake) == asleep {
		return false
	}
	<-p.wake // a waker was quicker than the timer's end and owes a token
	return true
}

// waitToken waits for a waker's token; false when the timeout is over.
func (p *Parker) waitToken(timeout time.Duration) bool {
	if timeout < 0 {
		<-p.wake
		return true
	}
	if timeout == 0 {
		return false
	}
	if p.timer == nil {
		p.timer = time.NewTimer(timeout)
	} else {
		p.timer.Reset(timeout)
	}
	defer p.timer.Stop()
	select {
	case <-p.wake:
		return true
	case <-p.timer.C:
		return false
	}
}

// Wake ends the sleep of a sleeper that has armed, now or as soon as it tries. Call it after
// making the condition true. It never blocks, costs one load when the sleeper is awake, and
// reports whether it had to wake somebody. Any goroutine but one on a locked thread.
func (p *Parker) Wake() bool {
	if p.word.Load() == awake {
		return false
	}
	yield.Point()
	if p.word.Swap(awake) != asleep {
		return false
	}
	p.wake <- struct{}{} // has room: one token a sleep, and the sleeper takes it
	return true
}
