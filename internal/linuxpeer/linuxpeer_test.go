package linuxpeer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Both ends are ours here, and could share a misunderstanding; package interop holds them
// against Linux's programs.

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair opens two devices on loopback addresses of their own.
func pair(t *testing.T) (client, server *transport.Device) {
	t.Helper()
	open := func(addr string) *transport.Device {
		dev, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort(addr)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = dev.Close() })
		return dev
	}
	return open("127.79.0.1:4791"), open("127.79.0.2:4791")
}

// both runs both ends at once.
func both(t *testing.T, client, server func(ctx context.Context) error) (clientErr, serverErr error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error)
	go func() { done <- server(ctx) }()
	if clientErr = client(ctx); clientErr != nil {
		// What the server has not noticed by itself by now it never would.
		defer time.AfterFunc(time.Second, cancel).Stop()
	}
	return clientErr, <-done
}

// converse is both, of which neither may fail.
func converse(t *testing.T, client, server func(ctx context.Context) error) {
	t.Helper()
	if c, s := both(t, client, server); c != nil || s != nil {
		t.Errorf("client: %v; server: %v", c, s)
	}
}

func TestRping(t *testing.T) {
	a, b := pair(t)
	addr := netip.AddrPortFrom(b.LocalAddr().Addr(), RpingPort)
	ln, err := b.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, size := range []int{MinRpingSize, 100, 5000, MaxRpingSize} {
		const count = 3
		var texts [2][]string
		hear := func(side int) Rping {
			return Rping{Size: size, Count: count, Ping: func(n int, data []byte) {
				if n != len(texts[side]) {
					t.Errorf("ping %d after %d", n, len(texts[side]))
				}
				texts[side] = append(texts[side], string(data))
			}}
		}
		pings := [2]int{}
		converse(t, func(ctx context.Context) (err error) {
			pings[0], err = RpingClient(ctx, a, addr, hear(0))
			return err
		}, func(ctx context.Context) (err error) {
			pings[1], err = RpingServer(ctx, b, ln, hear(1))
			return err
		})
		if pings != [2]int{count, count} || len(texts[0]) != count || fmt.Sprint(texts[0]) != fmt.Sprint(texts[1]) {
			t.Errorf("size %d: %d pings, %q", size, pings, texts)
		}
		for n, text := range texts[0] {
			if len(text) != size || !strings.HasPrefix(text, fmt.Sprintf("rdma-ping-%d: ", n)) || text[size-1] != 0 {
				t.Errorf("ping %d is %q", n, text)
			}
		}
	}
	// A client's pings that do not fit end the connection, and both say so.
	var c, s error
	c, s = both(t, func(ctx context.Context) error {
		_, err := RpingClient(ctx, a, addr, Rping{Size: 200, Count: 3})
		return err
	}, func(ctx context.Context) error {
		_, err := RpingServer(ctx, b, ln, Rping{Size: 100})
		return err
	})
	if c == nil || !IsEnd(c) || s == nil || s.Error() != "ping 0 has 200 bytes, more than our 100" {
		t.Errorf("client: %v; server: %v", c, s)
	}
}

// TestRpingText: what rping itself sends, as seen on the wire.
func TestRpingText(t *testing.T) {
	b := make([]byte, 23)
	rpingText(b, 0)
	if want := "rdma-ping-0: ABCDEFGHI\x00"; string(b) != want {
		t.Errorf("%q, want %q", b, want)
	}
	b = make([]byte, 80)
	rpingText(b, 57) // begins with 'z'
	if want := append([]byte("rdma-ping-57: zABC"), 0); !bytes.Equal(b[:18], want[:18]) || b[79] != 0 || bytes.IndexByte(b, 0) != 79 {
		t.Errorf("%q", b)
	}
}

// TestRpingBadPeer: what is not rping's message ends the server's connection.
func TestRpingBadPeer(t *testing.T) {
	a, b := pair(t)
	addr := netip.AddrPortFrom(b.LocalAddr().Addr(), RpingPort)
	ln, err := b.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, tc := range []struct {
		message []byte
		want    string
	}{
		{make([]byte, 15), "ping 0, source: a message of 15 bytes, want 16"},
		{append(make([]byte, 12), 0xFF, 0xFF, 0xFF, 0xFF), "ping 0 has 4294967295 bytes, more than our 64"},
		{append(make([]byte, 12), 0, 0, 0, 64), "ping 0, source: RDMA_READ: REM_ACCESS_ERR"},
	} {
		_, s := both(t, func(ctx context.Context) error {
			qp, err := a.Dial(ctx, addr, transport.ConnParam{})
			if err != nil {
				return err
			}
			defer qp.Close()
			e := &Endpoint{QP: qp}
			if err := e.Do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: tc.message}); err != nil {
				return err
			}
			return e.Disconnected(ctx)
		}, func(ctx context.Context) error {
			_, err := RpingServer(ctx, b, ln, Rping{Size: 64})
			return err
		})
		if s == nil || !strings.HasPrefix(s.Error(), tc.want) {
			t.Errorf("%x: %v, want %q", tc.message, s, tc.want)
		}
	}
}

func listenTCP(t *testing.T) (net.Listener, netip.AddrPort) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.79.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln, netip.MustParseAddrPort(ln.Addr().String())
}

func TestPingpong(t *testing.T) {
	a, b := pair(t)
	ln, addr := listenTCP(t)
	for _, o := range []Pingpong{
		{Type: verbs.RC, Size: 1, Count: 3, MTU: verbs.MTU256, Check: true},
		{Type: verbs.RC, Size: 4096, Count: 20, MTU: verbs.MTU1024, Patience: time.Minute},
		{Type: verbs.RC, Size: 20000, Count: 20, MTU: verbs.MTU4096, Check: true, Depth: 1},
		{Type: verbs.UC, Size: 20000, Count: 20, MTU: verbs.MTU1024, Check: true},
		{Type: verbs.UD, Size: 1024, Count: 20, MTU: verbs.MTU1024, Check: true},
		{Type: verbs.RC, QPs: 1, Size: 100, Count: 20, MTU: verbs.MTU1024},
		{Type: verbs.RC, QPs: 16, Size: 5000, Count: 200, MTU: verbs.MTU1024},
		{Type: verbs.RC, QPs: MaxPingpongQPs, Size: 64, Count: 300, MTU: verbs.MTU1024},
	} {
		var rc, rs PingpongResult
		converse(t, func(ctx context.Context) (err error) {
			rc, err = PingpongClient(ctx, a, addr, o)
			return err
		}, func(ctx context.Context) (err error) {
			rs, err = PingpongServer(ctx, b, ln, o)
			return err
		})
		for _, r := range []PingpongResult{rc, rs} {
			// Of a shared receive queue's messages some are under way at the end.
			if r.Received < o.Count || o.QPs == 0 && (r.Received != o.Count || r.Sent != o.Count) || r.Elapsed <= 0 {
				t.Errorf("%+v: %+v", o, r)
			}
		}
	}
}

// TestPingpongChecks: an end that does not fill its messages as -c wants is found out.
func TestPingpongChecks(t *testing.T) {
	a, b := pair(t)
	ln, addr := listenTCP(t)
	o := Pingpong{Type: verbs.RC, Size: 5000, Count: 3, MTU: verbs.MTU1024, Patience: 200 * time.Millisecond}
	_, s := both(t, func(ctx context.Context) error {
		_, err := PingpongClient(ctx, a, addr, o)
		return err
	}, func(ctx context.Context) error {
		o := o
		o.Check = true
		_, err := PingpongServer(ctx, b, ln, o)
		return err
	})
	if s == nil || s.Error() != "message 0: byte 0 is 0x7b" {
		t.Errorf("server: %v", s)
	}
}

// TestPingpongLost: over UD a message to the wrong queue pair is gone; whoever is patient only
// so long says what has come until then.
func TestPingpongLost(t *testing.T) {
	a, b := pair(t)
	ln, addr := listenTCP(t)
	o := Pingpong{Type: verbs.UD, Size: 64, Count: 100, MTU: verbs.MTU1024, Patience: 200 * time.Millisecond}
	c, s := both(t, func(ctx context.Context) error {
		p, err := o.open(a)
		if err != nil {
			return err
		}
		defer p.close()
		p.order[0].Own.QPN ^= 0x5500 // where the server's answers will go
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", addr.String())
		if err != nil {
			return err
		}
		_, err = p.over(ctx, conn, true)
		return err
	}, func(ctx context.Context) error {
		_, err := PingpongServer(ctx, b, ln, o)
		return err
	})
	if !errors.Is(c, ErrSilence) || !strings.HasPrefix(c.Error(), "1 messages sent, 0 received: nothing comes") {
		t.Errorf("client: %v", c)
	}
	if !errors.Is(s, ErrSilence) || !strings.HasPrefix(s.Error(), "1 messages sent, 1 received: ") {
		t.Errorf("server: %v", s)
	}
}

// TestPingpongBadLine: a peer that says nonsense over TCP, or nothing more, is an error.
func TestPingpongBadLine(t *testing.T) {
	_, b := pair(t)
	ln, addr := listenTCP(t)
	line := EncodeLine(End{QPN: 17, GID: netip.MustParseAddr("127.79.0.1")})
	for _, tc := range []struct{ say, want string }{
		{strings.Repeat("x", LineLen), "the peer's address is"},
		{"short", "the peer's address: unexpected EOF"},
		{string(line), "done: EOF"},
	} {
		_, s := both(t, func(ctx context.Context) error {
			c, err := net.Dial("tcp", addr.String())
			if err == nil {
				_, err = c.Write([]byte(tc.say))
				err = errors.Join(err, c.(*net.TCPConn).CloseWrite())
				var b [LineLen]byte
				_, _ = c.Read(b[:]) // until the server has answered or left
				err = errors.Join(err, c.Close())
			}
			return err
		}, func(ctx context.Context) error {
			_, err := PingpongServer(ctx, b, ln, Pingpong{Type: verbs.RC, Size: 64, Count: 1, MTU: verbs.MTU1024})
			return err
		})
		if s == nil || !strings.HasPrefix(s.Error(), tc.want) {
			t.Errorf("%q: %v, want %q", tc.say, s, tc.want)
		}
	}
	// Nobody comes at all.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := PingpongServer(ctx, b, ln, Pingpong{Type: verbs.RC, Size: 64, Count: 1, MTU: verbs.MTU1024}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nobody: %v", err)
	}
}
