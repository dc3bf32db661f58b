package transport

import (
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// MW is a memory window of type 2: a key that opens a part of a region to one queue pair's
// peer, for as long as the program likes, without a system call or a registration. A BIND_MW
// work request opens it ([MW.Bind]), and these close it:
//
//   - LOCAL_INV with the key, on the queue pair it was bound on;
//   - the peer's SEND with invalidate, which names the key, on the same queue pair;
//   - a BIND_MW of length 0;
//   - the end of that queue pair, or of the window.
//
// All of them take effect in the order of the queue: once their completion is there, the key
// opens nothing. A window that is open is closed before it is bound again; a bind that is
// refused completes with verbs.MWBindErr and moves the queue pair to ERR, as any error does.
//
// The region must allow verbs.MWBind, and LocalWrite if the window lets the peer write; it
// need not allow any remote access itself. All methods may be called by any goroutine.
type MW struct {
	dev *Device
	w   *mr.Window
}

// AllocMW makes a window that opens nothing yet. Its queue pairs and regions must be of the
// same domain.
func (pd *PD) AllocMW() (*MW, error) {
	d := pd.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	w, err := d.mrs.AllocWindow(pd.num)
	if err != nil {
		return nil, memoryError("allocate a memory window", err)
	}
	return &MW{dev: d, w: w}, nil
}

// RKey returns the window's R_Key: that of the last bind that was done.
func (w *MW) RKey() uint32 { return w.w.Key() }

// NextRKey returns a key that a bind may give the window: the present one with the low byte
// counted up, so that a peer that still has the present one meets nothing.
func (w *MW) NextRKey() uint32 {
	k := w.w.Key()
	return k&^0xFF | uint32(uint8(k)+1)
}

// Bind returns a signaled work request that opens n bytes of m from offset off for access
// (RemoteWrite, RemoteRead, RemoteAtomic) under NextRKey; the request's RKey is what to tell
// the peer. It panics when the range is not inside the region, as slicing would. For another
// key set the RKey of the request: its upper 24 bits must be the window's.
func (w *MW) Bind(m *MR, off, n int, access verbs.Access) verbs.SendWR {
	return verbs.SendWR{
		Opcode: verbs.BindMW, Flags: verbs.Signaled, RKey: w.NextRKey(), SGList: m.SGL(off, n), BindAccess: access,
	}
}

// Close ends the window. When it returns the peer reaches nothing through it any more.
func (w *MW) Close() error {
	d := w.dev
	d.mu.Lock()
	ok := d.mrs.CloseWindow(w.w)
	d.mu.Unlock()
	if !ok {
		return ErrClosed
	}
	d.barrier()
	return nil
}
