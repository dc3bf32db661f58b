package transport

import (
	"golang.org/x/net/bpf"

	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// steering returns the program by which the kernel chooses the socket of a datagram that
// arrives: wire.Owner, in BPF. It is run on the UDP payload, of a train on all of it; a load
// behind its end makes the answer 0.
func steering(wires int) []bpf.RawInstruction {
	const (
		mad  = roce.BTHLen + roce.DETHLen
		attr = mad + 16
		ids  = mad + roce.MADHeaderLen // the sender's, then the receiver's
	)
	prog, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xFFFFFF},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(verbs.QPNGSI), SkipTrue: 3},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: wire.Shift},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(wires - 1)},
		bpf.RetA{},
		// A MAD: by the receiver's ID, if it says one that is ours. First of all: there is one.
		bpf.LoadAbsolute{Off: ids + 4, Size: 4},
		bpf.LoadAbsolute{Off: attr, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(roce.AttrREQ), SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(roce.AttrSIDRReq), SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(roce.AttrSIDRRep), SkipTrue: 2},
		bpf.LoadAbsolute{Off: ids + 4, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 1},
		bpf.LoadAbsolute{Off: ids, Size: 4},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(wires - 1)},
		bpf.RetA{},
	})
	if err != nil {
		panic("BUG: transport: steering: " + err.Error())
	}
	return prog
}
