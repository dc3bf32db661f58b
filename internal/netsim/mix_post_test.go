package netsim

import (
	"bytes"
	"encoding/binary"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// postSome posts up to four requests in one chain. When enough is posted it only asks for a
// completion of what has asked for none.
func (e *mixEnd) postSome() {
	m := e.s.m
	var chain []verbs.SendWR
	var junk []*mixOp
	for k := 1 + m.r.IntN(4); k > 0 && len(e.posted) < m.depth; k-- {
		last := m.posted >= m.ops
		if last && e.unsignal == 0 {
			break
		}
		o := e.next(last)
		if o == nil {
			break
		}
		chain = append(chain, o.wr)
		if o.wr.Flags&verbs.Inline != 0 && o.n > 0 {
			junk = append(junk, o)
		}
	}
	if len(chain) == 0 {
		return
	}
	if n, err := e.s.node.Send(e.q, chain...); err != nil || n != len(chain) {
		m.fatalf("%d of %d posted: %v", n, len(chain), err)
	}
	for _, o := range junk {
		for i := range e.mem[o.dst:][:o.n] {
			e.mem[o.dst+i] ^= 0xFF // it was copied
		}
	}
}

// next makes a request, and does it in the model; nil when there is no place for one.
func (e *mixEnd) next(last bool) *mixOp {
	m := e.s.m
	o := &mixOp{id: e.nextID, slot: -1, imm: -1}
	o.wr.WRID = o.id
	if last {
		o.wr.Opcode = verbs.RDMAWrite // of nothing
	} else if !e.choose(o) {
		return nil
	}
	if last || e.unsignal+1 > m.depth/2 || m.r.IntN(2) == 0 {
		o.wr.Flags |= verbs.Signaled
	} else if !m.sigAll {
		e.unsignal++
	}
	if m.r.IntN(8) == 0 {
		o.wr.Flags |= verbs.Fence
	}
	switch o.wr.Opcode {
	case verbs.Send, verbs.SendWithImm, verbs.SendWithInv, verbs.RDMAWriteWithImm:
		if m.r.IntN(4) == 0 {
			o.wr.Flags |= verbs.Solicited
		}
		e.peer.messages = append(e.peer.messages, o)
	}
	e.posted = append(e.posted, o)
	e.nextID++
	m.posted++
	m.kinds[o.wr.Opcode]++
	return o
}

// size is the length of a message or answer.
func (e *mixEnd) size(most int) int {
	r, mtu := e.s.m.r, e.s.m.mtu.Bytes()
	n := []int{0, 1, 8, r.IntN(65), r.IntN(600), r.IntN(600), mtu, r.IntN(4*mtu + 2), r.IntN(most + 1), most}[r.IntN(10)]
	return min(n, most)
}

// choose picks an operation that is possible and fills o in.
func (e *mixEnd) choose(o *mixOp) bool {
	r := e.s.m.r
	if len(e.free) == 0 {
		return false
	}
	there := share(e.i)
	switch op := mixOpcodes[r.IntN(len(mixOpcodes))]; op {
	case verbs.Send, verbs.SendWithImm:
		e.source(o, op, e.size(mixSlot))
		o.wr.ImmData = r.Uint32()
	case verbs.SendWithInv:
		if len(e.keys) == 0 {
			return e.choose(o)
		}
		e.source(o, op, e.size(mixSlot))
		o.wr.InvalidateRKey = e.keys[0]
		e.keys = e.keys[1:]
	case verbs.RDMAWrite:
		if len(e.keys) > 0 && r.IntN(2) == 0 {
			e.source(o, op, e.size(mixWindow))
			e.target(o, there+windowAt+r.IntN(mixWindow-o.n+1))
			o.wr.RKey = e.keys[r.IntN(len(e.keys))]
		} else {
			e.source(o, op, e.size(mixSlot))
			e.target(o, there+liveAt+r.IntN(mixLive-o.n+1))
		}
		if o.n == 0 && r.IntN(2) == 0 {
			o.wr.RKey, o.wr.RemoteAddr = r.Uint32(), r.Uint64() // not looked at
		}
	case verbs.RDMAWriteWithImm:
		if len(e.immFree) == 0 {
			return e.choose(o)
		}
		o.imm = e.immFree[0]
		e.immFree = e.immFree[1:]
		e.source(o, op, e.size(mixSlot))
		e.target(o, there+slotsAt+o.imm*mixSlot)
		o.wr.ImmData = r.Uint32()
	case verbs.RDMARead:
		e.read(o, there)
	case verbs.AtomicCmpAndSwp, verbs.AtomicFetchAdd:
		e.atomic(o, op, there)
	case verbs.BindMW:
		if len(e.windows) == 0 {
			return e.choose(o)
		}
		w := e.windows[0]
		e.windows = e.windows[1:]
		key := w.Key()&^0xFF | uint32(uint8(w.Key())+1)
		e.bound[key] = w
		o.wr.Opcode, o.wr.RKey, o.wr.BindAccess = op, key, verbs.RemoteWrite
		o.wr.SGList = sgl(e.s.remote, there-mixGuard+windowAt, mixWindow)
	case verbs.LocalInv:
		if len(e.own) == 0 {
			return e.choose(o)
		}
		o.wr.Opcode, o.wr.InvalidateRKey = op, e.own[0]
		e.own = e.own[1:]
	}
	if o.writes() && o.at < there+slotsAt && e.reading > 0 {
		// A READ whose answer is lost reads again: only a fence keeps later writers from
		// changing what it sees.
		o.wr.Flags |= verbs.Fence
	}
	if o.writes() && !o.isRead() {
		copy(e.s.peer.shadow[o.at:], o.want)
	}
	return true
}

// source fills a slot with the bytes to be sent.
func (e *mixEnd) source(o *mixOp, op verbs.Opcode, n int) {
	m := e.s.m
	o.wr.Opcode, o.n = op, n
	o.slot, e.free = e.free[0], e.free[1:]
	o.dst = e.slotAt(o.slot)
	b := e.mem[o.dst:][:n]
	for k := 0; k < n; k += 8 {
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], m.r.Uint64())
		copy(b[k:], w[:])
	}
	o.want = bytes.Clone(b)
	if n <= 128 && m.r.IntN(3) == 0 {
		o.wr.Flags |= verbs.Inline
		if m.r.IntN(2) == 0 {
			o.wr.InlineData = b
			if n > 0 {
				return
			}
			o.wr.InlineData = nil
		}
	}
	o.wr.SGList = m.pieces(e.mrs, o.dst, n, 4)
}

// target says where in the peer's memory it goes.
func (e *mixEnd) target(o *mixOp, at int) {
	r := e.s.peer.remote
	o.at = at
	o.wr.RemoteAddr, o.wr.RKey = r.Addr()+uint64(at-mixGuard), r.Key()
}

func (e *mixEnd) read(o *mixOp, there int) {
	m, r := e.s.m, e.s.m.r
	o.wr.Opcode, o.n = verbs.RDMARead, e.size(mixSlot)
	at := there + mixGuard + r.IntN(mixStatic-o.n+1)
	if !e.long && r.IntN(8) == 0 {
		e.long = true
		o.slot, o.n, at = mixLong, mixStatic-r.IntN(100), there+mixGuard
	} else {
		o.slot, e.free = e.free[0], e.free[1:]
		if r.IntN(2) == 0 {
			at = there + liveAt + r.IntN(mixLive-o.n+1)
			o.live = true
			e.reading++
		}
	}
	e.target(o, at)
	o.dst = e.slotAt(o.slot)
	o.want = bytes.Clone(e.s.peer.shadow[at:][:o.n])
	o.wr.SGList = m.pieces(e.mrs, o.dst, o.n, 4)
}

func (e *mixEnd) atomic(o *mixOp, op verbs.Opcode, there int) {
	m, r := e.s.m, e.s.m.r
	o.wr.Opcode, o.n = op, 8
	o.slot, e.free = e.free[0], e.free[1:]
	o.dst = e.slotAt(o.slot)
	o.wr.SGList = sgl(e.mrs[m.r.IntN(2)], o.dst, 8)
	if op == verbs.AtomicFetchAdd && r.IntN(2) == 0 {
		o.counter = true
		e.target(o, mixGuard)
		o.wr.CompareAdd = 1
		e.s.peer.adds++
		return
	}
	// A few words, so that comparisons hold now and then.
	e.target(o, (there+liveAt+7)&^7+8*r.IntN(8))
	word := e.s.peer.shadow[o.at:][:8]
	old := binary.NativeEndian.Uint64(word)
	o.want = bytes.Clone(word)
	o.wr.CompareAdd, o.wr.Swap = r.Uint64(), r.Uint64()
	if op == verbs.AtomicFetchAdd {
		binary.NativeEndian.PutUint64(word, old+o.wr.CompareAdd)
		return
	}
	if r.IntN(2) == 0 {
		o.wr.CompareAdd = old
	}
	if o.wr.CompareAdd == old {
		binary.NativeEndian.PutUint64(word, o.wr.Swap)
	}
}
