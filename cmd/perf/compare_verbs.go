package main

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench/floor"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Workloads over verbs that perftest does not have, as other transports run them: messages
// that come back, a window of them under way (floor.Echo), and a ping-pong on one queue pair
// while Window messages of 64 KiB are under way on another (floor.PingPong). Each end is one
// loop over one completion queue, as programs for RDMA are: there is a CPU for each, and two
// goroutines on it would measure Go's scheduler.
var verbsTransport = floor.Transport{Serve: serveVerbs, Drive: driveVerbs}

// verbsEnd is one end of these workloads, which compare starts.
func (a *app) verbsEnd() *cobra.Command {
	return a.end("verbs-end", verbsTransport.End)
}

const (
	verbsService = 18515
	bulkMessage  = 64 << 10 // beside a ping-pong
	signalEvery  = 16
	// warmRounds is how many round trips, or messages, are not counted.
	warmRounds = 2000
	// idlePolls is after how many polls without a completion the context is looked at.
	idlePolls = 1 << 12
)

// verbsLoop is an end: two queue pairs, one of them for bulk, and what they share.
type verbsLoop struct {
	p     floor.Params
	dev   *transport.Device
	cq    *transport.CQ
	mr    *transport.MR
	small *transport.QP // for echo and ping-pong
	bulk  *transport.QP // nil without bulk
	wcs   [64]verbs.WC
	// Sends and receives to post when the completions at hand have been looked at.
	sends []verbs.SendWR
	recvs []verbs.RecvWR
	since int // sends since the last signaled one
	begun bool
	rests bool // sleeps when nothing has come for a while
}

// The high bits of a WRID say what completed, the low ones which slot of the memory it was.
const (
	wrSmall = iota << 32
	wrSmallRecv
	wrBulk
	wrBulkRecv
	wrKind = 0xFF << 32
)

func newVerbsLoop(p floor.Params, place floor.Place) (*verbsLoop, error) {
	dev, err := openAt(place)
	if err != nil {
		return nil, err
	}
	v := &verbsLoop{p: p, dev: dev}
	v.cq, err = dev.CreateCQ(8 * (v.window() + v.bulkWindow()))
	if err == nil {
		v.mr, err = dev.PD().RegisterMR(make([]byte, 4*v.window()*p.Size+2*bulkMessage), verbs.LocalWrite)
	}
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return v, nil
}

// window is how many small messages are under way.
func (v *verbsLoop) window() int {
	if v.p.Kind == floor.Echo {
		return max(v.p.Window, 1)
	}
	return 1
}

// bulkWindow is how many large ones are.
func (v *verbsLoop) bulkWindow() int {
	if v.p.Kind == floor.Echo {
		return 0
	}
	return v.p.Window
}

// slot is the memory of a small message; recvSlot that of one received.
func (v *verbsLoop) slot(i int) (off, n int) { return i * v.p.Size, v.p.Size }

func (v *verbsLoop) recvSlot(i int) verbs.RecvWR {
	off, n := v.slot(2*v.window() + i)
	return verbs.RecvWR{WRID: wrSmallRecv | uint64(i), SGList: v.mr.SGL(off, n)}
}

func (v *verbsLoop) bulkRecv() verbs.RecvWR {
	return verbs.RecvWR{WRID: wrBulkRecv, SGList: v.mr.SGL(len(v.mr.Bytes())-bulkMessage, bulkMessage)}
}

func (v *verbsLoop) bulkSend() verbs.SendWR {
	return verbs.SendWR{
		WRID: wrBulk, Opcode: verbs.Send, Flags: verbs.Signaled,
		SGList: v.mr.SGL(len(v.mr.Bytes())-2*bulkMessage, bulkMessage),
	}
}

// param is what a queue pair takes; index 0 is the small one, 1 the bulk.
func (v *verbsLoop) param(index byte, serves bool) transport.ConnParam {
	p := transport.ConnParam{PrivateData: []byte{index}, SendCQ: v.cq, RecvCQ: v.cq, NoExtension: false}
	if index == 1 {
		p.Cap = verbs.QPCap{MaxSendWR: 2 * v.bulkWindow(), MaxRecvWR: 4 * v.bulkWindow(), MaxSendSGE: 1, MaxRecvSGE: 1}
		for range 4 * v.bulkWindow() {
			if serves {
				p.Recv = append(p.Recv, v.bulkRecv())
			}
		}
		return p
	}
	// Acknowledgements may trail the answers, and slots are free when they have come.
	p.Cap = verbs.QPCap{
		MaxSendWR: max(4*v.window(), 64), MaxRecvWR: 2 * v.window(), MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: max(v.p.Size, 1),
	}
	for i := range 2 * v.window() {
		p.Recv = append(p.Recv, v.recvSlot(i))
	}
	return p
}

func serveVerbs(ctx context.Context, p floor.Params, ready func(netip.AddrPort) error) (err error) {
	v, err := newVerbsLoop(p, p.Places[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, v.dev.Close()) }()
	ln, err := v.dev.Listen(service)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := ready(v.dev.LocalAddr()); err != nil {
		return err
	}
	for v.small == nil || v.bulk == nil && v.bulkWindow() > 0 {
		req, err := ln.Next(ctx)
		if err != nil {
			return err
		}
		index := req.PrivateData()[0]
		qp, err := req.Accept(ctx, v.param(index, true))
		if err != nil {
			return err
		}
		if index == 1 {
			v.bulk = qp
		} else {
			v.small = qp
		}
	}
	err = v.run(ctx, func(wc *verbs.WC) bool {
		switch wc.WRID & wrKind {
		case wrSmallRecv:
			v.answer(wc)
		case wrBulkRecv:
			if err := v.bulk.PostRecv(v.bulkRecv()); err != nil {
				return false
			}
		}
		return true
	})
	var status verbs.WCStatus
	if errors.As(err, &status) && status == verbs.WRFlushErr {
		return nil // the other end has hung up
	}
	return err
}

// answer sends a message back and gives its memory to the next.
func (v *verbsLoop) answer(wc *verbs.WC) {
	i := int(wc.WRID &^ wrKind)
	off, n := v.slot(2*v.window() + i)
	v.send(v.mr.Bytes()[off : off+n]) // copied when posted, before the receive is
	v.recvs = append(v.recvs, v.recvSlot(i))
}

// send adds a small message to those to post.
func (v *verbsLoop) send(b []byte) {
	wr := verbs.SendWR{WRID: wrSmall, Opcode: verbs.Send, InlineData: b}
	if v.since++; v.since == signalEvery {
		v.since, wr.Flags = 0, verbs.Signaled
	}
	v.sends = append(v.sends, wr)
}

// flush posts what there is to post. A full send queue leaves the rest for later.
func (v *verbsLoop) flush() error {
	if len(v.sends) > 0 {
		n, err := v.small.PostSendList(v.sends)
		if err != nil && !errors.Is(err, verbs.ErrQueueFull) {
			return err
		}
		v.sends = v.sends[:copy(v.sends, v.sends[n:])]
	}
	// A receive's memory may hold what is still to be sent.
	if len(v.sends) == 0 && len(v.recvs) > 0 {
		if _, err := v.small.PostRecvList(v.recvs); err != nil {
			return err
		}
		v.recvs = v.recvs[:0]
	}
	return nil
}

// run hands completions to each until it returns false, an error or the end of the context.
func (v *verbsLoop) run(ctx context.Context, each func(*verbs.WC) bool) error {
	for idle := 0; ; {
		n := v.cq.Poll(v.wcs[:])
		if n == 0 {
			if idle++; idle%idlePolls == 0 {
				err := ctx.Err()
				if v.rests {
					err = v.cq.Wait(ctx)
				}
				if err != nil {
					return err
				}
			}
		} else {
			idle = 0
		}
		for i := range v.wcs[:n] {
			if err := v.wcs[i].Err(); err != nil {
				return err
			}
			if !each(&v.wcs[i]) {
				return nil
			}
		}
		if err := v.flush(); err != nil {
			return err
		}
	}
}

func driveVerbs(ctx context.Context, p floor.Params, to netip.AddrPort) (r floor.Result, err error) {
	v, err := newVerbsLoop(p, p.Places[1])
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, v.dev.Close()) }()
	if v.small, err = v.dial(ctx, to, v.param(0, false)); err != nil {
		return r, err
	}
	if v.bulkWindow() > 0 {
		if v.bulk, err = v.dial(ctx, to, v.param(1, false)); err != nil {
			return r, err
		}
		for range v.bulkWindow() {
			if err := v.bulk.PostSend(v.bulkSend()); err != nil {
				return r, err
			}
		}
	}
	if r, err = v.measure(ctx); err != nil {
		return r, err
	}
	return r, v.small.Close()
}

// dial connects to an end that serves.
func (v *verbsLoop) dial(ctx context.Context, to netip.AddrPort, param transport.ConnParam) (*transport.QP, error) {
	param.RemotePort = to.Port()
	return v.dev.Dial(ctx, netip.AddrPortFrom(to.Addr(), verbsService), param)
}

// measure runs the end that drives, which may be done again.
func (v *verbsLoop) measure(ctx context.Context) (r floor.Result, err error) {
	p := &v.p
	message := v.mr.Bytes()[:p.Size]
	binary.NativeEndian.PutUint32(message, 1)
	for !v.begun && len(v.sends) < v.window() {
		v.send(message)
	}
	v.begun = true // else what the last measurement did not send begins this one
	if err := v.flush(); err != nil {
		return r, err
	}
	var samples floor.Samples
	var begin, last time.Time
	const warm = warmRounds
	got := uint64(0)
	var posting error
	err = v.run(ctx, func(wc *verbs.WC) bool {
		switch wc.WRID & wrKind {
		case wrBulk:
			r.Bytes += bulkMessage
			posting = v.bulk.PostSend(v.bulkSend())
			return posting == nil
		case wrSmallRecv:
		default:
			return true
		}
		if got++; got > warm {
			if v.window() == 1 || got%8 == 0 {
				now := time.Now()
				if v.window() == 1 {
					samples.Add(now.Sub(last))
				}
				last = now
			}
		} else {
			begin = time.Now()
			last, r.Bytes = begin, 0
		}
		v.send(message)
		v.recvs = append(v.recvs, v.recvSlot(int(wc.WRID&^wrKind)))
		return got-min(got, warm) != uint64(p.Iters) && (p.Iters > 0 || last.Sub(begin) < p.Duration) || got <= warm
	})
	if err := errors.Join(err, posting); err != nil {
		return r, err
	}
	r.Ops, r.Elapsed = got-warm, time.Since(begin)
	if v.bulkWindow() == 0 {
		r.Bytes = r.Ops * uint64(p.Size)
	}
	samples.Into(&r)
	return r, nil
}
