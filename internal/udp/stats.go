package udp

import "sync/atomic"

// Stats is a snapshot of a socket's counters. Counters only grow; each is exact, but
// they are read one after the other while traffic goes on.
type Stats struct {
	// RxDatagrams and RxBytes count what Recv has handed out, RxTrains the buffers among
	// it that held more than one datagram, RxCalls the system calls that brought something.
	RxDatagrams, RxBytes, RxTrains, RxCalls uint64
	// RxTruncated counts buffers handed out with Truncated set.
	RxTruncated uint64
	// RxDropped counts datagrams that the kernel dropped because the receive buffer was
	// full (SO_RXQ_OVFL), as far as later datagrams have told; 0 where unknown.
	RxDropped uint64
	// RxAwaits counts the sleeps in the receiving call that brought something.
	RxAwaits uint64
	// RxRouses counts the empty datagrams by which the socket woke its own receiver; they are in
	// no other figure but RxCalls.
	RxRouses uint64
	// RxErrors counts receive calls that failed with a fault that passes.
	RxErrors uint64

	// TxDatagrams and TxBytes count what the kernel has taken, TxTrains the trains among
	// it, TxCalls the system calls that took something.
	TxDatagrams, TxBytes, TxTrains, TxCalls uint64
	// TxSplit counts trains that were sent as single datagrams.
	TxSplit uint64
	// TxPartial counts calls that took only a part of their batch, TxBlocked the calls
	// that took nothing because the send buffer was full.
	TxPartial, TxBlocked uint64
	// TxErrors counts datagrams that were taken from the caller and not sent.
	TxErrors SendErrors

	// GSO, GRO and Batch say which abilities are in use: sending trains, receiving
	// trains, and several messages per system call.
	GSO, GRO, Batch Offload
	// RecvBuffer and SendBuffer are the effective buffers in the kernel's own count, which
	// on Linux is twice what is asked for; 0 where unknown.
	RecvBuffer, SendBuffer int
}

// SendErrors counts lost datagrams by the reason that the system gave.
type SendErrors struct {
	TooLong         uint64 // EMSGSIZE: longer than the interface's MTU or than UDP allows
	NoBuffers       uint64 // ENOBUFS, ENOMEM
	NotPermitted    uint64 // EPERM, EACCES: a firewall, or a broadcast address
	Refused         uint64 // ECONNREFUSED
	NetUnreachable  uint64 // ENETUNREACH, ENETDOWN
	HostUnreachable uint64 // EHOSTUNREACH, EHOSTDOWN
	Invalid         uint64 // EINVAL, EADDRNOTAVAIL, EAFNOSUPPORT: mostly an address that is not ours
	Other           uint64
}

// Total returns the sum of all kinds.
func (e SendErrors) Total() uint64 {
	return e.TooLong + e.NoBuffers + e.NotPermitted + e.Refused + e.NetUnreachable +
		e.HostUnreachable + e.Invalid + e.Other
}

// Offload says whether an ability is in use, and why not.
type Offload struct {
	On bool
	// Reason is empty while On.
	Reason string
}

// String returns "on" or "off (reason)".
func (o Offload) String() string {
	if o.On {
		return "on"
	}
	return "off (" + o.Reason + ")"
}

// sendFault is a kind of send error, an index into counters.txErrors.
type sendFault int

const (
	faultTooLong sendFault = iota
	faultNoBuffers
	faultNotPermitted
	faultRefused
	faultNetUnreachable
	faultHostUnreachable
	faultInvalid
	faultOther
	numFaults
)

// counters are written by the owner of the socket and read by anyone.
type counters struct {
	rxDatagrams, rxBytes, rxTrains, rxCalls atomic.Uint64
	rxTruncated, rxDropped, rxErrors        atomic.Uint64
	rxRouses, rxAwaits                      atomic.Uint64
	txDatagrams, txBytes, txTrains, txCalls atomic.Uint64
	txSplit, txPartial, txBlocked           atomic.Uint64
	txErrors                                [numFaults]atomic.Uint64
	gso, gro, batch                         ability
	recvBuffer, sendBuffer                  int // written while opening only
}

// ability is an Offload that can be given up while others look. The zero value is on.
type ability struct{ off atomic.Pointer[string] }

func (a *ability) on() bool { return a.off.Load() == nil }

// giveUp switches the ability off; the first reason stays.
func (a *ability) giveUp(reason string) { a.off.CompareAndSwap(nil, &reason) }

func (a *ability) state() Offload {
	if r := a.off.Load(); r != nil {
		return Offload{Reason: *r}
	}
	return Offload{On: true}
}

// lose counts n datagrams as taken and not sent.
func (c *counters) lose(f sendFault, n int) { c.txErrors[f].Add(uint64(n)) }

func (c *counters) snapshot() Stats {
	return Stats{
		RxDatagrams: c.rxDatagrams.Load(), RxBytes: c.rxBytes.Load(),
		RxTrains: c.rxTrains.Load(), RxCalls: c.rxCalls.Load(),
		RxTruncated: c.rxTruncated.Load(), RxDropped: c.rxDropped.Load(), RxErrors: c.rxErrors.Load(),
		RxRouses: c.rxRouses.Load(), RxAwaits: c.rxAwaits.Load(),
		TxDatagrams: c.txDatagrams.Load(), TxBytes: c.txBytes.Load(),
		TxTrains: c.txTrains.Load(), TxCalls: c.txCalls.Load(),
		TxSplit: c.txSplit.Load(), TxPartial: c.txPartial.Load(), TxBlocked: c.txBlocked.Load(),
		TxErrors: SendErrors{
			TooLong:         c.txErrors[faultTooLong].Load(),
			NoBuffers:       c.txErrors[faultNoBuffers].Load(),
			NotPermitted:    c.txErrors[faultNotPermitted].Load(),
			Refused:         c.txErrors[faultRefused].Load(),
			NetUnreachable:  c.txErrors[faultNetUnreachable].Load(),
			HostUnreachable: c.txErrors[faultHostUnreachable].Load(),
			Invalid:         c.txErrors[faultInvalid].Load(),
			Other:           c.txErrors[faultOther].Load(),
		},
		GSO: c.gso.state(), GRO: c.gro.state(), Batch: c.batch.state(),
		RecvBuffer: c.recvBuffer, SendBuffer: c.sendBuffer,
	}
}
