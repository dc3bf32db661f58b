package pack

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

// flaky is a pipe's end that takes or gives a few bytes at a time and fails now and then.
type flaky struct {
	t    *rapid.T
	buf  bytes.Buffer
	rate int // of 10 calls, how many fail
}

func (f *flaky) fails() bool { return rapid.IntRange(1, 10).Draw(f.t, "luck") <= f.rate }

func (f *flaky) Write(p []byte) (int, error) {
	if !f.fails() {
		return f.buf.Write(p)
	}
	n := rapid.IntRange(0, len(p)).Draw(f.t, "part")
	f.buf.Write(p[:n])
	return n, os.ErrDeadlineExceeded
}

func (f *flaky) Read(p []byte) (int, error) {
	if f.fails() {
		return 0, os.ErrDeadlineExceeded
	}
	return f.buf.Read(p[:min(len(p), rapid.SampledFrom([]int{1, 7, 100, 1 << 16}).Draw(f.t, "chunk"))])
}

// TestStreamSurvivesDeadlines: whatever fails half-way, the n bytes that Write took arrive,
// once and in order.
func TestStreamSurvivesDeadlines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pipe := &flaky{t: t, rate: rapid.IntRange(0, 6).Draw(t, "rate")}
		stage := new(Staging)
		w := NewWriter(pipe, NewEncoder(rapid.SampledFrom([]Method{None, S2, Zstd}).Draw(t, "method")), stage)
		var want []byte
		for range rapid.IntRange(1, 4).Draw(t, "writes") {
			p := data(t)
			n, err := w.Write(p)
			if n > len(p) || n < len(p) && !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("Write of %d = %d, %v", len(p), n, err)
			}
			want = append(want, p[:n]...)
		}
		pipe.rate = min(pipe.rate, 5)
		for w.Flush() != nil {
		}
		r := NewReader(pipe, NewDecoder(BlockLen), stage)
		var got []byte
		p := make([]byte, rapid.SampledFrom([]int{1000, 100000}).Draw(t, "room"))
		for {
			n, err := r.Read(p)
			got = append(got, p[:n]...)
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				if !errors.Is(err, io.EOF) {
					t.Fatalf("Read: %v", err)
				}
				break
			}
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%d bytes taken, %d arrived, equal %v", len(want), len(got), bytes.Equal(got, want))
		}
	})
}

func TestReaderEnds(t *testing.T) {
	stage := new(Staging)
	var wire bytes.Buffer
	w := NewWriter(&wire, NewEncoder(S2), stage)
	if _, err := w.Write(text(5000)); err != nil {
		t.Fatal(err)
	}
	whole := bytes.Clone(wire.Bytes())
	for n := range whole {
		r := NewReader(iotest.OneByteReader(bytes.NewReader(whole[:n])), NewDecoder(BlockLen), stage)
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if k, err := r.Read(make([]byte, 100)); k != 0 || !errors.Is(err, want) {
			t.Fatalf("after %d of %d bytes: %d, %v, want %v", n, len(whole), k, err, want)
		}
	}
	r := NewReader(bytes.NewReader(whole), NewDecoder(BlockLen), stage)
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, text(5000)) {
		t.Fatalf("whole: %d bytes, %v", len(got), err)
	}
}

func TestReaderStaysBroken(t *testing.T) {
	stage := new(Staging)
	good := block(None, 3, 3, []byte("abc"))
	bad := block(S2, 100, 20, bytes.Repeat([]byte{0xff}, 20))
	large := block(None, BlockLen+1, BlockLen+1, nil)
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{"corrupt": {bad, ErrCorrupt}, "too large": {large, ErrTooLarge}} {
		r := NewReader(bytes.NewReader(append(append(bytes.Clone(good), c.b...), good...)), NewDecoder(BlockLen), stage)
		p := make([]byte, 10)
		if n, err := r.Read(p); n != 3 || err != nil {
			t.Fatalf("%s: the good block: %d, %v", name, n, err)
		}
		for range 3 {
			if n, err := r.Read(p); n != 0 || !errors.Is(err, c.want) {
				t.Errorf("%s: %d, %v, want %v", name, n, err, c.want)
			}
		}
	}
}

// TestIdleStreamHoldsNothing: between writes and reads there are no staging buffers.
func TestIdleStreamHoldsNothing(t *testing.T) {
	var wire bytes.Buffer
	stage := new(Staging)
	w, r := NewWriter(&wire, NewEncoder(Zstd), stage), NewReader(&wire, NewDecoder(BlockLen), stage)
	for _, p := range [][]byte{text(100000), random(9, 100000), text(10)} {
		if _, err := w.Write(p); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(p))
		if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, p) {
			t.Fatalf("read: %v, equal %v", err, bytes.Equal(got, p))
		}
		if w.pending != nil || w.owed != 0 || r.body != nil || r.out != nil {
			t.Errorf("idle, but holding %v %v %v %v", w.pending, w.owed, r.body, r.out)
		}
	}
}
