package verbs

import "strconv"

// EventType is an asynchronous event (enum ibv_event_type), or, from 0x100 on, a
// connection event (enum rdma_cm_event_type shifted by 0x100).
type EventType uint16

// Asynchronous events.
const (
	EventCQErr            EventType = 0
	EventQPFatal          EventType = 1
	EventQPReqErr         EventType = 2
	EventQPAccessErr      EventType = 3
	EventCommEst          EventType = 4
	EventSQDrained        EventType = 5
	EventDeviceFatal      EventType = 8
	EventSRQErr           EventType = 14
	EventSRQLimitReached  EventType = 15
	EventQPLastWQEReached EventType = 16
)

// Connection events.
const (
	EventConnectRequest  EventType = 0x100 + 4
	EventConnectResponse EventType = 0x100 + 5
	EventConnectError    EventType = 0x100 + 6
	EventUnreachable     EventType = 0x100 + 7
	EventRejected        EventType = 0x100 + 8
	EventEstablished     EventType = 0x100 + 9
	EventDisconnected    EventType = 0x100 + 10
	EventTimewaitExit    EventType = 0x100 + 15
	// EventRTU is ours: an RTU came after the connection was established by a first
	// message; its private data would otherwise be lost.
	EventRTU EventType = 0x200
	// EventPathMTU is ours: full-size packets vanish while small ones arrive, so the
	// path carries less than the MTU that was agreed.
	EventPathMTU EventType = 0x201
)

// String returns the event's name without its prefix.
func (t EventType) String() string {
	switch t {
	case EventCQErr:
		return "CQ_ERR"
	case EventQPFatal:
		return "QP_FATAL"
	case EventQPReqErr:
		return "QP_REQ_ERR"
	case EventQPAccessErr:
		return "QP_ACCESS_ERR"
	case EventCommEst:
		return "COMM_EST"
	case EventSQDrained:
		return "SQ_DRAINED"
	case EventDeviceFatal:
		return "DEVICE_FATAL"
	case EventSRQErr:
		return "SRQ_ERR"
	case EventSRQLimitReached:
		return "SRQ_LIMIT_REACHED"
	case EventQPLastWQEReached:
		return "QP_LAST_WQE_REACHED"
	case EventConnectRequest:
		return "CONNECT_REQUEST"
	case EventConnectResponse:
		return "CONNECT_RESPONSE"
	case EventConnectError:
		return "CONNECT_ERROR"
	case EventUnreachable:
		return "UNREACHABLE"
	case EventRejected:
		return "REJECTED"
	case EventEstablished:
		return "ESTABLISHED"
	case EventDisconnected:
		return "DISCONNECTED"
	case EventTimewaitExit:
		return "TIMEWAIT_EXIT"
	case EventRTU:
		return "RTU"
	case EventPathMTU:
		return "PATH_MTU"
	}
	return "EVENT_" + strconv.Itoa(int(t))
}

// Event is something that happened outside the flow of completions.
type Event struct {
	Type EventType
	// QPN is the queue pair concerned, 0 when the event is not about one.
	QPN QPN
	// SRQN is the shared receive queue concerned, CQN the completion queue; 0 when the event
	// is not about one.
	SRQN, CQN uint32
	// PrivateData is what a late RTU brought (EventRTU); nil otherwise.
	PrivateData []byte
}
