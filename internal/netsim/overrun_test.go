package netsim

import (
	"fmt"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// F21: a completion queue that nobody polls overflows. What it took stays, in order for each
// queue pair; one CQ_ERR is raised; every queue pair that loses a completion goes to ERR, its
// peer hears of it, and nothing stays in its queues.
func TestCQOverrun(t *testing.T) {
	for _, depth := range []int{1, 4} {
		for _, qps := range []int{1, 3} {
			for _, side := range []string{"send", "receive"} {
				t.Run(fmt.Sprintf("depth %d, %d queue pairs, %s", depth, qps, side), func(t *testing.T) {
					overrun(t, depth, qps, side == "send")
				})
			}
		}
	}
}

func overrun(t *testing.T, depth, qps int, sends bool) {
	const each = 8
	net := New(7)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	small := qp.NewCQ(depth)
	errs, fatal := 0, map[*wire.QP]bool{}
	onEvent := func(q *wire.QP, ev verbs.EventType) {
		switch ev {
		case verbs.EventCQErr:
			errs++
			if !small.Full() {
				t.Error("CQ_ERR of a queue that has lost nothing")
			}
		case verbs.EventQPFatal:
			fatal[q] = true
		}
	}
	amr, bmr := a.Register(make([]byte, 64), 0), b.Register(make([]byte, 64), verbs.LocalWrite)
	var aqs, bqs, fails []*wire.QP
	for range qps {
		aLane, bLane := small, qp.NewCQ(64)
		if !sends {
			aLane, bLane = bLane, aLane
		}
		aq, bq := a.QP(aLane, verbs.QPCap{}), b.QP(bLane, verbs.QPCap{})
		if _, _, err := net.Connect(a, b, aq, bq, Defaults()); err != nil {
			t.Fatal(err)
		}
		aqs, bqs = append(aqs, aq), append(bqs, bq)
	}
	fails = bqs
	failing := b
	if sends {
		fails, failing = aqs, a
	}
	failing.OnQPEvent = onEvent
	for i := range each {
		for j := range qps {
			if _, err := b.Recv(bqs[j], verbs.RecvWR{WRID: uint64(i), SGList: sgl(bmr, 0, 64)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range each {
		for j := range qps {
			wr := verbs.SendWR{WRID: uint64(i), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sgl(amr, 0, 64)}
			if _, err := a.Send(aqs[j], wr); err != nil {
				t.Fatal(err)
			}
		}
	}
	net.Run(time.Second, nil)
	if errs != 1 {
		t.Errorf("%d CQ_ERR, want 1", errs)
	}
	for i, q := range fails {
		if q.State() != verbs.QPErr || !fatal[q] {
			t.Errorf("queue pair %d: %v, fatal %v", i, q.State(), fatal[q])
		}
		for name, peer := range map[string]*wire.QP{"sender": aqs[i], "receiver": bqs[i]} {
			if peer.State() != verbs.QPErr {
				t.Errorf("the %s %d is in %v", name, i, peer.State())
			}
		}
	}
	if small.Len() != depth || !small.Overrun() {
		t.Fatalf("%d completions held, want %d; overrun %v", small.Len(), depth, small.Overrun())
	}
	wc := make([]verbs.WC, depth+1)
	next := map[verbs.QPN]uint64{}
	for _, c := range wc[:small.Poll(wc)] {
		if c.Status != verbs.WCSuccess || c.WRID != next[c.QPN] {
			t.Errorf("completion %+v, want %d next", c, next[c.QPN])
		}
		next[c.QPN]++
	}
	// Nothing more ever comes, and no queue holds anything.
	for _, q := range aqs {
		if _, err := a.Send(q, verbs.SendWR{Opcode: verbs.Send}); err != nil {
			t.Errorf("a queue in ERR is full: %v", err)
		}
	}
	net.Run(time.Second, nil)
	if small.Len() != 0 || errs != 1 {
		t.Errorf("%d completions after the overrun, %d CQ_ERR", small.Len(), errs)
	}
}

// F21: 64 posted requests are flushed into a queue of 8: eight are reported, the rest is
// disposed of, and CQ_ERR says so.
func TestFlushOverrunsCQ(t *testing.T) {
	net := New(8)
	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
	lane := qp.NewCQ(8)
	aq, bq := a.QP(qp.NewCQ(64), verbs.QPCap{}), b.QP(lane, verbs.QPCap{})
	if _, _, err := net.Connect(a, b, aq, bq, Defaults()); err != nil {
		t.Fatal(err)
	}
	errs := 0
	b.OnQPEvent = func(_ *wire.QP, ev verbs.EventType) {
		if ev == verbs.EventCQErr {
			errs++
		}
	}
	for i := range 64 {
		if _, err := b.Recv(bq, verbs.RecvWR{WRID: uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	attr := verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}
	if err := b.Wire.Modify(net.Now(), bq, &attr); err != nil {
		t.Fatal(err)
	}
	net.Run(time.Second, nil)
	wc := make([]verbs.WC, 64)
	n := lane.Poll(wc)
	for i, c := range wc[:n] {
		if c.WRID != uint64(i) || c.Status != verbs.WRFlushErr {
			t.Errorf("completion %d: %+v", i, c)
		}
	}
	if n != 8 || errs != 1 || !lane.Overrun() {
		t.Errorf("%d completions, %d CQ_ERR, overrun %v", n, errs, lane.Overrun())
	}
	// All 64 slots are free again.
	for range 128 {
		if _, err := b.Recv(bq, verbs.RecvWR{}); err != nil {
			t.Fatalf("the receive queue is still full: %v", err)
		}
	}
}
