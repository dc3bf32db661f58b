//go:build !doorbellportable

package udp

import (
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

const (
	// maxPieces is the kernel's UIO_MAXIOV: more pieces in one message are copied together.
	maxPieces = 1024
	// numIovs is shared by the messages of one call. A message may take maxPieces.
	numIovs = 2 * maxPieces
	// callBytes ends a batch once it holds this much, so that one system call, which the
	// scheduler cannot interrupt, copies for some tens of microseconds and not for longer.
	callBytes = 256 << 10
	// headBytes of a message are remembered to know it again, enough to hold a PSN.
	headBytes = 16
)

// txBatch holds what one sendmmsg is told.
type txBatch struct {
	hdrs    []mmsghdr
	names   []unix.RawSockaddrInet6 // large enough for IPv4 too
	ctrl    []controlBuf
	iovs    []unix.Iovec
	entries []txEntry
	n       int // entries in use
	niov    int // iovs in use

	flat []byte    // a message of more than maxPieces pieces, copied together
	vec  [1][]byte // flat as a gather list

	rest unfinished
}

// txEntry says what one entry of the batch is.
type txEntry struct {
	msg   int // index of the message in Send's argument
	next  int // the segment that follows this entry; 0 if it finishes its message
	segs  int // datagrams in it, more than one: a train
	bytes int
	split bool // part of a train that is sent one datagram at a time
}

// cursor is a place in Send's argument.
type cursor struct {
	msg int
	seg int // segments of msg that are done
	// split sends message msg one datagram at a time although trains are on: the kernel
	// has refused it as a train with this errno.
	split unix.Errno
}

// unfinished remembers how far a message got that is sent one datagram at a time, when the
// send buffer filled up in its middle. The message counts as not taken; when it is offered
// again, it goes on where it stopped. The memory is known by its head, not by its place,
// because the caller may offer something else instead.
type unfinished struct {
	seg          int // segments sent; 0 means none is unfinished
	dst          netip.AddrPort
	len, segSize int
	head         [headBytes]byte
}

func (t *txBatch) init() {
	t.hdrs = make([]mmsghdr, batch)
	t.names = make([]unix.RawSockaddrInet6, batch)
	t.ctrl = make([]controlBuf, batch)
	t.entries = make([]txEntry, batch)
	t.iovs = make([]unix.Iovec, numIovs)
	for i := range t.hdrs {
		// The kernel takes names as bytes; the structs are plain data.
		t.hdrs[i].hdr.Name = (*byte)(unsafe.Pointer(&t.names[i]))
	}
}

// Send hands msgs to the kernel in order and returns how many were taken. It never
// blocks: fewer than len(msgs) means that the send buffer is full (wait for Writable),
// unless an error says that the socket is dead.
//
// A train goes out as one buffer if the kernel does that and Caps allows its size, else
// one datagram at a time: the same bytes, but over IPv4 each with Identification 0.
func (s *Socket) Send(msgs []link.Tx) (int, error) {
	if s.closed.Load() {
		return 0, net.ErrClosed
	}
	at := s.resume(msgs)
	interrupted := 0
	for at.msg < len(msgs) {
		if !s.fill(msgs, &at) {
			continue // a message that cannot be sent was skipped
		}
		n, errno := s.transmit()
		if errno == 0 && n > 0 {
			if n < s.tx.n {
				// What stopped the kernel will be told when the rest is offered again.
				s.txPartial.Add(1)
			}
			s.sent(n, &at)
			interrupted = 0
			continue
		}
		first := &s.tx.entries[0]
		switch {
		case errno == unix.EINTR && interrupted < maxTries:
			interrupted++
		case errno == unix.EAGAIN, errno == unix.EINTR, errno == 0:
			s.txBlocked.Add(1)
			s.suspend(msgs, at)
			return at.msg, nil
		case (errno == unix.ENOSYS || errno == unix.EOPNOTSUPP) && s.batch.on():
			s.giveUpBatch("sendmmsg", errno)
		case deadly(errno):
			return at.msg, fmt.Errorf("udp: send on %v: %w", s.local, errno)
		case first.segs > 1 && (errno == unix.EIO || errno == unix.EINVAL):
			// Either the train is at fault or what it has in common with its datagrams (a
			// source address that is gone is EINVAL too): the first datagram alone will tell.
			at.split = errno
		case at.split != 0 && at.seg == 0:
			// It is not the train.
			s.lose(faultOf(errno), segments(msgs[at.msg].Len, msgs[at.msg].SegSize))
			at = cursor{msg: at.msg + 1}
		default:
			s.lose(faultOf(errno), first.segs)
			s.advance(first, &at)
		}
	}
	return len(msgs), nil
}

// transmit offers the batch to the kernel, which takes from the front.
func (s *Socket) transmit() (int, unix.Errno) {
	if s.batch.on() && s.tx.n > 1 {
		return s.sys.sendmmsg(s.fd, &s.tx.hdrs[0], s.tx.n)
	}
	for i := range s.tx.n {
		if _, errno := s.sys.sendmsg(s.fd, &s.tx.hdrs[i].hdr); errno != 0 {
			if i > 0 {
				return i, 0
			}
			return 0, errno
		}
	}
	return s.tx.n, 0
}

// sent accounts for the first n entries of the batch and moves the cursor behind them.
func (s *Socket) sent(n int, at *cursor) {
	var datagrams, bytes, trains, split uint64
	for i := range s.tx.entries[:n] {
		e := &s.tx.entries[i]
		datagrams += uint64(e.segs)
		bytes += uint64(e.bytes)
		if e.segs > 1 {
			trains++
		}
		if e.split && e.next == 0 {
			split++
		}
	}
	s.txCalls.Add(1)
	s.txDatagrams.Add(datagrams)
	s.txBytes.Add(bytes)
	if trains != 0 {
		s.txTrains.Add(trains)
	}
	if split != 0 {
		s.txSplit.Add(split)
	}
	if at.split != 0 && at.seg == 0 {
		// The first datagram of a refused train went out alone: trains it is that the
		// kernel, the driver or a tunnel cannot do, whatever it said when asked.
		s.giveUpTrains(at.split)
	}
	s.advance(&s.tx.entries[n-1], at)
}

// advance moves the cursor behind an entry.
func (s *Socket) advance(e *txEntry, at *cursor) {
	if e.next == 0 {
		*at = cursor{msg: e.msg + 1}
		return
	}
	*at = cursor{msg: e.msg, seg: e.next, split: at.split}
}

func (s *Socket) giveUpTrains(errno unix.Errno) {
	if s.gso.on() {
		s.gso.giveUp(fmt.Sprintf("a train was refused: %v", errno))
		s.warnf("segmentation offload does not work here (%v): one datagram at a time from now on", errno)
	}
}

// resume returns where to begin: behind what an unfinished message has already sent, if
// the first message is that one.
func (s *Socket) resume(msgs []link.Tx) cursor {
	u := &s.tx.rest
	if u.seg == 0 || len(msgs) == 0 {
		return cursor{}
	}
	seg := u.seg
	u.seg = 0
	m := &msgs[0]
	if m.Dst != u.dst || m.Len != u.len || m.SegSize != u.segSize || head(m) != u.head {
		return cursor{}
	}
	return cursor{seg: seg}
}

// suspend remembers where the message at the cursor stopped, if it was in the middle.
func (s *Socket) suspend(msgs []link.Tx, at cursor) {
	if at.seg == 0 {
		return
	}
	m := &msgs[at.msg]
	s.tx.rest = unfinished{seg: at.seg, dst: m.Dst, len: m.Len, segSize: m.SegSize, head: head(m)}
}

// head returns the first bytes of a message.
func head(m *link.Tx) (h [headBytes]byte) {
	n := 0
	for _, p := range m.Gather {
		if n += copy(h[n:], p); n == len(h) {
			break
		}
	}
	return h
}

// fill makes a batch of what is at the cursor and behind it. It returns false when the
// message at the cursor cannot be sent: then it is counted as lost and skipped.
func (s *Socket) fill(msgs []link.Tx, at *cursor) bool {
	t := &s.tx
	t.n, t.niov = 0, 0
	bytes := 0
	for c := *at; c.msg < len(msgs) && t.n < batch && bytes < callBytes; c = (cursor{msg: c.msg + 1}) {
		m := msgs[c.msg]
		if fault, ok := s.check(&m); !ok {
			if t.n == 0 {
				s.lose(fault, segments(m.Len, m.SegSize)-c.seg)
				*at = cursor{msg: c.msg + 1}
			}
			return t.n > 0
		}
		if len(m.Gather) > maxPieces {
			if t.n > 0 {
				return true // flat may be in use
			}
			s.flatten(&m)
		}
		segs := segments(m.Len, m.SegSize)
		if segs == 1 {
			if !s.add(c.msg, &m, &pieces{list: m.Gather}, m.Len, 1, 0) {
				return true
			}
			bytes += m.Len
			continue
		}
		if c.split == 0 && c.seg == 0 && s.gso.on() && segs <= s.maxSegs && m.Len <= maxPayload {
			if !s.add(c.msg, &m, &pieces{list: m.Gather}, m.Len, segs, 0) {
				return true
			}
			bytes += m.Len
			continue
		}
		p := pieces{list: m.Gather}
		p.skip(c.seg * m.SegSize)
		for k := c.seg; k < segs; k++ {
			next := k + 1
			if next == segs {
				next = 0
			}
			n := min(m.SegSize, m.Len-k*m.SegSize)
			if t.n == batch || bytes >= callBytes || !s.add(c.msg, &m, &p, n, 1, next) {
				return true
			}
			t.entries[t.n-1].split = true
			bytes += n
		}
	}
	return true
}

// check says whether the kernel can be asked to send m at all, and unmaps its addresses.
func (s *Socket) check(m *link.Tx) (sendFault, bool) {
	sum := 0
	for _, p := range m.Gather {
		sum += len(p)
	}
	if sum != m.Len {
		panic(fmt.Sprintf("BUG: udp: Tx.Len is %d and its pieces are %d bytes", m.Len, sum))
	}
	if a := m.Dst.Addr(); a.Is4In6() {
		m.Dst = netip.AddrPortFrom(a.Unmap(), m.Dst.Port())
	}
	m.Src = m.Src.Unmap()
	dst := m.Dst.Addr()
	switch {
	case !dst.IsValid():
		return faultInvalid, false
	case dst.Is4() != m.Src.Is4() && s.wildcard && m.Src.IsValid():
		return faultInvalid, false
	case dst.Is4() && s.v6 && !s.dual, !dst.Is4() && !s.v6:
		return faultNetUnreachable, false
	}
	if len(m.Gather) > maxPieces && m.Len > slotBytes {
		return faultTooLong, false
	}
	return 0, true
}

// flatten copies a message of too many pieces together.
func (s *Socket) flatten(m *link.Tx) {
	t := &s.tx
	if t.flat == nil {
		t.flat = make([]byte, slotBytes)
	}
	n := 0
	for _, p := range m.Gather {
		n += copy(t.flat[n:], p)
	}
	t.vec[0] = t.flat[:n]
	m.Gather = t.vec[:]
}

// add appends an entry of n bytes from p to the batch. It returns false when the batch
// has no room for so many pieces; the first entry always has room.
func (s *Socket) add(msg int, m *link.Tx, p *pieces, n, segs, next int) bool {
	t := &s.tx
	first := t.niov
	for left := n; left > 0; {
		b := p.take(left)
		if t.niov == len(t.iovs) {
			t.niov = first
			return false
		}
		t.iovs[t.niov].Base = unsafe.SliceData(b)
		t.iovs[t.niov].SetLen(len(b))
		t.niov++
		left -= len(b)
	}
	i := t.n
	h := &t.hdrs[i].hdr
	h.Iov = nil
	if t.niov > first {
		h.Iov = &t.iovs[first]
	}
	h.SetIovlen(t.niov - first)
	s.name(i, m.Dst)
	s.writeControl(i, m, segs)
	t.entries[i] = txEntry{msg: msg, next: next, segs: segs, bytes: n}
	t.n++
	return true
}

// name writes the destination of entry i.
func (s *Socket) name(i int, dst netip.AddrPort) {
	s.tx.hdrs[i].hdr.Namelen = s.putName(&s.tx.names[i], dst)
}

// putName writes an address as the kernel wants it, and returns its length.
func (s *Socket) putName(n *unix.RawSockaddrInet6, dst netip.AddrPort) uint32 {
	if !s.v6 {
		// Both structs begin with the family, and the IPv4 one is the shorter.
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(n))
		v4.Family, v4.Addr = unix.AF_INET, dst.Addr().As4()
		setPort(&v4.Port, dst.Port())
		return unix.SizeofSockaddrInet4
	}
	n.Family, n.Addr = unix.AF_INET6, dst.Addr().As16() // IPv4 becomes mapped
	setPort(&n.Port, dst.Port())
	n.Scope_id = 0
	if zone := dst.Addr().Zone(); zone != "" {
		// An unknown zone stays 0, and the kernel refuses this datagram.
		n.Scope_id, _ = s.zones.index(zone)
	}
	return unix.SizeofSockaddrInet6
}

// writeControl writes the control messages of entry i: the source address on a socket that
// has many, the traffic class if asked for, the segment size of a train and of nothing else.
func (s *Socket) writeControl(i int, m *link.Tx, segs int) {
	buf := &s.tx.ctrl[i]
	v4 := m.Dst.Addr().Is4()
	n := 0
	if s.wildcard && m.Src.IsValid() {
		// putControl returns room for as many bytes as it was asked for.
		if v4 {
			data, next := putControl(buf, n, unix.IPPROTO_IP, unix.IP_PKTINFO, unix.SizeofInet4Pktinfo)
			*(*unix.Inet4Pktinfo)(data) = unix.Inet4Pktinfo{Spec_dst: m.Src.As4()}
			n = next
		} else {
			info := unix.Inet6Pktinfo{Addr: m.Src.As16()}
			if zone := m.Src.Zone(); zone != "" {
				info.Ifindex, _ = s.zones.index(zone)
			}
			data, next := putControl(buf, n, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.SizeofInet6Pktinfo)
			*(*unix.Inet6Pktinfo)(data) = info
			n = next
		}
	}
	if m.TrafficClass != 0 {
		level, typ := unix.IPPROTO_IPV6, unix.IPV6_TCLASS
		if v4 {
			level, typ = unix.IPPROTO_IP, unix.IP_TOS
		}
		data, next := putControl(buf, n, level, typ, 4)
		*(*int32)(data) = int32(m.TrafficClass)
		n = next
	}
	if segs > 1 {
		data, next := putControl(buf, n, unix.SOL_UDP, unix.UDP_SEGMENT, 2)
		*(*uint16)(data) = uint16(m.SegSize) // below maxPayload, see fill
		n = next
	}
	h := &s.tx.hdrs[i].hdr
	h.Control = nil
	if n > 0 {
		h.Control = (*byte)(unsafe.Pointer(buf))
	}
	h.SetControllen(n)
}

// pieces walks over a gather list.
type pieces struct {
	list [][]byte
	off  int // bytes of list[0] that are done
}

// take returns the next piece, at most n bytes, n > 0. There must be bytes left.
func (p *pieces) take(n int) []byte {
	for len(p.list[0]) == p.off {
		p.list, p.off = p.list[1:], 0
	}
	b := p.list[0][p.off:]
	if len(b) > n {
		b = b[:n]
	}
	p.off += len(b)
	return b
}

// skip passes over n bytes.
func (p *pieces) skip(n int) {
	for n > 0 {
		n -= len(p.take(n))
	}
}

// faultOf sorts an errno.
func faultOf(errno unix.Errno) sendFault {
	switch errno {
	case unix.EMSGSIZE:
		return faultTooLong
	case unix.ENOBUFS, unix.ENOMEM:
		return faultNoBuffers
	case unix.EPERM, unix.EACCES:
		return faultNotPermitted
	case unix.ECONNREFUSED:
		return faultRefused
	case unix.ENETUNREACH, unix.ENETDOWN:
		return faultNetUnreachable
	case unix.EHOSTUNREACH, unix.EHOSTDOWN:
		return faultHostUnreachable
	case unix.EINVAL, unix.EADDRNOTAVAIL, unix.EAFNOSUPPORT:
		return faultInvalid
	}
	return faultOther
}
