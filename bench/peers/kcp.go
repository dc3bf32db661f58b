package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"

	"github.com/xtaci/kcp-go/v5"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// tune sets kcp-go as its authors do for speed: no delays, no congestion control, a large
// window, no encryption and no error correction.
func tune(s *kcp.UDPSession) {
	s.SetNoDelay(1, 10, 2, 1)
	s.SetWindowSize(2048, 2048)
	s.SetACKNoDelay(true)
	s.SetStreamMode(true)
	s.SetWriteDelay(false)
}

// kcpConn gives a session the end of a stream, which KCP does not have: a byte that no
// workload sends.
type kcpConn struct {
	*kcp.UDPSession
	over bool
}

const endMark = 0xFF

func (c *kcpConn) CloseWrite() error {
	_, err := c.Write([]byte{endMark})
	return err
}

func (c *kcpConn) Read(b []byte) (int, error) {
	if c.over {
		return 0, io.EOF
	}
	n, err := c.UDPSession.Read(b)
	if n > 0 && b[n-1] == endMark {
		c.over = true
		n--
	}
	return n, err
}

func serveKCP(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) error {
	conn, err := listenUDP(p.Places[0])
	if err != nil {
		return err
	}
	defer conn.Close()
	ln, err := kcp.ServeConn(nil, 0, 0, conn)
	if err != nil {
		return err
	}
	defer ln.Close()
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	if err := ready(conn.LocalAddr().(*net.UDPAddr).AddrPort()); err != nil {
		return err
	}
	s, err := ln.AcceptKCP()
	if err != nil {
		return err
	}
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	tune(s)
	c := &kcpConn{UDPSession: s}
	if err := floor.ServeDuplex(c, p); err != nil {
		return err
	}
	// KCP does not tell that the other end is gone; what was written last has to be sent
	// until it has arrived. Whoever started this end ends it.
	<-ctx.Done()
	return nil
}

func driveKCP(ctx context.Context, p floor.Params, to netip.AddrPort) (floor.Result, error) {
	conn, err := listenUDP(p.Places[1])
	if err != nil {
		return floor.Result{}, err
	}
	defer conn.Close()
	s, err := kcp.NewConn2(net.UDPAddrFromAddrPort(to), nil, 0, 0, conn)
	if err != nil {
		return floor.Result{}, err
	}
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	tune(s)
	r, err := floor.DriveDuplex(&kcpConn{UDPSession: s}, p)
	if err != nil && ctx.Err() != nil {
		err = errors.Join(ctx.Err(), err)
	}
	return r, err
}
