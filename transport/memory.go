package transport

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// PD is a protection domain: queue pairs reach only memory of their own domain. All methods
// may be called by any goroutine.
type PD struct {
	dev *Device
	num qp.PD
}

// PD returns the domain that the device begins with. It is never closed.
func (d *Device) PD() *PD { return d.pd }

// AllocPD makes another protection domain.
func (d *Device) AllocPD() (*PD, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	d.lastPD++
	return &PD{dev: d, num: d.lastPD}, nil
}

// RegisterMR makes buf reachable for work requests, and for peers as far as access allows;
// 0 allows reading it here. RemoteWrite and RemoteAtomic require LocalWrite.
//
// From now until Close the transport may read buf whenever a posted request names it, and
// write it whenever a posted receive, READ or atomic names it or a peer writes to it. The
// program must not write what a posted send names, and must not touch what a receive, READ
// or atomic names, before the completion. Memory that a peer writes is polled through Placed.
func (pd *PD) RegisterMR(buf []byte, access verbs.Access) (*MR, error) {
	d := pd.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	r, err := d.mrs.Register(pd.num, buf, access)
	if err != nil {
		return nil, memoryError("register", err)
	}
	m := &MR{dev: d}
	m.r.Store(r)
	return m, nil
}

// MR is a memory region: a buffer with a key and addresses that peers can be told. All
// methods may be called by any goroutine.
type MR struct {
	dev *Device
	r   atomic.Pointer[mr.Region] // replaced by Rereg, under the device's mu

	placed atomic.Uint64 // what Placed returned last
}

func (m *MR) region() *mr.Region { return m.r.Load() }

// Bytes returns the registered buffer.
func (m *MR) Bytes() []byte { return m.region().Bytes() }

// Addr returns the address of the buffer's first byte in the device's address space. It is
// not a pointer: it is random, and congruent to the buffer's own address modulo 4096.
func (m *MR) Addr() uint64 { return m.region().Addr() }

// LKey returns the key for SGEs.
func (m *MR) LKey() uint32 { return m.region().Key() }

// RKey returns the key for peers.
func (m *MR) RKey() uint32 { return m.region().Key() }

// SGE returns a scatter/gather entry for n bytes from offset off. It panics when they are
// not inside the region, as slicing would.
func (m *MR) SGE(off, n int) verbs.SGE {
	r := m.region()
	_ = r.Bytes()[off : off+n]
	return verbs.SGE{Addr: r.Addr() + uint64(off), Length: uint32(n), LKey: r.Key()}
}

// SGL returns a list with the one entry that SGE returns.
func (m *MR) SGL(off, n int) []verbs.SGE { return []verbs.SGE{m.SGE(off, n)} }

// Remote returns what a peer must know to reach the region.
func (m *MR) Remote() verbs.RemoteMR {
	r := m.region()
	return verbs.RemoteMR{Addr: r.Addr(), RKey: r.Key(), Length: uint32(len(r.Bytes()))}
}

// Placed returns how many RDMA WRITEs of peers into the region are complete. It is how a
// program polls memory: once it has seen the count grow it may read what was written. When
// it has not grown since the last call it drives the device, as CQ.Poll does when it is empty: a
// program that only looks at Placed makes progress.
func (m *MR) Placed() uint64 {
	// News first: a step would go on to acknowledge them, and the caller waits for them.
	r := m.region()
	if n := r.Placed(); m.placed.Swap(n) != n {
		return n
	}
	m.dev.drive()
	n := r.Placed()
	m.placed.Store(n)
	return n
}

// Rereg changes what the region allows and, when pd is not nil, its protection domain. The
// buffer, its addresses and the upper 24 bits of the key stay; the low 8 change, so that who
// has the old key reaches nothing any more once Rereg has returned: neither peers nor
// requests posted before, which complete with LOC_PROT_ERR. When it fails nothing has
// changed: ErrInUse while memory windows are bound to the region, ErrClosed, and the errors
// of RegisterMR.
func (m *MR) Rereg(pd *PD, access verbs.Access) error {
	d := m.dev
	if pd != nil && pd.dev != d {
		return errors.New("transport: reregister: the protection domain is another device's")
	}
	d.mu.Lock()
	old := m.region()
	num := old.PD()
	if pd != nil {
		num = pd.num
	}
	r, err := d.mrs.Reregister(old, num, access)
	if err == nil {
		m.r.Store(r)
	}
	d.mu.Unlock()
	if err != nil {
		return memoryError("reregister", err)
	}
	d.barrier()
	return nil
}

// Close ends the region. When it returns nothing reads or writes the buffer any more; a
// posted request that still names it completes with LOC_PROT_ERR, a peer's with
// REM_ACCESS_ERR. It fails with ErrInUse while memory windows are bound to the region.
func (m *MR) Close() error {
	d := m.dev
	d.mu.Lock()
	err := d.mrs.Close(m.region())
	d.mu.Unlock()
	if err != nil {
		return memoryError("close", err)
	}
	d.barrier()
	return nil
}

func memoryError(what string, err error) error {
	switch {
	case errors.Is(err, mr.ErrClosed):
		return ErrClosed
	case errors.Is(err, mr.ErrBound):
		return fmt.Errorf("transport: %s: memory windows are bound to the region: %w", what, ErrInUse)
	}
	return fmt.Errorf("transport: %s: %w", what, err)
}

// unbind closes the memory windows that were bound on a queue pair that has ended.
func (d *Device) unbind(n verbs.QPN) {
	if d.mrs.Bound() == 0 {
		return
	}
	d.mu.Lock()
	d.mrs.UnbindAll(n)
	d.mu.Unlock()
}
