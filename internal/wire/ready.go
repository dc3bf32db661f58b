package wire

import "sync/atomic"

// readyList is how posters leave queue pairs for the owner: a stack that anyone pushes to
// and the owner empties in one step. Because only whole stacks are taken there is no ABA.
//
// The mark on the queue pair makes a push happen once: a poster publishes its entry, then
// sets the mark; the owner clears the mark, then looks at the queue. Whichever of the two
// operations on the mark comes first, the entry is seen: either the poster's push is still
// to be taken, or the owner looks after the entry was published.
type readyList struct {
	head atomic.Pointer[QP]
}

// push marks q ready; false when it was marked already. Any goroutine, no allocation.
func (l *readyList) push(q *QP) bool {
	if q.marked.Load() || !q.marked.CompareAndSwap(false, true) {
		return false
	}
	for {
		h := l.head.Load()
		q.nextReady = h
		if l.head.CompareAndSwap(h, q) {
			return true
		}
	}
}

// takeAll empties the list and returns its elements in the order of their pushes.
func (l *readyList) takeAll() (first *QP) {
	if l.head.Load() == nil {
		return nil
	}
	for q := l.head.Swap(nil); q != nil; {
		next := q.nextReady
		q.nextReady = first
		first, q = q, next
	}
	return first
}

func (l *readyList) empty() bool { return l.head.Load() == nil }
