package mr

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Window is a memory window of type 2B (IBTA Vol 1, 10.6.7.2.2): a key that a work request
// binds to a part of a region, and that opens this part to the peer of the queue pair on
// which it was bound, and to nobody else. Its life:
//
//	         BIND_MW                       BIND_MW of length 0,
//	free ---------------> bound            LOCAL_INV, SEND with invalidate,
//	 ^                      |              the queue pair's end
//	 +----------------------+
//
// A bound window is not bound again: it is freed first.
type Window struct {
	entry Region // what the table holds: pd and index, and a way back here
	// key is the R_Key of the last binding; binding is nil while the window is free, gone
	// once it is closed.
	key     atomic.Uint32
	binding atomic.Pointer[binding]
}

// binding is what a bound window opens. It does not change; the next one is another.
type binding struct {
	region *Region
	addr   uint64
	length uint32
	key    uint32
	access verbs.Access
	qpn    verbs.QPN
}

var gone = new(binding)

// windowRights are the rights that a window may give.
const windowRights = verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic

// Key returns the window's present R_Key: that of its last BIND_MW. Any goroutine.
func (w *Window) Key() uint32 {
	if b := w.binding.Load(); b != nil && b != gone {
		return b.key
	}
	return w.key.Load()
}

// PD returns the protection domain.
func (w *Window) PD() qp.PD { return w.entry.pd }

// open returns what the window opens to a queue pair under this key, nil for nothing.
func (w *Window) open(qpn verbs.QPN, key uint32) *binding {
	b := w.binding.Load()
	if b == nil || b == gone || b.key != key || b.qpn != qpn {
		return nil
	}
	return b
}

func (b *binding) covers(addr uint64, n uint32) bool {
	off := addr - b.addr
	return off <= uint64(b.length) && uint64(n) <= uint64(b.length)-off
}

// AllocWindow adds a free window.
func (t *Table) AllocWindow(pd qp.PD) (*Window, error) {
	w := &Window{entry: Region{pd: pd}}
	w.entry.win = w
	// Before it is visible: whoever finds it compares the whole key.
	if err := t.add(&w.entry); err != nil {
		return nil, err
	}
	w.key.Store(w.entry.key)
	t.windows[w] = struct{}{}
	return w, nil
}

// CloseWindow frees a window and takes it out of the table; false when it is not in it.
func (t *Table) CloseWindow(w *Window) bool {
	slot := t.hash.Load().slot(&w.entry)
	if slot == nil {
		return false
	}
	slot.Store(tombstone)
	t.live--
	delete(t.windows, w)
	t.released(w.binding.Swap(gone))
	return true
}

// released settles the accounts of a binding that was taken away.
func (t *Table) released(b *binding) {
	if b != nil && b != gone {
		b.region.bound.Add(-1)
		t.bound.Add(-1)
	}
}

// free takes a window's binding away; false when it is bound on another queue pair. A free
// window stays free.
func (t *Table) free(w *Window, qpn verbs.QPN) bool {
	b := w.binding.Load()
	if b == nil {
		return true
	}
	if b.qpn != qpn || !w.binding.CompareAndSwap(b, nil) {
		return false
	}
	t.released(b)
	return true
}

// Bound returns how many windows are bound. Any goroutine.
func (t *Table) Bound() int { return int(t.bound.Load()) }

// UnbindAll frees every window that is bound on a queue pair, when that has ended: its number
// will be another's one day. It must not run at the same time as Register and Close.
func (t *Table) UnbindAll(qpn verbs.QPN) {
	for w := range t.windows {
		if b := w.binding.Load(); b != nil && b != gone && b.qpn == qpn {
			t.free(w, qpn)
		}
	}
}

// window finds the window of a key's index, whatever its variant; nil when there is none.
func (t *Table) window(pd qp.PD, key uint32) *Window {
	if r := t.hash.Load().find(key); r != nil && r.pd == pd {
		return r.win
	}
	return nil
}

// Invalidate implements qp.Memory. Plain regions cannot be invalidated, only windows can
// (IBTA Vol 1, 10.6.5); a window only by its whole present key, and, when it is bound, on the
// queue pair it is bound on.
func (t *Table) Invalidate(pd qp.PD, qpn verbs.QPN, rkey uint32) bool {
	w := t.window(pd, rkey)
	return w != nil && w.Key() == rkey && t.free(w, qpn)
}

// Bind implements qp.Memory, by the rules for windows of type 2 (IBTA Vol 1, 10.6.7.2): the
// window is free and of the queue pair's domain, as the region is (C10-72), the region allows
// binding (C10-73) and local writing if the window lets a peer write (C10-74), and the range
// lies inside it (C10-75).
func (t *Table) Bind(pd qp.PD, qpn verbs.QPN, b *qp.Bind) bool {
	w := t.window(pd, b.RKey)
	if w == nil || b.Access&^windowRights != 0 {
		return false
	}
	if b.Length == 0 {
		if !t.free(w, qpn) {
			return false
		}
		w.key.Store(b.RKey)
		return true
	}
	r := t.hash.Load().find(b.LKey)
	if r == nil || r.win != nil || r.pd != pd || r.access&verbs.MWBind == 0 {
		return false
	}
	if b.Access&(verbs.RemoteWrite|verbs.RemoteAtomic) != 0 && r.access&verbs.LocalWrite == 0 {
		return false
	}
	if _, ok := r.at(b.Addr, b.Length); !ok {
		return false
	}
	// The region stays until the window lets go: whoever closes it looks at the count first.
	if r.bound.Add(1) < 0 {
		r.bound.Add(-1)
		return false
	}
	t.bound.Add(1)
	n := &binding{region: r, addr: b.Addr, length: b.Length, key: b.RKey, access: b.Access, qpn: qpn}
	if !w.binding.CompareAndSwap(nil, n) {
		t.released(n)
		return false
	}
	w.key.Store(b.RKey)
	return true
}
