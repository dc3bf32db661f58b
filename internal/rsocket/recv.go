package rsocket

import "math/bits"

// receiver is the state of what we receive. Positions count bytes since the beginning, modulo
// 2^32; the ring is used half by half.
//
//	read <= arrived <= granted <= read + ring
type receiver struct {
	half    uint32
	credits int

	arrived, granted uint32
	position         uint32 // of the next byte to read, in the ring
	next             uint32 // the half to grant next, 0 or 1
	avail            uint32 // bytes that wait to be read
	free             uint32 // bytes read and not granted again

	// lengths of the DATA messages that wait, the first one's being what is left of it; first
	// and count index it modulo its length, a power of two.
	lengths      []uint32
	first, count int

	seq     uint16 // messages read to their end
	told    uint16 // seq when the peer last heard of it
	discard bool   // nobody will read what comes
}

func (r *receiver) init(cfg *Config) {
	r.half, r.credits = cfg.Ring.Length/2, cfg.Credits
	r.granted, r.free, r.next = r.half, r.half, 1
	r.lengths = make([]uint32, 1<<bits.Len(uint(cfg.Credits-1)))
}

// data takes note of a DATA message of n bytes.
func (r *receiver) data(n uint32) error {
	switch {
	case n == 0:
		return violation("DATA without data")
	case r.count >= r.credits:
		return violation("a message beyond its %d credits", r.credits)
	case n > r.granted-r.arrived:
		return violation("%d bytes, where %d are left in its buffers", n, r.granted-r.arrived)
	case (r.granted-r.arrived-1)%r.half+1 < n:
		return violation("a message of %d bytes across the end of a buffer", n)
	}
	r.arrived += n
	r.lengths[(r.first+r.count)&(len(r.lengths)-1)] = n
	r.count++
	r.avail += n
	if r.discard {
		r.consume(n)
	}
	return nil
}

func (r *receiver) consume(n uint32) {
	r.avail -= n
	r.free += n
	if r.position += n; r.position >= 2*r.half {
		r.position -= 2 * r.half
	}
	for n > 0 {
		l := &r.lengths[r.first]
		d := min(n, *l)
		*l -= d
		n -= d
		if *l == 0 {
			r.first = (r.first + 1) & (len(r.lengths) - 1)
			r.count--
			r.seq++
		}
	}
}

// Readable returns where the bytes are that wait to be read: n from offset in the receive
// ring, then more from its beginning.
func (c *Conn) Readable() (offset, n, more int) {
	r := &c.recv
	n = int(min(r.avail, 2*r.half-r.position))
	return int(r.position), n, int(r.avail) - n
}

// Consume takes note that n bytes of them have been read.
func (c *Conn) Consume(n int) {
	if n < 0 || uint32(n) > c.recv.avail {
		panic("BUG: rsocket: more bytes read than have come")
	}
	c.recv.consume(uint32(n))
}

// EOF reports whether everything was read and nothing more will come.
func (c *Conn) EOF() bool { return c.recv.avail == 0 && (c.ctrl.peerShut || c.ctrl.peerGone) }
