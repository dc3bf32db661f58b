package wire

import (
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// given lets a send n messages and returns what it sent, a datagram each.
func (e *end) given(t *testing.T, n int, wr verbs.SendWR) []link.Rx {
	t.Helper()
	e.pipe.peer, e.pipe.maxSegs, e.pipe.sent = nil, 1, nil
	for range n {
		_, ring, err := e.qp.Engine().PostSend([]verbs.SendWR{wr})
		if err != nil {
			t.Fatal(err)
		}
		if ring {
			e.w.Ring(e.qp)
		}
		e.w.Step(0)
	}
	if len(e.pipe.sent) != n {
		t.Fatalf("%d datagrams were sent, want %d", len(e.pipe.sent), n)
	}
	return e.pipe.sent
}

// answerCases are kinds of requests that are acknowledged, and no more.
var answerCases = map[string]verbs.Opcode{"SEND": verbs.Send, "WRITE": verbs.RDMAWrite}

// answerEnds are two ends of which b takes n requests of a's; wr is one.
func answerEnds(t *testing.T, op verbs.Opcode, n int) (a, b *end, wr verbs.SendWR) {
	t.Helper()
	a, b = newEnd(t, "10.0.0.1:4791", 1), newEnd(t, "10.0.0.2:4791", 2)
	connect(t, a, b, verbs.MTU1024)
	b.modify(t, verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrAccessFlags, State: verbs.QPRTS, AccessFlags: verbs.RemoteWrite})
	r, err := b.mrs.Register(1, make([]byte, 64), verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	for i := range min(n, 256) {
		b.recv(t, i, 64)
	}
	return a, b, verbs.SendWR{Opcode: op, SGList: a.sgl(0, 64), RemoteAddr: r.Addr(), RKey: r.Key()}
}

// TestAnswersWaitForQuiet: requests are not acknowledged while the link brings more; one that
// finds it empty acknowledges all of them at once.
func TestAnswersWaitForQuiet(t *testing.T) {
	for name, op := range answerCases {
		t.Run(name, func(t *testing.T) {
			a, b, wr := answerEnds(t, op, 5)
			for i, rx := range a.given(t, 5, wr) {
				b.pipe.inbox = []link.Rx{rx}
				b.w.Step(0)
				if n := len(b.pipe.sent); n != 0 {
					t.Fatalf("the step that brought request %d sent %d messages", i, n)
				}
				if !b.w.More() {
					t.Fatalf("the step that brought request %d says that nothing is left to do", i)
				}
			}
			b.w.Step(0)
			if n := len(b.pipe.sent); n != 1 {
				t.Fatalf("5 requests were answered by %d messages, want one", n)
			}
			if b.w.More() {
				t.Error("the step that answered says that something is left to do")
			}
		})
	}
}

// TestAnswersLeaveWithPosts: what is posted meanwhile and the acknowledgement leave in one train.
func TestAnswersLeaveWithPosts(t *testing.T) {
	for name, op := range answerCases {
		t.Run(name, func(t *testing.T) {
			a, b, wr := answerEnds(t, op, 1)
			b.pipe.inbox = a.given(t, 1, wr)
			b.w.Step(0)
			b.send(t, 0, 64)
			b.w.Transmit(0)
			if n := len(b.pipe.sent); n != 1 || b.pipe.sent[0].SegSize == 0 {
				t.Fatalf("a reply and an acknowledgement left in %d messages, want one train", n)
			}
		})
	}
}

// TestAnswersDoNotWaitForEver: a link that is never empty is answered after answerAfter
// datagrams.
func TestAnswersDoNotWaitForEver(t *testing.T) {
	for name, op := range answerCases {
		t.Run(name, func(t *testing.T) {
			a, b, wr := answerEnds(t, op, answerAfter+2)
			a.qp.peer.window.Configure(qp.WindowConfig{Initial: 1 << 20, PSNs: 4 * answerAfter})
			for i, rx := range a.given(t, answerAfter+2, wr) {
				b.pipe.inbox = []link.Rx{rx}
				b.w.Step(0)
				want := 0
				if i >= answerAfter {
					want = 1
				}
				if n := len(b.pipe.sent); n != want {
					t.Fatalf("after %d datagrams %d messages were sent, want %d", i+1, n, want)
				}
			}
		})
	}
}
