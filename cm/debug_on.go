//go:build doorbelldebug

package cm

// debug checks the bookkeeping after every MAD and every timer.
const debug = true
