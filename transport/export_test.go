package transport

import (
	"testing"
	"time"

	"golang.org/x/net/bpf"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/roce"
)

// Direct says that the socket is used by system calls and not through package net, which
// allocates.
const Direct = udp.Direct

// Kill ends a device as the death of its process would: without a word to anybody.
func Kill(d *Device) {
	for _, p := range d.ports {
		_ = p.role.Close(func() {})
		<-p.done
	}
}

// Groups returns the number of multicast groups that the device's sockets are in.
func Groups(d *Device) int {
	d.groupMu.Lock()
	defer d.groupMu.Unlock()
	return len(d.groups)
}

// HoldWires keeps a device's wires in the middle of a step until release is called.
func HoldWires(d *Device) (release func()) {
	end := make(chan struct{})
	for _, p := range d.ports {
		held := make(chan struct{})
		go func() {
			_ = p.do(func() error { close(held); <-end; return nil })
		}()
		<-held
	}
	return func() { close(end) }
}

// Interpose puts what f makes of each wire's link in its place.
func Interpose(d *Device, f func(link.Link) link.Link) {
	for _, p := range d.ports {
		_ = p.do(func() error { p.wire.Interpose(f); return nil })
	}
}

// Held returns what a device's wires hold on to; port is a service port.
func Held(d *Device, port uint16) (h wire.Held) {
	for _, p := range d.ports {
		_ = p.do(func() error {
			w := p.wire.Held(roce.ServiceID(roce.PSTCP, port))
			h.Conns += w.Conns
			h.CMConns += w.CMConns
			h.HalfOpen += w.HalfOpen
			h.QPs += w.QPs
			h.Peers += w.Peers
			return nil
		})
	}
	return h
}

// UnreadEvents returns how many objects have events that nobody has read.
func UnreadEvents(d *Device) int {
	d.events.mu.Lock()
	defer d.events.mu.Unlock()
	return len(d.events.queue)
}

// Tables returns how many connections, those in timewait included, and queue pairs a device
// has, and how many objects it would end when closed.
func Tables(d *Device) (conns, qps, objects int) {
	for _, p := range d.ports {
		_ = p.do(func() error { conns += p.wire.Conns(); qps += p.wire.QPs(); return nil })
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	return conns, qps, len(d.objects)
}

// Steering is the program by which the system chooses a wire's socket, Owner what it computes.
var (
	Steering = steering
	Owner    = wire.Owner
)

// Steer has the system choose sockets by another program.
func Steer(d *Device, prog []bpf.RawInstruction) error { return d.ports[0].sock.Steer(prog) }

// WireOf returns the number of a queue pair's wire.
func WireOf(q *QP) int { return q.port.index }

// Watched reports whether a waiter sleeps on a socket of the device.
func Watched(d *Device) bool {
	for _, p := range d.ports {
		if p.watch != nil && p.watch.cq.Load() != nil {
			return true
		}
	}
	return false
}

// Tracked returns how many objects Close would end, and the most there were since the map that
// holds them was made.
func Tracked(d *Device) (n, most int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.objects), d.most
}

// ClaimsAfter tells how many of n sleeps, each until so long from then, would keep packets to
// themselves after one of which Poller.Await has said idle and missed. It waits itself meanwhile.
func ClaimsAfter(t testing.TB, d *Device, idle bool, missed int, until time.Duration, n int) (claims int) {
	p := d.ports[0]
	if !p.role.Sit() {
		t.Fatal("somebody waits on the socket")
	}
	defer p.role.Rise()
	p.watch.slept(idle, missed)
	defer p.watch.slept(false, 0)
	err := p.do(func() error {
		p.wire.Step(d.now()) // so that the socket knows how much is received at a time
		for range n {
			p.watch.Claim(d.now().Add(until))
			if p.watch.claimed {
				claims++
			}
			p.watch.Unclaim()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return claims
}
