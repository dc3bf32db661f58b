package transport

import (
	"fmt"

	"github.com/doorbell-rdma/doorbell/internal/pack"
)

// Compression is how messages ([MessageConfig]) are made smaller on their way. The zero value
// is not at all. docs/compression.md says when it pays.
type Compression uint8

const (
	// CompressNone sends everything as it is.
	CompressNone = Compression(pack.None)
	// CompressS2 is for speed.
	CompressS2 = Compression(pack.S2)
	// CompressZstd is for ratio: smaller than S2, at several times the work.
	CompressZstd = Compression(pack.Zstd)
)

// String returns none, s2 or zstd.
func (c Compression) String() string { return pack.Method(c).String() }

// check refuses a number that names no method.
func (c Compression) check() error {
	if !pack.Method(c).Valid() {
		return fmt.Errorf("transport: Compression is %d, want CompressNone, CompressS2 or CompressZstd", uint8(c))
	}
	return nil
}

// accepts returns the methods that a side takes from its peer: all, if it compresses itself.
func (c Compression) accepts() pack.Set {
	if c == CompressNone {
		return 0
	}
	return pack.SetOf(pack.S2, pack.Zstd)
}

// towards returns what a side that is configured for c sends with to a peer that accepts s.
func (c Compression) towards(s pack.Set) Compression {
	if c.accepts() == 0 || !s.Has(pack.Method(c)) {
		return CompressNone
	}
	return c
}
