package pack

import (
	"sync"

	"github.com/klauspost/compress/zstd"
)

// A zstd coder holds a megabyte and serves any number of goroutines, so the process has one
// of each, made when it is first needed, not each connection: as many blocks are worked at
// at a time as there are processors. They remember nothing from block to block.

// zstdWindow is the encoder's window, as large as the blocks that are usual.
const zstdWindow = 1 << 18

var zstdEncoder = sync.OnceValue(func() *zstd.Encoder {
	// What travels is under the ICRC; a checksum in the frame would be a third one.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(zstdWindow),
		zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true), zstd.WithAllLitEntropyCompression(true))
	if err != nil {
		panic("BUG: pack: " + err.Error())
	}
	return e
})

var zstdDecoder = sync.OnceValue(func() *zstd.Decoder {
	// DecodeAll writes into the caller's memory and stops where that ends. The limits are
	// for what a hostile frame asks for beside it.
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(MaxBlock), zstd.WithDecoderMaxWindow(MaxBlock), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic("BUG: pack: " + err.Error())
	}
	return d
})
