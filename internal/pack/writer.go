package pack

import (
	"errors"
	"io"
)

// BlockLen is how many bytes of a stream make a block, at most.
const BlockLen = 1 << 16

// coalesce is the longest raw block that is copied behind its header, to go out in one write.
const coalesce = 1 << 12

// Writer cuts a byte stream into blocks and writes them to w, each as soon as it is there:
// nothing stays behind when Write returns without error. One goroutine at a time.
//
// A write of w that fails half-way, for a deadline say, leaves the stream usable: what the
// header of a block has promised goes out first with the next Write or Flush.
type Writer struct {
	w     io.Writer
	enc   *Encoder
	stage *Staging

	pending *Buffer // a block that is not out yet, nil for none
	off     int     // of pending: what is out
	owed    int     // bytes of a raw block that its header has promised
}

// NewWriter returns a Writer that packs with enc and stages in stage.
func NewWriter(w io.Writer, enc *Encoder, stage *Staging) *Writer {
	return &Writer{w: w, enc: enc, stage: stage}
}

// Write writes p. When it fails, the n bytes that it took are out or go out with the next
// Write or Flush, and the rest was not looked at.
func (w *Writer) Write(p []byte) (n int, err error) {
	if err := w.Flush(); err != nil {
		return 0, err
	}
	for len(p) > 0 {
		var k int
		if w.owed > 0 {
			if k, err = w.w.Write(p[:min(w.owed, len(p))]); k == 0 && err == nil {
				err = io.ErrShortWrite
			}
			w.owed -= k
		} else {
			k, err = w.block(p[:min(BlockLen, len(p))])
		}
		n, p = n+k, p[k:]
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// block writes one block of at most BlockLen bytes, or the beginning of a long raw one.
func (w *Writer) block(p []byte) (n int, err error) {
	b := w.stage.Get(PackedLen(len(p)))
	var packed bool
	if b.B, packed = w.enc.Pack(b.B, p); !packed {
		b.B = b.B[:HeaderLen]
		Header{Method: None, Raw: len(p), Packed: len(p)}.put(b.B)
		if len(p) <= coalesce {
			b.B = append(b.B, p...)
			packed = true
		}
	}
	w.pending, w.off = b, 0
	err = w.Flush()
	switch {
	case err != nil && w.off == 0:
		w.drop() // nothing is out, so it has not been taken
		return 0, err
	case packed:
		return len(p), err
	}
	w.owed = len(p)
	return 0, err
}

// Flush writes what an earlier Write could not.
func (w *Writer) Flush() error {
	if w.pending == nil {
		return nil
	}
	for w.off < len(w.pending.B) {
		k, err := w.w.Write(w.pending.B[w.off:])
		w.off += k
		switch {
		case err != nil:
			return err
		case k == 0:
			return io.ErrShortWrite
		}
	}
	w.drop()
	return nil
}

func (w *Writer) drop() {
	w.stage.Put(w.pending)
	w.pending, w.off = nil, 0
}

// Reader reads what a Writer has written. One goroutine at a time.
//
// A read of r that fails, for a deadline say, loses nothing: the next Read goes on. A block
// that is corrupt or too large fails every Read from then on.
type Reader struct {
	r     io.Reader
	dec   *Decoder
	stage *Staging
	err   error // the stream is of no more use

	head [HeaderLen]byte
	h    Header  // of the block that is being read; Raw is 0 between blocks
	got  int     // bytes of the header, then of the packed bytes, that are here
	body *Buffer // packed bytes; nil for raw blocks
	out  *Buffer // unpacked bytes that no Read took yet, nil for none
	off  int     // of out: what was taken
}

// NewReader returns a Reader that unpacks with dec and stages in stage.
func NewReader(r io.Reader, dec *Decoder, stage *Staging) *Reader {
	return &Reader{r: r, dec: dec, stage: stage}
}

// Read reads at least one byte into p, unless p is empty. The end of r between blocks, or in
// a raw one, is io.EOF; in a packed one it is io.ErrUnexpectedEOF.
func (r *Reader) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	if n = r.take(p); n > 0 {
		return n, nil
	}
	if r.err != nil {
		return 0, r.err
	}
	if r.h.Raw == 0 {
		if err := r.header(); err != nil {
			return 0, err
		}
	}
	if r.h.Method != None {
		return r.packed(p)
	}
	// As the bytes arrive: nobody waits for the rest of a raw block.
	n, err = r.r.Read(p[:min(len(p), r.h.Raw-r.got)])
	if r.got += n; r.got == r.h.Raw {
		r.h, r.got = Header{}, 0
	}
	return n, err
}

// take moves bytes that are unpacked already.
func (r *Reader) take(p []byte) int {
	if r.out == nil {
		return 0
	}
	n := copy(p, r.out.B[r.off:])
	if r.off += n; r.off == len(r.out.B) {
		r.stage.Put(r.out)
		r.out, r.off = nil, 0
	}
	return n
}

// fill reads into b from r.got on until it is full.
func (r *Reader) fill(b []byte) error {
	for r.got < len(b) {
		n, err := r.r.Read(b[r.got:])
		r.got += n
		if err != nil && r.got < len(b) {
			return err
		}
	}
	return nil
}

func (r *Reader) header() error {
	if err := r.fill(r.head[:]); err != nil {
		if r.got > 0 {
			err = cut(err)
		}
		return err
	}
	h, err := ParseHeader(r.head[:], r.dec.limit)
	if err != nil {
		r.err = err
		return err
	}
	r.h, r.got = h, 0
	if h.Method != None {
		r.body = r.stage.Get(h.Packed)
		r.body.B = r.body.B[:h.Packed]
	}
	return nil
}

// packed reads the rest of a packed block and unpacks it, into p if it fits.
func (r *Reader) packed(p []byte) (int, error) {
	if err := r.fill(r.body.B); err != nil {
		return 0, cut(err)
	}
	dst, h := p, r.h
	if len(p) < h.Raw {
		r.out, r.off = r.stage.Get(h.Raw), 0
		r.out.B = r.out.B[:h.Raw]
		dst = r.out.B
	}
	err := unpack(h.Method, dst[:h.Raw], r.body.B)
	r.stage.Put(r.body)
	r.h, r.got, r.body = Header{}, 0, nil
	if err != nil {
		r.stage.Put(r.out)
		r.out, r.err = nil, err
		return 0, err
	}
	if r.out == nil {
		return h.Raw, nil
	}
	return r.take(p), nil
}

// cut turns an end in the middle of something into an error.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
