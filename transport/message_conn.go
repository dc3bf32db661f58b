package transport

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/pack"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Conn exchanges messages with a peer, whole, in order and once: what [Device.DialConn] and
// [ConnListener.Accept] return. All methods may be called by any number of goroutines.
//
// The receiver has buffers posted for as many messages as the sender may have under way, and
// tells it how many it has consumed: with each message of its own, or, when there are none,
// with an empty one for every half of its buffers. So a sender waits for its peer's program,
// and no message ever meets an empty receive queue. A connection that nobody uses costs
// memory and no goroutine.
//
// # Protocol
//
// Every message is a SEND with immediate (messageKind). A side that has posted B buffers posts
// three more: its peer may send two empty messages for each B that it gets, and one end of all.
type Conn struct {
	dev *Device
	pd  *PD // of its own: what its peer may do reaches nothing else
	qp  *QP
	cq  *CQ

	maxSend, maxRecv int // bytes of a message
	buffers          int // messages that the peer may have under way to us
	peerBuffers      int // messages that we may have under way to it
	threshold        int // unreported buffers that are worth a message of their own
	linger           time.Duration
	keepAlive        time.Duration // 0 for never
	compression      Compression   // of what we send
	enc              *pack.Encoder
	dec              *pack.Decoder // nil when the peer must not compress
	stage            pack.Staging

	recvMR   *MR
	recvSlot int
	recvSGL  []verbs.SGE // of each buffer

	// changes grows when something that a waiter may wait for has changed; then the bell of
	// the completion queue is rung.
	changes atomic.Uint32
	waiters sync.Pool // of *messageWaiter
	closed  atomic.Bool

	// Receiving: recvMu is held while completions are taken and messages handed out.
	recvMu  sync.Mutex
	wcs     [16]verbs.WC
	inbox   []arrival // a ring of buffers entries, from head on
	head    int
	waiting int         // messages in the inbox
	arrived uint32      // messages since the beginning
	ended   atomic.Bool // the peer's end of all has arrived
	spare   *Buffer     // received buffers that the program gave back

	failure atomic.Pointer[error] // why nothing works any more; set once, under recvMu

	// Counts of messages since the beginning, which wrap. consumed: those whose receive is
	// posted again; reported: what the peer was told of it. sent: ours; credited: what the peer
	// told us of it. We may be peerBuffers ahead of it.
	consumed, reported, sent, credited atomic.Uint32
	// retired is how many entries of the send queue have completed.
	retired atomic.Uint32

	// Sending: sendMu is held while messages are posted. With recvMu at the same time never.
	sendMu   sync.Mutex
	sendMR   *MR // made by the first message that is not small
	sendSlot int
	sendBufs []Buffer
	free     []int32 // of sendBufs
	ring     []int32 // for each entry of the send queue its buffer, -1 for none
	posted   uint32  // entries of the send queue since the beginning; it wraps
	reaped   uint32  // of them, those whose buffers are free again
	silent   int     // entries since the last that will complete
	sge      [1]verbs.SGE
	alive    *time.Timer // runs ask; nil without keepalives
}

// arrival is a message that waits in a receive buffer.
type arrival struct {
	slot   int32
	size   int32 // bytes in the buffer
	length int32 // bytes of the message
	packed bool
}

const (
	// controlSlots are receives beyond those for messages, controlSends room in the send queue:
	// what an end and unreported credits need.
	controlSlots = 3
	controlSends = 8
	// inlineMessage is up to how many bytes a message is copied into the send queue itself.
	inlineMessage = 256
)

// Errors of connections for messages.
var (
	// ErrMessageTooLong: the message is longer than the peer, or this side, takes; nothing was
	// sent. It is syscall.EMSGSIZE.
	ErrMessageTooLong error = tooLongError{}
	// ErrMessageProtocol: the peer broke the rules of the connection, which has ended.
	ErrMessageProtocol = errors.New("transport: the peer broke the message protocol")
)

type tooLongError struct{}

func (tooLongError) Error() string        { return "transport: message too long" }
func (tooLongError) Is(target error) bool { return target == syscall.EMSGSIZE }

// MaxMessage returns the longest message that Send takes, in bytes.
func (c *Conn) MaxMessage() int { return c.maxSend }

// Compression returns what this side's messages are compressed with.
func (c *Conn) Compression() Compression { return c.compression }

// LocalAddr returns our address on the path to the peer and our UDP port.
func (c *Conn) LocalAddr() netip.AddrPort { return c.qp.LocalAddr() }

// RemoteAddr returns the peer's address and UDP port.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.qp.RemoteAddr() }

// messageWaiter is one goroutine's wait. Its predicate is made once, so a wait allocates
// nothing.
type messageWaiter struct {
	c     *Conn
	seen  uint32
	ready func(*CQ) bool
}

func (c *Conn) waiter() *messageWaiter {
	if w, ok := c.waiters.Get().(*messageWaiter); ok {
		return w
	}
	w := &messageWaiter{c: c}
	w.ready = func(cq *CQ) bool { return c.changes.Load() != w.seen || !cq.empty() }
	return w
}

// lock waits until cond says true, and returns with mu, under which cond is called, held; or
// with cond's error, or ctx's, and not. Completions are what changes cond, and calls of
// changed; it takes completions itself, so whoever waits works for all.
func (c *Conn) lock(ctx context.Context, mu *sync.Mutex, cond func(*Conn) (bool, error)) error {
	mu.Lock()
	ok, err := cond(c)
	if ok {
		return nil
	}
	mu.Unlock()
	if err != nil {
		return err
	}
	w := c.waiter()
	defer c.waiters.Put(w)
	for {
		c.poll()
		w.seen = c.changes.Load() // what changes from here on makes ready true
		mu.Lock()
		ok, err := cond(c)
		if ok {
			return nil
		}
		mu.Unlock()
		if err == nil {
			err = c.cq.await(ctx, &c.cq.bell, w.ready)
		}
		if err != nil {
			return err
		}
	}
}

// changed tells waiters to look again.
func (c *Conn) changed() {
	c.changes.Add(1)
	c.cq.stir()
}

// poll takes the completions that are there, and reports what is to be reported.
func (c *Conn) poll() {
	if !c.cq.empty() {
		c.recvMu.Lock()
		c.take()
		c.recvMu.Unlock()
	}
	c.report()
}

// take takes completions. The caller holds recvMu.
func (c *Conn) take() {
	news := false
	for {
		n := c.cq.take(c.wcs[:])
		for i := range c.wcs[:n] {
			news = c.completed(&c.wcs[i]) || news
		}
		if n < len(c.wcs) {
			break
		}
	}
	if news {
		c.changed()
	}
}

// completed works in one completion and reports whether anybody may want to know.
func (c *Conn) completed(wc *verbs.WC) bool {
	switch {
	case wc.Status == verbs.WRFlushErr:
		return c.fail(ErrDisconnected)
	case wc.Status != verbs.WCSuccess:
		return c.fail(fmt.Errorf("%w: %w", ErrDisconnected, wc.Status))
	case !wc.Opcode.IsRecv():
		c.retired.Store(uint32(wc.WRID) + 1)
		return true
	}
	if err := c.received(wc); err != nil {
		c.broken(err)
	}
	return true
}

// received works in a message of the peer.
func (c *Conn) received(wc *verbs.WC) error {
	consumed, kind, ok := parseMessageImm(wc.ImmData)
	switch {
	case !ok || wc.Flags&verbs.WithImm == 0:
		return errors.New("a message of no known kind")
	case c.ended.Load():
		return errors.New("a message after the end")
	case kind >= kindCredit && wc.ByteLen != 0:
		return errors.New("a payload where none belongs")
	}
	// consumed is modulo 65536, and what is under way is far less.
	old := c.credited.Load()
	credited := old + uint32(consumed-uint16(old))
	if int32(c.sent.Load()-credited) < 0 {
		return errors.New("it consumed more than was sent")
	}
	if kind >= kindCredit {
		// First: with these credits a sender of ours may move the peer to its next empty message.
		c.repost(int32(wc.WRID))
		c.credited.Store(credited)
		c.ended.Store(kind == kindEnd)
		return nil
	}
	c.credited.Store(credited)
	if c.arrived++; int32(c.arrived-c.reported.Load()) > int32(c.buffers) {
		return errors.New("it sent more than its credits allow")
	}
	a := arrival{slot: int32(wc.WRID), size: int32(wc.ByteLen), length: int32(wc.ByteLen), packed: kind == kindPacked}
	if a.packed {
		if c.dec == nil {
			return errors.New("a compressed message, which was not agreed on")
		}
		n, err := c.dec.Len(c.payload(a))
		if err != nil {
			return err
		}
		a.length = int32(n)
	}
	c.inbox[(c.head+c.waiting)%len(c.inbox)] = a
	c.waiting++
	return nil
}

// payload returns what has arrived, in its receive buffer.
func (c *Conn) payload(a arrival) []byte {
	off := int(a.slot) * c.recvSlot
	return c.recvMR.Bytes()[off:][:a.size:a.size]
}

// repost posts the receive of a buffer again. What may go wrong means that the queue pair is
// gone, which others will say. The caller holds recvMu: the wire takes receives in their order,
// so one that is posted is of no use while the one before it is still being posted.
func (c *Conn) repost(slot int32) {
	_ = c.qp.PostRecv(verbs.RecvWR{WRID: uint64(slot), SGList: c.recvSGL[slot : slot+1]})
}

// fail ends the connection for a reason; only the first counts. The caller holds recvMu.
func (c *Conn) fail(err error) bool {
	return c.failure.CompareAndSwap(nil, &err)
}

// broken ends the connection because of what the peer sent, and lets it know. The caller
// holds recvMu.
func (c *Conn) broken(err error) {
	if c.fail(fmt.Errorf("%w: %w", ErrMessageProtocol, err)) {
		// It fails when the connection is gone, which is what was wanted.
		p := c.qp.port
		_ = p.do(func() error { return p.wire.Disconnect(c.dev.now(), c.qp.conn, nil) })
	}
}

// err returns why the connection is of no more use, nil while it is.
func (c *Conn) err() error {
	if c.closed.Load() || c.cq.closed.Load() {
		return ErrClosed
	}
	if e := c.failure.Load(); e != nil {
		return *e
	}
	return nil
}

// Close tells the peer that nothing follows, waits for what was sent to reach it, at most
// MessageConfig.Linger, and ends the connection. All calls on it return ErrClosed. Messages
// that have arrived and were not received are lost. Closing twice is ErrClosed.
//
// The peer's program receives everything, then io.EOF.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return ErrClosed
	}
	c.changed()
	c.stopAsking()
	if c.linger > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), c.linger)
		c.flush(ctx)
		cancel()
	}
	err := c.qp.Close()
	c.changed()
	c.unregister()
	return err
}

// flush sends the end and waits until the peer has everything.
func (c *Conn) flush(ctx context.Context) {
	said := false
	err := c.lock(ctx, &c.sendMu, func(c *Conn) (bool, error) {
		if c.failure.Load() != nil || c.ended.Load() {
			return true, nil // nobody is there to wait for
		}
		if !said {
			said = c.control(kindEnd)
		}
		return said && c.retired.Load() == c.posted, nil
	})
	if err == nil { // whatever else stopped it, the connection ends now
		c.sendMu.Unlock()
	}
}

// unregister gives the memory up.
func (c *Conn) unregister() {
	_ = c.recvMR.Close() // no window is bound to it
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.sendMR != nil {
		_ = c.sendMR.Close()
	}
}
