package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// quicConfig has windows that do not limit loopback, and the largest packets that quic-go
// begins with.
func quicConfig() *quic.Config {
	return &quic.Config{
		InitialPacketSize: 1452, EnableDatagrams: true, MaxIdleTimeout: 10 * time.Second,
		InitialStreamReceiveWindow: 8 << 20, MaxStreamReceiveWindow: 16 << 20,
		InitialConnectionReceiveWindow: 16 << 20, MaxConnectionReceiveWindow: 32 << 20,
	}
}

const protocol = "doorbell-bench"

// quicListen listens and waits for one connection.
func quicListen(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) (*quic.Conn, func(), error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	t, err := quicTransport(p.Places[0])
	if err != nil {
		return nil, nil, err
	}
	ln, err := t.Listen(&tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: []string{protocol},
	}, quicConfig())
	if err == nil {
		err = ready(ln.Addr().(*net.UDPAddr).AddrPort())
	}
	if err != nil {
		return nil, nil, errors.Join(err, t.Close(), t.Conn.Close())
	}
	c, err := ln.Accept(ctx)
	closeAll := func() {
		_ = ln.Close()
		_ = t.Close()
		_ = t.Conn.Close()
	}
	if err != nil {
		closeAll()
		return nil, nil, err
	}
	return c, closeAll, nil
}

// quicDial connects.
func quicDial(ctx context.Context, p floor.Params, to netip.AddrPort) (*quic.Conn, func(), error) {
	t, err := quicTransport(p.Places[1])
	if err != nil {
		return nil, nil, err
	}
	// The certificate is one that nobody knows: this is loopback, and only speed is asked.
	c, err := t.Dial(ctx, net.UDPAddrFromAddrPort(to), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}}, quicConfig())
	if err != nil {
		return nil, nil, errors.Join(err, t.Close(), t.Conn.Close())
	}
	return c, func() {
		_ = c.CloseWithError(0, "")
		_ = t.Close()
		_ = t.Conn.Close()
	}, nil
}

func quicTransport(p floor.Place) (*quic.Transport, error) {
	c, err := listenUDP(p)
	if err != nil {
		return nil, err
	}
	return &quic.Transport{Conn: c}, nil
}

// listenUDP binds a socket with large buffers, if the system grants them.
func listenUDP(p floor.Place) (*net.UDPConn, error) {
	addr := p.Addr
	if !addr.IsValid() {
		addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		return nil, err
	}
	_ = c.SetReadBuffer(4 << 20)
	_ = c.SetWriteBuffer(4 << 20)
	return c, nil
}

// quicStream is a stream whose Close is what floor calls CloseWrite.
type quicStream struct{ *quic.Stream }

func (s quicStream) CloseWrite() error { return s.Close() }

func serveQUICStream(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) error {
	c, closeAll, err := quicListen(ctx, p, ready)
	if err != nil {
		return err
	}
	defer closeAll()
	s, err := c.AcceptStream(ctx)
	if err != nil {
		return err
	}
	if err := floor.ServeDuplex(quicStream{s}, p); err != nil {
		return err
	}
	_ = s.Close()
	<-c.Context().Done() // what was written last has arrived when the other end leaves
	return nil
}

func driveQUICStream(ctx context.Context, p floor.Params, to netip.AddrPort) (floor.Result, error) {
	c, closeAll, err := quicDial(ctx, p, to)
	if err != nil {
		return floor.Result{}, err
	}
	defer closeAll()
	s, err := c.OpenStreamSync(ctx)
	if err != nil {
		return floor.Result{}, err
	}
	defer context.AfterFunc(ctx, closeAll)()
	return floor.DriveDuplex(quicStream{s}, p)
}

// bulkDatagram is what fits into a packet of quic-go with room to spare.
const bulkDatagram = 1300

// patience is after how long a datagram that has not come back is lost.
const patience = 20 * time.Millisecond

// serveQUICDatagram sends datagrams back, or counts them until a stream asks how many came.
func serveQUICDatagram(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) error {
	c, closeAll, err := quicListen(ctx, p, ready)
	if err != nil {
		return err
	}
	defer closeAll()
	if p.Kind == floor.Echo {
		for {
			b, err := c.ReceiveDatagram(ctx)
			if err != nil {
				return nil // the other end has left
			}
			if err := c.SendDatagram(b); err != nil {
				return err
			}
		}
	}
	counting, asked := context.WithCancel(ctx)
	defer asked()
	counted := make(chan uint64, 1)
	go func() {
		n := uint64(0)
		for {
			if _, err := c.ReceiveDatagram(counting); err != nil {
				counted <- n
				return
			}
			n++
		}
	}()
	s, err := c.AcceptStream(ctx)
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
		return err
	}
	asked()
	if _, err := s.Write(binary.BigEndian.AppendUint64(nil, <-counted)); err != nil {
		return err
	}
	_ = s.Close()
	<-c.Context().Done()
	return nil
}

func driveQUICDatagram(ctx context.Context, p floor.Params, to netip.AddrPort) (floor.Result, error) {
	c, closeAll, err := quicDial(ctx, p, to)
	if err != nil {
		return floor.Result{}, err
	}
	defer closeAll()
	if p.Kind == floor.Bulk {
		return floodQUIC(ctx, c, p)
	}
	return echoQUIC(ctx, c, p)
}

// echoQUIC keeps a window of datagrams under way to the server and back.
func echoQUIC(ctx context.Context, c *quic.Conn, p floor.Params) (floor.Result, error) {
	const warm = 200
	window := max(p.Window, 1)
	b := make([]byte, p.Size)
	r := floor.Result{}
	var samples floor.Samples
	var begin, last time.Time
	underWay := 0
	for got := 0; ; {
		for ; underWay < window; underWay++ {
			if err := c.SendDatagram(b); err != nil {
				return r, err
			}
		}
		limited, cancel := context.WithTimeout(ctx, patience)
		_, err := c.ReceiveDatagram(limited)
		cancel()
		now := time.Now()
		if err != nil {
			if ctx.Err() != nil || c.Context().Err() != nil {
				return r, fmt.Errorf("echo of datagrams: %w", err)
			}
			r.Lost += uint64(underWay)
			underWay, last = 0, now
			if !begin.IsZero() && now.Sub(begin) >= p.Duration {
				break
			}
			continue
		}
		underWay = max(underWay-1, 0)
		if got++; got <= warm {
			begin, last = now, now
			continue
		}
		if window == 1 {
			samples.Add(now.Sub(last))
		}
		last = now
		r.Ops++
		if r.Ops == uint64(p.Iters) || p.Iters == 0 && now.Sub(begin) >= p.Duration {
			break
		}
	}
	r.Elapsed, r.Bytes = time.Since(begin), r.Ops*uint64(p.Size)
	samples.Into(&r)
	return r, nil
}

// floodQUIC sends datagrams as fast as quic-go takes them. Nothing sends the lost ones again.
func floodQUIC(ctx context.Context, c *quic.Conn, p floor.Params) (floor.Result, error) {
	b := make([]byte, bulkDatagram)
	begin, sent := time.Now(), uint64(0)
	for p.Iters > 0 && sent < uint64(p.Iters) || p.Iters == 0 && time.Since(begin) < p.Duration {
		if err := c.SendDatagram(b); err != nil {
			return floor.Result{}, err
		}
		sent++
	}
	elapsed := time.Since(begin)
	s, err := c.OpenStreamSync(ctx)
	if err != nil {
		return floor.Result{}, err
	}
	var count [8]byte
	if _, err := s.Write(count[:1]); err != nil {
		return floor.Result{}, err
	}
	if _, err := io.ReadFull(s, count[:]); err != nil {
		return floor.Result{}, err
	}
	came := binary.BigEndian.Uint64(count[:])
	return floor.Result{Ops: came, Elapsed: elapsed, Bytes: came * bulkDatagram, Lost: sent - min(came, sent)}, nil
}
