//go:build !doorbelldebug

package qp

// debug is off: tests call check themselves.
const debug = false
