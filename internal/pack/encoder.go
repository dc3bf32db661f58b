package pack

import (
	"sync/atomic"

	"github.com/klauspost/compress"
	"github.com/klauspost/compress/s2"
)

// MinLen is the shortest input that is worth packing, in bytes: below it a packet saves
// nothing that anybody could measure.
const MinLen = 256

// Encoder packs blocks by one method. It may be used by any number of goroutines; what it
// keeps is its opinion of the data. The zero value packs nothing.
type Encoder struct {
	method Method

	// skip is how many blocks are let through without a look, streak how many looks in a row
	// found nothing to gain. Goroutines that race here lose a count at worst.
	skip, streak atomic.Int32
}

// NewEncoder returns an encoder for a method.
func NewEncoder(m Method) *Encoder { return &Encoder{method: m} }

// Method returns the encoder's method.
func (e *Encoder) Method() Method { return e.method }

// maxStreak bounds the back-off: data that begins to compress is noticed after 1<<maxStreak
// blocks at the latest.
const maxStreak = 6

// PackedLen is the room that Pack wants in dst for n bytes, so that it allocates nothing.
func PackedLen(n int) int { return HeaderLen + max(s2.MaxEncodedLen(n), n+n>>7+64) }

// Pack appends src as a block to dst and reports true if that is smaller than src by at least
// a sixteenth; else it returns dst as it was and false, and src is to be sent as it is.
// Input longer than MaxBlock or shorter than MinLen is never packed.
func (e *Encoder) Pack(dst, src []byte) ([]byte, bool) {
	if e.method == None || len(src) < MinLen || len(src) > MaxBlock {
		return dst, false
	}
	if s := e.skip.Load(); s > 0 {
		e.skip.Add(-1)
		return dst, false
	}
	if !promising(e.method, src) {
		e.gaveUp()
		return dst, false
	}
	at := len(dst)
	dst = grow(dst, PackedLen(len(src)))[:at+HeaderLen]
	body := dst[at+HeaderLen:]
	var packed []byte
	if e.method == S2 {
		packed = s2.Encode(body[:cap(body)], src)
	} else {
		packed = zstdEncoder().EncodeAll(src, body[:0])
	}
	if HeaderLen+len(packed) > len(src)-len(src)/16 {
		e.gaveUp()
		return dst[:at], false
	}
	e.streak.Store(0)
	Header{Method: e.method, Raw: len(src), Packed: len(packed)}.put(dst[at:])
	if cap(body) < len(packed) || &body[:1][0] != &packed[0] {
		return append(dst, packed...), true // it outgrew the room
	}
	return dst[:at+HeaderLen+len(packed)], true
}

// gaveUp backs off: twice as many blocks as the last time pass unlooked at.
func (e *Encoder) gaveUp() {
	n := min(e.streak.Add(1), maxStreak)
	e.skip.Store(1<<n - 1)
}

// Samples: pieces of sampleLen bytes from the beginning, the middle and the end; a block
// that is not much longer than them is better packed than sampled.
const (
	sampleLen = 1024
	sampled   = 8 * sampleLen
)

// promising reports whether samples of a large block look as if packing it would pay.
func promising(m Method, src []byte) bool {
	if len(src) < sampled {
		return true
	}
	for i := range 3 {
		off := i * (len(src) - sampleLen) / 2
		piece := src[off : off+sampleLen]
		const worth = sampleLen - sampleLen/16
		if n := s2.EstimateBlockSize(piece); n >= 0 && n < worth {
			return true
		}
		// Bytes of few kinds in no order: nothing for S2, food for zstd's entropy coder.
		// One piece has to do: counting bytes takes longer than S2's estimate of all three.
		if m == Zstd && i == 1 && compress.ShannonEntropyBits(piece) < worth*8*15/16 {
			return true
		}
	}
	return false
}

// grow returns b with room for n more bytes.
func grow(b []byte, n int) []byte {
	if cap(b)-len(b) >= n {
		return b
	}
	bigger := make([]byte, len(b), len(b)+n)
	copy(bigger, b)
	return bigger
}
