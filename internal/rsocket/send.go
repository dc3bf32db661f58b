package rsocket

// Blocked says why nothing can be sent.
type Blocked uint8

const (
	// BlockedNot: something can be sent.
	BlockedNot Blocked = iota
	// BlockedPeer: the peer has to grant credits or a buffer; look again after Received.
	BlockedPeer
	// BlockedSelf: the send buffer or the send queue is full; look again after Sent.
	BlockedSelf
)

// enough is the room in the send ring that is worth a message, as in Linux, when more is
// to be sent.
const enough = 2048

// Send WQEs for control messages, and the peer's receives that we leave to them, as they
// take one each without a credit.
const (
	reserved = maxGrants + maxEnds
	spare    = 4
)

// sender is the state of what we send.
//
//	completed <= signaled <= posted                   WQEs, and bytes of the ring
type sender struct {
	// The peer's buffers: what is left of each entry of our target list. current is in use,
	// next is where the peer's next one belongs.
	targets       [entries]Buffer
	current, next int

	// Credits, modulo 2^16: seq counts DATA messages, limit is where to stop, taken is how
	// many of them the peer was done with when it set the limit.
	seq, limit, taken uint16
	keep              uint16 // credits to leave alone

	// WQEs and bytes, modulo 2^24 and 2^32.
	posted, completed uint32
	head, tail        uint32
	position          int // head's offset in the ring
	unsignaled        int // WQEs since the last signaled one
	silent            int // bytes of them
}

func (s *sender) start(peer *ConnData) {
	s.targets[0], s.next = peer.Data, 1
	s.limit = peer.Credits
	s.keep = min(spare, peer.Credits/4)
}

// Layout of Message.ID: bytes in the low half, WQEs above, flags on top.
const (
	idWQEShift        = 32
	wqeMask           = 1<<24 - 1
	idGrant    uint64 = 1 << 62
	idEnd      uint64 = 1 << 63
)

func (s *sender) id() uint64 { return uint64(s.posted&wqeMask)<<idWQEShift | uint64(s.head) }

// retired frees what a completed message and those before it held.
func (s *sender) retired(id uint64) {
	s.completed = uint32(id>>idWQEShift) & wqeMask
	s.tail = uint32(id)
}

// inUse returns how many WQEs are posted and not known to be done.
func (s *sender) inUse() int { return int((s.posted - s.completed) & wqeMask) }

// used returns the bytes of the ring that are.
func (s *sender) used() int { return int(s.head - s.tail) }

// credit takes the new limit of an SGL message.
func (s *sender) credit(value uint32, credits uint16) error {
	limit := uint16(value)
	taken := limit - credits
	if value > 2*0xFFFF || taken-s.taken > s.seq-s.taken {
		return violation("it grants credits up to %d, having seen %d of %d messages", value, s.taken, s.seq)
	}
	s.limit, s.taken = limit, taken
	return nil
}

// target takes the new entry of our target list. It may only replace one that is used up.
func (s *sender) target(mem []byte) error {
	t := &s.targets[s.next]
	if t.Length != 0 {
		return violation("it replaces a buffer of which %d bytes are left", t.Length)
	}
	b := entry(mem[entryLen*s.next:])
	if err := b.check(); err != nil {
		return err
	}
	*t = b
	s.next = (s.next + 1) % entries
	return nil
}

// Room returns how many of want bytes one message can carry now; 0 comes with the reason.
func (c *Conn) Room(want int) (int, Blocked) {
	s := &c.send
	left := int64(s.targets[s.current].Length)
	if left == 0 || s.limit-s.seq <= s.keep {
		return 0, BlockedPeer
	}
	free := c.cfg.SendBuffer - s.used()
	if s.inUse() >= c.cfg.SendDepth-reserved || free < min(want, enough) {
		return 0, BlockedSelf
	}
	return int(min(int64(want), int64(free), int64(c.cfg.MaxMessage), left)), BlockedNot
}

// Offset is where in the send ring the next message's bytes belong.
func (c *Conn) Offset() int { return c.send.position }

// Send makes a DATA message of the next n bytes of the send ring, at most what Room said.
func (c *Conn) Send(n int, m *Message) {
	s := &c.send
	t := &s.targets[s.current]
	if n <= 0 || int64(n) > int64(t.Length) || n > c.cfg.SendBuffer-s.used() || s.limit == s.seq {
		panic("BUG: rsocket: a message sent without room")
	}
	s.posted++
	s.head += uint32(n)
	s.unsignaled++
	s.silent += n
	*m = Message{Op: OpData, Imm: Imm(OpData, uint32(n)), Addr: t.Addr, RKey: t.RKey, Offset: s.position, Length: n, ID: s.id()}
	// Who waits for room has an eighth of buffer or queue under way at least, so that
	// something of it is signaled; and what there is comes free in pieces.
	if s.unsignaled >= c.cfg.SendDepth/8 || s.silent >= c.cfg.SendBuffer/8 {
		m.Signaled = true
		s.unsignaled, s.silent = 0, 0
	}
	if s.position += n; s.position >= c.cfg.SendBuffer {
		s.position -= c.cfg.SendBuffer
	}
	s.seq++
	t.Addr += uint64(n)
	t.Length -= uint32(n)
	if t.Length == 0 {
		s.current = (s.current + 1) % entries
	}
}

// Unacked returns how many messages are posted and not known to be done.
func (c *Conn) Unacked() int { return c.send.inUse() }
