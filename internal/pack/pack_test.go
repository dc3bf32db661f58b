package pack

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// random returns n bytes that nothing compresses; the same for the same seed.
func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	_, _ = src.Read(b)
	return b
}

// text returns n bytes that look like a program's log.
func text(n int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "ts=%d level=info msg=\"queue pair moved\" qpn=0x%06x from=RTR to=RTS took=%dus\n", 1700000000+i*17, uint32(i)*2654435761&0xffffff, i*i%977)
	}
	return b.Bytes()[:n]
}

func TestPackThenUnpack(t *testing.T) {
	for _, m := range []Method{S2, Zstd} {
		for _, n := range []int{MinLen, 1000, 4096, sampled, BlockLen, 1 << 20, MaxBlock} {
			t.Run(fmt.Sprintf("%v/%d", m, n), func(t *testing.T) {
				src := text(n)
				e, d := NewEncoder(m), NewDecoder(n)
				prefix := []byte("before")
				b, ok := e.Pack(prefix, src)
				if !ok || len(b) >= n || !bytes.HasPrefix(b, prefix) {
					t.Fatalf("text of %d bytes: packed %v into %d", n, ok, len(b))
				}
				b = b[len(prefix):]
				got, err := d.Len(b)
				if err != nil || got != n {
					t.Fatalf("Len = %d, %v, want %d", got, err, n)
				}
				dst := make([]byte, n)
				if err := d.Unpack(dst, b); err != nil || !bytes.Equal(dst, src) {
					t.Fatalf("unpack: %v, equal %v", err, bytes.Equal(dst, src))
				}
				if err := NewDecoder(n-1).Unpack(dst, b); !errors.Is(err, ErrTooLarge) {
					t.Errorf("a decoder that agreed on one byte less: %v, want ErrTooLarge", err)
				}
			})
		}
	}
}

func TestPackRefuses(t *testing.T) {
	for _, m := range []Method{None, S2, Zstd} {
		for name, src := range map[string][]byte{
			"short": text(MinLen - 1), "random": random(1, BlockLen), "small and random": random(2, 1000),
			"more than a block": make([]byte, MaxBlock+1), "nothing": nil,
		} {
			if b, ok := NewEncoder(m).Pack([]byte{1}, src); ok || len(b) != 1 {
				t.Errorf("%v, %s: packed %v, %d bytes", m, name, ok, len(b))
			}
		}
	}
	if b, ok := NewEncoder(None).Pack(nil, text(1000)); ok || len(b) != 0 {
		t.Errorf("None packed text into %d bytes", len(b))
	}
}

// TestEntropyOnly: bytes of sixteen kinds in no order have no repetition for S2, and half
// their bits for zstd.
func TestEntropyOnly(t *testing.T) {
	src := []byte(hex.EncodeToString(random(3, BlockLen/2)))
	b, ok := NewEncoder(Zstd).Pack(nil, src)
	if !ok || len(b) > len(src)*6/10 {
		t.Fatalf("zstd packed %v into %d of %d bytes", ok, len(b), len(src))
	}
}

// TestBackOff: random data is looked at ever more rarely, and text after it is noticed again
// within the bound.
func TestBackOff(t *testing.T) {
	for _, n := range []int{1000, BlockLen} {
		e := NewEncoder(S2)
		looks, src := 0, random(4, n)
		for range 1000 {
			if e.skip.Load() == 0 {
				looks++
			}
			if _, ok := e.Pack(nil, src); ok {
				t.Fatal("random data packed")
			}
		}
		// 1+1, 1+3, 1+7 … 1+63 blocks a look: six looks for the first 126, then one in 64.
		if looks < 10 || looks > 24 {
			t.Errorf("%d bytes: %d looks at 1000 random blocks", n, looks)
		}
		noticed := -1
		for i := range 1<<maxStreak + 1 {
			if _, ok := e.Pack(nil, text(n)); ok {
				noticed = i
				break
			}
		}
		if noticed < 0 || e.streak.Load() != 0 {
			t.Errorf("%d bytes: text not noticed within %d blocks", n, 1<<maxStreak)
		}
		if _, ok := e.Pack(nil, text(n)); !ok {
			t.Errorf("%d bytes: the block after was not packed", n)
		}
	}
}

func block(m Method, raw, packed uint32, body []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{byte(m)}, raw)
	return append(binary.BigEndian.AppendUint32(b, packed), body...)
}

// bomb returns a zstd frame that unpacks to n zeros; sized says whether it admits it.
func bomb(t testing.TB, n int, sized bool) []byte {
	t.Helper()
	if sized {
		e, err := zstd.NewWriter(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		return e.EncodeAll(make([]byte, n), nil)
	}
	var b bytes.Buffer
	e, err := zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 16 {
		_, _ = e.Write(make([]byte, n/16)) // into memory
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestBadBlocks(t *testing.T) {
	const limit = BlockLen
	packed, _ := NewEncoder(S2).Pack(nil, text(4096))
	zpacked, _ := NewEncoder(Zstd).Pack(nil, text(4096))
	mangled := bytes.Clone(packed)
	for i := HeaderLen + 2; i < len(mangled); i++ {
		mangled[i] ^= 0x5a
	}
	zbomb, sbomb := bomb(t, 64<<20, true), bomb(t, 64<<20, false)
	s2bomb := s2.Encode(nil, make([]byte, 64<<20))
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":               {nil, ErrCorrupt},
		"half a header":       {packed[:5], ErrCorrupt},
		"no body":             {packed[:HeaderLen], ErrCorrupt},
		"cut":                 {packed[:len(packed)-1], ErrCorrupt},
		"a byte more":         {append(bytes.Clone(packed), 0), ErrCorrupt},
		"unknown method":      {block(3, 100, 50, make([]byte, 50)), ErrCorrupt},
		"stands for nothing":  {block(S2, 0, 0, nil), ErrCorrupt},
		"grows":               {block(S2, 100, 100, make([]byte, 100)), ErrCorrupt},
		"raw that shrinks":    {block(None, 100, 50, make([]byte, 50)), ErrCorrupt},
		"4 GiB":               {block(S2, 1<<32-1, 10, make([]byte, 10)), ErrTooLarge},
		"one over the limit":  {block(Zstd, limit+1, 10, make([]byte, 10)), ErrTooLarge},
		"s2: other length":    {block(S2, 4095, uint32(len(packed)-HeaderLen), packed[HeaderLen:]), ErrCorrupt},
		"s2: mangled":         {mangled, ErrCorrupt},
		"s2: bomb":            {block(S2, limit, min(uint32(len(s2bomb)), limit-1), s2bomb[:min(len(s2bomb), limit-1)]), ErrCorrupt},
		"zstd: not a frame":   {block(Zstd, 100, 10, make([]byte, 10)), ErrCorrupt},
		"zstd: longer":        {block(Zstd, 4095, uint32(len(zpacked)-HeaderLen), zpacked[HeaderLen:]), ErrCorrupt},
		"zstd: shorter":       {block(Zstd, 4097, uint32(len(zpacked)-HeaderLen), zpacked[HeaderLen:]), ErrCorrupt},
		"zstd: bomb":          {block(Zstd, limit, uint32(len(zbomb)), zbomb), ErrCorrupt},
		"zstd: unsized bomb":  {block(Zstd, limit, uint32(len(sbomb)), sbomb), ErrCorrupt},
		"zstd: window of 3GB": {block(Zstd, limit, 7, []byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0xaf, 1}), ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			d := NewDecoder(limit)
			n, err := d.Len(c.b)
			if n > limit {
				t.Errorf("Len = %d, over the limit", n)
			}
			if err == nil {
				err = d.Unpack(make([]byte, n), c.b)
			}
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			runtime.ReadMemStats(&after)
			if got := after.TotalAlloc - before.TotalAlloc; got > 8<<20 {
				t.Errorf("%d bytes allocated to refuse a block", got)
			}
		})
	}
}

func TestUnpackWrongRoom(t *testing.T) {
	b, _ := NewEncoder(S2).Pack(nil, text(1000))
	if err := NewDecoder(1000).Unpack(make([]byte, 999), b); !errors.Is(err, ErrCorrupt) {
		t.Errorf("got %v, want ErrCorrupt", err)
	}
}

func TestMethodsAndSets(t *testing.T) {
	s := SetOf(S2, None, Method(9))
	if !s.Has(S2) || s.Has(Zstd) || !s.Has(None) || s.Has(Method(9)) {
		t.Errorf("set %b", s)
	}
	if S2.String() != "s2" || Zstd.String() != "zstd" || None.String() != "none" || Method(7).String() != "method 7" {
		t.Error("names", S2, Zstd, None, Method(7))
	}
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector a sync.Pool forgets at random")
	}
	for _, m := range []Method{S2, Zstd} {
		e, d := NewEncoder(m), NewDecoder(BlockLen)
		src, dst := text(BlockLen), make([]byte, BlockLen)
		noise := random(5, BlockLen)
		buf := make([]byte, 0, PackedLen(BlockLen))
		got := testing.AllocsPerRun(50, func() {
			b, ok := e.Pack(buf, src)
			if !ok || d.Unpack(dst, b) != nil {
				t.Fatal("failed")
			}
		})
		if got >= 1 { // a pool that the collector has emptied is filled again
			t.Errorf("%v: %v allocations a block", m, got)
		}
		if got := testing.AllocsPerRun(50, func() { e.Pack(buf, noise) }); got >= 1 {
			t.Errorf("%v: %v allocations a refused block", m, got)
		}
	}
}

// data draws bytes of every sort: noise, text, repetition, and mixtures.
func data(t *rapid.T) []byte {
	var b []byte
	for range rapid.IntRange(0, 4).Draw(t, "pieces") {
		n := rapid.SampledFrom([]int{1, 30, 300, 5000, 70000}).Draw(t, "len")
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			b = append(b, random(rapid.Uint64Max(100).Draw(t, "seed"), n)...)
		case 1:
			b = append(b, text(n)...)
		case 2:
			b = append(b, strings.Repeat("a", n)...)
		}
	}
	return b
}

func TestRoundTripProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		src := data(t)
		e := NewEncoder(rapid.SampledFrom([]Method{S2, Zstd}).Draw(t, "method"))
		b, ok := e.Pack(nil, src)
		if !ok {
			return
		}
		dst := make([]byte, len(src))
		if err := NewDecoder(MaxBlock).Unpack(dst, b); err != nil || !bytes.Equal(dst, src) {
			t.Fatalf("unpack: %v, equal %v", err, bytes.Equal(dst, src))
		}
	})
}

func FuzzDecode(f *testing.F) {
	for _, m := range []Method{S2, Zstd} {
		for _, n := range []int{MinLen, 1000, 20000} {
			b, _ := NewEncoder(m).Pack(nil, text(n))
			f.Add(b)
		}
	}
	f.Add(block(None, 3, 3, []byte("abc")))
	f.Add(block(Zstd, 1<<15, 60, bomb(f, 1<<20, true)))
	const limit = 1 << 15
	d, stage := NewDecoder(limit), new(Staging)
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := d.Len(b)
		if err == nil {
			if n < 1 || n > limit {
				t.Fatalf("Len = %d", n)
			}
			dst := make([]byte, n+8)
			copy(dst[n:], "sentinel")
			err = d.Unpack(dst[:n], b)
			if string(dst[n:]) != "sentinel" {
				t.Fatal("written beyond the room given")
			}
			// The Reader must come to the same verdict, in pieces.
			got := make([]byte, n)
			r := NewReader(bytes.NewReader(b), d, stage)
			var rerr error
			for at := 0; at < n && rerr == nil; {
				var k int
				k, rerr = r.Read(got[at:min(n, at+1000)])
				at += k
			}
			if (err == nil) != (rerr == nil) || err == nil && !bytes.Equal(got, dst[:n]) {
				t.Fatalf("Unpack says %v, Reader %v", err, rerr)
			}
		}
		if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTooLarge) {
			t.Fatalf("unexpected error %v", err)
		}
	})
}
