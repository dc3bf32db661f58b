package transport

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/doorbell-rdma/doorbell/internal/pack"
)

// messageHello is what the two sides of a [Conn] tell each other in the private data of REQ
// and REP:
//
//	0  magic     4  "Dmsg"
//	4  version   1  1
//	5  accepts   1  methods of compression it takes, a bit each: 0 S2, 1 zstd
//	6  buffers   2  receives it has posted for messages
//	8  maximum   4  longest message it takes, in bytes
//
// All numbers are big-endian.
type messageHello struct {
	accepts    pack.Set
	buffers    int
	maxMessage int
}

const (
	helloLen     = 12
	helloMagic   = "Dmsg"
	helloVersion = 1
)

// ErrNotMessages: the peer does not speak the protocol of [Device.DialConn].
var ErrNotMessages = errors.New("transport: the peer does not exchange messages")

func (h *messageHello) marshal() []byte {
	b := make([]byte, helloLen)
	copy(b, helloMagic)
	b[4], b[5] = helloVersion, byte(h.accepts)
	binary.BigEndian.PutUint16(b[6:], uint16(h.buffers))
	binary.BigEndian.PutUint32(b[8:], uint32(h.maxMessage))
	return b
}

// unmarshal reads and checks the peer's private data.
func (h *messageHello) unmarshal(b []byte) error {
	if len(b) < helloLen || string(b[:4]) != helloMagic {
		return ErrNotMessages
	}
	if b[4] != helloVersion {
		return fmt.Errorf("%w: its version is %d, ours %d", ErrNotMessages, b[4], helloVersion)
	}
	h.accepts = pack.Set(b[5])
	h.buffers = int(binary.BigEndian.Uint16(b[6:]))
	n := binary.BigEndian.Uint32(b[8:])
	if h.buffers < 1 || h.buffers > maxMessageBuffers || n < 1 || n > maxMaxMessage {
		return fmt.Errorf("%w: it offers %d buffers of %d bytes", ErrNotMessages, h.buffers, n)
	}
	h.maxMessage = int(n)
	return nil
}

// messageKind says what a message of the protocol is. Each is a SEND with immediate:
//
//	31..16  how many messages of the peer it has consumed since the beginning, modulo 65536:
//	        the peer may have so many more under way
//	15..8   0
//	 7..0   kind
//
// and the message itself is the payload, nothing else.
type messageKind uint8

const (
	kindData   messageKind = 1 // the payload is the program's message
	kindPacked messageKind = 2 // the payload is a block of package pack that stands for it
	kindCredit messageKind = 3 // no payload; only the count matters
	kindEnd    messageKind = 4 // no payload; the sender has closed, nothing follows
)

func messageImm(consumed uint32, k messageKind) uint32 { return consumed<<16 | uint32(k) }

func parseMessageImm(imm uint32) (consumed uint16, k messageKind, ok bool) {
	k = messageKind(imm & 0xff)
	return uint16(imm >> 16), k, imm&0xff00 == 0 && k >= kindData && k <= kindEnd
}
