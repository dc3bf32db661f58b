package mr

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const (
	boundOn = verbs.QPN(9)
	another = verbs.QPN(10)
)

func allocWindow(t *testing.T, tab *Table, pd qp.PD) *Window {
	t.Helper()
	w, err := tab.AllocWindow(pd)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// bindOf asks for n bytes of r from off under the window's next key.
func bindOf(w *Window, r *Region, off uint64, n uint32, access verbs.Access) *qp.Bind {
	return &qp.Bind{RKey: w.Key() + 1, LKey: r.Key(), Addr: r.Addr() + off, Length: n, Access: access}
}

// A window opens its range, for its rights, to its queue pair, under its key; nothing else.
func TestWindowOpensExactly(t *testing.T) {
	tab := newTable(11)
	r := register(t, tab, 1, 4096, verbs.LocalWrite|verbs.MWBind)
	w := allocWindow(t, tab, 1)
	free := w.Key()
	if _, st := tab.Remote(1, boundOn, free, 0, 1, verbs.RemoteRead); st != verbs.RemAccessErr {
		t.Fatalf("a free window opens something: %v", st)
	}
	b := bindOf(w, r, 100, 50, verbs.RemoteWrite|verbs.RemoteAtomic)
	if !tab.Bind(1, boundOn, b) {
		t.Fatal("bind refused")
	}
	if w.Key() != b.RKey || w.Key()>>8 != free>>8 {
		t.Fatalf("key %#x, want %#x", w.Key(), b.RKey)
	}
	base := r.Addr() + 100
	for _, tc := range []struct {
		name string
		pd   qp.PD
		qpn  verbs.QPN
		key  uint32
		addr uint64
		n    uint32
		need verbs.Access
		ok   bool
	}{
		{"whole", 1, boundOn, b.RKey, base, 50, verbs.RemoteWrite, true},
		{"last byte", 1, boundOn, b.RKey, base + 49, 1, verbs.RemoteWrite, true},
		{"byte before", 1, boundOn, b.RKey, base - 1, 1, verbs.RemoteWrite, false},
		{"byte after", 1, boundOn, b.RKey, base + 50, 1, verbs.RemoteWrite, false},
		{"one too many", 1, boundOn, b.RKey, base, 51, verbs.RemoteWrite, false},
		{"wraps", 1, boundOn, b.RKey, ^uint64(0), 2, verbs.RemoteWrite, false},
		{"right not given", 1, boundOn, b.RKey, base, 50, verbs.RemoteRead, false},
		{"another domain", 2, boundOn, b.RKey, base, 50, verbs.RemoteWrite, false},
		{"another queue pair", 1, another, b.RKey, base, 50, verbs.RemoteWrite, false},
		{"the key before", 1, boundOn, free, base, 50, verbs.RemoteWrite, false},
		{"the region's key", 1, boundOn, r.Key(), base, 50, verbs.RemoteWrite, false},
		{"nothing", 2, another, 0, 0, 0, verbs.RemoteRead, true},
	} {
		got, st := tab.Remote(tc.pd, tc.qpn, tc.key, tc.addr, tc.n, tc.need)
		if (st == verbs.WCSuccess) != tc.ok || len(got) != int(tc.n) && tc.ok {
			t.Errorf("%s: %v with %d bytes, want ok=%v", tc.name, st, len(got), tc.ok)
		}
	}
	if _, st := tab.Local(1, b.RKey, base, 1, 0); st != verbs.LocProtErr {
		t.Errorf("a window's key as L_Key: %v", st)
	}
	word := (base + 7) &^ 7
	if old, st := tab.FetchAdd(1, boundOn, b.RKey, word, 3); old != 0 || st != verbs.WCSuccess {
		t.Errorf("fetch-add through the window: %d, %v", old, st)
	}
	if _, st := tab.FetchAdd(1, another, b.RKey, word, 3); st != verbs.RemAccessErr {
		t.Errorf("fetch-add from another queue pair: %v", st)
	}
	tab.Placed(1, b.RKey)
	tab.Placed(1, free)
	if r.Placed() != 1 {
		t.Errorf("%d WRITEs counted, want 1", r.Placed())
	}
}

// Every rule of a bind; what is refused changes nothing.
func TestBindRules(t *testing.T) {
	for _, tc := range []struct {
		name   string
		access verbs.Access // of the region
		change func(*qp.Bind)
		pd     qp.PD // that binds
		ok     bool
	}{
		{"plain", verbs.LocalWrite | verbs.MWBind, func(*qp.Bind) {}, 1, true},
		{"same low byte", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.RKey-- }, 1, true},
		{"C10-72: domain", verbs.LocalWrite | verbs.MWBind, func(*qp.Bind) {}, 2, false},
		{"C10-73: no MWBind", verbs.LocalWrite, func(*qp.Bind) {}, 1, false},
		{"C10-74: write without LocalWrite", verbs.MWBind, func(*qp.Bind) {}, 1, false},
		{"C10-74: atomic without LocalWrite", verbs.MWBind, func(b *qp.Bind) { b.Access = verbs.RemoteAtomic }, 1, false},
		{"read without LocalWrite", verbs.MWBind, func(b *qp.Bind) { b.Access = verbs.RemoteRead }, 1, true},
		{"C10-75: before", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.Addr-- }, 1, false},
		{"C10-75: beyond", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.Length++ }, 1, false},
		{"local right", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.Access = verbs.LocalWrite }, 1, false},
		{"unknown L_Key", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.LKey ^= 1 }, 1, false},
		{"a window's L_Key", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.LKey = b.RKey - 1 }, 1, false},
		{"no window", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.RKey ^= 0x100 }, 1, false},
		{"a region's R_Key", verbs.LocalWrite | verbs.MWBind, func(b *qp.Bind) { b.RKey = b.LKey }, 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tab := newTable(12)
			r := register(t, tab, 1, 64, tc.access)
			w := allocWindow(t, tab, 1)
			before := w.Key()
			b := bindOf(w, r, 0, 64, verbs.RemoteWrite)
			tc.change(b)
			if got := tab.Bind(tc.pd, boundOn, b); got != tc.ok {
				t.Fatalf("bind: %v, want %v", got, tc.ok)
			}
			if tc.ok {
				if !errors.Is(tab.Close(r), ErrBound) || w.Key() != b.RKey {
					t.Error("bound, but the region may go or the key is not the new one")
				}
				return
			}
			if w.Key() != before || w.binding.Load() != nil || tab.Bound() != 0 {
				t.Error("a refused bind left something behind")
			}
			if err := tab.Close(r); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
}

// A bound window is freed before it is bound again, by its own queue pair and whole key.
func TestWindowLife(t *testing.T) {
	tab := newTable(13)
	r := register(t, tab, 1, 64, verbs.LocalWrite|verbs.MWBind)
	w := allocWindow(t, tab, 1)
	if !tab.Invalidate(1, boundOn, w.Key()) {
		t.Error("invalidating a free window is refused")
	}
	bind := func(qpn verbs.QPN, n uint32) bool { return tab.Bind(1, qpn, bindOf(w, r, 0, n, verbs.RemoteRead)) }
	if !bind(boundOn, 64) {
		t.Fatal("bind refused")
	}
	key := w.Key()
	if bind(boundOn, 32) || w.Key() != key {
		t.Error("bound twice")
	}
	if tab.Invalidate(1, another, key) || tab.Invalidate(2, boundOn, key) || tab.Invalidate(1, boundOn, key^1) ||
		tab.Invalidate(1, boundOn, r.Key()) || bind(another, 0) {
		t.Error("freed by who may not")
	}
	if _, st := tab.Remote(1, boundOn, key, r.Addr(), 64, verbs.RemoteRead); st != verbs.WCSuccess {
		t.Fatalf("not open any more: %v", st)
	}
	if !tab.Invalidate(1, boundOn, key) {
		t.Fatal("invalidate refused")
	}
	if _, st := tab.Remote(1, boundOn, key, r.Addr(), 64, verbs.RemoteRead); st != verbs.RemAccessErr {
		t.Fatalf("open after its end: %v", st)
	}
	if !bind(another, 64) || !bind(another, 0) || tab.Bound() != 0 {
		t.Error("a bind of length zero does not free")
	}
	if !bind(boundOn, 8) {
		t.Fatal("bind refused")
	}
	if _, err := tab.Reregister(r, 1, all); !errors.Is(err, ErrBound) {
		t.Errorf("reregister of a bound region: %v", err)
	}
	tab.UnbindAll(another)
	if tab.Bound() != 1 {
		t.Error("freed with another queue pair")
	}
	tab.UnbindAll(boundOn)
	if tab.Bound() != 0 || !bind(another, 8) {
		t.Error("not freed with its queue pair")
	}
	if !tab.CloseWindow(w) || tab.CloseWindow(w) || tab.Bound() != 0 {
		t.Error("CloseWindow must succeed once and free")
	}
	if tab.Bind(1, boundOn, bindOf(w, r, 0, 8, verbs.RemoteRead)) || tab.Invalidate(1, boundOn, w.Key()) {
		t.Error("a closed window lives")
	}
	if w.binding.Load() != gone {
		t.Error("a bind that found the window before it was closed could still open it")
	}
	if err := tab.Close(r); err != nil || tab.Len() != 0 {
		t.Errorf("close: %v, %d left", err, tab.Len())
	}
}

// A bind that finds its region just before Close takes it out of the table is refused: Close
// has looked at the count.
func TestBindMeetsClose(t *testing.T) {
	tab := newTable(17)
	r := register(t, tab, 1, 64, verbs.LocalWrite|verbs.MWBind)
	w := allocWindow(t, tab, 1)
	if !r.seal() {
		t.Fatal("windows are bound")
	}
	if tab.Bind(1, boundOn, bindOf(w, r, 0, 64, verbs.RemoteRead)) || tab.Bound() != 0 || w.binding.Load() != nil {
		t.Error("bound to a region that is being closed")
	}
	if r.bound.Load() != closing {
		t.Errorf("the region counts %d", r.bound.Load())
	}
}

// Reregistering keeps buffer, addresses, index and count; the old key and the old rights go.
func TestReregister(t *testing.T) {
	tab := newTable(14)
	old := register(t, tab, 1, 64, all)
	tab.Placed(1, old.Key())
	if _, err := tab.Reregister(old, 1, verbs.RemoteWrite); !errors.Is(err, ErrAccess) {
		t.Errorf("RemoteWrite without LocalWrite: %v", err)
	}
	if _, st := tab.Remote(1, boundOn, old.Key(), old.Addr(), 64, verbs.RemoteWrite); st != verbs.WCSuccess {
		t.Errorf("a refused reregistration changed something: %v", st)
	}
	r, err := tab.Reregister(old, 2, verbs.LocalWrite|verbs.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	if r.Key() == old.Key() || r.Key()>>8 != old.Key()>>8 || r.Addr() != old.Addr() || &r.Bytes()[0] != &old.Bytes()[0] || r.Placed() != 1 {
		t.Errorf("key %#x from %#x, address %#x from %#x, %d placed", r.Key(), old.Key(), r.Addr(), old.Addr(), r.Placed())
	}
	for _, tc := range []struct {
		name string
		pd   qp.PD
		key  uint32
		need verbs.Access
		ok   bool
	}{
		{"new", 2, r.Key(), verbs.RemoteRead, true},
		{"old right", 2, r.Key(), verbs.RemoteWrite, false},
		{"old domain", 1, r.Key(), verbs.RemoteRead, false},
		{"old key", 2, old.Key(), verbs.RemoteRead, false},
		{"old key, old domain", 1, old.Key(), verbs.RemoteRead, false},
	} {
		if _, st := tab.Remote(tc.pd, boundOn, tc.key, r.Addr(), 8, tc.need); (st == verbs.WCSuccess) != tc.ok {
			t.Errorf("%s: %v", tc.name, st)
		}
	}
	if _, err := tab.Reregister(old, 1, all); !errors.Is(err, ErrClosed) {
		t.Errorf("reregister what was replaced: %v", err)
	}
	if err := tab.Close(old); !errors.Is(err, ErrClosed) {
		t.Errorf("close what was replaced: %v", err)
	}
	if err := tab.Close(r); err != nil || tab.Len() != 0 {
		t.Errorf("close: %v, %d left", err, tab.Len())
	}
}

// TestVariantsChange: every reregistration changes the low byte, to any other.
func TestVariantsChange(t *testing.T) {
	tab := newTable(15)
	r := register(t, tab, 1, 8, 0)
	seen := map[uint32]bool{}
	for range 5000 {
		n, err := tab.Reregister(r, 1, 0)
		if err != nil || n.Key() == r.Key() || n.Key()>>8 != r.Key()>>8 {
			t.Fatalf("%v: key %#x from %#x", err, n.Key(), r.Key())
		}
		r = n
		seen[r.Key()] = true
	}
	if len(seen) != 256 {
		t.Errorf("%d variants seen", len(seen))
	}
}

// TestWindowChurn: many queue pairs bind, use and free windows of shared regions while regions
// come and go; the counts add up in the end, and no lookup ever reaches a closed region.
func TestWindowChurn(t *testing.T) {
	const seed = 16
	tab := newTable(seed)
	var mu sync.Mutex // the device's
	windows := make([]*Window, 8)
	for i := range windows {
		windows[i] = allocWindow(t, tab, 1)
	}
	first := register(t, tab, 1, 64, verbs.LocalWrite|verbs.MWBind)
	current := first
	var wg sync.WaitGroup
	for g := range 3 {
		qpn := verbs.QPN(20 + g)
		rnd := rand.New(rand.NewPCG(seed, uint64(g)))
		wg.Go(func() {
			for range 5000 {
				w := windows[rnd.IntN(len(windows))]
				mu.Lock()
				r := current
				mu.Unlock()
				if tab.Bind(1, qpn, bindOf(w, r, 0, 64, verbs.RemoteRead)) {
					if err := tab.Close(r); err == nil {
						t.Error("a bound region was closed")
					}
					tab.Remote(1, qpn, w.Key(), r.Addr(), 64, verbs.RemoteRead)
				}
				tab.Invalidate(1, qpn, w.Key())
			}
		})
	}
	for range 2000 {
		mu.Lock()
		if tab.Close(current) == nil {
			current = register(t, tab, 1, 64, verbs.LocalWrite|verbs.MWBind)
		}
		mu.Unlock()
	}
	wg.Wait()
	for g := range 3 {
		tab.UnbindAll(verbs.QPN(20 + g))
	}
	if n := tab.Bound(); n != 0 || current.bound.Load() != 0 {
		t.Errorf("%d windows bound, the region counts %d", n, current.bound.Load())
	}
	if err := tab.Close(current); err != nil {
		t.Error(err)
	}
}
