package main

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"hash/fnv"
)

// An entry of the table. Its size is a multiple of 8, so that the lock is aligned.
const (
	offLock     = 0
	offVersion  = 8
	offChecksum = 16
	offLengths  = 20
	offKey      = 24
	entryLen    = 8192
	keyLen      = 64
	valueLen    = entryLen - offKey - keyLen
	entries     = 256
)

// The lock is a number as the machine stores it, for atomics work on that; the rest is
// big-endian.

var (
	errTorn  = errors.New("the entry is being written")
	errNoKey = errors.New("no such key")
)

// slot returns where a key's entry may be: at its hash, or after it.
func slot(key string, probe int) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // a hash takes everything
	return (int(h.Sum32()%entries) + probe) % entries
}

// entry is a copy of an entry as it was read.
type entry []byte

func (e entry) version() uint64 { return binary.BigEndian.Uint64(e[offVersion:]) }

func (e entry) checksum() uint32 {
	sum := crc32.ChecksumIEEE(e[offVersion:offChecksum])
	k, v := e.lengths()
	return crc32.Update(sum, crc32.IEEETable, e[offLengths:offKey+k+v])
}

// lengths returns the lengths of key and value, cut to what fits, whatever was read.
func (e entry) lengths() (k, v int) {
	k = min(int(binary.BigEndian.Uint16(e[offLengths:])), keyLen)
	v = min(int(binary.BigEndian.Uint16(e[offLengths+2:])), valueLen)
	return k, v
}

// parse returns key and value of an entry that is whole, an empty key for one never used, and
// errTorn for one that was read while it was written.
func (e entry) parse() (key string, value []byte, err error) {
	if e.version() == 0 {
		return "", nil, nil
	}
	if binary.BigEndian.Uint32(e[offChecksum:]) != e.checksum() {
		return "", nil, errTorn
	}
	k, v := e.lengths()
	return string(e[offKey : offKey+k]), e[offKey+k : offKey+k+v], nil
}

// fill makes an entry of the next version.
func (e entry) fill(version uint64, key string, value []byte) (n int, err error) {
	if len(key) == 0 || len(key) > keyLen || len(value) > valueLen {
		return 0, errors.New("a key has 1 to 64 bytes, a value at most 8104")
	}
	binary.BigEndian.PutUint64(e[offVersion:], version)
	binary.BigEndian.PutUint16(e[offLengths:], uint16(len(key)))
	binary.BigEndian.PutUint16(e[offLengths+2:], uint16(len(value)))
	n = offKey + copy(e[offKey:], key)
	n += copy(e[n:], value)
	binary.BigEndian.PutUint32(e[offChecksum:], e.checksum())
	return n, nil
}

// native reads what an atomic has found.
func native(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }
