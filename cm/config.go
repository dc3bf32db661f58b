package cm

import (
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
)

// Defaults of [Config].
const (
	DefaultRetryInitial      = 20 * time.Millisecond
	DefaultRetryMax          = time.Second
	DefaultConnectTimeout    = 5 * time.Second
	DefaultAcceptTimeout     = 5 * time.Second
	DefaultDisconnectTimeout = time.Second
	DefaultServiceMax        = time.Minute
	DefaultRequestTimeout    = 2 * time.Minute
	DefaultTimeWait          = 500 * time.Millisecond
	DefaultBacklog           = 1024
)

// Config is how a [CM] is set up. Only GUID and Rand are needed. For durations and
// Backlog, zero and negative values mean the default.
type Config struct {
	// GUID identifies this device in REQ and REP; it should be random and stay the same
	// while the device lives. Peers tell repeated and stale connections by it.
	GUID uint64
	// UDPPort is the port the device receives on; 0 means 4791.
	UDPPort uint16
	// Rand returns 32 random bits of cryptographic quality. Communication and
	// transaction IDs are made of them.
	Rand func() uint32
	// Ours reports whether an address is this device's. A REQ whose path names another
	// one is rejected (invalid GID). Nil accepts every REQ that has arrived.
	Ours func(netip.Addr) bool

	// Wires is how many CMs a device has, a power of two, and Wire which of them this is: its
	// communication and request IDs have that number in their low bits, so that who receives a
	// MAD knows whose it is (see Owner). 0 and 0 for one alone. Each gets its share of what
	// is spent on strangers.
	Wire, Wires int
	// Peers is what the CMs of a device know together; nil for one alone.
	Peers Peers

	// RetryInitial is the time until REQ, REP and DREQ are first repeated; it doubles
	// with each repetition up to RetryMax. 20 ms and 1 s.
	RetryInitial, RetryMax time.Duration
	// ConnectTimeout is the time from Connect to the REP: 5 s.
	ConnectTimeout time.Duration
	// AcceptTimeout is the time from Accept to the RTU: 5 s.
	AcceptTimeout time.Duration
	// DisconnectTimeout is the time from Disconnect to the DREP: 1 s.
	DisconnectTimeout time.Duration
	// ServiceMax is what a peer may add to ConnectTimeout or AcceptTimeout with MRAs: 1 min.
	ServiceMax time.Duration
	// RequestTimeout is how long the program may take to answer a ReqReceived (with Accept
	// or Reject) or a RepReceived (with Ready): 2 min.
	RequestTimeout time.Duration
	// TimeWait is how long an ended connection still answers what the peer repeats, and
	// its IDs are not used again: 500 ms.
	TimeWait time.Duration
	// Backlog bounds, for each listener, the connections between REQ and RTU; further REQs
	// are dropped (their senders repeat them). A quarter of it is kept for addresses that a
	// connection is established with. It also bounds, for the whole CM, the failed
	// connections that linger. 1024.
	Backlog int
}

// withDefaults returns c with every unset field replaced.
func (c Config) withDefaults() Config {
	if c.UDPPort == 0 {
		c.UDPPort = roce.Port
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.RetryInitial, DefaultRetryInitial},
		{&c.RetryMax, DefaultRetryMax},
		{&c.ConnectTimeout, DefaultConnectTimeout},
		{&c.AcceptTimeout, DefaultAcceptTimeout},
		{&c.DisconnectTimeout, DefaultDisconnectTimeout},
		{&c.ServiceMax, DefaultServiceMax},
		{&c.RequestTimeout, DefaultRequestTimeout},
		{&c.TimeWait, DefaultTimeWait},
	} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	c.RetryMax = max(c.RetryMax, c.RetryInitial)
	c.Wires = max(c.Wires, 1)
	if c.Backlog <= 0 {
		c.Backlog = DefaultBacklog
	}
	return c
}
