//go:build !doorbellportable

package park

import (
	"context"
	"os"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// unheard is how long a thread sleeper may be deaf to its context. Hearing one costs a
// registration that allocates, so short sleeps go without; longer ones pay for it once.
const unheard = time.Millisecond

// SleepThread is Sleep on a futex: the wake-up costs the ringer a system call and comes
// about as fast as one thread can wake another, and locked threads may sleep like this. But
// every sleeper holds a thread, so let only a few (Seats) do it, and none in a synctest
// bubble. A context that ends is noticed within a millisecond.
func (b *Bell) SleepThread(ctx context.Context, t Ticket, timeout time.Duration) error {
	defer b.Disarm()
	d := newDeadline(timeout)
	deaf := ctx.Done() != nil
	for left := timeout; ; left = d.left() {
		w := b.word.Load()
		b.threads.Store(1)
		yield.Point()
		if b.rung(t) {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if left == 0 {
			return os.ErrDeadlineExceeded
		}
		yield.Point()
		if !deaf {
			futexWait(&b.word, w, left)
			continue
		}
		if left < 0 || left > unheard {
			left = unheard
		}
		futexWait(&b.word, w, left)
		if !b.rung(t) {
			deaf = false
			defer context.AfterFunc(ctx, b.nudge)()
		}
	}
}

// wakeThreads wakes the thread sleepers, unless another ringer is just doing it. A sleeper
// reads word, sets threads, looks at seq, then sleeps while word is what it was: whoever
// takes threads back changes word, so that it does not fall asleep if it has not yet.
func (b *Bell) wakeThreads() {
	if b.threads.Swap(0) != 0 {
		yield.Point()
		b.nudge()
	}
}

// nudge makes the thread sleepers look around.
func (b *Bell) nudge() {
	b.word.Add(1)
	yield.Point()
	futexWake(&b.word)
}
