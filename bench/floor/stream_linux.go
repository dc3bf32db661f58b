package floor

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The datagrams of a stream, big-endian but for the checksum:
//
//	bytes  0-7   zero, as many as the rest of a base transport header takes
//	       8-11  number of the datagram, from 0
//	      12-    payload
//	last    4    CRC-32 of all before it, little-endian
//
// A datagram of one byte asks for an acknowledgement, one of two says goodbye. An
// acknowledgement, 16 bytes, has the number of the next datagram expected and how many came.
const (
	headLen  = 12
	tailLen  = 4
	ackLen   = 16
	askLen   = 1
	leaveLen = 2
)

// small is the payload below which it is copied behind its header, to be checksummed and sent
// in one piece; above it is gathered from where it lies.
const small = 512

// memory is how much the sender sends over and over, and where the receiver puts it: a
// message of the product's bandwidth tests.
const memory = 1 << 20

// stall is after how long without an acknowledgement datagrams count as lost.
const stall = 50 * time.Millisecond

// source sends.
func source(ctx context.Context, p Params, to netip.AddrPort) (Result, error) {
	p.Block = false // the sender takes acknowledgements as they come, and waits only for room
	s, err := openSocket(ctx, &p, netip.AddrPortFrom(p.Places[1].addr(), 0))
	if err != nil {
		return Result{}, err
	}
	defer s.close()
	s.aim(to)
	if p.Connected {
		if err := s.connect(); err != nil {
			return Result{}, err
		}
	}
	if !p.NoOffload {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_UDP, unix.UDP_SEGMENT, p.Size); err != nil {
			return Result{}, os.NewSyscallError("UDP_SEGMENT", err)
		}
	}
	t := newTrain(&p, s)
	w := window{s: s, size: uint32(p.window())}
	if err := w.ask(); err != nil { // the receiver is there
		return Result{}, err
	}
	n := uint32(p.train())
	warm := uint64(4 * p.window())
	var begin, end time.Time
	base, sent := uint64(0), uint64(0)
	for {
		switch {
		case begin.IsZero():
			if sent >= warm {
				begin, base = time.Now(), sent
			}
		case p.Iters > 0 && sent-base >= uint64(p.Iters), p.Iters == 0 && t.count%8 == 0 && time.Since(begin) >= p.Duration:
			if err := w.drain(); err != nil {
				return Result{}, err
			}
			end = time.Now()
		}
		if !end.IsZero() {
			break
		}
		if err := w.room(n); err != nil {
			return Result{}, err
		}
		if err := t.send(w.next); err != nil {
			return Result{}, err
		}
		w.next += n
		sent += uint64(n)
	}
	for range 3 {
		_ = s.send(w.buf[:leaveLen])
	}
	ops := sent - base
	return Result{Ops: ops, Elapsed: end.Sub(begin), Bytes: ops * uint64(p.payload()), Lost: uint64(uint32(sent) - w.came)}, nil
}

// window is what of a stream is under way.
type window struct {
	s           *socket
	size        uint32
	next, acked uint32 // numbers of datagrams; they wrap
	came        uint32 // how many have, as the receiver says
	buf         [ackLen]byte
}

// read takes an acknowledgement if there is one.
func (w *window) read() (bool, error) {
	n, e := w.s.tryRecv(w.buf[:], false)
	if e != 0 {
		return false, w.s.again("recvfrom", e)
	}
	if n == ackLen {
		w.acked, w.came = binary.BigEndian.Uint32(w.buf[4:]), binary.BigEndian.Uint32(w.buf[12:])
	}
	return n == ackLen, nil
}

// room waits until n more datagrams may be sent.
func (w *window) room(n uint32) error {
	var since time.Time
	for spins := 1; w.next-w.acked+n > w.size; spins++ {
		got, err := w.read()
		if err != nil {
			return err
		}
		switch {
		case got:
			spins, since = 0, time.Time{}
		case spins%4096 == 0 && since.IsZero():
			since = time.Now()
		case spins%4096 == 0 && time.Since(since) > stall:
			// Lost, with nobody to send it again. Begin anew with an empty window.
			if err := w.ask(); err != nil {
				return err
			}
			w.acked = w.next
		}
	}
	return nil
}

// drain waits until everything sent has been acknowledged, or is known to be lost.
func (w *window) drain() error {
	for quiet := 0; w.acked != w.next && quiet < 3; quiet++ {
		if err := w.ask(); err != nil {
			return err
		}
		// Acknowledgements of before may be in front of the answer.
		for begin := time.Now(); w.acked != w.next && time.Since(begin) < stall; {
			got, err := w.read()
			if err != nil {
				return err
			}
			if got {
				quiet, begin = 0, time.Now()
			}
		}
	}
	return nil
}

// ask asks for an acknowledgement until one comes.
func (w *window) ask() error {
	for {
		w.buf[0] = 0
		if err := w.s.send(w.buf[:askLen]); err != nil {
			return err
		}
		for begin := time.Now(); time.Since(begin) < stall; {
			if got, err := w.read(); got || err != nil {
				return err
			}
		}
	}
}

// train is what one system call sends.
type train struct {
	p     *Params
	s     *socket
	count uint // trains sent
	// user is the memory to send from. Small datagrams are staged in one piece after the
	// other. For large ones frame i, between payloads i-1 and i, holds the checksum of one
	// and the header of the next, so that two entries describe a datagram.
	user   []byte
	staged []byte
	frames [][tailLen + headLen]byte
	iov    []unix.Iovec
	msg    unix.Msghdr
	msgs   []mmsghdr
}

func newTrain(p *Params, s *socket) *train {
	n := p.train()
	t := &train{p: p, s: s, user: make([]byte, memory+p.payload())}
	for i := range t.user {
		t.user[i] = byte(i * 7)
	}
	name := (*byte)(unsafe.Pointer(&s.peer))
	nameLen := uint32(unsafe.Sizeof(s.peer))
	if s.connected {
		name, nameLen = nil, 0
	}
	gathers := p.payload() >= small
	if gathers {
		t.frames = make([][tailLen + headLen]byte, n+1)
	} else {
		t.staged = make([]byte, n*p.Size)
	}
	if !p.NoOffload {
		if gathers {
			t.iov = make([]unix.Iovec, 2*n+1)
			for i := range t.frames {
				frame := t.frames[i][:]
				switch i {
				case 0:
					frame = frame[tailLen:]
				case n:
					frame = frame[:tailLen]
				}
				setIov(&t.iov[2*i], frame)
			}
			t.msg = unix.Msghdr{Name: name, Namelen: nameLen, Iov: &t.iov[0]}
			t.msg.SetIovlen(len(t.iov))
		}
		return t
	}
	each := 1
	if gathers {
		each = 3
	}
	t.iov, t.msgs = make([]unix.Iovec, each*n), make([]mmsghdr, n)
	for i := range t.msgs {
		iov := t.iov[each*i:][:each]
		if gathers {
			setIov(&iov[0], t.frames[i][tailLen:])
			setIov(&iov[2], t.frames[i+1][:tailLen])
		} else {
			setIov(&iov[0], t.staged[i*p.Size:][:p.Size])
		}
		t.msgs[i].hdr = unix.Msghdr{Name: name, Namelen: nameLen, Iov: &iov[0]}
		t.msgs[i].hdr.SetIovlen(each)
	}
	return t
}

func setIov(v *unix.Iovec, b []byte) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
}

// place is where datagram n lies in a memory of this size.
func place(n uint32, payload int) int { return int(uint64(n) * uint64(payload) % memory) }

// send sends datagrams first, first+1 and so on.
func (t *train) send(first uint32) error {
	t.count++
	if t.frames == nil {
		t.stage(first)
	} else {
		t.gather(first)
	}
	switch {
	case t.p.NoOffload:
		return t.s.sendMsgs(t.msgs)
	case t.frames == nil:
		return t.s.send(t.staged)
	}
	return t.s.sendMsg(&t.msg)
}

func (t *train) stage(first uint32) {
	size, payload := t.p.Size, t.p.payload()
	for i := range uint32(t.p.train()) {
		b := t.staged[int(i)*size:][:size]
		binary.BigEndian.PutUint32(b[8:], first+i)
		copy(b[headLen:], t.user[place(first+i, payload):][:payload])
		if !t.p.NoCheck {
			binary.LittleEndian.PutUint32(b[size-tailLen:], crc32.ChecksumIEEE(b[:size-tailLen]))
		}
	}
}

func (t *train) gather(first uint32) {
	payload, stride, at := t.p.payload(), 2, 1
	if t.p.NoOffload {
		stride = 3
	}
	for i := range uint32(t.p.train()) {
		head, tail := t.frames[i][tailLen:], t.frames[i+1][:tailLen]
		b := t.user[place(first+i, payload):][:payload]
		binary.BigEndian.PutUint32(head[8:], first+i)
		if !t.p.NoCheck {
			sum := crc32.Update(crc32.ChecksumIEEE(head), crc32.IEEETable, b)
			binary.LittleEndian.PutUint32(tail, sum)
		}
		setIov(&t.iov[at], b)
		at += stride
	}
}

// The receiver's buffers: a train may fill 64 KiB. More slots than a few would only push each
// other out of the cache.
const (
	trainSlots = 8
	trainBytes = 1 << 16
	plainSlots = 64
)

// groSpace is room for the control message that tells the size of a train's segments.
const groSpace = 32

// sink receives.
func sink(ctx context.Context, p Params, ready func(netip.AddrPort) error) error {
	s, err := openSocket(ctx, &p, netip.AddrPortFrom(p.Places[0].addr(), 0))
	if err != nil {
		return err
	}
	defer s.close()
	r := receiver{p: &p, s: s, user: make([]byte, memory+p.payload()), bufLen: p.Size, every: uint32(p.ackEvery())}
	slots := plainSlots
	if !p.NoOffload {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_UDP, unix.UDP_GRO, 1); err != nil {
			return os.NewSyscallError("UDP_GRO", err)
		}
		slots, r.bufLen = trainSlots, trainBytes
	}
	at, err := s.local()
	if err == nil {
		err = ready(at)
	}
	if err == nil {
		_, err = s.recvFirst(r.ack[:])
	}
	if err == nil && p.Connected {
		err = s.connect()
	}
	if err == nil {
		err = r.acknowledge()
	}
	if err != nil {
		return err
	}
	r.bufs = make([]byte, slots*r.bufLen)
	r.control = make([][groSpace]byte, slots)
	r.msgs = make([]mmsghdr, slots)
	iov := make([]unix.Iovec, slots)
	for i := range r.msgs {
		setIov(&iov[i], r.bufs[i*r.bufLen:][:r.bufLen])
		r.msgs[i].hdr.Iov = &iov[i]
		r.msgs[i].hdr.SetIovlen(1)
		if !p.NoOffload {
			r.msgs[i].hdr.Control = &r.control[i][0]
			r.msgs[i].hdr.SetControllen(groSpace)
		}
	}
	for !r.left {
		n, err := s.recvMsgs(r.msgs)
		if err != nil {
			return err
		}
		for i := range r.msgs[:n] {
			if err := r.train(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// receiver is the receiving end of a stream.
type receiver struct {
	p       *Params
	s       *socket
	bufs    []byte
	bufLen  int
	control [][groSpace]byte
	msgs    []mmsghdr
	user    []byte // where payloads go

	next, came uint32
	unacked    uint32
	every      uint32
	left       bool
	ack        [ackLen]byte
}

// train takes what is in a slot, one datagram or several.
func (r *receiver) train(slot int) error {
	b := r.bufs[slot*r.bufLen:][:r.msgs[slot].len]
	segment := len(b)
	if !r.p.NoOffload {
		if h := (*unix.Cmsghdr)(unsafe.Pointer(&r.control[slot])); r.msgs[slot].hdr.Controllen > 0 && h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO {
			segment = int(*(*int32)(unsafe.Pointer(&r.control[slot][unix.CmsgLen(0)])))
		}
		r.msgs[slot].hdr.SetControllen(groSpace)
	}
	for len(b) > 0 {
		d := b[:min(segment, len(b))]
		b = b[len(d):]
		switch len(d) {
		case r.p.Size:
			r.datagram(d)
		case askLen:
			r.unacked = r.every
		case leaveLen:
			r.left = true
			return nil
		}
	}
	if r.unacked >= r.every {
		return r.acknowledge()
	}
	return nil
}

// datagram takes one datagram; one with a wrong checksum has not come.
func (r *receiver) datagram(d []byte) {
	tail := len(d) - tailLen
	if !r.p.NoCheck && crc32.ChecksumIEEE(d[:tail]) != binary.LittleEndian.Uint32(d[tail:]) {
		return
	}
	n := binary.BigEndian.Uint32(d[8:])
	if !r.p.NoCopy {
		copy(r.user[place(n, tail-headLen):], d[headLen:tail])
	}
	r.next = n + 1
	r.came++
	r.unacked++
}

func (r *receiver) acknowledge() error {
	r.unacked = 0
	binary.BigEndian.PutUint32(r.ack[4:], r.next)
	binary.BigEndian.PutUint32(r.ack[12:], r.came)
	return r.s.send(r.ack[:])
}
