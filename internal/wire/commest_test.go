package wire

import (
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// deafPipe is a pipe on which no RTU ever arrives.
type deafPipe struct{ *pipe }

func (p deafPipe) Recv(msgs []link.Rx) (int, error) {
	n, err := p.pipe.Recv(msgs)
	k := 0
	for _, m := range msgs[:n] {
		const attr = roce.BTHLen + roce.DETHLen + 16
		if len(m.Buf) == roce.BTHLen+roce.DETHLen+roce.MADLen+roce.ICRCLen && m.Buf[attr] == 0 && m.Buf[attr+1] == byte(roce.AttrRTU) {
			continue
		}
		msgs[k] = m
		k++
	}
	return k, err
}

// passiveUp notes that the connection was established, where a consumer's thread can see it.
type passiveUp struct {
	quiet
	established atomic.Uint32
}

func (u *passiveUp) ConnEvent(_ *Conn, t verbs.EventType, _ []byte) {
	if t == verbs.EventEstablished {
		u.established.Add(1)
	}
}

// What a consumer sees at the completion queue, on a thread of its own, when a first request
// establishes a connection whose RTU is lost: the queue pair in RTS, the program told, and all
// that was posted before published; its reply leaves behind that. A poster goes on posting all
// the while. With -tags doorbellyield the rings and gates give way in their narrow places.
func TestFirstCompletionComesLast(t *testing.T) {
	rounds := 2000
	if testing.Short() || yield.Enabled {
		rounds = 600
	}
	const before, during = 3, 3 // greetings posted before the request is sent, and at any time
	rnd := rand.New(rand.NewPCG(5, 5))
	aPipe := &pipe{addr: netip.MustParseAddrPort("10.0.0.1:4791"), maxSegs: 1}
	bPipe := &pipe{addr: netip.MustParseAddrPort("10.0.0.2:4791"), maxSegs: 1}
	aPipe.peer, bPipe.peer = bPipe, aPipe
	aUp, bUp := &quiet{}, &passiveUp{}
	mrs := [2]*mr.Table{mr.New(rnd.Uint64), mr.New(rnd.Uint64)}
	lanes := [2]*qp.CQ{qp.NewCQ(64), qp.NewCQ(64)}
	timers := cm.Config{TimeWait: time.Millisecond}
	wires := [2]*Wire{}
	for i, c := range []Config{{Link: aPipe, Upcalls: aUp}, {Link: deafPipe{bPipe}, Upcalls: bUp}} {
		c.Mem, c.Rand, c.GUID, c.CM = mrs[i], rnd.Uint32, uint64(1+i), timers
		var err error
		if wires[i], err = New(c); err != nil {
			t.Fatal(err)
		}
	}
	const service = roce.SID(0x0106_0000 | 7471)
	if err := wires[1].Listen(service); err != nil {
		t.Fatal(err)
	}
	amr, err := mrs[0].Register(1, make([]byte, 64), verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	bmr, err := mrs[1].Register(1, make([]byte, 64), verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	now := verbs.Instant(0)
	step := func() {
		now = now.Add(10 * time.Microsecond)
		for _, w := range wires {
			w.Step(now)
		}
		if runtime.GOMAXPROCS(0) == 1 {
			runtime.Gosched()
		}
	}
	until := func(what string, f func() bool) {
		t.Helper()
		for range 2_000_000 {
			if f() {
				return
			}
			step()
		}
		t.Fatal("never: ", what)
	}
	param := ConnParam{RetryCnt: 7, RNRRetry: 7, Timeout: 18, MinRNRTimer: 1, MTU: verbs.MTU1024}
	newQP := func(i int, r *mr.Region) *QP {
		q, err := wires[i].CreateQP(qp.Config{Type: verbs.RC, PD: 1, SendCQ: lanes[i], RecvCQ: lanes[i],
			Cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8}})
		if err != nil {
			t.Fatal(err)
		}
		init := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags, State: verbs.QPInit, Port: 1}
		if err := wires[i].Modify(now, q, &init); err != nil {
			t.Fatal(err)
		}
		for k := range 8 {
			sge := verbs.SGE{Addr: r.Addr() + uint64(8*k), Length: 8, LKey: r.Key()}
			if _, _, err := q.Engine().PostRecv([]verbs.RecvWR{{WRID: uint64(k), SGList: []verbs.SGE{sge}}}); err != nil {
				t.Fatal(err)
			}
		}
		return q
	}
	send := func(w *Wire, q *QP, imm uint32) {
		if _, ring, err := q.Engine().PostSend([]verbs.SendWR{{Opcode: verbs.SendWithImm, ImmData: imm}}); err != nil {
			t.Errorf("post in %v: %v", q.State(), err)
		} else if ring {
			w.Ring(q)
		}
	}
	const reply = 1000
	for round := range rounds {
		aq := newQP(0, amr)
		bUp.request = nil
		told := bUp.established.Load()
		ac, err := wires[0].Dial(now, aq, DialParam{
			Path: cm.Path{Local: aPipe.addr.Addr(), Remote: bPipe.addr}, Service: service, SrcPort: 40000, ConnParam: param,
		})
		if err != nil {
			t.Fatal(err)
		}
		until("request", func() bool { return bUp.request != nil })
		bq := newQP(1, bmr)
		bc := bUp.request
		if err := wires[1].Accept(now, bc, bq, param); err != nil {
			t.Fatal(err)
		}
		for i := range before {
			send(wires[1], bq, uint32(i))
		}
		var threads sync.WaitGroup
		start := make(chan struct{})
		threads.Go(func() { // the poster
			<-start
			for i := range during {
				yield.Point()
				send(wires[1], bq, uint32(before+i))
			}
		})
		threads.Go(func() { // the consumer
			<-start
			var wc [1]verbs.WC
			for lanes[1].Poll(wc[:]) == 0 {
				yield.Point()
			}
			if s := bq.State(); s != verbs.QPRTS {
				t.Errorf("round %d: the request can be seen and the queue pair is in %v", round, s)
			}
			if n := bUp.established.Load() - told; n != 1 {
				t.Errorf("round %d: the request can be seen and the program was told %d times", round, n)
			}
			if n, _ := bq.Engine().Published(); n < before {
				t.Errorf("round %d: the request can be seen and %d sends of at least %d are published", round, n, before)
			}
			send(wires[1], bq, reply)
		})
		until("REP", func() bool { return aq.State() == verbs.QPRTS })
		if bq.State() != verbs.QPRTR {
			t.Fatalf("round %d: in %v before the request", round, bq.State())
		}
		close(start)
		send(wires[0], aq, 7)
		// The active side receives everything once, the first greetings in order, the reply behind them.
		next, replies := uint32(0), 0
		got := 0
		until("greetings and reply", func() bool {
			var wc [16]verbs.WC
			for _, c := range wc[:lanes[0].Poll(wc[:])] {
				got++
				switch {
				case c.Status != verbs.WCSuccess:
					t.Fatalf("round %d: %v", round, c.Status)
				case c.ImmData == reply:
					if replies++; next < before {
						t.Errorf("round %d: the reply overtook greeting %d", round, next)
					}
				case c.ImmData != next:
					t.Fatalf("round %d: greeting %d, want %d", round, c.ImmData, next)
				default:
					next++
				}
			}
			return got >= before+during+1
		})
		threads.Wait()
		if replies != 1 || t.Failed() {
			t.Fatalf("round %d: %d replies", round, replies)
		}
		wires[0].Destroy(now, ac)
		wires[1].Destroy(now, bc)
		wires[0].DestroyQP(now, aq)
		wires[1].DestroyQP(now, bq)
		until("the end", func() bool { return wires[0].cm.Len()+wires[1].cm.Len() == 0 })
		for _, l := range lanes {
			var wc [16]verbs.WC
			for l.Poll(wc[:]) > 0 {
			}
		}
	}
	if n := wires[1].QPCounters().CommEst.Load(); n != uint64(rounds) {
		t.Errorf("COMM_EST %d times in %d rounds", n, rounds)
	}
}
