package verbs

import "strconv"

// MTU is a path MTU code (IBTA Vol 1, 9.3 and enum ibv_mtu): the largest payload
// of one packet, headers not counted. The zero value is no MTU.
type MTU uint8

// The five path MTUs that exist.
const (
	MTU256  MTU = 1
	MTU512  MTU = 2
	MTU1024 MTU = 3
	MTU2048 MTU = 4
	MTU4096 MTU = 5
)

// Valid reports whether m is one of the five.
func (m MTU) Valid() bool { return m >= MTU256 && m <= MTU4096 }

// Bytes returns the payload size, 256 to 4096, or 0 for an invalid code.
func (m MTU) Bytes() int {
	if !m.Valid() {
		return 0
	}
	return 128 << m
}

// String prints the payload size.
func (m MTU) String() string { return strconv.Itoa(m.Bytes()) }

// MTUForBytes returns the code whose payload is exactly n bytes.
func MTUForBytes(n int) (MTU, bool) {
	for m := MTU256; m <= MTU4096; m++ {
		if m.Bytes() == n {
			return m, true
		}
	}
	return 0, false
}

// MTUForLink returns the largest path MTU that a link of n bytes (its IP MTU) can
// carry, as Linux rxe computes it: 80 bytes are kept for headers, so 1500 gives
// 1024 and 4200 gives 4096. It returns 0 when not even 256 bytes fit.
func MTUForLink(n int) MTU {
	for m := MTU4096; m >= MTU256; m-- {
		if m.Bytes() <= n-80 {
			return m
		}
	}
	return 0
}
