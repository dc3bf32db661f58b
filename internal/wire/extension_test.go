package wire

import (
	"bytes"
	"testing"
)

func TestExtensionRoundTrip(t *testing.T) {
	for _, room := range []int{56, 196} {
		private := make([]byte, room)
		copy(private, "the program's")
		want := extension{trains: true, buffer: 425984}
		want.put(private[room-extensionLen:], 0x123456)
		got, ok := parseExtension(private, 0x123456)
		if !ok || got != want {
			t.Errorf("room %d: %+v, %v", room, got, ok)
		}
		if !bytes.Equal(private[room-extensionLen:], make([]byte, extensionLen)) {
			t.Error("the program can see the extension")
		}
	}
}

// TestExtensionIsNotSeenWhereThereIsNone: other people's bytes stay theirs.
func TestExtensionIsNotSeenWhereThereIsNone(t *testing.T) {
	good := func() []byte {
		b := make([]byte, 56)
		(&extension{buffer: 1 << 20}).put(b[40:], 7)
		return b
	}
	for bit := range extensionLen * 8 {
		b := good()
		b[40+bit/8] ^= 1 << (bit % 8)
		before := bytes.Clone(b)
		if _, ok := parseExtension(b, 7); ok {
			t.Errorf("bit %d flipped, still believed", bit)
		}
		if !bytes.Equal(b, before) {
			t.Errorf("bit %d flipped: not ours, but erased", bit)
		}
	}
	if _, ok := parseExtension(good(), 8); ok {
		t.Error("another queue pair's extension believed")
	}
	for n := range extensionLen {
		if _, ok := parseExtension(make([]byte, n), 7); ok {
			t.Errorf("%d bytes believed", n)
		}
	}
}
