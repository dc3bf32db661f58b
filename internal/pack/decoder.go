package pack

import (
	"fmt"

	"github.com/klauspost/compress/s2"
)

// Decoder unpacks blocks of a peer that was told a limit. It has no other state and may be
// used by any number of goroutines. The zero value refuses every block.
type Decoder struct{ limit int }

// NewDecoder returns a decoder for blocks that stand for at most limit bytes, 1 to MaxBlock.
func NewDecoder(limit int) *Decoder { return &Decoder{limit: min(limit, MaxBlock)} }

// Limit returns the most bytes that a block may stand for.
func (d *Decoder) Limit() int { return d.limit }

// Len returns how many bytes block, header and all, stands for, if its header is sound and
// fits the block's length. It allocates nothing; errors are ErrCorrupt and ErrTooLarge.
func (d *Decoder) Len(block []byte) (int, error) {
	h, err := ParseHeader(block, d.limit)
	if err == nil && h.Packed != len(block)-HeaderLen {
		err = fmt.Errorf("%w: %d bytes follow the header, it says %d", ErrCorrupt, len(block)-HeaderLen, h.Packed)
	}
	return h.Raw, err
}

// Unpack writes what block, header and all, stands for into dst, whose length must be what
// Len returned. On errors dst holds anything.
func (d *Decoder) Unpack(dst, block []byte) error {
	n, err := d.Len(block)
	if err != nil {
		return err
	}
	if n != len(dst) {
		return fmt.Errorf("%w: it stands for %d bytes, there is room for %d", ErrCorrupt, n, len(dst))
	}
	return unpack(Method(block[0]), dst, block[HeaderLen:])
}

// unpack writes the body of a block into dst, which is as long as its header says.
func unpack(m Method, dst, body []byte) error {
	var out []byte
	var err error
	switch m {
	case None:
		copy(dst, body)
		return nil
	case S2:
		// S2 has a length of its own, and allocates by it.
		if n, lenErr := s2.DecodedLen(body); lenErr != nil || n != len(dst) {
			return fmt.Errorf("%w: S2 says %d bytes, the header %d", ErrCorrupt, n, len(dst))
		}
		out, err = s2.Decode(dst, body)
	case Zstd:
		out, err = zstdDecoder().DecodeAll(body, dst[:0:len(dst)])
	}
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	case len(out) != len(dst):
		return fmt.Errorf("%w: %d bytes came out, the header says %d", ErrCorrupt, len(out), len(dst))
	case &out[0] != &dst[0]:
		copy(dst, out)
	}
	return nil
}
