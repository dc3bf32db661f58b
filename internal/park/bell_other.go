//go:build !linux || doorbellportable

package park

import (
	"context"
	"time"
)

// SleepThread is Sleep where there are no futexes.
func (b *Bell) SleepThread(ctx context.Context, t Ticket, timeout time.Duration) error {
	return b.Sleep(ctx, t, timeout)
}

// wakeThreads is never called: threads stays 0.
func (b *Bell) wakeThreads() {}
