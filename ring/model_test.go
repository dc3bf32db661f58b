package ring

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The model of both rings is a slice; every call must give what the slice gives.

func TestSPSCModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newSPSC[uint64](rapid.IntRange(0, 9).Draw(t, "capacity"), rapid.SampledFrom(starts).Draw(t, "start"))
		var queue, pending []uint64 // published, reserved
		number := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"Reserve": func(t *rapid.T) {
				slot := r.Reserve()
				if full := len(queue)+len(pending) == r.Cap(); (slot == nil) != full {
					t.Fatalf("Reserve = %v, full is %v", slot, full)
				}
				if slot != nil {
					number++
					*slot = number
					pending = append(pending, number)
				}
			},
			"Commit": func(t *rapid.T) {
				r.Commit()
				queue, pending = append(queue, pending...), nil
			},
			"Push": func(t *rapid.T) {
				number++
				if got, want := r.Push(number), len(queue)+len(pending) < r.Cap(); got != want {
					t.Fatalf("Push = %v, want %v", got, want)
				} else if got {
					queue, pending = append(append(queue, pending...), number), nil
				}
			},
			"Pop": func(t *rapid.T) { queue = popModel(t, queue, r.Pop) },
			"PopBatch": func(t *rapid.T) {
				queue = popBatchModel(t, queue, r.PopBatch, r.Cap())
			},
			"Advance": func(t *rapid.T) {
				queue = advanceModel(t, queue, r.PeekAt, r.Advance)
			},
			"": func(t *rapid.T) {
				if r.Len() != len(queue) || r.Empty() != (len(queue) == 0) || r.Pending() != len(pending) ||
					r.Free() != r.Cap()-len(queue)-len(pending) {
					t.Fatalf("Len %d, Empty %v, Pending %d, Free %d with %d published and %d reserved of %d",
						r.Len(), r.Empty(), r.Pending(), r.Free(), len(queue), len(pending), r.Cap())
				}
			},
		})
	})
}

func TestMPSCModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newMPSC[uint64](rapid.IntRange(0, 9).Draw(t, "capacity"), rapid.SampledFrom(starts).Draw(t, "start"))
		var queue []uint64
		number := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"Push": func(t *rapid.T) {
				number++
				if got, want := r.Push(number), len(queue) < r.Cap(); got != want {
					t.Fatalf("Push = %v, want %v", got, want)
				} else if got {
					queue = append(queue, number)
				}
			},
			"PushBatch": func(t *rapid.T) {
				batch := make([]uint64, rapid.IntRange(0, r.Cap()+1).Draw(t, "n"))
				for i := range batch {
					number++
					batch[i] = number
				}
				n := r.PushBatch(batch)
				if want := min(len(batch), r.Cap()-len(queue)); n != want {
					t.Fatalf("PushBatch of %d = %d, want %d", len(batch), n, want)
				}
				queue = append(queue, batch[:n]...)
			},
			"Pop": func(t *rapid.T) { queue = popModel(t, queue, r.Pop) },
			"PopBatch": func(t *rapid.T) {
				queue = popBatchModel(t, queue, r.PopBatch, r.Cap())
			},
			"Advance": func(t *rapid.T) {
				queue = advanceModel(t, queue, r.PeekAt, r.Advance)
			},
			"": func(t *rapid.T) {
				if r.Len() != len(queue) || r.Empty() != (len(queue) == 0) {
					t.Fatalf("Len %d, Empty %v with %d published", r.Len(), r.Empty(), len(queue))
				}
			},
		})
	})
}

func popModel(t *rapid.T, queue []uint64, pop func() (uint64, bool)) []uint64 {
	v, ok := pop()
	if ok != (len(queue) > 0) || ok && v != queue[0] {
		t.Fatalf("Pop = %d, %v; the queue is %d", v, ok, queue)
	}
	if ok {
		queue = queue[1:]
	}
	return queue
}

func popBatchModel(t *rapid.T, queue []uint64, popBatch func([]uint64) int, capacity int) []uint64 {
	dst := make([]uint64, rapid.IntRange(0, capacity+1).Draw(t, "n"))
	n := popBatch(dst)
	if want := queue[:min(len(dst), len(queue))]; !slices.Equal(dst[:n], want) {
		t.Fatalf("PopBatch = %d, want %d", dst[:n], want)
	}
	return queue[n:]
}

func advanceModel(t *rapid.T, queue []uint64, peekAt func(int) *uint64, advance func(int)) []uint64 {
	for i := range queue {
		if p := peekAt(i); p == nil || *p != queue[i] {
			t.Fatalf("PeekAt(%d) = %v, want %d", i, p, queue[i])
		}
	}
	if p := peekAt(len(queue)); p != nil {
		t.Fatalf("PeekAt(%d) of %d entries = %d", len(queue), len(queue), *p)
	}
	n := rapid.IntRange(0, len(queue)).Draw(t, "n")
	advance(n)
	return queue[n:]
}
