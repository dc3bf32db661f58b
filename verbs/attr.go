package verbs

import "net/netip"

// AttrMask says which attributes a [QPAttr] carries (enum ibv_qp_attr_mask).
type AttrMask uint32

// The attributes that a transition may require, allow or refuse.
const (
	AttrState            AttrMask = 1 << 0
	AttrCurState         AttrMask = 1 << 1
	AttrEnSQDAsyncNotify AttrMask = 1 << 2
	AttrAccessFlags      AttrMask = 1 << 3
	AttrPKeyIndex        AttrMask = 1 << 4
	AttrPort             AttrMask = 1 << 5
	AttrQKey             AttrMask = 1 << 6
	AttrAV               AttrMask = 1 << 7
	AttrPathMTU          AttrMask = 1 << 8
	AttrTimeout          AttrMask = 1 << 9
	AttrRetryCnt         AttrMask = 1 << 10
	AttrRNRRetry         AttrMask = 1 << 11
	AttrRQPSN            AttrMask = 1 << 12
	AttrMaxQPRdAtomic    AttrMask = 1 << 13
	AttrAltPath          AttrMask = 1 << 14
	AttrMinRNRTimer      AttrMask = 1 << 15
	AttrSQPSN            AttrMask = 1 << 16
	AttrMaxDestRdAtomic  AttrMask = 1 << 17
	AttrPathMigState     AttrMask = 1 << 18
	AttrCap              AttrMask = 1 << 19
	AttrDestQPN          AttrMask = 1 << 20
)

var attrNames = [...]string{
	"STATE", "CUR_STATE", "EN_SQD_ASYNC_NOTIFY", "ACCESS_FLAGS", "PKEY_INDEX", "PORT", "QKEY", "AV",
	"PATH_MTU", "TIMEOUT", "RETRY_CNT", "RNR_RETRY", "RQ_PSN", "MAX_QP_RD_ATOMIC", "ALT_PATH",
	"MIN_RNR_TIMER", "SQ_PSN", "MAX_DEST_RD_ATOMIC", "PATH_MIG_STATE", "CAP", "DEST_QPN",
}

// String lists the attributes' names, joined by "|"; "0" for none.
func (m AttrMask) String() string {
	s := ""
	for i, name := range attrNames {
		if m&(1<<i) != 0 {
			if s != "" {
				s += "|"
			}
			s += name
		}
	}
	if s == "" {
		return "0"
	}
	return s
}

// AV is an address vector: where the peer of a connected QP is.
type AV struct {
	// Remote is the peer's address and UDP port; port 0 means 4791.
	Remote netip.AddrPort
	// Local is our own address on that path; the zero Addr lets the device choose.
	Local netip.Addr
	// FlowLabel, TrafficClass and HopLimit travel in the IP header where the socket
	// allows it; HopLimit 0 means 64.
	FlowLabel    uint32
	TrafficClass uint8
	HopLimit     uint8
}

// QPAttr is a set of queue pair attributes (struct ibv_qp_attr); Mask says which of
// them are meant. A modify that fails changes nothing.
type QPAttr struct {
	Mask     AttrMask
	State    QPState
	CurState QPState
	// EnSQDAsyncNotify asks for an SQ_DRAINED event on the way to SQD.
	EnSQDAsyncNotify bool
	// AccessFlags is what the peer may do through this QP: RemoteWrite, RemoteRead, RemoteAtomic.
	AccessFlags Access
	// PKeyIndex must be 0: the table has one entry, the default partition 0xFFFF.
	PKeyIndex uint16
	// Port must be 1: a device has one port.
	Port uint8
	QKey uint32
	AV   AV
	// PathMTU must be the same at both ends.
	PathMTU MTU
	// DestQPN is the peer's QP: 24 bits.
	DestQPN QPN
	// RQPSN is the first PSN expected, SQPSN the first one sent: 24 bits.
	RQPSN, SQPSN PSN
	// MaxQPRdAtomic bounds our outstanding READs and atomics, MaxDestRdAtomic the
	// peer's: 0 to 128.
	MaxQPRdAtomic, MaxDestRdAtomic uint8
	// MinRNRTimer is the code put into RNR NAKs: 0 to 31, 0 being 655.36 ms.
	MinRNRTimer RNRTimer
	// Timeout is the ack timeout code: 0 to 31, 0 being never.
	Timeout AckTimeout
	// RetryCnt is the number of retries after timeouts and sequence NAKs: 0 to 7.
	RetryCnt uint8
	// RNRRetry is the number of retries after RNR NAKs: 0 to 7, 7 being without end.
	RNRRetry uint8
}

// QPCap is the size of a queue pair (struct ibv_qp_cap). Zero fields take the
// defaults written beside them.
type QPCap struct {
	MaxSendWR     int // WQEs in the send queue; 128; rounded up to a power of two
	MaxRecvWR     int // WQEs in the receive queue; 128; rounded up to a power of two
	MaxSendSGE    int // entries of an SGList; 4, at most 32
	MaxRecvSGE    int // likewise
	MaxInlineData int // bytes; 64, at most 1024; negative for none
}
