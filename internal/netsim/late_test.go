package netsim

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// joinByHand connects two queue pairs in INIT without a connection manager, as ibv_rc_pingpong
// does.
func joinByHand(t *testing.T, net *Net, a, b *Node, aq, bq *wire.QP, timeout time.Duration) {
	t.Helper()
	for _, s := range []struct {
		n, to *Node
		q, r  *wire.QP
		tx    verbs.PSN
		rx    verbs.PSN
	}{{a, b, aq, bq, 0xFFFFFF, 77}, {b, a, bq, aq, 77, 0xFFFFFF}} {
		for _, attr := range []verbs.QPAttr{{
			Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
				verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
			State: verbs.QPRTR, AV: verbs.AV{Remote: s.to.Addr, Local: s.n.Addr.Addr()}, PathMTU: verbs.MTU1024,
			DestQPN: s.r.Num(), RQPSN: s.rx, MaxDestRdAtomic: 1, MinRNRTimer: 4,
		}, {
			Mask: verbs.AttrState | verbs.AttrSQPSN | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry |
				verbs.AttrMaxQPRdAtomic,
			State: verbs.QPRTS, SQPSN: s.tx, Timeout: verbs.AckTimeoutFor(timeout), RetryCnt: 7, RNRRetry: 7,
			MaxQPRdAtomic: 1,
		}} {
			if err := s.n.Wire.Modify(net.Now(), s.q, &attr); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestLastAckLost: the receiver of the last message closes as soon as it has arrived, and the
// acknowledgement is lost. What had been done is acknowledged all the same when it is
// repeated; what had not is not, nor is anything that somebody else asks for, or too late.
func TestLastAckLost(t *testing.T) {
	for _, tc := range []struct {
		name  string
		op    verbs.Opcode
		size  int
		want  verbs.WCStatus
		spoil func(net *Net, p *Packet) Verdict // of the repetitions
		delay time.Duration                     // before they pass
	}{
		{name: "SEND", op: verbs.Send, size: 64},
		{name: "SEND of nothing", op: verbs.Send},
		{name: "SEND of three packets", op: verbs.Send, size: 3000},
		{name: "WRITE", op: verbs.RDMAWrite, size: 3000},
		{name: "WRITE with immediate", op: verbs.RDMAWriteWithImm, size: 64},
		{name: "READ", op: verbs.RDMARead, size: 64, want: verbs.RetryExcErr},
		{name: "FETCH_ADD", op: verbs.AtomicFetchAdd, size: 8, want: verbs.RetryExcErr},
		{name: "from elsewhere", op: verbs.Send, size: 64, want: verbs.RetryExcErr, spoil: func(net *Net, p *Packet) Verdict {
			q := *p
			q.Src = net.nodes[2].Addr
			net.launch(q, 0)
			return Verdict{Drop: true}
		}},
		{name: "damaged", op: verbs.Send, size: 64, want: verbs.RetryExcErr, spoil: func(*Net, *Packet) Verdict {
			return Verdict{Corrupt: true}
		}},
		{name: "after four seconds", op: verbs.Send, size: 64, delay: 4 * time.Second},
		{name: "after six seconds", op: verbs.Send, size: 64, want: verbs.RetryExcErr, delay: 6 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			net := New(3)
			a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
			net.Node("10.0.0.3")
			aLane, bLane := qp.NewCQ(64), qp.NewCQ(64)
			aq, bq := a.QP(aLane, verbs.QPCap{}), b.QP(bLane, verbs.QPCap{})
			joinByHand(t, net, a, b, aq, bq, 16*time.Millisecond+tc.delay)
			all := verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
			amr, bmr := a.Register(make([]byte, 4096), all), b.Register(make([]byte, 4096), all)
			if _, err := b.Recv(bq, verbs.RecvWR{SGList: sgl(bmr, 0, 4096)}); err != nil {
				t.Fatal(err)
			}
			answers := 0
			var closed verbs.Instant
			net.Rules = append(net.Rules, func(p *Packet) Verdict {
				if p.Src.Addr() == b.Addr.Addr() {
					if answers++; answers > 1 && closed != 0 {
						return Verdict{}
					}
					b.Wire.DestroyQP(net.Now(), bq)
					closed = net.Now()
					return Verdict{Drop: true}
				}
				if closed != 0 && net.Now().Sub(closed) < tc.delay {
					return Verdict{Drop: true}
				}
				if closed != 0 && tc.spoil != nil {
					return tc.spoil(net, p)
				}
				return Verdict{}
			})
			wr := verbs.SendWR{
				WRID: 9, Opcode: tc.op, Flags: verbs.Signaled, SGList: sgl(amr, 0, tc.size), RemoteAddr: bmr.Addr(), RKey: bmr.Key(),
			}
			if _, err := a.Send(aq, wr); err != nil {
				t.Fatal(err)
			}
			var wc [2]verbs.WC
			if !net.Run(time.Hour, func() bool { return aLane.Len() > 0 }) {
				t.Fatal("nothing ever completes")
			}
			if n := aLane.Poll(wc[:]); n != 1 || wc[0].WRID != 9 || wc[0].Status != tc.want {
				t.Errorf("%d completions, %+v: %v, want %v", n, wc[0], wc[0].Status, tc.want)
			}
			if closed == 0 {
				t.Error("nothing was lost")
			}
			if tc.want != verbs.WCSuccess {
				return
			}
			// What comes after it was never done.
			wr.WRID = 10
			if _, err := a.Send(aq, wr); err != nil {
				t.Fatal(err)
			}
			net.Run(time.Hour, func() bool { return aLane.Len() > 0 })
			if n := aLane.Poll(wc[:]); n != 1 || wc[0].Status != verbs.RetryExcErr {
				t.Errorf("the next message: %d completions, %v, want RETRY_EXC_ERR", n, wc[0].Status)
			}
		})
	}
}

// TestLastAckLostBeforeDREQ: the same on a connection, whose sender hears of success before it
// hears that the peer has hung up.
func TestLastAckLostBeforeDREQ(t *testing.T) {
	net := New(4)
	a, b := net.Node("fd00::1"), net.Node("fd00::2")
	aLane, bLane := qp.NewCQ(64), qp.NewCQ(64)
	aq, bq := a.QP(aLane, verbs.QPCap{}), b.QP(bLane, verbs.QPCap{})
	_, bc, err := net.Connect(a, b, aq, bq, Defaults())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Recv(bq, verbs.RecvWR{}); err != nil {
		t.Fatal(err)
	}
	lost := map[string]bool{}
	net.Rules = append(net.Rules, func(p *Packet) Verdict {
		d, _ := p.Decode()
		what := ""
		switch {
		case p.Src.Addr() == b.Addr.Addr() && d.Opcode == roce.RCAck:
			what = "ACK"
		case p.CM() == uint16(roce.AttrDREQ):
			what = "DREQ"
		}
		if what == "" || lost[what] {
			return Verdict{}
		}
		lost[what] = true
		return Verdict{Drop: true}
	})
	var down bool
	var status verbs.WCStatus = 255
	a.OnConnEvent = func(_ *wire.Conn, ev verbs.EventType, _ []byte) {
		if ev == verbs.EventDisconnected {
			down = true
			if status == 255 {
				t.Error("disconnected before the SEND was complete")
			}
		}
	}
	a.OnCompletions = func(l *qp.CQ) {
		var wc [1]verbs.WC
		if l.Poll(wc[:]) == 1 && status == 255 {
			status = wc[0].Status
		}
	}
	if _, err := a.Send(aq, verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled}); err != nil {
		t.Fatal(err)
	}
	if !net.Run(time.Second, func() bool { return bLane.Len() > 0 }) {
		t.Fatal("the message never arrives")
	}
	b.Wire.Hangup(net.Now(), bc)
	b.Wire.DestroyQP(net.Now(), bq)
	net.Run(time.Second, func() bool { return down })
	if status != verbs.WCSuccess || !lost["ACK"] || !lost["DREQ"] || !down {
		t.Errorf("%v; lost %v; disconnected: %v", status, lost, down)
	}
}
