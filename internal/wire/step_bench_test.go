package wire

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// cable is a link whose buffers are allocated once: what one end sends stands in the other's
// queue until it is received. It carries trains, as a socket with segmentation offload does.
type cable struct {
	addr       netip.AddrPort
	peer       *cable
	bufs       [64][65536]byte
	queue      [64]link.Rx
	head, tail int // of queue; tail-head messages wait
}

func (c *cable) Recv(msgs []link.Rx) (n int, err error) {
	for ; n < len(msgs) && c.head < c.tail; n++ {
		msgs[n] = c.queue[c.head%len(c.queue)]
		c.head++
	}
	return n, nil
}

func (c *cable) Send(msgs []link.Tx) (n int, err error) {
	p := c.peer
	// What was received last may still be looked at: half of the buffers are for it.
	for ; n < len(msgs) && p.tail-p.head < len(p.queue)/2; n++ {
		m, at := &msgs[n], p.tail%len(p.queue)
		buf := p.bufs[at][:0]
		for _, g := range m.Gather {
			buf = append(buf, g...)
		}
		p.queue[at] = link.Rx{Buf: buf, SegSize: m.SegSize, Src: netip.AddrPortFrom(m.Src, c.addr.Port()), Dst: m.Dst.Addr()}
		p.tail++
	}
	return n, nil
}

func (c *cable) Caps() link.Caps {
	return link.Caps{MaxSegs: 64, MaxBytes: 65000, RecvTrains: true, ControlsID: true}
}
func (c *cable) LocalAddr() netip.AddrPort { return c.addr }

// BenchmarkStep sends one message of 64 bytes or 64 KiB from wire to wire and waits for its
// acknowledgement: all of the path but the socket, in both directions.
func BenchmarkStep(b *testing.B) {
	for _, n := range []int{64, 65536} {
		b.Run(fmt.Sprint("bytes=", n), func(b *testing.B) { benchStep(b, n) })
	}
}

func benchStep(b *testing.B, n int) {
	type side struct {
		w    *Wire
		link *cable
		qp   *QP
		cq   *qp.CQ
		sgl  []verbs.SGE
		got  int // completions of the message under way
	}
	var sides [2]side
	for i := range sides {
		s := &sides[i]
		rnd := rand.New(rand.NewPCG(uint64(i), 3))
		s.link = &cable{addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 4791)}
		table := mr.New(rnd.Uint64)
		var err error
		if s.w, err = New(Config{Link: s.link, Mem: table, Upcalls: &quiet{}, Rand: rnd.Uint32, GUID: uint64(i + 1)}); err != nil {
			b.Fatal(err)
		}
		region, err := table.Register(1, make([]byte, n), verbs.LocalWrite)
		if err != nil {
			b.Fatal(err)
		}
		s.sgl = []verbs.SGE{{Addr: region.Addr(), Length: uint32(n), LKey: region.Key()}}
		s.cq = qp.NewCQ(64)
		s.qp, err = s.w.CreateQP(qp.Config{Type: verbs.RC, PD: 1, SendCQ: s.cq, RecvCQ: s.cq, Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16}})
		if err != nil {
			b.Fatal(err)
		}
	}
	x, y := &sides[0], &sides[1]
	x.link.peer, y.link.peer = y.link, x.link
	for _, ends := range [][2]*side{{x, y}, {y, x}} {
		s, peer := ends[0], ends[1]
		for _, a := range []verbs.QPAttr{
			{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags, State: verbs.QPInit, Port: 1},
			{
				Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
					verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
				State: verbs.QPRTR, AV: verbs.AV{Remote: peer.link.addr}, PathMTU: verbs.MTU4096, DestQPN: peer.qp.Num(), RQPSN: 100, MinRNRTimer: 1,
			},
			{
				Mask:  verbs.AttrState | verbs.AttrSQPSN | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry | verbs.AttrMaxQPRdAtomic,
				State: verbs.QPRTS, SQPSN: 100, Timeout: 14, RetryCnt: 7, RNRRetry: 7,
			},
		} {
			if err := s.w.Modify(0, s.qp, &a); err != nil {
				b.Fatal(err)
			}
		}
	}
	var now verbs.Instant
	var wcs [4]verbs.WC
	recvs := []verbs.RecvWR{{SGList: y.sgl}}
	sends := []verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: x.sgl}}
	exchange := func() {
		if _, ring, err := y.qp.Engine().PostRecv(recvs); err != nil {
			b.Fatal(err)
		} else if ring {
			y.w.Ring(y.qp)
		}
		if _, ring, err := x.qp.Engine().PostSend(sends); err != nil {
			b.Fatal(err)
		} else if ring {
			x.w.Ring(x.qp)
		}
		x.got, y.got = 0, 0
		for turn := 0; x.got == 0 || y.got == 0; turn++ {
			if turn == 1000 {
				b.Fatal("the message does not arrive")
			}
			now += 1000
			x.w.Step(now)
			y.w.Step(now)
			for i := range sides {
				s := &sides[i]
				k := s.cq.Poll(wcs[:])
				for i := range wcs[:k] {
					if wcs[i].Status != verbs.WCSuccess {
						b.Fatal(wcs[i].Status)
					}
				}
				s.got += k
			}
		}
	}
	for range 100 {
		exchange()
	}
	b.SetBytes(int64(n))
	b.ReportAllocs()
	for b.Loop() {
		exchange()
	}
}
