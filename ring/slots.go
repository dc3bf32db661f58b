package ring

import "sync/atomic"

// Slots are the sequence numbers of a ring with many producers and one consumer, without
// the ring: who reserves positions how, and where the entries live, is the business of the
// queue that embeds it. A Slots value refers to shared state; copies are the same slots.
// The zero value has none; make it with NewSlots.
//
// Three rules are the queue's to keep. A position is published once, by the producer that
// reserved it, after its entry was written. The consumer asks about positions in order and
// reads an entry only after Readable said true. And a position is reserved only when the
// one a capacity before it was retired, so that no slot has two owners.
type Slots struct {
	// seq[i] is the last position published in slot i.
	seq  []atomic.Uint64
	mask uint64
}

// NewSlots makes slots for a ring of the given capacity, rounded up to a power of two, none
// of them published.
//
// A slot holds plain positions, and what it begins with must differ from every position
// that can be published there, wherever the queue starts counting. Slot i only ever holds
// positions that are i modulo the number of slots: so 0 is unpublished in all but slot 0,
// and 1 is in slot 0. That takes two slots even for a ring of one entry.
func NewSlots(capacity int) Slots {
	n := max(RoundUp(capacity), 2)
	s := Slots{seq: make([]atomic.Uint64, n), mask: uint64(n - 1)}
	s.seq[0].Store(1)
	return s
}

// Publish makes the entry at pos readable: the last thing its producer does with it. Any
// goroutine that has reserved pos.
func (s *Slots) Publish(pos uint64) { s.seq[pos&s.mask].Store(pos) }

// Readable reports whether pos was published: exactly pos, not what an earlier lap left in
// its slot. Any goroutine may ask; only the consumer may go on to read the entry.
func (s *Slots) Readable(pos uint64) bool { return s.seq[pos&s.mask].Load() == pos }
