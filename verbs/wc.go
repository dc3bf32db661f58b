package verbs

import "strconv"

// WCOpcode says what a completion completes (enum ibv_wc_opcode).
type WCOpcode uint8

// What can complete.
const (
	WCSend            WCOpcode = 0
	WCRDMAWrite       WCOpcode = 1
	WCRDMARead        WCOpcode = 2
	WCCompSwap        WCOpcode = 3
	WCFetchAdd        WCOpcode = 4
	WCBindMW          WCOpcode = 5
	WCLocalInv        WCOpcode = 6
	WCRecv            WCOpcode = 128
	WCRecvRDMAWithImm WCOpcode = 129
	wcRecvBit         WCOpcode = 128
)

// IsRecv reports whether the completion belongs to a receive queue.
func (o WCOpcode) IsRecv() bool { return o&wcRecvBit != 0 }

// String returns libibverbs' name without the prefix.
func (o WCOpcode) String() string {
	switch o {
	case WCSend:
		return "SEND"
	case WCRDMAWrite:
		return "RDMA_WRITE"
	case WCRDMARead:
		return "RDMA_READ"
	case WCCompSwap:
		return "COMP_SWAP"
	case WCFetchAdd:
		return "FETCH_ADD"
	case WCBindMW:
		return "BIND_MW"
	case WCLocalInv:
		return "LOCAL_INV"
	case WCRecv:
		return "RECV"
	case WCRecvRDMAWithImm:
		return "RECV_RDMA_WITH_IMM"
	}
	return "WC_OPCODE_" + strconv.Itoa(int(o))
}

// WCFlags say which optional fields of a completion are set (enum ibv_wc_flags).
type WCFlags uint8

const (
	// WithGRH: the first 40 bytes of the receive buffer hold the GRH (UD).
	WithGRH WCFlags = 1
	// WithImm: ImmData is valid.
	WithImm WCFlags = 2
	// WithInv: InvalidatedRKey is valid.
	WithInv WCFlags = 8
	// WithSolicited: the peer asked for a solicited event.
	WithSolicited WCFlags = 16
)

// WC is a work completion (struct ibv_wc). When Status is not WCSuccess only WRID,
// Status and QPN mean anything. It holds no pointers.
type WC struct {
	WRID uint64
	// ByteLen is the length of a received message, of a WRITE with immediate, or of
	// a READ; for UD it includes the 40 bytes of the GRH.
	ByteLen uint32
	ImmData uint32
	// InvalidatedRKey is the key that a SEND with invalidate took away.
	InvalidatedRKey uint32
	QPN             QPN
	// SrcQPN is the sender's number (UD).
	SrcQPN QPN
	Status WCStatus
	Opcode WCOpcode
	Flags  WCFlags
}

// Err returns nil for a success and the status otherwise.
func (wc *WC) Err() error {
	if wc.Status == WCSuccess {
		return nil
	}
	return wc.Status
}

// WCStatus is how a work request ended (enum ibv_wc_status). It implements error and
// is compared with errors.Is; converting one to error does not allocate.
type WCStatus uint8

// How work ends.
const (
	WCSuccess      WCStatus = 0
	LocLenErr      WCStatus = 1
	LocQPOpErr     WCStatus = 2
	LocEECOpErr    WCStatus = 3
	LocProtErr     WCStatus = 4
	WRFlushErr     WCStatus = 5
	MWBindErr      WCStatus = 6
	BadRespErr     WCStatus = 7
	LocAccessErr   WCStatus = 8
	RemInvReqErr   WCStatus = 9
	RemAccessErr   WCStatus = 10
	RemOpErr       WCStatus = 11
	RetryExcErr    WCStatus = 12
	RNRRetryExcErr WCStatus = 13
	LocRDDViolErr  WCStatus = 14
	RemInvRDReqErr WCStatus = 15
	RemAbortErr    WCStatus = 16
	InvEECNErr     WCStatus = 17
	InvEECStateErr WCStatus = 18
	FatalErr       WCStatus = 19
	RespTimeoutErr WCStatus = 20
	GeneralErr     WCStatus = 21
)

var wcStatus = [...]struct{ name, text string }{
	{"SUCCESS", "success"},
	{"LOC_LEN_ERR", "the message is longer than the receive buffer or the path allows"},
	{"LOC_QP_OP_ERR", "the work request is malformed"},
	{"LOC_EEC_OP_ERR", "local EE context operation error"},
	{"LOC_PROT_ERR", "an SGE's L_Key is unknown, out of range, of another PD or lacks the access right"},
	{"WR_FLUSH_ERR", "flushed: the queue pair is in error or being closed"},
	{"MW_BIND_ERR", "the memory window could not be bound"},
	{"BAD_RESP_ERR", "the peer's response does not fit the request"},
	{"LOC_ACCESS_ERR", "the peer's WRITE with immediate hit a protection error here"},
	{"REM_INV_REQ_ERR", "the peer found the request invalid"},
	{"REM_ACCESS_ERR", "the peer's R_Key does not allow this access"},
	{"REM_OP_ERR", "the peer could not complete the operation"},
	{"RETRY_EXC_ERR", "no answer from the peer within the retry budget"},
	{"RNR_RETRY_EXC_ERR", "the peer had no receive posted within the RNR retry budget"},
	{"LOC_RDD_VIOL_ERR", "local RDD violation"},
	{"REM_INV_RD_REQ_ERR", "remote invalid RD request"},
	{"REM_ABORT_ERR", "the peer aborted the operation"},
	{"INV_EECN_ERR", "invalid EE context number"},
	{"INV_EEC_STATE_ERR", "invalid EE context state"},
	{"FATAL_ERR", "fatal device error"},
	{"RESP_TIMEOUT_ERR", "no response in time"},
	{"GENERAL_ERR", "general error"},
}

// String returns libibverbs' name without the prefix.
func (s WCStatus) String() string {
	if int(s) < len(wcStatus) {
		return wcStatus[s].name
	}
	return "WC_STATUS_" + strconv.Itoa(int(s))
}

// Error names the status and what usually causes it.
func (s WCStatus) Error() string {
	if int(s) < len(wcStatus) {
		return wcStatus[s].name + ": " + wcStatus[s].text
	}
	return s.String()
}
