// Package ring holds bounded lock-free rings: the way work requests, completions and
// packets pass from one goroutine to another. Nothing in here sleeps, starts goroutines,
// reads a clock or allocates after construction; whoever waits for a ring to fill or drain
// brings its own way of waiting.
//
//	SPSC    one producer, one consumer            completion lanes, wire to wire
//	MPSC    many producers, one consumer          commands to a wire
//	Slots   the sequence numbers of an MPSC, for a queue that has a reservation word and
//	        data arrays of its own                send and receive queues
//
// A producer of an SPSC fills slots in place and publishes a batch with one store:
//
//	for _, m := range batch {
//		slot := r.Reserve()
//		if slot == nil {
//			break // full
//		}
//		*slot = m
//	}
//	r.Commit()
//
// # Positions
//
// A position is a count of entries since construction, 64 bits wide, and never restarts;
// the slot of a position is its value modulo the capacity, a power of two. Positions are
// compared by difference only, so the wrap at 2^64 is an addition like any other, and full
// and empty differ: tail - head is the capacity or zero.
//
// # Roles
//
// Producer methods of an SPSC belong to one goroutine at a time, consumer methods of an
// SPSC and an MPSC likewise. A role may move to another goroutine if something orders the
// last call of the old holder before the first of the new (a mutex, a channel, an atomic
// role word). Methods marked "any goroutine" need nothing.
//
// # Memory order
//
// Shared words are sync/atomic values only, and the Go memory model makes those
// sequentially consistent: if a load observes a store, everything before the store in its
// goroutine happens before everything after the load in the other. Slots themselves are
// plain memory; two rules order every access to them.
//
//  1. Full slots. A producer writes the slot, then publishes it (SPSC: stores tail; Slots:
//     stores the position into the slot's sequence number). The consumer reads the slot
//     only after a load that observed that store, or a later one of the same producer. So
//     the write happens before the read: no torn and no early entry.
//  2. Free slots. The consumer reads the slot, clears it when it holds pointers, then
//     stores head (retired). A producer writes the slot for the next lap only after a load
//     of head that is at least one past the slot's old position. So the read happens before
//     the overwrite. A producer of an MPSC may learn of head from the copy another producer
//     left; that store came after the other's load of head, and the order is transitive.
//
// Each side keeps a copy of the other's index and looks at the real one only when the copy
// says full or empty. A copy is only ever behind, because indexes only grow, so it errs
// towards full or empty and never towards overwriting or reading too far.
//
// In an MPSC the reservation (a compare-and-swap on the count of reserved slots) orders
// producers against each other; it publishes nothing. A slot's sequence number says that
// exactly this position was published: what an earlier lap left there is another number.
// A batch is published from its last slot to its first; the consumer takes slots in order,
// so it sees none of the batch or all of it.
//
// A load of head followed by a load of tail never sees tail behind head, because tail is
// never behind the head of the same or an earlier moment; the other way round the difference
// could underflow. That is the order in Len and Empty. For a third goroutine both may move
// in between, so its difference is capped at the capacity.
//
// # Layout
//
// What the producer writes, what the consumer writes and what each keeps for itself are 128
// bytes apart: two cache lines, because x86 prefetches lines in pairs and some arm64
// machines have lines of 128 bytes.
//
// # Pointers
//
// An element type that contains pointers is zeroed when it is taken, so that the ring
// does not keep alive what the consumer is done with. Others are left as they are.
package ring
