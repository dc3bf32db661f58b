package transport

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Errors, matched with errors.Is. The data path returns them bare.
var (
	// ErrQueueFull: the send or receive queue has no free slot; poll and post again.
	ErrQueueFull = verbs.ErrQueueFull
	// ErrBadState: the queue pair's state does not allow this.
	ErrBadState = verbs.ErrBadState
	// ErrBadKey: a key names no live region.
	ErrBadKey = verbs.ErrBadKey
	// ErrClosed: the object, or the device under it, is closed. It is net.ErrClosed.
	ErrClosed error = closedError{}
	// ErrInUse: something still depends on the object (EBUSY).
	ErrInUse = errors.New("transport: still in use")
	// ErrUnreachable: the peer did not answer in time. It is os.ErrDeadlineExceeded.
	ErrUnreachable error = unreachableError{}
	// ErrManaged: Dial and Accept drive this queue pair; only ERR may be asked for.
	ErrManaged = errors.New("transport: the connection drives this queue pair; only a move to ERR may be asked for")
	// ErrCQOverrun: a completion was lost because the completion queue was full; the
	// queue and all queue pairs on it are of no more use (CQ_ERR).
	ErrCQOverrun = errors.New("transport: completion queue overrun")
	// ErrDisconnected: the connection has ended.
	ErrDisconnected = errors.New("transport: disconnected")
)

type closedError struct{}

func (closedError) Error() string        { return "transport: closed" }
func (closedError) Is(target error) bool { return target == net.ErrClosed }

type unreachableError struct{}

func (unreachableError) Error() string        { return "transport: no answer from the peer" }
func (unreachableError) Is(target error) bool { return target == os.ErrDeadlineExceeded }
func (unreachableError) Timeout() bool        { return true }
func (unreachableError) Temporary() bool      { return true }

// RejectError is the peer's refusal of a connection.
type RejectError struct {
	Reason verbs.RejectReason
	// PrivateData is what the peer sent along, zero-padded to 148 bytes as on the wire.
	PrivateData []byte
}

func (e *RejectError) Error() string {
	return fmt.Sprintf("transport: connection refused: %v", e.Reason)
}
