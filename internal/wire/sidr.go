package wire

import (
	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// ServeSIDR answers everybody who asks for a datagram service; see cm.CM.ServeSIDR.
func (w *Wire) ServeSIDR(service roce.SID, s cm.SIDRService) error { return w.cm.ServeSIDR(service, s) }

// UnserveSIDR ends what ServeSIDR began.
func (w *Wire) UnserveSIDR(service roce.SID) { w.cm.UnserveSIDR(service) }

// ResolveSIDR asks a peer for the queue pair behind a datagram service. done is called once,
// during a step, with a SIDRResolved or SIDRUnreachable event, unless CancelSIDR was called;
// it must not block or call back into the wire.
func (w *Wire) ResolveSIDR(now verbs.Instant, p cm.SIDRParams, done func(*cm.Event)) (cm.SIDRID, error) {
	id, err := w.cm.ResolveSIDR(now, p)
	if err != nil {
		return 0, err
	}
	if w.asking == nil {
		w.asking = make(map[cm.SIDRID]func(*cm.Event))
	}
	w.asking[id] = done
	return id, nil
}

// CancelSIDR forgets a query.
func (w *Wire) CancelSIDR(id cm.SIDRID) {
	w.cm.CancelSIDR(id)
	delete(w.asking, id)
}

// resolved hands on how a query ended.
func (w *Wire) resolved(e *cm.Event) {
	if done := w.asking[e.SIDR.ID]; done != nil {
		delete(w.asking, e.SIDR.ID)
		done(e)
	}
}
