package roce

import (
	"net/netip"
	"testing"
)

// Nothing on the data path allocates, to decode or to encode; neither does printing into
// a buffer with room.
func TestNoAllocations(t *testing.T) {
	src, dst := netip.MustParseAddrPort("10.77.0.1:49152"), netip.MustParseAddrPort("10.77.0.2:4791")
	path := NewPath(src, dst)
	path6 := NewPath(netip.MustParseAddrPort("[fd77::1]:1"), netip.MustParseAddrPort("[fd77::2]:2"))
	buf := make([]byte, 0, 8192)
	payload := make([]byte, 1021)
	pad := make([]byte, 3)
	in := Packet{BTH: BTH{Opcode: RCWriteOnlyImm, PKey: DefaultPKey, Pad: 3}, Payload: payload}
	wire := append(in.Append(nil), 0, 0, 0, 0)
	mads := map[AttrID][]byte{}
	for _, l := range layouts {
		m := NewCMMAD(l.attr, 7)
		d := make([]byte, CMMessageLen)
		d[0], d[11], d[12], d[141] = 1, 8, 6, 0x40 // 11: the reason of a REJ, one with a text
		m.Data = d
		p := Packet{BTH: BTH{Opcode: UDSendOnly, DestQP: 1, PKey: DefaultPKey}, DETH: DETH{QKey: GSIQKey, SrcQP: 1}, Payload: m.Append(nil)}
		mads[l.attr] = append(p.Append(nil), 0, 0, 0, 0)
	}
	var p Packet
	var mad MAD
	var sum uint32
	tests := map[string]func(){
		"Decode":  func() { _ = p.Decode(wire) },
		"Append":  func() { _ = in.Append(buf) },
		"ICRC":    func() { sum += path.ICRC(wire[:len(wire)-4], 1) },
		"Check":   func() { path.Check(wire, 1) },
		"Solve":   func() { path.Solve(wire) },
		"NewPath": func() { path = NewPath(src, dst) },
		"Solve6":  func() { path6.Solve(wire) },
		"staged": func() {
			b := buf[:path.PseudoLen()]
			path.PutPseudo(b, len(wire), 1)
			sum += ICRCStaged(in.Append(b), len(b))
		},
		"gathered": func() {
			s := path.ICRCStart(len(wire), 0, in.AppendHeaders(buf))
			s.Update(payload)
			s.Update(pad)
			sum += s.Sum()
		},
		"text": func() { _, _ = in.AppendText(buf) },
		"CM": func() {
			for attr, b := range mads {
				_ = p.Decode(b)
				_ = mad.Decode(p.Payload)
				_ = mad.Append(buf)
				_ = attr
				_, _ = p.AppendText(buf)
			}
		},
		"REQ": func() {
			var m REQ
			var h IPCMHeader
			_ = p.Decode(mads[AttrREQ])
			_ = mad.Decode(p.Payload)
			_ = m.Decode(mad.Data)
			_ = h.Decode(m.PrivateData)
			b := buf[:MADLen]
			mad.PutHeader(b)
			m.Put(b[MADHeaderLen:])
			h.Put(b[MADHeaderLen+140:])
		},
	}
	for name, f := range tests {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
