//go:build !linux || doorbellportable

package park

// Kicker wakes a sleeper that waits for kicks alone; it has no descriptor here. Make it with
// NewKicker.
//
// Arm, Disarm and Sleep belong to the sleeper, Kick to anyone.
type Kicker struct{ Parker }

// NewKicker makes a Kicker that is awake. The error is always nil here.
func NewKicker() (*Kicker, error) { return new(Kicker), nil }

// FD returns -1: no descriptor, and Sleep is the only way to wait.
func (k *Kicker) FD() int { return -1 }

// Disarm says that the sleeper is awake. It reports whether there was a Kick since Arm.
func (k *Kicker) Disarm() bool { return k.word.Swap(awake) != armed }

// Kick wakes the sleeper if it has armed. Call it after giving it work. It never blocks,
// costs one load while the sleeper is awake, and reports whether it had to wake somebody.
func (k *Kicker) Kick() bool { return k.Wake() }

// Close does nothing here.
func (k *Kicker) Close() error { return nil }
