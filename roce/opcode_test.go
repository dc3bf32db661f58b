package roce

import "testing"

// spec is the table of the specification, written down a second time in its own terms.
var spec = map[Opcode]struct {
	name    string
	ext     []string
	request bool
	pos     string // first, middle, last, only or none
	recv    bool
	payload bool
}{
	0x00: {"RC_SEND_FIRST", nil, true, "first", true, true},
	0x01: {"RC_SEND_MIDDLE", nil, true, "middle", false, true},
	0x02: {"RC_SEND_LAST", nil, true, "last", false, true},
	0x03: {"RC_SEND_LAST_IMM", []string{"imm"}, true, "last", false, true},
	0x04: {"RC_SEND_ONLY", nil, true, "only", true, true},
	0x05: {"RC_SEND_ONLY_IMM", []string{"imm"}, true, "only", true, true},
	0x06: {"RC_WRITE_FIRST", []string{"reth"}, true, "first", false, true},
	0x07: {"RC_WRITE_MIDDLE", nil, true, "middle", false, true},
	0x08: {"RC_WRITE_LAST", nil, true, "last", false, true},
	0x09: {"RC_WRITE_LAST_IMM", []string{"imm"}, true, "last", true, true},
	0x0A: {"RC_WRITE_ONLY", []string{"reth"}, true, "only", false, true},
	0x0B: {"RC_WRITE_ONLY_IMM", []string{"reth", "imm"}, true, "only", true, true},
	0x0C: {"RC_READ_REQUEST", []string{"reth"}, true, "only", false, false},
	0x0D: {"RC_READ_RESP_FIRST", []string{"aeth"}, false, "first", false, true},
	0x0E: {"RC_READ_RESP_MIDDLE", nil, false, "middle", false, true},
	0x0F: {"RC_READ_RESP_LAST", []string{"aeth"}, false, "last", false, true},
	0x10: {"RC_READ_RESP_ONLY", []string{"aeth"}, false, "only", false, true},
	0x11: {"RC_ACK", []string{"aeth"}, false, "none", false, false},
	0x12: {"RC_ATOMIC_ACK", []string{"aeth", "atomicack"}, false, "only", false, false},
	0x13: {"RC_CMP_SWAP", []string{"atomiceth"}, true, "only", false, false},
	0x14: {"RC_FETCH_ADD", []string{"atomiceth"}, true, "only", false, false},
	0x16: {"RC_SEND_LAST_INV", []string{"ieth"}, true, "last", false, true},
	0x17: {"RC_SEND_ONLY_INV", []string{"ieth"}, true, "only", true, true},
	0x1C: {"RC_FLUSH", []string{"feth", "reth"}, true, "only", false, false},
	0x1D: {"RC_ATOMIC_WRITE", []string{"reth"}, true, "only", false, true},
	0x20: {"UC_SEND_FIRST", nil, true, "first", true, true},
	0x21: {"UC_SEND_MIDDLE", nil, true, "middle", false, true},
	0x22: {"UC_SEND_LAST", nil, true, "last", false, true},
	0x23: {"UC_SEND_LAST_IMM", []string{"imm"}, true, "last", false, true},
	0x24: {"UC_SEND_ONLY", nil, true, "only", true, true},
	0x25: {"UC_SEND_ONLY_IMM", []string{"imm"}, true, "only", true, true},
	0x26: {"UC_WRITE_FIRST", []string{"reth"}, true, "first", false, true},
	0x27: {"UC_WRITE_MIDDLE", nil, true, "middle", false, true},
	0x28: {"UC_WRITE_LAST", nil, true, "last", false, true},
	0x29: {"UC_WRITE_LAST_IMM", []string{"imm"}, true, "last", true, true},
	0x2A: {"UC_WRITE_ONLY", []string{"reth"}, true, "only", false, true},
	0x2B: {"UC_WRITE_ONLY_IMM", []string{"reth", "imm"}, true, "only", true, true},
	0x64: {"UD_SEND_ONLY", []string{"deth"}, true, "only", true, true},
	0x65: {"UD_SEND_ONLY_IMM", []string{"deth", "imm"}, true, "only", true, true},
	0x81: {"CNP", []string{"cnp"}, false, "none", false, false},
}

var extLen = map[string]int{
	"reth": 16, "atomiceth": 28, "aeth": 4, "atomicack": 8, "deth": 8, "imm": 4, "ieth": 4, "feth": 4, "cnp": 16,
}

func specHeaderLen(o Opcode) int {
	n := 12
	for _, e := range spec[o].ext {
		n += extLen[e]
	}
	return n
}

func TestOpcodes(t *testing.T) {
	largest := 0
	for i := range 256 {
		o := Opcode(i)
		s, valid := spec[o]
		if o.Valid() != valid {
			t.Errorf("%#x: Valid = %v", i, o.Valid())
		}
		if !valid {
			if o.HeaderLen() != 0 || o.IsRequest() || o.IsResponse() || o.StartsMessage() || o.EndsMessage() ||
				o.ConsumesRecv() || o.HasPayload() || o.Middle() {
				t.Errorf("%#x: an opcode that does not exist has traits", i)
			}
			if want := "OPCODE_0x"; o.String()[:len(want)] != want {
				t.Errorf("%#x: %s", i, o)
			}
			continue
		}
		if o.String() != s.name {
			t.Errorf("%#x: %s, want %s", i, o, s.name)
		}
		if got, want := o.HeaderLen(), specHeaderLen(o); got != want {
			t.Errorf("%v: HeaderLen %d, want %d", o, got, want)
		}
		largest = max(largest, o.HeaderLen())
		has := map[string]bool{
			"reth": o.HasRETH(), "atomiceth": o.HasAtomicETH(), "aeth": o.HasAETH(), "atomicack": o.HasAtomicAck(),
			"deth": o.HasDETH(), "imm": o.HasImm(), "ieth": o.HasIETH(), "feth": o.HasFETH(), "cnp": o == CNP,
		}
		for _, e := range s.ext {
			if !has[e] {
				t.Errorf("%v: no %s", o, e)
			}
			delete(has, e)
		}
		for e, h := range has {
			if h {
				t.Errorf("%v: has %s", o, e)
			}
		}
		for pos, got := range map[string]bool{"first": o.First(), "middle": o.Middle(), "last": o.Last(), "only": o.Only()} {
			if got != (s.pos == pos) {
				t.Errorf("%v: position %s is %v, want %s", o, pos, got, s.pos)
			}
		}
		if o.StartsMessage() != (o.First() || o.Only()) || o.EndsMessage() != (o.Last() || o.Only()) {
			t.Errorf("%v: starts %v, ends %v", o, o.StartsMessage(), o.EndsMessage())
		}
		if o.IsRequest() != s.request || o.IsResponse() != (!s.request && o != CNP) {
			t.Errorf("%v: request %v, response %v", o, o.IsRequest(), o.IsResponse())
		}
		if o.ConsumesRecv() != s.recv || o.HasPayload() != s.payload {
			t.Errorf("%v: consumes a receive %v, has a payload %v", o, o.ConsumesRecv(), o.HasPayload())
		}
		op := o & 0x1F
		if o != CNP && (o.IsSend() != (op <= 5 || op == 0x16 || op == 0x17) || o.IsWrite() != (op >= 6 && op <= 11) ||
			o.IsReadResponse() != (op >= 13 && op <= 16) || o.IsAtomic() != (op == 0x13 || op == 0x14)) {
			t.Errorf("%v: send %v, write %v, read response %v, atomic %v", o, o.IsSend(), o.IsWrite(), o.IsReadResponse(), o.IsAtomic())
		}
		if o != CNP && (o.Operation().Transport() != TransportRC || o.Operation()&0x1F != op) {
			t.Errorf("%v: operation %v", o, o.Operation())
		}
	}
	if largest != MaxHeader {
		t.Errorf("largest header is %d, MaxHeader %d", largest, MaxHeader)
	}
	for tr, want := range map[Transport]string{0: "RC", 1: "UC", 2: "RD", 3: "UD", 4: "CNP", 5: "XRC", 7: "TRANSPORT_7"} {
		if tr.String() != want {
			t.Errorf("Transport %d is %s, want %s", tr, tr, want)
		}
	}
	if UDSendOnly.Transport() != TransportUD || CNP.Transport() != TransportCNP || UCWriteFirst.Transport() != TransportUC {
		t.Error("wrong transport")
	}
}

// The names of the constants and the numbers of the specification belong together.
func TestOpcodeConstants(t *testing.T) {
	for o, want := range map[Opcode]string{
		RCSendFirst: "RC_SEND_FIRST", RCSendMiddle: "RC_SEND_MIDDLE", RCSendLast: "RC_SEND_LAST",
		RCSendLastImm: "RC_SEND_LAST_IMM", RCSendOnly: "RC_SEND_ONLY", RCSendOnlyImm: "RC_SEND_ONLY_IMM",
		RCWriteFirst: "RC_WRITE_FIRST", RCWriteMiddle: "RC_WRITE_MIDDLE", RCWriteLast: "RC_WRITE_LAST",
		RCWriteLastImm: "RC_WRITE_LAST_IMM", RCWriteOnly: "RC_WRITE_ONLY", RCWriteOnlyImm: "RC_WRITE_ONLY_IMM",
		RCReadRequest: "RC_READ_REQUEST", RCReadRespFirst: "RC_READ_RESP_FIRST", RCReadRespMiddle: "RC_READ_RESP_MIDDLE",
		RCReadRespLast: "RC_READ_RESP_LAST", RCReadRespOnly: "RC_READ_RESP_ONLY", RCAck: "RC_ACK",
		RCAtomicAck: "RC_ATOMIC_ACK", RCCmpSwap: "RC_CMP_SWAP", RCFetchAdd: "RC_FETCH_ADD",
		RCSendLastInv: "RC_SEND_LAST_INV", RCSendOnlyInv: "RC_SEND_ONLY_INV", RCFlush: "RC_FLUSH",
		RCAtomicWrite: "RC_ATOMIC_WRITE", UCSendFirst: "UC_SEND_FIRST", UCSendMiddle: "UC_SEND_MIDDLE",
		UCSendLast: "UC_SEND_LAST", UCSendLastImm: "UC_SEND_LAST_IMM", UCSendOnly: "UC_SEND_ONLY",
		UCSendOnlyImm: "UC_SEND_ONLY_IMM", UCWriteFirst: "UC_WRITE_FIRST", UCWriteMiddle: "UC_WRITE_MIDDLE",
		UCWriteLast: "UC_WRITE_LAST", UCWriteLastImm: "UC_WRITE_LAST_IMM", UCWriteOnly: "UC_WRITE_ONLY",
		UCWriteOnlyImm: "UC_WRITE_ONLY_IMM", UDSendOnly: "UD_SEND_ONLY", UDSendOnlyImm: "UD_SEND_ONLY_IMM", CNP: "CNP",
	} {
		if spec[o].name != want {
			t.Errorf("constant %s is %#x", want, uint8(o))
		}
	}
}
