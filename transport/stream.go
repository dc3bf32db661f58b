package transport

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/rsocket"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Stream is a byte stream over a connection: a net.Conn that speaks the rsockets protocol of
// Linux, so that the other end may be a Stream or a program that uses rsockets.
//
// All methods may be called by any goroutine. Reads exclude each other, so do writes; a Read
// and a Write go on at the same time. Write returns when all is on its way into the peer's
// buffer and waits while that is full; small writes are not gathered. A stream has no
// goroutine of its own, and makes progress while its methods are called: a peer that fills
// our buffer waits until it is read.
//
// Errors are *net.OpError around one of these: io.EOF (bare) when the peer has closed its
// half and everything was read; net.ErrClosed after Close; os.ErrDeadlineExceeded;
// syscall.EPIPE for writing after CloseWrite; syscall.ECONNRESET when the peer has closed,
// or vanished; ErrStreamProtocol when it does not keep to the protocol.
type Stream struct {
	dev    *Device
	qp     *QP
	sendCQ *CQ
	recvCQ *CQ
	memory streamMemory
	linger time.Duration

	local, remote StreamAddr

	compression Compression // as configured
	pack        *streamPack // nil when bytes travel as they are

	rlock, wlock sync.Mutex    // one reader, one writer at a time
	nudged       verbs.Instant // when the writer last drove the wire; under wlock
	nudges       uint32        // how often; under wlock
	r, w, c      waiter        // the reader, the writer, and who closes
	rdl, wdl     deadline
	ldl          deadline // how long Close waits

	keepAlive time.Duration
	alive     *time.Timer

	mu      sync.Mutex // guards what follows
	conn    *rsocket.Conn
	closed  bool
	reading bool  // somebody looks at what is in the receive ring
	dead    error // why nothing can be sent or received any more; nil while it can
	spent   int   // receives to post again
	msg     rsocket.Message
	wrs     [1]verbs.SendWR
	sges    [2]verbs.SGE
	wcs     [streamBatch]verbs.WC
}

// ErrStreamProtocol: the peer of a stream has done what the rsockets protocol forbids. The
// error says what; the stream is of no more use.
var ErrStreamProtocol = rsocket.ErrProtocol

// StreamAddr is the address of a stream's end, a host and a service port.
type StreamAddr struct{ netip.AddrPort }

// Network returns "rdma".
func (StreamAddr) Network() string { return streamNetwork }

const streamNetwork = "rdma"

// LocalAddr returns our end's *StreamAddr. On the side that has dialed its port is the
// device's UDP port.
func (s *Stream) LocalAddr() net.Addr { return &s.local }

// RemoteAddr returns the peer's *StreamAddr.
func (s *Stream) RemoteAddr() net.Addr { return &s.remote }

// Read reads what is there, up to len(b) bytes, and waits only if there is nothing.
func (s *Stream) Read(b []byte) (int, error) {
	s.rlock.Lock()
	defer s.rlock.Unlock()
	var n int
	var err error
	if s.pack != nil && len(b) > 0 {
		n, err = s.readPacked(b)
	} else {
		n, err = s.read(b)
	}
	return n, s.opError("read", err)
}

func (s *Stream) read(b []byte) (int, error) {
	first, more, err := s.awaitData(len(b))
	if err != nil || first == nil {
		return 0, err
	}
	n := copy(b, first)
	n += copy(b[n:], more)
	s.consume(n)
	return n, nil
}

// awaitData waits for data and returns the pieces of the ring where it is, until consume;
// nothing if want is 0 and there is none.
func (s *Stream) awaitData(want int) (first, more []byte, err error) {
	for {
		seen := s.r.gen.Load()
		s.mu.Lock()
		first, more, err = s.readable()
		cq := s.cq(rsocket.BlockedPeer)
		s.mu.Unlock()
		if first != nil || err != nil || want == 0 {
			return first, more, err
		}
		if err := s.wait(&s.r, cq, seen); err != nil {
			return nil, nil, err
		}
	}
}

// readable says what there is to read, or why there will be nothing. The caller holds mu.
func (s *Stream) readable() (first, more []byte, err error) {
	switch {
	case s.closed:
		return nil, nil, net.ErrClosed
	case s.rdl.expired.Load():
		return nil, nil, os.ErrDeadlineExceeded
	case s.conn.ReadClosed():
		return nil, nil, io.EOF
	}
	s.advance(&s.r)
	if off, n, k := s.conn.Readable(); n > 0 {
		s.reading = true
		ring := s.memory.recvBuf
		return ring[off : off+n], ring[:k], nil
	}
	if s.conn.EOF() {
		return nil, nil, io.EOF
	}
	return nil, nil, s.dead
}

// consume gives n bytes that awaitData returned, which were read, back to the peer.
func (s *Stream) consume(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reading = false
	switch {
	case s.closed:
	case s.conn.ReadClosed():
		s.conn.Discard()
	default:
		s.conn.Consume(n)
	}
	s.control()
}

// WriteTo writes everything that comes until the end of the stream to w, straight from the
// receive buffer. Reads wait meanwhile.
func (s *Stream) WriteTo(w io.Writer) (total int64, err error) {
	s.rlock.Lock()
	defer s.rlock.Unlock()
	if s.pack != nil {
		return s.writeToPacked(w)
	}
	for {
		piece, _, err := s.awaitData(1)
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, s.opError("writeto", err)
		}
		// In pieces, so that the peer may go on meanwhile.
		piece = piece[:min(len(piece), len(s.memory.recvBuf)/4)]
		n, err := w.Write(piece)
		n = min(max(n, 0), len(piece))
		total += int64(n)
		s.consume(n)
		if err != nil {
			return total, err
		}
		if n < len(piece) {
			return total, io.ErrShortWrite
		}
	}
}

// Write sends b. It returns when b may be used again, with n < len(b) only if there is an
// error: then n bytes are on their way.
func (s *Stream) Write(b []byte) (int, error) {
	s.wlock.Lock()
	defer s.wlock.Unlock()
	var n int
	var err error
	if s.pack != nil && len(b) > 0 {
		n, err = s.pack.w.Write(b)
	} else {
		n, err = s.write(b)
	}
	return n, s.opError("write", err)
}

func (s *Stream) write(b []byte) (n int, err error) {
	for {
		off, room, err := s.awaitRoom(len(b) - n)
		if err != nil || n == len(b) {
			return n, err
		}
		ring := s.memory.sendBuf
		part := b[n : n+room]
		k := copy(ring[off:], part)
		copy(ring, part[k:])
		if err := s.send(room); err != nil {
			return n, err
		}
		if n += room; n == len(b) {
			return n, nil
		}
	}
}

// awaitRoom waits until up to want bytes can be sent and returns where in the send ring they
// belong; they may go on at its beginning. With want 0 it only looks for errors.
func (s *Stream) awaitRoom(want int) (off, room int, err error) {
	for {
		seen := s.w.gen.Load()
		s.mu.Lock()
		room, why, err := s.room(want)
		off, cq := s.conn.Offset(), s.cq(why)
		s.mu.Unlock()
		if err != nil || room > 0 || want == 0 {
			return off, room, err
		}
		if err := s.wait(&s.w, cq, seen); err != nil {
			return 0, 0, err
		}
	}
}

// room says how many bytes can be sent, or why none ever will. The caller holds mu.
func (s *Stream) room(want int) (room int, why rsocket.Blocked, err error) {
	if err := s.writable(); err != nil {
		return 0, 0, err
	}
	s.advance(&s.w)
	if err := s.writable(); err != nil {
		return 0, 0, err
	}
	room, why = s.conn.Room(want)
	return room, why, nil
}

func (s *Stream) writable() error {
	switch {
	case s.closed:
		return net.ErrClosed
	case s.wdl.expired.Load():
		return os.ErrDeadlineExceeded
	case s.conn.WriteClosed():
		return syscall.EPIPE
	case s.dead != nil:
		return s.dead
	case s.conn.PeerGone():
		return syscall.ECONNRESET
	}
	return nil
}

// send posts the next n bytes of the send ring.
func (s *Stream) send(n int) error {
	s.mu.Lock()
	if s.closed || s.conn.WriteClosed() || s.dead != nil {
		err := s.writable()
		s.mu.Unlock()
		return err
	}
	s.conn.Send(n, &s.msg)
	err := s.post()
	behind := s.conn.Unacked() > 1
	s.mu.Unlock()
	if behind {
		s.nudge()
	}
	return err
}

// ReadFrom sends what r yields until io.EOF, straight from the send buffer. Writes wait
// meanwhile, also for r.
func (s *Stream) ReadFrom(r io.Reader) (total int64, err error) {
	s.wlock.Lock()
	defer s.wlock.Unlock()
	if s.pack != nil {
		return s.readFromPacked(r)
	}
	ring := s.memory.sendBuf
	for {
		off, room, err := s.awaitRoom(len(ring) / 4)
		if err != nil {
			return total, s.opError("readfrom", err)
		}
		n, rerr := r.Read(ring[off:min(off+room, len(ring))])
		if n > 0 {
			if err := s.send(n); err != nil {
				return total, s.opError("readfrom", err)
			}
			total += int64(n)
		}
		if errors.Is(rerr, io.EOF) {
			return total, nil
		}
		if rerr != nil {
			return total, rerr
		}
	}
}

// CloseWrite ends our half: the peer reads io.EOF behind what was written. Reading goes on.
func (s *Stream) CloseWrite() error {
	return s.closeHalf(s.conn.CloseWrite)
}

// CloseRead ends the peer's half for us: Read returns io.EOF from now on. What has come is
// dropped, and what still comes when another method is called; the peer is not told.
func (s *Stream) CloseRead() error {
	return s.closeHalf(func() {
		s.conn.CloseRead()
		if !s.reading {
			s.conn.Discard()
		}
	})
}

func (s *Stream) closeHalf(end func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.opError("close", net.ErrClosed)
	}
	end()
	s.advance(nil)
	s.kick(&s.r)
	s.kick(&s.w)
	return nil
}

// Close ends the stream. Blocked calls return net.ErrClosed. What was written reaches the
// peer: Close waits until it has, for up to StreamConfig.Linger. What was not read is dropped.
func (s *Stream) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return s.opError("close", net.ErrClosed)
	}
	s.closed = true
	s.conn.Close()
	s.advance(nil)
	s.mu.Unlock()
	s.kick(&s.r)
	s.kick(&s.w)
	s.rdl.stop()
	s.wdl.stop()
	if s.alive != nil {
		s.alive.Stop()
	}
	s.drain()
	s.release()
	return nil
}

// drain waits until the peer has everything, has gone, or the time is over.
func (s *Stream) drain() {
	if s.linger <= 0 {
		return
	}
	s.ldl.set(time.Now().Add(s.linger))
	defer s.ldl.stop()
	for !s.ldl.expired.Load() {
		seen := s.c.gen.Load()
		s.mu.Lock()
		s.advance(&s.c)
		done := s.dead != nil || s.conn.Ended()
		s.mu.Unlock()
		if done || s.wait(&s.c, s.sendCQ, seen) != nil {
			return
		}
	}
}

// SetDeadline sets both deadlines.
func (s *Stream) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

// SetReadDeadline sets when a Read, present or future, gives up; the zero time is never.
func (s *Stream) SetReadDeadline(t time.Time) error { return s.setDeadline(&s.rdl, t) }

// SetWriteDeadline sets when a Write, present or future, gives up; the zero time is never.
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.setDeadline(&s.wdl, t) }

func (s *Stream) setDeadline(d *deadline, t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.opError("set", net.ErrClosed)
	}
	d.set(t)
	return nil
}

// opError wraps an error as package net does.
func (s *Stream) opError(op string, err error) error {
	if err == nil || err == io.EOF { //nolint:errorlint // never wrapped here
		return err
	}
	return &net.OpError{Op: op, Net: streamNetwork, Source: &s.local, Addr: &s.remote, Err: err}
}
