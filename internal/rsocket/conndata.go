package rsocket

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrProtocol is wrapped by every error that is the peer's fault.
var ErrProtocol = errors.New("the peer breaks the rsockets protocol")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// Buffer is a piece of memory that a peer may write: Length bytes at Addr under RKey.
type Buffer struct {
	Addr   uint64
	RKey   uint32
	Length uint32
}

// check finds what makes a buffer useless.
func (b *Buffer) check() error {
	switch {
	case b.Length == 0:
		return violation("a buffer of length 0")
	case b.Addr+uint64(b.Length) < b.Addr:
		return violation("a buffer of %d bytes at %#x wraps around", b.Length, b.Addr)
	}
	return nil
}

// ConnData is what the private data of REQ and REP say. On the wire, 40 bytes, big-endian:
//
//	 0  version      1  1
//	 1  flags        1  bit 0: the sender's memory is big-endian; bit 1: I/O maps, always set
//	 2  credits      2  receives posted for DATA messages
//	 4  offer        3  zero from Linux, which ignores it; see Offer
//	 7  iomap        1  entries of the I/O map: up to 128, or bit 7 and entries / 256
//	 8  target list  8  address, where the peer writes entries for its buffers
//	16  R_Key        4
//	20  entries      4  of 16 bytes; 2
//	24  buffer       8  address of the first half of the receive ring
//	32  R_Key        4
//	36  length       4  of that half, in bytes
type ConnData struct {
	// BigEndian says that target entries for this side are big-endian.
	BigEndian bool
	// Credits is how many DATA messages the other side may send ahead: 1 to 65535.
	Credits uint16
	// Offer are capabilities beyond rsockets, a bit each, between two sides that know them: 0
	// for none, and from Linux. On the wire it is 0xDB, the bits, the bits inverted; none is
	// three zeros.
	Offer uint8
	// IOMap is the number of entries of the I/O map.
	IOMap uint16
	// Target is the target list: Length counts entries.
	Target Buffer
	// Data is the first buffer for data.
	Data Buffer
}

// ConnDataLen is the length of connection data in bytes.
const ConnDataLen = 40

const (
	version      = 1
	flagNet      = 1 << 0
	flagIOMap    = 1 << 1
	offerMark    = 0xDB
	entryLen     = 16 // of a target list
	entries      = 2  // of our target list
	maxEntries   = 1 << 16
	iomapLiteral = 128
)

// TargetLen is the length of our target list in bytes.
const TargetLen = entries * entryLen

// Append appends the connection data to b.
func (d *ConnData) Append(b []byte) []byte {
	flags := uint8(flagIOMap)
	if d.BigEndian {
		flags |= flagNet
	}
	b = append(b, version, flags)
	b = binary.BigEndian.AppendUint16(b, d.Credits)
	if d.Offer != 0 {
		b = append(b, offerMark, d.Offer, ^d.Offer)
	} else {
		b = append(b, 0, 0, 0)
	}
	iomap := uint8(d.IOMap)
	if d.IOMap > iomapLiteral {
		iomap = 0x80 | uint8(d.IOMap>>8)
	}
	b = append(b, iomap)
	for _, m := range []*Buffer{&d.Target, &d.Data} {
		b = binary.BigEndian.AppendUint64(b, m.Addr)
		b = binary.BigEndian.AppendUint32(b, m.RKey)
		b = binary.BigEndian.AppendUint32(b, m.Length)
	}
	return b
}

// ParseConnData reads and checks the connection data at the beginning of private data.
func ParseConnData(b []byte) (d ConnData, err error) {
	if len(b) < ConnDataLen {
		return d, violation("connection data of %d bytes, want %d", len(b), ConnDataLen)
	}
	if b[0] != version {
		return d, violation("version %d, want %d", b[0], version)
	}
	d.BigEndian = b[1]&flagNet != 0
	d.Credits = binary.BigEndian.Uint16(b[2:])
	if b[4] == offerMark && b[5] == ^b[6] {
		d.Offer = b[5]
	}
	d.IOMap = uint16(b[7])
	if b[7] > iomapLiteral {
		d.IOMap = uint16(b[7]&0x7F) << 8
	}
	for i, m := range []*Buffer{&d.Target, &d.Data} {
		f := b[8+16*i:]
		m.Addr = binary.BigEndian.Uint64(f)
		m.RKey = binary.BigEndian.Uint32(f[8:])
		m.Length = binary.BigEndian.Uint32(f[12:])
	}
	return d, d.check()
}

func (d *ConnData) check() error {
	if d.Credits == 0 {
		return violation("no credits")
	}
	// The second entry is where the first grant goes.
	if d.Target.Length < 2 || d.Target.Length > maxEntries {
		return violation("a target list of %d entries", d.Target.Length)
	}
	list := Buffer{Addr: d.Target.Addr, Length: d.Target.Length * entryLen}
	if err := list.check(); err != nil {
		return fmt.Errorf("target list: %w", err)
	}
	if err := d.Data.check(); err != nil {
		return fmt.Errorf("first buffer: %w", err)
	}
	return nil
}

// putEntry encodes a target entry in the byte order of whom it is for.
func putEntry(b []byte, m Buffer, bigEndian bool) {
	var o binary.ByteOrder = binary.LittleEndian
	if bigEndian {
		o = binary.BigEndian
	}
	o.PutUint64(b, m.Addr)
	o.PutUint32(b[8:], m.RKey)
	o.PutUint32(b[12:], m.Length)
}

// entry decodes a target entry of our list, which is little-endian as we never set the flag.
func entry(b []byte) Buffer {
	return Buffer{
		Addr: binary.LittleEndian.Uint64(b), RKey: binary.LittleEndian.Uint32(b[8:]), Length: binary.LittleEndian.Uint32(b[12:]),
	}
}
