package roce

import "strconv"

// Opcode is the first byte of the BTH: the transport in bits 7-5, the operation in bits
// 4-0 (IBTA Vol 1, 9.2). The zero value is RC SEND first.
type Opcode uint8

// Opcodes of the reliable connected service.
const (
	RCSendFirst      Opcode = 0x00
	RCSendMiddle     Opcode = 0x01
	RCSendLast       Opcode = 0x02
	RCSendLastImm    Opcode = 0x03
	RCSendOnly       Opcode = 0x04
	RCSendOnlyImm    Opcode = 0x05
	RCWriteFirst     Opcode = 0x06
	RCWriteMiddle    Opcode = 0x07
	RCWriteLast      Opcode = 0x08
	RCWriteLastImm   Opcode = 0x09
	RCWriteOnly      Opcode = 0x0A
	RCWriteOnlyImm   Opcode = 0x0B
	RCReadRequest    Opcode = 0x0C
	RCReadRespFirst  Opcode = 0x0D
	RCReadRespMiddle Opcode = 0x0E
	RCReadRespLast   Opcode = 0x0F
	RCReadRespOnly   Opcode = 0x10
	RCAck            Opcode = 0x11
	RCAtomicAck      Opcode = 0x12
	RCCmpSwap        Opcode = 0x13
	RCFetchAdd       Opcode = 0x14
	RCSendLastInv    Opcode = 0x16
	RCSendOnlyInv    Opcode = 0x17
	RCFlush          Opcode = 0x1C
	RCAtomicWrite    Opcode = 0x1D
)

// Opcodes of the unreliable connected service.
const (
	UCSendFirst    Opcode = 0x20
	UCSendMiddle   Opcode = 0x21
	UCSendLast     Opcode = 0x22
	UCSendLastImm  Opcode = 0x23
	UCSendOnly     Opcode = 0x24
	UCSendOnlyImm  Opcode = 0x25
	UCWriteFirst   Opcode = 0x26
	UCWriteMiddle  Opcode = 0x27
	UCWriteLast    Opcode = 0x28
	UCWriteLastImm Opcode = 0x29
	UCWriteOnly    Opcode = 0x2A
	UCWriteOnlyImm Opcode = 0x2B
)

// Opcodes of the unreliable datagram service, and the congestion notification packet
// (IBTA annex A17), which belongs to none.
const (
	UDSendOnly    Opcode = 0x64
	UDSendOnlyImm Opcode = 0x65
	CNP           Opcode = 0x81
)

// Transport is the service an opcode belongs to: its bits 7-5.
type Transport uint8

// The transports. RD and XRC have no opcodes here.
const (
	TransportRC  Transport = 0
	TransportUC  Transport = 1
	TransportRD  Transport = 2
	TransportUD  Transport = 3
	TransportCNP Transport = 4
	TransportXRC Transport = 5
)

// String returns the service's abbreviation.
func (t Transport) String() string {
	switch t {
	case TransportRC:
		return "RC"
	case TransportUC:
		return "UC"
	case TransportRD:
		return "RD"
	case TransportUD:
		return "UD"
	case TransportCNP:
		return "CNP"
	case TransportXRC:
		return "XRC"
	}
	return "TRANSPORT_" + strconv.Itoa(int(t))
}

// traits is all that is known of an opcode: flags, and the length of its headers in the
// top byte. An extension header's flag carries that header's length, so traits are built
// with + and the lengths add up. An opcode that does not exist has traits 0, so no
// length can be computed from it (an empty table entry once made a header length of 0
// and an underflow of it).
type traits uint32

const (
	hdrLenShift = 24

	isValid    traits = 1<<0 | BTHLen<<hdrLenShift
	isRequest  traits = 1 << 1
	isResponse traits = 1 << 2
	isFirst    traits = 1 << 3
	isMiddle   traits = 1 << 4
	isLast     traits = 1 << 5
	isOnly     traits = 1 << 6
	isSend     traits = 1 << 7
	isWrite    traits = 1 << 8
	isReadResp traits = 1 << 9
	isAtomic   traits = 1 << 10
	takesRecv  traits = 1 << 11
	noPayload  traits = 1 << 12

	hasImm       traits = 1<<13 | ImmLen<<hdrLenShift
	hasIETH      traits = 1<<14 | IETHLen<<hdrLenShift
	hasRETH      traits = 1<<15 | RETHLen<<hdrLenShift
	hasAtomicETH traits = 1<<16 | AtomicETHLen<<hdrLenShift
	hasAETH      traits = 1<<17 | AETHLen<<hdrLenShift
	hasAtomicAck traits = 1<<18 | AtomicAckLen<<hdrLenShift
	hasDETH      traits = 1<<19 | DETHLen<<hdrLenShift
	hasFETH      traits = 1<<20 | FETHLen<<hdrLenShift
	hasCNP       traits = 1<<21 | cnpLen<<hdrLenShift

	request  = isValid + isRequest
	response = isValid + isResponse
)

// opcodes is the one table behind every method of Opcode and behind the packet codec.
var opcodes = [256]traits{
	RCSendFirst:      request + isSend + isFirst + takesRecv,
	RCSendMiddle:     request + isSend + isMiddle,
	RCSendLast:       request + isSend + isLast,
	RCSendLastImm:    request + isSend + isLast + hasImm,
	RCSendOnly:       request + isSend + isOnly + takesRecv,
	RCSendOnlyImm:    request + isSend + isOnly + takesRecv + hasImm,
	RCWriteFirst:     request + isWrite + isFirst + hasRETH,
	RCWriteMiddle:    request + isWrite + isMiddle,
	RCWriteLast:      request + isWrite + isLast,
	RCWriteLastImm:   request + isWrite + isLast + takesRecv + hasImm,
	RCWriteOnly:      request + isWrite + isOnly + hasRETH,
	RCWriteOnlyImm:   request + isWrite + isOnly + takesRecv + hasRETH + hasImm,
	RCReadRequest:    request + isOnly + hasRETH + noPayload,
	RCReadRespFirst:  response + isReadResp + isFirst + hasAETH,
	RCReadRespMiddle: response + isReadResp + isMiddle,
	RCReadRespLast:   response + isReadResp + isLast + hasAETH,
	RCReadRespOnly:   response + isReadResp + isOnly + hasAETH,
	RCAck:            response + hasAETH + noPayload,
	RCAtomicAck:      response + isOnly + hasAETH + hasAtomicAck + noPayload,
	RCCmpSwap:        request + isAtomic + isOnly + hasAtomicETH + noPayload,
	RCFetchAdd:       request + isAtomic + isOnly + hasAtomicETH + noPayload,
	RCSendLastInv:    request + isSend + isLast + hasIETH,
	RCSendOnlyInv:    request + isSend + isOnly + takesRecv + hasIETH,
	RCFlush:          request + isOnly + hasFETH + hasRETH + noPayload,
	RCAtomicWrite:    request + isOnly + hasRETH,

	UCSendFirst:    request + isSend + isFirst + takesRecv,
	UCSendMiddle:   request + isSend + isMiddle,
	UCSendLast:     request + isSend + isLast,
	UCSendLastImm:  request + isSend + isLast + hasImm,
	UCSendOnly:     request + isSend + isOnly + takesRecv,
	UCSendOnlyImm:  request + isSend + isOnly + takesRecv + hasImm,
	UCWriteFirst:   request + isWrite + isFirst + hasRETH,
	UCWriteMiddle:  request + isWrite + isMiddle,
	UCWriteLast:    request + isWrite + isLast,
	UCWriteLastImm: request + isWrite + isLast + takesRecv + hasImm,
	UCWriteOnly:    request + isWrite + isOnly + hasRETH,
	UCWriteOnlyImm: request + isWrite + isOnly + takesRecv + hasRETH + hasImm,

	UDSendOnly:    request + isSend + isOnly + takesRecv + hasDETH,
	UDSendOnlyImm: request + isSend + isOnly + takesRecv + hasDETH + hasImm,

	CNP: isValid + hasCNP + noPayload,
}

// operations names bits 4-0 of an opcode.
var operations = [32]string{
	"SEND_FIRST", "SEND_MIDDLE", "SEND_LAST", "SEND_LAST_IMM", "SEND_ONLY", "SEND_ONLY_IMM",
	"WRITE_FIRST", "WRITE_MIDDLE", "WRITE_LAST", "WRITE_LAST_IMM", "WRITE_ONLY", "WRITE_ONLY_IMM",
	"READ_REQUEST", "READ_RESP_FIRST", "READ_RESP_MIDDLE", "READ_RESP_LAST", "READ_RESP_ONLY",
	"ACK", "ATOMIC_ACK", "CMP_SWAP", "FETCH_ADD", 0x16: "SEND_LAST_INV", 0x17: "SEND_ONLY_INV",
	0x1C: "FLUSH", 0x1D: "ATOMIC_WRITE",
}

// Valid reports whether the opcode exists here. RD, XRC and reserved ones do not.
func (o Opcode) Valid() bool { return opcodes[o] != 0 }

// Transport returns the service; it means something for valid opcodes only.
func (o Opcode) Transport() Transport { return Transport(o >> 5) }

// Operation returns the opcode with its transport taken off, which is the RC opcode of
// the same operation: a switch over it serves RC, UC and UD alike. It means nothing for CNP.
func (o Opcode) Operation() Opcode { return o & 0x1F }

// IsRequest reports whether a requester sends it. CNP is neither request nor response.
func (o Opcode) IsRequest() bool { return opcodes[o]&isRequest != 0 }

// IsResponse reports whether a responder sends it: READ responses, ACK, ATOMIC ACK.
func (o Opcode) IsResponse() bool { return opcodes[o]&isResponse != 0 }

// First, Middle, Last and Only say where in its message a packet stands. At most one
// holds. READ requests, atomics, FLUSH, ATOMIC WRITE and ATOMIC ACK are Only; ACK and
// CNP, which belong to no message, are none.
func (o Opcode) First() bool { return opcodes[o]&isFirst != 0 }

// Middle: see [Opcode.First].
func (o Opcode) Middle() bool { return opcodes[o]&isMiddle != 0 }

// Last: see [Opcode.First].
func (o Opcode) Last() bool { return opcodes[o]&isLast != 0 }

// Only: see [Opcode.First].
func (o Opcode) Only() bool { return opcodes[o]&isOnly != 0 }

// StartsMessage reports First or Only.
func (o Opcode) StartsMessage() bool { return opcodes[o]&(isFirst|isOnly) != 0 }

// EndsMessage reports Last or Only.
func (o Opcode) EndsMessage() bool { return opcodes[o]&(isLast|isOnly) != 0 }

// IsSend reports any SEND, of any transport.
func (o Opcode) IsSend() bool { return opcodes[o]&isSend != 0 }

// IsWrite reports any RDMA WRITE but ATOMIC WRITE.
func (o Opcode) IsWrite() bool { return opcodes[o]&isWrite != 0 }

// IsReadResponse reports a READ response packet.
func (o Opcode) IsReadResponse() bool { return opcodes[o]&isReadResp != 0 }

// IsAtomic reports CMP_SWAP and FETCH_ADD.
func (o Opcode) IsAtomic() bool { return opcodes[o]&isAtomic != 0 }

// HasImm reports immediate data.
func (o Opcode) HasImm() bool { return opcodes[o].has(hasImm) }

// HasIETH reports an R_Key to invalidate.
func (o Opcode) HasIETH() bool { return opcodes[o].has(hasIETH) }

// HasRETH reports an RDMA extended transport header.
func (o Opcode) HasRETH() bool { return opcodes[o].has(hasRETH) }

// HasAtomicETH reports the operands of an atomic.
func (o Opcode) HasAtomicETH() bool { return opcodes[o].has(hasAtomicETH) }

// HasAETH reports an acknowledgment header. READ response middle has none.
func (o Opcode) HasAETH() bool { return opcodes[o].has(hasAETH) }

// HasAtomicAck reports the original value that an atomic returns.
func (o Opcode) HasAtomicAck() bool { return opcodes[o].has(hasAtomicAck) }

// HasDETH reports a datagram header.
func (o Opcode) HasDETH() bool { return opcodes[o].has(hasDETH) }

// HasFETH reports a flush header.
func (o Opcode) HasFETH() bool { return opcodes[o].has(hasFETH) }

// HasPayload reports whether a payload may follow the headers; READ requests, ACKs,
// atomics, FLUSH and CNP have none.
func (o Opcode) HasPayload() bool { return o.Valid() && opcodes[o]&noPayload == 0 }

// HeaderLen is the length in bytes of BTH and extension headers, 12 to [MaxHeader];
// 0 for an opcode that does not exist.
func (o Opcode) HeaderLen() int { return int(opcodes[o] >> hdrLenShift) }

// ConsumesRecv reports whether a responder needs a receive WQE at this packet: SEND
// first and only, WRITE last and only with immediate.
func (o Opcode) ConsumesRecv() bool { return opcodes[o]&takesRecv != 0 }

// String names the opcode in the style of RC_SEND_FIRST.
func (o Opcode) String() string {
	switch {
	case o == CNP:
		return "CNP"
	case o.Valid():
		return o.Transport().String() + "_" + operations[o.Operation()]
	}
	return "OPCODE_0x" + strconv.FormatUint(uint64(o), 16)
}

const hdrLenMask traits = 0xFF << hdrLenShift

// has compares the flag only: the lengths in two traits have no bits in common by rule.
func (t traits) has(f traits) bool { return t&(f&^hdrLenMask) != 0 }
