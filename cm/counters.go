package cm

import (
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/roce"
)

// Message indexes counters by the kind of CM message.
type Message uint8

// The kinds, in the order of their attribute IDs.
const (
	REQ Message = iota
	MRA
	REJ
	REP
	RTU
	DREQ
	DREP
	SIDRReq
	SIDRRep
	LAP
	APR
	messages
)

// attr returns the attribute ID.
func (m Message) attr() roce.AttrID { return roce.AttrREQ + roce.AttrID(m) }

// String returns the message's name.
func (m Message) String() string { return m.attr().String() }

// Drop is a reason for which the CM disregards a MAD.
type Drop uint8

// Reasons.
const (
	// DropMalformed: not 256 bytes, not a CM message, or impossible contents.
	DropMalformed Drop = iota
	// DropSource: from an address that cannot be answered.
	DropSource
	// DropPeer: names a connection with somebody else.
	DropPeer
	// DropTID: names a connection, but not its transaction ID.
	DropTID
	// DropUnknown: names no connection.
	DropUnknown
	// DropQPN: a DREQ that names another QP than the connection's.
	DropQPN
	// DropState: means nothing in the state of the connection.
	DropState
	// DropBacklog: a REQ for a listener with a full backlog.
	DropBacklog
	// DropEvents: a REQ while too many events wait for NextEvent.
	DropEvents
	// DropIDs: a REQ while no communication ID is free.
	DropIDs
	// DropReplies: its answer had no room in the queue of answers.
	DropReplies
	drops
)

var dropNames = [drops]string{
	"malformed", "source", "peer", "tid", "unknown", "qpn", "state", "backlog", "events", "ids", "replies",
}

// String returns the reason as one word.
func (d Drop) String() string {
	if d < drops {
		return dropNames[d]
	}
	return "unknown reason"
}

// Counters count what a CM did. They only grow, and any goroutine may read them.
type Counters struct {
	// Sent counts all MADs that NextMAD returned, Retransmitted those among them that
	// said again what had been said: by timer, or in answer to a duplicate.
	Sent, Retransmitted [messages]atomic.Uint64
	// Received counts all MADs of the kind, Duplicate those among them that said what was known.
	Received, Duplicate [messages]atomic.Uint64
	// Dropped counts MADs that were disregarded; duplicates are not among them.
	Dropped [drops]atomic.Uint64
	// CommEst counts connections that CM.Established established, RTULate the RTUs that
	// came afterwards.
	CommEst, RTULate atomic.Uint64
	// TimedOut counts waits for a REP, an RTU, a DREP or the program that ended in vain.
	TimedOut atomic.Uint64
	// Withheld counts repetitions of REPs, and REJs after them, that strangers were not sent;
	// see the package comment.
	Withheld atomic.Uint64
}

// Counters returns the counters; the pointer stays valid.
func (c *CM) Counters() *Counters { return &c.counters }

// Each calls f for every counter that is not zero, under a name such as "sent.REQ" or
// "dropped.backlog".
func (k *Counters) Each(f func(name string, n uint64)) {
	one := func(name string, n uint64) {
		if n != 0 {
			f(name, n)
		}
	}
	for _, group := range []struct {
		name string
		by   *[messages]atomic.Uint64
	}{
		{"sent.", &k.Sent}, {"retransmitted.", &k.Retransmitted}, {"received.", &k.Received}, {"duplicate.", &k.Duplicate},
	} {
		for m := range messages {
			one(group.name+m.String(), group.by[m].Load())
		}
	}
	for d := range drops {
		one("dropped."+d.String(), k.Dropped[d].Load())
	}
	one("comm_est", k.CommEst.Load())
	one("rtu_late", k.RTULate.Load())
	one("timed_out", k.TimedOut.Load())
	one("withheld", k.Withheld.Load())
}

// drop counts a MAD that is disregarded.
func (c *CM) drop(why Drop) { c.counters.Dropped[why].Add(1) }
