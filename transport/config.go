package transport

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Port is the UDP port of RoCEv2.
const Port = roce.Port

// Config says how to open a device. The zero value binds port 4791 on every address.
type Config struct {
	// Bind is the local address and UDP port. An invalid or unspecified address means
	// all addresses, IPv4 and IPv6; port 0 means 4791. Other ports work between Doorbell
	// devices only: everyone else sends to 4791.
	Bind netip.AddrPort
	// AnyPort lets the system choose the UDP port, when Bind names none.
	AnyPort bool
	// RecvBuffer and SendBuffer are the socket buffers to ask for, in bytes; 0 means 4 MiB,
	// negative leaves the system's default. The system may grant less: see Warnings.
	RecvBuffer, SendBuffer int
	// NoGSO and NoGRO switch segmentation and receive offload off.
	NoGSO, NoGRO bool
	// Wires is into how many wires the device is divided, each with a socket, a thread and
	// queue pairs of its own: a power of two up to 16; 0 means 1. More than one needs Linux, or
	// Open fails with an error that matches errors.ErrUnsupported.
	//
	// It pays where one core cannot do the work of many busy queue pairs and there are cores
	// left, or to keep queue pairs with small messages from standing behind bulk: what happens on
	// one wire waits for nothing on another. Queue pairs take turns at the wires as they are made;
	// a completion queue drives the wires of its queue pairs only. It costs a receive buffer
	// (RecvBuffer), 2 MiB of other buffers and a thread for each wire, completion queues that
	// take as many times the memory, and messages that are acknowledged and sent in smaller batches.
	Wires int
	// MaxMTU bounds the path MTU of connections; 0 means what the interface carries.
	MaxMTU verbs.MTU
	// Spin is how long a wait polls before it sleeps: 0 means 50 us, negative not at all.
	Spin time.Duration
	// ConnectTimeout is how long Dial waits for an answer to its REQ, and how long the
	// passive side waits for an RTU: 0 means 5 s.
	ConnectTimeout time.Duration
	// CMRetryInitial is the time until an unanswered REQ, REP or DREQ is first repeated: 0 means
	// 20 ms. It doubles with each repetition up to CMRetryMax: 0 means 1 s.
	CMRetryInitial, CMRetryMax time.Duration
	// DisconnectTimeout is how long an ended connection waits for the answer to its DREQ: 0
	// means 1 s.
	DisconnectTimeout time.Duration
	// Backlog bounds, for each listener, the connections between REQ and RTU, requests that
	// nobody has taken yet included; further REQs are dropped, and their senders repeat them. A
	// quarter of it is kept for peers that a connection is established with. 0 means 1024.
	Backlog int
	// Logger hears of state changes and refusals, never of packets; nil is silent.
	Logger *slog.Logger
	// Tap, when not nil, is handed a copy of every datagram sent and received, on a
	// goroutine of its own. When it is slow datagrams are skipped and counted
	// (Counters.TapSkipped); the data path never waits for it.
	Tap func(*TapPacket)
}

func (c *Config) bind() netip.AddrPort {
	addr, port := c.Bind.Addr().Unmap(), c.Bind.Port()
	if !addr.IsValid() {
		addr = netip.IPv6Unspecified()
	}
	if port == 0 && !c.AnyPort {
		port = Port
	}
	return netip.AddrPortFrom(addr, port)
}

func (c *Config) wires() (int, error) {
	n := max(c.Wires, 1)
	if c.Wires < 0 || n > wire.MaxWires || n&(n-1) != 0 {
		return 0, fmt.Errorf("transport: open: Wires is %d, want a power of two from 1 to %d", c.Wires, wire.MaxWires)
	}
	return n, nil
}

func (c *Config) spin() time.Duration {
	if c.Spin == 0 {
		return 50 * time.Microsecond
	}
	return max(c.Spin, 0)
}

func (c *Config) cm() cm.Config {
	return cm.Config{
		ConnectTimeout: c.ConnectTimeout, AcceptTimeout: c.ConnectTimeout, DisconnectTimeout: c.DisconnectTimeout,
		RetryInitial: c.CMRetryInitial, RetryMax: c.CMRetryMax, Backlog: c.backlog(),
	}
}

func (c *Config) backlog() int {
	if c.Backlog <= 0 {
		return cm.DefaultBacklog
	}
	return c.Backlog
}

// ConnParam is what a side brings into a connection. The zero value is useful: the
// connection gets a queue pair and a completion queue of its own.
type ConnParam struct {
	// PrivateData reaches the peer's program with the REQ (at most 56 bytes) or the REP
	// (at most 196). The peer sees it zero-padded to that length.
	PrivateData []byte
	// Type is the service: RC or UC; 0 means RC for Dial and what the peer asks for in Accept.
	// On UC messages may be lost, whatever concerns answers and retries means nothing, and
	// there are no READs and atomics.
	Type verbs.QPType
	// Recv is posted before the connection can carry anything, so that the peer's first
	// message finds a receive.
	Recv []verbs.RecvWR
	// Prepare, when not nil, is called with the queue pair in INIT, after Recv was posted
	// and before anything is sent; an error ends the attempt and is returned.
	Prepare func(*QP) error
	// PD is the protection domain; nil means the device's own.
	PD *PD
	// SendCQ and RecvCQ are where completions go; nil ones are made for the connection,
	// one for both if both are nil, and closed with it.
	SendCQ, RecvCQ *CQ
	// SRQ, when not nil, is where the connection's receives come from, one of PD; Recv must be
	// empty then, and a completion queue made for the connection has room for all its receives.
	SRQ *SRQ
	// Cap sizes the queue pair; zero fields take the defaults of verbs.QPCap.
	Cap verbs.QPCap
	// SQSigAll makes every send signaled.
	SQSigAll bool
	// MTU is the path MTU to ask for (Dial) or the largest to accept (Accept); 0 means the
	// device's largest.
	MTU verbs.MTU
	// ResponderResources is how many READs and atomics of the peer are served at a time,
	// InitiatorDepth how many of ours may be outstanding: 0 means 16, negative none, at
	// most 128. The connection uses the smaller of both sides' values.
	ResponderResources, InitiatorDepth int
	// RetryCnt is how often an unanswered request is repeated before the connection fails:
	// 0 means 7, negative none, at most 7.
	RetryCnt int
	// RNRRetry is how often the peer repeats a message that found no receive here: 0 means
	// without end (7), negative none, at most 7.
	RNRRetry int
	// AckTimeout is how long an answer may take before it counts as a retry, rounded up to
	// 4.096 us times a power of two: 0 means 268 ms, negative means for ever. A peer that
	// is gone is noticed after (RetryCnt+1) times as long. Repairs of lost packets do not
	// wait for it.
	AckTimeout time.Duration
	// MinRNRTimer is how long a peer waits before it repeats a message that found no
	// receive here, rounded to what RNR NAKs can say (10 us to 655 ms): 0 means 40 us.
	MinRNRTimer time.Duration
	// Access is what the peer may do through the queue pair; 0 means remote write, read
	// and atomics, each still subject to the rights of the region.
	Access verbs.Access
	// RemotePort is the peer's UDP port (Dial); 0 means 4791.
	RemotePort uint16
	// NoExtension keeps Doorbell's own 16 bytes out of what the peer's program sees at the
	// end of the private data, for protocols that own all of it. Doorbell peers use them to
	// tell each other the size of their socket's buffer, when PrivateData leaves them free.
	NoExtension bool
}

// ErrPrivateData: more private data than the message carries.
var ErrPrivateData = errors.New("transport: too much private data")

// Private data limits in bytes, of the REQ behind its IP CM header and of the REP.
const (
	MaxDialPrivateData   = 56
	MaxAcceptPrivateData = 196
	MaxRejectPrivateData = 148
)

// smallInt resolves a parameter with a default for zero and none for negative values.
func smallInt(name string, v, def, limit int) (uint8, error) {
	switch {
	case v == 0:
		return uint8(def), nil
	case v < 0:
		return 0, nil
	case v > limit:
		return 0, fmt.Errorf("transport: %s is %d, want at most %d", name, v, limit)
	}
	return uint8(v), nil
}

// resolve turns the parameters into what the wire takes, or says what is wrong with them.
func (p *ConnParam) resolve(maxPrivate int, maxMTU verbs.MTU) (c wire.ConnParam, err error) {
	if len(p.PrivateData) > maxPrivate {
		return c, fmt.Errorf("%w: %d bytes, want at most %d", ErrPrivateData, len(p.PrivateData), maxPrivate)
	}
	if p.Type != verbs.RC && p.Type != verbs.UC {
		return c, fmt.Errorf("transport: Type is %v; a connection is RC or UC", p.Type)
	}
	c.PrivateData, c.NoExtension = p.PrivateData, p.NoExtension
	var errs [4]error
	c.ResponderResources, errs[0] = smallInt("ResponderResources", p.ResponderResources, 16, 128)
	c.InitiatorDepth, errs[1] = smallInt("InitiatorDepth", p.InitiatorDepth, 16, 128)
	c.RetryCnt, errs[2] = smallInt("RetryCnt", p.RetryCnt, 7, 7)
	c.RNRRetry, errs[3] = smallInt("RNRRetry", p.RNRRetry, 7, 7)
	if err := errors.Join(errs[:]...); err != nil {
		return c, err
	}
	switch {
	case p.AckTimeout == 0:
		c.Timeout = 16
	case p.AckTimeout > 0:
		c.Timeout = verbs.AckTimeoutFor(p.AckTimeout)
	}
	c.MinRNRTimer = rnrTimer(p.MinRNRTimer)
	c.MTU = p.MTU
	if c.MTU == 0 {
		c.MTU = maxMTU
	}
	if !c.MTU.Valid() {
		return c, fmt.Errorf("transport: MTU code %d, want 1 (256 bytes) to 5 (4096 bytes)", uint8(p.MTU))
	}
	c.MTU = min(c.MTU, maxMTU)
	c.Access = p.Access
	if c.Access == 0 {
		c.Access = verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
	}
	return c, nil
}

// rnrTimer returns the shortest code that waits at least d.
func rnrTimer(d time.Duration) verbs.RNRTimer {
	if d <= 0 {
		d = 40 * time.Microsecond
	}
	for c := verbs.RNRTimer(1); c <= verbs.MaxRNRTimer; c++ {
		if c.Duration() >= d {
			return c
		}
	}
	return 0 // the longest
}
