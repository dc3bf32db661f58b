package transport

import (
	"context"
	"io"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/pack"
)

// Recv receives a message, in memory of its own.
//
// Errors: io.EOF when the peer has closed and everything it sent was received; ErrDisconnected
// when it is gone without that; ErrClosed after Close; ctx.Err() when ctx ends first. What has
// arrived is received before any error but ErrClosed is reported.
//
// A peer whose machine falls silent is noticed by keepalives (MessageConfig.KeepAlive).
func (c *Conn) Recv(ctx context.Context) ([]byte, error) {
	a, err := c.next(ctx)
	if err != nil {
		return nil, err
	}
	p := make([]byte, a.length)
	if err := c.unload(p, a); err != nil {
		return nil, err
	}
	return p, nil
}

// RecvInto receives a message into p and returns its length. It allocates nothing. A message
// that is longer than p stays, for the next call: n is its length then, and the error
// io.ErrShortBuffer. Other errors are those of Recv.
func (c *Conn) RecvInto(ctx context.Context, p []byte) (n int, err error) {
	if err := c.lock(ctx, &c.recvMu, (*Conn).mayRecv); err != nil {
		return 0, err
	}
	if n = int(c.inbox[c.head].length); n > len(p) {
		c.recvMu.Unlock()
		return n, io.ErrShortBuffer
	}
	a := c.pop()
	c.recvMu.Unlock()
	return n, c.unload(p[:n], a)
}

// RecvBuffer receives a message where it has arrived, without a copy unless it came
// compressed. The peer may send another in its place after Release, and waits for it when
// all buffers are held. Errors are those of Recv.
func (c *Conn) RecvBuffer(ctx context.Context) (*Buffer, error) {
	a, err := c.next(ctx)
	if err != nil {
		return nil, err
	}
	var staged *pack.Buffer
	if a.packed {
		staged = c.stage.Get(int(a.length))
		if err := c.unload(staged.B[:a.length], a); err != nil {
			c.stage.Put(staged)
			return nil, err
		}
	}
	c.recvMu.Lock()
	b := c.spare
	if b != nil {
		c.spare = b.next
	}
	c.recvMu.Unlock()
	if b == nil {
		b = &Buffer{c: c}
	}
	if b.staged = staged; staged != nil {
		b.b = staged.B[:a.length]
	} else {
		b.slot, b.b = a.slot, c.payload(a)
	}
	b.held.Store(true)
	return b, nil
}

// next takes the oldest message, which is then the caller's to unload.
func (c *Conn) next(ctx context.Context) (a arrival, err error) {
	if err := c.lock(ctx, &c.recvMu, (*Conn).mayRecv); err != nil {
		return a, err
	}
	a = c.pop()
	c.recvMu.Unlock()
	return a, nil
}

// mayRecv reports whether a message waits, or why none will. The caller holds recvMu.
func (c *Conn) mayRecv() (bool, error) {
	if c.closed.Load() {
		return false, ErrClosed
	}
	if c.waiting == 0 && !c.cq.empty() {
		c.take()
	}
	switch {
	case c.waiting > 0:
		return true, nil
	case c.ended.Load():
		return false, io.EOF
	}
	return false, c.err()
}

// pop takes the oldest message out of the inbox. The caller holds recvMu.
func (c *Conn) pop() arrival {
	a := c.inbox[c.head]
	if c.head++; c.head == len(c.inbox) {
		c.head = 0
	}
	c.waiting--
	return a
}

// unload moves a message into p, which is as long, and gives its buffer to the peer.
func (c *Conn) unload(p []byte, a arrival) error {
	if !a.packed {
		copy(p, c.payload(a))
	} else if err := c.dec.Unpack(p, c.payload(a)); err != nil {
		c.recvMu.Lock()
		c.broken(err)
		c.recvMu.Unlock()
		c.changed()
		return c.err()
	}
	c.recvMu.Lock()
	c.giveBack(a.slot)
	c.recvMu.Unlock()
	c.report()
	return nil
}

// giveBack posts a buffer's receive again; then report lets the peer know in time. The caller
// holds recvMu.
func (c *Conn) giveBack(slot int32) {
	c.repost(slot)
	c.consumed.Add(1)
}

// Buffer is a piece of a connection's registered memory in the program's hands: to make a
// message in ([Conn.Alloc]), or with one that has arrived ([Conn.RecvBuffer]). One goroutine
// at a time; after SendBuffer or Release it is somebody else's and must not be touched.
type Buffer struct {
	c      *Conn
	b      []byte
	staged *pack.Buffer // where a compressed message was unpacked; nil for none
	next   *Buffer      // a spare one's neighbour
	slot   int32        // of the receive or send buffers
	sends  bool         // from Alloc
	held   atomic.Bool  // by the program
}

// Bytes returns the message, to read or to write.
func (b *Buffer) Bytes() []byte { return b.b }

// Resize makes the message n bytes long. It panics when that is more than the connection
// takes, or than has arrived, as slicing would.
func (b *Buffer) Resize(n int) { b.b = b.b[:n] }

// Release gives the buffer back: what arrived in it has been consumed, what was to be sent is
// not.
func (b *Buffer) Release() {
	c := b.c
	if !b.held.Swap(false) {
		return
	}
	if b.sends {
		c.sendMu.Lock()
		c.freeBuffer(b)
		c.sendMu.Unlock()
		return
	}
	staged, slot := b.staged, b.slot
	b.b, b.staged = nil, nil
	c.recvMu.Lock()
	b.next, c.spare = c.spare, b
	if staged == nil {
		c.giveBack(slot)
	}
	c.recvMu.Unlock()
	if staged != nil {
		c.stage.Put(staged)
		return
	}
	c.report()
}
