package deferral

import (
	"fmt"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Cell is one point of the sweep: a network, a client and a server's program. Base returns
// the one that all others differ from in one respect.
type Cell struct {
	// Axis names what is varied, Value how far.
	Axis, Value string

	// Latency, Jitter (the mean of what is added to it) and Gap describe the network.
	Latency, Jitter, Gap time.Duration
	// RTUDelay is added to each RTU. What is sent behind it overtakes it.
	RTUDelay time.Duration
	// RTULost is how many RTUs of each connection are lost, from the first on; RTULossRate
	// the probability with which each other one is.
	RTULost     int
	RTULossRate float64

	// Request says that the client sends a request right behind its RTU. Reply says that the
	// server waits for it and answers; otherwise it greets as soon as it has accepted.
	Request, Reply bool
	// WQEs is how many messages the server sends on each connection, at once; Conns how many
	// connections open at the same time.
	WQEs, Conns int

	// AckTimeout is the code that the queue pairs have. AckOnly takes the early
	// retransmission away, as Linux has none (for WQEs of 1), LinuxREP all repetitions of a
	// REP within Linux's 4.1 s.
	AckTimeout        verbs.AckTimeout
	AckOnly, LinuxREP bool

	// ClientWire says that the client's wire moves its queue pair, within the step in which
	// the REP arrives. Otherwise a program or a thread of the kernel does, and what a server
	// sends right behind its REP is early.
	ClientWire bool
	// ClientWake, ServerWake and Handle are about the threads on which programs get events.
	ClientWake, ServerWake, Handle time.Duration
	// DeafToCommEst says that the server's program ignores COMM_EST, or that its provider
	// raises none, as Soft-RoCE.
	DeafToCommEst bool
	// Poll is the interval of retries in strategy d.
	Poll time.Duration

	// Few says that the cell gets a tenth of the trials: strategy d retries so often there.
	Few bool
	// Deep cells get ten times the trials. Plot says that the report keeps their
	// distribution, and plots it.
	Deep, Plot bool
}

// The time codes of the ack timeout: ours is Doorbell's default for tests and
// examples, 16.8 ms, Linux's what rdma_cm computes for RoCE, 2.1 s.
const (
	ourAckTimeout   verbs.AckTimeout = 12
	linuxAckTimeout verbs.AckTimeout = 19
)

// linuxREPTimer is how long Linux waits before it repeats a REP (response timeout code 20).
const linuxREPTimer = 4096 * time.Millisecond

// Base returns the base cell: a network of 10 us, a client that sends a request right behind
// its RTU, a server that greets with one message. 16 us is what waking a thread on another
// core takes, 2 us a guess at a system call or two.
func Base() Cell {
	return Cell{
		Axis: "base", Value: "-",
		Latency: 10 * time.Microsecond, Jitter: 2 * time.Microsecond, Gap: time.Microsecond,
		Request: true, WQEs: 1, Conns: 1, AckTimeout: ourAckTimeout,
		ClientWake: 16 * time.Microsecond, ServerWake: 16 * time.Microsecond, Handle: 2 * time.Microsecond,
		Poll: 100 * time.Microsecond,
	}
}

// Cells returns the sweep, the base cell first.
func Cells() []Cell {
	cells := []Cell{Base()}
	cells[0].Deep, cells[0].Plot = true, true
	add := func(axis, value string, change func(*Cell)) *Cell {
		c := Base()
		c.Axis, c.Value = axis, value
		change(&c)
		cells = append(cells, c)
		return &cells[len(cells)-1]
	}
	deep := func(c *Cell) { c.Deep, c.Plot = true, true }

	const us, ms = time.Microsecond, time.Millisecond
	delays := []time.Duration{20 * us, 100 * us, 500 * us, 2 * ms, 5 * ms, 20 * ms}
	for _, d := range delays {
		c := add("RTU late, request overtakes", inASCII(d), func(c *Cell) { c.RTUDelay = d })
		if d == 2*ms {
			deep(c)
		}
	}
	for _, d := range append([]time.Duration{0}, delays...) {
		c := add("RTU late, silent client", inASCII(d), func(c *Cell) { c.RTUDelay, c.Request = d, false })
		if d == 2*ms {
			deep(c)
		}
	}
	deep(add("RTU lost", "first", func(c *Cell) { c.RTULost = 1 }))
	add("RTU lost", "10 %", func(c *Cell) { c.RTULossRate = 0.1 })
	deep(add("RTU lost, silent client", "first", func(c *Cell) { c.RTULost, c.Request = 1, false }))
	add("RTU lost, silent client", "10 %", func(c *Cell) { c.RTULossRate, c.Request = 0.1, false })
	add("RTU lost, silent client", "first, Linux's REP timer", func(c *Cell) { c.RTULost, c.Request, c.LinuxREP, c.Few = 1, false, true, true })
	add("COMM_EST not heard", "RTU 2ms late", func(c *Cell) { c.RTUDelay, c.DeafToCommEst = 2*ms, true })
	add("COMM_EST not heard", "first RTU lost", func(c *Cell) { c.RTULost, c.DeafToCommEst = 1, true })
	deep(add("reply to the request", "-", func(c *Cell) { c.Reply = true }))
	add("reply to the request", "RTU 2ms late", func(c *Cell) { c.Reply, c.RTUDelay = true, 2*ms })
	add("reply to the request", "first RTU lost", func(c *Cell) { c.Reply, c.RTULost = true, 1 })
	for _, n := range []int{16, 256, 1024, 4096} {
		add("WQEs", fmt.Sprint(n), func(c *Cell) { c.WQEs = n })
	}
	for _, n := range []int{10, 100, 1000} {
		add("connections", fmt.Sprint(n), func(c *Cell) { c.Conns = n })
	}
	add("ack timeout", "2.1s", func(c *Cell) { c.AckTimeout = linuxAckTimeout })
	add("ack timeout", "16.8ms, none early", func(c *Cell) { c.AckOnly = true })
	add("ack timeout", "2.1s, none early", func(c *Cell) { c.AckTimeout, c.AckOnly = linuxAckTimeout, true })
	deep(add("client", "its wire moves the QP", func(c *Cell) { c.ClientWire = true }))
	for _, d := range []time.Duration{80 * us, ms} {
		add("client", "wakes in "+inASCII(d), func(c *Cell) { c.ClientWake = d })
	}
	add("server", "takes no time", func(c *Cell) { c.ServerWake, c.Handle = 0, 0 })
	for _, d := range []time.Duration{80 * us, ms} {
		add("server", "wakes in "+inASCII(d), func(c *Cell) { c.ServerWake = d })
	}
	for _, d := range []time.Duration{10 * us, ms, 10 * ms} {
		add("retry interval", inASCII(d), func(c *Cell) { c.Poll = d })
	}
	for _, d := range []time.Duration{2 * us, 100 * us, ms} {
		add("latency", inASCII(d), func(c *Cell) { c.Latency = d })
	}
	return cells
}

// inASCII is Duration.String with us for microseconds, so that a table's columns and a
// file's name come out alike everywhere.
func inASCII(d time.Duration) string { return strings.ReplaceAll(d.String(), "µ", "u") }

// trials is how many trials a cell gets when n are asked for. A trial of many connections
// gives as many samples, and one of many WQEs takes longer.
func (c *Cell) trials(n int) int {
	if c.Deep {
		n *= 10
	}
	if c.Few {
		n = (n + 9) / 10
	}
	n = min(n, max(100_000/c.WQEs, 20))
	return max((n+c.Conns-1)/c.Conns, 1)
}

// batch is how many trials share a network: enough that making it does not matter, few
// enough that the work spreads over the cores.
func (c *Cell) batch() int { return max(250/(c.Conns*(1+c.WQEs/64)), 1) }
