package roce

import (
	"bytes"
	"net/netip"
	"testing"
)

// seedCaptures gives a fuzz target one packet of each shape that the captures have.
func seedCaptures(f *testing.F, add func(c *captured)) {
	seen := map[[3]byte]bool{}
	eachCaptured(f, func(_ testing.TB, c *captured) {
		key := [3]byte{c.roce[0], c.roce[1]}
		if c.roce[0] == byte(UDSendOnly) && len(c.roce) == 280 {
			key[2] = c.roce[37] // the CM's attribute
		}
		if !seen[key] {
			seen[key] = true
			add(c)
		}
	})
}

// FuzzDecode: no bytes panic; what decodes is within bounds and encodes back.
func FuzzDecode(f *testing.F) {
	seedCaptures(f, func(c *captured) { f.Add(c.roce) })
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0xFF}, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p Packet
		was := bytes.Clone(b)
		err := p.Decode(b)
		if !bytes.Equal(b, was) {
			t.Fatal("Decode wrote to its input")
		}
		var pad, tver int
		var o Opcode
		if len(b) > 1 {
			o, pad, tver = Opcode(b[0]), int(b[1]>>4&3), int(b[1]&15)
		}
		if want := wantDecode(o, len(b), pad, tver); err != want {
			t.Fatalf("%v, want %v", err, want)
		}
		if p.String() == "" {
			t.Fatal("no text")
		}
		if err == nil {
			checkRoundTrip(t, &p, b)
		}
	})
}

// FuzzMAD: whatever a MAD holds, header and message encode back to the same bytes.
func FuzzMAD(f *testing.F) {
	seedCaptures(f, func(c *captured) {
		if c.roce[0] == byte(UDSendOnly) && len(c.roce) == 280 {
			f.Add(c.roce[20:276])
		}
	})
	for _, l := range layouts {
		m := NewCMMAD(l.attr, 1)
		f.Add(m.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var mad MAD
		if err := mad.Decode(b); err != nil {
			if len(b) == MADLen {
				t.Fatal(err)
			}
			return
		}
		if got := mad.Append(nil); !bytes.Equal(got, b) {
			t.Fatalf("MAD encodes to\n%x, want\n%x", got, b)
		}
		p := Packet{BTH: BTH{Opcode: UDSendOnly, DestQP: 1}, DETH: DETH{SrcQP: 1}, Payload: b}
		if p.String() == "" {
			t.Fatal("no text")
		}
		m := newMessage(mad.AttrID)
		if m == nil {
			return
		}
		if err := m.Decode(mad.Data); err != nil {
			t.Fatal(err)
		}
		got := bytes.Repeat([]byte{0xA5}, CMMessageLen)
		m.Put(got)
		if !bytes.Equal(got, mad.Data) {
			t.Fatalf("%v encodes to\n%x, want\n%x", mad.AttrID, got, mad.Data)
		}
		var h IPCMHeader
		if h.Decode(mad.Data[140:]) == nil {
			var back IPCMHeader
			b := make([]byte, IPCMHeaderLen)
			h.Put(b)
			if err := back.Decode(b); err != nil || back != h {
				t.Fatalf("IP CM header %+v comes back as %+v, %v", h, back, err)
			}
		}
	})
}

// FuzzSolve: for any datagram and path, the ways to compute an ICRC agree with the
// reference; Solve finds the ID of a right one, and what it finds always checks.
func FuzzSolve(f *testing.F) {
	seedCaptures(f, func(c *captured) { f.Add(c.roce, c.ipID, uint32(1), c.src.Port(), 20, false) })
	f.Add(make([]byte, 16), uint16(0), uint32(0), uint16(0), 12, true)
	f.Fuzz(func(t *testing.T, b []byte, id uint16, addr uint32, port uint16, cut int, v6 bool) {
		if len(b) > 65507 {
			return
		}
		a4 := netip.AddrFrom4([4]byte{byte(addr >> 24), byte(addr >> 16), byte(addr >> 8), byte(addr)})
		src, dst := netip.AddrPortFrom(a4, port), netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, 2}), Port)
		if v6 {
			g := GIDFromAddr(a4)
			g[0] = 0xFD
			src = netip.AddrPortFrom(netip.AddrFrom16(g), port)
			dst = netip.MustParseAddrPort("[fd77::2]:4791")
		}
		path := NewPath(src, dst)
		was := bytes.Clone(b)
		if found, ok := path.Solve(b); ok && !path.Check(b, found) {
			t.Fatalf("Solve = %d, Check refuses it", found)
		}
		if len(b) < BTHLen+ICRCLen {
			if path.Check(b, id) {
				t.Fatal("a short datagram passes")
			}
			return
		}
		n := len(b) - ICRCLen
		want := referenceICRC(headersOf(src, dst, len(b), id), udpHeader(src, dst, len(b)), b[:n])
		cut = BTHLen + int(uint(cut)%uint(n-BTHLen+1))
		if got := path.ICRC(b[:n], id); got != want {
			t.Fatalf("ICRC %08x, want %08x", got, want)
		}
		if got := gathered(&path, b[:n], id, cut, 1+cut%97); got != want {
			t.Fatalf("gathered %08x, want %08x", got, want)
		}
		if got := staged(&path, b[:n], id); got != want {
			t.Fatalf("staged %08x, want %08x", got, want)
		}
		full := bytes.Clone(b)
		PutICRC(full[n:], want)
		found, ok := path.Solve(full)
		if !ok || !v6 && found != id || v6 && found != 0 || !path.Check(full, id) {
			t.Fatalf("Solve = %d, %v, want %d", found, ok, id)
		}
		if !bytes.Equal(b, was) {
			t.Fatal("the input was changed")
		}
	})
}

func headersOf(src, dst netip.AddrPort, n int, id uint16) []byte {
	var ip []byte
	if src.Addr().Is4() {
		ip, _ = headers4(src, dst, n, id)
	} else {
		ip, _ = headers6(src, dst, n)
	}
	return ip
}
