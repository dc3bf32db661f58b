package floor

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/ring"
)

// entry has the size of a cache line, as work requests and completions have.
type entry [8]uint64

// entries is the capacity of the ring and of the channel.
const entries = 1024

// handOver moves entries from one thread to another by a ring, or for contrast by a Go
// channel, whose ends must not hold on to their threads.
func handOver(ctx context.Context, p Params) (Result, error) {
	var stop atomic.Bool
	defer context.AfterFunc(ctx, func() { stop.Store(true) })()
	limit := uint64(p.Iters)
	if p.Iters <= 0 {
		limit = ^uint64(0)
		defer time.AfterFunc(p.Duration, func() { stop.Store(true) }).Stop()
	}
	produce, consume := overRing(&stop, limit, p.train())
	if p.Kind == Chan {
		produce, consume = overChan(&stop, limit)
	}
	failed := make(chan error, 1)
	go func() { failed <- onCPU(&p, 0, func() error { produce(); return nil }) }()
	var r Result
	err := onCPU(&p, 1, func() error {
		begin := time.Now()
		r.Ops = consume()
		r.Elapsed = time.Since(begin)
		return nil
	})
	stop.Store(true)
	if err := errors.Join(err, <-failed); err != nil {
		return r, err
	}
	if p.Iters > 0 && r.Ops != limit {
		return r, errEnded
	}
	r.Bytes = r.Ops * uint64(len(entry{})*8)
	return r, nil
}

// onCPU runs f on the CPU of a place, and for a ring on a thread of its own.
func onCPU(p *Params, i int, f func() error) error {
	if p.Kind == Chan {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if cpu := p.Places[i].CPU; cpu > 0 {
		undo, err := pin(cpu - 1)
		if err != nil {
			return fmt.Errorf("floor: %w", err)
		}
		defer undo()
	}
	return f()
}

// overRing publishes entries in batches.
func overRing(stop *atomic.Bool, limit uint64, batch int) (produce func(), consume func() uint64) {
	r := ring.NewSPSC[entry](entries)
	var ended atomic.Bool
	produce = func() {
		defer ended.Store(true)
		for n := uint64(0); n < limit && !stop.Load(); {
			for r.Pending() < batch && n < limit {
				slot := r.Reserve()
				if slot == nil {
					break
				}
				slot[0] = n
				n++
			}
			r.Commit()
		}
	}
	consume = func() uint64 {
		var got [maxTrain]entry
		for n := uint64(0); ; {
			last := ended.Load()
			k := r.PopBatch(got[:batch])
			n += uint64(k)
			if k == 0 && last {
				return n
			}
		}
	}
	return produce, consume
}

// overChan sends entries one by one.
func overChan(stop *atomic.Bool, limit uint64) (produce func(), consume func() uint64) {
	c := make(chan entry, entries)
	produce = func() {
		defer close(c)
		for n := uint64(0); n < limit && !stop.Load(); n++ {
			c <- entry{n}
		}
	}
	consume = func() uint64 {
		n := uint64(0)
		for range c {
			n++
		}
		return n
	}
	return produce, consume
}
