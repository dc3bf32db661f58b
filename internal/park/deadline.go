package park

import "time"

// deadline is a timeout that began when it was made.
type deadline struct {
	start   time.Time
	timeout time.Duration // negative: never
}

func newDeadline(timeout time.Duration) deadline {
	if timeout <= 0 {
		return deadline{timeout: timeout} // no need to know the time
	}
	return deadline{time.Now(), timeout}
}

// left returns how long there is to go, 0 when it is over, negative when it never ends.
func (d deadline) left() time.Duration {
	if d.timeout <= 0 {
		return d.timeout
	}
	return max(d.timeout-time.Since(d.start), 0)
}
