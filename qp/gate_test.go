package qp

import (
	"errors"
	"slices"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// fateNames are for messages.
var fateNames = [...]string{"wait", "send", "flush", "forget"}

func (f Fate) String() string { return fateNames[f] }

// gone is an entry that has left a queue: whose it was and what became of it.
type gone struct {
	id   uint64
	fate Fate
}

// slowMem is registered memory whose Local stops for a while: a poster with inline data asks
// once while it checks and once while it writes its reserved slot. That makes slow posters
// out of the real code.
type slowMem struct {
	testMem
	before func() // called by every Local
}

func (m *slowMem) Local(pd PD, key uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	if m.before != nil {
		m.before()
	}
	return m.testMem.Local(pd, key, addr, n, need)
}

// smallCap is a queue with room for a handful of entries.
func smallCap(depth int) verbs.QPCap {
	return verbs.QPCap{MaxSendWR: depth, MaxRecvWR: depth, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInlineData: 32}
}

// newSQ makes a send queue of the given depth in RTR, with memory of 4096 bytes at sendBase
// under sendKey.
func newSQ(depth int, start uint64) (*SendQueue, *slowMem) {
	mem := &slowMem{}
	mem.add(testPD, sendKey, sendBase, 4096, 0)
	q := newSendQueue(verbs.RC, smallCap(depth), false, mem, testPD, start)
	q.move(verbs.QPInit)
	q.move(verbs.QPRTR)
	return q, mem
}

// newRQ makes a receive queue in INIT.
func newRQ(depth int, start uint64) *RecvQueue {
	q := newRecvQueue(smallCap(depth), start)
	q.move(verbs.QPInit)
	return q
}

// sends makes plain SENDs of one byte with these WRIDs.
func sends(ids ...uint64) (wrs []verbs.SendWR) {
	for _, id := range ids {
		wrs = append(wrs, verbs.SendWR{
			WRID: id, Opcode: verbs.Send, SGList: []verbs.SGE{{Addr: sendBase + id%4096, Length: 1, LKey: sendKey}},
		})
	}
	return wrs
}

func recvs(ids ...uint64) (wrs []verbs.RecvWR) {
	for _, id := range ids {
		wrs = append(wrs, verbs.RecvWR{WRID: id, SGList: []verbs.SGE{{Addr: recvBase, Length: uint32(id), LKey: recvKey}}})
	}
	return wrs
}

// mustPost posts sends and wants all of them taken, and the doorbell as said.
func mustPost(t testing.TB, q *SendQueue, ring bool, ids ...uint64) {
	t.Helper()
	n, rang, err := q.Post(sends(ids...))
	if n != len(ids) || err != nil || rang != ring {
		t.Fatalf("post of %v in %v: n %d, ring %v, err %v; want ring %v", ids, q.state, n, rang, err, ring)
	}
}

func mustPostRecv(t testing.TB, q *RecvQueue, ring bool, ids ...uint64) {
	t.Helper()
	n, rang, err := q.Post(recvs(ids...))
	if n != len(ids) || err != nil || rang != ring {
		t.Fatalf("post of %v in %v: n %d, ring %v, err %v; want ring %v", ids, q.state, n, rang, err, ring)
	}
}

// serve takes and retires everything that may leave now, as a wire with a fast peer would.
func serve(q *SendQueue) (out []gone) {
	for {
		pos, fate := q.next()
		if fate == FateWait {
			return out
		}
		out = append(out, gone{q.at(pos).WRID, fate})
		q.take()
		q.retire(1)
	}
}

// serveRecv does the same for what is flushed or forgotten; messages use receives.
func serveRecv(q *RecvQueue, messages int) (out []gone) {
	for {
		pos, fate := q.next()
		if fate == FateSend {
			messages--
		}
		if fate == FateWait || messages < 0 {
			return out
		}
		out = append(out, gone{q.at(pos).WRID, fate})
		q.take()
		q.retire(1)
	}
}

func wantGone(t testing.TB, got []gone, fate Fate, ids ...uint64) {
	t.Helper()
	var want []gone
	for _, id := range ids {
		want = append(want, gone{id, fate})
	}
	if !slices.Equal(got, want) {
		t.Fatalf("left the queue: %v, want %v", got, want)
	}
}

// fataler is a testing.T or a rapid.T.
type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

// checkGate checks what always holds.
func checkGate(t fataler, g *gate) {
	t.Helper()
	ctl, retired, sealed := g.ctl.Load(), g.retired.Load(), g.sealed.Load()
	reserved := ctl >> stateBits
	if retired > g.taken || g.taken > reserved || reserved > retired+g.depth {
		t.Fatalf("retired %d, taken %d, reserved %d, depth %d", retired, g.taken, reserved, g.depth)
	}
	if g.resetCut > sealed || sealed > reserved {
		t.Fatalf("reset cut %d, sealed %d, reserved %d", g.resetCut, sealed, reserved)
	}
	if got := verbs.QPState(ctl & stateMask); got != g.state {
		t.Fatalf("the queue word says %v, the owner %v", got, g.state)
	}
	if n := g.inUse(); n != int(reserved-retired) {
		t.Fatalf("%d in use, want %d", n, reserved-retired)
	}
}

// starts are the positions at which queues begin in tests: the usual one, one at which 32
// bits would not do, and one at the end of what 61 bits hold.
var starts = []uint64{0, 1<<32 - 3, 1<<61 - 64}

func TestGateReserve(t *testing.T) {
	refuse := states(verbs.QPReset, verbs.QPInit)
	for _, start := range starts {
		var g gate
		g.init(3, start)
		if g.depth != 4 {
			t.Fatalf("depth %d, want 3 rounded up to 4", g.depth)
		}
		if _, _, err := g.reserve(1, refuse); !errors.Is(err, verbs.ErrBadState) {
			t.Fatalf("reserve in RESET: %v", err)
		}
		g.setState(verbs.QPRTR)
		steps := []struct {
			n, free   uint64 // free slots first
			pos, took uint64
			err       error
		}{
			{n: 3, pos: 0, took: 3},
			{n: 3, pos: 3, took: 1}, // as many as there is room for
			{n: 1, err: verbs.ErrQueueFull},
			{n: 5, free: 2, pos: 4, took: 2},
			{n: 1, err: verbs.ErrQueueFull},
			{n: 9, free: 4, pos: 6, took: 4},
		}
		for i, s := range steps {
			g.taken += s.free
			g.free(s.free)
			pos, took, err := g.reserve(s.n, refuse)
			if took != s.took || !errors.Is(err, s.err) || err == nil && pos != start+s.pos {
				t.Fatalf("start %#x, step %d: reserve(%d) = %d, %d, %v", start, i, s.n, pos-start, took, err)
			}
			checkGate(t, &g)
		}
		if got := g.setState(verbs.QPRTS); got != start+10 {
			t.Fatalf("start %#x: %d reserved, want 10", start, got-start)
		}
	}
}

// A count of retired slots that was read long after the queue word overstates the room; the
// compare-and-swap must refuse what was computed from it.
func TestGateStaleWord(t *testing.T) {
	var g gate
	g.init(2, 0)
	g.setState(verbs.QPRTS)
	refuse := states(verbs.QPReset)
	stale := g.ctl.Load()
	for range 3 {
		if _, took, _ := g.reserve(1, refuse); took != 1 {
			t.Fatal("no room")
		}
		g.taken++
		g.free(1)
	}
	if room := g.depth - (stale>>stateBits - g.retired.Load()); room <= g.depth {
		t.Fatalf("the room seems to be %d: this test tests nothing", room)
	}
	if g.ctl.CompareAndSwap(stale, stale+5<<stateBits) {
		t.Fatal("a stale queue word was swapped")
	}
}

func TestGatePublishFirstSlotLast(t *testing.T) {
	var g gate
	g.init(4, 0)
	g.setState(verbs.QPRTS)
	pos, n, _ := g.reserve(3, 0)
	g.publish(pos+2, 1)
	g.publish(pos+1, 1)
	if g.readable() {
		t.Fatal("readable before the first slot was published")
	}
	g.publish(pos, 1)
	for range n {
		if !g.readable() {
			t.Fatalf("position %d is not readable", g.taken)
		}
		g.taken++
	}
	if g.readable() {
		t.Fatal("the slot behind the last one is readable")
	}
}

// A set of states answers for each state alone.
func TestStateSet(t *testing.T) {
	for s := range verbs.QPState(verbs.QPStates) {
		for o := range verbs.QPState(verbs.QPStates) {
			if states(s).has(o) != (s == o) {
				t.Errorf("states(%v).has(%v)", s, o)
			}
		}
		if s != verbs.QPErr && !recvNoRing.has(s) {
			t.Errorf("a receive posted in %v rings", s)
		}
	}
	if recvNoRing.has(verbs.QPErr) {
		t.Error("a receive posted in ERR does not ring")
	}
}
