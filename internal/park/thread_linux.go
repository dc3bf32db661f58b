//go:build !doorbellportable

package park

import (
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// ThreadParker lets one thread sleep until another wakes it: for goroutines locked to their
// thread, and for ordinary ones that may hold a thread while they sleep. The zero value is
// ready and awake.
//
// Arm, Disarm and Sleep belong to the sleeper, Wake to anyone, on any thread.
type ThreadParker struct {
	word atomic.Uint32 // the states of Parker, and the futex
}

// Arm announces a sleep: from here on every Wake is noticed. Look at the condition again
// after it, then call Sleep or Disarm.
func (p *ThreadParker) Arm() {
	p.word.Store(armed)
	yield.Point()
}

// Disarm takes Arm back.
func (p *ThreadParker) Disarm() { p.word.Store(awake) }

// Sleep sleeps until there was a Wake since Arm, or for timeout: not at all if it is 0,
// without end if it is negative. It reports whether there was a Wake, and disarms.
func (p *ThreadParker) Sleep(timeout time.Duration) bool {
	if !p.word.CompareAndSwap(armed, asleep) {
		return true
	}
	d := newDeadline(timeout)
	for left := timeout; left != 0; left = d.left() {
		yield.Point()
		futexWait(&p.word, asleep, left)
		if p.word.Load() != asleep {
			return true
		}
	}
	return p.word.Swap(awake) != asleep
}

// Wake ends the sleep of a sleeper that has armed, now or as soon as it tries. Call it after
// making the condition true. It never blocks, makes a system call only when the sleeper
// sleeps, costs one load when it is awake, and reports whether it had to wake somebody. Any
// goroutine.
func (p *ThreadParker) Wake() bool {
	if p.word.Load() == awake {
		return false
	}
	yield.Point()
	if p.word.Swap(awake) != asleep {
		return false
	}
	yield.Point()
	futexWake(&p.word)
	return true
}
