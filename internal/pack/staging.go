package pack

import "github.com/valyala/bytebufferpool"

// Staging is a pool of byte buffers for what is packed and unpacked on its way. Buffers
// belong to nobody while nothing is under way, so an idle connection holds none. The zero
// value is ready; any goroutine may use it.
type Staging struct{ pool bytebufferpool.Pool }

// Buffer is a buffer of a Staging.
type Buffer = bytebufferpool.ByteBuffer

// Get returns an empty buffer with room for n bytes.
func (s *Staging) Get(n int) *Buffer {
	b := s.pool.Get()
	if cap(b.B) < n {
		b.B = make([]byte, 0, n)
	}
	return b
}

// Put takes a buffer back; nil is allowed. Who puts must not touch it afterwards.
func (s *Staging) Put(b *Buffer) {
	if b == nil {
		return
	}
	// The pool learns from lengths what sizes to keep, and drops what is larger. A packed
	// block is short in a buffer that had to be long.
	b.B = b.B[:cap(b.B)]
	s.pool.Put(b)
}
