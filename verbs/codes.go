package verbs

import (
	"math/bits"
	"time"
)

// AckTimeout is a 5-bit time code: 0 means never, n means 4.096 us times 2^n
// (IBTA Vol 1, 9.7.6.1.3). QP timeouts and CM response timeouts use it.
type AckTimeout uint8

// MaxAckTimeout is the largest code, about 2.4 hours.
const MaxAckTimeout AckTimeout = 31

// Duration returns the time a code stands for; 0 for code 0, which means never.
func (c AckTimeout) Duration() time.Duration {
	if c == 0 {
		return 0
	}
	return 4096 * time.Nanosecond << (c & 31)
}

// AckTimeoutFor returns the smallest code whose time is at least d, at least 1.
func AckTimeoutFor(d time.Duration) AckTimeout {
	if d <= 8192 {
		return 1
	}
	units := uint64(d+4095) / 4096
	return min(MaxAckTimeout, AckTimeout(bits.Len64(units-1)))
}

// RNRTimer is the 5-bit code in an RNR NAK: how long the requester must wait at
// the least (IBTA Vol 1, table 46). Code 0 is the longest, 655.36 ms.
type RNRTimer uint8

// MaxRNRTimer is the largest code, 491.52 ms.
const MaxRNRTimer RNRTimer = 31

// rnrTens is each code's time in units of 10 us.
var rnrTens = [32]uint32{
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

// Duration returns the time a code stands for.
func (c RNRTimer) Duration() time.Duration {
	return time.Duration(rnrTens[c&31]) * 10 * time.Microsecond
}
