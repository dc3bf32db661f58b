package roce

import (
	"encoding/binary"
	"hash/crc32"
)

// The CRC here is IEEE 802.3's, reflected, as in hash/crc32. A "register" is its raw
// value: it starts as all ones, and its complement is the checksum that hash/crc32
// returns. In a register bit 31 is the coefficient of x^0 and bit 0 that of x^31, and
// appending a zero byte multiplies the register by x^8 modulo the polynomial. That map is
// linear, so the effect of a few bytes can be added or taken away by exclusive or, which
// is what makes a Path cheap and Path.Solve possible.

// slicing holds the registers that a byte becomes when k more bytes of zero follow it,
// k = 0 to 7; slicing[0] is the familiar byte-wise table. A byte at the far end of a
// machine word can so be looked up in one step.
var slicing = func() (t [8][256]uint32) {
	t[0] = *crc32.IEEETable
	for k := 1; k < len(t); k++ {
		for i, r := range t[k-1] {
			t[k][i] = r>>8 ^ t[0][byte(r)]
		}
	}
	return t
}()

// crcShort advances register r over b. It serves headers and tails, which are too short
// for hash/crc32's vector code to pay.
func crcShort(r uint32, b []byte) uint32 {
	for len(b) >= 8 {
		r = crcWord(r, binary.LittleEndian.Uint64(b))
		b = b[8:]
	}
	if len(b) >= 4 {
		r = crcZero4(r ^ binary.LittleEndian.Uint32(b))
		b = b[4:]
	}
	for _, c := range b {
		r = r>>8 ^ slicing[0][byte(r)^c]
	}
	return r
}

// crcWord advances register r over 8 bytes, the first one in the low bits of w.
func crcWord(r uint32, w uint64) uint32 {
	w ^= uint64(r)
	return slicing[7][byte(w)] ^ slicing[6][byte(w>>8)] ^ slicing[5][byte(w>>16)] ^ slicing[4][byte(w>>24)] ^
		slicing[3][byte(w>>32)] ^ slicing[2][byte(w>>40)] ^ slicing[1][byte(w>>48)] ^ slicing[0][byte(w>>56)]
}

// crcZero4 advances register r over 4 zero bytes: r times x^32.
func crcZero4(r uint32) uint32 {
	return slicing[3][byte(r)] ^ slicing[2][byte(r>>8)] ^ slicing[1][byte(r>>16)] ^ slicing[0][r>>24]
}

// crcBulk is the length in bytes from which hash/crc32 uses the processor's own help.
const crcBulk = 64

// crcLong advances register r over b. hash/crc32's vector code takes 16 bytes at a time
// and leaves the rest to a loop over bytes, so the odd bytes go first, by words.
func crcLong(r uint32, b []byte) uint32 {
	if odd := len(b) & 15; odd != 0 || len(b) < crcBulk {
		if len(b) < crcBulk {
			odd = len(b)
		}
		r = crcShort(r, b[:odd])
		b = b[odd:]
	}
	if len(b) == 0 {
		return r
	}
	return ^crc32.Update(^r, crc32.IEEETable, b)
}

// crcMul multiplies two registers as polynomials modulo the CRC's. The carry-less
// product comes from integer multiplications of operands with three zero bits between
// neighbours: at most 8 of them meet in one place, and 8 does not carry into the next.
func crcMul(a, b uint32) uint32 {
	const m = 0x1111111111111111
	x0, x1, x2, x3 := uint64(a)&m, uint64(a)&(m<<1), uint64(a)&(m<<2), uint64(a)&(m<<3)
	y0, y1, y2, y3 := uint64(b)&m, uint64(b)&(m<<1), uint64(b)&(m<<2), uint64(b)&(m<<3)
	z := (x0*y0 ^ x1*y3 ^ x2*y2 ^ x3*y1) & m
	z |= (x0*y1 ^ x1*y0 ^ x2*y3 ^ x3*y2) & (m << 1)
	z |= (x0*y2 ^ x1*y1 ^ x2*y0 ^ x3*y3) & (m << 2)
	z |= (x0*y3 ^ x1*y2 ^ x2*y1 ^ x3*y0) & (m << 3)
	// Bit 62 of z is the coefficient of x^0, bit 0 that of x^62. The upper register is
	// reduced already; the lower one still has to be multiplied by x^32.
	z <<= 1
	return uint32(z>>32) ^ crcZero4(uint32(z))
}

// unshift[0][i] is the register x^(-8i), unshift[1][i] the register x^(-8*256*i): times
// these, a register goes backwards over zero bytes, 0 to 65535 of them in two steps.
var unshift = func() (t [2][256]uint32) {
	// x divides x^32 + ... + 1 minus 1, so x^(-1) is the polynomial without its lowest
	// term, shifted down; one bit after another, eight make x^(-8).
	const one = 1 << 31
	back := func(r uint32) uint32 { // r / x
		if r&one != 0 {
			return (r^crc32.IEEE)<<1 | 1
		}
		return r << 1
	}
	step := uint32(one)
	for range 8 {
		step = back(step)
	}
	for k := range t {
		t[k][0] = one
		for i := 1; i < 256; i++ {
			t[k][i] = crcMul(t[k][i-1], step)
		}
		step = crcMul(t[k][255], step)
	}
	return t
}()

// crcRewind takes register r back over n zero bytes, n being at most 65535.
func crcRewind(r uint32, n int) uint32 {
	return crcMul(crcMul(r, unshift[0][n&0xFF]), unshift[1][n>>8&0xFF])
}
