package netsim

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestDREQBeforeTheAck: the receiver of the last messages hangs up as soon as they have arrived,
// and the acknowledgement is lost, so the DREQ is heard first. What the receiver had done is a
// success all the same, and the program hears of it before it hears of the end; what it had not is
// flushed, soon. The DREP does not wait.
func TestDREQBeforeTheAck(t *testing.T) {
	const ok, flushed = verbs.WCSuccess, verbs.WRFlushErr
	for _, tc := range []struct {
		name  string
		sizes []int
		lose  int  // the last so many messages never arrive
		stays bool // the receiver's queue pair is not destroyed
		quit  func(net *Net, a *Node, c *wire.Conn, q *wire.QP)
		want  []verbs.WCStatus
	}{
		{name: "one", sizes: []int{64}, want: []verbs.WCStatus{ok}},
		{name: "of nothing", sizes: []int{0}, want: []verbs.WCStatus{ok}},
		{name: "three packets", sizes: []int{3000}, want: []verbs.WCStatus{ok}},
		{name: "several", sizes: []int{64, 2000, 10}, want: []verbs.WCStatus{ok, ok, ok}},
		{name: "none arrived", sizes: []int{64}, lose: 1, want: []verbs.WCStatus{flushed}},
		{name: "none of two arrived", sizes: []int{64, 64}, lose: 2, want: []verbs.WCStatus{flushed, flushed}},
		{name: "the receiver stays", sizes: []int{64}, stays: true, want: []verbs.WCStatus{flushed}},
		{name: "the program gives up", sizes: []int{64}, stays: true, want: []verbs.WCStatus{flushed},
			quit: func(net *Net, a *Node, _ *wire.Conn, q *wire.QP) {
				attr := verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}
				_ = a.Wire.Modify(net.Now(), q, &attr)
			}},
		{name: "the program destroys the connection", sizes: []int{64}, stays: true, want: []verbs.WCStatus{flushed},
			quit: func(net *Net, a *Node, c *wire.Conn, _ *wire.QP) { a.Wire.Destroy(net.Now(), c) }},
		{name: "the program closes", sizes: []int{64}, stays: true,
			quit: func(net *Net, a *Node, c *wire.Conn, q *wire.QP) {
				a.Wire.Hangup(net.Now(), c)
				a.Wire.DestroyQP(net.Now(), q)
			}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			net := New(4)
			a, b := net.Node("fd00::1"), net.Node("fd00::2")
			aLane, bLane := qp.NewCQ(64), qp.NewCQ(64)
			aq, bq := a.QP(aLane, verbs.QPCap{}), b.QP(bLane, verbs.QPCap{})
			ac, bc, err := net.Connect(a, b, aq, bq, Defaults())
			if err != nil {
				t.Fatal(err)
			}
			amr, bmr := a.Register(make([]byte, 4096), 0), b.Register(make([]byte, 4096), verbs.LocalWrite)
			for range tc.sizes {
				if _, err := b.Recv(bq, verbs.RecvWR{SGList: sgl(bmr, 0, 4096)}); err != nil {
					t.Fatal(err)
				}
			}
			var dreq, drep, end verbs.Instant
			arrive := len(tc.sizes) - tc.lose
			net.Rules = append(net.Rules, func(p *Packet) Verdict {
				d, _ := p.Decode()
				switch {
				case p.CM() == uint16(roce.AttrDREQ):
					dreq = net.Now()
				case p.CM() == uint16(roce.AttrDREP):
					drep = net.Now()
				case p.Src.Addr() == b.Addr.Addr() && d.Opcode == roce.RCAck && dreq == 0:
					return Verdict{Drop: true}
				case p.Src.Addr() == a.Addr.Addr() && d.Opcode.IsSend() && d.Opcode.Transport() == roce.TransportRC && tc.lose > 0:
					return Verdict{Drop: true}
				}
				return Verdict{}
			})
			var got []verbs.WCStatus
			a.OnConnEvent = func(_ *wire.Conn, ev verbs.EventType, _ []byte) {
				if ev == verbs.EventDisconnected {
					if end != 0 {
						t.Error("disconnected twice")
					}
					end = net.Now()
					for _, st := range tc.want {
						if st == ok && len(got) != len(tc.want) {
							t.Errorf("disconnected with %d completions", len(got))
							break
						}
					}
				}
			}
			a.OnCompletions = func(l *qp.CQ) {
				var wc [8]verbs.WC
				for _, w := range wc[:l.Poll(wc[:])] {
					if w.WRID != uint64(len(got)) {
						t.Errorf("completion %d is of message %d", len(got), w.WRID)
					}
					got = append(got, w.Status)
				}
			}
			for i, n := range tc.sizes {
				if _, err := a.Send(aq, verbs.SendWR{WRID: uint64(i), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: sgl(amr, 0, n)}); err != nil {
					t.Fatal(err)
				}
			}
			if arrive > 0 && !net.Run(time.Second, func() bool { return bLane.Len() == arrive }) {
				t.Fatal("the messages never arrive")
			}
			b.Wire.Hangup(net.Now(), bc)
			if !tc.stays {
				b.Wire.DestroyQP(net.Now(), bq)
			}
			if !net.Run(time.Second, func() bool { return drep != 0 }) {
				t.Fatal("no DREP")
			}
			if wait := drep.Sub(dreq); wait > time.Millisecond {
				t.Errorf("the DREP came after %v", wait)
			}
			if tc.quit != nil {
				tc.quit(net, a, ac, aq)
			}
			net.Run(120*time.Millisecond, func() bool { return false })
			if len(got) != len(tc.want) {
				t.Fatalf("%v, want %v", got, tc.want)
			}
			for i := range got {
				if got[i] != tc.want[i] {
					t.Errorf("message %d: %v, want %v", i, got[i], tc.want[i])
				}
			}
			if tc.lose == 0 && !tc.stays && end.Sub(dreq) > time.Millisecond {
				t.Errorf("all is acknowledged, but the end is heard of after %v", end.Sub(dreq))
			}
			if end == 0 && tc.name != "the program destroys the connection" {
				t.Error("nobody heard of the end")
			}
			net.Run(10*time.Second, func() bool { return false })
			if h := a.Wire.Held(0); h.Conns != 0 || h.CMConns != 0 {
				t.Errorf("left behind: %+v", h)
			}
		})
	}
}
