package wire

import "github.com/doorbell-rdma/doorbell/verbs"

// timers holds one deadline per queue pair in a 4-ary heap. A deadline that moves later is
// left where it is and looked at again when it comes up: on a busy queue pair that turns a
// heap operation per acknowledgement into one per timeout.
type timers struct {
	heap []*QP
}

// update makes sure that q comes up no later than at. verbs.Never needs nothing.
func (t *timers) update(q *QP, at verbs.Instant) {
	switch {
	case q.heapIndex < 0:
		if at == verbs.Never {
			return
		}
		q.heapAt = at
		q.heapIndex = len(t.heap)
		t.heap = append(t.heap, q)
		t.up(q.heapIndex)
	case at < q.heapAt:
		q.heapAt = at
		t.up(q.heapIndex)
	}
}

// next returns when the earliest entry comes up; it may be earlier than any real deadline.
func (t *timers) next() verbs.Instant {
	if len(t.heap) == 0 {
		return verbs.Never
	}
	return t.heap[0].heapAt
}

// refresh puts up to n of the earliest entries where they belong.
func (t *timers) refresh(n int) {
	for range n {
		if len(t.heap) == 0 {
			return
		}
		q := t.heap[0]
		at := q.deadline()
		if at <= q.heapAt {
			return
		}
		t.remove(q)
		t.update(q, at)
	}
}

// pop takes out the earliest entry if it is due.
func (t *timers) pop(now verbs.Instant) *QP {
	if len(t.heap) == 0 || t.heap[0].heapAt > now {
		return nil
	}
	q := t.heap[0]
	t.remove(q)
	return q
}

func (t *timers) remove(q *QP) {
	i := q.heapIndex
	if i < 0 {
		return
	}
	last := len(t.heap) - 1
	moved := t.heap[last]
	t.heap[i] = moved
	moved.heapIndex = i
	t.heap[last] = nil
	t.heap = t.heap[:last]
	q.heapIndex = -1
	if i < last {
		t.down(i)
		t.up(i)
	}
}

func (t *timers) up(i int) {
	q := t.heap[i]
	for i > 0 {
		parent := (i - 1) / 4
		if t.heap[parent].heapAt <= q.heapAt {
			break
		}
		t.heap[i] = t.heap[parent]
		t.heap[i].heapIndex = i
		i = parent
	}
	t.heap[i] = q
	q.heapIndex = i
}

func (t *timers) down(i int) {
	q := t.heap[i]
	for {
		best, at := -1, q.heapAt
		for c := 4*i + 1; c <= 4*i+4 && c < len(t.heap); c++ {
			if t.heap[c].heapAt < at {
				best, at = c, t.heap[c].heapAt
			}
		}
		if best < 0 {
			break
		}
		t.heap[i] = t.heap[best]
		t.heap[i].heapIndex = i
		i = best
	}
	t.heap[i] = q
	q.heapIndex = i
}
