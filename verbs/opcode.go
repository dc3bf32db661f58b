package verbs

import "strconv"

// Opcode says what a send work request does (enum ibv_wr_opcode).
type Opcode uint8

// The operations of the send queue.
const (
	RDMAWrite        Opcode = 0
	RDMAWriteWithImm Opcode = 1
	Send             Opcode = 2
	SendWithImm      Opcode = 3
	RDMARead         Opcode = 4
	AtomicCmpAndSwp  Opcode = 5
	AtomicFetchAdd   Opcode = 6
	LocalInv         Opcode = 7
	BindMW           Opcode = 8
	SendWithInv      Opcode = 9
)

var opcodeNames = [...]string{
	"RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "SEND", "SEND_WITH_IMM", "RDMA_READ",
	"ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD", "LOCAL_INV", "BIND_MW", "SEND_WITH_INV",
}

// String returns libibverbs' name without the prefix.
func (o Opcode) String() string {
	if int(o) < len(opcodeNames) {
		return opcodeNames[o]
	}
	return "OPCODE_" + strconv.Itoa(int(o))
}

// SendFlags modify a send work request (enum ibv_send_flags).
type SendFlags uint8

const (
	// Fence waits for all earlier READs and atomics of this queue.
	Fence SendFlags = 1
	// Signaled asks for a completion on success; failures always complete.
	Signaled SendFlags = 2
	// Solicited asks the peer to notify waiters that armed for solicited events only.
	Solicited SendFlags = 4
	// Inline copies the data at post time: the buffer may be reused at once.
	Inline SendFlags = 8
)

// QPType is a transport service (enum ibv_qp_type).
type QPType uint8

// The services that exist here.
const (
	// GSI is QP1, the unreliable datagram QP that carries management datagrams.
	GSI QPType = 1
	// RC is reliable connected: in order, exactly once.
	RC QPType = 2
	// UC is unreliable connected: in order, messages may be lost.
	UC QPType = 3
	// UD is unreliable datagram: one packet a message, any peer.
	UD QPType = 4
)

// String returns the service's abbreviation.
func (t QPType) String() string {
	switch t {
	case GSI:
		return "GSI"
	case RC:
		return "RC"
	case UC:
		return "UC"
	case UD:
		return "UD"
	}
	return "QPT_" + strconv.Itoa(int(t))
}

// Access says what may be done to a memory region or through a queue pair (enum
// ibv_access_flags). The zero value allows local reading only.
type Access uint16

const (
	// LocalWrite lets receives, READs and atomics of this side write the memory.
	LocalWrite Access = 1
	// RemoteWrite lets the peer RDMA WRITE; it requires LocalWrite.
	RemoteWrite Access = 2
	// RemoteRead lets the peer RDMA READ.
	RemoteRead Access = 4
	// RemoteAtomic lets the peer execute atomics; it requires LocalWrite.
	RemoteAtomic Access = 8
	// MWBind lets memory windows be bound to the region.
	MWBind Access = 16
	// AccessAll is every flag that exists.
	AccessAll = LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic | MWBind
)
