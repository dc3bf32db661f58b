//go:build interop && linux

package interop

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// rawEnd is our end of a connection with Linux when the program drives its queue pair.
type rawEnd struct {
	id *transport.CMID
	q  *transport.QP
	cq *transport.CQ
	mr *transport.MR
}

// newRawEnd makes a queue pair for id, in INIT with a receive posted.
func newRawEnd(dev *transport.Device, id *transport.CMID) (*rawEnd, error) {
	e := &rawEnd{id: id}
	var err error
	if e.mr, err = dev.PD().RegisterMR(make([]byte, rdmaMessage), verbs.LocalWrite); err != nil {
		return nil, err
	}
	if e.cq, err = dev.CreateCQ(16); err != nil {
		return nil, err
	}
	if e.q, err = dev.PD().CreateQP(transport.QPConfig{SendCQ: e.cq, RecvCQ: e.cq}); err != nil {
		return nil, err
	}
	if err := e.move(verbs.QPInit); err != nil {
		return nil, err
	}
	return e, e.q.PostRecv(verbs.RecvWR{SGList: e.mr.SGL(0, rdmaMessage)})
}

func (e *rawEnd) move(to verbs.QPState) error {
	a, err := e.id.InitQPAttr(to)
	if err != nil {
		return err
	}
	return e.q.Modify(a)
}

func (e *rawEnd) post() error {
	return e.q.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: make([]byte, rdmaMessage)})
}

// exchanged waits for one message each way.
func (e *rawEnd) exchanged(ctx context.Context) error {
	for range 2 {
		if wc, err := e.cq.Next(ctx); err != nil {
			return fmt.Errorf("%v: %w", wc.Opcode, err)
		}
	}
	return nil
}

// end waits for the other side to hang up for a while, hangs up, and closes everything.
func (e *rawEnd) end(ctx context.Context) error {
	short, cancel := context.WithTimeout(ctx, clientLinger)
	defer cancel()
	for {
		if ev, err := e.id.NextEvent(short); err != nil || ev.Type == verbs.EventDisconnected {
			break
		}
	}
	err := e.q.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
	return errors.Join(err, e.id.Close(), e.q.Close(), e.cq.Close(), e.mr.Close())
}

// A program of ours that drives its queue pair connects to a Linux server.
func TestRawClient(t *testing.T) {
	bothIPs(t, func(e *env) {
		p, err := e.serve(fmt.Sprintf("rdma_server -s %v -p %d", e.guest, RDMAPort), RDMAPort, true)
		if err != nil {
			e.Fatal(err)
		}
		if err := e.finish(rawClient(e), p, "rdma_server: end 0"); err != nil {
			e.Error(err)
		}
	})
}

func rawClient(e *env) error {
	id, err := e.dev.CreateCMID(e.to(RDMAPort), transport.ConnParam{})
	if err != nil {
		return err
	}
	r, err := newRawEnd(e.dev, id)
	if err != nil {
		return err
	}
	if err := id.Connect(e.ctx, r.q); err != nil {
		return err
	}
	if ev, err := id.NextEvent(e.ctx); err != nil || ev.Type != verbs.EventConnectResponse {
		return fmt.Errorf("heard %v instead of the REP: %w", ev.Type, err)
	}
	err = errors.Join(r.move(verbs.QPRTR), r.move(verbs.QPRTS), id.Establish(nil), r.post())
	if err == nil {
		err = r.exchanged(e.ctx)
	}
	return errors.Join(err, r.end(e.ctx))
}

// A Linux client connects to a program of ours that drives its queue pair and has its message
// posted in RTR, with the RTU on its way and lost.
func TestRawServer(t *testing.T) {
	for _, lostRTU := range []bool{false, true} {
		t.Run(fmt.Sprintf("RTU lost %v", lostRTU), func(t *testing.T) {
			bothIPs(t, func(e *env) {
				if lostRTU {
					lose(e.T, loss{name: "RTU", match: mad(0x14), towards: toUs, random: 1})
				}
				ln := e.listen(RDMAPort)
				p, err := theRig.start(e.ctx, fmt.Sprintf("rdma_client -s %v -p %d", e.host, RDMAPort))
				if err != nil {
					e.Fatal(err)
				}
				heard, err := rawServe(e, ln)
				if err := e.finish(err, p, "rdma_client: end 0"); err != nil {
					e.Error(err)
				}
				if lostRTU && (len(heard) < 2 || heard[0] != verbs.EventCommEst || heard[1] != verbs.EventEstablished) {
					e.Errorf("heard %v", heard)
				}
			})
		})
	}
}

func rawServe(e *env, ln *transport.Listener) (heard []verbs.EventType, err error) {
	req, err := ln.Next(e.ctx)
	if err != nil {
		return nil, err
	}
	id, err := req.CreateCMID(transport.ConnParam{})
	if err != nil {
		return nil, err
	}
	r, err := newRawEnd(e.dev, id)
	if err != nil {
		return nil, err
	}
	err = errors.Join(r.move(verbs.QPRTR), id.Accept(e.ctx, r.q), r.post())
	for err == nil && !slices.Contains(heard, verbs.EventEstablished) {
		var ev transport.CMEvent
		if ev, err = id.NextEvent(e.ctx); err != nil {
			break
		}
		heard = append(heard, ev.Type)
		switch ev.Type {
		case verbs.EventCommEst:
			err = id.Notify(verbs.EventCommEst)
		case verbs.EventEstablished:
			if err = r.move(verbs.QPRTS); err == nil {
				err = r.exchanged(e.ctx)
			}
		}
	}
	return heard, errors.Join(err, r.end(e.ctx))
}

// TestTimeToFirstByte measures what the study of the deferred doorbell measures in virtual time,
// against Linux: from Accept until the client has our first byte, which its acknowledgement
// tells us. The client's request follows its RTU, which arrives or is lost.
func TestTimeToFirstByte(t *testing.T) {
	const runs = 7
	for _, lostRTU := range []bool{false, true} {
		t.Run(fmt.Sprintf("RTU lost %v", lostRTU), func(t *testing.T) {
			bothIPs(t, func(e *env) {
				if lostRTU {
					lose(e.T, loss{name: "RTU", match: mad(0x14), towards: toUs, random: 1})
				}
				ln := e.listen(RDMAPort)
				var took []time.Duration
				waited := 0
				for range runs {
					p, err := theRig.start(e.ctx, fmt.Sprintf("rdma_client -s %v -p %d", e.host, RDMAPort))
					if err != nil {
						e.Fatal(err)
					}
					d, deferred, err := firstByte(e, ln)
					if err := e.finish(err, p, "rdma_client: end 0"); err != nil {
						e.Fatal(err)
					}
					took = append(took, d)
					waited += int(deferred)
				}
				slices.Sort(took)
				e.Logf("%d connections, %d greetings deferred: first byte after %v to %v, median %v", runs, waited,
					took[0].Round(10*time.Microsecond), took[runs-1].Round(10*time.Microsecond), took[runs/2].Round(10*time.Microsecond))
				// Linux repeats what it lacks after four seconds; who waits for that is not deferring.
				if took[runs/2] > 2*time.Second {
					e.Errorf("median %v", took[runs/2])
				}
			})
		})
	}
}

// firstByte serves one rdma_client and returns the time from Accept to the acknowledgement of
// the greeting, and how many sends were deferred.
func firstByte(e *env, ln *transport.Listener) (took time.Duration, deferred uint64, err error) {
	req, err := ln.Next(e.ctx)
	if err != nil {
		return 0, 0, err
	}
	buf, err := e.dev.PD().RegisterMR(make([]byte, rdmaMessage), verbs.LocalWrite)
	if err != nil {
		return 0, 0, err
	}
	defer buf.Close()
	start := time.Now()
	qp, err := req.Accept(e.ctx, transport.ConnParam{Recv: []verbs.RecvWR{{SGList: buf.SGL(0, rdmaMessage)}}})
	if err != nil {
		return 0, 0, err
	}
	defer qp.Close()
	err = qp.PostSend(verbs.SendWR{WRID: 1, Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: make([]byte, rdmaMessage)})
	for received, sent := false, false; err == nil && (!received || !sent); {
		var wc verbs.WC
		if wc, err = qp.CQ().Next(e.ctx); wc.Opcode.IsRecv() {
			received = true
		} else {
			sent, took = true, time.Since(start)
		}
	}
	if err != nil {
		return 0, 0, err
	}
	deferred, _ = qp.Published()
	short, cancel := context.WithTimeout(e.ctx, serverLinger)
	defer cancel()
	_ = qp.Wait(short)
	return took, deferred, nil
}
