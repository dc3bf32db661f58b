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
// a step that began earlier may still hold a slice.
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

// Errors of Register.
var (
	ErrAccess = errors.New("mr: RemoteWrite and RemoteAtomic require LocalWrite")
	ErrFull   = errors.New("mr: too many memory regions")
	ErrTooBig = errors.New("mr: a region is limited to 2^32-1 bytes")
)

// Region is a registered buffer. Its fields do not change while it is in the table.
type Region struct {
	buf    []byte
	base   uint64
	key    uint32
	pd     qp.PD
	access verbs.Access
	placed atomic.Uint64
}

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

// hashTable is an open-addressed table of regions by key index. A gone region leaves the
// tombstone behind, so that probes go on past it.
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

func (h *hashTable) find(key uint32) *Region {
	mask := uint32(len(h.slots) - 1)
	for i := h.start(key); ; i++ {
		r := h.slots[i&mask].Load()
		if r == nil || r.key == key && r != tombstone {
			return r
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
	live int // regions in the table
	used int // live ones and tombstones
}

// New makes an empty table. random supplies keys and addresses; it must be unpredictable
// to peers, because who knows a key may use it.
func New(random func() uint64) *Table {
	t := &Table{rand: random}
	t.hash.Store(newHashTable(4))
	return t
}

// Register adds buf, which must stay allocated and must not be moved or shared with another
// region that a peer may write at the same time.
func (t *Table) Register(pd qp.PD, buf []byte, access verbs.Access) (*Region, error) {
	if access&(verbs.RemoteWrite|verbs.RemoteAtomic) != 0 && access&verbs.LocalWrite == 0 {
		return nil, ErrAccess
	}
	if access&^verbs.AccessAll != 0 {
		return nil, fmt.Errorf("mr: unknown access flags %#x", access&^verbs.AccessAll)
	}
	if uint64(len(buf)) > 1<<32-1 {
		return nil, ErrTooBig
	}
	if t.live >= maxRegions {
		return nil, ErrFull
	}
	r := &Region{buf: buf, pd: pd, access: access, key: t.newKey()}
	// 46 bits leave room for any length without wrapping, as user addresses do.
	r.base = t.rand()>>18&^(PageSize-1) + PageSize + pageOffset(buf)
	t.reserve()
	t.hash.Load().insert(r)
	t.live++
	t.used++
	return r, nil
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

// Close takes r out of the table; false when it is not in it.
func (t *Table) Close(r *Region) bool {
	h := t.hash.Load()
	mask := uint32(len(h.slots) - 1)
	for i := h.start(r.key); ; i++ {
		switch h.slots[i&mask].Load() {
		case nil:
			return false
		case r:
			h.slots[i&mask].Store(tombstone)
			t.live--
			return true
		}
	}
}

// Len returns the number of regions.
func (t *Table) Len() int { return t.live }

// InUse reports whether a protection domain still has regions.
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
	if r := t.hash.Load().find(lkey); r != nil && r.pd == pd && need&^r.access == 0 {
		if b, ok := r.at(addr, n); ok {
			return b, verbs.WCSuccess
		}
	}
	return nil, verbs.LocProtErr
}

// Remote implements qp.Memory.
func (t *Table) Remote(pd qp.PD, rkey uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	if n == 0 {
		return nil, verbs.WCSuccess
	}
	if b, st := t.Local(pd, rkey, addr, n, need); st == verbs.WCSuccess {
		return b, st
	}
	return nil, verbs.RemAccessErr
}

// Placed implements qp.Memory.
func (t *Table) Placed(pd qp.PD, rkey uint32) {
	if r := t.hash.Load().find(rkey); r != nil && r.pd == pd {
		r.placed.Add(1)
	}
}

// CompareSwap implements qp.Memory.
func (t *Table) CompareSwap(pd qp.PD, rkey uint32, addr, compare, swap uint64) (uint64, verbs.WCStatus) {
	word, st := t.word(pd, rkey, addr)
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
func (t *Table) FetchAdd(pd qp.PD, rkey uint32, addr, add uint64) (uint64, verbs.WCStatus) {
	word, st := t.word(pd, rkey, addr)
	if st != verbs.WCSuccess {
		return 0, st
	}
	return word.Add(add) - add, verbs.WCSuccess
}

func (t *Table) word(pd qp.PD, rkey uint32, addr uint64) (*atomic.Uint64, verbs.WCStatus) {
	b, st := t.Remote(pd, rkey, addr, 8, verbs.RemoteAtomic)
	if st != verbs.WCSuccess {
		return nil, st
	}
	if addr%8 != 0 {
		return nil, verbs.RemInvReqErr
	}
	return atomicWord(b), verbs.WCSuccess
}

// Invalidate implements qp.Memory: plain regions cannot be invalidated, only memory windows
// can (IBTA Vol 1, 10.6.5).
func (t *Table) Invalidate(qp.PD, uint32) bool { return false }
