package transport_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// rawEnd is one end of a connection whose program drives its queue pair.
type rawEnd struct {
	t   *testing.T
	ctx context.Context
	id  *transport.CMID
	q   *transport.QP
	cq  *transport.CQ
	mr  *transport.MR
	// heard lists the events, in order.
	heard []string
}

// rawQP makes a queue pair of an end's own, in RESET.
func rawQP(ctx context.Context, t *testing.T, dev *transport.Device) *rawEnd {
	t.Helper()
	e := &rawEnd{t: t, ctx: ctx, mr: register(t, dev, 128, verbs.LocalWrite)}
	var err error
	if e.cq, err = dev.CreateCQ(16); err != nil {
		t.Fatal(err)
	}
	if e.q, err = dev.PD().CreateQP(transport.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4}}); err != nil {
		t.Fatal(err)
	}
	return e
}

// move brings the queue pair to a state with the connection manager's attributes.
func (e *rawEnd) move(to verbs.QPState) {
	e.t.Helper()
	a, err := e.id.InitQPAttr(to)
	if err == nil {
		err = e.q.Modify(a)
	}
	if err != nil {
		e.t.Fatalf("to %v: %v", to, err)
	}
}

// init moves to INIT and posts a receive.
func (e *rawEnd) init() {
	e.t.Helper()
	e.move(verbs.QPInit)
	if err := e.q.PostRecv(verbs.RecvWR{WRID: 1, SGList: e.mr.SGL(64, 64)}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *rawEnd) post(s string) {
	e.t.Helper()
	if err := e.q.PostSend(verbs.SendWR{WRID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: []byte(s)}); err != nil {
		e.t.Fatalf("post in %v: %v", e.q.State(), err)
	}
}

// event waits for an event and checks what it is.
func (e *rawEnd) event(want verbs.EventType) transport.CMEvent {
	e.t.Helper()
	ev, err := e.id.NextEvent(e.ctx)
	if err != nil {
		e.t.Fatalf("waiting for %v after %v: %v", want, e.heard, err)
	}
	e.heard = append(e.heard, ev.Type.String())
	if ev.Type != want {
		e.t.Fatalf("heard %v, want %v", e.heard, want)
	}
	return ev
}

// exchanged takes both completions: one send, one receive that says want.
func (e *rawEnd) exchanged(want string) {
	e.t.Helper()
	var got string
	for range 2 {
		wc, err := e.cq.Next(e.ctx)
		if err != nil {
			e.t.Fatal(err)
		}
		if wc.Opcode.IsRecv() {
			got = string(e.mr.Bytes()[64:][:wc.ByteLen])
		}
	}
	if got != want {
		e.t.Fatalf("received %q, want %q", got, want)
	}
}

// passive answers one request: in RTR with a greeting posted when the REP leaves.
func (e *rawEnd) passive(ln *transport.Listener) {
	e.t.Helper()
	req, err := ln.Next(e.ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	if got := string(req.PrivateData()[:3]); got != "req" {
		e.t.Errorf("the REQ brought %q", got)
	}
	if e.id, err = req.CreateCMID(transport.ConnParam{PrivateData: []byte("rep")}); err != nil {
		e.t.Fatal(err)
	}
	e.init()
	e.move(verbs.QPRTR)
	if err := e.id.Accept(e.ctx, e.q); err != nil {
		e.t.Fatal(err)
	}
	e.post("greeting")
}

// close ends the connection from this end's side and releases everything.
func (e *rawEnd) close() {
	e.t.Helper()
	toErr := verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr}
	if err := errors.Join(e.q.Modify(toErr), e.q.Close(), e.id.Close(), e.cq.Close(), e.mr.Close()); err != nil {
		e.t.Error(err)
	}
}

// TestRawConnection opens connections with a raw program at one end or both, step by step, with
// the RTU in time, lost, and overtaken by the request. Raw programs hear what there is to hear
// and nothing else, and greeting and request arrive.
func TestRawConnection(t *testing.T) {
	for _, rtu := range []struct {
		name string
		fate fate
		// passive is what the raw passive end hears.
		passive string
		private bool // the RTU's private data comes
	}{
		{"RTU in time", pass, "ESTABLISHED DISCONNECTED TIMEWAIT_EXIT", true},
		{"RTU lost", lose, "COMM_EST ESTABLISHED DISCONNECTED TIMEWAIT_EXIT", false},
		{"RTU overtaken", late, "COMM_EST ESTABLISHED RTU DISCONNECTED TIMEWAIT_EXIT", true},
	} {
		for _, ends := range []struct {
			name                  string
			rawActive, rawPassive bool
		}{{"raw to raw", true, true}, {"Dial to raw", false, true}, {"raw to Accept", true, false}} {
			t.Run(rtu.name+", "+ends.name, func(t *testing.T) {
				a, b := open(t, "127.1.20.1", transport.Config{}), open(t, "127.1.20.2", transport.Config{})
				lossy(a, 2, lossOf(roce.AttrRTU, rtu.fate))
				ctx := deadline(t)
				ln := listen(t, b, 7471)
				to := netip.AddrPortFrom(b.LocalAddr().Addr(), 7471)
				active, passive := rawQP(ctx, t, a), rawQP(ctx, t, b)
				// The active side up to where the REP is on its way.
				dialled := make(chan error, 1)
				var aq, bq *transport.QP
				if ends.rawActive {
					var err error
					if active.id, err = a.CreateCMID(to, transport.ConnParam{PrivateData: []byte("req")}); err != nil {
						t.Fatal(err)
					}
					active.init()
					if _, err := active.id.InitQPAttr(verbs.QPRTR); !errors.Is(err, transport.ErrBadState) {
						t.Errorf("attributes before Connect: %v", err)
					}
					if err := active.id.Connect(ctx, active.q); err != nil {
						t.Fatal(err)
					}
					if _, err := active.id.InitQPAttr(verbs.QPRTR); !errors.Is(err, transport.ErrBadState) {
						t.Errorf("attributes before the REP: %v", err)
					}
				} else {
					go func() {
						var err error
						aq, err = a.Dial(ctx, to, transport.ConnParam{
							PrivateData: []byte("req"), Recv: []verbs.RecvWR{{WRID: 1, SGList: active.mr.SGL(64, 64)}},
						})
						dialled <- err
					}()
				}
				// The passive side accepts with a greeting posted in RTR.
				if ends.rawPassive {
					passive.passive(ln)
				} else {
					req, err := ln.Next(ctx)
					if err != nil {
						t.Fatal(err)
					}
					bq, err = req.Accept(ctx, transport.ConnParam{
						PrivateData: []byte("rep"), Recv: []verbs.RecvWR{{WRID: 1, SGList: passive.mr.SGL(64, 64)}},
					})
					if err != nil {
						t.Fatal(err)
					}
					if err := bq.PostSend(verbs.SendWR{WRID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: []byte("greeting")}); err != nil {
						t.Fatal(err)
					}
				}
				// The active side answers with the RTU and, right behind it, its request.
				if ends.rawActive {
					ev := active.event(verbs.EventConnectResponse)
					if got := string(ev.PrivateData[:3]); got != "rep" || len(ev.PrivateData) != transport.MaxAcceptPrivateData {
						t.Errorf("the REP brought %q", got)
					}
					active.move(verbs.QPRTR)
					active.move(verbs.QPRTS)
					if err := active.id.Establish([]byte("rtu")); err != nil {
						t.Fatal(err)
					}
					if err := active.id.Establish(nil); !errors.Is(err, transport.ErrBadState) {
						t.Errorf("establish twice: %v", err)
					}
				} else {
					if err := <-dialled; err != nil {
						t.Fatal(err)
					}
					active.cq, active.q = aq.CQ(), aq
				}
				private := func(ev transport.CMEvent) {
					want := ""
					if rtu.private && ends.rawActive {
						want = "rtu"
					}
					if got := strings.TrimRight(string(ev.PrivateData), "\x00"); got != want && ev.PrivateData != nil {
						t.Errorf("%v brought %q, want %q", ev.Type, got, want)
					}
				}
				if ends.rawPassive && rtu.fate == pass {
					private(passive.event(verbs.EventEstablished))
					passive.move(verbs.QPRTS)
				}
				active.post("request")
				if ends.rawPassive && rtu.fate != pass {
					passive.event(verbs.EventCommEst)
					if s := passive.q.State(); s != verbs.QPRTR {
						t.Errorf("somebody moved the queue pair to %v", s)
					}
					if err := passive.id.Notify(verbs.EventCommEst); err != nil {
						t.Fatal(err)
					}
					if err := passive.id.Notify(verbs.EventCommEst); err != nil {
						t.Errorf("notify twice: %v", err)
					}
					passive.event(verbs.EventEstablished)
					passive.move(verbs.QPRTS)
					if rtu.fate == late {
						private(passive.event(verbs.EventRTU))
					}
				}
				if !ends.rawPassive {
					passive.cq, passive.q = bq.CQ(), bq
				}
				active.exchanged("greeting")
				passive.exchanged("request")
				// The active side hangs up; both hear of it, and then that nothing is left.
				if ends.rawActive {
					if err := active.id.Disconnect([]byte("bye")); err != nil {
						t.Fatal(err)
					}
					active.event(verbs.EventDisconnected)
					active.event(verbs.EventTimewaitExit)
					if got := strings.Join(active.heard, " "); got != "CONNECT_RESPONSE DISCONNECTED TIMEWAIT_EXIT" {
						t.Errorf("the active side heard %s", got)
					}
					active.close()
				} else if err := errors.Join(aq.Close(), active.mr.Close()); err != nil {
					t.Error(err)
				}
				if ends.rawPassive {
					ev := passive.event(verbs.EventDisconnected)
					if err := passive.id.Notify(verbs.EventCommEst); err != nil {
						t.Errorf("notify when all is over: %v", err)
					}
					if want := map[bool]string{true: "bye"}[ends.rawActive]; strings.TrimRight(string(ev.PrivateData), "\x00") != want || ev.Reason != 0 {
						t.Errorf("the DREQ brought %q, reason %d", ev.PrivateData, ev.Reason)
					}
					passive.event(verbs.EventTimewaitExit)
					if got := strings.Join(passive.heard, " "); got != rtu.passive {
						t.Errorf("the passive side heard %s", got)
					}
					passive.close()
				} else {
					if err := bq.Wait(ctx); err != nil {
						t.Error(err)
					}
					if err := errors.Join(bq.Close(), passive.mr.Close()); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// TestRawRefusals: what goes wrong on the way says so, at both ends.
func TestRawRefusals(t *testing.T) {
	a, b := open(t, "127.1.21.1", transport.Config{ConnectTimeout: 300 * time.Millisecond}), open(t, "127.1.21.2", transport.Config{})
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	to := netip.AddrPortFrom(b.LocalAddr().Addr(), 7471)
	start := func(to netip.AddrPort) *rawEnd {
		t.Helper()
		e := rawQP(ctx, t, a)
		var err error
		if e.id, err = a.CreateCMID(to, transport.ConnParam{PrivateData: []byte("req")}); err != nil {
			t.Fatal(err)
		}
		e.init()
		if err := e.id.Connect(ctx, e.q); err != nil {
			t.Fatal(err)
		}
		return e
	}
	take := func() *transport.CMID {
		t.Helper()
		req, err := ln.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		id, err := req.CreateCMID(transport.ConnParam{})
		if err != nil {
			t.Fatal(err)
		}
		return id
	}

	// A request refused, with private data.
	e := start(to)
	id := take()
	if err := id.Reject(0, []byte("not today")); err != nil {
		t.Fatal(err)
	}
	if ev := e.event(verbs.EventRejected); ev.Reason != verbs.RejectConsumer || !strings.HasPrefix(string(ev.PrivateData), "not today\x00") {
		t.Errorf("%+v", ev)
	}
	e.event(verbs.EventTimewaitExit)
	for call, f := range map[string]func() error{
		"Establish": func() error { return e.id.Establish(nil) }, "Disconnect": func() error { return e.id.Disconnect(nil) },
		"Reject": func() error { return e.id.Reject(0, nil) }, "Connect": func() error { return e.id.Connect(ctx, e.q) },
		"Accept": func() error { return id.Accept(ctx, e.q) }, "Notify": func() error { return e.id.Notify(verbs.EventCommEst) },
		"Notify of something else": func() error { return e.id.Notify(verbs.EventSQDrained) },
	} {
		if err := f(); err == nil || call != "Accept" && !errors.Is(err, transport.ErrBadState) {
			t.Errorf("%s of a refused connection: %v", call, err)
		}
	}
	e.close()
	if err := id.Close(); err != nil {
		t.Error(err)
	}
	if err := id.Close(); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("closing twice: %v", err)
	}
	if _, err := id.NextEvent(ctx); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("NextEvent after Close: %v", err)
	}

	// A REP refused: the acceptor hears it.
	e = start(to)
	p := rawQP(ctx, t, b)
	p.passive(ln)
	e.event(verbs.EventConnectResponse)
	if err := e.id.Reject(verbs.RejectNoResources, nil); err != nil {
		t.Fatal(err)
	}
	if ev := p.event(verbs.EventRejected); ev.Reason != verbs.RejectNoResources {
		t.Errorf("%+v", ev)
	}
	e.close()
	p.close()

	// A CMID closed in mid-connection: the peer hears that it was given up.
	e = start(to)
	p = rawQP(ctx, t, b)
	p.passive(ln)
	e.event(verbs.EventConnectResponse)
	e.close()
	if ev := p.event(verbs.EventRejected); ev.Reason != verbs.RejectConsumer {
		t.Errorf("%+v", ev)
	}
	p.close()

	// Nobody there.
	e = start(netip.MustParseAddrPort("127.1.21.99:7471"))
	e.event(verbs.EventUnreachable)
	e.close()
	// Nobody listening.
	e = start(netip.AddrPortFrom(b.LocalAddr().Addr(), 7))
	if ev := e.event(verbs.EventRejected); ev.Reason != verbs.RejectInvalidServiceID {
		t.Errorf("%+v", ev)
	}
	e.close()

	// What CreateCMID, Connect and Accept refuse.
	for name, cp := range map[string]transport.ConnParam{
		"Recv": {Recv: []verbs.RecvWR{{}}}, "Cap": {Cap: verbs.QPCap{MaxSendWR: 1}}, "57 bytes": {PrivateData: make([]byte, 57)},
	} {
		if _, err := a.CreateCMID(to, cp); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	early, err := a.CreateCMID(to, transport.ConnParam{})
	if err != nil {
		t.Fatal(err)
	}
	if err := early.Establish(nil); !errors.Is(err, transport.ErrBadState) {
		t.Errorf("establish before Connect: %v", err)
	}
	other := rawQP(ctx, t, b)
	if err := early.Connect(ctx, other.q); err == nil {
		t.Error("a queue pair of another device was taken")
	}
	e = start(to)
	id = take()
	other.id = id
	other.move(verbs.QPInit)
	if err := id.Accept(ctx, other.q); !errors.Is(err, transport.ErrBadState) {
		t.Errorf("accept in INIT: %v", err)
	}
	if err := id.Close(); err != nil {
		t.Error(err)
	}
	if ev := e.event(verbs.EventRejected); ev.Reason != verbs.RejectConsumer {
		t.Errorf("%+v", ev)
	}
	// The device closes under a waiter.
	waiting := make(chan error, 1)
	go func() { _, err := early.NextEvent(ctx); waiting <- err }()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waiting; !errors.Is(err, transport.ErrClosed) {
		t.Errorf("NextEvent of a closed device: %v", err)
	}
	if _, err := a.CreateCMID(to, transport.ConnParam{}); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("CreateCMID of a closed device: %v", err)
	}
}

// TestGivenUpRequests: requests whose peers gave up before anybody asked for them are not
// handed out, and make room for others in a queue that is full of them.
func TestGivenUpRequests(t *testing.T) {
	a, b := open(t, "127.1.22.1", transport.Config{}), open(t, "127.1.22.2", transport.Config{Backlog: 100})
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	to := netip.AddrPortFrom(b.LocalAddr().Addr(), 7471)
	// More than the queue holds, a few at a time, none of them waiting for long.
	const n = 150
	var ids []*transport.CMID
	var ends []*rawEnd
	for range 50 {
		e := rawQP(ctx, t, a)
		ends = append(ends, e)
	}
	for i := range n {
		e := ends[i%len(ends)]
		id, err := a.CreateCMID(to, transport.ConnParam{PrivateData: fmt.Appendf(nil, "%d", i)})
		if err != nil {
			t.Fatal(err)
		}
		if err := id.Connect(ctx, e.q); err != nil {
			t.Fatal(i, err)
		}
		ids = append(ids, id)
		if len(ids) == len(ends) || i == n-1 {
			waitFor(t, func() bool { return b.Counters()["cm_received_req"] >= uint64(i+1) })
			for _, id := range ids {
				if err := id.Close(); err != nil {
					t.Error(err)
				}
			}
			ids = nil
		}
	}
	waitFor(t, func() bool { conns, _, _ := transport.Tables(b); return conns == 0 })
	last := rawQP(ctx, t, a)
	var err error
	if last.id, err = a.CreateCMID(to, transport.ConnParam{PrivateData: []byte("honest")}); err != nil {
		t.Fatal(err)
	}
	if err := last.id.Connect(ctx, last.q); err != nil {
		t.Fatal(err)
	}
	req, err := ln.Next(ctx)
	if err != nil || !strings.HasPrefix(string(req.PrivateData()), "honest") {
		t.Fatalf("got %q, %v", req.PrivateData(), err)
	}
}

// waitFor polls until f says true.
func waitFor(t testing.TB, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited in vain")
		}
	}
}
