package mr

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const all = verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic

func newTable(seed uint64) *Table { return New(rand.New(rand.NewPCG(seed, 1)).Uint64) }

func register(t *testing.T, tab *Table, pd qp.PD, n int, access verbs.Access) *Region {
	t.Helper()
	r, err := tab.Register(pd, make([]byte, n), access)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRangesNeverLeaveTheRegion(t *testing.T) {
	tab := newTable(1)
	r := register(t, tab, 1, 100, all)
	base := r.Addr()
	for _, tc := range []struct {
		name string
		addr uint64
		n    uint32
		ok   bool
	}{
		{"whole", base, 100, true},
		{"first byte", base, 1, true},
		{"last byte", base + 99, 1, true},
		{"one past", base + 100, 1, false},
		{"too long", base, 101, false},
		{"before", base - 1, 1, false},
		{"before, reaching in", base - 1, 50, false},
		{"huge length", base, 1<<32 - 1, false},
		{"wraps 2^64", ^uint64(0) - 3, 8, false},
		{"zero length anywhere", 0xdead, 0, true},
	} {
		b, st := tab.Remote(1, 9, r.Key(), tc.addr, tc.n, verbs.RemoteWrite)
		if got := st == verbs.WCSuccess; got != tc.ok || got && len(b) != int(tc.n) {
			t.Errorf("%s: %v with %d bytes, want ok=%v", tc.name, st, len(b), tc.ok)
		}
		if !tc.ok && st != verbs.RemAccessErr {
			t.Errorf("%s: status %v, want REM_ACCESS_ERR", tc.name, st)
		}
	}
	if b, _ := tab.Remote(1, 9, r.Key(), base+10, 5, verbs.RemoteRead); cap(b) != 5 {
		t.Errorf("capacity %d reaches beyond what was asked for", cap(b))
	}
}

func TestKeysRightsAndDomains(t *testing.T) {
	tab := newTable(2)
	ro := register(t, tab, 1, 64, verbs.RemoteRead)
	if _, st := tab.Remote(1, 9, ro.Key(), ro.Addr(), 8, verbs.RemoteWrite); st != verbs.RemAccessErr {
		t.Errorf("write to a read-only region: %v", st)
	}
	if _, st := tab.Local(1, ro.Key(), ro.Addr(), 8, verbs.LocalWrite); st != verbs.LocProtErr {
		t.Errorf("local write to a read-only region: %v", st)
	}
	if _, st := tab.Local(2, ro.Key(), ro.Addr(), 8, 0); st != verbs.LocProtErr {
		t.Errorf("another domain's region: %v", st)
	}
	if _, st := tab.Local(1, ro.Key()^1, ro.Addr(), 8, 0); st != verbs.LocProtErr {
		t.Errorf("wrong variant of the key: %v", st)
	}
	if _, err := tab.Register(1, make([]byte, 8), verbs.RemoteWrite); !errors.Is(err, ErrAccess) {
		t.Errorf("RemoteWrite without LocalWrite: %v", err)
	}
	if _, err := tab.Register(1, nil, 0x8000); err == nil {
		t.Error("unknown access flag accepted")
	}
	if !tab.InUse(1) || tab.InUse(2) {
		t.Error("InUse is wrong")
	}
	if tab.Close(ro) != nil || !errors.Is(tab.Close(ro), ErrClosed) {
		t.Error("Close must succeed once")
	}
	if _, st := tab.Local(1, ro.Key(), ro.Addr(), 8, 0); st != verbs.LocProtErr {
		t.Errorf("closed region: %v", st)
	}
}

func TestAddressesKeepAlignmentAndAreNotPointers(t *testing.T) {
	tab := newTable(3)
	buf := make([]byte, 3*PageSize)
	for off := range 16 {
		r, err := tab.Register(1, buf[off*8:], all)
		if err != nil {
			t.Fatal(err)
		}
		ptr := uint64(uintptr(unsafe.Pointer(&buf[off*8])))
		if r.Addr()%PageSize != ptr%PageSize {
			t.Errorf("offset %d: address %#x is not congruent to memory", off, r.Addr())
		}
		if r.Addr() == ptr {
			t.Errorf("offset %d: address is the pointer", off)
		}
	}
}

func TestAtomics(t *testing.T) {
	tab := newTable(4)
	r := register(t, tab, 1, 32, all)
	binary.NativeEndian.PutUint64(r.Bytes()[8:], 10)
	if old, st := tab.FetchAdd(1, 9, r.Key(), r.Addr()+8, 5); old != 10 || st != verbs.WCSuccess {
		t.Errorf("fetch-add: %d, %v", old, st)
	}
	if old, _ := tab.CompareSwap(1, 9, r.Key(), r.Addr()+8, 14, 1); old != 15 {
		t.Errorf("compare-swap that fails returns %d", old)
	}
	if old, _ := tab.CompareSwap(1, 9, r.Key(), r.Addr()+8, 15, 99); old != 15 {
		t.Errorf("compare-swap returns %d", old)
	}
	if got := binary.NativeEndian.Uint64(r.Bytes()[8:]); got != 99 {
		t.Errorf("memory holds %d", got)
	}
	if _, st := tab.FetchAdd(1, 9, r.Key(), r.Addr()+4, 1); st != verbs.RemInvReqErr {
		t.Errorf("unaligned: %v", st)
	}
	if _, st := tab.FetchAdd(1, 9, r.Key(), r.Addr()+32, 1); st != verbs.RemAccessErr {
		t.Errorf("outside: %v", st)
	}
	ro := register(t, tab, 1, 32, verbs.LocalWrite|verbs.RemoteWrite)
	if _, st := tab.CompareSwap(1, 9, ro.Key(), ro.Addr(), 0, 1); st != verbs.RemAccessErr {
		t.Errorf("no atomic right: %v", st)
	}
}

// TestChurn registers and closes at random against a model, through many rebuilds of the table.
func TestChurn(t *testing.T) {
	const seed = 5
	tab, rnd := newTable(seed), rand.New(rand.NewPCG(seed, 2))
	live := map[uint32]*Region{}
	for i := range 20000 {
		if len(live) < 300 && rnd.IntN(3) > 0 {
			r := register(t, tab, qp.PD(rnd.IntN(3)), 16, all)
			if live[r.Key()] != nil {
				t.Fatalf("seed %d, step %d: key %#x given twice", seed, i, r.Key())
			}
			live[r.Key()] = r
		} else {
			for k, r := range live {
				if err := tab.Close(r); err != nil {
					t.Fatalf("seed %d, step %d: region lost: %v", seed, i, err)
				}
				delete(live, k)
				break
			}
		}
		if tab.Len() != len(live) {
			t.Fatalf("seed %d, step %d: %d regions, want %d", seed, i, tab.Len(), len(live))
		}
	}
	for k, r := range live {
		if b, st := tab.Local(r.PD(), k, r.Addr(), 16, 0); st != verbs.WCSuccess || &b[0] != &r.Bytes()[0] {
			t.Fatalf("seed %d: key %#x leads elsewhere: %v", seed, k, st)
		}
	}
	if n := len(tab.hash.Load().slots); n > 4096 {
		t.Errorf("table grew to %d slots for 300 regions", n)
	}
}

// TestLookupsDuringChurn: readers of one region are never disturbed by others' coming and going.
func TestLookupsDuringChurn(t *testing.T) {
	tab := newTable(6)
	r := register(t, tab, 1, 64, all)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					if _, st := tab.Local(1, r.Key(), r.Addr(), 64, 0); st != verbs.WCSuccess {
						t.Errorf("lookup failed: %v", st)
						return
					}
				}
			}
		})
	}
	for range 5000 {
		if err := tab.Close(register(t, tab, 1, 16, all)); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
}

func BenchmarkLocal(b *testing.B) {
	tab := newTable(7)
	var r *Region
	for range 100 {
		r, _ = tab.Register(1, make([]byte, 4096), all)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, st := tab.Local(1, r.Key(), r.Addr()+64, 64, verbs.LocalWrite); st != verbs.WCSuccess {
			b.Fatal(st)
		}
	}
}
