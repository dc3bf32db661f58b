package netsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Where things are. Each side registers memory for its peer: a counter that all queue pairs
// add to, and for each queue pair a share that only it touches, so that the order of its
// operations decides what is in it:
//
//	static   only read
//	live     read, written, and acted on by atomics
//	slots    a ring of places for WRITEs with immediate
//	window   written through memory windows
//
// Between and around them lies memory that nobody may touch.
const (
	mixGuard   = 256
	mixSlot    = 4096 // the longest message
	mixStatic  = 24 << 10
	mixLive    = 8 << 10
	mixSlots   = 8
	mixWindow  = 2048
	mixWindows = 2
	mixRecvs   = 12

	liveAt   = mixGuard + mixStatic + mixGuard
	slotsAt  = liveAt + mixLive + mixGuard
	windowAt = slotsAt + mixSlots*mixSlot + mixGuard
	mixShare = windowAt + mixWindow + mixGuard
	untouch  = 0xA5
)

// mixOpcodes are all that a mix does.
var mixOpcodes = []verbs.Opcode{
	verbs.Send, verbs.SendWithImm, verbs.SendWithInv, verbs.RDMAWrite, verbs.RDMAWriteWithImm, verbs.RDMARead,
	verbs.AtomicCmpAndSwp, verbs.AtomicFetchAdd, verbs.BindMW, verbs.LocalInv,
}

// mixSide is one device.
type mixSide struct {
	m     *mix
	node  *Node
	peer  *mixSide
	lanes []*qp.CQ // one, or send and receive
	srq   *qp.SRQ
	ends  []*mixEnd
	byNum map[verbs.QPN]*mixEnd

	// What the peer reaches: remote is the region in the middle of around; shadow is what
	// around must be.
	around, shadow []byte
	remote         *mr.Region
	adds           int             // FETCH_ADDs of the counter by the peer
	brought        map[uint64]bool // what they have brought

	// Receives of the SRQ: which are posted, and those that are to be posted later.
	recvMem  []byte
	recvMRs  [2]*mr.Region
	srqRecvs map[int]bool
	late     []lateRecv
	dry      bool
}

type lateRecv struct {
	e  *mixEnd // nil for the SRQ
	id int
}

// mixEnd is one end of a connection.
type mixEnd struct {
	s      *mixSide
	i      int
	q      *wire.QP
	conn   *wire.Conn
	peer   *mixEnd
	closed bool

	// Its own memory: a slot for each outstanding request, and one for a long READ.
	mem  []byte
	mrs  [2]*mr.Region
	free []int
	long bool // the long slot is taken

	posted   []*mixOp // send requests to complete, in order
	messages []*mixOp // what is to be received here, in order
	recvs    []int    // receives that are posted here, in order
	nextID   uint64
	reading  int // READs of live memory that are not complete
	unsignal int // those of posted that ask for no completion

	immFree []int // slots of the peer's share
	// Memory windows: those of ours that are free, and those that are bound, by key. The
	// peer has learned of keys, and will invalidate them; we do that with those in own.
	windows []*mr.Window
	bound   map[uint32]*mr.Window
	keys    []uint32 // of the peer's windows
	own     []uint32
}

// mixOp is a request and what the model says of it.
type mixOp struct {
	wr      verbs.SendWR
	id      uint64
	slot    int // of mem; -1 for none, mixLong for the long one
	imm     int // slot of the peer's share
	at, n   int // range in the peer's around that it reads or writes
	dst     int // offset in mem where an answer goes
	want    []byte
	counter bool
	live    bool
}

const mixLong = 1 << 20

func (o *mixOp) writes() bool {
	switch o.wr.Opcode {
	case verbs.RDMAWrite, verbs.RDMAWriteWithImm, verbs.AtomicCmpAndSwp, verbs.AtomicFetchAdd:
		return true
	}
	return false
}

func (m *mix) newSide(nd *Node, i int) *mixSide {
	s := &mixSide{m: m, node: nd, lanes: m.lanesFor(), byNum: map[verbs.QPN]*mixEnd{}, srqRecvs: map[int]bool{}, brought: map[uint64]bool{}}
	s.around = make([]byte, 2*mixGuard+8+m.qps*mixShare)
	for k := range s.around {
		s.around[k] = byte(m.r.Uint32())
	}
	// Aligned in memory, as atomics need: the region begins at a multiple of 8 of a fresh allocation.
	s.remote = nd.Register(s.around[mixGuard:len(s.around)-mixGuard],
		verbs.LocalWrite|verbs.RemoteWrite|verbs.RemoteRead|verbs.RemoteAtomic|verbs.MWBind)
	binary.NativeEndian.PutUint64(s.around[mixGuard:], 0)
	s.shadow = bytes.Clone(s.around)
	if !m.srq {
		return s
	}
	srq, err := qp.NewSRQ(PD, mixRecvs, 4)
	if err != nil {
		m.fatalf("%v", err)
	}
	s.srq = srq
	s.recvMem = bytes.Repeat([]byte{untouch}, mixRecvs*mixSlot)
	s.recvMRs = s.twice(s.recvMem)
	for id := range mixRecvs {
		s.supply(lateRecv{nil, id})
	}
	return s
}

// twice registers the same memory under two keys.
func (s *mixSide) twice(b []byte) (r [2]*mr.Region) {
	for i := range r {
		r[i] = s.node.Register(b, verbs.LocalWrite)
	}
	return r
}

// share is where an end's share of a side's memory begins, as an offset in around.
func share(i int) int { return mixGuard + 8 + i*mixShare }

func (s *mixSide) newEnd(i int) *mixEnd {
	m := s.m
	e := &mixEnd{s: s, i: i, nextID: 1, bound: map[uint32]*mr.Window{}}
	sends, recvs := s.lanes[0], s.lanes[len(s.lanes)-1]
	q, err := s.node.Wire.CreateQP(qp.Config{
		Type: verbs.RC, PD: PD, SendCQ: sends, RecvCQ: recvs, SRQ: s.srq, SQSigAll: m.sigAll,
		Cap: verbs.QPCap{MaxSendWR: m.depth, MaxRecvWR: mixRecvs, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInlineData: 128},
	})
	if err != nil {
		m.fatalf("%v", err)
	}
	a := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
		State: verbs.QPInit, Port: 1, AccessFlags: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic,
	}
	if err := s.node.Wire.Modify(m.net.Now(), q, &a); err != nil {
		m.fatalf("%v", err)
	}
	e.q = q
	s.ends = append(s.ends, e)
	s.byNum[q.Num()] = e
	recvBytes := 0
	if s.srq == nil {
		recvBytes = mixRecvs * mixSlot
	}
	e.mem = bytes.Repeat([]byte{untouch}, recvBytes+m.depth*mixSlot+mixStatic)
	e.mrs = s.twice(e.mem)
	for k := range m.depth {
		e.free = append(e.free, k)
	}
	for k := range mixSlots {
		e.immFree = append(e.immFree, k)
	}
	for range mixWindows {
		w, err := s.node.MRs.AllocWindow(PD)
		if err != nil {
			m.fatalf("%v", err)
		}
		e.windows = append(e.windows, w)
	}
	if s.srq == nil {
		for id := range mixRecvs {
			s.supply(lateRecv{e, id})
		}
	}
	return e
}

// slotAt is where a slot of mem begins.
func (e *mixEnd) slotAt(slot int) int {
	at := 0
	if e.s.srq == nil {
		at = mixRecvs * mixSlot
	}
	if slot == mixLong {
		return at + e.s.m.depth*mixSlot
	}
	return at + slot*mixSlot
}

// recvBuffer is the memory of a receive.
func (s *mixSide) recvBuffer(e *mixEnd, id int) []byte {
	if s.srq != nil {
		return s.recvMem[id*mixSlot:][:mixSlot]
	}
	return e.mem[id*mixSlot:][:mixSlot]
}

// supply posts a receive.
func (s *mixSide) supply(l lateRecv) {
	regions := s.recvMRs
	if l.e != nil {
		regions = l.e.mrs
	}
	wr := verbs.RecvWR{WRID: uint64(l.id), SGList: s.m.pieces(regions, l.id*mixSlot, mixSlot, 4)}
	var err error
	if s.srq != nil {
		_, err = s.srq.Post([]verbs.RecvWR{wr})
		s.srqRecvs[l.id] = true
	} else {
		_, err = s.node.Recv(l.e.q, wr)
		l.e.recvs = append(l.e.recvs, l.id)
	}
	if err != nil {
		s.m.fatalf("receive: %v", err)
	}
}

func (s *mixSide) supplyLate() {
	for _, l := range s.late {
		s.supply(l)
	}
	s.late = s.late[:0]
}

// completions takes in what has become visible in a lane.
func (s *mixSide) completions(l *qp.CQ) {
	var wc [16]verbs.WC
	for n := l.Poll(wc[:]); n > 0; n = l.Poll(wc[:]) {
		for i := range wc[:n] {
			c := &wc[i]
			e := s.byNum[c.QPN]
			if e == nil || c.Status != verbs.WCSuccess {
				s.m.fatalf("completion %+v: %v", c, c.Status)
			}
			if c.Opcode.IsRecv() {
				e.received(c)
			} else {
				e.sent(c)
			}
		}
	}
}

var mixCompletions = map[verbs.Opcode]verbs.WCOpcode{
	verbs.Send: verbs.WCSend, verbs.SendWithImm: verbs.WCSend, verbs.SendWithInv: verbs.WCSend,
	verbs.RDMAWrite: verbs.WCRDMAWrite, verbs.RDMAWriteWithImm: verbs.WCRDMAWrite, verbs.RDMARead: verbs.WCRDMARead,
	verbs.AtomicCmpAndSwp: verbs.WCCompSwap, verbs.AtomicFetchAdd: verbs.WCFetchAdd,
	verbs.BindMW: verbs.WCBindMW, verbs.LocalInv: verbs.WCLocalInv,
}

// sent takes in the completion of a send request; those before it that asked for none are
// complete, too.
func (e *mixEnd) sent(c *verbs.WC) {
	m := e.s.m
	for len(e.posted) > 0 {
		o := e.posted[0]
		if o.id != c.WRID && (m.sigAll || o.wr.Flags&verbs.Signaled != 0) {
			m.fatalf("completion of %d, want %d: out of order", c.WRID, o.id)
		}
		e.retire(o)
		if o.id == c.WRID {
			if c.Opcode != mixCompletions[o.wr.Opcode] || o.isRead() && int(c.ByteLen) != o.n {
				m.fatalf("%v completes as %+v", o.wr.Opcode, c)
			}
			return
		}
	}
	m.fatalf("completion of %d, which is not outstanding", c.WRID)
}

func (o *mixOp) isRead() bool {
	return o.wr.Opcode == verbs.RDMARead || o.wr.Opcode == verbs.AtomicCmpAndSwp || o.wr.Opcode == verbs.AtomicFetchAdd
}

// retire checks what a request that is complete has done.
func (e *mixEnd) retire(o *mixOp) {
	m := e.s.m
	e.posted = e.posted[1:]
	there := e.s.peer
	if !m.sigAll && o.wr.Flags&verbs.Signaled == 0 {
		e.unsignal--
	}
	switch {
	case o.isRead():
		got := e.mem[o.dst:][:o.n]
		if o.counter {
			e.counted(binary.NativeEndian.Uint64(got))
		} else if !bytes.Equal(got, o.want) {
			m.fatalf("%v %d of %d bytes at %d brought other bytes: %s", o.wr.Opcode, o.id, o.n, o.at, difference(got, o.want))
		}
		if end := o.dst + o.n; end%mixSlot != 0 && o.slot != mixLong && e.mem[end] != untouch {
			m.fatalf("%v %d wrote more than its %d bytes", o.wr.Opcode, o.id, o.n)
		}
		if o.live {
			e.reading--
		}
	case o.writes() && !e.overwritten(o):
		// A completion means that the bytes are there.
		if got, want := there.around[o.at:][:o.n], there.shadow[o.at:][:o.n]; !bytes.Equal(got, want) {
			m.fatalf("%v %d is complete and not in memory: %s", o.wr.Opcode, o.id, difference(got, want))
		}
	case o.wr.Opcode == verbs.BindMW:
		if m.r.IntN(4) == 0 {
			e.own = append(e.own, o.wr.RKey)
		} else {
			e.peer.keys = append(e.peer.keys, o.wr.RKey)
		}
	case o.wr.Opcode == verbs.LocalInv:
		e.unbound(o.wr.InvalidateRKey)
	}
	if o.slot >= 0 {
		e.giveBack(o)
	}
}

// overwritten reports whether a later request may have written where o did.
func (e *mixEnd) overwritten(o *mixOp) bool {
	return slices.ContainsFunc(e.posted, func(p *mixOp) bool {
		return p.writes() && p.at < o.at+o.n && o.at < p.at+p.n
	})
}

// counted takes in what a FETCH_ADD of the peer's counter brought: each number once.
func (e *mixEnd) counted(v uint64) {
	there := e.s.peer
	if v >= uint64(there.adds) || there.brought[v] {
		e.s.m.fatalf("FETCH_ADD brings %d, of %d, a second time: %v", v, there.adds, there.brought[v])
	}
	there.brought[v] = true
}

// unbound takes back a window whose key is gone.
func (e *mixEnd) unbound(key uint32) {
	w := e.bound[key]
	if w == nil {
		e.s.m.fatalf("key %#x was invalidated and not bound", key)
	}
	delete(e.bound, key)
	e.windows = append(e.windows, w)
}

func (e *mixEnd) giveBack(o *mixOp) {
	clean(e.mem[o.dst:][:o.n])
	if o.slot == mixLong {
		e.long = false
		return
	}
	e.free = append(e.free, o.slot)
}

var untouched = bytes.Repeat([]byte{untouch}, mixStatic)

func clean(b []byte) { copy(b, untouched) }

// received takes in the completion of a receive: it belongs to the oldest message.
func (e *mixEnd) received(c *verbs.WC) {
	s, m := e.s, e.s.m
	if len(e.messages) == 0 {
		m.fatalf("a message too many: %+v", c)
	}
	o := e.messages[0]
	e.messages = e.messages[1:]
	want := verbs.WC{
		WRID: c.WRID, ByteLen: uint32(len(o.want)), QPN: e.q.Num(), SrcQPN: e.peer.q.Num(), Opcode: verbs.WCRecv,
	}
	if o.wr.Flags&verbs.Solicited != 0 {
		want.Flags |= verbs.WithSolicited
	}
	switch o.wr.Opcode {
	case verbs.RDMAWriteWithImm:
		want.Opcode = verbs.WCRecvRDMAWithImm
		fallthrough
	case verbs.SendWithImm:
		want.Flags |= verbs.WithImm
		want.ImmData = o.wr.ImmData
	case verbs.SendWithInv:
		want.Flags |= verbs.WithInv
		want.InvalidatedRKey = o.wr.InvalidateRKey
		e.unbound(o.wr.InvalidateRKey)
	}
	id := int(c.WRID)
	if s.srq != nil {
		if !s.srqRecvs[id] {
			m.fatalf("receive %d completes twice", id)
		}
		delete(s.srqRecvs, id)
	} else {
		want.WRID = uint64(e.recvs[0])
		e.recvs = e.recvs[1:]
	}
	if *c != want {
		m.fatalf("%v %d is received as %+v, want %+v", o.wr.Opcode, o.id, *c, want)
	}
	buf, n := s.recvBuffer(e, id), len(o.want)
	if o.wr.Opcode == verbs.RDMAWriteWithImm {
		if got := s.around[o.at:][:n]; !bytes.Equal(got, o.want) {
			m.fatalf("%v %d is received and not in memory: %s", o.wr.Opcode, o.id, difference(got, o.want))
		}
		e.peer.immFree = append(e.peer.immFree, o.imm)
		n = 0
	} else if !bytes.Equal(buf[:n], o.want) {
		m.fatalf("%v %d brought other bytes: %s", o.wr.Opcode, o.id, difference(buf[:n], o.want))
	}
	if !bytes.Equal(buf[n:], untouched[:mixSlot-n]) {
		m.fatalf("%v %d of %d bytes wrote beyond: %s", o.wr.Opcode, o.id, n, difference(buf[n:], untouched[:mixSlot-n]))
	}
	clean(buf[:n])
	l := lateRecv{id: id}
	if s.srq == nil {
		l.e = e
	}
	if s.dry || m.r.IntN(4) == 0 {
		s.late = append(s.late, l)
	} else {
		s.supply(l)
	}
}

func (s *mixSide) compareMemory() {
	binary.NativeEndian.PutUint64(s.shadow[mixGuard:], uint64(s.adds))
	if !bytes.Equal(s.around, s.shadow) {
		s.m.fatalf("the memory of %v differs from the model: %s", s.node.Addr, difference(s.around, s.shadow))
	}
	for _, e := range s.ends {
		if !bytes.Equal(e.mem, bytes.Repeat([]byte{untouch}, len(e.mem))) {
			s.m.fatalf("%v: something was written beside the receives and answers", s.node.Addr)
		}
	}
}

func (s *mixSide) compareCounter() {
	if len(s.brought) != s.adds {
		s.m.fatalf("%d FETCH_ADDs, %d answers", s.adds, len(s.brought))
	}
}

func (s *mixSide) compareReceives() {
	bound := 0
	for _, e := range s.ends {
		bound += len(e.bound)
		late := 0
		for _, l := range s.late {
			if l.e == e {
				late++
			}
		}
		if s.srq == nil && len(e.recvs)+late != mixRecvs {
			s.m.fatalf("%d receives are posted and %d to be, of %d", len(e.recvs), late, mixRecvs)
		}
	}
	if s.srq != nil && (s.srq.Len() != len(s.srqRecvs) || len(s.srqRecvs)+len(s.late) != mixRecvs) {
		s.m.fatalf("the SRQ has %d receives, the model %d, and %d to be posted", s.srq.Len(), len(s.srqRecvs), len(s.late))
	}
	if s.node.MRs.Bound() != bound {
		s.m.fatalf("%d windows are bound, want %d", s.node.MRs.Bound(), bound)
	}
}

func difference(got, want []byte) string {
	for i := range got {
		if got[i] != want[i] {
			return fmt.Sprintf("at byte %d of %d: %x, want %x", i, len(got), got[i:min(i+8, len(got))], want[i:min(i+8, len(got))])
		}
	}
	return "none"
}
