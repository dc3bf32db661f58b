package roce

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// wantDecode says what Decode must answer, from the specification's table alone, for a
// datagram of length n.
func wantDecode(o Opcode, n, pad, tver int) error {
	s, valid := spec[o]
	switch {
	case n < 12+4:
		return ErrShort
	case !valid:
		return ErrOpcode
	case tver != 0:
		return ErrVersion
	case n < specHeaderLen(o)+4:
		return ErrShort
	}
	rest := n - specHeaderLen(o) - 4
	switch {
	case rest < pad, rest%4 != 0:
		return ErrPad
	case !s.payload && rest != 0:
		return ErrTrailing
	}
	return nil
}

// All opcodes, lengths and pad counts, with a valid ICRC over what is there: lengths are
// compared before anything is subtracted, whatever the opcode.
func TestDecodeEveryOpcodeLengthPad(t *testing.T) {
	path := NewPath(netip.MustParseAddrPort("10.0.0.1:49152"), netip.MustParseAddrPort("10.0.0.2:4791"))
	var lengths []int
	for n := range 80 {
		lengths = append(lengths, n)
	}
	lengths = append(lengths, 256, 1500, 4096+44, 65507)
	rng := rand.New(rand.NewPCG(3, 4))
	full := make([]byte, 65507)
	for i := range full {
		full[i] = byte(rng.Uint32())
	}
	verdicts := map[error]int{}
	for o := range 256 {
		for _, n := range lengths {
			if n > 4200 && o&7 != 4 {
				continue // one long one in eight is enough
			}
			for pad := range 4 {
				for _, tver := range []int{0, 1, 15} {
					if tver != 0 && (n > 80 || pad != 0) {
						continue
					}
					b := bytes.Clone(full[:n])
					if n > 1 {
						b[0], b[1] = byte(o), b[1]&0xC0|byte(pad<<4)|byte(tver)
					}
					if n >= 16 {
						PutICRC(b[n-4:], path.ICRC(b[:n-4], 0))
						if !path.Check(b, 0) {
							t.Fatalf("opcode %#x length %d: ICRC", o, n)
						}
					}
					decodeOne(t, Opcode(o), b, wantDecode(Opcode(o), n, pad, tver))
					verdicts[wantDecode(Opcode(o), n, pad, tver)]++
				}
			}
		}
	}
	for _, err := range []error{nil, ErrShort, ErrOpcode, ErrVersion, ErrPad, ErrTrailing} {
		if verdicts[err] == 0 {
			t.Errorf("no case for %v", err)
		}
	}
}

func decodeOne(t *testing.T, o Opcode, b []byte, want error) {
	t.Helper()
	p := Packet{Imm: 1, Payload: b, AETH: AETH{MSN: 1}} // leftovers of an earlier packet
	err := p.Decode(b)
	if err != want {
		t.Fatalf("opcode %#x, length %d, pad %d: %v, want %v", uint8(o), len(b), p.Pad, err, want)
	}
	if err != nil {
		var bth BTH
		if len(b) >= BTHLen+ICRCLen {
			_ = bth.Decode(b)
		}
		if p.BTH != bth || p.Payload != nil || p.Imm != 0 || p.AETH != (AETH{}) {
			t.Fatalf("opcode %#x, length %d: a failed Decode leaves %+v", uint8(o), len(b), p)
		}
		return
	}
	if got := len(b) - ICRCLen - specHeaderLen(o) - int(p.Pad); len(p.Payload) != got || cap(p.Payload) != got {
		t.Fatalf("%v, length %d: payload of %d (cap %d), want %d", o, len(b), len(p.Payload), cap(p.Payload), got)
	}
	checkRoundTrip(t, &p, b)
}

// checkRoundTrip wants p to encode to b, but for the reserved bytes of a CNP, for what
// the pad holds, and for the ICRC.
func checkRoundTrip(t testing.TB, p *Packet, b []byte) {
	t.Helper()
	want := bytes.Clone(b[:len(b)-ICRCLen])
	clear(want[len(want)-int(p.Pad):])
	if p.Opcode == CNP {
		clear(want[BTHLen:])
	}
	buf := bytes.Repeat([]byte{0xA5}, 4+len(want)) // what an earlier packet left must not show
	got := p.Append(buf[:copy(buf, "kept")])
	if !bytes.Equal(got, append([]byte("kept"), want...)) {
		t.Fatalf("%v encodes to\n%x, want\n%x", p, got[4:], want)
	}
	hdr := p.AppendHeaders(nil)
	if !bytes.Equal(hdr, want[:p.HeaderLen()]) || p.Len() != len(want) {
		t.Fatalf("%v: headers %x, length %d", p, hdr, p.Len())
	}
}

// Each field lands where the specification puts it: hand-made packets, byte for byte.
func TestPacketLayout(t *testing.T) {
	bth := BTH{PKey: 0xFFFF, DestQP: 0x123456, PSN: 0xABCDEF}
	with := func(o Opcode, p Packet) Packet {
		p.BTH = bth
		p.Opcode = o
		p.Pad = PadCount(len(p.Payload))
		return p
	}
	const head = "ffff" + "00123456" + "00abcdef"
	reth := RETH{VA: 0x1112131415161718, RKey: 0x21222324, DMALen: 0x31323334}
	const rethHex = "1112131415161718" + "21222324" + "31323334"
	atomic := AtomicETH{VA: 0x1112131415161718, RKey: 0x21222324, SwapAdd: 0x4142434445464748, Compare: 0x5152535455565758}
	const atomicHex = "1112131415161718" + "21222324" + "4142434445464748" + "5152535455565758"
	tests := []struct {
		p    Packet
		want string
	}{
		{with(RCSendMiddle, Packet{Payload: []byte{1, 2, 3, 4}}), "0100" + head + "01020304"},
		{with(RCSendOnly, Packet{Payload: []byte{1}}), "0430" + head + "01000000"},
		{with(RCSendOnly, Packet{Payload: []byte{1, 2}}), "0420" + head + "01020000"},
		{with(RCSendLastImm, Packet{Imm: 0x61626364, Payload: []byte{1, 2, 3}}), "0310" + head + "61626364" + "01020300"},
		{with(RCSendOnlyInv, Packet{InvRKey: 0x61626364}), "1700" + head + "61626364"},
		{with(RCWriteFirst, Packet{RETH: reth}), "0600" + head + rethHex},
		{with(UCWriteOnlyImm, Packet{RETH: reth, Imm: 0x61626364}), "2b00" + head + rethHex + "61626364"},
		{with(RCReadRequest, Packet{RETH: reth}), "0c00" + head + rethHex},
		{with(RCReadRespFirst, Packet{AETH: AETH{Syndrome: 0x1F, MSN: 0x010203}, Payload: []byte{9, 9, 9, 9}}), "0d00" + head + "1f010203" + "09090909"},
		{with(RCAck, Packet{AETH: AETH{Syndrome: NakPSNSeq, MSN: 0x010203}}), "1100" + head + "60010203"},
		{with(RCAtomicAck, Packet{AETH: AETH{Syndrome: 0x1F, MSN: 1}, AtomicAck: 0x4142434445464748}), "1200" + head + "1f000001" + "4142434445464748"},
		{with(RCCmpSwap, Packet{Atomic: atomic}), "1300" + head + atomicHex},
		{with(RCFetchAdd, Packet{Atomic: atomic}), "1400" + head + atomicHex},
		{with(RCFlush, Packet{FETH: 0x13, RETH: reth}), "1c00" + head + "00000013" + rethHex},
		{with(UDSendOnlyImm, Packet{DETH: DETH{QKey: 0x71727374, SrcQP: 0x0A0B0C, Resv: 0x7F}, Imm: 5}), "6500" + head + "71727374" + "7f0a0b0c" + "00000005"},
		{with(CNP, Packet{}), "8100" + head + strings.Repeat("00", 16)},
	}
	for _, tt := range tests {
		t.Run(tt.p.Opcode.String(), func(t *testing.T) {
			want := unhex(t, tt.want)
			got := tt.p.Append(nil)
			if !bytes.Equal(got, want) {
				t.Fatalf("encodes to\n%x, want\n%x", got, want)
			}
			var back Packet
			if err := back.Decode(append(got, 0, 0, 0, 0)); err != nil {
				t.Fatal(err)
			}
			if back.String() != tt.p.String() || back.BTH != tt.p.BTH || back.RETH != tt.p.RETH || back.Atomic != tt.p.Atomic ||
				back.AETH != tt.p.AETH || back.AtomicAck != tt.p.AtomicAck || back.DETH != tt.p.DETH || back.Imm != tt.p.Imm ||
				back.InvRKey != tt.p.InvRKey || back.FETH != tt.p.FETH || !bytes.Equal(back.Payload, tt.p.Payload) {
				t.Errorf("decodes to %+v, want %+v", back, tt.p)
			}
		})
	}
}

// Every bit of the BTH is one field's, and each field has just its bits.
func TestBTHBits(t *testing.T) {
	tests := []struct {
		name string
		h    BTH
		want string
	}{
		{"opcode", BTH{Opcode: 0xFF}, "ff0000000000000000000000"},
		{"SE", BTH{Solicited: true}, "008000000000000000000000"},
		{"M", BTH{MigReq: true}, "004000000000000000000000"},
		{"pad", BTH{Pad: 0xFF}, "003000000000000000000000"},
		{"TVer", BTH{TVer: 0xFF}, "000f00000000000000000000"},
		{"P_Key", BTH{PKey: 0xFFFF}, "0000ffff0000000000000000"},
		{"FECN", BTH{FECN: true}, "000000008000000000000000"},
		{"BECN", BTH{BECN: true}, "000000004000000000000000"},
		{"reserved 1", BTH{Resv1: 0xFF}, "000000003f00000000000000"},
		{"DestQP", BTH{DestQP: 0xFFFFFFFF}, "0000000000ffffff00000000"},
		{"A", BTH{AckReq: true}, "000000000000000080000000"},
		{"reserved 2", BTH{Resv2: 0xFF}, "00000000000000007f000000"},
		{"PSN", BTH{PSN: 0xFFFFFFFF}, "000000000000000000ffffff"},
	}
	union := make([]byte, BTHLen)
	for _, tt := range tests {
		got := make([]byte, BTHLen)
		tt.h.Put(got)
		if !bytes.Equal(got, unhex(t, tt.want)) {
			t.Errorf("%s: %x, want %s", tt.name, got, tt.want)
		}
		for i, b := range got {
			union[i] |= b
		}
		var back BTH
		if err := back.Decode(got); err != nil {
			t.Fatal(err)
		}
		again := make([]byte, BTHLen)
		back.Put(again)
		if !bytes.Equal(again, got) {
			t.Errorf("%s: %x decodes and encodes to %x", tt.name, got, again)
		}
	}
	if !bytes.Equal(union, bytes.Repeat([]byte{0xFF}, BTHLen)) {
		t.Errorf("bits of no field: %x", union)
	}
	var h BTH
	if err := h.Decode(union[:BTHLen-1]); !errors.Is(err, ErrShort) {
		t.Errorf("11 bytes: %v, want ErrShort", err)
	}
}

func TestPadCount(t *testing.T) {
	for n := range 5000 {
		if got := PadCount(n); got > 3 || (n+int(got))%4 != 0 {
			t.Fatalf("PadCount(%d) = %d", n, got)
		}
	}
}

// mustBug wants f to panic with a message that begins "BUG:".
func mustBug(t *testing.T, name string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if s, _ := recover().(string); !strings.HasPrefix(s, "BUG: roce: ") {
			t.Errorf("%s: panic %q, want BUG", name, s)
		}
	}()
	f()
}

func TestBugs(t *testing.T) {
	v4, v6 := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("[::1]:1")
	mustBug(t, "unknown opcode", func() { (&Packet{BTH: BTH{Opcode: 0x15}}).AppendHeaders(nil) })
	mustBug(t, "mixed families", func() { NewPath(v4, v6) })
	mustBug(t, "no address", func() { NewPath(netip.AddrPort{}, v4) })
	mustBug(t, "no address", func() { NewPath(v6, netip.AddrPort{}) })
	b := make([]byte, CMMessageLen)
	mustBug(t, "private data", func() { (&REQ{PrivateData: make([]byte, REQPrivateLen+1)}).Put(b) })
	mustBug(t, "information", func() { (&REJ{Info: make([]byte, CMInfoLen+1)}).Put(b) })
	mustBug(t, "MAD data", func() { (&MAD{Data: make([]byte, CMMessageLen+1)}).Append(nil) })
}

// PSNs are compared as a signed 24-bit difference, so that nothing special happens where
// they wrap (a requester once compared them as 32-bit numbers and stalled there).
func TestPSNProperties(t *testing.T) {
	starts := []PSN{0, 1, 0xFFFFFF, 0xFFFFFE, 0x7FFFFF, 0x800000, 0x800001}
	rapid.Check(t, func(t *rapid.T) {
		p := PSN(rapid.Uint32Max(0xFFFFFF).Draw(t, "psn"))
		if i := rapid.IntRange(0, 2*len(starts)-1).Draw(t, "start"); i < len(starts) {
			p = starts[i]
		}
		d := rapid.IntRange(-1<<23, 1<<23-1).Draw(t, "offset")
		q := p.Add(d)
		if q > 0xFFFFFF {
			t.Fatalf("%v + %d = %#x, more than 24 bits", p, d, uint32(q))
		}
		if q.Sub(p) != d {
			t.Fatalf("(%v + %d) - %v = %d", p, d, p, q.Sub(p))
		}
		if p.Before(q) != (d > 0) && d != -1<<23 {
			t.Fatalf("%v before %v: %v, offset %d", p, q, p.Before(q), d)
		}
		if d != -1<<23 && q.Sub(p) != -p.Sub(q) {
			t.Fatalf("%v - %v = %d, back %d", q, p, q.Sub(p), p.Sub(q))
		}
		if q.Add(-d) != p || p.Next() != p.Add(1) || p.Next().Sub(p) != 1 || !p.Before(p.Next()) || p.Before(p) {
			t.Fatalf("%v and %v", p, q)
		}
		// What the wire carries is the same PSN.
		var b [BTHLen]byte
		(&BTH{PSN: q}).Put(b[:])
		var h BTH
		if h.Decode(b[:]) != nil || h.PSN != q || h.Resv2 != 0 || h.AckReq {
			t.Fatalf("%v on the wire is %+v", q, h)
		}
	})
}
