package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
)

// benchConns connects two devices of this process for messages.
func benchConns(b *testing.B, client, server string, dev transport.Config, cfg transport.MessageConfig) (x, y *transport.Conn) {
	b.Helper()
	devA, devB := open(b, client, dev), open(b, server, dev)
	ctx := deadline(b)
	ln, err := cfg.Listen(devB, netip.AddrPortFrom(netip.Addr{}, servicePort))
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() {
		var err error
		y, err = ln.Accept(ctx)
		accepted <- err
	}()
	x, err = cfg.Dial(ctx, devA, netip.AddrPortFrom(devB.LocalAddr().Addr(), servicePort))
	if err := errors.Join(err, <-accepted); err != nil {
		b.Fatal(err)
	}
	return x, y
}

// messageRoundTrip is the full round trip of a message of n bytes, both ends spinning in Recv
// for as long as it takes. Compare it to BenchmarkRoundTrip64, the same with verbs and Poll.
func messageRoundTrip(b *testing.B, client, server string, n int) {
	x, y := benchConns(b, client, server, transport.Config{Spin: time.Second}, transport.MessageConfig{})
	ctx := context.Background()
	done := make(chan error, 1)
	go func() {
		p := make([]byte, n)
		for {
			k, err := y.RecvInto(ctx, p)
			if err == nil {
				err = y.Send(ctx, p[:k])
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	p := make([]byte, n)
	round := func() {
		if err := x.Send(ctx, p); err != nil {
			b.Fatal(err)
		}
		if _, err := x.RecvInto(ctx, p); err != nil {
			b.Fatal(err)
		}
	}
	for range 1000 {
		round()
	}
	b.ReportAllocs()
	for b.Loop() {
		round()
	}
	b.StopTimer()
	if err := x.Close(); err != nil {
		b.Fatal(err)
	}
	if err := <-done; !errors.Is(err, io.EOF) {
		b.Error(err)
	}
	_ = y.Close() // both ends are done
}

func BenchmarkMessageRoundTrip64(b *testing.B) { messageRoundTrip(b, "127.3.50.1", "127.3.50.2", 64) }

func BenchmarkMessageRoundTrip4K(b *testing.B) { messageRoundTrip(b, "127.3.51.1", "127.3.51.2", 4096) }

// messageStream is messages in one direction as fast as the receiver consumes them.
func messageStream(b *testing.B, client, server string, cfg transport.MessageConfig, msg []byte) {
	x, y := benchConns(b, client, server, transport.Config{}, cfg)
	ctx := context.Background()
	done := make(chan error, 1)
	go func() {
		for {
			m, err := y.RecvBuffer(ctx)
			if err != nil {
				done <- err
				return
			}
			m.Release()
		}
	}()
	send := func() {
		if err := x.Send(ctx, msg); err != nil {
			b.Fatal(err)
		}
	}
	for range 500 {
		send()
	}
	b.SetBytes(int64(len(msg)))
	b.ReportAllocs()
	for b.Loop() {
		send()
	}
	// What is under way at the end is less than the buffers, of messages without number.
	b.StopTimer()
	if err := x.Close(); err != nil {
		b.Fatal(err)
	}
	if err := <-done; !errors.Is(err, io.EOF) {
		b.Error(err)
	}
	_ = y.Close() // both ends are done
}

func BenchmarkMessageStream64(b *testing.B) {
	messageStream(b, "127.3.52.1", "127.3.52.2", transport.MessageConfig{Buffers: 256, MaxMessage: 4096}, make([]byte, 64))
}

func BenchmarkMessageStream64K(b *testing.B) {
	messageStream(b, "127.3.53.1", "127.3.53.2", transport.MessageConfig{}, make([]byte, 65536))
}

// BenchmarkMessageCompressed is messages of 64 KiB with each method and sort of data: bytes of
// the program's per second, whatever goes over the wire.
func BenchmarkMessageCompressed(b *testing.B) {
	i := 0
	for _, kind := range Payloads {
		for _, c := range []transport.Compression{transport.CompressNone, transport.CompressS2, transport.CompressZstd} {
			i++
			b.Run(fmt.Sprintf("%s/%v", kind, c), func(b *testing.B) {
				messageStream(b, fmt.Sprintf("127.3.54.%d", 2*i), fmt.Sprintf("127.3.54.%d", 2*i+1), transport.MessageConfig{Compression: c}, Payload(kind, 65536))
			})
		}
	}
}
