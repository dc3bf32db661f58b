//go:build !linux || doorbellportable

package udp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

const (
	// controlsID: only Linux is known to write Identification 0 under our options.
	controlsID = runtime.GOOS == "linux"
	// hasControl says that the system passes control messages with datagrams. Go's
	// ancillary data for UDP on Windows is not understood by golang.org/x/net.
	hasControl = runtime.GOOS != "windows"

	// slotBytes holds a RoCEv2 packet of the largest MTU (4096) with its headers, and one
	// twice as long between peers that agreed on it.
	slotBytes = 9 << 10
	// numSlots is how far the reader may be ahead of Recv.
	numSlots = 4 * batch
	// controlBytes has room for the packet information of either family.
	controlBytes = 128
	// sendPatience is how long Send may be stuck in a full send buffer. The runtime knows
	// no way to write without waiting that all systems share.
	sendPatience = 2 * time.Millisecond
	// maxFailures is the number of receive errors in a row that means the socket is dead.
	maxFailures = 1024
)

// conn is what a socket needs of net.UDPConn. Tests put in one that fails on demand.
type conn interface {
	ReadMsgUDPAddrPort(b, oob []byte) (n, oobn, flags int, addr netip.AddrPort, err error)
	WriteMsgUDPAddrPort(b, oob []byte, addr netip.AddrPort) (n, oobn int, err error)
	SetWriteDeadline(time.Time) error
	Close() error
}

// platform is the portable side of a Socket: a goroutine reads into slots, which travel
// from free over full to Recv and back.
type platform struct {
	conn     conn
	p4       *ipv4.PacketConn // sets the TOS byte, which no control message of x/net carries
	v6, dual bool
	wildcard bool
	maxSegs  int // always 1

	free, full chan *slot
	lent       []*slot       // handed out by the last Recv
	arrived    chan struct{} // capacity 1: full has grown
	done       chan struct{} // closed by Close
	reader     sync.WaitGroup
	dead       atomic.Pointer[error]

	scratch []byte // one datagram, gathered; owned by the sender
	tos     int    // as last set on the socket; owned by the sender
	rest    unfinished
}

// slot is one received datagram.
type slot struct {
	buf []byte
	oob []byte
	rx  link.Rx
}

// unfinished remembers how far a train got when the send buffer filled up in its middle.
// The message counts as not taken; when it is offered again, it goes on where it stopped.
type unfinished struct {
	seg          int // datagrams sent; 0 means none is unfinished
	dst          netip.AddrPort
	len, segSize int
	head         [16]byte
}

func open(cfg Config) (*Socket, error) {
	if !cfg.Bind.Addr().IsValid() {
		c := cfg
		c.Bind = netip.AddrPortFrom(netip.IPv6Unspecified(), cfg.Bind.Port())
		s, err := open(c)
		if !errors.Is(err, syscall.EAFNOSUPPORT) && !errors.Is(err, syscall.EADDRNOTAVAIL) {
			return s, err
		}
		c.Bind = netip.AddrPortFrom(netip.IPv4Unspecified(), cfg.Bind.Port())
		return open(c)
	}
	bind := cfg.Bind
	wildcard := bind.Addr().IsUnspecified()
	if wildcard && !hasControl {
		return nil, fmt.Errorf("all addresses: %w: bind one address, this system does not tell which one a datagram was sent to", errors.ErrUnsupported)
	}
	v6 := bind.Addr().Is6()
	network := "udp4"
	if v6 && wildcard {
		network = "udp" // both families
	} else if v6 {
		network = "udp6"
	}
	dual := v6 && wildcard
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) error {
		var err error
		if cerr := rc.Control(func(fd uintptr) { err = dontFragment(fd, v6, dual) }); cerr != nil {
			return cerr
		}
		return err
	}}
	pc, err := lc.ListenPacket(context.Background(), network, bind.String())
	if err != nil {
		return nil, err
	}
	uc := pc.(*net.UDPConn)
	s := newSocket(uc, v6, dual, wildcard)
	s.local = netip.AddrPortFrom(bind.Addr(), uc.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	s.p4 = ipv4.NewPacketConn(uc)
	if wildcard {
		var err error
		if v6 {
			err = ipv6.NewPacketConn(uc).SetControlMessage(ipv6.FlagDst|ipv6.FlagInterface, true)
		} else {
			err = s.p4.SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true)
		}
		if err != nil {
			uc.Close()
			return nil, fmt.Errorf("packet information: %w", err)
		}
	}
	s.setBuffers(cfg, uc)
	s.start()
	return s, nil
}

// newSocket makes a socket over c; start sets it going.
func newSocket(c conn, v6, dual, wildcard bool) *Socket {
	s := &Socket{platform: platform{
		conn: c, v6: v6, dual: dual, wildcard: wildcard, maxSegs: 1,
		free: make(chan *slot, numSlots), full: make(chan *slot, numSlots),
		lent:    make([]*slot, 0, batch),
		arrived: make(chan struct{}, 1), done: make(chan struct{}),
		scratch: make([]byte, slotBytes),
	}}
	const reason = "not in the portable build"
	s.gso.giveUp(reason)
	s.gro.giveUp(reason)
	s.batch.giveUp(reason)
	return s
}

func (s *Socket) start() {
	for range numSlots {
		s.free <- &slot{buf: make([]byte, slotBytes), oob: make([]byte, controlBytes)}
	}
	s.reader.Add(1)
	go s.read()
}

// setBuffers asks for the buffers, and for less where a system refuses instead of cutting.
func (s *Socket) setBuffers(cfg Config, uc *net.UDPConn) {
	set := func(ask int, f func(int) error) (want int) {
		want = bufferSize(ask)
		for n := want; n >= 64<<10; n /= 2 {
			if f(n) == nil {
				break
			}
		}
		return want
	}
	wantRecv := set(cfg.RecvBuffer, uc.SetReadBuffer)
	wantSend := set(cfg.SendBuffer, uc.SetWriteBuffer)
	rc, err := uc.SyscallConn()
	if err != nil {
		return
	}
	// A failure leaves the sizes 0, unknown.
	_ = rc.Control(func(fd uintptr) { s.recvBuffer, s.sendBuffer = buffers(fd) })
	usable := func(n int) int {
		if runtime.GOOS == "linux" {
			return n / 2 // the other half is for bookkeeping
		}
		return n
	}
	if s.recvBuffer != 0 {
		s.warnBuffer("receive", "raise "+recvLimit, wantRecv, usable(s.recvBuffer))
	}
	if s.sendBuffer != 0 {
		s.warnBuffer("send", "raise "+sendLimit, wantSend, usable(s.sendBuffer))
	}
}

// read is the reader's life: it ends when the socket is closed or dead.
func (s *Socket) read() {
	defer s.reader.Done()
	failures := 0
	for {
		var b *slot
		select {
		case b = <-s.free:
		case <-s.done:
			return
		}
		for {
			n, oobn, flags, src, err := s.conn.ReadMsgUDPAddrPort(b.buf, b.oob)
			if err == nil || tooLong(err) {
				failures = 0
				s.describe(b, n, oobn, flags, src, err)
				break
			}
			if s.closed.Load() {
				return
			}
			s.rxErrors.Add(1)
			if failures++; failures >= maxFailures || errors.Is(err, net.ErrClosed) {
				err = fmt.Errorf("udp: receive on %v: %w", s.local, err)
				s.dead.Store(&err)
				s.signal()
				return
			}
		}
		s.full <- b // has room for all slots
		s.signal()
	}
}

// signal tells a waiting Poller to look at full.
func (s *Socket) signal() {
	select {
	case s.arrived <- struct{}{}:
	default:
	}
}

// describe fills b.rx.
func (s *Socket) describe(b *slot, n, oobn, flags int, src netip.AddrPort, err error) {
	n = min(n, len(b.buf))
	b.rx = link.Rx{Buf: b.buf[:n:n], Src: netip.AddrPortFrom(src.Addr().Unmap(), src.Port()), Dst: s.local.Addr()}
	if s.wildcard {
		b.rx.Dst = s.destination(b.oob[:min(oobn, len(b.oob))])
	}
	b.rx.Truncated = err != nil || flags&msgTruncated != 0 || !b.rx.Dst.IsValid()
}

// destination finds the local address in control messages, or returns the zero address.
func (s *Socket) destination(oob []byte) netip.Addr {
	var dst net.IP
	var index int
	if s.v6 {
		var cm ipv6.ControlMessage
		if cm.Parse(oob) == nil {
			dst, index = cm.Dst, cm.IfIndex
		}
	}
	if dst == nil {
		var cm ipv4.ControlMessage
		if cm.Parse(oob) == nil {
			dst = cm.Dst
		}
	}
	a, ok := netip.AddrFromSlice(dst)
	if !ok {
		return netip.Addr{}
	}
	a = a.Unmap()
	if index != 0 && (a.IsLinkLocalUnicast() || a.IsLinkLocalMulticast()) && a.Is6() {
		zone := fmt.Sprint(index)
		if ifi, err := net.InterfaceByIndex(index); err == nil {
			zone = ifi.Name
		}
		a = a.WithZone(zone)
	}
	return a
}

// Recv fills msgs with what has arrived, at most 32 buffers, and returns how many. It
// never blocks. The buffers are valid until the next call.
func (s *Socket) Recv(msgs []link.Rx) (int, error) {
	if s.closed.Load() {
		return 0, net.ErrClosed
	}
	for _, b := range s.lent {
		s.free <- b // has room for all slots
	}
	s.lent = s.lent[:0]
	for n := range msgs[:min(len(msgs), batch)] {
		select {
		case b := <-s.full:
			msgs[n] = b.rx
			s.lent = append(s.lent, b)
			s.rxDatagrams.Add(1)
			s.rxBytes.Add(uint64(len(b.rx.Buf)))
			if b.rx.Truncated {
				s.rxTruncated.Add(1)
			}
			continue
		default:
		}
		if n == 0 {
			if err := s.dead.Load(); err != nil && len(s.full) == 0 {
				return 0, *err
			}
			return 0, nil
		}
		break
	}
	if len(s.lent) > 0 {
		s.rxCalls.Add(1)
	}
	return len(s.lent), nil
}

// Send hands msgs to the system in order and returns how many were taken. It may be held
// up for two milliseconds by a full send buffer and then returns fewer than len(msgs).
// A train goes out one datagram at a time.
func (s *Socket) Send(msgs []link.Tx) (int, error) {
	if s.closed.Load() {
		return 0, net.ErrClosed
	}
	if err := s.conn.SetWriteDeadline(time.Now().Add(sendPatience)); err != nil {
		return 0, fmt.Errorf("udp: send on %v: %w", s.local, err)
	}
	for i := range msgs {
		taken, err := s.sendOne(&msgs[i], i == 0)
		if !taken || err != nil {
			return i, err
		}
	}
	return len(msgs), nil
}

// sendOne sends one message, or what is left of it. taken is false when the buffer is full.
func (s *Socket) sendOne(m *link.Tx, first bool) (taken bool, err error) {
	segs := segments(m.Len, m.SegSize)
	from := 0
	if u := s.rest; first && u.seg > 0 {
		s.rest.seg = 0
		if u.dst == m.Dst && u.len == m.Len && u.segSize == m.SegSize && u.head == head(m) {
			from = u.seg
		}
	}
	dst := netip.AddrPortFrom(m.Dst.Addr().Unmap(), m.Dst.Port())
	src := m.Src.Unmap()
	v4 := dst.Addr().Is4()
	if !dst.Addr().IsValid() || s.wildcard && src.IsValid() && src.Is4() != v4 {
		s.lose(faultInvalid, segs-from)
		return true, nil
	}
	if v4 && s.v6 && !s.dual || !v4 && !s.v6 {
		s.lose(faultNetUnreachable, segs-from)
		return true, nil
	}
	if m.Len > maxPayload && segs == 1 {
		s.lose(faultTooLong, 1)
		return true, nil
	}
	oob := s.control(m, src, v4)
	buf := s.gather(m)
	size := m.SegSize
	if segs == 1 {
		size = m.Len
	}
	for k := from; k < segs; k++ {
		b := buf[k*size : min((k+1)*size, m.Len)]
		switch _, _, err := s.conn.WriteMsgUDPAddrPort(b, oob, dst); {
		case err == nil:
			s.txCalls.Add(1)
			s.txDatagrams.Add(1)
			s.txBytes.Add(uint64(len(b)))
		case errors.Is(err, os.ErrDeadlineExceeded):
			s.txBlocked.Add(1)
			if k > 0 {
				s.rest = unfinished{seg: k, dst: m.Dst, len: m.Len, segSize: m.SegSize, head: head(m)}
			}
			return false, nil
		case errors.Is(err, net.ErrClosed):
			return false, fmt.Errorf("udp: send on %v: %w", s.local, err)
		default:
			s.lose(faultOf(err), 1)
		}
	}
	if segs > 1 {
		s.txSplit.Add(1)
	}
	return true, nil
}

// control makes the control messages of a message, and sets what has none.
func (s *Socket) control(m *link.Tx, src netip.Addr, v4 bool) []byte {
	if v4 {
		if tos := int(m.TrafficClass); tos != s.tos && s.p4 != nil {
			// Not every system has it; the class is a wish.
			_ = s.p4.SetTOS(tos)
			s.tos = tos
		}
		if !s.wildcard || !src.IsValid() {
			return nil
		}
		return (&ipv4.ControlMessage{Src: src.AsSlice()}).Marshal()
	}
	cm := ipv6.ControlMessage{TrafficClass: int(m.TrafficClass)}
	if s.wildcard && src.IsValid() {
		cm.Src = src.AsSlice()
		if src.Zone() != "" {
			if ifi, err := net.InterfaceByName(src.Zone()); err == nil {
				cm.IfIndex = ifi.Index
			}
		}
	}
	if !hasControl || cm.Src == nil && cm.TrafficClass == 0 {
		return nil
	}
	return cm.Marshal()
}

// gather copies the pieces of a message together.
func (s *Socket) gather(m *link.Tx) []byte {
	sum := 0
	for _, p := range m.Gather {
		sum += len(p)
	}
	if sum != m.Len {
		panic(fmt.Sprintf("BUG: udp: Tx.Len is %d and its pieces are %d bytes", m.Len, sum))
	}
	if len(m.Gather) == 1 {
		return m.Gather[0]
	}
	if m.Len > len(s.scratch) {
		s.scratch = make([]byte, m.Len)
	}
	n := 0
	for _, p := range m.Gather {
		n += copy(s.scratch[n:], p)
	}
	return s.scratch[:n]
}

// head returns the first bytes of a message.
func head(m *link.Tx) (h [16]byte) {
	n := 0
	for _, p := range m.Gather {
		if n += copy(h[n:], p); n == len(h) {
			break
		}
	}
	return h
}

// Close closes the socket and waits for its reader. A second call does nothing.
func (s *Socket) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	close(s.done)
	err := s.conn.Close()
	s.reader.Wait()
	if err != nil {
		return fmt.Errorf("udp: close %v: %w", s.local, err)
	}
	return nil
}
