package verbs

import "strconv"

// RejectReason says why a connection was refused (IBTA Vol 1, table 108).
type RejectReason uint16

// Reasons in use.
const (
	RejectNoQP                 RejectReason = 1
	RejectNoResources          RejectReason = 3
	RejectTimeout              RejectReason = 4
	RejectUnsupportedRequest   RejectReason = 5
	RejectInvalidCommID        RejectReason = 6
	RejectInvalidCommInstance  RejectReason = 7
	RejectInvalidServiceID     RejectReason = 8
	RejectInvalidTransportType RejectReason = 9
	RejectStaleConn            RejectReason = 10
	RejectInvalidGID           RejectReason = 12
	RejectInvalidMTU           RejectReason = 26
	RejectInsufficientResp     RejectReason = 27
	RejectConsumer             RejectReason = 28
	RejectInvalidRNRRetry      RejectReason = 29
	RejectDuplicateCommID      RejectReason = 30
	RejectInvalidClassVersion  RejectReason = 31
	RejectVendorOption         RejectReason = 35
)

// String explains the reason in a few words.
func (r RejectReason) String() string {
	switch r {
	case RejectNoQP:
		return "no QP available"
	case RejectNoResources:
		return "no resources"
	case RejectTimeout:
		return "timed out"
	case RejectUnsupportedRequest:
		return "unsupported request"
	case RejectInvalidCommID:
		return "invalid communication ID"
	case RejectInvalidCommInstance:
		return "invalid communication instance"
	case RejectInvalidServiceID:
		return "nobody listens on that service port"
	case RejectInvalidTransportType:
		return "transport type not offered"
	case RejectStaleConn:
		return "stale connection"
	case RejectInvalidGID:
		return "address is not the receiver's"
	case RejectInvalidMTU:
		return "path MTU not supported"
	case RejectInsufficientResp:
		return "insufficient responder resources"
	case RejectConsumer:
		return "refused by the program"
	case RejectInvalidRNRRetry:
		return "RNR retry count invalid"
	case RejectDuplicateCommID:
		return "duplicate communication ID"
	case RejectInvalidClassVersion:
		return "CM class version not supported"
	case RejectVendorOption:
		return "vendor option not supported"
	}
	return "reason " + strconv.Itoa(int(r))
}
