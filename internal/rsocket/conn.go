package rsocket

import (
	"fmt"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Config describes this side: its queues and its memory, as the peer is to know it.
type Config struct {
	// SendBuffer is the length of the send ring in bytes: what was sent stays in it until its
	// completion. At least MinBuffer.
	SendBuffer int
	// SendDepth is the number of send WQEs: at least MinDepth.
	SendDepth int
	// Credits is how many DATA messages the peer may send ahead: MinDepth to 65534. More
	// receives than that must be posted, as control messages take receives, too.
	Credits int
	// MaxMessage bounds the bytes of a DATA message; 0 means half of SendBuffer.
	MaxMessage int
	// Ring is the receive ring: an even Length of at least MinBuffer.
	Ring Buffer
	// Target is where the target list is; its Length is not looked at.
	Target Buffer
	// TargetMem is the memory of the target list, TargetLen bytes. It is read by Received.
	TargetMem []byte
	// Offer is ConnData's.
	Offer uint8
}

// Bounds of Config.
const (
	MinBuffer  = 4096
	MinDepth   = 16
	MaxCredits = 65534
	MaxBuffer  = 1 << 29
)

func (c *Config) check() error {
	switch {
	case c.SendBuffer < MinBuffer || c.SendBuffer > MaxBuffer:
		return fmt.Errorf("send buffer of %d bytes, want %d to %d", c.SendBuffer, MinBuffer, MaxBuffer)
	case c.Ring.Length < MinBuffer || c.Ring.Length > MaxBuffer || c.Ring.Length%2 != 0:
		return fmt.Errorf("receive buffer of %d bytes, want an even number from %d to %d", c.Ring.Length, MinBuffer, MaxBuffer)
	case c.SendDepth < MinDepth:
		return fmt.Errorf("send queue of %d entries, want at least %d", c.SendDepth, MinDepth)
	case c.Credits < MinDepth || c.Credits > MaxCredits:
		return fmt.Errorf("%d credits, want %d to %d", c.Credits, MinDepth, MaxCredits)
	case len(c.TargetMem) != TargetLen:
		return fmt.Errorf("a target list of %d bytes, want %d", len(c.TargetMem), TargetLen)
	}
	return nil
}

// Conn is one end of a stream. Its methods must not be called concurrently. Make it with New.
type Conn struct {
	cfg    Config
	peer   ConnData
	broken error // the peer's violation, for ever

	send sender
	recv receiver
	ctrl control
}

// New makes an end that has not heard of its peer yet. Errors are the caller's configuration.
func New(cfg Config) (*Conn, error) {
	if cfg.MaxMessage == 0 {
		cfg.MaxMessage = cfg.SendBuffer / 2
	}
	cfg.MaxMessage = min(cfg.MaxMessage, MaxMessage)
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("rsocket: %w", err)
	}
	c := &Conn{cfg: cfg}
	c.recv.init(&cfg)
	return c, nil
}

// Hello returns the connection data to send.
func (c *Conn) Hello() ConnData {
	d := ConnData{Credits: uint16(c.cfg.Credits), Offer: c.cfg.Offer, Target: c.cfg.Target, Data: c.cfg.Ring}
	d.Target.Length = entries
	d.Data.Length = c.recv.half
	return d
}

// Start takes the peer's connection data, which must be valid (ParseConnData). From here on
// messages may be sent and received.
func (c *Conn) Start(peer ConnData) {
	c.peer = peer
	c.send.start(&peer)
	c.ctrl.slot = 1
}

// Peer returns what Start was told.
func (c *Conn) Peer() *ConnData { return &c.peer }

// Err returns the peer's violation, nil for none so far.
func (c *Conn) Err() error { return c.broken }

// Received takes note of a completed receive: the immediate data, and the length of the
// WRITE. An error wraps ErrProtocol and is repeated for ever.
func (c *Conn) Received(imm, length uint32) error {
	if c.broken == nil {
		c.broken = c.received(imm, length)
	}
	return c.broken
}

func (c *Conn) received(imm, length uint32) error {
	op, value := ParseImm(imm)
	if c.ctrl.peerGone {
		return violation("%v %#x after it had disconnected", op, value)
	}
	switch op {
	case OpData:
		if length != value {
			return violation("DATA says %d bytes and brings %d", value, length)
		}
		if c.ctrl.peerShut {
			return violation("%d bytes after it had shut down writing", value)
		}
		return c.recv.data(value)
	case OpSGL:
		return c.granted(value, length)
	case OpCtrl:
		if length != 0 {
			return violation("CTRL %#x with %d bytes", value, length)
		}
		return c.ctrl.received(value)
	case OpIOMapSGL:
		return violation("IOMAP_SGL for entry %d, of an I/O map that we don't have", value)
	}
	return violation("reserved operation %v, value %#x", op, value)
}

// granted handles SGL: credits, and with 16 bytes a buffer.
func (c *Conn) granted(value, length uint32) error {
	if err := c.send.credit(value, c.peer.Credits); err != nil {
		return err
	}
	switch length {
	case 0:
		return nil
	case entryLen:
		return c.send.target(c.cfg.TargetMem)
	}
	return violation("SGL with %d bytes, want 0 or %d", length, entryLen)
}

// Message is something to post: an RDMA WRITE, with immediate but for OpWrite, of Length
// bytes from Offset in the send ring, which may wrap around its end, or of Inline.
type Message struct {
	Op     Op
	Imm    uint32
	Addr   uint64
	RKey   uint32
	Offset int
	Length int
	// Inline is the payload of a control message. It is valid until the next call.
	Inline []byte
	// Signaled asks for a completion, to be told to Sent.
	Signaled bool
	// ID is what Sent wants back.
	ID uint64
}

// WR puts the message into a work request, all but what is to be gathered from the ring.
func (m *Message) WR(wr *verbs.SendWR) {
	wr.WRID, wr.ImmData, wr.RemoteAddr, wr.RKey = m.ID, m.Imm, m.Addr, m.RKey
	wr.Opcode, wr.Flags, wr.InlineData = verbs.RDMAWriteWithImm, 0, m.Inline
	if m.Op == OpWrite {
		wr.Opcode = verbs.RDMAWrite
	}
	if m.Signaled {
		wr.Flags = verbs.Signaled
	}
}

// Sent takes note of the completion of a signaled message: it, and all before it, are done.
func (c *Conn) Sent(id uint64) {
	c.send.retired(id)
	if id&idGrant != 0 {
		c.ctrl.grants--
	}
	if id&idEnd != 0 {
		c.ctrl.ends--
	}
}
