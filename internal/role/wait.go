package role

// Waiter is one who waits for something that owners of wires bring about: a completion.
type Waiter interface {
	// Ready reports whether what is waited for is there. It drives: calls Poll on the roles
	// that could bring it, then looks.
	Ready() bool
	// Arm has the next completion end Park. An owner pushes a completion, then looks
	// whether the bell is armed; so whoever arms and then looks misses nothing.
	Arm()
	// Disarm takes Arm back. A wake-up that is on its way already may end the next Park.
	Disarm()
	// Park blocks until the bell rings, without holding any role. It may return early for no
	// reason. An error (a cancelled context, a closed queue) ends the wait. Before it blocks
	// it may call [Role.HandBack], so that the thread takes over at once.
	Park() error
}

// Await waits until w is ready: poll, arm the bell, poll again, park. The second poll is
// what makes it right: a completion between the first poll and Arm rings no bell. A result
// that is there is preferred over Park's error. Spinning for a while before is the caller's
// business; it then calls Await when that was in vain.
func Await(w Waiter) error {
	for {
		if w.Ready() {
			return nil
		}
		w.Arm()
		if w.Ready() {
			w.Disarm()
			return nil
		}
		if err := w.Park(); err != nil {
			w.Disarm()
			if w.Ready() {
				return nil
			}
			return err
		}
	}
}
