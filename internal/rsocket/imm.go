package rsocket

import "strconv"

// Op is the operation that immediate data tell about, its upper 3 bits.
type Op uint8

// The operations.
const (
	OpData     Op = 0
	OpWrite    Op = 2 // local: a WRITE without immediate; never in one
	OpSGL      Op = 4
	OpIOMapSGL Op = 6
	OpCtrl     Op = 7
)

// String names the operation.
func (o Op) String() string {
	switch o {
	case OpData:
		return "DATA"
	case OpWrite:
		return "WRITE"
	case OpSGL:
		return "SGL"
	case OpIOMapSGL:
		return "IOMAP_SGL"
	case OpCtrl:
		return "CTRL"
	}
	return "OP_" + strconv.Itoa(int(o))
}

// Values of OpCtrl.
const (
	CtrlDisconnect uint32 = 0
	CtrlKeepalive  uint32 = 1
	CtrlShutdown   uint32 = 2
)

const (
	opShift   = 29
	valueMask = 1<<opShift - 1
)

// MaxMessage is the most bytes that a DATA message can announce.
const MaxMessage = valueMask

// Imm encodes immediate data. value has 29 bits.
func Imm(op Op, value uint32) uint32 {
	if op > 7 || value > valueMask {
		panic("BUG: rsocket: immediate data out of range")
	}
	return uint32(op)<<opShift | value
}

// ParseImm decodes immediate data.
func ParseImm(imm uint32) (op Op, value uint32) { return Op(imm >> opShift), imm & valueMask }
