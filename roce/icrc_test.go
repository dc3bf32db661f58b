package roce

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// slowMul multiplies registers bit by bit.
func slowMul(a, b uint32) uint32 {
	var r uint32
	for i := 31; i >= 0; i-- { // bit 31 is x^0
		if a>>i&1 != 0 {
			r ^= b
		}
		lost := b & 1 // x^31 becomes x^32
		b >>= 1
		if lost != 0 {
			b ^= crc32.IEEE
		}
	}
	return r
}

// slowRewind takes a register back over zero bytes one bit at a time.
func slowRewind(r uint32, n int) uint32 {
	for range 8 * n {
		if r>>31 != 0 {
			r = (r^crc32.IEEE)<<1 | 1
		} else {
			r <<= 1
		}
	}
	return r
}

func TestCRCArithmetic(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 20000 {
		a, b := rng.Uint32(), rng.Uint32()
		if i < 1024 {
			a, b = 1<<(i&31), 1<<(i>>5)
		}
		if got, want := crcMul(a, b), slowMul(a, b); got != want {
			t.Fatalf("crcMul(%#x, %#x) = %#x, want %#x", a, b, got, want)
		}
	}
	for n := 0; n < 65536; n += 1 + rng.IntN(600) {
		r := rng.Uint32()
		got, want := crcRewind(r, n), slowRewind(r, n)
		if got != want {
			t.Fatalf("crcRewind(%#x, %d) = %#x, want %#x", r, n, got, want)
		}
		if n < 3000 {
			if fwd := ^crc32.Update(^got, crc32.IEEETable, make([]byte, n)); fwd != r {
				t.Fatalf("register %#x rewound %d bytes and run forwards is %#x", r, n, fwd)
			}
		}
	}
	buf := make([]byte, 300)
	for i := range buf {
		buf[i] = byte(rng.Uint32())
	}
	for n := range buf {
		r := rng.Uint32()
		want := ^crc32.Update(^r, crc32.IEEETable, buf[:n])
		if got := crcShort(r, buf[:n]); got != want {
			t.Fatalf("crcShort over %d bytes = %#x, want %#x", n, got, want)
		}
		if got := crcLong(r, buf[:n]); got != want {
			t.Fatalf("crcLong over %d bytes = %#x, want %#x", n, got, want)
		}
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The two packets with known ICRCs that scapy's RoCE tests contain: a CNP from a
// ConnectX-4 and a UC SEND only.
func TestICRCVectors(t *testing.T) {
	tests := []struct {
		name     string
		src, dst string
		ipID     uint16
		bth      string
		want     string
	}{
		{"cnp", "10.0.17.1:0", "10.0.18.1:4791", 0x718c, "8100ffff4000011800000000" + "00000000000000000000000000000000", "82fd002a"},
		{"uc", "192.168.0.7:49152", "192.168.0.7:4791", 1144,
			"2460ffff000000d300cf1710" + "4630818be28935d90e9a95505401be885e500000", "78f353f3"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := NewPath(netip.MustParseAddrPort(tt.src), netip.MustParseAddrPort(tt.dst))
			b := unhex(t, tt.bth)
			got := binary.LittleEndian.AppendUint32(nil, p.ICRC(b, tt.ipID))
			if hex.EncodeToString(got) != tt.want {
				t.Errorf("ICRC = %x, want %s", got, tt.want)
			}
			full := append(b, unhex(t, tt.want)...)
			if !p.Check(full, tt.ipID) {
				t.Error("Check refuses it")
			}
			if id, ok := p.Solve(full); !ok || id != tt.ipID {
				t.Errorf("Solve = %d, %v, want %d", id, ok, tt.ipID)
			}
		})
	}
}

// headers4 and headers6 make real IP and UDP headers, TOS, TTL, checksums and flow label
// being what a network may make of them.
func headers4(src, dst netip.AddrPort, udpPayloadLen int, id uint16) (ip, udp []byte) {
	ip = []byte{0x45, 0x2E, 0, 0, 0, 0, 0x40, 0, 61, 17, 0x12, 0x34}
	binary.BigEndian.PutUint16(ip[2:], uint16(28+udpPayloadLen))
	binary.BigEndian.PutUint16(ip[4:], id)
	ip = append(append(ip, src.Addr().AsSlice()...), dst.Addr().AsSlice()...)
	return ip, udpHeader(src, dst, udpPayloadLen)
}

func headers6(src, dst netip.AddrPort, udpPayloadLen int) (ip, udp []byte) {
	ip = []byte{0x62, 0xE1, 0x23, 0x45, 0, 0, 17, 61}
	binary.BigEndian.PutUint16(ip[4:], uint16(8+udpPayloadLen))
	ip = append(append(ip, src.Addr().AsSlice()...), dst.Addr().AsSlice()...)
	return ip, udpHeader(src, dst, udpPayloadLen)
}

func udpHeader(src, dst netip.AddrPort, udpPayloadLen int) []byte {
	udp := binary.BigEndian.AppendUint16(nil, src.Port())
	udp = binary.BigEndian.AppendUint16(udp, dst.Port())
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+udpPayloadLen))
	return append(udp, 0x56, 0x78)
}

var ends = []struct{ name, src, dst string }{
	{"v4", "10.77.0.1:49152", "10.77.0.2:4791"},
	{"v6", "[fd77::1]:49152", "[fd77::2]:4791"},
}

// All opcodes with payloads of 0 to 9 bytes and more, over IPv4 and IPv6: each way to
// compute the ICRC agrees with the reference, in one piece, in two, staged, and solved.
func TestICRCEveryOpcode(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, e := range ends {
		src, dst := netip.MustParseAddrPort(e.src), netip.MustParseAddrPort(e.dst)
		path := NewPath(src, dst)
		for o := range spec {
			for _, n := range []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 47, 48, 60, 64, 67, 255, 1024, 4096, 65000} {
				if !o.HasPayload() && n != 0 {
					continue
				}
				id := uint16(rng.Uint32())
				p := Packet{BTH: BTH{Opcode: o, PKey: DefaultPKey, FECN: n&1 != 0, DestQP: 0x11, PSN: PSN(rng.Uint32() & 0xFFFFFF)}}
				p.Payload = make([]byte, n)
				for i := range p.Payload {
					p.Payload[i] = byte(rng.Uint32())
				}
				p.Pad = PadCount(n)
				b := p.Append(nil)
				was := bytes.Clone(b)
				var want uint32
				if src.Addr().Is4() {
					ip, udp := headers4(src, dst, len(b)+ICRCLen, id)
					want = referenceICRC(ip, udp, b)
				} else {
					ip, udp := headers6(src, dst, len(b)+ICRCLen)
					want = referenceICRC(ip, udp, b)
				}
				got := map[string]uint32{
					"one piece": path.ICRC(b, id), "staged": staged(&path, b, id),
					"gathered":  gathered(&path, b, id, o.HeaderLen(), 1+rng.IntN(70)),
					"BTH apart": gathered(&path, b, id, BTHLen, 5000),
				}
				for how, sum := range got {
					if sum != want {
						t.Fatalf("%s %v, payload %d, %s: %08x, want %08x", e.name, o, n, how, sum, want)
					}
				}
				full := append(b, 0, 0, 0, 0)
				PutICRC(full[len(full)-4:], want)
				if !path.Check(full, id) {
					t.Fatalf("%s %v, payload %d: Check refuses it", e.name, o, n)
				}
				wantID := id
				if path.IPv6() {
					wantID = 0
				} else if path.Check(full, id^0x0100) {
					t.Fatalf("%s %v: Check takes another ID", e.name, o)
				}
				if gotID, ok := path.Solve(full); !ok || gotID != wantID {
					t.Fatalf("%s %v, payload %d: Solve = %d, %v, want %d", e.name, o, n, gotID, ok, wantID)
				}
				if !bytes.Equal(full[:len(was)], was) {
					t.Fatalf("%s %v: the packet was changed", e.name, o)
				}
			}
		}
	}
}

// Bits that routers change are free, every other bit of the datagram counts: IP header,
// UDP header, BTH, payload, pad and the ICRC itself.
func TestICRCBitFlips(t *testing.T) {
	for _, e := range ends {
		t.Run(e.name, func(t *testing.T) {
			src, dst := netip.MustParseAddrPort(e.src), netip.MustParseAddrPort(e.dst)
			path := NewPath(src, dst)
			const id = 0xBEEF
			// 1 byte of payload, so that there are 3 bytes of pad.
			b := unhex(t, "0430ffff"+"00000011"+"80abcdef"+"5a000000")
			n := len(b)
			sum := path.ICRC(b, id)
			b = binary.LittleEndian.AppendUint32(b, sum)
			var ip, udp []byte
			free := map[int]bool{}  // bits of the IP header
			fixed := map[int]bool{} // bits that no Path can have otherwise
			span := func(m map[int]bool, from, bits int) {
				for i := range bits {
					m[from+i] = true
				}
			}
			if path.IPv6() {
				ip, udp = headers6(src, dst, len(b))
				span(free, 4, 8+20)  // traffic class, flow label
				span(free, 7*8, 8)   // hop limit
				span(fixed, 0, 4)    // version
				span(fixed, 4*8, 16) // length: that of the packet
				span(fixed, 6*8, 8)  // next header
			} else {
				ip, udp = headers4(src, dst, len(b), id)
				span(free, 8, 8)     // TOS
				span(free, 8*8, 8)   // TTL
				span(free, 10*8, 16) // checksum
				span(fixed, 0, 8)    // version, IHL
				span(fixed, 2*8, 16) // total length
				span(fixed, 6*8, 16) // flags, fragment offset
				span(fixed, 9*8, 8)  // protocol
			}
			if referenceICRC(ip, udp, b[:n]) != sum {
				t.Fatal("the reference disagrees")
			}
			for i := range len(ip) * 8 {
				h := flip(ip, i)
				if got := referenceICRC(h, udp, b[:n]) == sum; got != free[i] {
					t.Errorf("IP header bit %d: the reference says free = %v", i, got)
				}
				if free[i] || fixed[i] {
					continue
				}
				// What is left is addresses and ID, which a Path is told.
				other, otherID := path, uint16(id)
				if path.IPv6() {
					s, d := netip.AddrFrom16([16]byte(h[8:24])), netip.AddrFrom16([16]byte(h[24:40]))
					other = NewPath(netip.AddrPortFrom(s, src.Port()), netip.AddrPortFrom(d, dst.Port()))
				} else {
					s, d := netip.AddrFrom4([4]byte(h[12:16])), netip.AddrFrom4([4]byte(h[16:20]))
					other = NewPath(netip.AddrPortFrom(s, src.Port()), netip.AddrPortFrom(d, dst.Port()))
					otherID = binary.BigEndian.Uint16(h[4:])
				}
				if other.Check(b, otherID) {
					t.Errorf("IP header bit %d changed: Check takes it", i)
				}
				if got := other.ICRC(b[:n], otherID); got != referenceICRC(h, udp, b[:n]) {
					t.Errorf("IP header bit %d changed: ICRC %08x, the reference disagrees", i, got)
				}
			}
			for i := range len(udp) * 8 {
				h := flip(udp, i)
				isChecksum := i >= 48
				if got := referenceICRC(ip, h, b[:n]) == sum; got != isChecksum {
					t.Errorf("UDP header bit %d: the reference says free = %v", i, got)
				}
				if i < 32 {
					other := NewPath(netip.AddrPortFrom(src.Addr(), binary.BigEndian.Uint16(h)), netip.AddrPortFrom(dst.Addr(), binary.BigEndian.Uint16(h[2:])))
					if other.Check(b, id) {
						t.Errorf("UDP header bit %d changed: Check takes it", i)
					}
				}
			}
			for i := range len(b) * 8 {
				h := flip(b, i)
				masked := i/8 == 4 // FECN, BECN, reserved
				if got := path.Check(h, id); got != masked {
					t.Errorf("packet bit %d changed: Check = %v", i, got)
				}
				gotID, ok := path.Solve(h)
				if ok != masked && (path.IPv6() || gotID == id) {
					t.Errorf("packet bit %d changed: Solve = %#x, %v", i, gotID, ok)
				}
			}
			for _, l := range []int{n - 4, n + 4} { // the length itself
				if path.start(l+ICRCLen, id) == path.start(n+ICRCLen, id) {
					t.Errorf("length %d and %d begin alike", l, n)
				}
			}
		})
	}
}

func flip(b []byte, bit int) []byte {
	b = bytes.Clone(b)
	b[bit/8] ^= 0x80 >> (bit % 8)
	return b
}

// A damaged IPv4 packet passes Solve once in 65536 times: two to the minus sixteen is
// what the unknown ID costs, and not more.
func TestSolveStrength(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	path := NewPath(netip.MustParseAddrPort("10.0.0.1:50000"), netip.MustParseAddrPort("10.0.0.2:4791"))
	b := make([]byte, 64)
	passed := 0
	const tries = 1 << 19
	for range tries {
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		if id, ok := path.Solve(b); ok {
			passed++
			if !path.Check(b, id) {
				t.Fatalf("Solve says %d, Check refuses it: %x", id, b)
			}
		}
	}
	// 8 expected of 2^19; a fixed seed, so no luck is involved in passing again.
	if passed == 0 || passed > 24 {
		t.Errorf("%d of %d random packets pass", passed, tries)
	}
}

// All 65536 IDs are found.
func TestSolveEveryID(t *testing.T) {
	path := NewPath(netip.MustParseAddrPort("192.168.1.1:65535"), netip.MustParseAddrPort("192.168.1.2:4791"))
	p := Packet{BTH: BTH{Opcode: RCSendOnly, PKey: DefaultPKey}, Payload: make([]byte, 100)}
	b := append(p.Append(nil), 0, 0, 0, 0)
	for id := range 1 << 16 {
		PutICRC(b[len(b)-4:], path.ICRC(b[:len(b)-4], uint16(id)))
		if got, ok := path.Solve(b); !ok || got != uint16(id) {
			t.Fatalf("ID %d: Solve = %d, %v", id, got, ok)
		}
	}
}

func TestPathEdges(t *testing.T) {
	v4 := NewPath(netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2"))
	mapped := NewPath(netip.MustParseAddrPort("[::ffff:10.0.0.1]:1"), netip.MustParseAddrPort("10.0.0.2:2"))
	if v4 != mapped || v4.IPv6() || v4.PseudoLen() != 36 {
		t.Error("a mapped address makes another path")
	}
	v6 := NewPath(netip.MustParseAddrPort("[fe80::1%lo]:1"), netip.MustParseAddrPort("[fe80::2]:2"))
	if v6 != NewPath(netip.MustParseAddrPort("[fe80::1]:1"), netip.MustParseAddrPort("[fe80::2%eth0]:2")) || !v6.IPv6() || v6.PseudoLen() != MaxPseudo {
		t.Error("a zone makes another path")
	}
	for n := range BTHLen + ICRCLen {
		b := make([]byte, n)
		if _, ok := v4.Solve(b); ok || v4.Check(b, 0) || v6.Check(b, 0) {
			t.Errorf("%d bytes pass", n)
		}
		if _, ok := v6.Solve(b); ok {
			t.Errorf("%d bytes pass", n)
		}
	}
	// Segments of a train, each with its own ID.
	b := make([]byte, 16)
	seen := map[uint32]bool{}
	for k := range uint16(128) {
		seen[v4.ICRC(b, k)] = true
	}
	if len(seen) != 128 {
		t.Errorf("%d ICRCs for 128 IDs", len(seen))
	}
	if v6.ICRC(b, 0) != v6.ICRC(b, 1) {
		t.Error("IPv6 has an ID")
	}
}

func ExamplePath_Solve() {
	// A CNP that a ConnectX-4 sent, with its IP header's addresses and ports.
	path := NewPath(netip.MustParseAddrPort("10.0.17.1:0"), netip.MustParseAddrPort("10.0.18.1:4791"))
	b, _ := hex.DecodeString("8100ffff4000011800000000" + "00000000000000000000000000000000" + "82fd002a")
	ipID, ok := path.Solve(b)
	fmt.Printf("%#x %v\n", ipID, ok)
	// Output: 0x718c true
}
