package wire

import (
	"errors"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// ErrNoQPN: every queue pair number is in use or in quarantine.
var ErrNoQPN = errors.New("wire: no queue pair number left")

// A wire's queue pair numbers:
//
//	23      20 19       17 16            0
//	+---------+-----------+---------------+
//	| wire    | variant   | slot + offset |
//	+---------+-----------+---------------+
//
// The wire's index lets whoever receives a packet pick its wire by a mask. Slots are reused
// oldest first, and the variant changes with each use, so a number comes back only after
// all the others had their turn (at least quarantine of them), and late packets of a dead
// queue pair meet nobody.
const (
	slotBits    = 17
	variantBits = 3
	// Shift is how far a number is shifted to leave its wire's index.
	Shift = slotBits + variantBits
	// MaxWires is the number of wires that a port's numbers can tell apart.
	MaxWires = 1 << (24 - Shift)
	// MaxQP is the number of queue pairs of one wire.
	MaxQP = 1<<slotBits - 2

	slotMask = 1<<slotBits - 1
	// quarantine is how many other slots are given out before one is used again, as long
	// as never-used slots are left.
	quarantine = 64
)

// qpTable finds queue pairs by number. It grows with the number in use.
type qpTable struct {
	prefix  uint32 // the wire's index, in place
	offset  uint32 // random, so that numbers start somewhere unpredictable
	slots   []qpSlot
	free    []uint32 // oldest first, from freeHead
	head    int
	live    int
	maxSlot uint32
}

type qpSlot struct {
	qp      *QP
	left    *remains // of the last one
	variant uint32
}

func newQPTable(wire uint32, random uint32) qpTable {
	return qpTable{prefix: wire << Shift, offset: random & slotMask, maxSlot: MaxQP}
}

// number returns the QPN of a slot, or false for the reserved numbers 0, 1 and 0xFFFFFF.
func (t *qpTable) number(slot uint32) (verbs.QPN, bool) {
	n := verbs.QPN(t.prefix | t.slots[slot].variant<<slotBits | (slot+t.offset)&slotMask)
	return n, n > 15 && n != verbs.QPNMulticast // below 16 rxe keeps numbers for itself too
}

// alloc finds a number for q.
func (t *qpTable) alloc(q *QP) (verbs.QPN, error) {
	for {
		var slot uint32
		waiting := len(t.free) - t.head
		switch {
		case waiting > quarantine || waiting > 0 && uint32(len(t.slots)) >= t.maxSlot:
			slot = t.free[t.head]
			t.head++
			if t.head == len(t.free) {
				t.free, t.head = t.free[:0], 0
			} else if t.head > 1024 && 2*t.head > len(t.free) {
				t.free = append(t.free[:0], t.free[t.head:]...)
				t.head = 0
			}
		case uint32(len(t.slots)) < t.maxSlot:
			slot = uint32(len(t.slots))
			t.slots = append(t.slots, qpSlot{})
		default:
			return 0, ErrNoQPN
		}
		s := &t.slots[slot]
		s.variant = (s.variant + 1) & (1<<variantBits - 1)
		if n, ok := t.number(slot); ok {
			s.qp, s.left = q, nil
			t.live++
			return n, nil
		}
		// One of the few reserved numbers: its slot's next variant is an ordinary one.
		t.free = append(t.free, slot)
	}
}

// find returns the queue pair with this number, or nil.
func (t *qpTable) find(n verbs.QPN) *QP {
	slot := (uint32(n) - t.offset) & slotMask
	if slot >= uint32(len(t.slots)) {
		return nil
	}
	if q := t.slots[slot].qp; q != nil && q.Num() == n {
		return q
	}
	return nil
}

// remains returns what the queue pair that had this number has left, or nil.
func (t *qpTable) remains(n verbs.QPN) *remains {
	slot := (uint32(n) - t.offset) & slotMask
	if slot >= uint32(len(t.slots)) {
		return nil
	}
	if r := t.slots[slot].left; r != nil && r.num == n {
		return r
	}
	return nil
}

// release puts the number back into the queue of those to be used again; left may be nil.
func (t *qpTable) release(n verbs.QPN, left *remains) {
	slot := (uint32(n) - t.offset) & slotMask
	t.slots[slot].qp, t.slots[slot].left = nil, left
	t.free = append(t.free, slot)
	t.live--
}

// each calls f for every queue pair; f may release it.
func (t *qpTable) each(f func(*QP)) {
	for i := range t.slots {
		if q := t.slots[i].qp; q != nil {
			f(q)
		}
	}
}
