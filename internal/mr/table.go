// Package mr is a device's registered memory: a table of regions that queue pairs look up
// by key, without locks, and that implements qp.Memory.
//
// A region has one key, used as L_Key and R_Key alike: a random 24-bit index and a random
// 8-bit variant, as adapters build theirs. Its addresses, which peers see, are made here:
// random per region, congruent to the buffer's own address modulo 4096 so that an aligned
// remote atomic is aligned in memory, and never Go pointers.
//
// Lookups may come from any goroutine at any time. Register and Close of one table must not
// run at the same time as each other: the device serialises them. After Close returns no new
// lookup finds the region; the device then waits until every wire has passed a step, because
// a step that began earlier may still hold a slice. The same holds for Reregister and what
// the region allowed before.
//
// A memory window (window.go) opens a part of a region to the peer of one queue pair, under
// a key of its own, as long as the program likes.
package mr

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// PageSize is the modulus to which addresses keep their buffer's alignment.
const PageSize = 4096

const maxRegions = 1 << 20 // far below the 2^24 indexes, so that a random one is soon found

// Errors of a table.
var (
	ErrAccess = errors.New("mr: RemoteWrite and RemoteAtomic require LocalWrite")
	ErrFull   = errors.New("mr: too many memory regions")
	ErrTooBig = errors.New("mr: a region is limited to 2^32-1 bytes")
	// ErrBound: a region that windows are bound to can be neither closed nor changed.
	ErrBound = errors.New("mr: memory windows are bound to the region")
	// ErrClosed: the region or window is not in the table any more.
	ErrClosed = errors.New("mr: closed")
)

// Region is a registered buffer. Its fields do not change while it is in the table.
type Region struct {
	buf    []byte
	base   uint64
	key    uint32
	pd     qp.PD
	access verbs.Access
	placed *atomic.Uint64
	// bound counts the windows that are bound to the region; closing is in it once there
	// must be no more of them.
	bound atomic.Int32
	// win is not nil in the entry of a window, which has no buffer.
	win *Window
}

// closing is what bound is in a region that has left the table.
const closing = -1 << 30

// seal ends the binding of windows; false when there are any.
func (r *Region) seal() bool { return r.bound.CompareAndSwap(0, closing) }

// Bytes returns the buffer.
func (r *Region) Bytes() []byte { return r.buf }

// Addr returns the address of the first byte in the device's address space.
func (r *Region) Addr() uint64 { return r.base }

// Key returns the key, L_Key and R_Key in one.
func (r *Region) Key() uint32 { return r.key }

// Access returns what the region allows.
func (r *Region) Access() verbs.Access { return r.access }

// PD returns the protection domain.
func (r *Region) PD() qp.PD { return r.pd }

// Placed returns how many remote WRITEs into the region are complete. A program that sees
// the count grow sees what those WRITEs wrote.
func (r *Region) Placed() uint64 { return r.placed.Load() }

// at returns n bytes at addr, false when they are not all inside the region.
func (r *Region) at(addr uint64, n uint32) ([]byte, bool) {
	off := addr - r.base
	if off > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-off {
		return nil, false
	}
	return r.buf[off : off+uint64(n) : off+uint64(n)], true
}

// hashTable is an open-addressed table of regions and windows by key index, which is theirs
// alone. A gone one leaves the tombstone behind, so that probes go on past it.
type hashTable struct {
	slots []atomic.Pointer[Region]
	shift uint32
}

var tombstone = new(Region)

func newHashTable(bits uint32) *hashTable {
	return &hashTable{slots: make([]atomic.Pointer[Region], 1<<bits), shift: 32 - bits}
}

// start is where the probe for a key begins (Fibonacci hashing of the index).
func (h *hashTable) start(key uint32) uint32 { return (key >> 8) * 0x9E3779B1 >> h.shift }

// find returns the region with this key, or the window of its index: a window's key has more
// to it. Nil when there is neither.
func (h *hashTable) find(key uint32) *Region {
	mask := uint32(len(h.slots) - 1)
	for i := h.start(key); ; i++ {
		r := h.slots[i&mask].Load()
		if r == nil {
			return nil
		}
		if (r.key^key)>>8 == 0 && r != tombstone {
			if r.key == key || r.win != nil {
				return r
			}
			return nil
		}
	}
}

// slot returns where r is, nil when it is not there.
func (h *hashTable) slot(r *Region) *atomic.Pointer[Region] {
	mask := uint32(len(h.slots) - 1)
	for i := h.start(r.key); ; i++ {
		switch s := &h.slots[i&mask]; s.Load() {
		case nil:
			return nil
		case r:
			return s
		}
	}
}

func (h *hashTable) insert(r *Region) {
	mask := uint32(len(h.slots) - 1)
	i := h.start(r.key)
	for h.slots[i&mask].Load() != nil {
		i++
	}
	h.slots[i&mask].Store(r)
}

// Table is the set of regions of a device. Make one with New.
type Table struct {
	hash atomic.Pointer[hashTable]
	rand func() uint64
	live int // regions and windows in the table
	used int // live ones and tombstones

	windows map[*Window]struct{}
	bound   atomic.Int32 // how many windows are bound
}

// New makes an empty table. random supplies keys and addresses; it must be unpredictable
// to peers, because who knows a key may use it.
func New(random func() uint64) *Table {
	t := &Table{rand: random, windows: make(map[*Window]struct{})}
	t.hash.Store(newHashTable(4))
	return t
}

// Register adds buf, which must stay allocated and must not be moved or shared with another
// region that a peer may write at the same time.
func (t *Table) Register(pd qp.PD, buf []byte, access verbs.Access) (*Region, error) {
	if err := checkAccess(access); err != nil {
		return nil, err
	}
	if uint64(len(buf)) > 1<<32-1 {
		return nil, ErrTooBig
	}
	r := &Region{buf: buf, pd: pd, access: access, placed: new(atomic.Uint64)}
	// 46 bits leave room for any length without wrapping, as user addresses do.
	r.base = t.rand()>>18&^(PageSize-1) + PageSize + pageOffset(buf)
	return r, t.add(r)
}

func checkAccess(access verbs.Access) error {
	if access&(verbs.RemoteWrite|verbs.RemoteAtomic) != 0 && access&verbs.LocalWrite == 0 {
		return ErrAccess
	}
	if access&^verbs.AccessAll != 0 {
		return fmt.Errorf("mr: unknown access flags %#x", access&^verbs.AccessAll)
	}
	return nil
}

// add gives r a key and makes it visible.
func (t *Table) add(r *Region) error {
	if t.live >= maxRegions {
		return ErrFull
	}
	r.key = t.newKey()
	t.reserve()
	t.hash.Load().insert(r)
	t.live++
	t.used++
	return nil
}

// Reregister changes a region's protection domain and what it allows. The result is the
// region from now on: it has the buffer, the addresses and the count of placed WRITEs of r,
// and r's key but for the low byte: the old key is unknown. When it fails nothing has changed:
// ErrBound, ErrClosed, and Register's errors.
func (t *Table) Reregister(r *Region, pd qp.PD, access verbs.Access) (*Region, error) {
	if err := checkAccess(access); err != nil {
		return nil, err
	}
	slot := t.hash.Load().slot(r)
	if slot == nil {
		return nil, ErrClosed
	}
	if !r.seal() {
		return nil, ErrBound
	}
	// One of the 255 other variants.
	variant := uint8(r.key) + 1 + uint8(t.rand()>>32%255)
	n := &Region{
		buf: r.buf, base: r.base, pd: pd, access: access, placed: r.placed,
		key: r.key&^0xFF | uint32(variant),
	}
	slot.Store(n)
	return n, nil
}

// newKey finds a key whose index no live region has; key 0 is never used.
func (t *Table) newKey() uint32 {
	for {
		key := uint32(t.rand() >> 16)
		if key>>8 != 0 && !t.indexTaken(key) {
			return key
		}
	}
}

func (t *Table) indexTaken(key uint32) bool {
	h := t.hash.Load()
	mask := uint32(len(h.slots) - 1)
	for i := h.start(key); ; i++ {
		r := h.slots[i&mask].Load()
		if r == nil {
			return false
		}
		if r != tombstone && r.key>>8 == key>>8 {
			return true
		}
	}
}

// reserve keeps the table at most half full, so that probes are short and end; it replaces
// the table by a fresh one without tombstones, which readers pick up at their next lookup.
func (t *Table) reserve() {
	old := t.hash.Load()
	if 2*(t.used+1) <= len(old.slots) {
		return
	}
	bits := uint32(4)
	for 1<<bits < 4*(t.live+1) {
		bits++
	}
	h := newHashTable(bits)
	for i := range old.slots {
		if r := old.slots[i].Load(); r != nil && r != tombstone {
			h.insert(r)
		}
	}
	t.hash.Store(h)
	t.used = t.live
}

// Close takes r out of the table. It fails with ErrClosed when it is not in it and with
// ErrBound while windows are bound to it.
func (t *Table) Close(r *Region) error {
	slot := t.hash.Load().slot(r)
	if slot == nil {
		return ErrClosed
	}
	if !r.seal() {
		return ErrBound
	}
	slot.Store(tombstone)
	t.live--
	return nil
}

// Len returns the number of regions and windows.
func (t *Table) Len() int { return t.live }

// InUse reports whether a protection domain still has regions or windows.
func (t *Table) InUse(pd qp.PD) bool {
	h := t.hash.Load()
	for i := range h.slots {
		if r := h.slots[i].Load(); r != nil && r != tombstone && r.pd == pd {
			return true
		}
	}
	return false
}

// Local implements qp.Memory.
func (t *Table) Local(pd qp.PD, lkey uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	if n == 0 {
		return nil, verbs.WCSuccess
	}
	if r := t.hash.Load().find(lkey); r != nil && r.win == nil && r.pd == pd && need&^r.access == 0 {
		if b, ok := r.at(addr, n); ok {
			return b, verbs.WCSuccess
		}
	}
	return nil, verbs.LocProtErr
}

// Remote implements qp.Memory.
func (t *Table) Remote(pd qp.PD, qpn verbs.QPN, rkey uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	if n == 0 {
		return nil, verbs.WCSuccess
	}
	r := t.hash.Load().find(rkey)
	if r == nil || r.pd != pd {
		return nil, verbs.RemAccessErr
	}
	access := r.access
	if r.win != nil {
		b := r.win.open(qpn, rkey)
		if b == nil || !b.covers(addr, n) {
			return nil, verbs.RemAccessErr
		}
		r, access = b.region, b.access
	}
	if need&^access == 0 {
		if b, ok := r.at(addr, n); ok {
			return b, verbs.WCSuccess
		}
	}
	return nil, verbs.RemAccessErr
}

// Placed implements qp.Memory.
func (t *Table) Placed(pd qp.PD, rkey uint32) {
	r := t.hash.Load().find(rkey)
	if r == nil || r.pd != pd {
		return
	}
	if r.win != nil {
		b := r.win.binding.Load()
		if b == nil || b.key != rkey {
			return
		}
		r = b.region
	}
	r.placed.Add(1)
}

// CompareSwap implements qp.Memory.
func (t *Table) CompareSwap(pd qp.PD, qpn verbs.QPN, rkey uint32, addr, compare, swap uint64) (uint64, verbs.WCStatus) {
	word, st := t.word(pd, qpn, rkey, addr)
	if st != verbs.WCSuccess {
		return 0, st
	}
	for {
		old := word.Load()
		if old != compare || word.CompareAndSwap(compare, swap) {
			return old, verbs.WCSuccess
		}
	}
}

// FetchAdd implements qp.Memory.
func (t *Table) FetchAdd(pd qp.PD, qpn verbs.QPN, rkey uint32, addr, add uint64) (uint64, verbs.WCStatus) {
	word, st := t.word(pd, qpn, rkey, addr)
	if st != verbs.WCSuccess {
		return 0, st
	}
	return word.Add(add) - add, verbs.WCSuccess
}

func (t *Table) word(pd qp.PD, qpn verbs.QPN, rkey uint32, addr uint64) (*atomic.Uint64, verbs.WCStatus) {
	b, st := t.Remote(pd, qpn, rkey, addr, 8, verbs.RemoteAtomic)
	if st != verbs.WCSuccess {
		return nil, st
	}
	if addr%8 != 0 {
		return nil, verbs.RemInvReqErr
	}
	return atomicWord(b), verbs.WCSuccess
}
