package transport

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

type fakeSource struct {
	bits atomic.Uint32
	num  verbs.QPN
}

func (f *fakeSource) pending() *atomic.Uint32             { return &f.bits }
func (f *fakeSource) event(t verbs.EventType) verbs.Event { return verbs.Event{Type: t, QPN: f.num} }

// What is raised is read once, what is closed is not read any more, and nothing of it is kept;
// with raisers, closers and readers at once.
func TestEventQueue(t *testing.T) {
	const objects, kinds = 2000, 3
	e := &eventQueue{wake: make(chan struct{}, 1)}
	all := make([]*fakeSource, objects)
	for i := range all {
		all[i] = &fakeSource{num: verbs.QPN(i)}
	}
	types := [kinds]verbs.EventType{verbs.EventCommEst, verbs.EventEstablished, verbs.EventDisconnected}
	var read [objects][kinds]atomic.Int32
	take := func() bool {
		q, typ, ok := e.take()
		if !ok {
			return false
		}
		for k := range types {
			if types[k] == typ {
				read[q.(*fakeSource).num][k].Add(1)
			}
		}
		return true
	}
	var raisers, readers sync.WaitGroup
	stop := make(chan struct{})
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-e.wake:
				for take() {
				}
			}
		}
	})
	for k, typ := range types {
		raisers.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(k), 0))
			for _, i := range rnd.Perm(objects) {
				e.raise(all[i], typ)
			}
		})
	}
	raisers.Go(func() {
		for _, i := range rand.New(rand.NewPCG(9, 0)).Perm(objects) {
			if i%2 == 0 {
				e.forget(all[i])
			}
		}
	})
	raisers.Wait()
	close(stop)
	readers.Wait()
	for take() {
	}
	for i := range all {
		for k := range types {
			if n := read[i][k].Load(); n > 1 || i%2 == 1 && n != 1 {
				t.Fatalf("event %v of object %d was read %d times", types[k], i, n)
			}
		}
	}
	if len(e.queue) != 0 || e.dead != 0 {
		t.Errorf("%d on the queue, %d of them closed", len(e.queue), e.dead)
	}
	// Nobody reads: a thousand generations of ten leave no more than a few behind.
	for range 1000 {
		for i := range 10 {
			f := &fakeSource{}
			e.raise(f, types[i%kinds])
			e.forget(f)
			e.raise(f, types[(i+1)%kinds])
		}
	}
	if n := len(e.queue); n > 64 {
		t.Errorf("%d on the queue", n)
	}
}
