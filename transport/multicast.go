package transport

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// membership is a multicast group on an interface of ours.
type membership struct{ group, local netip.Addr }

// joined counts the queue pairs of one port that need a membership of its socket.
type joined struct {
	port *port
	membership
}

// AttachMulticast lets a UD queue pair receive what is sent to a multicast group on the
// interface that has our address local (ibv_attach_mcast). It takes a device that is bound
// to all addresses: the system delivers a group's datagrams to no other. The system bounds
// the groups of a device (Linux to 20, sysctl net.ipv4.igmp_max_memberships).
//
// A message goes to a group with an address handle for the group's address, whose AV.Local
// chooses the interface, and queue pair number verbs.QPNMulticast. Every attached queue pair
// with the message's Q_Key gets a copy, the sender too if it is attached. Attaching twice is
// attaching once; Close detaches.
func (q *QP) AttachMulticast(group, local netip.Addr) error {
	m := membership{group.Unmap(), local.Unmap()}
	d, p := q.dev, q.port
	d.groupMu.Lock()
	defer d.groupMu.Unlock()
	q.mu.Lock()
	closed := q.closed
	q.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if slices.Contains(q.groups, m) {
		return nil
	}
	if slices.ContainsFunc(q.groups, func(o membership) bool { return o.group == m.group }) {
		return fmt.Errorf("%w: attached to %v on another interface already", verbs.ErrBadAttr, m.group)
	}
	key := joined{p, m}
	err := p.do(func() error {
		if err := p.wire.Attach(q.wq, m.group); err != nil {
			return err
		}
		if d.groups[key] > 0 {
			return nil
		}
		err := p.sock.Join(m.group, m.local)
		if err != nil {
			_ = p.wire.Detach(q.wq, m.group) // it has just been attached
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("transport: attach to %v: %w", m.group, err)
	}
	d.groups[key]++
	q.groups = append(q.groups, m)
	return nil
}

// DetachMulticast undoes AttachMulticast.
func (q *QP) DetachMulticast(group, local netip.Addr) error {
	m := membership{group.Unmap(), local.Unmap()}
	d := q.dev
	d.groupMu.Lock()
	defer d.groupMu.Unlock()
	i := slices.Index(q.groups, m)
	if i < 0 {
		return fmt.Errorf("%w: not attached to %v on %v", verbs.ErrBadAttr, m.group, m.local)
	}
	q.groups = slices.Delete(q.groups, i, i+1)
	return q.leave(m)
}

// leave detaches from one group; the last queue pair leaves it for the socket too. The
// device's groupMu is held.
func (q *QP) leave(m membership) error {
	d, p := q.dev, q.port
	key := joined{p, m}
	last := d.groups[key] == 1
	if d.groups[key]--; last {
		delete(d.groups, key)
	}
	return p.do(func() error {
		err := p.wire.Detach(q.wq, m.group)
		if last && err == nil {
			err = p.sock.Leave(m.group, m.local)
		}
		return err
	})
}

// leaveAll detaches a queue pair that is being closed.
func (q *QP) leaveAll() {
	d := q.dev
	d.groupMu.Lock()
	defer d.groupMu.Unlock()
	for _, m := range q.groups {
		_ = q.leave(m) // a device that closes leaves all groups with its socket
	}
	q.groups = nil
}
