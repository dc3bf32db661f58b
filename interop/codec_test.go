package interop

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// codec is one of the forms in which ends are told.
type codec struct {
	name   string
	encode func(linuxpeer.End) []byte
	decode func([]byte) (linuxpeer.End, error)
	length int
	// short: QPN, PSN and GID only.
	short bool
}

var codecs = []codec{
	{name: "pingpong", encode: linuxpeer.EncodeLine, decode: linuxpeer.DecodeLine, length: linuxpeer.LineLen, short: true},
	{name: "perftest over TCP", encode: tcpSide{}.encode, decode: tcpSide{}.decode, length: tcpRecord},
	{name: "perftest over rdma_cm", encode: (*cmSide)(nil).encode, decode: (*cmSide)(nil).decode, length: cmRecord},
}

// What Linux programs wrote, byte by byte.
func TestDecodeLinux(t *testing.T) {
	addr := netip.MustParseAddr("10.77.0.2")
	for _, tc := range []struct {
		codec codec
		in    string
		want  linuxpeer.End
	}{
		{codecs[0], "0000:000011:74bbc6:00000000000000000000ffff0a4d0002\x00", linuxpeer.End{QPN: 0x11, PSN: 0x74bbc6, GID: addr, Reads: 1}},
		{
			codecs[1],
			"0000:0001:000012:7d86dd:00000000:00005629fdcfe000:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02:00000000:\x00",
			linuxpeer.End{QPN: 0x12, PSN: 0x7d86dd, GID: addr, Addr: 0x5629fdcfe000, Reads: 1},
		},
		{
			codecs[2],
			"\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x23\x00\x8e\xe8\x75\x00\x00\x00\x00pad!\x00\x00\x56\x2d\xc0\xad\x50\x00" +
				"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x4d\x00\x02\x00\x00\x00\x00\x00\x00\x00\x01",
			linuxpeer.End{QPN: 0x23, PSN: 0x8ee875, GID: addr, Addr: 0x562dc0ad5000, Reads: 1},
		},
	} {
		got, err := tc.codec.decode([]byte(tc.in))
		if err != nil || got != tc.want {
			t.Errorf("%s: got %+v, %v, want %+v", tc.codec.name, got, err, tc.want)
		}
		for n := range tc.codec.length {
			if tc.codec.length == cmRecord {
				break // of a length that both know: the exchange reads as much as it wrote
			}
			if _, err := tc.codec.decode([]byte(tc.in)[:n]); err == nil {
				t.Errorf("%s: %d of %d bytes are taken for an end", tc.codec.name, n, tc.codec.length)
			}
		}
	}
}

func TestCodecsRoundTrip(t *testing.T) {
	for _, c := range codecs {
		t.Run(c.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				b := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "gid")
				want := linuxpeer.End{
					QPN: verbs.QPN(rapid.Uint32Max(0xffffff).Draw(t, "qpn")), PSN: verbs.PSN(rapid.Uint32Max(0xffffff).Draw(t, "psn")),
					GID: netip.AddrFrom16([16]byte(b)).Unmap(), Reads: 1,
				}
				if !c.short {
					want.RKey, want.Addr = rapid.Uint32().Draw(t, "rkey"), rapid.Uint64().Draw(t, "addr")
					want.Reads = rapid.IntRange(0, 128).Draw(t, "reads")
				}
				raw := c.encode(want)
				if len(raw) != c.length {
					t.Fatalf("%d bytes, want %d: %q", len(raw), c.length, raw)
				}
				if got, err := c.decode(raw); err != nil || got != want {
					t.Fatalf("%q decodes to %+v, %v, want %+v", raw, got, err, want)
				}
			})
		})
	}
}

// FuzzDecode: nothing that a peer writes makes a decoder panic.
func FuzzDecode(f *testing.F) {
	for _, c := range codecs {
		f.Add(c.encode(linuxpeer.End{QPN: 17, PSN: 99, GID: netip.MustParseAddr("fd77::2"), Reads: 1}))
	}
	f.Fuzz(func(_ *testing.T, b []byte) {
		for _, c := range codecs {
			if len(b) == c.length || c.length != cmRecord {
				_, _ = c.decode(b)
			}
		}
	})
}
