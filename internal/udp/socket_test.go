package udp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must come; it is never waited for in vain.
const patience = 10 * time.Second

// node is a socket with its poller.
type node struct {
	*Socket
	t    testing.TB
	poll *Poller
}

func openNode(t testing.TB, bind string, change ...func(*Config)) *node {
	t.Helper()
	cfg := Config{}
	if bind != "" {
		cfg.Bind = netip.MustParseAddrPort(bind)
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := Open(cfg)
	if err != nil {
		if strings.Contains(bind, "[") && (errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EADDRNOTAVAIL)) {
			t.Skipf("no IPv6 here: %v", err)
		}
		t.Fatal(err)
	}
	return adopt(t, s)
}

// adopt makes a node of a socket and closes it when the test ends.
func adopt(t testing.TB, s *Socket) *node {
	t.Helper()
	p, err := NewPoller(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return &node{Socket: s, t: t, poll: p}
}

func noGSO(c *Config)   { c.NoGSO = true }
func noGRO(c *Config)   { c.NoGRO = true }
func noBatch(c *Config) { c.NoBatch = true }

// got is a copy of one received datagram; train says that it came in a buffer with others.
type got struct {
	data  []byte
	src   netip.AddrPort
	dst   netip.Addr
	train bool
}

// recv waits for n datagrams.
func (n *node) recv(want int) []got {
	n.t.Helper()
	var all []got
	msgs := make([]link.Rx, 64)
	deadline := time.Now().Add(patience)
	for len(all) < want {
		k, err := n.Recv(msgs)
		if err != nil {
			n.t.Fatal(err)
		}
		for _, m := range msgs[:k] {
			if m.Truncated {
				n.t.Fatalf("truncated: %d bytes from %v", len(m.Buf), m.Src)
			}
			size := m.SegSize
			if size == 0 {
				all = append(all, got{bytes.Clone(m.Buf), m.Src, m.Dst, false})
				continue
			}
			for b := m.Buf; len(b) > 0; {
				c := min(size, len(b))
				all = append(all, got{bytes.Clone(b[:c]), m.Src, m.Dst, true})
				b = b[c:]
			}
		}
		if k == 0 {
			if time.Now().After(deadline) {
				n.t.Fatalf("got %d of %d datagrams", len(all), want)
			}
			if _, err := n.poll.Wait(Readable, int64(100*time.Millisecond)); err != nil {
				n.t.Fatal(err)
			}
		}
	}
	return all
}

// send offers all of msgs until they are taken.
func (n *node) send(msgs ...link.Tx) {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for len(msgs) > 0 {
		k, err := n.Send(msgs)
		if err != nil {
			n.t.Fatal(err)
		}
		msgs = msgs[k:]
		if len(msgs) > 0 {
			if time.Now().After(deadline) {
				n.t.Fatalf("%d messages not taken", len(msgs))
			}
			if _, err := n.poll.Wait(Writable, int64(100*time.Millisecond)); err != nil {
				n.t.Fatal(err)
			}
		}
	}
}

// at returns the node's port on another address.
func (n *node) at(addr string) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), n.LocalAddr().Port())
}

// tx makes a message of one piece.
func tx(src netip.Addr, dst netip.AddrPort, data []byte, segSize int) link.Tx {
	return link.Tx{Gather: [][]byte{data}, Len: len(data), SegSize: segSize, Dst: dst, Src: src}
}

// pattern returns n bytes that tell their place.
func pattern(n int) []byte {
	b := make([]byte, n)
	x := uint32(1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

// cut splits data as a train is split.
func cut(data []byte, size int) [][]byte {
	var out [][]byte
	for len(data) > size {
		out = append(out, data[:size])
		data = data[size:]
	}
	return append(out, data)
}

func TestLoopback(t *testing.T) {
	for _, tc := range []struct{ name, a, b string }{
		{"two loopback hosts", "127.0.0.1:0", "127.0.0.2:0"},
		{"IPv6", "[::1]:0", "[::1]:0"},
		{"mapped bind is IPv4", "[::ffff:127.0.0.1]:0", "127.0.0.3:0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := openNode(t, tc.a), openNode(t, tc.b)
			la, lb := a.LocalAddr(), b.LocalAddr()
			if la.Addr().Is4In6() || la.Port() == 0 {
				t.Errorf("local address %v", la)
			}
			a.send(tx(la.Addr(), lb, []byte("ping"), 0))
			g := b.recv(1)[0]
			if string(g.data) != "ping" || g.src != la || g.dst != lb.Addr() {
				t.Errorf("got %q from %v to %v, want from %v to %v", g.data, g.src, g.dst, la, lb.Addr())
			}
			b.send(tx(lb.Addr(), g.src, []byte{}, 0))
			if g := a.recv(1)[0]; len(g.data) != 0 || g.src != lb {
				t.Errorf("empty datagram: got %q from %v", g.data, g.src)
			}
			if s := a.Stats(); s.TxDatagrams != 1 || s.TxBytes != 4 || s.RxDatagrams != 1 || s.TxErrors.Total() != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// Two hosts of the loopback network share a port like two machines.
func TestSamePortOnTwoAddresses(t *testing.T) {
	a := openNode(t, "127.0.0.1:0")
	b := openNode(t, fmt.Sprintf("127.0.0.2:%d", a.LocalAddr().Port()))
	a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), []byte("x"), 0))
	if g := b.recv(1)[0]; g.src != a.LocalAddr() {
		t.Errorf("from %v, want %v", g.src, a.LocalAddr())
	}
}

func TestOpenErrors(t *testing.T) {
	a := openNode(t, "127.0.0.1:0")
	for _, tc := range []struct {
		name, bind string
		want       error
		advice     string
	}{
		{"in use", a.LocalAddr().String(), syscall.EADDRINUSE, "rdma_rxe"},
		{"in use by one of all addresses", fmt.Sprintf("0.0.0.0:%d", a.LocalAddr().Port()), syscall.EADDRINUSE, "choose another port"},
		{"not ours", "192.0.2.77:0", syscall.EADDRNOTAVAIL, "no interface has this address"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := Open(Config{Bind: netip.MustParseAddrPort(tc.bind)})
			if err == nil {
				s.Close()
			}
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.advice) || !strings.Contains(err.Error(), tc.bind) {
				t.Errorf("got %v, want %v with %q", err, tc.want, tc.advice)
			}
		})
	}
}

func TestClosed(t *testing.T) {
	s, err := Open(Config{Bind: netip.MustParseAddrPort("127.0.0.1:0")})
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewPoller(s)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	p.Kick()
	if _, err := s.Recv(make([]link.Rx, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Recv: %v", err)
	}
	if _, err := s.Send(make([]link.Tx, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Send: %v", err)
	}
	if _, err := p.Wait(Readable, 0); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Wait: %v", err)
	}
}

// F50: the answer leaves from the address that was dialled. F64: addresses are unmapped.
func TestWildcard(t *testing.T) {
	for _, tc := range []struct{ name, server, client, dial string }{
		{"IPv4", "0.0.0.0:0", "127.0.0.1:0", "127.0.0.1"},
		{"IPv4 second address", "0.0.0.0:0", "127.0.0.9:0", "127.0.0.2"},
		{"dual stack IPv4", "[::]:0", "127.0.0.1:0", "127.0.0.1"},
		{"dual stack IPv4 second address", "[::]:0", "127.0.0.9:0", "127.0.0.2"},
		{"dual stack IPv6", "[::]:0", "[::1]:0", "::1"},
		{"no address", "", "127.0.0.1:0", "127.0.0.3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server, client := openNode(t, tc.server), openNode(t, tc.client)
			to := server.at(tc.dial)
			for i := range 3 {
				data := []byte{byte(i)}
				client.send(tx(client.LocalAddr().Addr(), to, data, 0))
				g := server.recv(1)[0]
				if g.dst != to.Addr() || g.src != client.LocalAddr() {
					t.Fatalf("server got %v to %v, want %v to %v", g.src, g.dst, client.LocalAddr(), to.Addr())
				}
				m := tx(g.dst, g.src, data, 0)
				m.TrafficClass = uint8(i) << 2
				server.send(m)
				if g := client.recv(1)[0]; g.src != to || !bytes.Equal(g.data, data) {
					t.Fatalf("answer %q came from %v, want from %v", g.data, g.src, to)
				}
			}
			if n := server.Stats().TxErrors.Total(); n != 0 {
				t.Errorf("%d send errors", n)
			}
		})
	}
}

// A message that the socket cannot send is lost and counted, and those around it are sent.
func TestUnsendable(t *testing.T) {
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	la := a.LocalAddr().Addr()
	good := func(s string) link.Tx { return tx(la, b.LocalAddr(), []byte(s), 0) }
	a.send(good("1"),
		tx(la, b.LocalAddr(), make([]byte, 70000), 0),
		good("2"),
		tx(la, netip.MustParseAddrPort("[::1]:4791"), []byte("family"), 0),
		link.Tx{Gather: [][]byte{{1}}, Len: 1},
		good("3"))
	var all string
	for _, g := range b.recv(3) {
		all += string(g.data)
	}
	if all != "123" {
		t.Errorf("got %q", all)
	}
	want := SendErrors{TooLong: 1, NetUnreachable: 1, Invalid: 1}
	if s := a.Stats(); s.TxErrors != want || s.TxDatagrams != 3 {
		t.Errorf("got %+v, %d sent; want %+v", s.TxErrors, s.TxDatagrams, want)
	}
}

// Source and destination of different families cannot be one packet.
func TestMixedFamilies(t *testing.T) {
	a, b, c := openNode(t, "[::]:0"), openNode(t, "127.0.0.2:0"), openNode(t, "[::1]:0")
	four, six := netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()
	a.send(tx(six, b.LocalAddr(), []byte("no"), 0), tx(four, c.LocalAddr(), []byte("no"), 0),
		tx(four, b.LocalAddr(), []byte("yes"), 0), tx(six, c.LocalAddr(), []byte("yes"), 0))
	for _, n := range []*node{b, c} {
		if g := n.recv(1)[0]; string(g.data) != "yes" {
			t.Errorf("got %q", g.data)
		}
	}
	if e := a.Stats().TxErrors; e != (SendErrors{Invalid: 2}) {
		t.Errorf("counted %+v", e)
	}
}

func TestLyingLengthIsOurBug(t *testing.T) {
	a := openNode(t, "127.0.0.1:0")
	defer func() {
		if p, ok := recover().(string); !ok || !strings.HasPrefix(p, "BUG: ") {
			t.Errorf("panic %v", p)
		}
	}()
	_, _ = a.Send([]link.Tx{{Gather: [][]byte{{1, 2}}, Len: 3, Dst: a.LocalAddr()}})
}

func TestTrains(t *testing.T) {
	modes := []struct {
		name     string
		tx, rx   func(*Config)
		wantTrns bool
	}{
		{"GSO to GRO", func(*Config) {}, func(*Config) {}, true},
		{"GSO to no GRO", func(*Config) {}, noGRO, false},
		{"no GSO", noGSO, func(*Config) {}, false},
		{"no GSO, no batch", func(c *Config) { noGSO(c); noBatch(c) }, noBatch, false},
		{"GSO, no batch", noBatch, noBatch, true},
	}
	shapes := []struct {
		name               string
		bytes, seg, pieces int
	}{
		{"ten and a shorter last", 10*1000 + 123, 1000, 1},
		{"equal", 8 * 512, 512, 1},
		{"longer than the last by one", 2*777 - 1, 777, 1},
		{"one datagram", 500, 500, 1},
		{"one datagram, shorter", 500, 600, 1},
		{"gathered across borders", 20*1044 + 3, 1044, 37},
		{"128 segments", 128 * 100, 100, 3},
		{"130 segments", 130 * 100, 100, 3},
		{"65000 bytes", 65000, 4140, 48},
		{"many pieces", 60 * 100, 100, 3000},
	}
	for _, bind := range []string{"127.0.0.1:0", "[::1]:0"} {
		for _, mode := range modes {
			t.Run(mode.name+" "+bind, func(t *testing.T) {
				a, b := openNode(t, bind, mode.tx), openNode(t, bind, mode.rx)
				caps := a.Caps()
				for _, sh := range shapes {
					data := pattern(sh.bytes)
					want := cut(data, sh.seg)
					m := link.Tx{Gather: cut(data, (sh.bytes+sh.pieces-1)/sh.pieces), Len: len(data), SegSize: sh.seg,
						Dst: b.LocalAddr(), Src: a.LocalAddr().Addr()}
					before := a.Stats()
					a.send(m)
					gs := b.recv(len(want))
					after := a.Stats()
					if len(gs) != len(want) {
						t.Fatalf("%s: %d datagrams, want %d", sh.name, len(gs), len(want))
					}
					for i := range want {
						if !bytes.Equal(gs[i].data, want[i]) {
							t.Fatalf("%s: datagram %d of %d differs (%d bytes, want %d)", sh.name, i, len(want), len(gs[i].data), len(want[i]))
						}
					}
					if n := after.TxDatagrams - before.TxDatagrams; n != uint64(len(want)) {
						t.Errorf("%s: counted %d datagrams, want %d", sh.name, n, len(want))
					}
					trains := len(want) > 1 && len(want) <= a.Caps().MaxSegs
					if mode.wantTrns && trains && b.Stats().GRO.On && !gs[0].train {
						t.Errorf("%s: did not arrive as a train", sh.name)
					}
					if n := after.TxTrains - before.TxTrains; (n == 1) != trains {
						t.Errorf("%s: %d trains sent with MaxSegs %d", sh.name, n, a.Caps().MaxSegs)
					}
					if n := after.TxSplit - before.TxSplit; (n == 1) != (len(want) > 1 && !trains) {
						t.Errorf("%s: %d trains split with MaxSegs %d", sh.name, n, a.Caps().MaxSegs)
					}
				}
				if s := a.Stats(); s.TxErrors.Total() != 0 {
					t.Errorf("send errors %+v", s.TxErrors)
				}
				if c := a.Caps(); c != caps {
					t.Errorf("abilities lost: %+v, were %+v", c, caps)
				}
			})
		}
	}
}

// Many messages of one call arrive in order, whatever the call's own batches are.
func TestLargeBatch(t *testing.T) {
	for _, mode := range []struct {
		name string
		f    func(*Config)
	}{{"batch", func(*Config) {}}, {"no batch", noBatch}} {
		t.Run(mode.name, func(t *testing.T) {
			a, b := openNode(t, "127.0.0.1:0", mode.f), openNode(t, "127.0.0.2:0", mode.f)
			var msgs []link.Tx
			for i := range 100 {
				msgs = append(msgs, tx(a.LocalAddr().Addr(), b.LocalAddr(), fmt.Append(nil, i), 0))
			}
			a.send(msgs...)
			for i, g := range b.recv(len(msgs)) {
				if string(g.data) != fmt.Sprint(i) {
					t.Fatalf("datagram %d is %q", i, g.data)
				}
			}
		})
	}
}

// F74: a buffer that the system cut is a warning, once, with what to do.
func TestBufferWarning(t *testing.T) {
	s := &Socket{}
	s.warnBuffer("receive", "set sysctl -w net.core.rmem_max=%d", 4<<20, 212992)
	s.warnBuffer("send", "set sysctl -w net.core.wmem_max=%d", 4<<20, 4<<20)
	w := s.Warnings()
	if len(w) != 1 || !strings.Contains(w[0], "212992") || !strings.Contains(w[0], "net.core.rmem_max=4194304") {
		t.Errorf("warnings %q", w)
	}
	if w := s.Warnings(); len(w) != 0 {
		t.Errorf("again: %q", w)
	}
}

func TestBuffers(t *testing.T) {
	system := openNode(t, "127.0.0.1:0", func(c *Config) { c.RecvBuffer, c.SendBuffer = -1, -1 })
	small := openNode(t, "127.0.0.1:0", func(c *Config) { c.RecvBuffer, c.SendBuffer = 65536, 65536 })
	if a, b := system.Stats(), small.Stats(); a.RecvBuffer == 0 || b.RecvBuffer < 65536 || b.RecvBuffer >= 4<<20 || b.SendBuffer < 65536 {
		t.Errorf("buffers: system's %d and %d, 64 KiB became %d and %d", a.RecvBuffer, a.SendBuffer, b.RecvBuffer, b.SendBuffer)
	}
	if c := small.Caps(); c.RecvBuffer != small.Stats().RecvBuffer {
		t.Errorf("Caps %+v", c)
	}
}

func TestCaps(t *testing.T) {
	one := openNode(t, "127.0.0.2:0").Caps()
	if one.MTU < 1280 {
		t.Errorf("MTU of loopback is %d", one.MTU)
	}
	all := openNode(t, "0.0.0.0:0", noGSO).Caps()
	if all.MTU != 0 || all.MaxSegs != 1 {
		t.Errorf("all addresses, no GSO: %+v", all)
	}
}

func TestRoute(t *testing.T) {
	src, mtu, err := Route(netip.MustParseAddr("::ffff:127.0.0.5"))
	if err != nil || !src.IsLoopback() || !src.Is4() || mtu < 1280 {
		t.Errorf("got %v, MTU %d, %v", src, mtu, err)
	}
}

// A flood beyond the receive buffer loses datagrams, and the socket works afterwards.
func TestOverrun(t *testing.T) {
	a := openNode(t, "127.0.0.1:0")
	b := openNode(t, "127.0.0.2:0", func(c *Config) { c.RecvBuffer = 8192 })
	data := pattern(1000)
	for range 4000 {
		a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), data, 0))
	}
	msgs := make([]link.Rx, 32)
	n := -1
	for total := 0; n != 0; total += n {
		var err error
		if n, err = b.Recv(msgs); err != nil {
			t.Fatal(err)
		}
	}
	a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), []byte("after"), 0))
	for {
		if g := b.recv(1); string(g[len(g)-1].data) == "after" {
			break
		}
	}
	if s := b.Stats(); s.GRO.On && s.RxDropped+s.RxDatagrams != 4001 {
		t.Errorf("dropped %d + received %d is not 4001", s.RxDropped, s.RxDatagrams)
	}
}
