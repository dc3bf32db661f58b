// Package role decides who may touch a wire, finds an owner for work that anybody leaves,
// and knows when the wire's thread may sleep. It drives any [Driver] and sleeps on any
// [Sleeper]; sockets, clocks and threads are theirs.
//
// A wire is one socket and everything only its owner may touch. Usually its thread owns it,
// but waking another core costs more than a datagram's way there and back, so a goroutine
// that posts, polls or waits borrows the role when it is free:
//
//	poster   TryDrive(transmit): send at once when nobody owns the wire
//	         otherwise mark the work ready, and for the first mark Ring
//	poller   Poll(budget): step when free; whoever owns it steps anyway
//	waiter   Await: poll, arm the bell, poll again, park; the role is not held while parked
//	         or, one at a time, Sit, Watch, Rise: sleep on the socket in the thread's place
//	control  Do(fn): run fn under the role, here or by whoever owns it now
//	thread   Run: the owner when nobody else is
//
// # The protocol
//
// A bare try-lock loses work: who fails to take it may have work that the owner has just
// stopped looking for. So the role [Word] is {owned, pending, drives}. A taker with work to
// leave sets pending (a note) in the same atomic word when it finds the role owned; the
// owner releases only from owned-and-no-note, otherwise it takes the note and steps again.
//
// While drives keeps changing the thread naps with the socket's wake-up disarmed: a packet
// or a deadline is late by at most a nap (a few milliseconds) and neither a hand-back nor a
// Ring costs a system call. After a whole nap without a drive the thread takes the role,
// steps, arms the socket, steps again, writes down until when it sleeps (bed), releases the
// role and sleeps. Whoever releases the role with an earlier deadline, and whoever rings
// while the role is free, wakes it; the first to do so takes the entry out of bed, so a
// sleep ends with one system call however many ring.
//
// An owner has a budget of steps. When it is spent with work or a note left, the role is
// handed over: released all the same, and the thread is woken if it sleeps. So Poll is
// bounded, also while others post without end.
//
// # The watcher
//
// A packet that wakes the thread, which then wakes the waiter, costs two wake-ups. So one
// waiter may take the seat: it steps, writes down until when it sleeps (cot), releases the role
// and sleeps on the socket, exactly as the thread does with bed, while the thread dozes. Who
// would wake the thread wakes the watcher. A watcher that finds what it waits for leaves the
// rest of the step's work to others, rises, and rouses the thread if it dozes; from then on the
// thread naps as beside any driver. While other waiters are parked nobody gets the seat, for
// each return of the seat would have to wake the thread for them.
//
// A watcher may claim what arrives while it sleeps: it then sleeps in the receiving call itself, and
// what that returns waits for the first step after. Steps of others find nothing meanwhile, which
// is as if the packets had come when the watcher woke: it was woken by them, and looks.
//
// # Memory order
//
// All shared words are Go atomics, so their operations have one order. There are four pairs
// of a store and a later load, and in each either one side sees the other:
//
//	poster   mark, then load word          owner   leave word, having looked at marks before:
//	         a mark too late for the owner's look finds owned (leaves a note, the leave
//	         fails) or free (looks at bed)
//	poster   load word (free), load bed    thread  store bed, then release the word:
//	         free after the thread's look means that bed was written
//	taker    release, then load bed        thread  store bed under the role: the earlier
//	         deadline was either seen by the thread, or bed is seen by the taker
//	waiter   arm the bell, then poll       owner   push the completion, then look at the bell
//
// What the thread sleeps on must keep a wake-up that comes before the sleep, and report a
// packet that arrives while armed; packets from before are found by the step after arming.
//
// Two pairs more belong to the watcher: it gives up the seat, then looks at bed, while the
// thread writes dozing, then looks at the seat; and it gives up the seat, then counts the
// parked, while a parking waiter counts itself, then looks at the seat.
//
// docs/model/role.pml proves this, the watcher included, exhaustively for a few of each kind,
// and fails for each of some forty ways of getting it wrong. The names in this package are
// those of the model.
package role
