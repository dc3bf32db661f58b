package transport

import (
	"sync"
	"sync/atomic"
	"time"
)

// deadline is a time that ends calls. Setting it again allocates nothing.
type deadline struct {
	expired atomic.Bool
	wake    func() // called when it expires

	mu    sync.Mutex
	at    time.Time // zero for never
	timer *time.Timer
}

// set sets the time; one that is over expires at once, the zero time never.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
	d.at = t
	if t.IsZero() {
		d.expired.Store(false)
		return
	}
	left := time.Until(t)
	if left <= 0 {
		d.expired.Store(true)
		d.wake()
		return
	}
	d.expired.Store(false)
	if d.timer == nil {
		d.timer = time.AfterFunc(left, d.fire)
	} else {
		d.timer.Reset(left)
	}
}

// stop ends the timer without expiring.
func (d *deadline) stop() { d.set(time.Time{}) }

// fire is the timer's function. It may come late, for a time that was since replaced.
func (d *deadline) fire() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.at.IsZero() || d.expired.Load() {
		return
	}
	if left := time.Until(d.at); left > 0 {
		d.timer.Reset(left)
		return
	}
	d.expired.Store(true)
	d.wake()
}
