package transport

import (
	"fmt"

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
		return nil, fmt.Errorf("transport: register: %w", err)
	}
	return &MR{dev: d, r: r}, nil
}

// MR is a memory region: a buffer with a key and addresses that peers can be told. All
// methods may be called by any goroutine.
type MR struct {
	dev *Device
	r   *mr.Region
}

// Bytes returns the registered buffer.
func (m *MR) Bytes() []byte { return m.r.Bytes() }

// Addr returns the address of the buffer's first byte in the device's address space. It is
// not a pointer: it is random, and congruent to the buffer's own address modulo 4096.
func (m *MR) Addr() uint64 { return m.r.Addr() }

// LKey returns the key for SGEs.
func (m *MR) LKey() uint32 { return m.r.Key() }

// RKey returns the key for peers.
func (m *MR) RKey() uint32 { return m.r.Key() }

// SGE returns a scatter/gather entry for n bytes from offset off. It panics when they are
// not inside the region, as slicing would.
func (m *MR) SGE(off, n int) verbs.SGE {
	_ = m.r.Bytes()[off : off+n]
	return verbs.SGE{Addr: m.r.Addr() + uint64(off), Length: uint32(n), LKey: m.r.Key()}
}

// SGL returns a list with the one entry that SGE returns.
func (m *MR) SGL(off, n int) []verbs.SGE { return []verbs.SGE{m.SGE(off, n)} }

// Remote returns what a peer must know to reach the region.
func (m *MR) Remote() verbs.RemoteMR {
	return verbs.RemoteMR{Addr: m.r.Addr(), RKey: m.r.Key(), Length: uint32(len(m.r.Bytes()))}
}

// Placed returns how many RDMA WRITEs of peers into the region are complete. It is how a
// program polls memory: once it has seen the count grow it may read what was written. It
// also drives the device, as CQ.Poll does: a program that only looks at Placed makes progress.
func (m *MR) Placed() uint64 {
	m.dev.drive()
	return m.r.Placed()
}

// Close ends the region. When it returns nothing reads or writes the buffer any more; a
// posted request that still names it completes with LOC_PROT_ERR.
func (m *MR) Close() error {
	d := m.dev
	d.mu.Lock()
	ok := d.mrs.Close(m.r)
	d.mu.Unlock()
	if !ok {
		return ErrClosed
	}
	d.barrier()
	return nil
}
