package pack

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// HeaderLen is the length of a block's header in bytes.
//
//	0  method  1  Method
//	1  raw     4  bytes that the block stands for, big-endian
//	5  packed  4  bytes that follow the header; equal to raw for None, smaller else
const HeaderLen = 9

// MaxBlock is the most bytes that one block may stand for. Who agrees on less says so to the
// Decoder.
const MaxBlock = 1 << 24

// Errors of a peer's blocks.
var (
	// ErrCorrupt: a block that contradicts itself, or does not unpack.
	ErrCorrupt = errors.New("pack: corrupt block")
	// ErrTooLarge: a block that says it stands for more than was agreed.
	ErrTooLarge = errors.New("pack: block exceeds the agreed limit")
)

// Header is what stands before a block's bytes.
type Header struct {
	Method Method
	Raw    int
	Packed int
}

// put writes the header into the first HeaderLen bytes of b.
func (h Header) put(b []byte) {
	b[0] = byte(h.Method)
	binary.BigEndian.PutUint32(b[1:], uint32(h.Raw))
	binary.BigEndian.PutUint32(b[5:], uint32(h.Packed))
}

// ParseHeader reads and checks the header at the beginning of b. The lengths that it returns
// are safe to allocate: raw is at most limit, packed at most raw. It fails with ErrTooLarge
// and ErrCorrupt.
func ParseHeader(b []byte, limit int) (h Header, err error) {
	if len(b) < HeaderLen {
		return h, fmt.Errorf("%w: %d bytes are no header", ErrCorrupt, len(b))
	}
	raw, packed := binary.BigEndian.Uint32(b[1:]), binary.BigEndian.Uint32(b[5:])
	m := Method(b[0])
	if uint64(raw) > uint64(limit) {
		return h, fmt.Errorf("%w: it stands for %d bytes, want at most %d", ErrTooLarge, raw, limit)
	}
	switch {
	case !m.Valid():
		return h, fmt.Errorf("%w: unknown %v", ErrCorrupt, m)
	case raw == 0:
		return h, fmt.Errorf("%w: it stands for nothing", ErrCorrupt)
	case m == None && packed != raw, m != None && (packed == 0 || packed >= raw):
		return h, fmt.Errorf("%w: %v of %d bytes in %d", ErrCorrupt, m, raw, packed)
	}
	return Header{Method: m, Raw: int(raw), Packed: int(packed)}, nil
}
