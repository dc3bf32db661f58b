package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/net/nettest"

	"github.com/doorbell-rdma/doorbell/transport"
)

const streamPort = 7481

// streamPair opens a stream between two devices.
func streamPair(t testing.TB, a, b *transport.Device, cfg transport.StreamConfig) (sa, sb *transport.Stream) {
	t.Helper()
	sa, sb, err := openStreams(t.Context(), a, b, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = sa.Close()
		_ = sb.Close()
	})
	return sa, sb
}

func openStreams(ctx context.Context, a, b *transport.Device, cfg transport.StreamConfig) (sa, sb *transport.Stream, err error) {
	ln, err := cfg.Listen(b, netip.AddrPortFrom(netip.Addr{}, streamPort))
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() {
		c, err := ln.Accept()
		if err == nil {
			sb = c.(*transport.Stream)
		}
		accepted <- err
	}()
	cfg.RemotePort = b.LocalAddr().Port()
	sa, err = cfg.Dial(ctx, a, netip.AddrPortFrom(b.LocalAddr().Addr(), streamPort))
	if err != nil {
		_ = ln.Close()
	}
	if err := errors.Join(err, <-accepted); err != nil {
		return nil, nil, err
	}
	return sa, sb, nil
}

// noise returns n bytes that depend on seed.
func noise(seed uint64, n int) []byte {
	b := make([]byte, n)
	rnd := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = rnd.Read(b)
	return b
}

func TestStreamConn(t *testing.T) {
	for i, tc := range []struct {
		name string
		cfg  transport.StreamConfig
	}{
		{"default", transport.StreamConfig{}},
		{"tiny", transport.StreamConfig{SendBuffer: 4096, RecvBuffer: 4096, Messages: 16}},
		{"odd", transport.StreamConfig{SendBuffer: 5001, RecvBuffer: 9998, Messages: 17}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := open(t, fmt.Sprintf("127.1.50.%d", 2*i+1), transport.Config{})
			b := open(t, fmt.Sprintf("127.1.50.%d", 2*i+2), transport.Config{})
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

// TestStreamCarries sends in pieces of all sizes, both ways at once, by each pair of methods.
func TestStreamCarries(t *testing.T) {
	type (
		send func(s *transport.Stream, b []byte, rnd *rand.Rand) error
		recv func(s *transport.Stream, rnd *rand.Rand) ([]byte, error)
	)
	sends := map[string]send{
		"Write": func(s *transport.Stream, b []byte, rnd *rand.Rand) error {
			for len(b) > 0 {
				n := min(len(b), 1+rnd.IntN(1<<(1+rnd.IntN(18))))
				if k, err := s.Write(b[:n]); k != n || err != nil {
					return fmt.Errorf("Write: %d of %d, %w", k, n, err)
				}
				b = b[n:]
			}
			return nil
		},
		"ReadFrom": func(s *transport.Stream, b []byte, _ *rand.Rand) error {
			if n, err := s.ReadFrom(bytes.NewReader(b)); n != int64(len(b)) || err != nil {
				return fmt.Errorf("ReadFrom: %d of %d, %w", n, len(b), err)
			}
			return nil
		},
	}
	recvs := map[string]recv{
		"Read": func(s *transport.Stream, rnd *rand.Rand) (got []byte, err error) {
			buf := make([]byte, 1<<18)
			for {
				n, err := s.Read(buf[:1+rnd.IntN(1<<(1+rnd.IntN(18)))])
				got = append(got, buf[:n]...)
				if errors.Is(err, io.EOF) {
					return got, nil
				}
				if err != nil {
					return got, err
				}
			}
		},
		"WriteTo": func(s *transport.Stream, _ *rand.Rand) ([]byte, error) {
			var got bytes.Buffer
			n, err := s.WriteTo(&got)
			if n != int64(got.Len()) {
				err = errors.Join(err, fmt.Errorf("WriteTo says %d, wrote %d", n, got.Len()))
			}
			return got.Bytes(), err
		},
	}
	size := 3 << 20
	if raceEnabled || testing.Short() {
		size = 600_000
	}
	a, b := open(t, "127.1.51.1", transport.Config{}), open(t, "127.1.51.2", transport.Config{})
	for _, cfg := range []transport.StreamConfig{{}, {SendBuffer: 8192, RecvBuffer: 10_000, Messages: 20}, {SendBuffer: 300_000, RecvBuffer: 4098}} {
		for how, send := range sends {
			for recvHow, recv := range recvs {
				t.Run(fmt.Sprintf("%s-%s-%d", how, recvHow, cfg.RecvBuffer), func(t *testing.T) {
					sa, sb := streamPair(t, a, b, cfg)
					var wg sync.WaitGroup
					for i, way := range [][2]*transport.Stream{{sa, sb}, {sb, sa}} {
						want := noise(uint64(i), size)
						wg.Go(func() {
							if err := send(way[0], want, rand.New(rand.NewPCG(1, uint64(i)))); err != nil {
								t.Error(err)
							}
							if err := way[0].CloseWrite(); err != nil {
								t.Error(err)
							}
						})
						wg.Go(func() {
							got, err := recv(way[1], rand.New(rand.NewPCG(2, uint64(i))))
							if err != nil {
								t.Error(err)
							}
							if !bytes.Equal(got, want) {
								t.Errorf("got %d bytes, want %d, or others", len(got), len(want))
							}
						})
					}
					wg.Wait()
				})
			}
		}
	}
}

func TestStreamDialErrors(t *testing.T) {
	a, b := open(t, "127.1.52.1", transport.Config{}), open(t, "127.1.52.2", transport.Config{})
	_, err := a.DialStream(t.Context(), netip.AddrPortFrom(b.LocalAddr().Addr(), 9))
	var op *net.OpError
	if !errors.Is(err, syscall.ECONNREFUSED) || !errors.As(err, &op) || op.Op != "dial" || op.Net != "rdma" {
		t.Errorf("nobody listens: %#v", err)
	}
	ln, err := b.ListenStream(netip.AddrPortFrom(netip.Addr{}, streamPort))
	if err != nil {
		t.Fatal(err)
	}
	if got := ln.Addr().String(); got != "127.1.52.2:7481" || ln.Addr().Network() != "rdma" {
		t.Errorf("listens at %v", got)
	}
	if _, err := b.ListenStream(netip.AddrPortFrom(netip.Addr{}, streamPort)); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("second listener: %v", err)
	}
	done := make(chan error)
	go func() {
		_, err := ln.Accept()
		done <- err
	}()
	// A peer that speaks another protocol is refused, and Accept goes on waiting.
	_, err = a.Dial(t.Context(), netip.AddrPortFrom(b.LocalAddr().Addr(), streamPort), transport.ConnParam{PrivateData: []byte("hello")})
	var reject *transport.RejectError
	if !errors.As(err, &reject) {
		t.Errorf("not a stream: %v", err)
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept on a closed listener: %v", err)
	}
	if err := ln.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed twice: %v", err)
	}
	for _, cfg := range []transport.StreamConfig{{SendBuffer: 1}, {RecvBuffer: 4000}, {RecvBuffer: 1 << 30}, {Messages: 1}, {Messages: 1 << 20}} {
		if _, err := cfg.Dial(t.Context(), a, netip.AddrPortFrom(b.LocalAddr().Addr(), streamPort)); err == nil || errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}
