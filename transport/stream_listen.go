package transport

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/internal/rsocket"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// StreamListener takes streams: a net.Listener. All methods may be called by any goroutine.
type StreamListener struct {
	ln   *Listener
	cfg  StreamConfig
	addr StreamAddr
}

// ListenStream takes streams for a service port, with the default configuration. The address
// is that of Listen; the result is a *StreamListener.
func (d *Device) ListenStream(addr netip.AddrPort) (net.Listener, error) {
	l, err := StreamConfig{}.Listen(d, addr)
	if err != nil {
		return nil, err // not a nil *StreamListener
	}
	return l, nil
}

// Listen takes streams for a service port.
func (cfg StreamConfig) Listen(d *Device, addr netip.AddrPort) (*StreamListener, error) {
	ln, err := d.Listen(addr)
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: streamNetwork, Addr: &StreamAddr{addr}, Err: err}
	}
	local := ln.Addr()
	if !local.Addr().IsValid() {
		local = netip.AddrPortFrom(d.LocalAddr().Addr(), local.Port())
	}
	return &StreamListener{ln: ln, cfg: cfg, addr: StreamAddr{local}}, nil
}

// Addr returns the *StreamAddr that the listener was made for.
func (l *StreamListener) Addr() net.Addr { return &l.addr }

// Accept waits for the next stream and returns it, a *Stream. It may be written at once: what
// is written before the connection is established waits for that, in order. A peer that asks
// for something else than a stream is refused, and not seen here.
func (l *StreamListener) Accept() (net.Conn, error) {
	s, err := l.AcceptStream(context.Background())
	if err != nil {
		return nil, err
	}
	return s, nil
}

// AcceptStream is Accept with a context.
func (l *StreamListener) AcceptStream(ctx context.Context) (*Stream, error) {
	for {
		req, err := l.ln.Next(ctx)
		if err != nil {
			return nil, l.opError(err)
		}
		s, err := l.accept(ctx, req)
		if err == nil {
			return s, nil
		}
		_ = req.Reject(verbs.RejectConsumer, nil) // it fails if Accept has refused it already
		if errors.Is(err, ErrClosed) || ctx.Err() != nil {
			return nil, l.opError(err)
		}
		l.ln.dev.log("stream refused", "peer", req.RemoteAddr(), "err", err)
	}
}

func (l *StreamListener) accept(ctx context.Context, req *ConnRequest) (*Stream, error) {
	peer, err := rsocket.ParseConnData(req.PrivateData())
	if err != nil {
		return nil, err
	}
	s, p, err := l.cfg.newStream(l.ln.dev)
	if err != nil {
		return nil, err
	}
	if s.qp, err = req.Accept(ctx, p); err != nil {
		s.release()
		return nil, err
	}
	s.local = StreamAddr{netip.AddrPortFrom(s.qp.LocalAddr().Addr(), l.addr.Port())}
	s.remote = StreamAddr{req.RemoteAddr()}
	s.start(peer)
	return s, nil
}

// Close ends the listener; a blocked Accept returns net.ErrClosed. Streams go on.
func (l *StreamListener) Close() error { return l.opError(l.ln.Close()) }

func (l *StreamListener) opError(err error) error {
	if err == nil {
		return nil
	}
	return &net.OpError{Op: "accept", Net: streamNetwork, Addr: &l.addr, Err: err}
}
