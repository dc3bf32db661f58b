// Package pack compresses blocks of bytes between two ends that have agreed to: a message is
// one block, a byte stream is cut into blocks.
//
// It knows nothing of connections. An [Encoder] turns bytes into a block if that makes them
// smaller, a [Decoder] turns a block back and trusts nothing that it says; a [Writer] and a
// [Reader] carry a stream of blocks over any io.Writer and io.Reader.
//
//	source -> Encoder.Pack -> block -> wire -> block -> Decoder.Unpack -> same bytes
//	             |                                         |
//	          not smaller: the caller sends them raw     lies: ErrCorrupt, ErrTooLarge
//
// Data that does not compress costs next to nothing: samples of a block decide whether it is
// worth the work, and each refusal lets more blocks pass unlooked at before the next sample.
//
// The methods are those of github.com/klauspost/compress: S2 for speed, zstd for ratio.
package pack
