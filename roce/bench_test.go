package roce

import (
	"net/netip"
	"strconv"
	"testing"
)

var (
	benchPath = NewPath(netip.MustParseAddrPort("10.77.0.1:49152"), netip.MustParseAddrPort("10.77.0.2:4791"))
	sink      uint32
)

func benchPacket(o Opcode, n int) Packet {
	return Packet{BTH: BTH{Opcode: o, PKey: DefaultPKey, DestQP: 17, PSN: 1}, Payload: make([]byte, n)}
}

func benchWire(o Opcode, n int) []byte {
	p := benchPacket(o, n)
	b := append(p.Append(nil), 0, 0, 0, 0)
	PutICRC(b[len(b)-4:], benchPath.ICRC(b[:len(b)-4], 4711))
	return b
}

func rate(b *testing.B) {
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pkt/s")
}

func BenchmarkDecode(b *testing.B) {
	for _, o := range []Opcode{RCAck, RCSendMiddle, RCWriteOnlyImm, RCCmpSwap} {
		n := 0
		if o.HasPayload() {
			n = 1024
		}
		w := benchWire(o, n)
		b.Run(o.String(), func(b *testing.B) {
			b.ReportAllocs()
			var p Packet
			for b.Loop() {
				if p.Decode(w) != nil {
					b.Fatal("no packet")
				}
			}
			rate(b)
		})
	}
}

func BenchmarkEncode(b *testing.B) {
	for _, o := range []Opcode{RCAck, RCSendMiddle, RCWriteOnlyImm, RCCmpSwap} {
		p := benchPacket(o, 0)
		buf := make([]byte, 0, 64)
		b.Run(o.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				buf = p.AppendHeaders(buf[:0])
			}
			rate(b)
		})
	}
}

func benchICRC(b *testing.B, n int) {
	w := benchWire(RCSendOnly, n)
	b.ReportAllocs()
	b.SetBytes(int64(n))
	for b.Loop() {
		sink += benchPath.ICRC(w[:len(w)-4], 0)
	}
	rate(b)
}

func BenchmarkICRCAck(b *testing.B) {
	w := benchWire(RCAck, 0)
	b.ReportAllocs()
	for b.Loop() {
		sink += benchPath.ICRC(w[:len(w)-4], 0)
	}
	rate(b)
}

func BenchmarkICRC64(b *testing.B)   { benchICRC(b, 64) }
func BenchmarkICRC1024(b *testing.B) { benchICRC(b, 1024) }
func BenchmarkICRC4096(b *testing.B) { benchICRC(b, 4096) }

// BenchmarkICRCStaged lays the pseudo header in front of the packet and goes over both in
// one pass, to compare with BenchmarkICRC64 and its like.
func BenchmarkICRCStaged(b *testing.B) {
	for _, n := range []int{64, 1024, 4096} {
		p := benchPacket(RCSendOnly, n)
		buf := p.Append(make([]byte, benchPath.PseudoLen()))
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				benchPath.PutPseudo(buf, n+BTHLen+ICRCLen, 0)
				sink += ICRCStaged(buf, benchPath.PseudoLen())
			}
			rate(b)
		})
	}
}

func BenchmarkICRCGathered(b *testing.B) {
	for _, n := range []int{64, 1024, 4096} {
		p := benchPacket(RCSendOnly, n)
		hdr := p.AppendHeaders(nil)
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				s := benchPath.ICRCStart(n+BTHLen+ICRCLen, 0, hdr)
				s.Update(p.Payload)
				sink += s.Sum()
			}
			rate(b)
		})
	}
}

// BenchmarkSolve costs what Check costs and two multiplications.
func BenchmarkSolve(b *testing.B) {
	for _, n := range []int{64, 1024, 4096} {
		w := benchWire(RCSendOnly, n)
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				if id, ok := benchPath.Solve(w); !ok || id != 4711 {
					b.Fatal("not solved")
				}
			}
			rate(b)
		})
	}
}

func BenchmarkCheck(b *testing.B) {
	for _, n := range []int{64, 1024, 4096} {
		w := benchWire(RCSendOnly, n)
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				if !benchPath.Check(w, 4711) {
					b.Fatal("wrong")
				}
			}
			rate(b)
		})
	}
}

func BenchmarkNewPath(b *testing.B) {
	src, dst := netip.MustParseAddrPort("10.77.0.1:49152"), netip.MustParseAddrPort("10.77.0.2:4791")
	b.ReportAllocs()
	for b.Loop() {
		p := NewPath(src, dst)
		sink += p.reg
	}
}
