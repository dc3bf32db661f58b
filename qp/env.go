package qp

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Env is what a wire gives to all of its queue pairs. Only the wire's owner touches it,
// the counters excepted, which anyone may read.
type Env struct {
	Mem Memory
	// AHs knows the address handles; nil when there are none.
	AHs AddressHandles
	// Dirty lists the lanes with completions that wait for Commit; the wire commits and
	// clears it once a step, after the step's events.
	Dirty []*CQ
	// Low lists the shared receive queues that have fallen below their limit; the wire raises
	// the event and clears the list once a step.
	Low []*SRQ
	// Counters count what all queue pairs of the wire do.
	Counters Counters
}

// Counters are totals since the wire was opened. Written by the wire's owner, read by anyone.
type Counters struct {
	PacketsSent, PacketsReceived atomic.Uint64
	// Retransmits counts request packets sent again, Timeouts the ack timeouts behind some
	// of them (early ones that follow the measured round trip are in EarlyRetransmits).
	Retransmits, Timeouts, EarlyRetransmits atomic.Uint64
	AcksSent, NaksSent, RNRNaksSent         atomic.Uint64
	NaksReceived, RNRNaksReceived           atomic.Uint64
	Duplicates, OutOfOrder                  atomic.Uint64
	// DroppedState counts packets that the queue pair's state refused, DroppedOther those
	// that were valid but meant nothing: ghost acks, responses to nothing.
	DroppedState, DroppedOther atomic.Uint64
	// What UC and UD drop without a word: messages that lost a part, packets that found no
	// receive, that did not fit (a buffer, a message's length, the MTU), that had a wrong
	// Q_Key, that wanted to write memory they may not. The first packet of a message counts.
	DroppedMessages, DroppedNoRecv, DroppedLength, DroppedQKey, DroppedAccess atomic.Uint64
	// Deferred counts WQEs that a gate held back, Publications the moves to RTS that
	// published at least one, DeferredNanos the time from RTR to those publications.
	Deferred, Publications, DeferredNanos atomic.Uint64
	// CommEst counts queue pairs established by a first request that beat the RTU.
	CommEst    atomic.Uint64
	CQOverruns atomic.Uint64
	Flushed    atomic.Uint64
	// WindowBlocked counts how often a request had to wait for the peer's window.
	WindowBlocked atomic.Uint64
}

// MaxGather is the largest number of pieces of one packet's payload.
const MaxGather = 33

// Out is one packet to send, as NextPacket describes it: the header fields, and the payload
// as pieces of registered memory. The wire pads, checksums and transmits. The pieces are
// valid until the wire's step ends.
type Out struct {
	// Packet holds the headers; its Payload and Pad are unused: Len says how long the payload is.
	Packet roce.Packet
	Gather [MaxGather][]byte
	// AH says where a UD message goes; 0 for queue pairs that are connected.
	AH verbs.AH
	// N is the number of pieces in use, Len their total length.
	N, Len int
	// Unstable says that the memory may legally change before the packet has left (READ
	// responses; UC and UD, whose sends complete when Sent says so): copy first, then checksum the copy.
	Unstable bool
}

// reset empties the gather list and clears what the last packet set.
func (o *Out) reset() {
	clear(o.Gather[:o.N])
	o.N, o.Len, o.Unstable, o.AH = 0, 0, false, 0
	o.Packet = roce.Packet{}
}

// add appends a piece.
func (o *Out) add(b []byte) {
	if len(b) == 0 {
		return
	}
	o.Gather[o.N] = b
	o.N++
	o.Len += len(b)
}

// Next is what NextPacket found.
type Next uint8

const (
	// NextNothing: nothing may be sent now; a packet, a post or a deadline will change that.
	NextNothing Next = iota
	// NextPacket: out was filled.
	NextPacket
	// NextBlocked: requests wait for room in the peer's window.
	NextBlocked
)

// EventSet holds pending asynchronous events of a queue pair, a bit each: an event that
// nobody reads cannot pile up.
type EventSet uint32

// Events in an EventSet.
const (
	EvCommEst EventSet = 1 << iota
	EvSQDrained
	EvQPFatal
	EvQPReqErr
	EvQPAccessErr
	EvLastWQEReached
	EvCQErr
	// EvToErr: the queue pair moved itself to ERR.
	EvToErr
	// EvToRTS: the queue pair moved itself to RTS (first request in RTR).
	EvToRTS
	// EvPathMTU: full-size packets vanish while small ones arrive.
	EvPathMTU
)

// verbsEvents pairs each bit with the event programs see; EvToErr and EvToRTS have none.
var verbsEvents = [...]struct {
	Bit  EventSet
	Type verbs.EventType
}{
	{EvCommEst, verbs.EventCommEst}, {EvSQDrained, verbs.EventSQDrained}, {EvQPFatal, verbs.EventQPFatal},
	{EvQPReqErr, verbs.EventQPReqErr}, {EvQPAccessErr, verbs.EventQPAccessErr},
	{EvLastWQEReached, verbs.EventQPLastWQEReached}, {EvCQErr, verbs.EventCQErr}, {EvPathMTU, verbs.EventPathMTU},
}

// Each calls f for every event in the set that programs see.
func (s EventSet) Each(f func(verbs.EventType)) {
	for _, e := range verbsEvents {
		if s&e.Bit != 0 {
			f(e.Type)
		}
	}
}
