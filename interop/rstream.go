package interop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
)

// RstreamPort is rstream's default service port.
const RstreamPort = 7471

// Rstream says what an "rstream -T v" with a test of its own does. Both ends must be told the
// same.
type Rstream struct {
	Size       int // bytes of a transfer (-S)
	Count      int // transfers in a row (-C)
	Iterations int // there and back (-I)
}

// rstreamSync is how many bytes each side sends before a test.
const rstreamSync = 16

// RstreamClient is "rstream -s ... -T v". Each direction carries one count, a byte a number,
// from the first byte of the connection to the last.
//
//	client                          server
//	16 bytes          ->
//	                  <-            16 bytes
//	Count * Size bytes ->                        Iterations times
//	                  <-            Count * Size bytes
func RstreamClient(ctx context.Context, s *transport.Stream, o Rstream) error {
	return rstream(ctx, s, o, true)
}

// RstreamServer is "rstream -T v" without -s, for one connection.
func RstreamServer(ctx context.Context, s *transport.Stream, o Rstream) error {
	return rstream(ctx, s, o, false)
}

func rstream(ctx context.Context, s *transport.Stream, o Rstream, first bool) error {
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Now()) })()
	r := &counter{conn: s, buf: make([]byte, max(o.Size, rstreamSync))}
	transfers := []struct{ size, count int }{{rstreamSync, 1}}
	for range o.Iterations {
		transfers = append(transfers, struct{ size, count int }{o.Size, o.Count})
	}
	for i, t := range transfers {
		for _, sending := range []bool{first, !first} {
			move := r.receive
			if sending {
				move = r.send
			}
			for k := range t.count {
				if err := move(t.size); err != nil {
					return fmt.Errorf("round %d, transfer %d of %d bytes: %w", i, k, t.size, err)
				}
			}
		}
	}
	// Who has sent last must not go before it has arrived; who has received last may.
	if err := s.CloseWrite(); err != nil {
		return err
	}
	n, err := s.Read(r.buf)
	switch {
	case n > 0:
		return fmt.Errorf("%d bytes behind the end", n)
	case errors.Is(err, io.EOF):
		return nil
	}
	return fmt.Errorf("waiting for the end: %w", err)
}

// counter sends and expects bytes that count, each direction for itself.
type counter struct {
	conn          net.Conn
	buf           []byte
	next, awaited byte
}

func (c *counter) send(n int) error {
	for i := range c.buf[:n] {
		c.buf[i] = c.next
		c.next++
	}
	_, err := c.conn.Write(c.buf[:n])
	return err
}

func (c *counter) receive(n int) error {
	if _, err := io.ReadFull(c.conn, c.buf[:n]); err != nil {
		return err
	}
	for i, b := range c.buf[:n] {
		if b != c.awaited {
			return fmt.Errorf("byte %d is %#02x, want %#02x", i, b, c.awaited)
		}
		c.awaited++
	}
	return nil
}
