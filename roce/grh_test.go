package roce

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// The GRH of a captured packet is its IP header, as far as a socket shows it; gopacket
// agrees with the checksum.
func TestGRHCaptures(t *testing.T) {
	eachCaptured(t, func(t testing.TB, c *captured) {
		if c.file == probe {
			return // odd TTLs and flow labels
		}
		got := bytes.Repeat([]byte{0xA5}, GRHLen+1)
		PutGRH(got, c.src.Addr(), c.dst.Addr(), len(c.roce), 0)
		from, to, ok := GRHAddrs(got)
		if !ok || from != c.src.Addr() || to != c.dst.Addr() || got[GRHLen] != 0xA5 {
			t.Fatalf("%s #%d: addresses %v, %v, %v in %x", c.file, c.n, from, to, ok, got)
		}
		if len(c.ip) == GRHLen {
			want := bytes.Clone(c.ip)
			want[1], want[2], want[3] = want[1]&0xF0, 0, 0 // the flow label
			if !bytes.Equal(got[:GRHLen], want) {
				t.Fatalf("%s #%d: GRH %x, IP header %x", c.file, c.n, got, c.ip)
			}
			return
		}
		if !bytes.Equal(got[:20], make([]byte, 20)) {
			t.Fatalf("%s #%d: GRH %x", c.file, c.n, got)
		}
		ip := got[20:GRHLen]
		want := bytes.Clone(c.ip)
		want[4], want[5] = 0, 0   // the ID, and hence
		want[10], want[11] = 0, 0 // the checksum
		sum := bytes.Clone(ip[10:12])
		ip[10], ip[11] = 0, 0
		if !bytes.Equal(ip, want) {
			t.Fatalf("%s #%d: GRH's header %x, IP header %x", c.file, c.n, ip, want)
		}
		var v4 layers.IPv4
		if err := v4.DecodeFromBytes(ip, gopacket.NilDecodeFeedback); err != nil && !strings.Contains(err.Error(), "length") {
			t.Fatal(err)
		}
		if check := gopacket.FoldChecksum(gopacket.ComputeChecksum(ip, 0)); byte(check>>8) != sum[0] || byte(check) != sum[1] {
			t.Fatalf("%s #%d: checksum %x, gopacket says %04x", c.file, c.n, sum, check)
		}
	})
}

func TestGRHRefused(t *testing.T) {
	b := make([]byte, GRHLen)
	if _, _, ok := GRHAddrs(b); ok {
		t.Error("zeros have addresses")
	}
	PutGRH(b, netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("::ffff:10.0.0.2"), 100, 0xB8)
	if _, to, ok := GRHAddrs(b); !ok || to != netip.MustParseAddr("10.0.0.2") || b[21] != 0xB8 {
		t.Errorf("GRH %x", b)
	}
	if _, _, ok := GRHAddrs(b[:GRHLen-1]); ok {
		t.Error("39 bytes have addresses")
	}
	b[30]++ // the checksum
	if _, _, ok := GRHAddrs(b); ok {
		t.Error("a wrong checksum passes for IPv4")
	}
	PutGRH(b, netip.MustParseAddr("fd77::1"), netip.MustParseAddr("fd77::2"), 100, 0xB8)
	if b[0] != 0x6B || b[1] != 0x80 {
		t.Errorf("traffic class: %x", b[:4])
	}
}
