package cm

import (
	"net/netip"
	"strconv"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// EventType says what happened to a connection.
type EventType uint8

// What can happen. The package documentation tells the order.
const (
	// ReqReceived: a peer asks for a connection; answer with Accept or Reject. Service, Req and
	// PrivateData are set: exactly the 56 bytes that the wire has room for (92 when the
	// service ID is not one of rdma_cm), zeros at their end included.
	ReqReceived EventType = iota + 1
	// RepReceived: the peer accepted; move the QP to RTS and call Ready. Rep and
	// PrivateData (196 bytes) are set.
	RepReceived
	// Established: the RTU came; PrivateData (224 bytes) is set. A call of CM.Established is
	// not echoed, nor is Ready.
	Established
	// RTULate: the RTU came after CM.Established; PrivateData (224 bytes) is set.
	RTULate
	// Rejected: the peer refused or gave up before the connection was established. Reason
	// and PrivateData (148 bytes) are set. Or we ended it ourselves because the peer uses its
	// QP for another connection: Reason is RejectStaleConn, PrivateData nil.
	Rejected
	// Unreachable: no REP or RTU came in time, or the program did not answer a request in
	// time.
	Unreachable
	// Disconnected: an established connection has ended. Reason is 0 after a DREQ or
	// DREP, whose private data (220 or 224 bytes) is in PrivateData; RejectTimeout when our
	// DREQ was not answered; RejectStaleConn when the peer began anew with the same QP; or
	// the reason of a REJ. A DREQ that overtakes the RTU ends an accepted connection so too.
	Disconnected
	// TimewaitExit: the ID is free again; nothing follows.
	TimewaitExit
	// SIDRResolved: a query was answered; SIDR and PrivateData (136 bytes) are set, Conn is not.
	SIDRResolved
	// SIDRUnreachable: a query was not answered in time; only SIDR.ID is set.
	SIDRUnreachable
)

var eventNames = [...]string{
	ReqReceived: "REQ_RECEIVED", RepReceived: "REP_RECEIVED", Established: "ESTABLISHED", RTULate: "RTU_LATE",
	Rejected: "REJECTED", Unreachable: "UNREACHABLE", Disconnected: "DISCONNECTED", TimewaitExit: "TIMEWAIT_EXIT",
	SIDRResolved: "SIDR_RESOLVED", SIDRUnreachable: "SIDR_UNREACHABLE",
}

// String returns the event's name.
func (t EventType) String() string {
	if int(t) < len(eventNames) && eventNames[t] != "" {
		return eventNames[t]
	}
	return "CM_EVENT_" + strconv.Itoa(int(t))
}

// Event is something that happened to a connection. It belongs to the receiver and
// aliases nothing.
type Event struct {
	Type    EventType
	Conn    ConnID
	Service roce.SID
	Path    Path
	// Reason is set for Rejected and Disconnected; see there.
	Reason verbs.RejectReason
	Req    ReqInfo
	Rep    RepInfo
	SIDR   SIDRInfo
	// PrivateData has the full size that the message has on the wire: messages do not tell
	// how much of it is meant.
	PrivateData []byte
}

// ReqInfo is what a REQ says about the peer.
type ReqInfo struct {
	Type verbs.QPType
	QPN  verbs.QPN
	// StartPSN is the PSN that we must start sending with.
	StartPSN verbs.PSN
	MTU      verbs.MTU
	// ResponderResources bounds our outstanding READs and atomics, InitiatorDepth the
	// peer's.
	ResponderResources, InitiatorDepth uint8
	// RetryCnt and RNRRetry are for our QP: 0 to 7, 7 RNR retries being without end.
	RetryCnt, RNRRetry uint8
	// AckTimeout is the peer's estimate for the QP's timer.
	AckTimeout verbs.AckTimeout
	// SRQ says that the peer's QP uses a shared receive queue.
	SRQ bool
	// FlowLabel is the path's: 20 bits.
	FlowLabel uint32
	GUID      uint64
	// SrcPort, Src and Dst are those of the IP CM header: the service port of the
	// connecting side and both addresses as it sees them; zero for other services.
	SrcPort  uint16
	Src, Dst netip.Addr
}

// RepInfo is what a REP says about the peer.
type RepInfo struct {
	QPN verbs.QPN
	// StartPSN is the PSN that we must start sending with.
	StartPSN verbs.PSN
	// ResponderResources bounds our outstanding READs and atomics, InitiatorDepth the
	// peer's.
	ResponderResources, InitiatorDepth uint8
	// RNRRetry is for our QP: 0 to 7, 7 being without end.
	RNRRetry uint8
	// TargetAckDelay is how long the peer may take to acknowledge.
	TargetAckDelay verbs.AckTimeout
	SRQ            bool
	GUID           uint64
}

// maxEventsPerBacklog times Config.Backlog is the number of waiting events beyond which
// new REQs are dropped. Other events need no bound of their own: a connection
// causes at most four.
const maxEventsPerBacklog = 4

// queuedEvent is an event that NextEvent has not returned yet; cn is nil for those of SIDR.
type queuedEvent struct {
	ev Event
	cn *conn
}

// emit queues an event of cn; Conn, Service and Path are filled in.
func (c *CM) emit(cn *conn, ev Event) {
	ev.Conn, ev.Service, ev.Path = cn.id, cn.service, cn.path
	c.events.push(queuedEvent{ev, cn})
}

// NextEvent returns the next event; false when there is none. A connection that was
// destroyed has no events but its TimewaitExit, also none that had been waiting.
func (c *CM) NextEvent() (Event, bool) {
	for {
		q, ok := c.events.pop()
		if !ok {
			return Event{}, false
		}
		if q.cn != nil && q.cn.destroyed && q.ev.Type != TimewaitExit {
			continue
		}
		return q.ev, true
	}
}

// fifo is a queue in a slice that is used as a ring.
type fifo[T any] struct {
	buf  []T
	head int
	n    int
}

func (q *fifo[T]) len() int { return q.n }

func (q *fifo[T]) push(v T) {
	if q.n == len(q.buf) {
		grown := make([]T, max(8, 2*len(q.buf)))
		for i := range q.n {
			grown[i] = q.buf[(q.head+i)%len(q.buf)]
		}
		q.buf, q.head = grown, 0
	}
	q.buf[(q.head+q.n)%len(q.buf)] = v
	q.n++
}

// pop takes the oldest entry. An empty queue gives back what a burst made it allocate.
func (q *fifo[T]) pop() (v T, ok bool) {
	if q.n == 0 {
		return v, false
	}
	var zero T
	v, q.buf[q.head] = q.buf[q.head], zero
	q.head = (q.head + 1) % len(q.buf)
	q.n--
	if q.n == 0 && len(q.buf) > 64 {
		q.buf, q.head = nil, 0
	}
	return v, true
}
