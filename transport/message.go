package transport

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/pack"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// MessageConfig says how two programs exchange messages. The zero value is what
// [Device.DialConn] and [Device.ListenConn] use.
type MessageConfig struct {
	// MaxMessage is the longest message in bytes, to send and to receive: 0 means 64 KiB, at
	// most 1 GiB. A connection uses the smaller of both sides' values in each direction.
	MaxMessage int
	// Buffers is how many messages may wait on this side before the peer has to, and how many
	// longer than a few hundred bytes may be under way to it: 0 means 32, at most 4096.
	// A connection registers (Buffers+3)·MaxMessage bytes for receiving, and when it first
	// sends a message that is not small Buffers·MaxMessage for sending.
	Buffers int
	// Compression is what this side sends with, if the peer's is not CompressNone either.
	// A side that sets it takes either method from its peer.
	Compression Compression
	// RemotePort is the peer's UDP port (Dial); 0 means 4791.
	RemotePort uint16
	// KeepAlive is how often the peer's device is asked whether it is there, when nothing else
	// is under way to it: 0 means every 15 s, negative never. One that does not answer is found
	// out within KeepAlive and (RetryCnt+1)·AckTimeout.
	KeepAlive time.Duration
	// RetryCnt and AckTimeout say when a peer is gone, as in ConnParam.
	RetryCnt   int
	AckTimeout time.Duration
	// Linger is how long Close waits for what was sent to reach the peer: 0 means 5 s,
	// negative not at all.
	Linger time.Duration
}

// Bounds of what can be configured, and so of what a peer may offer.
const (
	maxMaxMessage     = 1 << 30
	maxMessageBuffers = 4096
)

func (c *MessageConfig) maxMessage() int {
	if c.MaxMessage == 0 {
		return 1 << 16
	}
	return c.MaxMessage
}

func (c *MessageConfig) buffers() int {
	if c.Buffers == 0 {
		return 32
	}
	return c.Buffers
}

func (c *MessageConfig) linger() time.Duration {
	if c.Linger == 0 {
		return 5 * time.Second
	}
	return max(c.Linger, 0)
}

func (c *MessageConfig) keepAlive() time.Duration {
	if c.KeepAlive == 0 {
		return 15 * time.Second
	}
	return max(c.KeepAlive, 0)
}

func (c *MessageConfig) check() error {
	n, m := c.buffers(), c.maxMessage()
	switch {
	case n < 1 || n > maxMessageBuffers:
		return fmt.Errorf("transport: Buffers is %d, want 1 to %d", n, maxMessageBuffers)
	case m < 1 || m > maxMaxMessage:
		return fmt.Errorf("transport: MaxMessage is %d, want 1 to %d", m, maxMaxMessage)
	case int64(n+controlSlots)*int64(slotLen(m)) > 1<<31-1: // a region's length must fit in 32 bits
		return fmt.Errorf("transport: %d buffers of %d bytes are more than 2 GiB", n+controlSlots, m)
	}
	return c.Compression.check()
}

func (c *MessageConfig) hello() *messageHello {
	return &messageHello{accepts: c.Compression.accepts(), buffers: c.buffers(), maxMessage: c.maxMessage()}
}

// param returns the connection's parameters, ready for either side.
func (c *MessageConfig) param(conn *Conn) ConnParam {
	return ConnParam{
		PrivateData: c.hello().marshal(), PD: conn.pd,
		Recv:       conn.receives(),
		RemotePort: c.RemotePort, RetryCnt: c.RetryCnt, AckTimeout: c.AckTimeout,
		Cap: verbs.QPCap{
			MaxSendWR: c.buffers() + controlSends, MaxRecvWR: c.buffers() + controlSlots,
			MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: inlineMessage,
		},
		// Nothing of ours is read or written from outside: keepalives are WRITEs without bytes,
		// and no memory in the connection's domain is open to more.
		ResponderResources: -1, InitiatorDepth: -1, Access: verbs.RemoteWrite,
	}
}

// DialConn connects to a [ConnListener] at a service port of a host, with the defaults of
// [MessageConfig]. Errors are those of [Device.Dial], and ErrNotMessages when something else
// listens there.
func (d *Device) DialConn(ctx context.Context, to netip.AddrPort) (*Conn, error) {
	return MessageConfig{}.Dial(ctx, d, to)
}

// ListenConn takes connections for messages at a service port, with the defaults of
// [MessageConfig]; addr is as for [Device.Listen].
func (d *Device) ListenConn(addr netip.AddrPort) (*ConnListener, error) {
	return MessageConfig{}.Listen(d, addr)
}

// Dial connects as [Device.DialConn] does, with this configuration.
func (c MessageConfig) Dial(ctx context.Context, d *Device, to netip.AddrPort) (*Conn, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	conn, err := newConn(d, &c)
	if err != nil {
		return nil, err
	}
	qp, err := d.Dial(ctx, to, c.param(conn))
	if err != nil {
		conn.unregister()
		return nil, err
	}
	var peer messageHello
	if err := peer.unmarshal(qp.PrivateData()); err != nil {
		_ = qp.Close() // the reason to report is err
		conn.unregister()
		return nil, fmt.Errorf("transport: dial %v: %w", to, err)
	}
	conn.start(qp, &c, &peer)
	return conn, nil
}

// Listen listens as [Device.ListenConn] does, with this configuration.
func (c MessageConfig) Listen(d *Device, addr netip.AddrPort) (*ConnListener, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	ln, err := d.Listen(addr)
	if err != nil {
		return nil, err
	}
	return &ConnListener{cfg: c, dev: d, ln: ln}, nil
}

// ConnListener takes connections for messages. All methods may be called by any goroutine.
type ConnListener struct {
	cfg MessageConfig
	dev *Device
	ln  *Listener
}

// Addr returns the address and service port that the listener was made for.
func (l *ConnListener) Addr() netip.AddrPort { return l.ln.Addr() }

// Accept waits for a connection. It returns before the peer's last word (RTU): sending is
// possible at once, and what is sent leaves as soon as it may. Requests of peers that do not
// exchange messages are refused, and those that come to nothing are skipped. It returns
// ErrClosed after Close, ctx.Err() when ctx ends first.
func (l *ConnListener) Accept(ctx context.Context) (*Conn, error) {
	for {
		req, err := l.ln.Next(ctx)
		if err != nil {
			return nil, err
		}
		conn, err := l.cfg.Accept(ctx, req)
		switch {
		case err == nil:
			return conn, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, ErrClosed):
			return nil, ErrClosed
		}
		l.dev.warn("a connection for messages came to nothing: " + err.Error())
	}
}

// Accept takes a request of a [Listener] for a connection of messages, for programs that serve
// several protocols at one port; it is what [ConnListener.Accept] does with each. It refuses
// the request when it returns an error: ErrNotMessages when that is not what the peer wants,
// otherwise one of [ConnRequest.Accept], or of this configuration.
func (c MessageConfig) Accept(ctx context.Context, req *ConnRequest) (*Conn, error) {
	refuse := func(reason verbs.RejectReason, err error) (*Conn, error) {
		text := err.Error()
		_ = req.Reject(reason, []byte(text[:min(len(text), MaxRejectPrivateData)])) // the peer may be gone
		return nil, err
	}
	peer, err := messageRequest(req)
	if err != nil {
		return refuse(verbs.RejectConsumer, err)
	}
	if err := c.check(); err != nil {
		return refuse(verbs.RejectNoResources, err)
	}
	conn, err := newConn(req.dev, &c)
	if err != nil {
		return refuse(verbs.RejectNoResources, err)
	}
	qp, err := req.Accept(ctx, c.param(conn))
	if err != nil {
		conn.unregister()
		return refuse(verbs.RejectNoResources, err)
	}
	conn.start(qp, &c, peer)
	return conn, nil
}

// MessageOffer is what a peer has that wants to exchange messages: its MessageConfig's fields.
type MessageOffer struct {
	MaxMessage, Buffers int
	Compresses          bool
}

// OfferOf returns what the peer of a request offers; ErrNotMessages when it is after something
// else than messages.
func OfferOf(req *ConnRequest) (MessageOffer, error) {
	h, err := messageRequest(req)
	if err != nil {
		return MessageOffer{}, err
	}
	return MessageOffer{MaxMessage: h.maxMessage, Buffers: h.buffers, Compresses: h.accepts != 0}, nil
}

// messageRequest reads the hello of a request.
func messageRequest(req *ConnRequest) (*messageHello, error) {
	var h messageHello
	if err := h.unmarshal(req.PrivateData()); err != nil {
		return nil, err
	}
	if req.Type() != verbs.RC {
		return nil, ErrNotMessages
	}
	return &h, nil
}

// Close stops listening; accepted connections stay. Closing twice is ErrClosed.
func (l *ConnListener) Close() error { return l.ln.Close() }

// newConn makes a connection's buffers; start makes the rest when the peer's offer is known.
func newConn(d *Device, cfg *MessageConfig) (*Conn, error) {
	pd, err := d.AllocPD()
	if err != nil {
		return nil, err
	}
	c := &Conn{dev: d, pd: pd, maxRecv: cfg.maxMessage(), buffers: cfg.buffers(), linger: cfg.linger(), keepAlive: cfg.keepAlive()}
	c.recvSlot = slotLen(c.maxRecv)
	mr, err := pd.RegisterMR(make([]byte, (c.buffers+controlSlots)*c.recvSlot), verbs.LocalWrite)
	if err != nil {
		return nil, err
	}
	c.recvMR = mr
	return c, nil
}

// receives lists a receive for each buffer.
func (c *Conn) receives() []verbs.RecvWR {
	wrs := make([]verbs.RecvWR, c.buffers+controlSlots)
	c.recvSGL = make([]verbs.SGE, len(wrs))
	for i := range wrs {
		c.recvSGL[i] = c.recvMR.SGE(i*c.recvSlot, c.maxRecv)
		wrs[i] = verbs.RecvWR{WRID: uint64(i), SGList: c.recvSGL[i : i+1]}
	}
	return wrs
}

// start makes the connection ready, before anybody else knows it.
func (c *Conn) start(qp *QP, cfg *MessageConfig, peer *messageHello) {
	c.qp, c.cq = qp, qp.CQ()
	c.maxSend = min(cfg.maxMessage(), peer.maxMessage)
	c.threshold = (c.buffers + 1) / 2
	c.inbox = make([]arrival, c.buffers)
	c.ring = make([]int32, qp.Cap().MaxSendWR)
	c.peerBuffers = peer.buffers
	c.compression = cfg.Compression.towards(peer.accepts)
	if c.compression != CompressNone {
		c.enc = pack.NewEncoder(pack.Method(c.compression))
	}
	if cfg.Compression != CompressNone {
		c.dec = pack.NewDecoder(min(c.maxRecv, pack.MaxBlock))
	}
	if c.keepAlive > 0 {
		c.sendMu.Lock() // the timer may be faster than its assignment
		c.alive = time.AfterFunc(c.keepAlive, c.ask)
		c.sendMu.Unlock()
	}
}

// slotLen is the distance of buffers for messages of n bytes: whole cache lines.
func slotLen(n int) int { return (n + 63) &^ 63 }
