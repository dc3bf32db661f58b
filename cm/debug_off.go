//go:build !doorbelldebug

package cm

// debug is off: tests call check themselves.
const debug = false
