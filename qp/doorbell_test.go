package qp

import (
	"bytes"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// The contract of the deferred doorbell, a test for each of its points; docs/DESIGN.md has
// the points. The races between posters and transitions are in doorbell_race_test.go, random
// histories in doorbell_model_test.go, all interleavings in docs/model/doorbell.pml.

// inlineWR is a SEND whose data is gathered from memory when posted.
func inlineWR(id uint64, sges ...verbs.SGE) verbs.SendWR {
	return verbs.SendWR{WRID: id, Opcode: verbs.Send, Flags: verbs.Inline, SGList: sges}
}

// slowPost posts a SEND whose poster stops when it has reserved its slot and not yet written
// it. The call has begun when slowPost returns; finish lets it end and returns its answer.
func slowPost(q *SendQueue, mem *slowMem, id uint64) (finish func() (n int, ring bool, err error)) {
	reserved, goOn := make(chan struct{}), make(chan struct{})
	calls := 0
	mem.before = func() {
		if calls++; calls == 2 {
			mem.before = nil // for later posters
			close(reserved)
			<-goOn
		}
	}
	type answer struct {
		n    int
		ring bool
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		n, ring, err := q.Post([]verbs.SendWR{inlineWR(id, verbs.SGE{Addr: sendBase, Length: 4, LKey: sendKey})})
		done <- answer{n, ring, err}
	}()
	<-reserved
	return func() (int, bool, error) {
		close(goOn)
		a := <-done
		return a.n, a.ring, a.err
	}
}

// A post in RTR validates fully, takes a slot, copies inline data, returns nil and puts
// nothing on the wire.
func TestD1(t *testing.T) {
	q, mem := newSQ(4, 0)
	copy(mem.regions[0].buf, "before")
	n, ring, err := q.Post([]verbs.SendWR{
		inlineWR(1, verbs.SGE{Addr: sendBase, Length: 6, LKey: sendKey}),
		{WRID: 2, Opcode: verbs.Send, InlineData: []byte("inline")},
		sends(3)[0],
	})
	if n != 3 || ring || err != nil {
		t.Fatalf("n %d, ring %v, err %v; want 3 taken and no doorbell", n, ring, err)
	}
	if q.InUse() != 3 {
		t.Fatalf("%d slots in use, want 3", q.InUse())
	}
	copy(mem.regions[0].buf, "behind")
	if got := q.inlineData(0); string(got) != "before" {
		t.Errorf("inline data %q, want what was there at the post", got)
	}
	if got := q.inlineData(1); string(got) != "inline" {
		t.Errorf("inline data %q", got)
	}
	for _, bad := range []struct {
		wr  verbs.SendWR
		err error
	}{
		{verbs.SendWR{Opcode: 15}, verbs.ErrBadOpcode},
		{verbs.SendWR{Opcode: verbs.Send, SGList: make([]verbs.SGE, 3)}, verbs.ErrTooManySGE},
		{verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, 33)}, verbs.ErrInlineTooBig},
	} {
		if n, _, err := q.Post([]verbs.SendWR{bad.wr}); n != 0 || !errors.Is(err, bad.err) {
			t.Errorf("n %d, err %v, want %v", n, err, bad.err)
		}
	}
	if q.InUse() != 3 {
		t.Errorf("refused posts left something behind: %d slots in use", q.InUse())
	}
	wantGone(t, serve(q), FateWait)
}

// The same for a whole queue pair: in RTR no packet leaves, whatever is posted.
func TestD1OnTheWire(t *testing.T) {
	p := newPair(t, options{stateA: verbs.QPRTR})
	p.post(p.a, sendWR(verbs.Send, 1, 0, 100), sendWR(verbs.RDMAWrite, 2, 0, 100), sendWR(verbs.RDMARead, 3, 0, 8))
	p.pump(p.a)
	if got := p.a.take(); len(got) != 0 {
		t.Fatalf("%d packets left in RTR", len(got))
	}
	p.modify(p.a, p.rtsAttr(p.a))
	p.pump(p.a)
	var ops []roce.Opcode
	for _, pkt := range decoded(t, p.a.take()) {
		ops = append(ops, pkt.Opcode)
	}
	if want := []roce.Opcode{roce.RCSendOnly, roce.RCWriteOnly, roce.RCReadRequest}; !slices.Equal(ops, want) {
		t.Fatalf("in RTS left %v, want %v", ops, want)
	}
}

// The wire never reads an entry before it is completely written, nor sends any in RTR.
func TestD2(t *testing.T) {
	q, mem := newSQ(4, 0)
	finish := slowPost(q, mem, 1)
	mustPost(t, q, false, 2)
	wantGone(t, serve(q), FateWait)
	q.move(verbs.QPRTS)
	wantGone(t, serve(q), FateWait) // position 0 is not written, and 1 must not overtake it
	if n, ring, err := finish(); n != 1 || !ring || err != nil {
		t.Fatalf("n %d, ring %v, err %v; want the slow poster to ring", n, ring, err)
	}
	wantGone(t, serve(q), FateSend, 1, 2)
}

// RTR to RTS publishes all that was posted so far in one step, in the order of posting,
// ahead of every later post.
func TestD3(t *testing.T) {
	for _, start := range starts {
		q, _ := newSQ(8, start)
		mustPost(t, q, false, 1, 2)
		mustPost(t, q, false, 3)
		mustPost(t, q, false, 4, 5)
		if n := q.move(verbs.QPRTS); n != 5 {
			t.Fatalf("the move published %d, want 5", n)
		}
		mustPost(t, q, true, 6)
		wantGone(t, serve(q), FateSend, 1, 2, 3, 4, 5, 6)
		checkGate(t, &q.gate)
		if q.InUse() != 0 {
			t.Fatalf("%d slots in use", q.InUse())
		}
	}
}

// No lost doorbell: a poster whose slot was reserved before the transition and filled after
// it rings. A failed post leaves nothing behind.
func TestD4(t *testing.T) {
	for _, to := range []verbs.QPState{verbs.QPRTS, verbs.QPErr} {
		q, mem := newSQ(4, 0)
		finish := slowPost(q, mem, 1)
		q.move(to)
		wantGone(t, serve(q), FateWait)
		if n, ring, err := finish(); n != 1 || !ring || err != nil {
			t.Fatalf("to %v: n %d, ring %v, err %v", to, n, ring, err)
		}
		fate := FateSend
		if to == verbs.QPErr {
			fate = FateFlush
		}
		wantGone(t, serve(q), fate, 1)
		wantGone(t, serve(q), FateWait)
	}
	q, _ := newSQ(4, 0)
	chain := sends(1, 2, 3)
	chain[1].Opcode = 15
	if n, _, err := q.Post(chain); n != 1 || !errors.Is(err, verbs.ErrBadOpcode) {
		t.Fatalf("n %d, err %v", n, err)
	}
	q.move(verbs.QPRTS)
	mustPost(t, q, true, 4)
	wantGone(t, serve(q), FateSend, 1, 4)
}

// A chain posted in one call becomes visible whole: see also TestGatePublishFirstSlotLast.
func TestD5(t *testing.T) {
	q, mem := newSQ(4, 0)
	q.move(verbs.QPRTS)
	// Look at the queue while the poster writes each of three entries.
	calls := 0
	mem.before = func() {
		calls++
		if pos, fate := q.next(); fate != FateWait {
			t.Errorf("entry %d is visible while call %d of the poster writes", pos, calls)
		}
	}
	sge := verbs.SGE{Addr: sendBase, Length: 4, LKey: sendKey}
	if n, ring, err := q.Post([]verbs.SendWR{inlineWR(1, sge), inlineWR(2, sge), inlineWR(3, sge)}); n != 3 || !ring || err != nil {
		t.Fatalf("n %d, ring %v, err %v", n, ring, err)
	}
	if calls != 6 {
		t.Fatalf("%d looks at memory, want one for each check and each write", calls)
	}
	wantGone(t, serve(q), FateSend, 1, 2, 3)
}

// RTR to ERR flushes deferred entries in order, and RESET forgets them.
func TestD6(t *testing.T) {
	q, _ := newSQ(8, 0)
	mustPost(t, q, false, 1, 2, 3)
	q.move(verbs.QPErr)
	mustPost(t, q, true, 4)
	wantGone(t, serve(q), FateFlush, 1, 2, 3, 4)

	q.move(verbs.QPReset)
	q.move(verbs.QPInit)
	q.move(verbs.QPRTR)
	mustPost(t, q, false, 5, 6)
	q.move(verbs.QPReset)
	if q.InUse() != 0 {
		t.Fatalf("%d slots in use after RESET", q.InUse())
	}
	if n, ring, err := q.Post(sends(7)); n != 0 || ring || !errors.Is(err, verbs.ErrBadState) {
		t.Fatalf("post in RESET: n %d, ring %v, err %v", n, ring, err)
	}
	q.move(verbs.QPInit)
	if _, _, err := q.Post(sends(8)); !errors.Is(err, verbs.ErrBadState) {
		t.Fatalf("post in INIT: %v", err)
	}
	q.move(verbs.QPRTR)
	mustPost(t, q, false, 9)
	if n := q.move(verbs.QPRTS); n != 1 {
		t.Fatalf("the move published %d, want the one of this life", n)
	}
	wantGone(t, serve(q), FateSend, 9)
}

// What the requester has started is forgotten by RESET too, and its slots are free.
func TestD6Started(t *testing.T) {
	q, _ := newSQ(4, 0)
	q.move(verbs.QPRTS)
	mustPost(t, q, true, 1, 2, 3, 4)
	q.take()
	q.take()
	q.move(verbs.QPReset)
	checkGate(t, &q.gate)
	if q.InUse() != 0 {
		t.Fatalf("%d slots in use after RESET", q.InUse())
	}
}

// A slow poster of one life does not carry its entry into the next, and the entries of the
// next life wait behind its slot, not in place of it.
func TestD6SlowPoster(t *testing.T) {
	q, mem := newSQ(4, 0)
	finish := slowPost(q, mem, 1)
	mustPost(t, q, false, 2)
	q.move(verbs.QPReset)
	if q.InUse() != 2 {
		t.Fatalf("%d slots in use, want the slow poster's and the one behind it", q.InUse())
	}
	q.move(verbs.QPInit)
	q.move(verbs.QPRTR)
	mustPost(t, q, false, 3)
	q.move(verbs.QPRTS)
	wantGone(t, serve(q), FateWait)
	if n, ring, err := finish(); n != 1 || !ring || err != nil {
		t.Fatalf("n %d, ring %v, err %v", n, ring, err)
	}
	if got, want := serve(q), []gone{{1, FateForget}, {2, FateForget}, {3, FateSend}}; !slices.Equal(got, want) {
		t.Fatalf("left the queue: %v, want %v", got, want)
	}
}

// A slot of an earlier life does not wait for this life's gate: its poster rings although
// the gate is closed, or nobody would clear the slot away (RESET) or complete it (SQE).
func TestD6SealedRings(t *testing.T) {
	for _, path := range []struct {
		fate Fate
		to   []verbs.QPState
	}{
		{FateForget, []verbs.QPState{verbs.QPReset, verbs.QPInit, verbs.QPRTR}},
		{FateFlush, []verbs.QPState{verbs.QPRTS, verbs.QPSQE, verbs.QPRTS, verbs.QPSQD}},
	} {
		q, mem := newSQ(2, 0)
		finish := slowPost(q, mem, 1)
		for _, s := range path.to {
			q.move(s)
		}
		if n, ring, err := finish(); n != 1 || !ring || err != nil {
			t.Fatalf("%v: n %d, ring %v, err %v; want a ring", path.to, n, ring, err)
		}
		wantGone(t, serve(q), path.fate, 1)
		mustPost(t, q, false, 2, 3) // and the gate is as closed as before
		wantGone(t, serve(q), FateWait)
	}
}

// Leaving SQE flushes what was posted before, and sends what comes after.
func TestD6SQE(t *testing.T) {
	q, _ := newSQ(8, 0)
	q.move(verbs.QPRTS)
	mustPost(t, q, true, 1)
	q.move(verbs.QPSQE)
	mustPost(t, q, true, 2)
	wantGone(t, serve(q), FateFlush, 1, 2)
	mustPost(t, q, true, 3)
	if n := q.move(verbs.QPRTS); n != 0 {
		t.Fatalf("leaving SQE published %d", n)
	}
	mustPost(t, q, true, 4)
	if got, want := serve(q), []gone{{3, FateFlush}, {4, FateSend}}; !slices.Equal(got, want) {
		t.Fatalf("left the queue: %v, want %v", got, want)
	}
	// RESET forgets also what SQE had sealed and nobody had flushed yet.
	q.move(verbs.QPSQE)
	mustPost(t, q, true, 5)
	q.move(verbs.QPRTS)
	q.move(verbs.QPReset)
	if q.InUse() != 0 {
		t.Fatalf("%d slots in use after RESET", q.InUse())
	}
}

// A full ring refuses, says how many were taken, and has room again when entries retire, in
// order, signaled or not.
func TestD7(t *testing.T) {
	for _, start := range starts {
		q, _ := newSQ(4, start)
		wrs := sends(1, 2, 3, 4, 5, 6, 7) // depth + 3
		if n, ring, err := q.Post(wrs); n != 4 || ring || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("n %d, ring %v, err %v; want 4 and ErrQueueFull", n, ring, err)
		}
		if n, ring, err := q.Post(wrs[4:]); n != 0 || ring || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("n %d, ring %v, err %v; want ErrQueueFull", n, ring, err)
		}
		q.move(verbs.QPRTS)
		for range 4 {
			q.take()
		}
		if n, _, _ := q.Post(wrs[4:]); n != 0 {
			t.Fatal("taken slots were given away before they were retired")
		}
		q.retire(1)
		if n, ring, err := q.Post(wrs[4:]); n != 1 || !ring || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("n %d, ring %v, err %v; want the one free slot taken", n, ring, err)
		}
		q.retire(3)
		mustPost(t, q, true, 6, 7)
		wantGone(t, serve(q), FateSend, 5, 6, 7)
		checkGate(t, &q.gate)
	}
}

// Retiring what was never taken is our mistake, and a loud one.
func TestD7RetireTooMuch(t *testing.T) {
	q, _ := newSQ(4, 0)
	mustPost(t, q, false, 1)
	defer func() {
		if recover() == nil {
			t.Fatal("no panic")
		}
	}()
	q.retire(1)
}

// A post allocates nothing, in any state and with any outcome; publishing thousands does not
// either. That it takes no lock and makes no system call is to be read in the code: the
// package imports neither (internal/arch checks that); its time is in queue_bench_test.go.
func TestD8(t *testing.T) {
	const depth = 64
	q, _ := newSQ(depth, 0)
	wrs := sends(1, 2)
	inline := []verbs.SendWR{inlineWR(3, verbs.SGE{Addr: sendBase, Length: 32, LKey: sendKey})}
	bad := []verbs.SendWR{{Opcode: 15}}
	allocs := testing.AllocsPerRun(100, func() {
		for range depth { // runs full
			q.Post(wrs)
			q.Post(inline)
			q.Post(bad)
		}
		q.move(verbs.QPRTS)
		q.Post(wrs)
		for {
			if _, fate := q.next(); fate == FateWait {
				break
			}
			q.take()
			q.retire(1)
		}
		q.move(verbs.QPReset)
		q.Post(wrs)
		q.move(verbs.QPInit)
		q.move(verbs.QPRTR)
	})
	if allocs != 0 {
		t.Errorf("%v allocations in a life of %d posts", allocs, depth)
	}
	r := newRQ(depth, 0)
	rwrs := recvs(1, 2)
	if allocs := testing.AllocsPerRun(100, func() {
		r.Post(rwrs)
		r.move(verbs.QPReset)
		r.move(verbs.QPInit)
	}); allocs != 0 {
		t.Errorf("%v allocations in the receive queue", allocs)
	}
}

// Unsignaled, fenced, solicited and inline entries keep their rules through deferral.
func TestD9(t *testing.T) {
	for _, sigAll := range []bool{false, true} {
		q := newSendQueue(verbs.RC, smallCap(32), sigAll, &slowMem{}, testPD, 0)
		q.move(verbs.QPInit)
		q.move(verbs.QPRTR)
		for flags := range verbs.SendFlags(16) {
			wr := verbs.SendWR{
				WRID: uint64(flags), Opcode: verbs.SendWithImm, Flags: flags, ImmData: 7 + uint32(flags),
			}
			if n, _, err := q.Post([]verbs.SendWR{wr}); n != 1 || err != nil {
				t.Fatalf("flags %b: %v", flags, err)
			}
		}
		q.move(verbs.QPRTS)
		for flags := range verbs.SendFlags(16) {
			pos, fate := q.next()
			w := q.at(pos)
			want := flags
			if sigAll {
				want |= verbs.Signaled
			}
			if fate != FateSend || w.WRID != uint64(flags) || w.Flags != want || w.ImmData != 7+uint32(flags) {
				t.Errorf("sigAll %v, flags %04b: %v, WRID %d, flags %04b", sigAll, flags, fate, w.WRID, w.Flags)
			}
			q.take()
			q.retire(1)
		}
	}
}

// The program may do what it likes with requests and inline data after the post.
func TestD9Overwrite(t *testing.T) {
	q, mem := newSQ(4, 0)
	inline := []byte("inline data")
	wrs := []verbs.SendWR{
		{WRID: 1, Opcode: verbs.Send, InlineData: inline},
		inlineWR(2, verbs.SGE{Addr: sendBase, Length: 3, LKey: sendKey}, verbs.SGE{Addr: sendBase + 8, Length: 2, LKey: sendKey}),
		sends(3)[0],
	}
	copy(mem.regions[0].buf, "one, or two")
	sge := wrs[2].SGList[0]
	if n, _, err := q.Post(wrs); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	clear(inline)
	clear(mem.regions[0].buf)
	clear(wrs[2].SGList)
	clear(wrs)
	q.move(verbs.QPRTS)
	for i, want := range []string{"inline data", "onetw"} {
		if got := q.inlineData(uint64(i)); !bytes.Equal(got, []byte(want)) || len(q.sgList(uint64(i))) != 0 {
			t.Errorf("entry %d: %q and SGEs %v, want %q", i, got, q.sgList(uint64(i)), want)
		}
	}
	// Without Inline it is the buffer that was posted, not its contents.
	if got := q.sgList(2); len(got) != 1 || got[0] != sge {
		t.Errorf("SGEs %v, want %v", got, sge)
	}
	wantGone(t, serve(q), FateSend, 1, 2, 3)
}

// It is observable: how many entries were deferred, how often that happened, how long it took.
func TestD10(t *testing.T) {
	p := newPair(t, options{stateA: verbs.QPRTR})
	if n, wait := p.a.q.Published(); n != 0 || wait != 0 {
		t.Fatalf("published %d after %v before RTS", n, wait)
	}
	p.post(p.a, sendWR(verbs.Send, 1, 0, 10), sendWR(verbs.Send, 2, 0, 10))
	p.post(p.a, sendWR(verbs.Send, 3, 0, 10))
	const late = 3 * time.Millisecond
	p.now = p.now.Add(late)
	p.modify(p.a, p.rtsAttr(p.a))
	p.post(p.a, sendWR(verbs.Send, 4, 0, 10))
	if n, wait := p.a.q.Published(); n != 3 || wait != late {
		t.Errorf("published %d after %v, want 3 after %v", n, wait, late)
	}
	c := &p.a.env.Counters
	if d, n, ns := c.Deferred.Load(), c.Publications.Load(), c.DeferredNanos.Load(); d != 3 || n != 1 || ns != uint64(late) {
		t.Errorf("counters: %d deferred, %d publications, %d ns", d, n, ns)
	}
	if c := &p.b.env.Counters; c.Deferred.Load() != 0 || c.Publications.Load() != 0 {
		t.Error("counted a move to RTS that found nothing waiting")
	}
}

// SQD closes the gate as RTR does, and RTS opens it again.
func TestSQD(t *testing.T) {
	q, mem := newSQ(8, 0)
	q.move(verbs.QPRTS)
	mustPost(t, q, true, 1)
	q.take() // started before SQD: it finishes
	q.move(verbs.QPSQD)
	mustPost(t, q, false, 2)
	finish := slowPost(q, mem, 3)
	wantGone(t, serve(q), FateWait)
	q.retire(1)
	if n := q.move(verbs.QPRTS); n != 2 {
		t.Fatalf("the move published %d, want 2", n)
	}
	wantGone(t, serve(q), FateSend, 2)
	if _, ring, _ := finish(); !ring {
		t.Fatal("the slow poster did not ring")
	}
	wantGone(t, serve(q), FateSend, 3)
}
