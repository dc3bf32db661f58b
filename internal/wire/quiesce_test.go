package wire

import (
	"bytes"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Between steps a wire holds registered memory only while its link is blocked. Quiesce lets go
// of it: what the link would not take is dropped, and sent again from what memory holds then.
func TestQuiesceLetsGoOfMemory(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	connect(t, a, b, verbs.MTU1024)
	buf := a.mr.Bytes()[:64<<10]
	for i := range buf {
		buf[i] = 1
	}
	taken := 0
	a.pipe.accept = func(n int) int { // one message, then none
		if taken > 0 {
			return 0
		}
		taken++
		return 1
	}
	if _, _, err := b.qp.Engine().PostRecv([]verbs.RecvWR{{SGList: b.sgl(0, len(buf))}}); err != nil {
		t.Fatal(err)
	}
	a.send(t, 0, len(buf))
	a.w.Ring(a.qp)
	a.w.Step(0)
	if a.w.tx.deadline() == verbs.Never {
		t.Fatal("the link is not blocked")
	}
	held := func() (n int) {
		for _, p := range a.w.tx.pieces[:cap(a.w.tx.pieces)] {
			n += len(p)
		}
		return n
	}
	if held() == 0 {
		t.Fatal("the wire holds nothing")
	}
	sent := len(a.pipe.sent)
	a.w.Quiesce(0)
	if n := held(); n != 0 {
		t.Errorf("the wire still holds %d bytes", n)
	}
	if n := a.w.Counters.DropBlocked.Load(); n == 0 || len(a.pipe.sent) != sent {
		t.Errorf("%d dropped, %d sent", n, len(a.pipe.sent)-sent)
	}
	a.pipe.accept = nil
	for i := range buf {
		buf[i] = 2
	}
	var wc [4]verbs.WC
	for now := verbs.Instant(0); now < 1e9; now = max(now+1e5, min(a.w.NextDeadline(), now+1e8)) {
		for _, w := range []*Wire{a.w, b.w} {
			for w.Step(now); w.More(); {
				w.Step(now)
			}
		}
		if n := b.lane.Poll(wc[:]); n > 0 {
			if wc[0].Status != verbs.WCSuccess || wc[0].ByteLen != uint32(len(buf)) {
				t.Fatalf("received %+v", wc[0])
			}
			got := b.mr.Bytes()[:len(buf)]
			if i := bytes.IndexByte(got, 2); i < 0 || !bytes.Equal(got[i:], buf[i:]) {
				t.Error("what was dropped was not sent from memory again")
			}
			return
		}
	}
	t.Fatal("the message never arrives")
}
