package transport

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// GRHLen is the number of bytes in front of a UD message's payload in the receive buffer.
const GRHLen = roce.GRHLen

// AH is an address handle: where UD messages go. A work request names it by its Handle,
// beside the queue pair's number and Q_Key at that address. All methods may be called by any
// goroutine.
type AH struct {
	dev    *Device
	av     verbs.AV
	handle verbs.AH
	closed atomic.Bool
}

// CreateAH makes an address handle for the queue pairs of this domain. Only av.Remote is
// required: a port of 0 means 4791, and our own address follows from the route. It may be a
// multicast group's, then a device bound to all addresses wants av.Local too.
func (pd *PD) CreateAH(av verbs.AV) (*AH, error) {
	d := pd.dev
	if err := d.resolveAV(&av); err != nil {
		return nil, err
	}
	mtu := d.pathMTU(av.Local)
	h := &AH{dev: d, av: av}
	d.ahMu.Lock()
	defer d.ahMu.Unlock()
	for i, p := range d.ports {
		// Every wire makes the same handle of the same calls in the same order.
		err := p.do(func() error {
			ah, err := p.wire.CreateAH(pd.num, av, mtu)
			if err == nil && i > 0 && ah != h.handle {
				panic("BUG: transport: wires differ in their address handles")
			}
			h.handle = ah
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("transport: create an address handle: %w", err)
		}
	}
	return h, nil
}

// resolveAV fills in what an address vector leaves out.
func (d *Device) resolveAV(av *verbs.AV) error {
	remote := av.Remote.Addr().Unmap()
	if av.Local.IsValid() || remote.IsMulticast() {
		if av.Local = av.Local.Unmap(); !av.Local.IsValid() {
			av.Local = d.LocalAddr().Addr()
		}
		if av.Local.IsUnspecified() {
			return fmt.Errorf("%w: AV: a device bound to all addresses needs a local one to send to %v", verbs.ErrBadAttr, remote)
		}
		return nil // the wire checks the rest
	}
	path, err := d.path(remote, av.Remote.Port())
	if err != nil {
		return fmt.Errorf("%w: AV: %w", verbs.ErrBadAttr, err)
	}
	av.Local, av.Remote = path.Local, path.Remote
	return nil
}

// Handle returns what a work request's AH field holds.
func (h *AH) Handle() verbs.AH { return h.handle }

// AV returns the address vector, complete.
func (h *AH) AV() verbs.AV { return h.av }

// Close ends the handle. Posted requests that name it and have not left fail with
// LOC_QP_OP_ERR. Closing twice is ErrClosed.
func (h *AH) Close() error {
	if h.closed.Swap(true) {
		return ErrClosed
	}
	d := h.dev
	d.ahMu.Lock()
	defer d.ahMu.Unlock()
	for _, p := range d.ports {
		if err := p.do(func() error { return p.wire.DestroyAH(h.handle) }); err != nil {
			return err
		}
	}
	return nil
}

// AVFromWC returns where the sender of a received UD message is, to make an address handle
// for an answer (ibv_init_ah_from_wc): from the GRH in buf, the receive buffer that wc
// completed. The answer's queue pair number is wc.SrcQPN.
//
// A GRH has no UDP port. AV.Remote's is 0, for 4791, where everybody else receives; for a
// Doorbell device on another port set it.
func AVFromWC(wc *verbs.WC, buf []byte) (verbs.AV, error) {
	if wc.Status != verbs.WCSuccess || wc.Flags&verbs.WithGRH == 0 {
		return verbs.AV{}, fmt.Errorf("%w: the completion is not of a UD message", verbs.ErrBadAttr)
	}
	from, to, ok := roce.GRHAddrs(buf)
	if !ok {
		return verbs.AV{}, fmt.Errorf("%w: the buffer does not begin with a GRH", verbs.ErrBadAttr)
	}
	av := verbs.AV{Remote: netip.AddrPortFrom(from, 0)}
	if !to.IsMulticast() {
		av.Local = to
	}
	return av, nil
}
