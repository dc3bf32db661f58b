package qp

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"sort"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

var (
	seeds    = flag.Int("seeds", 40, "how many seeds TestRandomTraffic plays")
	oneSeed  = flag.Uint64("seed", 0, "play only this seed")
	maxSteps = 400000
)

// TestRandomTraffic lets two queue pairs exchange everything there is over a network that
// loses, repeats and reorders packets, and compares with a model: every message once, in
// order, with its bytes; memory as if each operation had been done once, in order.
func TestRandomTraffic(t *testing.T) {
	if *oneSeed != 0 {
		playRandom(t, *oneSeed)
		return
	}
	n := *seeds
	if testing.Short() {
		n = min(n, 15)
	}
	for seed := uint64(1); seed <= uint64(n); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { playRandom(t, seed) })
	}
}

// wish is what the model says of a work request.
type wish struct {
	id     uint64
	op     verbs.Opcode
	status verbs.WCStatus
	signal bool
	data   []byte // what a receive, a READ or an atomic must bring
	dst    int    // offset in recv where a READ or atomic puts it
	imm    uint32
}

// side is a node with its half of the model.
type side struct {
	*node
	posted   []wish // send completions to come, in order
	messages []wish // what the peer's receives must bring, in order
	shadow   []byte // what the peer's remote region must hold in the end
	nextID   uint64
	toPost   int
	recvs    []int // offsets of posted receives, in order
	recvNext int
	alloc    int
	dirty    bool // a READ of what WRITEs touch is posted: later writers fence
}

type flight struct {
	at  verbs.Instant
	seq int
	to  *side
	b   []byte
}

type traffic struct {
	p     *pair
	r     *rand.Rand
	a, b  *side
	air   []flight
	seq   int
	loss  int // per mille
	dup   int
	delay time.Duration
	long  int // per mille of packets that come much later
	steps int
}

const (
	chunkSize   = 8192
	staticBytes = 65536 // the first half of remote is only read, the second also written
)

func playRandom(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 77))
	psns := []verbs.PSN{0, 0xfffff0, 0xffffff, 0x7ffff0, 0x800000, verbs.PSN(r.Uint32()) & verbs.PSNMask}
	o := options{
		mtu:  verbs.MTU(1 + r.IntN(5)),
		psnA: psns[r.IntN(len(psns))], psnB: psns[r.IntN(len(psns))],
		cap:   verbs.QPCap{MaxSendWR: 1 << r.IntN(7), MaxRecvWR: 1 << r.IntN(7)},
		cq:    1024,
		retry: 7, rnrRetry: 7, rnrTimer: verbs.RNRTimer(1 + r.IntN(12)),
		timeout:  []verbs.AckTimeout{14, 16, 18}[r.IntN(3)],
		rdAtomic: uint8(1 + r.IntN(6)), posBase: []uint64{0, 1<<61 - 1<<20, 1<<32 - 5}[r.IntN(3)],
		memSize: 1 << 17,
	}
	o.neverTimeout = r.IntN(3) == 0
	if o.neverTimeout {
		o.timeout = 0
	}
	switch r.IntN(4) {
	case 0:
		o.window = WindowConfig{PSNs: 1 + r.IntN(40), Initial: 1 + r.IntN(1<<15), Max: 1 << 15, Reads: 1 + r.IntN(1<<15)}
	case 1:
		o.window = WindowConfig{PSNs: 4096, Initial: 1 << 20, Reads: 1 << 20, Trains: true}
	case 2:
		o.window = WindowConfig{Reads: 1 << r.IntN(18)}
	}
	if r.IntN(3) == 0 {
		o.stateB, o.armB = verbs.QPRTR, true
	}
	p := newPair(t, o)
	w := &traffic{
		p: p, r: r, loss: []int{0, 5, 30, 100}[r.IntN(4)], dup: []int{0, 20, 100}[r.IntN(3)],
		delay: []time.Duration{2, 20, 500}[r.IntN(3)] * time.Microsecond, long: []int{0, 0, 20}[r.IntN(3)],
	}
	defer func() {
		if t.Failed() {
			t.Logf("seed %d: %+v loss %d dup %d delay %v long %d", seed, o, w.loss, w.dup, w.delay, w.long)
		}
	}()
	w.a, w.b = w.newSide(p.a), w.newSide(p.b)
	w.play()
	w.finish()
}

func (w *traffic) newSide(n *node) *side {
	s := &side{node: n, nextID: 1, toPost: 20 + w.r.IntN(150)}
	for i := range n.send.buf {
		n.send.buf[i] = byte(w.r.Uint32())
	}
	// What the peer will find here.
	for i := range n.remote.buf {
		n.remote.buf[i] = byte(w.r.Uint32())
	}
	return s
}

func (w *traffic) peer(s *side) *side {
	if s == w.a {
		return w.b
	}
	return w.a
}

func (w *traffic) play() {
	w.a.shadow = bytes.Clone(w.b.remote.buf)
	w.b.shadow = bytes.Clone(w.a.remote.buf)
	for w.steps = 0; w.steps < maxSteps; w.steps++ {
		if w.r.IntN(3) > 0 {
			w.postSome(w.a)
			w.postSome(w.b)
		}
		if w.r.IntN(4) > 0 || len(w.air) == 0 {
			w.pump(w.a)
			w.pump(w.b)
		}
		if !w.step() {
			if w.done() {
				return
			}
			// Nothing in the air and no timer: only posting can go on.
			w.postSome(w.a)
			w.postSome(w.b)
			w.pump(w.a)
			w.pump(w.b)
		}
	}
	w.p.t.Fatalf("not done after %d steps: a %d to post and %d outstanding, b %d and %d", w.steps,
		w.a.toPost, len(w.a.posted), w.b.toPost, len(w.b.posted))
}

func (w *traffic) done() bool {
	return w.a.toPost == 0 && w.b.toPost == 0 && len(w.a.posted) == 0 && len(w.b.posted) == 0 &&
		len(w.air) == 0 && w.a.q.drained() && w.b.q.drained() && len(w.a.messages) == 0 && len(w.b.messages) == 0
}

// step goes to the next thing that happens: an arrival or a timer.
func (w *traffic) step() bool {
	at := min(w.a.q.Deadline(), w.b.q.Deadline())
	if len(w.air) > 0 {
		at = min(at, w.air[0].at)
	}
	if at == verbs.Never {
		return false
	}
	w.p.now = max(w.p.now, at)
	for len(w.air) > 0 && w.air[0].at <= w.p.now {
		f := w.air[0]
		w.air = w.air[1:]
		w.p.deliver(f.to.node, f.b)
		if w.r.IntN(2) == 0 {
			return true // a timer may be late
		}
	}
	for _, s := range []*side{w.a, w.b} {
		if s.q.Deadline() <= w.p.now {
			s.q.HandleTimeout(w.p.now)
			w.p.check(s.node)
		}
	}
	return true
}

// pump is a wire's step; what leaves goes into the air.
func (w *traffic) pump(s *side) {
	w.p.pump(s.node)
	for _, b := range s.take() {
		copies := 1
		if w.r.IntN(1000) < w.loss {
			copies = 0
		} else if w.r.IntN(1000) < w.dup {
			copies = 2 + w.r.IntN(2)
		}
		for range copies {
			d := w.delay
			if w.loss+w.dup > 0 {
				d += time.Duration(w.r.Int64N(int64(w.delay)))
			}
			if w.r.IntN(1000) < w.long {
				d += time.Duration(w.r.IntN(30)) * time.Millisecond
			}
			w.seq++
			w.air = append(w.air, flight{w.p.now.Add(d), w.seq, w.peer(s), b})
		}
	}
	sort.Slice(w.air, func(i, j int) bool {
		x, y := &w.air[i], &w.air[j]
		return x.at < y.at || x.at == y.at && x.seq < y.seq
	})
	for _, wc := range s.wcs {
		w.completed(s, wc)
	}
	s.wcs = nil
	if st := s.q.State(); st != verbs.QPRTS && st != verbs.QPRTR {
		w.p.t.Fatalf("%s is %v", s.name, st)
	}
}

// completed compares a completion with what is next in the model.
func (w *traffic) completed(s *side, wc verbs.WC) {
	t := w.p.t
	if wc.Status != verbs.WCSuccess {
		t.Fatalf("%s: %+v %v", s.name, wc, wc.Status)
	}
	if wc.Opcode.IsRecv() {
		peer := w.peer(s)
		if len(peer.messages) == 0 || len(s.recvs) == 0 {
			t.Fatalf("%s: unexpected %+v", s.name, wc)
		}
		m, off := peer.messages[0], s.recvs[0]
		peer.messages, s.recvs = peer.messages[1:], s.recvs[1:]
		if wc.Opcode == verbs.WCRecv && !bytes.Equal(s.recv.buf[off:][:wc.ByteLen], m.data) ||
			wc.ByteLen != uint32(len(m.data)) || wc.Flags&verbs.WithImm != 0 && wc.ImmData != m.imm {
			t.Fatalf("%s: %+v instead of message %d of %d bytes", s.name, wc, m.id, len(m.data))
		}
		return
	}
	for len(s.posted) > 0 && !s.posted[0].signal && s.posted[0].id != wc.WRID {
		s.posted = s.posted[1:]
	}
	if len(s.posted) == 0 || s.posted[0].id != wc.WRID {
		t.Fatalf("%s: completion of %d out of order", s.name, wc.WRID)
	}
	m := s.posted[0]
	s.posted = s.posted[1:]
	if isRead(m.op) && !bytes.Equal(s.recv.buf[m.dst:][:len(m.data)], m.data) {
		t.Fatalf("%s: %v %d brought other bytes", s.name, m.op, m.id)
	}
}

// postSome posts receives and sends as long as it likes and there is room.
func (w *traffic) postSome(s *side) {
	for w.r.IntN(3) > 0 && len(s.recvs) < 16 {
		off := staticBytes + s.recvNext%7*chunkSize
		wr := verbs.RecvWR{WRID: uint64(s.recvNext)}
		for at, left := off, chunkSize; left > 0; { // in pieces, some of them empty
			n := min(left, w.r.IntN(6000))
			if len(wr.SGList) == 3 {
				n = left
			}
			wr.SGList = append(wr.SGList, verbs.SGE{Addr: recvBase + uint64(at), Length: uint32(n), LKey: recvKey})
			at, left = at+n, left-n
		}
		if len(s.recvs) >= 6 {
			break // buffers are reused: keep fewer posted than there are
		}
		if _, _, err := s.q.PostRecv([]verbs.RecvWR{wr}); err != nil {
			break
		}
		s.recvs = append(s.recvs, off)
		s.recvNext++
	}
	if s.q.State() == verbs.QPReset || s.q.State() == verbs.QPInit {
		return
	}
	for s.toPost > 0 && w.r.IntN(5) > 0 {
		wr, m := w.request(s)
		if isRead(wr.Opcode) && s.reads() >= 6 {
			return // their places are reused
		}
		if _, _, err := s.q.PostSend([]verbs.SendWR{wr}); err != nil {
			return
		}
		w.apply(s, &wr, &m)
		s.toPost--
		s.nextID++
	}
}

// request makes a random work request.
func (w *traffic) request(s *side) (verbs.SendWR, wish) {
	r := w.r
	ops := []verbs.Opcode{
		verbs.Send, verbs.Send, verbs.SendWithImm, verbs.RDMAWrite, verbs.RDMAWriteWithImm, verbs.RDMARead,
		verbs.RDMARead, verbs.AtomicFetchAdd, verbs.AtomicCmpAndSwp,
	}
	op := ops[r.IntN(len(ops))]
	size := []int{0, 1, 64, r.IntN(600), r.IntN(chunkSize + 1), chunkSize}[r.IntN(6)]
	if op == verbs.AtomicCmpAndSwp || op == verbs.AtomicFetchAdd {
		size = 8
	}
	wr := verbs.SendWR{WRID: s.nextID, Opcode: op, RKey: remoteKey, ImmData: r.Uint32()}
	m := wish{id: s.nextID, op: op, imm: wr.ImmData}
	if r.IntN(3) > 0 || s.toPost == 1 {
		wr.Flags |= verbs.Signaled
		m.signal = true
	}
	if r.IntN(10) == 0 {
		wr.Flags |= verbs.Fence
	}
	base, key, off := uint64(sendBase), uint32(sendKey), r.IntN(len(s.send.buf)-chunkSize)
	if isRead(op) {
		// Each lands in a slot of its own, so that nothing overlaps for a while.
		base, key, off = recvBase, recvKey, s.alloc%7*chunkSize
		m.signal = true
		wr.Flags |= verbs.Signaled
		m.dst = off
	}
	wr.SGList = []verbs.SGE{{Addr: base + uint64(off), Length: uint32(size), LKey: key}}
	if size > 10 && r.IntN(2) == 0 {
		k := 1 + r.IntN(size-1)
		wr.SGList = []verbs.SGE{{Addr: base + uint64(off), Length: uint32(k), LKey: key},
			{Addr: base + uint64(off+k), Length: uint32(size - k), LKey: key}}
	}
	if size <= 64 && inlineOps>>op&1 != 0 && r.IntN(3) == 0 {
		wr.InlineData, wr.SGList = bytes.Clone(s.send.buf[off:][:size]), nil
	}
	at := staticBytes + r.IntN(staticBytes-chunkSize)&^7
	if op == verbs.RDMARead && r.IntN(2) == 0 {
		at -= staticBytes
	}
	wr.RemoteAddr = remoteBase + uint64(at)
	wr.CompareAdd, wr.Swap = r.Uint64(), r.Uint64()
	switch op {
	case verbs.RDMARead:
		if at >= staticBytes {
			s.dirty = true
		}
	case verbs.RDMAWrite, verbs.RDMAWriteWithImm, verbs.AtomicCmpAndSwp, verbs.AtomicFetchAdd:
		// A READ whose answer is lost reads again: only a fence keeps later writers from
		// changing what it sees.
		if s.dirty {
			wr.Flags |= verbs.Fence
		}
	}
	m.data = s.bytesOf(&wr, off, size)
	return wr, m
}

// reads counts the READs and atomics that are not complete.
func (s *side) reads() (n int) {
	for i := range s.posted {
		if isRead(s.posted[i].op) {
			n++
		}
	}
	return n
}

func (s *side) bytesOf(wr *verbs.SendWR, off, size int) []byte {
	if isRead(wr.Opcode) {
		return make([]byte, size)
	}
	return bytes.Clone(s.send.buf[off:][:size])
}

// apply does the request in the model.
func (w *traffic) apply(s *side, wr *verbs.SendWR, m *wish) {
	at := int(wr.RemoteAddr - remoteBase)
	if isRead(wr.Opcode) {
		s.alloc++
	}
	switch wr.Opcode {
	case verbs.RDMARead:
		copy(m.data, s.shadow[at:])
	case verbs.RDMAWrite, verbs.RDMAWriteWithImm:
		copy(s.shadow[at:], m.data)
	case verbs.AtomicCmpAndSwp, verbs.AtomicFetchAdd:
		b := s.shadow[at:]
		old := hostUint64(b)
		binary.NativeEndian.PutUint64(m.data, old)
		switch {
		case wr.Opcode == verbs.AtomicFetchAdd:
			binary.NativeEndian.PutUint64(b, old+wr.CompareAdd)
		case old == wr.CompareAdd:
			binary.NativeEndian.PutUint64(b, wr.Swap)
		}
	}
	s.posted = append(s.posted, *m)
	switch wr.Opcode {
	case verbs.Send, verbs.SendWithImm, verbs.RDMAWriteWithImm:
		s.messages = append(s.messages, *m)
	}
}

func (w *traffic) finish() {
	for _, s := range []*side{w.a, w.b} {
		if peer := w.peer(s); !bytes.Equal(s.shadow, peer.remote.buf) {
			w.p.t.Fatalf("%s's remote memory differs from the model", peer.name)
		}
		c := &s.env.Counters
		if w.loss+w.dup+w.long == 0 && c.Timeouts.Load() > 0 {
			w.p.t.Errorf("%s: %d timeouts on a perfect network", s.name, c.Timeouts.Load())
		}
		if s.win.used != 0 || s.win.inbound != 0 {
			w.p.t.Errorf("%s: the window still holds %d and %d bytes", s.name, s.win.used, s.win.inbound)
		}
	}
}
