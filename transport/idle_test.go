package transport_test

import (
	"errors"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// heap returns the live bytes of the heap and the bytes of goroutine stacks.
func heap() (live, stacks int64) {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers and sync.Pool held back
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), int64(m.StackInuse)
}

// connectMany opens n connections from a to b, a few at a time, and returns both ends.
func connectMany(t testing.TB, a, b *transport.Device, n int, pa, pb transport.ConnParam) (qa, qb []*transport.QP) {
	t.Helper()
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	defer ln.Close()
	var wg sync.WaitGroup
	errs := make(chan error, 2*n)
	qb = make([]*transport.QP, n)
	wg.Go(func() {
		for i := range n {
			req, err := ln.Next(ctx)
			if err == nil {
				qb[i], err = req.Accept(ctx, pb)
			}
			if err != nil {
				errs <- err
				return
			}
		}
	})
	qa = make([]*transport.QP, n)
	const workers = 8
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n; i += workers {
				var err error
				if qa[i], err = a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), pa); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Fatal(err)
	}
	for _, q := range qb {
		if err := q.Established(ctx); err != nil {
			t.Fatal(err)
		}
	}
	return qa, qb
}

// TestIdleConnectionMemory measures what an idle connection takes at one end, everything that it
// needs included, with small queues and completion queues shared or its own.
func TestIdleConnectionMemory(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's memory is not ours")
	}
	const pairs = 2000
	for i, tc := range []struct {
		name  string
		limit int64 // bytes for each end
		own   bool
	}{{"shared completion queue", 5 << 10, false}, {"completion queue of its own", 7 << 10, true}} {
		t.Run(tc.name, func(t *testing.T) {
			base := 23 + 2*i
			a, b := open(t, hostAddr(base), transport.Config{}), open(t, hostAddr(base+1), transport.Config{})
			small := verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: -1}
			param := func(dev *transport.Device) transport.ConnParam {
				p := transport.ConnParam{Cap: small}
				if !tc.own {
					cq, err := dev.CreateCQ(16 * pairs)
					if err != nil {
						t.Fatal(err)
					}
					p.SendCQ, p.RecvCQ = cq, cq
				}
				return p
			}
			pa, pb := param(a), param(b)
			live0, stacks0 := heap()
			goroutines := runtime.NumGoroutine()
			qa, qb := connectMany(t, a, b, pairs, pa, pb)
			live1, stacks1 := heap()
			each := (live1 - live0) / (2 * pairs)
			t.Logf("%d bytes of heap for each end of %d idle connections, %d of stacks", each, pairs, (stacks1-stacks0)/(2*pairs))
			if each > tc.limit && *wiresFlag == 1 {
				t.Errorf("%d bytes, want at most %d", each, tc.limit)
			}
			if n := runtime.NumGoroutine(); n > goroutines+4 {
				t.Errorf("%d goroutines, %d before the connections", n, goroutines)
			}
			var errs []error
			for i := range qa {
				errs = append(errs, qa[i].Close(), qb[i].Close())
			}
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
		})
	}
}

func hostAddr(n int) string {
	return netip.AddrFrom4([4]byte{127, 1, byte(n), 1}).String()
}

// TestAfterCrowd: when nearly all objects of a device are gone, those that are left move to a
// smaller place, where Close finds them.
func TestAfterCrowd(t *testing.T) {
	dev := open(t, "127.2.60.1", transport.Config{})
	const crowd, left = 1500, 20
	cqs := make([]*transport.CQ, crowd)
	for i := range cqs {
		var err error
		if cqs[i], err = dev.CreateCQ(1); err != nil {
			t.Fatal(err)
		}
	}
	for _, cq := range cqs[left:] {
		if err := cq.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n, most := transport.Tracked(dev); n != left || most > crowd/16 {
		t.Errorf("%d objects in a place for %d, want %d in one that is smaller", n, most, left)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	for i, cq := range cqs[:left] {
		if _, err := cq.Next(t.Context()); !errors.Is(err, transport.ErrClosed) {
			t.Errorf("queue %d after the device was closed: %v", i, err)
		}
	}
}
