package roce

import (
	"encoding/binary"
	"encoding/hex"
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
