//go:build !doorbellportable

package udp

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/doorbell-rdma/doorbell/internal/link"
)

// outgoing is what the fake kernel was asked to send.
type outgoing struct {
	data    []byte
	dst     netip.AddrPort
	segSize int        // of UDP_SEGMENT, 0 without
	src     netip.Addr // of PKTINFO
	class   int        // of IP_TOS or IPV6_TCLASS
}

// fakeKernel takes what is sent and fails as the test says.
type fakeKernel struct {
	// refuse is asked for each message in turn; an errno stops the call there.
	refuse func(o outgoing) unix.Errno
	// noMMsg makes the calls for several messages fail.
	noMMsg unix.Errno
	// limit is the number of messages that one call takes, 0 for all.
	limit int

	wire  []outgoing // what was taken
	calls int        // system calls made

	// incoming is what each receive call brings.
	incoming []incoming
}

// incoming is one receive call's outcome.
type incoming struct {
	errno unix.Errno
	msgs  []delivery
}

type delivery struct {
	data    []byte
	src     unix.RawSockaddrInet6
	control []byte
	flags   int
	nocut   bool
}

func (k *fakeKernel) read(h *unix.Msghdr) outgoing {
	var o outgoing
	for _, v := range unsafe.Slice(h.Iov, h.Iovlen) {
		o.data = append(o.data, unsafe.Slice(v.Base, v.Len)...)
	}
	name := (*unix.RawSockaddrInet6)(unsafe.Pointer(h.Name))
	switch name.Family {
	case unix.AF_INET:
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(h.Name))
		o.dst = netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), portOf(&v4.Port))
	case unix.AF_INET6:
		o.dst = netip.AddrPortFrom(netip.AddrFrom16(name.Addr), portOf(&name.Port))
	}
	if h.Controllen == 0 {
		return o
	}
	cms, err := unix.ParseSocketControlMessage(unsafe.Slice(h.Control, h.Controllen))
	if err != nil {
		panic(err)
	}
	for _, cm := range cms {
		d := unsafe.Pointer(&cm.Data[0])
		switch [2]int32{cm.Header.Level, cm.Header.Type} {
		case [2]int32{unix.SOL_UDP, unix.UDP_SEGMENT}:
			o.segSize = int(*(*uint16)(d))
		case [2]int32{unix.IPPROTO_IP, unix.IP_PKTINFO}:
			o.src = netip.AddrFrom4((*unix.Inet4Pktinfo)(d).Spec_dst)
		case [2]int32{unix.IPPROTO_IPV6, unix.IPV6_PKTINFO}:
			o.src = netip.AddrFrom16((*unix.Inet6Pktinfo)(d).Addr)
		case [2]int32{unix.IPPROTO_IP, unix.IP_TOS}, [2]int32{unix.IPPROTO_IPV6, unix.IPV6_TCLASS}:
			o.class = int(*(*int32)(d))
		default:
			panic(fmt.Sprintf("unknown control message %+v", cm.Header))
		}
	}
	return o
}

func (k *fakeKernel) sendmsg(_ int, h *unix.Msghdr) (int, unix.Errno) {
	k.calls++
	return k.take(h)
}

func (k *fakeKernel) take(h *unix.Msghdr) (int, unix.Errno) {
	o := k.read(h)
	if k.refuse != nil {
		if e := k.refuse(o); e != 0 {
			return 0, e
		}
	}
	k.wire = append(k.wire, o)
	return len(o.data), 0
}

func (k *fakeKernel) sendmmsg(_ int, m *mmsghdr, n int) (int, unix.Errno) {
	k.calls++
	if k.noMMsg != 0 {
		return 0, k.noMMsg
	}
	for i, h := range unsafe.Slice(m, n) {
		if k.limit != 0 && i == k.limit {
			return i, 0
		}
		if _, e := k.take(&h.hdr); e != 0 {
			if i > 0 {
				return i, 0 // as the real one: the errno is not told
			}
			return 0, e
		}
	}
	return n, 0
}

func (k *fakeKernel) recvmmsg(_ int, m *mmsghdr, n int) (int, unix.Errno) {
	if k.noMMsg != 0 {
		return 0, k.noMMsg
	}
	if len(k.incoming) == 0 {
		return 0, unix.EAGAIN
	}
	in := &k.incoming[0]
	if in.errno != 0 {
		e := in.errno
		k.incoming = k.incoming[1:]
		return 0, e
	}
	hdrs := unsafe.Slice(m, n)
	got := min(n, len(in.msgs))
	for i := range got {
		hdrs[i].len = uint32(in.msgs[i].put(&hdrs[i].hdr))
	}
	if in.msgs = in.msgs[got:]; len(in.msgs) == 0 {
		k.incoming = k.incoming[1:]
	}
	return got, 0
}

func (k *fakeKernel) recvmsg(_ int, h *unix.Msghdr) (int, unix.Errno) {
	if len(k.incoming) == 0 {
		return 0, unix.EAGAIN
	}
	in := &k.incoming[0]
	if in.errno != 0 {
		e := in.errno
		k.incoming = k.incoming[1:]
		return 0, e
	}
	n := in.msgs[0].put(h)
	if in.msgs = in.msgs[1:]; len(in.msgs) == 0 {
		k.incoming = k.incoming[1:]
	}
	return n, 0
}

// put writes a datagram where the caller has room for it.
func (d *delivery) put(h *unix.Msghdr) int {
	if h.Namelen != unix.SizeofSockaddrInet6 || h.Controllen != controlBytes || h.Flags != 0 {
		panic(fmt.Sprintf("slot not renewed: name %d, control %d, flags %#x", h.Namelen, h.Controllen, h.Flags))
	}
	*(*unix.RawSockaddrInet6)(unsafe.Pointer(h.Name)) = d.src
	if d.src.Family == unix.AF_INET {
		h.Namelen = unix.SizeofSockaddrInet4
	}
	copy(unsafe.Slice(h.Control, controlBytes), d.control)
	h.SetControllen(len(d.control))
	h.Flags = int32(d.flags)
	return copy(unsafe.Slice(h.Iov.Base, h.Iov.Len), d.data)
}

// fakeNode opens a socket whose data goes to and comes from k.
func fakeNode(t testing.TB, k *fakeKernel, bind string, change ...func(*Config)) *Socket {
	t.Helper()
	sys := kernel
	sys.sendmsg, sys.sendmmsg, sys.recvmsg, sys.recvmmsg = k.sendmsg, k.sendmmsg, k.recvmsg, k.recvmmsg
	sys.maxSegs = func() int { return newMaxSegs }
	cfg := Config{Bind: netip.MustParseAddrPort(bind), RecvBuffer: -1, SendBuffer: -1}
	for _, f := range change {
		f(&cfg)
	}
	s, err := openWith(cfg, sys)
	if err != nil {
		t.Fatal(err)
	}
	s.gso = ability{} // on, whatever the kernel under the test can do
	s.maxSegs = newMaxSegs
	if cfg.NoGSO {
		s.gso.giveUp("test")
	}
	t.Cleanup(func() { s.Close() })
	return s
}

var (
	peer  = netip.MustParseAddrPort("127.0.0.2:4791")
	local = netip.MustParseAddr("127.0.0.1")
)

// datagrams flattens what is on the wire, trains split as a kernel splits them.
func (k *fakeKernel) datagrams() [][]byte {
	var out [][]byte
	for _, o := range k.wire {
		if o.segSize == 0 {
			out = append(out, o.data)
		} else {
			out = append(out, cut(o.data, o.segSize)...)
		}
	}
	return out
}

func text(ds [][]byte) string { return string(bytes.Join(ds, []byte(" "))) }

// numbered makes n messages "0", "1", ….
func numbered(n int) (msgs []link.Tx, want string) {
	for i := range n {
		msgs = append(msgs, tx(local, peer, fmt.Append(nil, i), 0))
		want += fmt.Sprint(i) + " "
	}
	return msgs, strings.TrimSuffix(want, " ")
}

// F09, F49: what befalls one datagram costs exactly that one.
func TestSendErrorOfOneMessage(t *testing.T) {
	for _, tc := range []struct {
		errno unix.Errno
		count func(SendErrors) uint64
	}{
		{unix.EMSGSIZE, func(e SendErrors) uint64 { return e.TooLong }},
		{unix.ENOBUFS, func(e SendErrors) uint64 { return e.NoBuffers }},
		{unix.ENOMEM, func(e SendErrors) uint64 { return e.NoBuffers }},
		{unix.EPERM, func(e SendErrors) uint64 { return e.NotPermitted }},
		{unix.EACCES, func(e SendErrors) uint64 { return e.NotPermitted }},
		{unix.ECONNREFUSED, func(e SendErrors) uint64 { return e.Refused }},
		{unix.ENETUNREACH, func(e SendErrors) uint64 { return e.NetUnreachable }},
		{unix.EHOSTUNREACH, func(e SendErrors) uint64 { return e.HostUnreachable }},
		{unix.EINVAL, func(e SendErrors) uint64 { return e.Invalid }},
		{unix.EIO, func(e SendErrors) uint64 { return e.Other }},
		{unix.ENODEV, func(e SendErrors) uint64 { return e.Other }},
	} {
		for _, at := range []int{0, 1, 31, 32, 39} {
			t.Run(fmt.Sprintf("%v at %d", tc.errno, at), func(t *testing.T) {
				msgs, want := numbered(40)
				bad := fmt.Sprint(at)
				k := &fakeKernel{refuse: func(o outgoing) unix.Errno {
					if string(o.data) == bad {
						return tc.errno
					}
					return 0
				}}
				s := fakeNode(t, k, "127.0.0.1:0")
				if n, err := s.Send(msgs); n != len(msgs) || err != nil {
					t.Fatalf("took %d, %v", n, err)
				}
				fields := strings.Fields(want)
				want = strings.Join(slices.Delete(fields, at, at+1), " ")
				if got := text(k.datagrams()); got != want {
					t.Errorf("sent %s\nwant %s", got, want)
				}
				st := s.Stats()
				if tc.count(st.TxErrors) != 1 || st.TxErrors.Total() != 1 || st.TxDatagrams != 39 {
					t.Errorf("counted %+v, %d sent", st.TxErrors, st.TxDatagrams)
				}
				if !st.GSO.On {
					t.Error("trains were given up for a lone datagram's error")
				}
			})
		}
	}
}

// F09: a call that takes a part goes on at the next message, whatever it takes each time.
func TestSendPartial(t *testing.T) {
	for _, limit := range []int{1, 2, 7, 31} {
		msgs, want := numbered(70)
		k := &fakeKernel{limit: limit}
		s := fakeNode(t, k, "127.0.0.1:0")
		if n, err := s.Send(msgs); n != 70 || err != nil {
			t.Fatalf("took %d, %v", n, err)
		}
		if got := text(k.datagrams()); got != want {
			t.Errorf("limit %d: sent %s", limit, got)
		}
		if s.Stats().TxPartial == 0 {
			t.Error("not counted")
		}
	}
}

// F49: a full send buffer stops the batch at the right place, and nothing is lost or doubled.
func TestSendWouldBlock(t *testing.T) {
	for _, mode := range []struct {
		name string
		f    func(*Config)
	}{{"batch", func(*Config) {}}, {"no batch", noBatch}} {
		t.Run(mode.name, func(t *testing.T) {
			msgs, want := numbered(40)
			budget := 0
			k := &fakeKernel{}
			k.refuse = func(outgoing) unix.Errno {
				if budget == 0 {
					return unix.EAGAIN
				}
				budget--
				return 0
			}
			s := fakeNode(t, k, "127.0.0.1:0", mode.f)
			for sum, b := 0, 0; sum < 40; b = b%7 + 1 {
				budget = min(b, 40-sum)
				wantN := budget
				n, err := s.Send(msgs[sum:])
				if n != wantN || err != nil {
					t.Fatalf("took %d, %v; want %d", n, err, wantN)
				}
				sum += n
			}
			if got := text(k.datagrams()); got != want {
				t.Errorf("sent %s", got)
			}
			if s.Stats().TxBlocked == 0 || s.Stats().TxErrors.Total() != 0 {
				t.Errorf("stats %+v", s.Stats())
			}
		})
	}
}

// Signals are nothing; so many that nothing else happens look like a full buffer.
func TestSendInterrupted(t *testing.T) {
	left := 20
	k := &fakeKernel{refuse: func(outgoing) unix.Errno {
		if left > 0 {
			left--
			return unix.EINTR
		}
		return 0
	}}
	s := fakeNode(t, k, "127.0.0.1:0")
	msgs, want := numbered(3)
	if n, err := s.Send(msgs); n != 3 || err != nil || text(k.datagrams()) != want {
		t.Errorf("took %d, %v, sent %s", n, err, text(k.datagrams()))
	}
	left = 1 << 30
	if n, err := s.Send(msgs); n != 0 || err != nil {
		t.Errorf("took %d, %v", n, err)
	}
}

func TestSendDead(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EBADF, unix.ENOTSOCK} {
		k := &fakeKernel{refuse: func(o outgoing) unix.Errno {
			if string(o.data) == "2" {
				return errno
			}
			return 0
		}}
		s := fakeNode(t, k, "127.0.0.1:0")
		msgs, _ := numbered(4)
		if n, err := s.Send(msgs); n != 2 || !errors.Is(err, errno) {
			t.Errorf("took %d, %v; want 2, %v", n, err, errno)
		}
	}
}

// F69: without the calls for several messages everything goes by single ones.
func TestNoBatchCalls(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSYS, unix.EOPNOTSUPP} {
		k := &fakeKernel{noMMsg: errno}
		s := fakeNode(t, k, "127.0.0.1:0")
		msgs, want := numbered(40)
		data := pattern(1050)
		msgs = append(msgs, tx(local, peer, data, 100))
		if n, err := s.Send(msgs); n != len(msgs) || err != nil {
			t.Fatalf("took %d, %v", n, err)
		}
		if got := text(k.datagrams()[:40]); got != want {
			t.Errorf("sent %s", got)
		}
		if len(k.wire) != 41 || !bytes.Equal(k.wire[40].data, data) || k.wire[40].segSize != 100 {
			t.Error("the train did not go out as one")
		}
		k.incoming = []incoming{{msgs: []delivery{{data: []byte("a"), src: rawV4(peer)}, {data: []byte("b"), src: rawV4(peer)}}}, {errno: unix.EAGAIN}}
		rx := make([]link.Rx, 8)
		if n, err := s.Recv(rx); n != 2 || err != nil || string(rx[1].Buf) != "b" || rx[1].Src != peer {
			t.Errorf("received %d, %v: %+v", n, err, rx[:n])
		}
		if st := s.Stats(); st.Batch.On || !strings.Contains(st.Batch.Reason, errno.Error()) || !st.GSO.On {
			t.Errorf("batch %v, GSO %v", st.Batch, st.GSO)
		}
		if w := s.Warnings(); len(w) != 1 {
			t.Errorf("warnings %q", w)
		}
	}
}

// F13: a refused train goes out at once one datagram at a time, everything once and in
// order, what stood before and behind it too, and trains are over.
func TestTrainRefused(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EIO, unix.EINVAL} {
		for _, full := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v, buffer full each time: %v", errno, full), func(t *testing.T) {
				tick := 0
				k := &fakeKernel{refuse: func(o outgoing) unix.Errno {
					if o.segSize != 0 {
						return errno
					}
					if tick++; full && tick%2 == 1 {
						return unix.EAGAIN
					}
					return 0
				}}
				s := fakeNode(t, k, "127.0.0.1:0")
				data := pattern(40*100 + 7)
				train := link.Tx{Gather: cut(data, 333), Len: len(data), SegSize: 100, Dst: peer, Src: local}
				msgs := []link.Tx{tx(local, peer, []byte("before"), 0), train, tx(local, peer, []byte("behind"), 0), train}
				var want [][]byte
				want = append(want, []byte("before"))
				want = append(want, cut(data, 100)...)
				want = append(want, []byte("behind"))
				want = append(want, cut(data, 100)...)

				for rounds := 0; len(msgs) > 0; rounds++ {
					n, err := s.Send(msgs)
					if err != nil || rounds > 200 || !full && n != len(msgs) {
						t.Fatalf("took %d of %d, %v", n, len(msgs), err)
					}
					msgs = msgs[n:]
				}
				got := k.datagrams()
				if !slices.EqualFunc(got, want, bytes.Equal) {
					t.Errorf("%d datagrams on the wire, want %d, or they differ", len(got), len(want))
				}
				for _, o := range k.wire {
					if o.segSize != 0 {
						t.Error("a lone datagram carries a segment size")
					}
				}
				st := s.Stats()
				if st.GSO.On || !strings.Contains(st.GSO.Reason, errno.Error()) || s.Caps().MaxSegs != 1 {
					t.Errorf("GSO %v, caps %+v", st.GSO, s.Caps())
				}
				if st.TxErrors.Total() != 0 || st.TxSplit != 2 || st.TxDatagrams != uint64(len(want)) {
					t.Errorf("stats %+v", st)
				}
				if w := s.Warnings(); len(w) != 1 {
					t.Errorf("warnings %q", w)
				}
			})
		}
	}
}

// When the first datagram alone fares no better, trains are not to blame.
func TestTrainNotToBlame(t *testing.T) {
	k := &fakeKernel{refuse: func(o outgoing) unix.Errno {
		if o.dst == peer {
			return unix.EINVAL // as for a source address that is no longer ours
		}
		return 0
	}}
	s := fakeNode(t, k, "127.0.0.1:0")
	other := netip.MustParseAddrPort("127.0.0.3:4791")
	data := pattern(1050)
	n, err := s.Send([]link.Tx{tx(local, peer, data, 100), tx(local, other, data, 100)})
	if n != 2 || err != nil {
		t.Fatalf("took %d, %v", n, err)
	}
	if len(k.wire) != 1 || k.wire[0].dst != other || k.wire[0].segSize != 100 || !bytes.Equal(k.wire[0].data, data) {
		t.Errorf("on the wire: %+v", k.wire)
	}
	if st := s.Stats(); !st.GSO.On || st.TxErrors != (SendErrors{Invalid: 11}) || st.TxDatagrams != 11 {
		t.Errorf("stats %+v", st)
	}
}

// A train stopped in its middle is resumed only by the same message: another one that
// takes its place is sent whole.
func TestUnfinishedTrainReplaced(t *testing.T) {
	budget := 3
	k := &fakeKernel{}
	k.refuse = func(outgoing) unix.Errno {
		if budget == 0 {
			return unix.EAGAIN
		}
		budget--
		return 0
	}
	s := fakeNode(t, k, "127.0.0.1:0", noGSO)
	a, b := pattern(1000), append([]byte{0xff}, pattern(999)...)
	if n, err := s.Send([]link.Tx{tx(local, peer, a, 100)}); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	budget = 100
	if n, err := s.Send([]link.Tx{tx(local, peer, b, 100), tx(local, peer, a, 100)}); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	want := slices.Concat(cut(a, 100)[:3], cut(b, 100), cut(a, 100))
	if !slices.EqualFunc(k.datagrams(), want, bytes.Equal) {
		t.Error("the wrong datagrams went out")
	}

	// Resumed once, it is finished: the same bytes again are a retransmission.
	k.wire, budget = nil, 3
	if n, err := s.Send([]link.Tx{tx(local, peer, a, 100)}); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	budget = 100
	for range 2 {
		if n, err := s.Send([]link.Tx{tx(local, peer, a, 100)}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if want := slices.Concat(cut(a, 100), cut(a, 100)); !slices.EqualFunc(k.datagrams(), want, bytes.Equal) {
		t.Errorf("a retransmission was cut short: %d datagrams, want %d", len(k.datagrams()), len(want))
	}
}

// Messages in more pieces than a system call takes are copied together, each for itself.
func TestManyPieces(t *testing.T) {
	k := &fakeKernel{}
	s := fakeNode(t, k, "127.0.0.1:0")
	a := pattern(3000)
	b := slices.Clone(a)
	slices.Reverse(b)
	var msgs []link.Tx
	for _, data := range [][]byte{a, b, a} {
		msgs = append(msgs, link.Tx{Gather: cut(data, 1), Len: len(data), SegSize: 100, Dst: peer, Src: local})
	}
	long := make([]byte, slotBytes+1)
	msgs = append(msgs, link.Tx{Gather: cut(long, 10), Len: len(long), SegSize: 1000, Dst: peer, Src: local})
	// As many as fit, many times: the batch runs out of pieces before it runs out of messages.
	c := pattern(maxPieces)
	for range 5 {
		msgs = append(msgs, link.Tx{Gather: cut(c, 1), Len: len(c), Dst: peer, Src: local})
	}
	if n, err := s.Send(msgs); n != len(msgs) || err != nil {
		t.Fatal(n, err)
	}
	var got [][]byte
	for _, o := range k.wire {
		got = append(got, o.data)
	}
	if want := [][]byte{a, b, a, c, c, c, c, c}; !slices.EqualFunc(got, want, bytes.Equal) {
		t.Error("the wrong bytes went out")
	}
	if e := s.Stats().TxErrors; e.TooLong != 66 || e.Total() != 66 {
		t.Errorf("counted %+v, want 66 too long", e)
	}
}

// However the kernel fails, each datagram leaves at most once, in order, with its own
// bytes; what is missing is counted.
func TestSendProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		k := &fakeKernel{limit: rapid.IntRange(0, 5).Draw(rt, "limit")}
		gsoBroken := rapid.Bool().Draw(rt, "gso broken")
		errnos := []unix.Errno{0, 0, 0, 0, unix.EAGAIN, unix.EMSGSIZE, unix.EPERM, unix.EINTR, unix.EINVAL}
		k.refuse = func(o outgoing) unix.Errno {
			if o.segSize != 0 && gsoBroken {
				return unix.EIO
			}
			return rapid.SampledFrom(errnos).Draw(rt, "errno")
		}
		s := fakeNode(t, k, "127.0.0.1:0")
		defer s.Close()
		var msgs []link.Tx
		var want [][]byte
		serial := uint16(0)
		for range rapid.IntRange(1, 6).Draw(rt, "messages") {
			seg := rapid.IntRange(2, 40).Draw(rt, "seg")
			n := rapid.IntRange(2, 200).Draw(rt, "bytes")
			data := pattern(n)
			for i := 0; i+2 <= n; i += seg { // every datagram is known by its serial number
				serial++
				data[i], data[i+1] = byte(serial>>8), byte(serial)
			}
			if rapid.Bool().Draw(rt, "lone") {
				seg = 0
			}
			p := rapid.IntRange(1, 50).Draw(rt, "piece")
			msgs = append(msgs, link.Tx{Gather: cut(data, p), Len: n, SegSize: seg, Dst: peer, Src: local})
			if seg == 0 {
				want = append(want, data)
			} else {
				want = append(want, cut(data, seg)...)
			}
		}
		for range 10_000 {
			n, err := s.Send(msgs)
			if err != nil {
				rt.Fatal(err)
			}
			if msgs = msgs[n:]; len(msgs) == 0 {
				break
			}
		}
		if len(msgs) != 0 {
			rt.Fatal("not taken")
		}
		got := k.datagrams()
		i := 0
		for _, w := range want {
			if i < len(got) && bytes.Equal(got[i], w) {
				i++
			}
		}
		if i != len(got) {
			rt.Fatalf("datagram %d of %d is doubled, out of order or mangled", i, len(got))
		}
		st := s.Stats()
		if st.TxDatagrams != uint64(len(got)) || st.TxDatagrams+st.TxErrors.Total() != uint64(len(want)) {
			rt.Fatalf("%d datagrams, %d on the wire; %+v", len(want), len(got), st)
		}
	})
}

func TestSendControl(t *testing.T) {
	six := netip.MustParseAddrPort("[2001:db8::2]:4791")
	sixLocal := netip.MustParseAddr("2001:db8::1")
	mapped := netip.AddrPortFrom(netip.AddrFrom16(peer.Addr().As16()), peer.Port())
	for _, tc := range []struct {
		name, bind string
		m          link.Tx
		want       outgoing
	}{
		{"one address", "127.0.0.1:0", link.Tx{Dst: peer, Src: local}, outgoing{dst: peer}},
		{"mapped destination", "127.0.0.1:0", link.Tx{Dst: mapped, Src: local}, outgoing{dst: peer}},
		{"class", "127.0.0.1:0", link.Tx{Dst: peer, Src: local, TrafficClass: 0x68}, outgoing{dst: peer, class: 0x68}},
		{"train of one", "127.0.0.1:0", link.Tx{Dst: peer, Src: local, SegSize: 4}, outgoing{dst: peer}},
		{"train", "127.0.0.1:0", link.Tx{Dst: peer, Src: local, SegSize: 3}, outgoing{dst: peer, segSize: 3}},
		{"all IPv4", "0.0.0.0:0", link.Tx{Dst: peer, Src: local}, outgoing{dst: peer, src: local}},
		{"all IPv4, everything", "0.0.0.0:0", link.Tx{Dst: peer, Src: local, SegSize: 2, TrafficClass: 1}, outgoing{dst: peer, src: local, segSize: 2, class: 1}},
		{"all, IPv4", "[::]:0", link.Tx{Dst: peer, Src: local, SegSize: 2, TrafficClass: 1}, outgoing{dst: mapped, src: local, segSize: 2, class: 1}},
		{"all, IPv6", "[::]:0", link.Tx{Dst: six, Src: sixLocal, SegSize: 2, TrafficClass: 0xff}, outgoing{dst: six, src: sixLocal, segSize: 2, class: 0xff}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			k := &fakeKernel{}
			s := fakeNode(t, k, tc.bind)
			tc.m.Gather, tc.m.Len = [][]byte{nil, []byte("da"), {}, []byte("ta")}, 4
			tc.want.data = []byte("data")
			if n, err := s.Send([]link.Tx{tc.m}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			if len(k.wire) != 1 || fmt.Sprint(k.wire[0]) != fmt.Sprint(tc.want) {
				t.Errorf("got %+v, want %+v", k.wire, tc.want)
			}
		})
	}
}

func rawV4(a netip.AddrPort) (r unix.RawSockaddrInet6) {
	v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&r))
	v4.Family, v4.Addr = unix.AF_INET, a.Addr().As4()
	setPort(&v4.Port, a.Port())
	return r
}

func rawV6(a netip.AddrPort, scope uint32) (r unix.RawSockaddrInet6) {
	r.Family, r.Addr, r.Scope_id = unix.AF_INET6, a.Addr().As16(), scope
	setPort(&r.Port, a.Port())
	return r
}

// cmsg makes a control message of the given data.
func cmsg[T any](level, typ int, v T) []byte {
	size := int(unsafe.Sizeof(v))
	b := make([]byte, unix.CmsgSpace(size))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = int32(level), int32(typ)
	h.SetLen(unix.CmsgLen(size))
	*(*T)(unsafe.Pointer(&b[unix.CmsgLen(0)])) = v
	return b
}

func gro(n int32) []byte   { return cmsg(unix.SOL_UDP, unix.UDP_GRO, n) }
func ovfl(n uint32) []byte { return cmsg(unix.SOL_SOCKET, unix.SO_RXQ_OVFL, n) }

func TestRecvControl(t *testing.T) {
	info4 := cmsg(unix.IPPROTO_IP, unix.IP_PKTINFO, unix.Inet4Pktinfo{Addr: [4]byte{127, 0, 0, 5}, Spec_dst: [4]byte{127, 0, 0, 1}})
	info6 := func(a string, ifindex uint32) []byte {
		return cmsg(unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.Inet6Pktinfo{Addr: netip.MustParseAddr(a).As16(), Ifindex: ifindex})
	}
	mapped := netip.MustParseAddrPort("[::ffff:127.0.0.2]:4791")
	fe80 := netip.MustParseAddrPort("[fe80::2]:4791")
	six := netip.MustParseAddrPort("[2001:db8::2]:4791")
	lo := netip.MustParseAddr("127.0.0.1")
	for _, tc := range []struct {
		name, bind string
		d          delivery
		want       link.Rx
	}{
		{"lone", "127.0.0.1:0", delivery{src: rawV4(peer)}, link.Rx{Src: peer, Dst: lo}},
		{"train", "127.0.0.1:0", delivery{src: rawV4(peer), control: gro(3)}, link.Rx{Src: peer, Dst: lo, SegSize: 3}},
		{"train of one", "127.0.0.1:0", delivery{src: rawV4(peer), control: gro(10)}, link.Rx{Src: peer, Dst: lo}},
		{"nonsense size", "127.0.0.1:0", delivery{src: rawV4(peer), control: gro(-3)}, link.Rx{Src: peer, Dst: lo}},
		{"cut", "127.0.0.1:0", delivery{src: rawV4(peer), flags: unix.MSG_TRUNC}, link.Rx{Src: peer, Dst: lo, Truncated: true}},
		{"control cut", "127.0.0.1:0", delivery{src: rawV4(peer), flags: unix.MSG_CTRUNC}, link.Rx{Src: peer, Dst: lo, Truncated: true}},
		{"all IPv4", "0.0.0.0:0", delivery{src: rawV4(peer), control: slices.Concat(ovfl(0), info4, gro(4))}, link.Rx{Src: peer, Dst: netip.MustParseAddr("127.0.0.5"), SegSize: 4}},
		{"all IPv4, destination not told", "0.0.0.0:0", delivery{src: rawV4(peer)}, link.Rx{Src: peer, Dst: netip.IPv4Unspecified(), Truncated: true}},
		{"all, mapped", "[::]:0", delivery{src: rawV6(mapped, 0), control: info6("::ffff:127.0.0.5", 1)}, link.Rx{Src: peer, Dst: netip.MustParseAddr("127.0.0.5")}},
		{"all, IPv6", "[::]:0", delivery{src: rawV6(six, 0), control: info6("2001:db8::1", 1)}, link.Rx{Src: six, Dst: netip.MustParseAddr("2001:db8::1")}},
		{"zones", "[::]:0", delivery{src: rawV6(fe80, 1), control: info6("fe80::1", 1)}, link.Rx{Src: netip.MustParseAddrPort("[fe80::2%lo]:4791"), Dst: netip.MustParseAddr("fe80::1%lo")}},
		{"zone without a name", "[::]:0", delivery{src: rawV6(fe80, 99999), control: info6("fe80::1", 99999)}, link.Rx{Src: netip.MustParseAddrPort("[fe80::2%99999]:4791"), Dst: netip.MustParseAddr("fe80::1%99999")}},
		{"unknown family", "127.0.0.1:0", delivery{}, link.Rx{Dst: lo}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.d.data, tc.want.Buf = []byte("0123456789"), []byte("0123456789")
			k := &fakeKernel{incoming: []incoming{{msgs: []delivery{tc.d}}}}
			s := fakeNode(t, k, tc.bind)
			rx := make([]link.Rx, 4)
			n, err := s.Recv(rx)
			if n != 1 || err != nil {
				t.Fatal(n, err)
			}
			if fmt.Sprint(rx[0]) != fmt.Sprint(tc.want) {
				t.Errorf("got  %+v\nwant %+v", rx[0], tc.want)
			}
		})
	}
}

// Control messages whose lengths lie are not followed.
func TestRecvControlLies(t *testing.T) {
	s := &Socket{}
	for _, size := range []int{0, 1, unix.SizeofCmsghdr - 1, unix.CmsgLen(4) + 1000, -1} {
		b := slices.Concat(gro(7), gro(8))
		(*unix.Cmsghdr)(unsafe.Pointer(&b[unix.CmsgSpace(4)])).SetLen(size)
		var buf controlBuf
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&buf)), controlBytes), b)
		if c := s.readControl(&buf, len(b)); c.segSize != 7 {
			t.Errorf("length %d: segment size %d, want that of the message before", size, c.segSize)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		var buf controlBuf
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&buf)), controlBytes), rapid.SliceOfN(rapid.Byte(), controlBytes, controlBytes).Draw(rt, "bytes"))
		s.readControl(&buf, rapid.IntRange(0, 2*controlBytes).Draw(rt, "n"))
	})
}

// The kernel's drop count is cumulative, 32 bits wide, and told now and then.
func TestRecvDropped(t *testing.T) {
	k := &fakeKernel{}
	s := fakeNode(t, k, "127.0.0.1:0")
	s.rx.dropped = 1<<32 - 5
	rx := make([]link.Rx, 4)
	for _, c := range [][]byte{ovfl(1<<32 - 2), nil, ovfl(1<<32 - 2), ovfl(4)} {
		k.incoming = []incoming{{msgs: []delivery{{src: rawV4(peer), control: c}}}}
		if n, err := s.Recv(rx); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if d := s.Stats().RxDropped; d != 9 {
		t.Errorf("dropped %d, want 9", d)
	}
}

// Faults that pass are hidden and counted, and what has arrived comes out behind them.
func TestRecvTransient(t *testing.T) {
	in := []incoming{{errno: unix.EINTR}, {errno: unix.ECONNREFUSED}, {errno: unix.ENOMEM}, {errno: unix.EINTR},
		{msgs: []delivery{{data: []byte("x"), src: rawV4(peer)}}}}
	for _, mode := range []func(*Config){func(*Config) {}, noBatch} {
		k := &fakeKernel{incoming: slices.Clone(in)}
		s := fakeNode(t, k, "127.0.0.1:0", mode)
		rx := make([]link.Rx, 4)
		if n, err := s.Recv(rx); n != 1 || err != nil || string(rx[0].Buf) != "x" {
			t.Errorf("got %d, %v", n, err)
		}
		if e := s.Stats().RxErrors; e != 2 {
			t.Errorf("counted %d", e)
		}
		if n, err := s.Recv(rx); n != 0 || err != nil {
			t.Errorf("nothing more: %d, %v", n, err)
		}
	}
}

func TestRecvDead(t *testing.T) {
	k := &fakeKernel{incoming: []incoming{{errno: unix.EBADF}}}
	s := fakeNode(t, k, "127.0.0.1:0")
	rx := make([]link.Rx, 4)
	if n, err := s.Recv(rx); n != 0 || !errors.Is(err, unix.EBADF) {
		t.Errorf("got %d, %v", n, err)
	}
	// A fault that never passes is death too, or the thread would spin on it.
	k.incoming = slices.Repeat([]incoming{{errno: unix.EIO}}, 2*maxFailures)
	for calls := 0; ; calls++ {
		if calls > maxFailures {
			t.Fatal("never dies")
		}
		if _, err := s.Recv(rx); err != nil {
			if !errors.Is(err, unix.EIO) {
				t.Error(err)
			}
			break
		}
	}
}

// Slots are used again, and the caller's slice bounds a call.
func TestRecvBounds(t *testing.T) {
	var ds []delivery
	for i := range 100 {
		ds = append(ds, delivery{data: fmt.Append(nil, i), src: rawV4(peer)})
	}
	k := &fakeKernel{incoming: []incoming{{msgs: ds}}}
	s := fakeNode(t, k, "127.0.0.1:0")
	next := 0
	for _, room := range []int{0, 1, 5, 32, 64, 64} {
		rx := make([]link.Rx, room)
		n, err := s.Recv(rx)
		if err != nil || n != min(room, batch, 100-next) {
			t.Fatalf("room %d: got %d, %v", room, n, err)
		}
		for _, m := range rx[:n] {
			if string(m.Buf) != fmt.Sprint(next) {
				t.Fatalf("got %q, want %d", m.Buf, next)
			}
			next++
		}
	}
}

// What the kernel lacks is found out when opening: an ability less, a warning, or an error.
func TestOpenOptions(t *testing.T) {
	type opt struct{ level, name int }
	for _, tc := range []struct {
		name string
		fail opt
		bind string
		err  bool
		look func(*testing.T, *Socket)
	}{
		{"no GRO", opt{unix.SOL_UDP, unix.UDP_GRO}, "127.0.0.1:0", false, func(t *testing.T, s *Socket) {
			if s.Stats().GRO.On || s.Stats().GRO.Reason == "" {
				t.Error(s.Stats().GRO)
			}
		}},
		{"no GSO", opt{unix.SOL_UDP, unix.UDP_SEGMENT}, "127.0.0.1:0", false, func(t *testing.T, s *Socket) {
			if s.Stats().GSO.On || s.Caps().MaxSegs != 1 {
				t.Error(s.Stats().GSO, s.Caps())
			}
		}},
		{"no drop count", opt{unix.SOL_SOCKET, unix.SO_RXQ_OVFL}, "127.0.0.1:0", false, func(t *testing.T, s *Socket) {
			if w := s.Warnings(); len(w) != 1 || !strings.Contains(w[0], "SO_RXQ_OVFL") {
				t.Error(w)
			}
		}},
		{"fragments", opt{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER}, "127.0.0.1:0", true, nil},
		{"fragments, dual", opt{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER}, "[::]:0", true, nil},
		{"fragments, IPv6", opt{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER}, "[::1]:0", true, nil},
		{"deaf to rxe", opt{unix.SOL_UDP, unix.UDP_NO_CHECK6_RX}, "[::1]:0", true, nil},
		{"no packet information", opt{unix.IPPROTO_IP, unix.IP_PKTINFO}, "0.0.0.0:0", true, nil},
		{"no packet information, dual", opt{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO}, "[::]:0", true, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			sys := kernel
			sys.setsockopt = func(fd, level, name, value int) error {
				if (opt{level, name}) == tc.fail {
					return unix.ENOPROTOOPT
				}
				if level == unix.SOL_UDP && name == unix.UDP_SEGMENT {
					t.Error("UDP_SEGMENT is set for good")
				}
				return unix.SetsockoptInt(fd, level, name, value)
			}
			sys.getsockopt = func(fd, level, name int) (int, error) {
				if (opt{level, name}) == tc.fail {
					return 0, unix.ENOPROTOOPT
				}
				return unix.GetsockoptInt(fd, level, name)
			}
			s, err := openWith(Config{Bind: netip.MustParseAddrPort(tc.bind), RecvBuffer: -1, SendBuffer: -1}, sys)
			if err != nil {
				if !tc.err || !errors.Is(err, unix.ENOPROTOOPT) {
					t.Error(err)
				}
				return
			}
			defer s.Close()
			if tc.err {
				t.Fatal("opened")
			}
			tc.look(t, s)
		})
	}
}

// F74: without privilege the system's limit cuts the buffer, and that is told.
func TestOpenCutBuffer(t *testing.T) {
	sys := kernel
	sys.setsockopt = func(fd, level, name, value int) error {
		if level == unix.SOL_SOCKET {
			switch name {
			case unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE:
				return unix.EPERM
			case unix.SO_RCVBUF, unix.SO_SNDBUF:
				value = min(value, 106496)
			}
		}
		return unix.SetsockoptInt(fd, level, name, value)
	}
	s, err := openWith(Config{Bind: netip.MustParseAddrPort("127.0.0.1:0")}, sys)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := s.Warnings()
	if len(w) != 2 || !strings.Contains(w[0], "106496 bytes instead of 4194304") || !strings.Contains(w[0], "net.core.rmem_max=4194304") ||
		!strings.Contains(w[1], "net.core.wmem_max=4194304") {
		t.Errorf("warnings %q", w)
	}
	if c := s.Caps(); c.RecvBuffer != 212992 {
		t.Errorf("effective receive buffer %d, want the kernel's 212992", c.RecvBuffer)
	}
}

func TestMaxSegsProbe(t *testing.T) {
	n := probeMaxSegs()
	if n != oldMaxSegs && n != newMaxSegs {
		t.Errorf("probe says %d", n)
	}
	t.Logf("trains of up to %d datagrams", n)
}
