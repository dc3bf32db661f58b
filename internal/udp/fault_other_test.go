//go:build !linux || doorbellportable

package udp

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// fakeConn takes what is written and fails as the test says; it reads what in brings.
type fakeConn struct {
	refuse func(b []byte) error
	wire   [][]byte

	in     chan reading
	closed chan struct{}
	once   sync.Once
}

type reading struct {
	data  []byte
	flags int
	err   error
}

var (
	peer  = netip.MustParseAddrPort("127.0.0.2:4791")
	local = netip.MustParseAddr("127.0.0.1")
)

func fakeNode(t *testing.T, c *fakeConn) *node {
	c.in, c.closed = make(chan reading), make(chan struct{})
	s := newSocket(c, false, false, false)
	s.local = netip.AddrPortFrom(local, 4791)
	s.start()
	p, err := NewPoller(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); s.Close() })
	return &node{Socket: s, t: t, poll: p}
}

func (c *fakeConn) ReadMsgUDPAddrPort(b, _ []byte) (n, oobn, flags int, addr netip.AddrPort, err error) {
	select {
	case r := <-c.in:
		return copy(b, r.data), 0, r.flags, peer, r.err
	case <-c.closed:
		return 0, 0, 0, netip.AddrPort{}, io.ErrClosedPipe
	}
}

func (c *fakeConn) WriteMsgUDPAddrPort(b, _ []byte, _ netip.AddrPort) (n, oobn int, err error) {
	if c.refuse != nil {
		if err := c.refuse(b); err != nil {
			return 0, 0, err
		}
	}
	c.wire = append(c.wire, bytes.Clone(b))
	return len(b), 0, nil
}

func (c *fakeConn) SetWriteDeadline(time.Time) error { return nil }

func (c *fakeConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// F09, F49: an error costs its datagram, a full buffer stops in the middle of a train, and
// everything else leaves once and in order.
func TestSendFaults(t *testing.T) {
	data := pattern(1010)
	want := slices.Concat([][]byte{[]byte("before")}, cut(data, 100), [][]byte{[]byte("behind")})
	calls := 0
	c := &fakeConn{refuse: func(b []byte) error {
		if string(b) == "bad" {
			return &os.SyscallError{Syscall: "sendmsg", Err: syscall.EPERM}
		}
		if calls++; calls%3 == 0 {
			return os.ErrDeadlineExceeded
		}
		return nil
	}}
	n := fakeNode(t, c)
	n.send(tx(local, peer, []byte("before"), 0), tx(local, peer, []byte("bad"), 0),
		link.Tx{Gather: cut(data, 77), Len: len(data), SegSize: 100, Dst: peer, Src: local},
		tx(local, peer, []byte("behind"), 0))
	if !slices.EqualFunc(c.wire, want, bytes.Equal) {
		t.Errorf("%d datagrams went out, want %d, or they differ", len(c.wire), len(want))
	}
	if s := n.Stats(); s.TxErrors != (SendErrors{NotPermitted: 1}) || s.TxBlocked == 0 || s.TxSplit != 1 || s.TxDatagrams != uint64(len(want)) {
		t.Errorf("stats %+v", s)
	}
}

// A fault that passes is hidden, one that stays kills the socket and wakes its owner.
func TestReadFaults(t *testing.T) {
	c := &fakeConn{}
	n := fakeNode(t, c)
	boom := errors.New("boom")
	go func() {
		c.in <- reading{err: boom}
		c.in <- reading{data: []byte("x")}
	}()
	if g := n.recv(1)[0]; string(g.data) != "x" || g.src != peer || g.dst != local {
		t.Errorf("got %+v", g)
	}
	go func() {
		c.in <- reading{data: []byte("cut"), flags: msgTruncated}
		for range maxFailures {
			c.in <- reading{err: boom}
		}
	}()
	truncated := 0
	rx := make([]link.Rx, 4)
	for range 1000 {
		k, err := n.Recv(rx)
		if err != nil {
			if !errors.Is(err, boom) || truncated != 1 {
				t.Errorf("%v, %d truncated", err, truncated)
			}
			// Dead is a level as well.
			n.waitFor(Readable)
			n.waitFor(Readable)
			return
		}
		for _, m := range rx[:k] {
			if m.Truncated {
				truncated++
			}
		}
		n.waitFor(Readable)
	}
	t.Error("never dies")
}

// A datagram longer than a slot is handed out as truncated, and counted.
func TestTruncated(t *testing.T) {
	a, b := openNode(t, "127.0.0.1:0"), openNode(t, "127.0.0.2:0")
	a.send(tx(a.LocalAddr().Addr(), b.LocalAddr(), make([]byte, slotBytes+1), 0))
	b.waitFor(Readable)
	rx := make([]link.Rx, 4)
	if n, err := b.Recv(rx); n != 1 || err != nil || !rx[0].Truncated {
		t.Errorf("got %d, %v, %+v", n, err, rx[0].Truncated)
	}
	if s := b.Stats(); s.RxTruncated != 1 {
		t.Errorf("stats %+v", s)
	}
}
