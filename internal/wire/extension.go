package wire

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/doorbell-rdma/doorbell/qp"
)

// extension is what two Doorbell devices tell each other in the last bytes of the private
// data of REQ and REP, where the program left them free. Both must have offered; a peer that
// does not know it sees private data that programs do not look at, and is sent plain RoCEv2.
//
//	 0  magic    4  "Dbel"
//	 4  version  1  1
//	 5  bits     1  bit 0: trains that reach us are received as one buffer
//	 6  zero     2
//	 8  buffer   4  our socket's receive buffer in bytes, as its kernel counts; 0: unknown
//	12  check    4  CRC-32 of the 12 bytes before and of the sender's QPN (4 bytes)
//
// All numbers are big-endian. The check keeps bytes that a program, or another protocol,
// put there from being taken for an extension.
type extension struct {
	trains bool
	buffer uint32
}

const (
	extensionLen     = 16
	extensionMagic   = "Dbel"
	extensionVersion = 1
	extTrains        = 1 << 0
)

func (x *extension) put(b []byte, sender uint32) {
	copy(b, extensionMagic)
	b[4], b[5], b[6], b[7] = extensionVersion, 0, 0, 0
	if x.trains {
		b[5] |= extTrains
	}
	binary.BigEndian.PutUint32(b[8:], x.buffer)
	binary.BigEndian.PutUint32(b[12:], extensionCheck(b[:12], sender))
}

// parseExtension reads and erases the extension at the end of private data, if there is one.
func parseExtension(private []byte, sender uint32) (x extension, ok bool) {
	if len(private) < extensionLen {
		return x, false
	}
	b := private[len(private)-extensionLen:]
	if string(b[:4]) != extensionMagic || b[4] != extensionVersion ||
		binary.BigEndian.Uint32(b[12:]) != extensionCheck(b[:12], sender) {
		return x, false
	}
	x.trains = b[5]&extTrains != 0
	x.buffer = binary.BigEndian.Uint32(b[8:])
	clear(b)
	return x, true
}

func extensionCheck(b []byte, sender uint32) uint32 {
	var q [4]byte
	binary.BigEndian.PutUint32(q[:], sender)
	return crc32.Update(crc32.ChecksumIEEE(b), crc32.IEEETable, q[:])
}

// offer returns the private data to send: the program's, with our extension behind it when
// the message has room for both and the program allows it.
func (w *Wire) offer(private []byte, room int, sender uint32, allowed bool) []byte {
	if !allowed || len(private)+extensionLen > room {
		return private
	}
	caps := w.link.Caps()
	x := extension{trains: caps.RecvTrains, buffer: uint32(min(int64(caps.RecvBuffer), 1<<31))}
	full := make([]byte, room)
	copy(full, private)
	x.put(full[room-extensionLen:], sender)
	return full
}

// Windows towards Doorbell peers: a quarter of the peer's buffer at first and five eighths of it
// at the most, for a stock buffer is small. With room to spare, beyond some hundred kilobytes a
// window gains nothing but colder caches, and whatever else goes to the same peer waits behind
// it.
const (
	maxWindow = 768 << 10
	extPSNs   = 1 << 13
)

// agree sets the window towards a peer that offered x, as we did.
func (w *Wire) agree(q *QP, x extension) {
	p := q.peer
	if p == nil || p.agreed == x || x.buffer == 0 {
		return
	}
	p.agreed = x
	caps := w.link.Caps()
	p.window.Configure(qp.WindowConfig{
		// Our other wires may send to the same socket, and each has a window of its own.
		Initial: min(int(x.buffer/4)/w.cfg.Wires, maxWindow/2), Max: min(int(x.buffer/8*5)/w.cfg.Wires, maxWindow), PSNs: extPSNs,
		// What a peer that sends by itself leaves of our buffer; and when it does not, for it may
		// begin at any time, no more than leaves room for what it sends at first.
		Reads: min(caps.RecvBuffer/8*3, maxWindow), ReadsAlone: min(caps.RecvBuffer/4*3, maxWindow),
		Trains: x.trains && caps.MaxSegs > 1,
	})
}
