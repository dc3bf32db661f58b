//go:build doorbelldebug

package qp

// debug checks the invariants after every packet in and out.
const debug = true
