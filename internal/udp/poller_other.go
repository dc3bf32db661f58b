//go:build !linux || doorbellportable

package udp

import (
	"net"
	"time"
)

// Poller lets a wire's thread sleep until its socket has something, somebody kicks, or
// time is up. Wait and Close belong to the thread, Kick to everybody. Readiness is a
// level, not an edge: what arrived before Wait makes Wait return at once.
type Poller struct {
	s      *Socket
	kicks  chan struct{} // capacity 1
	timer  *time.Timer
	closed bool
}

// NewPoller makes a poller for a socket. Close it before the socket.
func NewPoller(s *Socket) (*Poller, error) {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &Poller{s: s, kicks: make(chan struct{}, 1), timer: t}, nil
}

// Wait sleeps until the socket is in one of the wanted states, somebody kicks, or
// timeoutNs have passed (0: only look; negative: no limit), and returns the states that
// the socket is in, of those wanted. It may return early and empty-handed. No event is
// wanted when want is 0: then the socket does not disturb.
//
// A kick that comes before Wait makes it return at once. What was written before the kick
// is visible after the Wait that it ended. An error is for good, [net.ErrClosed] after Close.
//
// Send waits for itself here, so the socket is always Writable.
func (p *Poller) Wait(want Events, timeoutNs int64) (Events, error) {
	if p.closed || p.s.closed.Load() {
		return 0, net.ErrClosed
	}
	arrived := p.s.arrived
	if want&Readable == 0 {
		arrived = nil
	}
	if e := p.look(want); e != 0 || timeoutNs == 0 {
		select {
		case <-p.kicks:
		default:
		}
		return e, nil
	}
	var timeout <-chan time.Time
	if timeoutNs > 0 {
		p.timer.Reset(time.Duration(timeoutNs))
		defer p.timer.Stop()
		timeout = p.timer.C
	}
	select {
	case <-arrived:
	case <-p.kicks:
	case <-timeout:
	case <-p.s.done:
		return 0, net.ErrClosed
	}
	return p.look(want), nil
}

// look returns the states that the socket is in, of those wanted.
func (p *Poller) look(want Events) Events {
	e := want & Writable
	if len(p.s.full) > 0 || p.s.dead.Load() != nil {
		e |= want & Readable
	}
	return e
}

// Kick makes the present or the next Wait return. It never blocks and anyone may call it
// at any time; it does nothing after Close.
func (p *Poller) Kick() {
	select {
	case p.kicks <- struct{}{}:
	default:
	}
}

// Close ends the poller. A second call does nothing.
func (p *Poller) Close() error {
	p.closed = true
	p.timer.Stop()
	return nil
}
