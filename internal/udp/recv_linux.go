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
	// slotBytes holds the longest UDP payload and the longest train alike.
	slotBytes = 64 << 10
	// slotStride keeps the beginnings of slots, where the headers are, out of each
	// other's cache sets.
	slotStride = slotBytes + 128
	// maxTries bounds how often one call is repeated: signals and pending errors pass.
	maxTries = 32
	// maxFailures is the number of receive errors in a row that means the socket is dead.
	maxFailures = 1024
)

// rxSlots are the receive slots with everything recvmmsg wants to know about them. Slots
// are filled from the first one on, and the pages of a slot exist only once they have
// been written, so an idle socket costs next to nothing.
type rxSlots struct {
	mem   []byte // batch slots, mapped outside of the Go heap
	hdrs  []mmsghdr
	iovs  []unix.Iovec
	names []unix.RawSockaddrInet6 // large enough for IPv4 too
	ctrl  []controlBuf
	want  int // slots that the last Recv offered
	dirty int // slots that the kernel has written since they were set up

	failures int    // receive errors in a row
	dropped  uint32 // the kernel's last drop count
}

func (r *rxSlots) init() error {
	mem, err := unix.Mmap(-1, 0, batch*slotStride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("receive memory: %w", err)
	}
	r.mem = mem
	r.hdrs = make([]mmsghdr, batch)
	r.iovs = make([]unix.Iovec, batch)
	r.names = make([]unix.RawSockaddrInet6, batch)
	r.ctrl = make([]controlBuf, batch)
	for i := range r.hdrs {
		r.iovs[i].Base = &mem[i*slotStride]
		r.iovs[i].SetLen(slotBytes)
		h := &r.hdrs[i].hdr
		h.Iov = &r.iovs[i]
		h.SetIovlen(1)
		// The kernel takes names and control messages as bytes; the structs are plain data.
		h.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		h.Control = (*byte)(unsafe.Pointer(&r.ctrl[i]))
	}
	r.dirty = batch
	return nil
}

func (r *rxSlots) free() {
	mem := r.mem
	r.mem = nil
	_ = unix.Munmap(mem) // fails only for memory that Mmap did not give
}

// renew makes used slots ready: the kernel has overwritten the lengths that it had been
// given room for.
func (r *rxSlots) renew() {
	for i := range r.hdrs[:r.dirty] {
		h := &r.hdrs[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(controlBytes)
		h.Flags = 0
	}
	r.dirty = 0
}

// Recv fills msgs with what has arrived, at most 32 buffers, and returns how many. It
// never blocks. The buffers are valid until the next call, or Claim.
func (s *Socket) Recv(msgs []link.Rx) (int, error) {
	if s.closed.Load() {
		return 0, net.ErrClosed
	}
	want := min(len(msgs), len(s.rx.hdrs))
	if want == 0 {
		return 0, nil
	}
	var n int
	if s.claim.state.Load() != claimNone {
		n = min(s.claim.take(), want) // Await offered what the last Recv did: want, as a wire calls it
	} else {
		s.rx.want = want
		s.rx.renew()
		var err error
		if n, err = s.receive(want); err != nil {
			return 0, err
		}
	}
	if n == 0 {
		return 0, nil
	}
	s.rx.dirty = n
	var datagrams, bytes, trains uint64
	got := 0
	for i := range n {
		m := &msgs[got]
		s.message(i, m)
		if len(m.Buf) == 0 && m.Src == s.claim.self {
			s.rxRouses.Add(1)
			continue
		}
		got++
		datagrams += uint64(segments(len(m.Buf), m.SegSize))
		bytes += uint64(len(m.Buf))
		if m.SegSize != 0 {
			trains++
		}
	}
	s.rxCalls.Add(1)
	s.rxDatagrams.Add(datagrams)
	s.rxBytes.Add(bytes)
	if trains != 0 {
		s.rxTrains.Add(trains)
	}
	return got, nil
}

// receive lets the kernel fill up to want slots. Faults that pass are counted and the call
// repeated: an error that was pending on the socket must not hide what has arrived.
func (s *Socket) receive(want int) (int, error) {
	for range maxTries {
		var n int
		var errno unix.Errno
		if s.batch.on() {
			n, errno = s.sys.recvmmsg(s.fd, &s.rx.hdrs[0], want)
		} else {
			n, errno = s.receiveSingly(want)
		}
		switch errno {
		case 0:
			s.rx.failures = 0
			return n, nil
		case unix.EAGAIN:
			s.rx.failures = 0
			return 0, nil
		case unix.EINTR:
			continue
		case unix.ENOSYS, unix.EOPNOTSUPP:
			if s.batch.on() {
				s.giveUpBatch("recvmmsg", errno)
				continue
			}
		}
		s.rxErrors.Add(1)
		s.rx.failures++
		if deadly(errno) || s.rx.failures >= maxFailures {
			return 0, fmt.Errorf("udp: receive on %v: %w", s.local, errno)
		}
	}
	return 0, nil
}

// receiveSingly is recvmmsg made of recvmsg.
func (s *Socket) receiveSingly(want int) (int, unix.Errno) {
	for i := range want {
		n, errno := s.sys.recvmsg(s.fd, &s.rx.hdrs[i].hdr)
		if errno != 0 {
			if i > 0 {
				// What it was shows again next time, or has passed.
				return i, 0
			}
			return 0, errno
		}
		s.rx.hdrs[i].len = uint32(n)
	}
	return want, 0
}

// deadly says that no later call on this socket can succeed.
func deadly(errno unix.Errno) bool {
	return errno == unix.EBADF || errno == unix.ENOTSOCK || errno == unix.EFAULT
}

// giveUpBatch goes over to one message per system call.
func (s *Socket) giveUpBatch(call string, errno unix.Errno) {
	s.batch.giveUp(fmt.Sprintf("%s failed: %v", call, errno))
	s.warnf("%s is not available (%v): one system call per datagram", call, errno)
}

// message describes slot i in m.
func (s *Socket) message(i int, m *link.Rx) {
	h := &s.rx.hdrs[i]
	n := min(int(h.len), slotBytes)
	at := i * slotStride
	*m = link.Rx{Buf: s.rx.mem[at : at+n : at+slotBytes], Src: s.source(i)}
	m.Dst = s.local.Addr()
	c := s.readControl(&s.rx.ctrl[i], int(h.hdr.Controllen))
	if c.dst.IsValid() {
		m.Dst = c.dst
	}
	if c.segSize > 0 && c.segSize < n {
		m.SegSize = c.segSize
	}
	if c.hasDropped {
		s.rxDropped.Add(uint64(c.dropped - s.rx.dropped)) // both wrap at 2^32
		s.rx.dropped = c.dropped
	}
	// Without its control messages a buffer cannot be told into datagrams, nor its
	// destination be known: as useless as one cut short.
	if h.hdr.Flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || (s.wildcard && !c.dst.IsValid()) {
		m.Truncated = true
		s.rxTruncated.Add(1)
	}
}

// source reads the address of slot i's sender.
func (s *Socket) source(i int) netip.AddrPort {
	name := &s.rx.names[i]
	switch {
	case name.Family == unix.AF_INET6 && s.rx.hdrs[i].hdr.Namelen >= unix.SizeofSockaddrInet6:
		return netip.AddrPortFrom(s.zones.addr(name.Addr, name.Scope_id), portOf(&name.Port))
	case name.Family == unix.AF_INET && s.rx.hdrs[i].hdr.Namelen >= unix.SizeofSockaddrInet4:
		// Both structs begin with the family, and the IPv4 one is the shorter.
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), portOf(&v4.Port))
	}
	return netip.AddrPort{}
}

// portOf reads a port that is in network byte order in memory.
func portOf(p *uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(p))
	return uint16(b[0])<<8 | uint16(b[1])
}

// setPort writes a port in network byte order.
func setPort(p *uint16, port uint16) {
	b := (*[2]byte)(unsafe.Pointer(p))
	b[0], b[1] = byte(port>>8), byte(port)
}
