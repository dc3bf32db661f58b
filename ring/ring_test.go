package ring

import (
	"math/bits"
	"reflect"
	"testing"
)

func TestRoundUp(t *testing.T) {
	for _, tt := range []struct{ n, want int }{
		{-5, 1}, {0, 1}, {1, 1}, {2, 2}, {3, 4}, {4, 4}, {5, 8}, {1023, 1024}, {1024, 1024}, {1025, 2048},
		{1 << (bits.UintSize - 2), 1 << (bits.UintSize - 2)},
	} {
		if got := RoundUp(tt.n); got != tt.want {
			t.Errorf("RoundUp(%d) = %d, want %d", tt.n, got, tt.want)
		}
	}
	mustPanic(t, "RoundUp beyond an int", func() { RoundUp(1<<(bits.UintSize-2) + 1) })
}

func TestHasPointers(t *testing.T) {
	type flat struct {
		a uint64
		b [3]struct {
			c uint8
			d complex64
		}
		e uintptr
	}
	type deep struct {
		a uint64
		b [3]struct{ c []byte }
	}
	for _, tt := range []struct {
		v    any
		want bool
	}{
		{uint8(0), false}, {1.5, false}, {flat{}, false}, {[0]*int{}, false},
		{new(int), true}, {"", true}, {[]byte{}, true}, {deep{}, true}, {[1]*int{}, true},
		{map[int]int{}, true}, {make(chan int), true}, {func() {}, true}, {struct{ e error }{}, true},
	} {
		if got := hasPointers(reflect.TypeOf(tt.v)); got != tt.want {
			t.Errorf("hasPointers(%T) = %v, want %v", tt.v, got, tt.want)
		}
	}
}

// TestLayout keeps fields of different owners 128 bytes apart and from whatever else the
// allocator puts next to the ring (F77), and 64-bit words aligned on every platform.
func TestLayout(t *testing.T) {
	check := func(typ reflect.Type, groups [][]string) {
		t.Helper()
		end := uintptr(0) // end of the group before
		for i, group := range groups {
			next := uintptr(0)
			for _, name := range group {
				f, ok := typ.FieldByName(name)
				if !ok {
					t.Fatalf("%v has no field %s", typ, name)
				}
				if i > 0 && f.Offset < end+128-8 {
					t.Errorf("%v.%s at %d, the group before ends at %d: closer than 128 bytes", typ, name, f.Offset, end)
				}
				if f.Type.Size() == 8 && f.Type.Kind() == reflect.Struct && f.Offset%8 != 0 {
					t.Errorf("%v.%s at %d is not aligned", typ, name, f.Offset)
				}
				next = max(next, f.Offset+f.Type.Size())
			}
			end = next
		}
		if typ.Size() < end+128-8 {
			t.Errorf("%v ends %d bytes after its last field", typ, typ.Size()-end)
		}
	}
	check(reflect.TypeFor[SPSC[uint64]](), [][]string{
		{"buf", "mask", "scrub"}, {"tail"}, {"next", "headSeen"}, {"head"}, {"tailSeen"},
	})
	check(reflect.TypeFor[MPSC[uint64]](), [][]string{
		{"buf", "mask", "slots", "scrub"}, {"reserved", "retiredSeen"}, {"retired"},
	})
}

func TestSlots(t *testing.T) {
	for _, capacity := range []int{1, 2, 3, 8} {
		// Wherever a queue starts, nothing is published in a fresh one.
		for _, start := range starts {
			s := NewSlots(capacity)
			for i := range uint64(3 * RoundUp(capacity)) {
				if s.Readable(start + i) {
					t.Errorf("capacity %d: position %d is readable in fresh slots", capacity, start+i)
				}
			}
			// Every position is readable when published, and only then; not a lap later.
			n := uint64(RoundUp(capacity))
			for pos := start; pos != start+5*n; pos++ {
				if s.Readable(pos) {
					t.Errorf("capacity %d: %d is readable before it is published", capacity, pos)
				}
				s.Publish(pos)
				if !s.Readable(pos) {
					t.Errorf("capacity %d: %d is not readable after it was published", capacity, pos)
				}
				for lap := uint64(1); lap < 4; lap++ {
					if s.Readable(pos + lap*n) {
						t.Errorf("capacity %d: %d reads as published where %d was", capacity, pos+lap*n, pos)
					}
				}
				if s.Readable(pos + 1<<32) {
					t.Errorf("capacity %d: only 32 bits of a position count", capacity)
				}
			}
		}
	}
}

func mustPanic(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s: no panic", what)
		}
	}()
	f()
}
