package verbs

import "errors"

// Errors of posting and modifying, shared by every layer. They are matched with
// errors.Is; the data path returns them bare, so that it allocates nothing.
var (
	// ErrQueueFull: the send or receive queue has no free slot; poll completions
	// and post again (ENOMEM in libibverbs).
	ErrQueueFull = errors.New("doorbell: work queue full")
	// ErrBadState: the queue pair's state does not allow this.
	ErrBadState = errors.New("doorbell: not allowed in this queue pair state")
	// ErrBadWR: the work request is malformed (EINVAL in libibverbs).
	ErrBadWR = errors.New("doorbell: malformed work request")
	// ErrBadOpcode: the QP type does not offer this operation.
	ErrBadOpcode = errors.New("doorbell: operation not offered by this queue pair type")
	// ErrTooManySGE: the SGList is longer than the queue pair was created for.
	ErrTooManySGE = errors.New("doorbell: more SGEs than the queue pair was created for")
	// ErrInlineTooBig: the inline data exceeds the queue pair's MaxInlineData.
	ErrInlineTooBig = errors.New("doorbell: inline data exceeds the queue pair's MaxInlineData")
	// ErrTooLong: the message exceeds 2^31 bytes, or one MTU on UD.
	ErrTooLong = errors.New("doorbell: message too long")
	// ErrBadAttr: a modify names an attribute that is missing, not allowed in this
	// transition or out of range; nothing was changed.
	ErrBadAttr = errors.New("doorbell: invalid attribute")
	// ErrBadKey: an L_Key or R_Key names no live region of this protection domain.
	ErrBadKey = errors.New("doorbell: unknown memory key")
)

// MaxMessage is the longest message in bytes (IBTA Vol 1, 9.7.7: 2^31).
const MaxMessage = 1 << 31
