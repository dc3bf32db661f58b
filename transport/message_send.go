package transport

import (
	"context"
	"fmt"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Send sends a message, a copy of p. It returns as soon as the message is on its way, and
// waits before that while the peer's buffers, or those of this side, are full. It allocates
// nothing.
//
// Errors: ErrMessageTooLong, with nothing sent; ctx.Err() when ctx ends first, with nothing
// sent; ErrClosed after Close; ErrDisconnected when the peer is gone or has closed, which a
// message that was sent before may not have survived.
func (c *Conn) Send(ctx context.Context, p []byte) error {
	if len(p) > c.maxSend {
		return c.tooLong(len(p))
	}
	if c.enc == nil {
		return c.send(ctx, p, kindData)
	}
	staged := c.stage.Get(0)
	defer c.stage.Put(staged)
	var packed bool
	if staged.B, packed = c.enc.Pack(staged.B, p); packed {
		return c.send(ctx, staged.B, kindPacked)
	}
	return c.send(ctx, p, kindData)
}

func (c *Conn) tooLong(n int) error {
	return fmt.Errorf("%w: %d bytes, this connection takes at most %d", ErrMessageTooLong, n, c.maxSend)
}

// send posts a copy of p.
func (c *Conn) send(ctx context.Context, p []byte, k messageKind) error {
	if len(p) <= inlineMessage {
		if err := c.lock(ctx, &c.sendMu, (*Conn).mayPost); err != nil {
			return err
		}
		defer c.sendMu.Unlock()
		return c.post(&verbs.SendWR{InlineData: p}, k, -1)
	}
	if err := c.lock(ctx, &c.sendMu, (*Conn).mayPostBuffer); err != nil {
		return err
	}
	defer c.sendMu.Unlock()
	b := c.takeBuffer(len(p))
	copy(b.b, p)
	return c.postBuffer(b, k)
}

// Alloc returns a buffer of n bytes to make a message in, for SendBuffer: so a message that
// is not small is copied nowhere. Its bytes are anything. It waits while all of this side's
// buffers are under way or in the program's hands, and returns Send's errors.
func (c *Conn) Alloc(ctx context.Context, n int) (*Buffer, error) {
	if n > c.maxSend {
		return nil, c.tooLong(n)
	}
	if err := c.lock(ctx, &c.sendMu, (*Conn).mayAlloc); err != nil {
		return nil, err
	}
	defer c.sendMu.Unlock()
	return c.takeBuffer(n), nil
}

// SendBuffer sends a message that was made in a buffer of Alloc. When it returns nil the
// buffer is the connection's again; after an error, one of Send's, it is still the program's.
func (c *Conn) SendBuffer(ctx context.Context, b *Buffer) error {
	if b.c != c || !b.sends || !b.held.Load() {
		return fmt.Errorf("transport: SendBuffer: %w: the buffer is not one of this connection's Alloc", verbs.ErrBadWR)
	}
	k, p := kindData, b.b
	if c.enc != nil {
		staged := c.stage.Get(0)
		defer c.stage.Put(staged)
		var packed bool
		if staged.B, packed = c.enc.Pack(staged.B, p); packed {
			k, p = kindPacked, staged.B
		}
	}
	if err := c.lock(ctx, &c.sendMu, (*Conn).mayPost); err != nil {
		return err
	}
	defer c.sendMu.Unlock()
	if len(p) <= inlineMessage {
		err := c.post(&verbs.SendWR{InlineData: p}, k, -1)
		if err == nil {
			c.freeBuffer(b)
		}
		return err
	}
	if k == kindPacked {
		b.b = b.b[:copy(b.b, p)] // a packed message is the shorter one
	}
	return c.postBuffer(b, k)
}

// sendErr returns why nothing more can be sent, nil while it can.
func (c *Conn) sendErr() error {
	if err := c.err(); err != nil {
		return err
	}
	if c.ended.Load() {
		return ErrDisconnected
	}
	return nil
}

// mayPost reports whether a message may be posted that needs no buffer, mayPostBuffer one
// that does, mayAlloc whether a buffer is free; an error says that it will never be. The
// caller holds sendMu.
func (c *Conn) mayPost() (bool, error) {
	if err := c.sendErr(); err != nil {
		return false, err
	}
	if c.sent.Load()-c.credited.Load() >= uint32(c.peerBuffers) {
		return false, nil
	}
	room := uint32(len(c.ring) - controlSends)
	if c.posted-c.reaped >= room {
		c.reap()
	}
	return c.posted-c.reaped < room, nil
}

func (c *Conn) mayPostBuffer() (bool, error) {
	if ok, err := c.mayPost(); !ok {
		return false, err
	}
	return c.mayAlloc()
}

func (c *Conn) mayAlloc() (bool, error) {
	if err := c.sendErr(); err != nil {
		return false, err
	}
	if c.sendBufs == nil {
		if err := c.makeBuffers(); err != nil {
			return false, err
		}
	}
	if len(c.free) == 0 {
		c.reap()
	}
	return len(c.free) > 0, nil
}

// freeBuffer takes a buffer back that nothing on its way uses. The caller holds sendMu.
func (c *Conn) freeBuffer(b *Buffer) {
	b.held.Store(false)
	c.free = append(c.free, b.slot)
	c.changed()
}

// makeBuffers makes the buffers to send from.
func (c *Conn) makeBuffers() error {
	c.sendSlot = slotLen(c.maxSend)
	mr, err := c.pd.RegisterMR(make([]byte, c.buffers*c.sendSlot), 0)
	if err != nil {
		return err
	}
	c.sendMR = mr
	c.sendBufs = make([]Buffer, c.buffers)
	c.free = make([]int32, c.buffers)
	for i := range c.sendBufs {
		c.sendBufs[i] = Buffer{c: c, sends: true, slot: int32(i)}
		c.free[i] = int32(i)
	}
	return nil
}

// reap frees the buffers of what has completed. The caller holds sendMu.
func (c *Conn) reap() {
	for end := c.retired.Load(); c.reaped != end; c.reaped++ {
		if i := c.ring[c.reaped%uint32(len(c.ring))]; i >= 0 {
			c.free = append(c.free, i)
		}
	}
}

// takeBuffer takes a free buffer, for n bytes. The caller holds sendMu and has asked mayAlloc.
func (c *Conn) takeBuffer(n int) *Buffer {
	i := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	b := &c.sendBufs[i]
	b.b = c.sendMR.Bytes()[int(i)*c.sendSlot:][:n:c.maxSend]
	b.held.Store(true)
	return b
}

// postBuffer posts the message in a buffer. The caller holds sendMu.
func (c *Conn) postBuffer(b *Buffer, k messageKind) error {
	c.sge[0] = c.sendMR.SGE(int(b.slot)*c.sendSlot, len(b.b))
	b.held.Store(false)
	return c.post(&verbs.SendWR{SGList: c.sge[:], Flags: verbs.Signaled}, k, b.slot)
}

// post posts a message of the protocol whose buffer, if it has one, is free again when it
// completes or could not be posted. The caller holds sendMu and has seen room.
func (c *Conn) post(wr *verbs.SendWR, k messageKind, slot int32) error {
	consumed := c.consumed.Load()
	wr.Opcode, wr.ImmData = verbs.SendWithImm, messageImm(consumed, k)
	// Before it leaves: the peer's answer may be here before PostSend returns.
	c.reported.Store(consumed)
	if k <= kindPacked {
		c.sent.Add(1)
	}
	return c.enqueue(wr, slot)
}

// enqueue posts a request that takes an entry of the send queue. The caller is post's.
func (c *Conn) enqueue(wr *verbs.SendWR, slot int32) error {
	wr.WRID = uint64(c.posted)
	// A completion now and then frees the entries of the silent ones before it.
	if c.silent++; c.silent >= len(c.ring)/4 {
		wr.Flags |= verbs.Signaled
	}
	if wr.Flags&verbs.Signaled != 0 {
		c.silent = 0
	}
	if err := c.qp.PostSend(*wr); err != nil {
		if slot >= 0 {
			c.free = append(c.free, slot)
		}
		if e := c.sendErr(); e != nil {
			return e
		}
		return err
	}
	c.ring[c.posted%uint32(len(c.ring))] = slot
	c.posted++
	return nil
}

// control posts a message without payload, false when there is no room for it now. The
// caller holds sendMu.
func (c *Conn) control(k messageKind) bool {
	if c.reap(); c.posted-c.reaped >= uint32(len(c.ring)) {
		return false
	}
	var wr verbs.SendWR
	if k == kindEnd {
		wr.Flags = verbs.Signaled
	}
	// It fails when the queue pair is gone, and then nobody misses it.
	_ = c.post(&wr, k, -1)
	return true
}

// report tells the peer how many messages were consumed, if it may be waiting for that and
// no message of ours has said so.
func (c *Conn) report() {
	if int(c.consumed.Load()-c.reported.Load()) < c.threshold {
		return
	}
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if int(c.consumed.Load()-c.reported.Load()) >= c.threshold && c.sendErr() == nil {
		c.control(kindCredit)
	}
}
