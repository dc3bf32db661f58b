package roce

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// PSN is a packet sequence number, 24 bits.
type PSN = verbs.PSN

// QPN is a queue pair number, 24 bits.
type QPN = verbs.QPN

// Numbers of the wire.
const (
	// Port is the UDP destination port of every RoCEv2 packet, answers included.
	Port = 4791
	// DefaultPKey is full membership of the default partition.
	DefaultPKey = 0xFFFF
	// GSIQKey is the Q_Key of QP1.
	GSIQKey = 0x80010000
	// GRHLen is what a UD receive buffer holds in front of the payload.
	GRHLen = 40
)

// Lengths of headers in bytes.
const (
	BTHLen       = 12
	RETHLen      = 16
	AtomicETHLen = 28
	AETHLen      = 4
	AtomicAckLen = 8
	DETHLen      = 8
	ImmLen       = 4
	IETHLen      = 4
	FETHLen      = 4
	cnpLen       = 16 // reserved bytes after the BTH of a CNP
	ICRCLen      = 4

	// MaxHeader is the largest BTH with extension headers that any opcode has.
	MaxHeader = BTHLen + AtomicETHLen
)

// Why a datagram is no packet. A receiver drops it and counts; none of these says that
// the ICRC was right.
var (
	// ErrShort: the datagram ends before its headers and ICRC do.
	ErrShort = errors.New("roce: packet shorter than its headers")
	// ErrOpcode: the opcode is reserved or of a service that does not exist here.
	ErrOpcode = errors.New("roce: unknown opcode")
	// ErrVersion: the transport header version is not 0.
	ErrVersion = errors.New("roce: unknown transport version")
	// ErrPad: the pad count exceeds what follows the headers, or payload and pad are
	// not a multiple of 4 bytes.
	ErrPad = errors.New("roce: pad count does not fit the length")
	// ErrTrailing: something follows the headers of an opcode that has no payload.
	ErrTrailing = errors.New("roce: payload on an opcode that has none")
)

// BTH is the base transport header, 12 bytes, first in every packet (IBTA Vol 1, 9.2):
//
//	0      opcode
//	1      SE(1) M(1) Pad(2) TVer(4)
//	2-3    P_Key
//	4      FECN(1) BECN(1) reserved(6)      masked out of the ICRC
//	5-7    destination QP
//	8      A(1) reserved(7)
//	9-11   PSN
type BTH struct {
	Opcode Opcode
	// Solicited asks the receiver to raise a solicited event at the end of the message.
	Solicited bool
	// MigReq is the path migration state; senders set it, receivers ignore it.
	MigReq bool
	// Pad is the number of bytes after the payload, 0 to 3. It is encoded as it stands:
	// a sender sets it to PadCount(len(Payload)).
	Pad uint8
	// TVer is the transport header version, 4 bits, 0.
	TVer uint8
	PKey uint16
	// FECN says that the packet met congestion, BECN that the sender's packets did.
	FECN, BECN bool
	// Resv1 is the 6 reserved bits behind BECN, Resv2 the 7 behind AckReq.
	Resv1 uint8
	// DestQP is the receiver's queue pair.
	DestQP QPN
	// AckReq asks the responder for an acknowledgment.
	AckReq bool
	Resv2  uint8
	PSN    PSN
}

// Decode reads the first 12 bytes of b; it fails only with ErrShort.
func (h *BTH) Decode(b []byte) error {
	if len(b) < BTHLen {
		return ErrShort
	}
	_ = b[BTHLen-1]
	h.Opcode = Opcode(b[0])
	h.Solicited = b[1]&0x80 != 0
	h.MigReq = b[1]&0x40 != 0
	h.Pad = b[1] >> 4 & 3
	h.TVer = b[1] & 0x0F
	h.PKey = binary.BigEndian.Uint16(b[2:])
	qp := binary.BigEndian.Uint32(b[4:])
	h.FECN = qp&(1<<31) != 0
	h.BECN = qp&(1<<30) != 0
	h.Resv1 = uint8(qp>>24) & 0x3F
	h.DestQP = QPN(qp) & verbs.QPNMask
	psn := binary.BigEndian.Uint32(b[8:])
	h.AckReq = psn&(1<<31) != 0
	h.Resv2 = uint8(psn>>24) & 0x7F
	h.PSN = PSN(psn) & verbs.PSNMask
	return nil
}

// Put writes 12 bytes to b, which must have room for them. Fields wider than their place
// on the wire are cut to it.
func (h *BTH) Put(b []byte) {
	_ = b[BTHLen-1]
	b[0] = byte(h.Opcode)
	b[1] = bit(h.Solicited, 7) | bit(h.MigReq, 6) | h.Pad&3<<4 | h.TVer&0x0F
	binary.BigEndian.PutUint16(b[2:], h.PKey)
	binary.BigEndian.PutUint32(b[4:], uint32(h.DestQP)) // whatever is above 24 bits goes here
	b[4] = bit(h.FECN, 7) | bit(h.BECN, 6) | h.Resv1&0x3F
	binary.BigEndian.PutUint32(b[8:], uint32(h.PSN)) // likewise
	b[8] = bit(h.AckReq, 7) | h.Resv2&0x7F
}

func bit(set bool, n uint) byte {
	if set {
		return 1 << n
	}
	return 0
}

// RETH says where in the responder's memory an RDMA operation takes place:
// VA (8 bytes), R_Key (4), DMA length (4).
type RETH struct {
	VA   uint64
	RKey uint32
	// DMALen is the length of the whole message, at most 2^31.
	DMALen uint32
}

// AtomicETH holds the operands of an atomic: VA (8), R_Key (4), swap or add data (8),
// compare data (8). The operands are big-endian here and host order in memory.
type AtomicETH struct {
	VA   uint64
	RKey uint32
	// SwapAdd is stored by CMP_SWAP and added by FETCH_ADD.
	SwapAdd uint64
	// Compare is what CMP_SWAP expects to find; 0 in FETCH_ADD.
	Compare uint64
}

// AETH is an acknowledgment: syndrome (1 byte), MSN (3).
type AETH struct {
	Syndrome uint8
	// MSN counts the messages that the responder has completed, modulo 2^24.
	MSN uint32
}

// DETH addresses a datagram: Q_Key (4 bytes), reserved (1), source QP (3).
type DETH struct {
	QKey  uint32
	SrcQP QPN
	Resv  uint8
}

// Packet is one RoCEv2 packet: the BTH, the extension headers that its opcode has, and
// the payload. Fields of headers that the opcode does not have are zero after Decode and
// ignored by Append. The zero value is an empty RC SEND first to QP 0.
type Packet struct {
	BTH
	RETH   RETH
	Atomic AtomicETH
	AETH   AETH
	// AtomicAck is the original value that an ATOMIC ACK returns.
	AtomicAck uint64
	DETH      DETH
	// Imm is the immediate data, most significant byte first on the wire.
	Imm uint32
	// InvRKey is the R_Key that a SEND with invalidate takes away.
	InvRKey uint32
	// FETH is the flush header as it stands: bits 5-4 selectivity, 3-0 placement type.
	FETH uint32
	// Payload excludes the pad.
	Payload []byte
}

// PadCount returns the number of zero bytes that follow a payload: 0 to 3.
func PadCount(payloadLen int) uint8 { return uint8(-payloadLen & 3) }

// Decode reads a datagram: b is the whole UDP payload, the last 4 bytes being the ICRC,
// which is not looked at. p.Payload aliases b. The length of a payload is not compared
// with its place in the message or with any MTU: that is the responder's to answer.
//
// It fails with ErrShort, ErrOpcode, ErrVersion, ErrPad or ErrTrailing, in that order of
// checking; p.BTH is then filled when b is at least BTHLen+ICRCLen long, and all else is
// zero. Reserved bits are kept, but for those of a CNP; what the pad holds is ignored.
func (p *Packet) Decode(b []byte) error {
	*p = Packet{}
	if len(b) < BTHLen+ICRCLen {
		return ErrShort
	}
	_ = p.BTH.Decode(b)
	t := opcodes[p.Opcode]
	if t == 0 {
		return ErrOpcode
	}
	if p.TVer != 0 {
		return ErrVersion
	}
	// Every length is compared before it is subtracted: pad and ICRC are part of the
	// minimum, or a forged pad count makes a payload of negative length.
	hl, pad := int(t>>hdrLenShift), int(p.Pad)
	end := len(b) - ICRCLen
	if end < hl {
		return ErrShort
	}
	if rest := end - hl; rest != 0 || pad != 0 {
		if pad > rest || rest&3 != 0 {
			return ErrPad
		}
		if t&noPayload != 0 {
			return ErrTrailing
		}
	}
	p.decodeExt(t, b[BTHLen:hl])
	p.Payload = b[hl : end-pad : end-pad]
	return nil
}

// decodeExt reads the extension headers; b holds exactly those of t.
func (p *Packet) decodeExt(t traits, b []byte) {
	if t.has(hasDETH) {
		p.DETH.QKey = binary.BigEndian.Uint32(b)
		p.DETH.Resv = b[4]
		p.DETH.SrcQP = QPN(binary.BigEndian.Uint32(b[4:])) & verbs.QPNMask
		b = b[DETHLen:]
	}
	if t.has(hasFETH) {
		p.FETH = binary.BigEndian.Uint32(b)
		b = b[FETHLen:]
	}
	if t.has(hasRETH) {
		_ = b[RETHLen-1]
		p.RETH.VA = binary.BigEndian.Uint64(b)
		p.RETH.RKey = binary.BigEndian.Uint32(b[8:])
		p.RETH.DMALen = binary.BigEndian.Uint32(b[12:])
		b = b[RETHLen:]
	}
	if t.has(hasAtomicETH) {
		_ = b[AtomicETHLen-1]
		p.Atomic.VA = binary.BigEndian.Uint64(b)
		p.Atomic.RKey = binary.BigEndian.Uint32(b[8:])
		p.Atomic.SwapAdd = binary.BigEndian.Uint64(b[12:])
		p.Atomic.Compare = binary.BigEndian.Uint64(b[20:])
		b = b[AtomicETHLen:]
	}
	if t.has(hasAETH) {
		aeth := binary.BigEndian.Uint32(b)
		p.AETH = AETH{Syndrome: uint8(aeth >> 24), MSN: aeth & 0xFFFFFF}
		b = b[AETHLen:]
	}
	if t.has(hasAtomicAck) {
		p.AtomicAck = binary.BigEndian.Uint64(b)
		b = b[AtomicAckLen:]
	}
	if t.has(hasImm) {
		p.Imm = binary.BigEndian.Uint32(b)
	}
	if t.has(hasIETH) {
		p.InvRKey = binary.BigEndian.Uint32(b)
	}
}

// HeaderLen is what AppendHeaders appends, in bytes.
func (p *Packet) HeaderLen() int { return p.Opcode.HeaderLen() }

// Len is what Append appends, in bytes: headers, payload and pad, no ICRC.
func (p *Packet) Len() int { return p.Opcode.HeaderLen() + len(p.Payload) + int(p.Pad&3) }

// AppendHeaders appends the BTH and the extension headers that the opcode has. It
// allocates only when dst has no room for [MaxHeader] bytes more. An opcode that does not
// exist is the caller's bug and panics.
func (p *Packet) AppendHeaders(dst []byte) []byte {
	t := opcodes[p.Opcode]
	if t == 0 {
		panic("BUG: roce: encoding unknown opcode " + p.Opcode.String())
	}
	n, hl := len(dst), int(t>>hdrLenShift)
	dst = slices.Grow(dst, hl)[:n+hl]
	p.BTH.Put(dst[n:])
	p.putExt(t, dst[n+BTHLen:])
	return dst
}

// putExt writes the extension headers, every byte of b, which has just the room t needs.
func (p *Packet) putExt(t traits, b []byte) {
	if t.has(hasDETH) {
		binary.BigEndian.PutUint32(b, p.DETH.QKey)
		binary.BigEndian.PutUint32(b[4:], uint32(p.DETH.SrcQP&verbs.QPNMask)|uint32(p.DETH.Resv)<<24)
		b = b[DETHLen:]
	}
	if t.has(hasFETH) {
		binary.BigEndian.PutUint32(b, p.FETH)
		b = b[FETHLen:]
	}
	if t.has(hasRETH) {
		_ = b[RETHLen-1]
		binary.BigEndian.PutUint64(b, p.RETH.VA)
		binary.BigEndian.PutUint32(b[8:], p.RETH.RKey)
		binary.BigEndian.PutUint32(b[12:], p.RETH.DMALen)
		b = b[RETHLen:]
	}
	if t.has(hasAtomicETH) {
		_ = b[AtomicETHLen-1]
		binary.BigEndian.PutUint64(b, p.Atomic.VA)
		binary.BigEndian.PutUint32(b[8:], p.Atomic.RKey)
		binary.BigEndian.PutUint64(b[12:], p.Atomic.SwapAdd)
		binary.BigEndian.PutUint64(b[20:], p.Atomic.Compare)
		b = b[AtomicETHLen:]
	}
	if t.has(hasAETH) {
		binary.BigEndian.PutUint32(b, uint32(p.AETH.Syndrome)<<24|p.AETH.MSN&0xFFFFFF)
		b = b[AETHLen:]
	}
	if t.has(hasAtomicAck) {
		binary.BigEndian.PutUint64(b, p.AtomicAck)
		b = b[AtomicAckLen:]
	}
	if t.has(hasImm) {
		binary.BigEndian.PutUint32(b, p.Imm)
	}
	if t.has(hasIETH) {
		binary.BigEndian.PutUint32(b, p.InvRKey)
	}
	if t.has(hasCNP) {
		clear(b)
	}
}

// Append appends headers, payload and p.Pad zero bytes; the ICRC is the caller's to add.
func (p *Packet) Append(dst []byte) []byte {
	var zero [3]byte
	dst = p.AppendHeaders(dst)
	dst = append(dst, p.Payload...)
	return append(dst, zero[:p.Pad&3]...)
}
