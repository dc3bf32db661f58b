package transport

import (
	"errors"
	"fmt"
	"io"

	"github.com/doorbell-rdma/doorbell/internal/pack"
)

// streamPack is what a stream has when both ends agreed to compress: its bytes travel in
// blocks (package pack), in both directions, each packed by the sender's method if that pays.
// The reader belongs to who holds the stream's rlock, the writer to who holds wlock.
type streamPack struct {
	method Compression
	r      *pack.Reader
	w      *pack.Writer
	stage  pack.Staging
}

// rawStream is a stream's bytes as they travel. The caller holds rlock to read, wlock to write.
type rawStream Stream

func (s *rawStream) Read(b []byte) (int, error)  { return (*Stream)(s).read(b) }
func (s *rawStream) Write(b []byte) (int, error) { return (*Stream)(s).write(b) }

// newStreamPack returns what a stream needs whose ends offered a set of methods each; nil when
// one of them offered none.
func newStreamPack(s *Stream, own Compression, peer pack.Set) *streamPack {
	if own.accepts() == 0 || !peer.Has(pack.S2) && !peer.Has(pack.Zstd) {
		return nil
	}
	p := &streamPack{method: own.towards(peer)}
	p.r = pack.NewReader((*rawStream)(s), pack.NewDecoder(pack.BlockLen), &p.stage)
	p.w = pack.NewWriter((*rawStream)(s), pack.NewEncoder(pack.Method(p.method)), &p.stage)
	return p
}

// Compression returns what this side's bytes are compressed with.
func (s *Stream) Compression() Compression {
	if s.pack == nil {
		return CompressNone
	}
	return s.pack.method
}

// readPacked is read of a stream that is compressed. The caller holds rlock.
func (s *Stream) readPacked(b []byte) (int, error) {
	n, err := s.pack.r.Read(b)
	if errors.Is(err, pack.ErrCorrupt) || errors.Is(err, pack.ErrTooLarge) {
		err = fmt.Errorf("%w: %w", ErrStreamProtocol, err)
		s.mu.Lock()
		if s.dead == nil {
			s.violated(err)
		}
		s.mu.Unlock()
		s.kick(&s.w)
	}
	return n, err
}

// writeToPacked is WriteTo of a stream that is compressed. The caller holds rlock.
func (s *Stream) writeToPacked(w io.Writer) (total int64, err error) {
	b := s.pack.stage.Get(pack.BlockLen)
	defer s.pack.stage.Put(b)
	buf := b.B[:pack.BlockLen]
	for {
		n, err := s.readPacked(buf)
		if n > 0 {
			k, werr := w.Write(buf[:n])
			total += int64(min(max(k, 0), n))
			switch {
			case werr != nil:
				return total, werr
			case k != n:
				return total, io.ErrShortWrite
			}
		}
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, s.opError("writeto", err)
		}
	}
}

// readFromPacked is ReadFrom of a stream that is compressed. The caller holds wlock.
func (s *Stream) readFromPacked(r io.Reader) (total int64, err error) {
	b := s.pack.stage.Get(pack.BlockLen)
	defer s.pack.stage.Put(b)
	buf := b.B[:pack.BlockLen]
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			k, err := s.pack.w.Write(buf[:n])
			total += int64(k)
			if err != nil {
				return total, s.opError("readfrom", err)
			}
		}
		if errors.Is(rerr, io.EOF) {
			return total, nil
		}
		if rerr != nil {
			return total, rerr
		}
	}
}
