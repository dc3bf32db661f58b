package qp

import (
	"errors"
	"slices"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Receives may be posted from INIT on, wait for messages without a doorbell, and are flushed
// in ERR.
func TestRecvStates(t *testing.T) {
	for _, start := range starts {
		q := newRecvQueue(smallCap(8), start)
		if n, ring, err := q.Post(recvs(1)); n != 0 || ring || !errors.Is(err, verbs.ErrBadState) {
			t.Fatalf("post in RESET: n %d, ring %v, err %v", n, ring, err)
		}
		q.move(verbs.QPInit)
		mustPostRecv(t, q, false, 1, 2)
		wantGone(t, serveRecv(q, 9), FateWait)
		id := uint64(2)
		for _, s := range []verbs.QPState{verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPRTS, verbs.QPSQE} {
			q.move(s)
			id++
			mustPostRecv(t, q, false, id)
			wantGone(t, serveRecv(q, 1), FateSend, id-2)
			checkGate(t, &q.gate)
		}
		q.move(verbs.QPErr)
		mustPostRecv(t, q, true, 8)
		wantGone(t, serveRecv(q, 9), FateFlush, 6, 7, 8)
		q.move(verbs.QPReset)
		if q.InUse() != 0 {
			t.Fatalf("%d slots in use", q.InUse())
		}
	}
}

// RESET forgets what was posted and gives the slots back, the one that a message has begun
// to fill too.
func TestRecvReset(t *testing.T) {
	q := newRQ(4, 0)
	q.move(verbs.QPRTR)
	mustPostRecv(t, q, false, 1, 2, 3, 4)
	q.take()
	q.move(verbs.QPReset)
	checkGate(t, &q.gate)
	if q.InUse() != 0 {
		t.Fatalf("%d slots in use", q.InUse())
	}
	q.move(verbs.QPInit)
	mustPostRecv(t, q, false, 5, 6, 7, 8)
	q.move(verbs.QPRTR)
	wantGone(t, serveRecv(q, 9), FateSend, 5, 6, 7, 8)
}

// A receive whose poster is slower than the move to ERR is flushed: the poster rings. One of
// an earlier life is forgotten, and its poster rings so that its slot is cleared away.
func TestRecvSlowPoster(t *testing.T) {
	q := newRQ(4, 0)
	wr := recvs(1)[0]
	pos, n, err := q.reserve(1, recvRefuse)
	if n != 1 || err != nil {
		t.Fatal(n, err)
	}
	q.move(verbs.QPErr)
	wantGone(t, serveRecv(q, 9), FateWait)
	q.write(pos, &wr)
	q.publish(pos, n)
	if !q.mustRing(pos, recvNoRing) {
		t.Fatal("the slow poster does not ring in ERR")
	}
	wantGone(t, serveRecv(q, 9), FateFlush, 1)

	q.move(verbs.QPReset)
	q.move(verbs.QPInit)
	pos, n, _ = q.reserve(1, recvRefuse)
	mustPostRecv(t, q, false, 2)
	q.move(verbs.QPReset)
	q.move(verbs.QPInit)
	q.move(verbs.QPRTR)
	mustPostRecv(t, q, false, 3)
	q.write(pos, &wr)
	q.publish(pos, n)
	if !q.mustRing(pos, recvNoRing) {
		t.Fatal("the slow poster of an earlier life does not ring")
	}
	if got, want := serveRecv(q, 9), []gone{{1, FateForget}, {2, FateForget}, {3, FateSend}}; !slices.Equal(got, want) {
		t.Fatalf("left the queue: %v, want %v", got, want)
	}
}

func TestRecvFull(t *testing.T) {
	for _, start := range starts {
		q := newRQ(2, start)
		if n, ring, err := q.Post(recvs(1, 2, 3)); n != 2 || ring || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("n %d, ring %v, err %v", n, ring, err)
		}
		if n, ring, err := q.Post(recvs(3)); n != 0 || ring || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("n %d, ring %v, err %v", n, ring, err)
		}
		q.move(verbs.QPRTR)
		wantGone(t, serveRecv(q, 1), FateSend, 1)
		mustPostRecv(t, q, false, 3)
		wantGone(t, serveRecv(q, 9), FateSend, 2, 3)
	}
}

func TestRecvFields(t *testing.T) {
	q := newRQ(4, 0)
	wrs := []verbs.RecvWR{
		{WRID: 1, SGList: []verbs.SGE{{Addr: 1, Length: 1<<32 - 1, LKey: 2}, {Addr: 3, Length: 2, LKey: 4}}},
		{WRID: 2},
		{WRID: 3, SGList: make([]verbs.SGE, 3)},
		{WRID: 4},
	}
	sge := slices.Clone(wrs[0].SGList)
	if n, _, err := q.Post(wrs); n != 2 || !errors.Is(err, verbs.ErrTooManySGE) {
		t.Fatalf("n %d, err %v; want two taken and the third refused", n, err)
	}
	if n, _, err := q.Post(wrs[2:]); n != 0 || !errors.Is(err, verbs.ErrTooManySGE) {
		t.Fatalf("n %d, err %v", n, err)
	}
	clear(wrs[0].SGList)
	if got, want := *q.at(0), (RecvWQE{WRID: 1, Length: 1<<32 + 1, NumSGE: 2}); got != want || !slices.Equal(q.sgList(0), sge) {
		t.Errorf("got %+v with %v, want %+v with %v", got, q.sgList(0), want, sge)
	}
	if got, want := *q.at(1), (RecvWQE{WRID: 2}); got != want || len(q.sgList(1)) != 0 {
		t.Errorf("got %+v with %v, want %+v", got, q.sgList(1), want)
	}
	q.move(verbs.QPReset)
	if n, _, err := q.Post(wrs[2:]); n != 0 || !errors.Is(err, verbs.ErrBadState) {
		t.Errorf("n %d, err %v; in RESET the state is said first", n, err)
	}
}

func TestRecvRetireTooMuch(t *testing.T) {
	q := newRQ(4, 0)
	mustPostRecv(t, q, false, 1)
	defer func() {
		if recover() == nil {
			t.Fatal("no panic")
		}
	}()
	q.retire(1)
}
