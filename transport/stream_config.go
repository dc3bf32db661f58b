package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/pack"
	"github.com/doorbell-rdma/doorbell/internal/rsocket"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// StreamConfig says how streams are made. The zero value is useful.
type StreamConfig struct {
	// SendBuffer is how many bytes may be under way that the peer has not acknowledged,
	// RecvBuffer how many it may send before they are read: 0 means 1 MiB, otherwise 4096
	// to 512 MiB; RecvBuffer is rounded up to an even number. Both are memory that the stream
	// holds. The peer's buffer is used by halves, and a message fits into one.
	SendBuffer, RecvBuffer int
	// Messages is how many writes may be under way in each direction before they are
	// acknowledged or read: 0 means 384, as in Linux; otherwise 16 to 4096.
	Messages int
	// Linger is how long Close waits until the peer has what was written: 0 means a second,
	// negative not at all.
	Linger time.Duration
	// KeepAlive is how often the peer is asked whether it is there, when nothing else is under
	// way to it: 0 means never, as in Linux. The stream to one that is not fails.
	KeepAlive time.Duration
	// Compression is what this side's bytes are compressed with, in blocks, if the peer is a
	// Doorbell stream that compresses too; its method may be the other one. A block that fails
	// half-way through a deadline goes out with the next Write, not with CloseWrite or Close.
	Compression Compression
	// MTU, AckTimeout and RemotePort are those of ConnParam.
	MTU        verbs.MTU
	AckTimeout time.Duration
	RemotePort uint16
}

// DialStream opens a stream to a service port of a host, with the default configuration: to
// a DialStream's counterpart ListenStream, or to a Linux program's rsocket that listens there.
// The result is a *Stream.
//
// An error wraps those of Dial; it also matches syscall.ECONNREFUSED when nobody listens.
func (d *Device) DialStream(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	s, err := StreamConfig{}.Dial(ctx, d, to)
	if err != nil {
		return nil, err // not a nil *Stream
	}
	return s, nil
}

// Dial opens a stream to a service port of a host.
func (cfg StreamConfig) Dial(ctx context.Context, d *Device, to netip.AddrPort) (*Stream, error) {
	s, err := cfg.dial(ctx, d, to)
	if err != nil {
		var r *RejectError
		if errors.As(err, &r) {
			err = fmt.Errorf("%w: %w", syscall.ECONNREFUSED, err)
		}
		return nil, &net.OpError{Op: "dial", Net: streamNetwork, Addr: &StreamAddr{to}, Err: err}
	}
	return s, nil
}

func (cfg StreamConfig) dial(ctx context.Context, d *Device, to netip.AddrPort) (*Stream, error) {
	s, p, err := cfg.newStream(d)
	if err != nil {
		return nil, err
	}
	if s.qp, err = d.Dial(ctx, to, p); err != nil {
		s.release()
		return nil, err
	}
	peer, err := rsocket.ParseConnData(s.qp.PrivateData())
	if err != nil {
		s.release()
		return nil, err
	}
	s.local, s.remote = StreamAddr{s.qp.LocalAddr()}, StreamAddr{to}
	s.start(peer)
	return s, nil
}

// streamMemory is the registered memory of a stream.
type streamMemory struct {
	send, recv, target *MR
	sendBuf, recvBuf   []byte // the rings
}

func (m *streamMemory) register(pd *PD, send, recv int) (err error) {
	m.sendBuf, m.recvBuf = make([]byte, send), make([]byte, recv)
	for _, r := range []struct {
		mr     **MR
		buf    []byte
		access verbs.Access
	}{
		{&m.send, m.sendBuf, 0},
		{&m.recv, m.recvBuf, verbs.LocalWrite | verbs.RemoteWrite},
		{&m.target, make([]byte, rsocket.TargetLen), verbs.LocalWrite | verbs.RemoteWrite},
	} {
		if *r.mr, err = pd.RegisterMR(r.buf, r.access); err != nil {
			return err
		}
	}
	return nil
}

// close ends all access to the memory.
func (m *streamMemory) close() {
	for _, mr := range []*MR{m.send, m.recv, m.target} {
		if mr != nil {
			_ = mr.Close() // no windows are bound to it, and it is closed once
		}
	}
}

// Defaults of StreamConfig.
const (
	streamBuffer   = 1 << 20
	streamMessages = 384
	streamLinger   = time.Second
	maxMessages    = 4096
)

// sizes resolves the configuration's buffers and messages.
func (cfg *StreamConfig) sizes() (send, recv, messages int, err error) {
	size := func(n int) int {
		if n == 0 {
			return streamBuffer
		}
		return n + n%2
	}
	send, recv, messages = size(cfg.SendBuffer), size(cfg.RecvBuffer), cfg.Messages
	if messages == 0 {
		messages = streamMessages
	}
	for _, n := range []int{send, recv} {
		if n < rsocket.MinBuffer || n > rsocket.MaxBuffer {
			err = fmt.Errorf("transport: stream: a buffer of %d bytes, want %d to %d", n, rsocket.MinBuffer, rsocket.MaxBuffer)
		}
	}
	if messages < rsocket.MinDepth || messages > maxMessages {
		err = fmt.Errorf("transport: stream: Messages is %d, want %d to %d", messages, rsocket.MinDepth, maxMessages)
	}
	return send, recv, messages, err
}

// newStream makes a stream without a queue pair, and what the connection takes.
func (cfg StreamConfig) newStream(d *Device) (*Stream, ConnParam, error) {
	s := &Stream{dev: d, linger: cfg.Linger, keepAlive: cfg.KeepAlive}
	if s.linger == 0 {
		s.linger = streamLinger
	}
	for _, w := range []*waiter{&s.r, &s.w, &s.c} {
		w.init()
	}
	s.rdl.wake = func() { s.kick(&s.r) }
	s.wdl.wake = func() { s.kick(&s.w) }
	s.ldl.wake = func() { s.kick(&s.c) }
	p, err := s.allocate(&cfg)
	if err != nil {
		s.release()
	}
	return s, p, err
}

// allocate makes the queues and the memory. When it fails the caller releases what there is.
func (s *Stream) allocate(cfg *StreamConfig) (p ConnParam, err error) {
	send, recv, messages, err := cfg.sizes()
	if err := errors.Join(err, cfg.Compression.check()); err != nil {
		return p, err
	}
	s.compression = cfg.Compression
	// A domain of its own: the peer's keys reach this stream's memory only.
	pd, err := s.dev.AllocPD()
	if err != nil {
		return p, err
	}
	if err := s.memory.register(pd, send, recv); err != nil {
		return p, err
	}
	receives := messages + streamSpare
	if s.sendCQ, err = s.dev.CreateCQ(messages); err != nil {
		return p, err
	}
	if s.recvCQ, err = s.dev.CreateCQ(receives); err != nil {
		return p, err
	}
	ring, target := s.memory.recv.Remote(), s.memory.target.Remote()
	s.conn, err = rsocket.New(rsocket.Config{
		SendBuffer: send, SendDepth: messages, Credits: messages, Offer: uint8(cfg.Compression.accepts()),
		Ring:   rsocket.Buffer{Addr: ring.Addr, RKey: ring.RKey, Length: ring.Length},
		Target: rsocket.Buffer{Addr: target.Addr, RKey: target.RKey}, TargetMem: s.memory.target.Bytes(),
	})
	if err != nil {
		return p, err
	}
	hello := s.conn.Hello()
	return ConnParam{
		PrivateData: hello.Append(nil), Type: verbs.RC, PD: pd, SendCQ: s.sendCQ, RecvCQ: s.recvCQ,
		Cap: verbs.QPCap{MaxSendWR: messages, MaxRecvWR: receives, MaxSendSGE: 2, MaxRecvSGE: 1, MaxInlineData: 16},
		// As rsockets does: it has no READs and atomics.
		ResponderResources: -1, InitiatorDepth: -1, Access: verbs.RemoteWrite,
		MTU: cfg.MTU, AckTimeout: cfg.AckTimeout, RemotePort: cfg.RemotePort,
		Prepare: func(q *QP) error {
			for left := receives; left > 0; {
				n, err := q.PostRecvList(noBuffers[:min(left, len(noBuffers))])
				if err != nil {
					return err
				}
				left -= n
			}
			return nil
		},
	}, nil
}

// start makes the stream usable once it has its queue pair.
func (s *Stream) start(peer rsocket.ConnData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn.Start(peer)
	s.pack = newStreamPack(s, s.compression, pack.Set(peer.Offer))
	s.advance(nil) // grants the second half of our buffer
	if s.keepAlive > 0 {
		s.alive = time.AfterFunc(s.keepAlive, s.keepalive)
	}
}

// release ends what the stream is built on; what it has of it.
func (s *Stream) release() {
	if s.qp != nil {
		_ = s.qp.Close() // closed once
	}
	for _, c := range []*CQ{s.sendCQ, s.recvCQ} {
		if c != nil {
			_ = c.Close() // the queue pair, its only user, is closed
		}
	}
	s.memory.close()
}
