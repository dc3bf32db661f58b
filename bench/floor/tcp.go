package floor

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"
)

// serveTCP serves one connection.
func serveTCP(ctx context.Context, p Params, ready func(netip.AddrPort) error) error {
	ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Places[0].addr(), 0)))
	if err != nil {
		return fmt.Errorf("floor: %w", err)
	}
	defer ln.Close()
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	if err := ready(ln.Addr().(*net.TCPAddr).AddrPort()); err != nil {
		return err
	}
	c, err := ln.AcceptTCP()
	if err != nil {
		return ended(ctx, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	return ended(ctx, ServeDuplex(c, p))
}

// Duplex is a connection that carries bytes both ways.
type Duplex interface {
	io.ReadWriter
	// CloseWrite makes the other end read [io.EOF] after what was written.
	CloseWrite() error
}

// ServeDuplex is the end that serves Bulk or Echo on a connection, until its end.
func ServeDuplex(c Duplex, p Params) error {
	if p.Kind == Bulk {
		return swallow(c, p.Size)
	}
	return echo(c, p.Size)
}

// DriveDuplex is the end that drives and measures Bulk or Echo on a connection.
func DriveDuplex(c Duplex, p Params) (Result, error) {
	if p.Kind == Bulk {
		return pour(c, &p)
	}
	return exchange(c, &p)
}

// ended replaces the error of a connection that was closed because the time is over.
func ended(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return errEnded
	}
	return err
}

// swallow reads to the end and says how much it was.
func swallow(c Duplex, size int) error {
	b := make([]byte, size)
	total := uint64(0)
	for {
		n, err := c.Read(b)
		total += uint64(n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	_, err := c.Write(binary.BigEndian.AppendUint64(nil, total))
	return err
}

// frameLen is the length in front of a message.
const frameLen = 4

// echo sends messages back, as many at a time as have come.
func echo(c Duplex, size int) error {
	r, w := bufio.NewReaderSize(c, 1<<16), bufio.NewWriterSize(c, 1<<16)
	b := make([]byte, frameLen+size)
	for {
		if err := readFrame(r, b); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
		if r.Buffered() < len(b) {
			if err := w.Flush(); err != nil {
				return err
			}
		}
	}
}

// readFrame reads a message of the size that b has room for.
func readFrame(r *bufio.Reader, b []byte) error {
	if _, err := io.ReadFull(r, b[:frameLen]); err != nil {
		return err
	}
	if n := binary.BigEndian.Uint32(b); int(n) != len(b)-frameLen {
		return fmt.Errorf("floor: a message of %d bytes, want %d", n, len(b)-frameLen)
	}
	_, err := io.ReadFull(r, b[frameLen:])
	return err
}

// driveTCP connects and measures.
func driveTCP(ctx context.Context, p Params, to netip.AddrPort) (Result, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Places[1].addr(), 0))}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return Result{}, fmt.Errorf("floor: %w", err)
	}
	c := conn.(*net.TCPConn)
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	r, err := DriveDuplex(c, p)
	return r, ended(ctx, err)
}

// pour writes until the time is over, then waits until all has been read.
func pour(c Duplex, p *Params) (Result, error) {
	b := make([]byte, p.Size)
	for warm := 0; warm < 8<<20; warm += len(b) {
		if _, err := c.Write(b); err != nil {
			return Result{}, err
		}
	}
	// What of the warm-up is still under way when the clock starts is the socket's buffer
	// at most, and as much is under way when the last write returns; the clock stops
	// when that has been read too, so the figure errs low by a buffer of a whole run.
	begin, ops := time.Now(), uint64(0)
	for {
		if _, err := c.Write(b); err != nil {
			return Result{}, err
		}
		ops++
		if ops == uint64(p.Iters) || p.Iters <= 0 && time.Since(begin) >= p.Duration {
			break
		}
	}
	if err := c.CloseWrite(); err != nil {
		return Result{}, err
	}
	var total [8]byte
	if _, err := io.ReadFull(c, total[:]); err != nil {
		return Result{}, err
	}
	elapsed := time.Since(begin)
	if got := binary.BigEndian.Uint64(total[:]); got < ops*uint64(len(b)) {
		return Result{}, fmt.Errorf("floor: %d bytes arrived of %d", got, ops*uint64(len(b)))
	}
	return Result{Ops: ops, Elapsed: elapsed, Bytes: ops * uint64(len(b))}, nil
}

// exchange keeps a window of messages under way to the server and back.
func exchange(c Duplex, p *Params) (Result, error) {
	r, w := bufio.NewReaderSize(c, 1<<16), bufio.NewWriterSize(c, 1<<16)
	out, in := make([]byte, frameLen+p.Size), make([]byte, frameLen+p.Size)
	binary.BigEndian.PutUint32(out, uint32(p.Size))
	var samples Samples
	if p.window() == 1 {
		samples = newSamples(p)
	}
	var begin, last time.Time
	sent, got, base := uint64(0), uint64(0), uint64(0)
	warm := uint64(max(warmUp, 4*p.window()))
	for {
		for sent-got < uint64(p.window()) {
			if _, err := w.Write(out); err != nil {
				return Result{}, err
			}
			sent++
		}
		if err := w.Flush(); err != nil {
			return Result{}, err
		}
		for more := true; more; more = r.Buffered() >= len(in) {
			if err := readFrame(r, in); err != nil {
				return Result{}, err
			}
			got++
		}
		now := time.Now()
		if begin.IsZero() {
			if got >= warm {
				begin, last, base = now, now, got
			}
			continue
		}
		if p.window() == 1 {
			samples.Add(now.Sub(last))
		}
		last = now
		if p.Iters > 0 && got-base >= uint64(p.Iters) || p.Iters <= 0 && now.Sub(begin) >= p.Duration {
			break
		}
	}
	ops := got - base
	res := Result{Ops: ops, Elapsed: last.Sub(begin), Bytes: ops * uint64(p.Size)}
	samples.Into(&res)
	return res, nil
}
