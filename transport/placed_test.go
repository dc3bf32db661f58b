package transport

import (
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/role"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// oneWrite is a wire that places a WRITE in each of its steps, if it is to.
type oneWrite struct {
	steps  int
	places func()
}

func (w *oneWrite) Step() (more bool) {
	w.steps++
	if w.places != nil {
		w.places()
	}
	return false
}

func (*oneWrite) Pending() bool               { return false }
func (*oneWrite) NextDeadline() verbs.Instant { return verbs.Never }

// Placed tells of what has come without a step, which would go on to acknowledge it before
// the caller can look; and with nothing to tell it makes one step, and tells what that brings.
func TestPlacedTellsNewsFirst(t *testing.T) {
	w := &oneWrite{}
	d := &Device{mrs: mr.New(random64), ports: []*port{{role: role.New(w, nil)}}}
	m, err := (&PD{dev: d, num: 1}).RegisterMR(make([]byte, 8), verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	write := func() { d.mrs.Placed(1, m.RKey()) }
	expect := func(what string, placed uint64, steps int) {
		t.Helper()
		if got := m.Placed(); got != placed || w.steps != steps {
			t.Fatalf("%s: %d WRITEs after %d steps, want %d after %d", what, got, w.steps, placed, steps)
		}
	}
	expect("nothing has come", 0, 1)
	write()
	expect("one has come", 1, 1)
	expect("it was told", 1, 2)
	w.places = write
	expect("one comes with the step", 2, 3)
	w.places = nil
	expect("it was told, too", 2, 4)
	write()
	write()
	expect("two have come", 4, 4)
	expect("they were told", 4, 5)
}
