package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
)

// MessageTest is a bandwidth test of messages (transport.Conn), compressed or not: how fast a
// program's bytes get to the other program, whatever goes over the wire for them.
//
// The client sends messages of one size and content, and behind them an empty one, which the
// server answers with what it has received since the one before: the number of messages (8
// bytes), of bytes (8) and the CRC-32 of the last message (4), big-endian. Warm-up and
// measurement are one such round each.
type MessageTest struct {
	// Payload is what each message holds, 1 byte at least.
	Payload []byte
	// Iters is how many messages to send; 0 if Duration decides.
	Iters    int64
	Duration time.Duration
}

// Warm runs the client's side before what is measured: enough for caches and windows.
func (m *MessageTest) Warm(ctx, interrupt context.Context, conn *transport.Conn) error {
	warm := MessageTest{Payload: m.Payload, Iters: int64(max(min(1000, 16<<20/len(m.Payload)), 1))}
	if m.Duration == 0 {
		warm.Iters = min(warm.Iters, m.Iters)
	}
	_, err := warm.Run(ctx, interrupt, conn)
	return err
}

// Run runs the client's side and returns the figures: Elapsed is until the server has answered
// that it has everything. When interrupt is done it ends in good order and returns
// ErrInterrupted with what was measured.
func (m *MessageTest) Run(ctx, interrupt context.Context, conn *transport.Conn) (r Result, err error) {
	start := time.Now()
	n := uint64(0)
	for ; m.Duration > 0 || n < uint64(m.Iters); n++ {
		// A clock read costs as much as a small message; a few more do not matter.
		if n%8 == 0 && (interrupt.Err() != nil || m.Duration > 0 && time.Since(start) >= m.Duration) {
			break
		}
		if err := conn.Send(ctx, m.Payload); err != nil {
			return r, messageError(err)
		}
	}
	if err := conn.Send(ctx, nil); err != nil {
		return r, messageError(err)
	}
	answer, err := conn.Recv(ctx)
	if err != nil {
		return r, messageError(err)
	}
	took := time.Since(start)
	want := report(n, n*uint64(len(m.Payload)), crc32.ChecksumIEEE(m.Payload))
	if n == 0 {
		want = report(0, 0, 0)
	}
	if string(answer) != string(want) {
		return r, fmt.Errorf("the peer received %x (messages, bytes, CRC), want %x", answer, want)
	}
	rate := float64(n) / max(took, 1).Seconds()
	r = Result{
		Test: SendBW, Size: len(m.Payload), Iters: n, Elapsed: took,
		Rate: rate, Average: rate * float64(len(m.Payload)), Interrupted: interrupt.Err() != nil,
	}
	if r.Interrupted {
		return r, ErrInterrupted
	}
	return r, nil
}

func report(messages, size uint64, sum uint32) []byte {
	b := binary.BigEndian.AppendUint64(nil, messages)
	b = binary.BigEndian.AppendUint64(b, size)
	return binary.BigEndian.AppendUint32(b, sum)
}

// ServeMessages runs the server's side until the client closes, and returns how many messages
// and bytes it received.
func ServeMessages(ctx context.Context, conn *transport.Conn) (messages, size uint64, err error) {
	p := make([]byte, conn.MaxMessage())
	var n, bytes uint64
	last := 0
	for {
		k, err := conn.RecvInto(ctx, p)
		switch {
		case errors.Is(err, io.EOF):
			return messages + n, size + bytes, nil
		case err != nil:
			return messages, size, messageError(err)
		case k > 0:
			n, bytes, last = n+1, bytes+uint64(k), k
			continue
		}
		// What is behind last is an older message; an empty one leaves p alone.
		if err := conn.Send(ctx, report(n, bytes, crc32.ChecksumIEEE(p[:last]))); err != nil {
			return messages, size, messageError(err)
		}
		messages, size = messages+n, size+bytes
		n, bytes, last = 0, 0, 0
	}
}

// messageError says what the end of a connection means here.
func messageError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, transport.ErrDisconnected) {
		return fmt.Errorf("%w: %w", ErrPeerGone, err)
	}
	return err
}
