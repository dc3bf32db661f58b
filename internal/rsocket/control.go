package rsocket

// control is the state of grants and endings.
type control struct {
	slot   uint32 // the entry of the peer's target list that our next buffer belongs into
	grants int    // grants and keepalives under way: at most maxGrants
	ends   int    // endings under way: at most maxEnds

	writeShut, readShut bool // what the program wants
	saidShut, saidGone  bool // what the peer was told
	peerShut, peerGone  bool // what the peer has told

	inline [entryLen]byte
}

// maxGrants bounds the grants under way, so that an ending always finds a free WQE: who has
// closed will not come again to send it.
const (
	maxGrants = 6
	maxEnds   = 2
)

func (c *control) received(value uint32) error {
	switch value {
	case CtrlDisconnect:
		c.peerGone = true
	case CtrlShutdown:
		c.peerShut = true
	case CtrlKeepalive:
	default:
		return violation("CTRL %#x", value)
	}
	return nil
}

// CloseWrite ends our half of the stream, after all that was sent.
func (c *Conn) CloseWrite() { c.ctrl.writeShut = true }

// CloseRead ends the peer's half for us. Discard should follow, once nobody looks at the ring.
func (c *Conn) CloseRead() { c.ctrl.readShut = true }

// Discard drops what waits to be read, and what still comes, so that the peer may go on.
func (c *Conn) Discard() {
	c.recv.discard = true
	c.recv.consume(c.recv.avail)
}

// Close ends both halves.
func (c *Conn) Close() { c.ctrl.readShut, c.ctrl.writeShut = true, true }

// WriteClosed reports whether the program has closed its half.
func (c *Conn) WriteClosed() bool { return c.ctrl.writeShut }

// ReadClosed reports whether the program reads no more.
func (c *Conn) ReadClosed() bool { return c.ctrl.readShut }

// PeerGone reports whether the peer has disconnected: nothing that we send would be read.
func (c *Conn) PeerGone() bool { return c.ctrl.peerGone }

// Ended reports whether nothing is left to be done for an orderly end: the endings that the
// program wants are with the peer, or the peer has gone.
func (c *Conn) Ended() bool {
	return c.ctrl.peerGone || c.broken != nil || c.ctrl.ends == 0 && c.ending() == noEnding
}

const noEnding = ^uint32(0)

// ending returns the CTRL value that is due.
func (c *Conn) ending() uint32 {
	t := &c.ctrl
	switch {
	case t.peerGone || t.saidGone || !t.writeShut:
		return noEnding
	case t.peerShut && t.saidShut:
		return noEnding // two shutdowns are a disconnect
	case t.readShut:
		return CtrlDisconnect
	case !t.saidShut:
		return CtrlShutdown
	}
	return noEnding
}

// NextControl makes the next control message that is due; false when there is none.
func (c *Conn) NextControl(m *Message) bool {
	t, r := &c.ctrl, &c.recv
	if c.broken != nil || t.peerGone || t.saidGone {
		return false
	}
	if v := c.ending(); v != noEnding {
		c.control(m, idEnd, Imm(OpCtrl, v))
		t.ends++
		t.saidShut = t.saidShut || v == CtrlShutdown
		t.saidGone = v == CtrlDisconnect
		return true
	}
	if t.grants >= maxGrants || !c.grantDue() {
		return false
	}
	if r.free >= r.half {
		// The half that was granted longest ago, which has been read.
		next := Buffer{Addr: c.cfg.Ring.Addr + uint64(r.next*r.half), RKey: c.cfg.Ring.RKey, Length: r.half}
		r.granted += r.half
		r.free -= r.half
		r.next ^= 1
		c.control(m, idGrant, c.credits())
		m.Addr, m.RKey = c.peer.Target.Addr+uint64(t.slot)*entryLen, c.peer.Target.RKey
		putEntry(t.inline[:], next, c.peer.BigEndian)
		m.Inline = t.inline[:]
		m.Length = entryLen
		if t.slot++; t.slot == c.peer.Target.Length {
			t.slot = 0
		}
	} else {
		c.control(m, idGrant, c.credits())
	}
	t.grants++
	r.told = r.seq
	return true
}

// grantDue reports whether the peer should hear of what was read.
func (c *Conn) grantDue() bool {
	r := &c.recv
	return !c.ctrl.peerShut && (r.free >= r.half || int(r.seq-r.told) >= r.credits/2)
}

// GrantWaits reports whether a grant is due that NextControl cannot make before one that is
// under way has completed: look again after Sent.
func (c *Conn) GrantWaits() bool {
	t := &c.ctrl
	return t.grants >= maxGrants && c.broken == nil && !t.peerGone && !t.saidGone && c.grantDue()
}

// credits is the immediate that grants credits.
func (c *Conn) credits() uint32 { return Imm(OpSGL, uint32(c.recv.seq)+uint32(c.recv.credits)) }

// control makes a signaled message without payload.
func (c *Conn) control(m *Message, kind uint64, imm uint32) {
	s := &c.send
	s.posted++
	s.unsignaled, s.silent = 0, 0 // what was posted before is done when this is
	op, _ := ParseImm(imm)
	*m = Message{Op: op, Imm: imm, Signaled: true, ID: s.id() | kind}
}

// Keepalive makes a message that the peer's program does not see, to find out whether the
// peer is there, as Linux does: a WRITE of nothing, without immediate. It is false when
// something is under way whose completion will tell.
func (c *Conn) Keepalive(m *Message) bool {
	t := &c.ctrl
	if c.broken != nil || t.peerGone || t.saidGone || c.send.inUse() > c.send.unsignaled {
		return false
	}
	t.grants++
	c.control(m, idGrant, Imm(OpCtrl, CtrlKeepalive))
	m.Op, m.Imm = OpWrite, 0
	return true
}
