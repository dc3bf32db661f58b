package wire

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Attach lets a UD queue pair receive what is sent to a multicast group: to queue pair number
// 0xFFFFFF at the group's address. Every attached queue pair with the message's Q_Key gets a
// copy, the sender's too if it is attached. The link must have joined the group. Attaching
// twice is attaching once; DestroyQP detaches.
func (w *Wire) Attach(q *QP, group netip.Addr) error {
	group = groupAddr(group)
	if q.q.Type() != verbs.UD || !group.IsMulticast() {
		return fmt.Errorf("%w: a %v queue pair in group %v", verbs.ErrBadAttr, q.q.Type(), group)
	}
	if q.closed {
		return fmt.Errorf("%w: the queue pair is closed", verbs.ErrBadState)
	}
	if slices.Contains(q.groups, group) {
		return nil
	}
	if w.groups == nil {
		w.groups = make(map[netip.Addr][]*QP)
	}
	q.groups = append(q.groups, group)
	w.groups[group] = append(w.groups[group], q)
	return nil
}

// Detach undoes Attach.
func (w *Wire) Detach(q *QP, group netip.Addr) error {
	group = groupAddr(group)
	i := slices.Index(q.groups, group)
	if i < 0 {
		return fmt.Errorf("%w: the queue pair is not attached to %v", verbs.ErrBadAttr, group)
	}
	q.groups = slices.Delete(q.groups, i, i+1)
	w.dropMember(q, group)
	return nil
}

func (w *Wire) dropMember(q *QP, group netip.Addr) {
	members := w.groups[group]
	i := slices.Index(members, q)
	if members = slices.Delete(members, i, i+1); len(members) == 0 {
		delete(w.groups, group)
	} else {
		w.groups[group] = members
	}
}

func (w *Wire) detachAll(q *QP) {
	for _, group := range q.groups {
		w.dropMember(q, group)
	}
	q.groups = nil
}

// groupAddr is how groups are told apart: the interface does not matter.
func groupAddr(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// receiveMulticast hands a datagram to every queue pair of the group it was sent to.
func (w *Wire) receiveMulticast(now verbs.Instant, rx *link.Rx, b []byte, seg int) {
	members := w.groups[groupAddr(rx.Dst)]
	if len(members) == 0 {
		w.Counters.DropNoQP.Add(1)
		return
	}
	if w.in.Opcode.Transport() != roce.TransportUD {
		w.Counters.DropTransport.Add(1)
		return
	}
	if rx.Src.Addr().Is4() != rx.Dst.Is4() {
		w.Counters.DropAddress.Add(1)
		return
	}
	s := w.from.find(rx.Src, rx.Dst, w.local.Port())
	id, ok := w.checkICRC(&s.path, &s.ids, b, seg)
	w.tap(now, rx, id, b)
	if !ok {
		w.Counters.DropICRC.Add(1)
		return
	}
	for _, q := range members {
		w.env.Counters.PacketsReceived.Add(1)
		q.q.HandleDatagram(now, &w.in, rx.Src.Addr(), rx.Dst, 0)
		w.after(q)
	}
}
