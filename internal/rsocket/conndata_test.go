package rsocket

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"
)

// Connection data of rstream, as client and as server, from a live run.
const (
	rstreamClient = "01020180000000" + "00" + "000055fe3c966000" + "00000905" + "00000002" + "00007f40cafaa000" + "00000a66" + "00080000"
	rstreamServer = "01020180000000" + "00" + "00007fcc74003000" + "000009ea" + "00000002" + "00007fcc790e3000" + "00000a7e" + "00080000"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestConnData(t *testing.T) {
	for _, tc := range []struct {
		name, hex string
		want      ConnData
	}{
		{"rstream client", rstreamClient, ConnData{
			Credits: 384, Target: Buffer{0x55fe3c966000, 0x905, 2}, Data: Buffer{0x7f40cafaa000, 0xa66, 0x80000},
		}},
		{"rstream server", rstreamServer, ConnData{
			Credits: 384, Target: Buffer{0x7fcc74003000, 0x9ea, 2}, Data: Buffer{0x7fcc790e3000, 0xa7e, 0x80000},
		}},
		{"big-endian, offer, I/O map", "0103fffe" + "db05fa" + "80" + "0000000000001000000000010000000200000000000020000000000200001000", ConnData{
			BigEndian: true, Credits: 65534, Offer: 5, IOMap: 128, Target: Buffer{0x1000, 1, 2}, Data: Buffer{0x2000, 2, 0x1000},
		}},
		{"large I/O map", "01020010" + "000000" + "82" + "0000000000001000000000010000000200000000000020000000000200001000", ConnData{
			Credits: 16, IOMap: 512, Target: Buffer{0x1000, 1, 2}, Data: Buffer{0x2000, 2, 0x1000},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := unhex(t, tc.hex)
			got, err := ParseConnData(append(b, 1, 2, 3)) // what comes behind does not matter
			if err != nil || got != tc.want {
				t.Errorf("parsed %+v, %v; want %+v", got, err, tc.want)
			}
			if out := tc.want.Append(nil); !bytes.Equal(out, b) {
				t.Errorf("encoded %x, want %x", out, b)
			}
			for n := range len(b) {
				if _, err := ParseConnData(b[:n]); !errors.Is(err, ErrProtocol) {
					t.Fatalf("%d bytes of it: %v", n, err)
				}
			}
		})
	}
}

func TestConnDataBad(t *testing.T) {
	for _, tc := range []struct {
		name string
		off  int
		hex  string
	}{
		{"version 0", 0, "00"},
		{"version 2", 0, "02"},
		{"no credits", 2, "0000"},
		{"one target entry", 20, "00000001"},
		{"no target entry", 20, "00000000"},
		{"endless target list", 20, "ffffffff"},
		{"target list wraps", 8, "fffffffffffffff0"},
		{"empty buffer", 36, "00000000"},
		{"buffer wraps", 24, "fffffffffffff000"},
	} {
		b := unhex(t, rstreamClient)
		copy(b[tc.off:], unhex(t, tc.hex))
		if d, err := ParseConnData(b); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %+v, %v", tc.name, d, err)
		}
	}
	// A mark without its check is a Linux that has begun to use the bytes: no offer.
	b := unhex(t, rstreamClient)
	copy(b[4:], []byte{offerMark, 5, 5})
	if d, err := ParseConnData(b); err != nil || d.Offer != 0 {
		t.Errorf("offer %#x, %v", d.Offer, err)
	}
}

func TestImm(t *testing.T) {
	for _, tc := range []struct {
		op    Op
		value uint32
		imm   uint32
	}{
		{OpData, 16, 0x10},
		{OpData, 0x7410, 0x7410},
		{OpSGL, 384, 0x80000180},
		{OpSGL, 402, 0x80000192},
		{OpIOMapSGL, 0, 0xC0000000},
		{OpCtrl, CtrlDisconnect, 0xE0000000},
		{OpCtrl, CtrlShutdown, 0xE0000002},
		{OpData, MaxMessage, 0x1FFFFFFF},
	} {
		if got := Imm(tc.op, tc.value); got != tc.imm {
			t.Errorf("Imm(%v, %d) = %#x, want %#x", tc.op, tc.value, got, tc.imm)
		}
		if op, v := ParseImm(tc.imm); op != tc.op || v != tc.value {
			t.Errorf("ParseImm(%#x) = %v, %d", tc.imm, op, v)
		}
	}
}
