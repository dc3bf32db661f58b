package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"golang.org/x/net/nettest"

	"github.com/doorbell-rdma/doorbell/transport"
)

func TestCompressedStreamConn(t *testing.T) {
	for i, tc := range []struct {
		name string
		cfg  transport.StreamConfig
	}{
		{"s2", transport.StreamConfig{Compression: transport.CompressS2}},
		{"zstd through little", transport.StreamConfig{Compression: transport.CompressZstd, SendBuffer: 4096, RecvBuffer: 4096, Messages: 16}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := open(t, fmt.Sprintf("127.1.58.%d", 2*i+1), transport.Config{})
			b := open(t, fmt.Sprintf("127.1.58.%d", 2*i+2), transport.Config{})
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				s1, s2, err := openStreams(context.Background(), a, b, tc.cfg)
				if err != nil {
					return nil, nil, nil, err
				}
				return s1, s2, func() { _ = s1.Close(); _ = s2.Close() }, nil
			})
		})
	}
}

// TestCompressedStream: text takes less of the wire, noise hardly more, and both arrive; it takes
// two to compress.
func TestCompressedStream(t *testing.T) {
	text := []byte(strings.Repeat("a line of text that is much like the one before; ", 40000))
	for i, tc := range []struct {
		a, b, want transport.Compression
	}{
		{transport.CompressS2, transport.CompressS2, transport.CompressS2},
		{transport.CompressZstd, transport.CompressS2, transport.CompressZstd},
		{transport.CompressS2, transport.CompressNone, transport.CompressNone},
		{transport.CompressNone, transport.CompressZstd, transport.CompressNone},
	} {
		for _, whole := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v to %v, whole %v", tc.a, tc.b, whole), func(t *testing.T) {
				a := open(t, fmt.Sprintf("127.1.59.%d", 2*i+1), transport.Config{})
				b := open(t, fmt.Sprintf("127.1.59.%d", 2*i+2), transport.Config{})
				ln, err := transport.StreamConfig{Compression: tc.b}.Listen(b, netipPort(streamPort))
				if err != nil {
					t.Fatal(err)
				}
				defer ln.Close()
				dialed := make(chan *transport.Stream, 1)
				go func() {
					s, err := transport.StreamConfig{Compression: tc.a}.Dial(deadline(t), a, addrOf(b, streamPort))
					if err != nil {
						t.Error(err)
					}
					dialed <- s
				}()
				c, err := ln.Accept()
				if err != nil {
					t.Fatal(err)
				}
				sb := c.(*transport.Stream)
				defer sb.Close()
				sa := <-dialed
				if sa == nil {
					t.FailNow()
				}
				defer sa.Close()
				if sa.Compression() != tc.want {
					t.Fatalf("compressed with %v, want %v", sa.Compression(), tc.want)
				}
				for _, data := range [][]byte{text, noise(1, 300000)} {
					before := a.Counters()
					done := make(chan error, 1)
					go func() {
						if whole {
							done <- second(sa.ReadFrom(iotest.DataErrReader(bytes.NewReader(data))))
							return
						}
						for p := data; len(p) > 0; p = p[min(len(p), 7777):] {
							if _, err := sa.Write(p[:min(len(p), 7777)]); err != nil {
								done <- err
								return
							}
						}
						done <- nil
					}()
					got := make([]byte, len(data))
					if _, err := io.ReadFull(sb, got); err != nil || !bytes.Equal(got, data) {
						t.Fatalf("read: %v, equal %v", err, bytes.Equal(got, data))
					}
					if err := <-done; err != nil {
						t.Fatal(err)
					}
					after := a.Counters()
					sent := after["wire_bytes_out"] - before["wire_bytes_out"]
					if again := after["qp_retransmits"] - before["qp_retransmits"]; again > 0 {
						t.Logf("%d packets were sent again: the machine is too busy to count bytes", again)
						sent = 0
					}
					switch text := data[0] == 'a'; {
					case text && tc.want != transport.CompressNone && sent > uint64(len(data))/4:
						t.Errorf("%d bytes on the wire for %d of text", sent, len(data))
					case !text && sent > uint64(len(data))*5/4:
						t.Errorf("%d bytes on the wire for %d of noise", sent, len(data))
					}
				}
				// The other way, into a writer and to the end.
				go func() {
					_, _ = sb.Write(text) // what does not arrive is seen below
					_ = sb.CloseWrite()
				}()
				var all bytes.Buffer
				if n, err := sa.WriteTo(&all); err != nil || n != int64(len(text)) || !bytes.Equal(all.Bytes(), text) {
					t.Errorf("WriteTo: %d, %v", n, err)
				}
			})
		}
	}
}

// TestCompressedStreamCorrupt: bytes that are no blocks end the stream for both, with a reason.
func TestCompressedStreamCorrupt(t *testing.T) {
	a, b := open(t, "127.1.60.1", transport.Config{}), open(t, "127.1.60.2", transport.Config{})
	sa, sb := streamPair(t, a, b, transport.StreamConfig{Compression: transport.CompressS2})
	good, alsoGood := streamPair(t, a, b, transport.StreamConfig{Compression: transport.CompressS2})
	transport.Uncompressed(sa)
	if _, err := sa.Write([]byte("\x01\xff\xff\xff\xff\x00\x00\x00\x09123456789")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := sb.Read(make([]byte, 10)); !errors.Is(err, transport.ErrStreamProtocol) {
			t.Errorf("reading a block of 4 GiB: %v", err)
		}
	}
	if _, err := sb.Write([]byte("x")); !errors.Is(err, transport.ErrStreamProtocol) {
		t.Errorf("writing afterwards: %v", err)
	}
	if _, err := sa.Read(make([]byte, 10)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the liar reads: %v", err)
	}
	if _, err := good.Write([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 10)
	if _, err := io.ReadFull(alsoGood, p); err != nil || string(p) != "still here" {
		t.Fatal(string(p), err)
	}
}
