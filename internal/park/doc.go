// Package park is how transport sleeps and wakes. Everything in it follows one protocol,
// which is what loses no wake-up:
//
//	waiter                               waker
//	1. arm                               1. make the condition true
//	2. look at the condition again       2. ring, wake or kick
//	3. true: disarm; false: sleep
//
// Arming and looking are a store and a load, making true and ringing likewise, the other way
// round. The Go memory model makes sync/atomic operations sequentially consistent, so of the
// two loads at least one sees the other side's store: either the waiter sees the condition
// or the waker sees that somebody has armed. The condition must therefore be made of
// sync/atomic values (or a mutex), like the rings are. A waker who finds nobody armed pays
// one atomic load and makes no system call.
//
// # Who sleeps on what
//
//	Kicker        the wire's thread, in epoll over its sockets and the Kicker's descriptor
//	ThreadParker  one locked thread that waits for nothing else: a futex
//	Parker        one ordinary goroutine: a channel; in-memory links, the portable sockets
//	Bell          any number of waiters for one object: completions, connections, events
//
// The waiters of a Bell choose. SleepThread is a futex: the wake-up is one system call by
// whoever rings, and the quickest there is, but each sleeper holds a thread, so only a few
// may (Seats), and it stops the clock of a synctest bubble. Sleep is a channel: ten thousand
// sleep cheaply and a bubble's clock goes on.
//
// A goroutine locked to its thread must not touch channels: each operation can cost a switch
// of threads, 20-150 us. It rings with RingVia, which leaves channel sleepers to a Waker, an
// ordinary goroutine, and wakes that with a futex.
//
// # Platforms
//
// Linux has futexes and eventfd. Elsewhere, and on Linux with the build tag
// doorbellportable, ThreadParker and Kicker are channels like Parker, SleepThread is Sleep,
// and Kicker has no descriptor.
package park
