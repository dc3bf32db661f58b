package transport

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Dial opens a connection to a service port (the port space of rdma_cm) at a host and
// returns its queue pair in RTS. The host's UDP port is p.RemotePort, not to's port.
//
// It returns a *RejectError when the peer refuses, ErrUnreachable when it does not answer
// within Config.ConnectTimeout, ctx.Err() when ctx ends first.
func (d *Device) Dial(ctx context.Context, to netip.AddrPort, p ConnParam) (*QP, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	path, err := d.path(to.Addr(), p.RemotePort)
	if err != nil {
		return nil, err
	}
	if to.Port() == 0 {
		return nil, errors.New("transport: dial: service port 0")
	}
	if p.Type == 0 {
		p.Type = verbs.RC
	}
	wp, err := p.resolve(MaxDialPrivateData, d.maxMTU)
	if err != nil {
		return nil, err
	}
	wp.MTU = min(wp.MTU, d.pathMTU(path.Local))
	q, err := d.connQP(&p, &wp, nil)
	if err != nil {
		return nil, err
	}
	err = q.port.do(func() error {
		c, err := q.port.wire.Dial(d.now(), q.wq, wire.DialParam{
			Path: path, Service: roce.ServiceID(roce.PSTCP, to.Port()), SrcPort: d.ephemeralPort(), ConnParam: wp,
		})
		if err == nil {
			c.Tag, q.conn = q, c
		}
		return err
	})
	if err == nil {
		err = q.link.waitUp(ctx)
	}
	if err != nil {
		_ = q.Close() // the reason to report is err
		return nil, fmt.Errorf("transport: dial %v: %w", to, err)
	}
	d.log("connected", "qpn", q.Num(), "peer", path.Remote)
	return q, nil
}

// path finds the way to a host: its canonical address and ours towards it.
func (d *Device) path(host netip.Addr, port uint16) (cm.Path, error) {
	host = host.Unmap()
	if !host.IsValid() || host.IsUnspecified() || host.IsMulticast() {
		return cm.Path{}, fmt.Errorf("transport: %v is not a host's address", host)
	}
	if port == 0 {
		port = Port
	}
	remote := netip.AddrPortFrom(host, port)
	local := d.LocalAddr().Addr()
	if local.IsUnspecified() {
		src, _, err := udp.Route(host)
		if err != nil {
			return cm.Path{}, fmt.Errorf("transport: no route to %v: %w", host, err)
		}
		local = src.Unmap()
	}
	if local.Is4() != host.Is4() {
		return cm.Path{}, fmt.Errorf("transport: the device speaks from %v and cannot reach %v: different IP versions", local, host)
	}
	return cm.Path{Local: local, Remote: remote}, nil
}

// pathMTU returns the largest path MTU of the interface that has one of our addresses. A
// device bound to one address has found it out when it was opened.
func (d *Device) pathMTU(local netip.Addr) verbs.MTU {
	if !d.LocalAddr().Addr().IsUnspecified() {
		return d.maxMTU
	}
	d.mu.RLock()
	m, ok := d.mtus[local]
	d.mu.RUnlock()
	if ok {
		return m
	}
	m = d.maxMTU
	if n := udp.InterfaceMTU(local); n > 0 {
		m = min(m, max(verbs.MTUForLink(n), verbs.MTU256))
	}
	d.mu.Lock()
	if len(d.mtus) < 1024 {
		d.mtus[local] = m
	}
	d.mu.Unlock()
	return m
}

// connQP makes the queue pair of a connection, in INIT with its receives posted, on the wire that
// has the connection; nil for any.
func (d *Device) connQP(p *ConnParam, wp *wire.ConnParam, on *port) (*QP, error) {
	pd := p.PD
	if pd == nil {
		pd = d.pd
	}
	sendCQ, recvCQ := p.SendCQ, p.RecvCQ
	var own []*CQ
	if sendCQ == nil || recvCQ == nil {
		c, err := d.CreateCQ(cqDepth(p.Cap, p.SRQ))
		if err != nil {
			return nil, err
		}
		own = append(own, c)
		if sendCQ == nil {
			sendCQ = c
		}
		if recvCQ == nil {
			recvCQ = c
		}
	}
	q, err := d.newQP(pd, QPConfig{Type: p.Type, SendCQ: sendCQ, RecvCQ: recvCQ, SRQ: p.SRQ, Cap: p.Cap, SQSigAll: p.SQSigAll}, on)
	if err != nil {
		for _, c := range own {
			_ = c.Close()
		}
		return nil, err
	}
	q.ownCQs = own
	init := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
		State: verbs.QPInit, Port: 1, AccessFlags: wp.Access,
	}
	err = q.port.do(func() error { return q.port.wire.Modify(d.now(), q.wq, &init) })
	if err == nil && len(p.Recv) > 0 {
		_, err = q.PostRecvList(p.Recv)
	}
	if err == nil && p.Prepare != nil {
		err = p.Prepare(q)
	}
	if err != nil {
		_ = q.Close() // the reason to report is err
		return nil, err
	}
	return q, nil
}

// cqDepth is room for everything a queue pair, or its shared receive queue, can have posted.
func cqDepth(c verbs.QPCap, srq *SRQ) int {
	if srq != nil {
		c.MaxRecvWR = srq.Cap()
	}
	size := func(n int) int {
		if n <= 0 {
			n = 128
		}
		p := 1
		for p < n {
			p *= 2
		}
		return p
	}
	return size(c.MaxSendWR) + size(c.MaxRecvWR)
}

// Listener receives connection requests for one service port.
type Listener struct {
	dev     *Device
	addr    netip.AddrPort
	service roce.SID
	// queue holds the requests that wait for Next: as many as the connection manager lets in.
	queue chan *ConnRequest
	mu    sync.Mutex // held while something is put into queue
	// halfOpen is the backlog that the wires share.
	halfOpen cm.HalfOpen

	once sync.Once
	done chan struct{}
}

// Listen takes requests for a service port. addr's address may be invalid or unspecified,
// for all of the device's addresses. ErrInUse means that the port has a listener.
func (d *Device) Listen(addr netip.AddrPort) (*Listener, error) {
	if addr.Port() == 0 {
		return nil, errors.New("transport: listen: service port 0; choose one from 1 to 65535")
	}
	l := &Listener{
		dev: d, addr: netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()),
		service: roce.ServiceID(roce.PSTCP, addr.Port()),
		queue:   make(chan *ConnRequest, d.cfg.backlog()), done: make(chan struct{}),
	}
	// The map first and not under the wire's role: upcalls look into it under that role.
	d.mu.Lock()
	switch {
	case d.closed:
		d.mu.Unlock()
		return nil, ErrClosed
	case d.listeners[l.service] != nil:
		d.mu.Unlock()
		return nil, fmt.Errorf("transport: service port %d: %w", addr.Port(), ErrInUse)
	}
	d.listeners[l.service] = l
	d.mu.Unlock()
	for _, p := range d.ports {
		if err := p.do(func() error { return p.wire.ListenShared(l.service, &l.halfOpen) }); err != nil {
			_ = l.Close() // the reason to report is err
			return nil, fmt.Errorf("transport: listen on service port %d: %w", addr.Port(), err)
		}
	}
	return l, nil
}

// Addr returns the address and service port that the listener was made for.
func (l *Listener) Addr() netip.AddrPort { return l.addr }

// Next waits for a request; those whose peers gave up before anybody asked are not among
// them. It returns ErrClosed after Close, ctx.Err() when ctx ends first.
func (l *Listener) Next(ctx context.Context) (*ConnRequest, error) {
	for {
		r, err := l.next(ctx)
		if err != nil || !r.gone.Load() {
			return r, err
		}
	}
}

func (l *Listener) next(ctx context.Context) (*ConnRequest, error) {
	select {
	case r := <-l.queue:
		return r, nil
	default:
	}
	select {
	case r := <-l.queue:
		return r, nil
	case <-l.done:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// offer queues a request, under the role of its wire, and reports whether it found room. The
// connection manager lets in no more than the queue holds, but does not count those whose peers
// have given up; they make room.
func (l *Listener) offer(r *ConnRequest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.push(r) {
		return true
	}
	for range cap(l.queue) {
		select {
		case old := <-l.queue:
			if !old.gone.Load() {
				l.push(old) // never full: we have just taken one, and nobody else adds
			}
		default:
			return l.push(r)
		}
	}
	return l.push(r)
}

func (l *Listener) push(r *ConnRequest) bool {
	select {
	case l.queue <- r:
		return true
	default:
		return false
	}
}

// Close stops listening and rejects the requests that nobody took. Closing twice is ErrClosed.
func (l *Listener) Close() error {
	err := ErrClosed
	l.once.Do(func() {
		err = nil
		d := l.dev
		d.mu.Lock()
		if d.listeners[l.service] == l {
			delete(d.listeners, l.service)
		}
		d.mu.Unlock()
		close(l.done)
		for _, p := range d.ports {
			_ = p.do(func() error { p.wire.Unlisten(l.service); return nil })
		}
		for {
			select {
			case r := <-l.queue:
				_ = r.Reject(verbs.RejectInvalidServiceID, nil) // the peer gives up by itself if this fails
			default:
				return
			}
		}
	})
	return err
}

// ConnRequest is a peer's wish to connect. It must be answered with Accept or Reject, by
// one goroutine; unanswered, it holds a place of the backlog until the peer gives up.
type ConnRequest struct {
	dev     *Device
	port    *port
	conn    *wire.Conn
	private []byte
	srcPort uint16
	gone    atomic.Bool // the peer has given up, or we have: nobody wants an answer
}

// PrivateData returns what the peer sent with its REQ: 56 bytes, zero-padded.
func (r *ConnRequest) PrivateData() []byte { return r.private }

// Type returns the service that the peer asks for: RC or UC.
func (r *ConnRequest) Type() verbs.QPType { return r.conn.Type() }

// RemoteAddr returns the peer's address and the source port that its REQ names.
func (r *ConnRequest) RemoteAddr() netip.AddrPort {
	return netip.AddrPortFrom(r.conn.Path.Remote.Addr(), r.srcPort)
}

// Accept answers the request with a REP and returns at once with the queue pair in RTR: the
// RTU is not in. Receives work; sends may be posted and leave when the RTU or the peer's
// first message arrives, whichever comes first. QP.Established waits for that.
//
// When it fails because of p, the request is still open.
func (r *ConnRequest) Accept(ctx context.Context, p ConnParam) (*QP, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d := r.dev
	if p.Type == 0 {
		p.Type = r.Type()
	}
	wp, err := p.resolve(MaxAcceptPrivateData, d.maxMTU)
	if err != nil {
		return nil, err
	}
	wp.MTU = min(wp.MTU, d.pathMTU(r.conn.Path.Local))
	q, err := d.connQP(&p, &wp, r.port)
	if err != nil {
		return nil, err
	}
	q.link.brought(r.private)
	err = r.port.do(func() error {
		err := r.port.wire.Accept(d.now(), r.conn, q.wq, wp)
		if err == nil {
			r.conn.Tag, q.conn = q, r.conn
		}
		return err
	})
	if err != nil {
		_ = q.Close() // the reason to report is err
		if errors.Is(err, wire.ErrMTU) {
			_ = r.Reject(verbs.RejectInvalidMTU, nil)
		}
		return nil, fmt.Errorf("transport: accept %v: %w", r.conn.Path.Remote, err)
	}
	return q, nil
}

// Reject refuses the request. private, at most 148 bytes, reaches the peer's RejectError;
// a reason of 0 means RejectConsumer.
func (r *ConnRequest) Reject(reason verbs.RejectReason, private []byte) error {
	if len(private) > MaxRejectPrivateData {
		return fmt.Errorf("%w: %d bytes, want at most %d", ErrPrivateData, len(private), MaxRejectPrivateData)
	}
	if reason == 0 {
		reason = verbs.RejectConsumer
	}
	return r.port.do(func() error { return r.port.wire.Reject(r.dev.now(), r.conn, reason, private) })
}
