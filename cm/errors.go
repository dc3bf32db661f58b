package cm

import "errors"

// Errors of the calls. A call that fails has changed nothing and sends nothing.
var (
	// ErrUnknownConn: no connection has this ID (any more).
	ErrUnknownConn = errors.New("cm: no such connection")
	// ErrState: the connection's state does not allow the call.
	ErrState = errors.New("cm: not allowed in this state of the connection")
	// ErrEstablished: Established or Ready was called for a connection that is
	// established already (EISCONN of ib_cm_notify); harmless.
	ErrEstablished = errors.New("cm: connection is established already")
	// ErrPrivateData: the private data is longer than the message has room for.
	ErrPrivateData = errors.New("cm: private data too long")
	// ErrServiceInUse: somebody listens on this service ID.
	ErrServiceInUse = errors.New("cm: service ID in use")
	// ErrAddress: the path's addresses are missing, of different families, multicast or unspecified.
	ErrAddress = errors.New("cm: unusable address")
	// ErrParam: a parameter is out of its range.
	ErrParam = errors.New("cm: parameter out of range")
	// ErrNoIDs: all communication IDs are in use or in timewait; try again later.
	ErrNoIDs = errors.New("cm: out of communication IDs")
)
