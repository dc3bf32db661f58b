package mr

import (
	"sync/atomic"
	"unsafe"
)

// pageOffset returns the buffer's address modulo PageSize. Only the number is kept; Go's
// collector does not move heap objects, and were it to, only alignment would suffer.
func pageOffset(buf []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(buf))) % PageSize)
}

// atomicWord views 8 bytes as an atomic word. The caller has checked the length, and that
// the address a peer named is a multiple of 8: region addresses are congruent to memory
// addresses modulo PageSize, so the word is aligned in memory too.
func atomicWord(b []byte) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b[:8])))
}
