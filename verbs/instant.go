package verbs

import "time"

// Instant is a point in time in nanoseconds on the monotonic clock of the caller
// who drives an engine: a device's clock in production, virtual time in tests.
// Only differences mean anything. The zero Instant is an ordinary point in time.
type Instant int64

// Never is later than every instant; deadlines use it for "none".
const Never Instant = 1<<63 - 1

// Add returns t+d, saturating at [Never].
func (t Instant) Add(d time.Duration) Instant {
	if s := t + Instant(d); d < 0 || s >= t {
		return s
	}
	return Never
}

// Sub returns t-u.
func (t Instant) Sub(u Instant) time.Duration { return time.Duration(t - u) }
