package deferral

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Costs are times of the processor, in real time, of one thread with nobody beside it on the
// queue. They leave out what a doorbell may cost beyond marking the queue pair ready: waking a
// wire that sleeps.
type Costs struct {
	// PostRTS is a post of one WQE in RTS into a queue pair that is marked ready already,
	// PostRTR the same in RTR, PostPlain the same into a queue without a gate: neither state
	// nor re-check. All have 4096 slots.
	PostRTS   Timing `json:"post_rts"`
	PostRTR   Timing `json:"post_rtr"`
	PostPlain Timing `json:"post_plain"`
	// Ring is the doorbell of a queue pair that is not marked ready yet.
	Ring Timing `json:"ring"`
	// Message is a SEND of 64 bytes from post to completion, in RTS, both ends' engines
	// together and no wire between them, in batches of 32: the steady state, of which a
	// gate costs PostRTS - PostPlain.
	Message Timing `json:"message"`
	// ByWQEs tells how the move to RTS depends on how many WQEs waited.
	ByWQEs []WaitingCost `json:"by_wqes"`
}

// WaitingCost is what N waiting WQEs cost on the move to RTS.
type WaitingCost struct {
	WQEs int `json:"wqes"`
	// Publish is the move itself, in a: Modify. Flush is what b has instead: Modify, and a
	// post of the whole side queue as one chain.
	Publish Timing `json:"publish"`
	Flush   Timing `json:"flush"`
	// FirstPacket is the time from before Publish until the wire hands the first packets to
	// its link, FirstFlushed the same from before Flush.
	FirstPacket  Timing `json:"first_packet"`
	FirstFlushed Timing `json:"first_flushed"`
}

// Timing is what an operation takes: the median, the least and the most of the means of
// several runs, in nanoseconds.
type Timing struct {
	Median float64 `json:"median_ns"`
	Min    float64 `json:"min_ns"`
	Max    float64 `json:"max_ns"`
	Runs   int     `json:"runs"`
}

func timingOf(runs []float64) Timing {
	slices.Sort(runs)
	n := len(runs)
	if n == 0 {
		return Timing{}
	}
	return Timing{Median: (runs[(n-1)/2] + runs[n/2]) / 2, Min: runs[0], Max: runs[n-1], Runs: n}
}

// waiting are the numbers of WQEs in Costs.ByWQEs.
var waiting = []int{0, 1, 4, 16, 64, 256, 1024, 4096}

const (
	costRuns    = 51
	minCostRuns = 3
	costDepth   = 4096
)

// loop is one run of a measurement: how many operations took how long.
type loop func() (ops int, d time.Duration)

// compare runs loops in turns, so that what disturbs the machine disturbs all, until each has
// had costRuns, or at least minCostRuns by the deadline, or until it is stopped. Before each
// run that counts the same loop warms up.
func compare(deadline time.Time, stopped func() bool, loops []loop) []Timing {
	means := make([][]float64, len(loops))
	for run := 0; run < costRuns && !stopped(); run++ {
		if run >= minCostRuns && !deadline.IsZero() && time.Now().After(deadline) {
			break
		}
		for i, f := range loops {
			f()
			ops, d := f()
			means[i] = append(means[i], float64(d.Nanoseconds())/float64(ops))
		}
	}
	out := make([]Timing, len(loops))
	for i := range out {
		out[i] = timingOf(means[i])
	}
	return out
}

// measureCosts measures within about limit, 0 for as long as it takes. Stopped, it returns nil.
func measureCosts(limit time.Duration, stopped func() bool) (c *Costs, err error) {
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(stageError)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("deferral: costs: %w", e.error)
		}
	}()
	deadline := time.Time{}
	if limit > 0 {
		deadline = time.Now().Add(limit)
	}
	posts, plain, rings, engines := newBench(costDepth, 1), newPlainQueue(costDepth), newBench(1, 512), newEngines()
	loops := []loop{
		func() (int, time.Duration) { return posts.posts(verbs.QPRTS) },
		func() (int, time.Duration) { return posts.posts(verbs.QPRTR) },
		func() (int, time.Duration) { return plain.posts(&posts.wr[0]) },
		rings.rings,
		engines.messages,
	}
	for _, n := range waiting {
		b := newBench(max(n, 1), 16)
		loops = append(loops,
			func() (int, time.Duration) { return b.transitions(n, false) },
			func() (int, time.Duration) { return b.transitions(n, true) },
			func() (int, time.Duration) { return b.firstPackets(n, false) },
			func() (int, time.Duration) { return b.firstPackets(n, true) })
	}
	runtime.GC()
	t := compare(deadline, stopped, loops)
	if stopped() {
		return nil, nil
	}
	c = &Costs{PostRTS: t[0], PostRTR: t[1], PostPlain: t[2], Ring: t[3], Message: t[4]}
	for _, n := range waiting {
		t := t[5+4*len(c.ByWQEs):]
		c.ByWQEs = append(c.ByWQEs, WaitingCost{WQEs: n, Publish: t[0], Flush: t[1], FirstPacket: t[2], FirstFlushed: t[3]})
	}
	return c, nil
}

// bench is a wire over a link that swallows everything, with some queue pairs.
type bench struct {
	w     *wire.Wire
	qps   []*wire.QP
	wr    [1]verbs.SendWR
	chain []verbs.SendWR
	sent  time.Time // when the link was first given something since it was zero
}

func check(err error) {
	if err != nil {
		panic(stageError{err})
	}
}

var (
	benchLocal = netip.MustParseAddrPort("10.0.0.1:4791")
	benchPeer  = netip.MustParseAddrPort("10.0.0.2:4791")
)

func newBench(depth, n int) *bench {
	b := &bench{}
	memory, region := benchMemory()
	var err error
	b.w, err = wire.New(wire.Config{Link: b, Mem: memory, Upcalls: noUpcalls{}, Rand: func() uint32 { return 1 }})
	check(err)
	lane := qp.NewCQ(16)
	for range n {
		q, err := b.w.CreateQP(qp.Config{
			Type: verbs.RC, PD: 1, SendCQ: lane, RecvCQ: lane,
			Cap: verbs.QPCap{MaxSendWR: depth, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: -1},
		})
		check(err)
		b.qps = append(b.qps, q)
	}
	b.wr[0] = verbs.SendWR{Opcode: verbs.Send, SGList: []verbs.SGE{{Addr: region.Addr(), Length: 64, LKey: region.Key()}}}
	b.chain = slices.Repeat(b.wr[:], depth)
	return b
}

func benchMemory() (*mr.Table, *mr.Region) {
	next := uint64(0x10000)
	t := mr.New(func() uint64 { next = mix(next, 1); return next })
	r, err := t.Register(1, make([]byte, 128), verbs.LocalWrite)
	check(err)
	return t, r
}

// benchAttr are attributes for one step towards RTS.
func benchAttr(to verbs.QPState, dest verbs.QPN) verbs.QPAttr {
	switch to {
	case verbs.QPInit:
		return verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags, State: to, Port: 1}
	case verbs.QPRTR:
		return verbs.QPAttr{
			Mask: verbs.AttrState | verbs.AttrAV | verbs.AttrPathMTU | verbs.AttrDestQPN | verbs.AttrRQPSN |
				verbs.AttrMaxDestRdAtomic | verbs.AttrMinRNRTimer,
			State: to, PathMTU: verbs.MTU1024, DestQPN: dest, AV: verbs.AV{Remote: benchPeer, Local: benchLocal.Addr()},
		}
	case verbs.QPRTS:
		return verbs.QPAttr{
			Mask: verbs.AttrState | verbs.AttrSQPSN | verbs.AttrTimeout | verbs.AttrRetryCnt | verbs.AttrRNRRetry |
				verbs.AttrMaxQPRdAtomic,
			State: to, Timeout: ourAckTimeout, RetryCnt: 7, RNRRetry: 7,
		}
	}
	return verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPReset}
}

// benchDest is a number that no queue pair of a bench has to answer to.
const benchDest verbs.QPN = 2

// to brings a queue pair to a state by way of RESET, and lets the wire forget what it was.
func (b *bench) to(q *wire.QP, state verbs.QPState) {
	for s := verbs.QPReset; s <= state; s++ {
		b.modify(q, s)
	}
	if state < verbs.QPRTS {
		b.w.Step(0)
	}
}

func (b *bench) modify(q *wire.QP, to verbs.QPState) {
	a := benchAttr(to, benchDest)
	check(b.w.Modify(0, q, &a))
}

func (b *bench) post(q *wire.QP, wrs []verbs.SendWR) {
	if len(wrs) == 0 {
		return
	}
	n, ring, err := q.Engine().PostSend(wrs)
	if ring {
		b.w.Ring(q)
	}
	if n != len(wrs) {
		check(err)
	}
}

// posts fills a queue that nobody empties, one WQE a post.
func (b *bench) posts(state verbs.QPState) (int, time.Duration) {
	q := b.qps[0]
	b.to(q, state)
	if state == verbs.QPRTS {
		b.w.Ring(q) // the first mark is measured by rings
	}
	start := time.Now()
	for range costDepth {
		b.post(q, b.wr[:])
	}
	return costDepth, time.Since(start)
}

// rings marks queue pairs ready that have nothing to send.
func (b *bench) rings() (int, time.Duration) {
	for b.w.Pending() {
		b.w.Step(0)
	}
	start := time.Now()
	for _, q := range b.qps {
		if !b.w.Ring(q) {
			panic("BUG: deferral: a queue pair was marked already")
		}
	}
	return len(b.qps), time.Since(start)
}

// transitions moves queue pairs from RTR to RTS with n WQEs that were posted before (a), or
// are posted then (b).
func (b *bench) transitions(n int, flush bool) (int, time.Duration) {
	before, after := b.chain[:n], b.chain[:0]
	if flush {
		before, after = after, before
	}
	for _, q := range b.qps {
		b.to(q, verbs.QPRTR)
		b.post(q, before)
	}
	start := time.Now()
	for _, q := range b.qps {
		b.modify(q, verbs.QPRTS)
		b.post(q, after)
	}
	d := time.Since(start)
	for _, q := range b.qps {
		b.modify(q, verbs.QPReset)
	}
	return len(b.qps), d
}

// firstPackets is transitions, timed until the wire has given its link the first packets;
// without WQEs, until it has found nothing to give.
func (b *bench) firstPackets(n int, flush bool) (int, time.Duration) {
	before, after := b.chain[:n], b.chain[:0]
	if flush {
		before, after = after, before
	}
	sum := time.Duration(0)
	for _, q := range b.qps {
		b.to(q, verbs.QPRTR)
		b.post(q, before)
		b.sent = time.Time{}
		start := time.Now()
		b.modify(q, verbs.QPRTS)
		b.post(q, after)
		b.w.Step(0)
		if b.sent.IsZero() {
			if n > 0 {
				panic("BUG: deferral: a published WQE did not leave")
			}
			b.sent = time.Now()
		}
		sum += b.sent.Sub(start)
		b.modify(q, verbs.QPReset)
	}
	return len(b.qps), sum
}

// Recv, Send, Caps and LocalAddr make a bench its own wire's link: nothing comes, and what
// goes is gone.
func (b *bench) Recv([]link.Rx) (int, error) { return 0, nil }

// Send: see Recv.
func (b *bench) Send(msgs []link.Tx) (int, error) {
	if b.sent.IsZero() {
		b.sent = time.Now()
	}
	return len(msgs), nil
}

// Caps: see Recv.
func (b *bench) Caps() link.Caps {
	return link.Caps{MaxSegs: 64, MaxBytes: 65000, ControlsID: true}
}

// LocalAddr: see Recv.
func (b *bench) LocalAddr() netip.AddrPort { return benchLocal }

// noUpcalls is a program that listens to nothing.
type noUpcalls struct{}

func (noUpcalls) ConnRequest(*wire.Conn, *cm.Event)             {}
func (noUpcalls) ConnEvent(*wire.Conn, verbs.EventType, []byte) {}
func (noUpcalls) QPEvent(*wire.QP, verbs.EventType)             {}
func (noUpcalls) Completions(lane *qp.CQ, _ bool)               { drain(lane) }

func drain(lane *qp.CQ) (n int) {
	var wcs [64]verbs.WC
	for {
		k := lane.Poll(wcs[:])
		if n += k; k == 0 {
			return n
		}
	}
}

// engines are two queue pairs back to back, without a wire.
type engines struct {
	env   [2]qp.Env
	q     [2]*qp.QP
	lane  [2]*qp.CQ
	out   qp.Out
	now   verbs.Instant
	sends []verbs.SendWR
	recvs []verbs.RecvWR
}

const (
	engineBatch  = 32
	engineRounds = 64
)

func newEngines() *engines {
	e := &engines{}
	memory, region := benchMemory()
	sge := []verbs.SGE{{Addr: region.Addr(), Length: 64, LKey: region.Key()}}
	for i := range e.q {
		e.env[i].Mem, e.lane[i] = memory, qp.NewCQ(128)
		q, err := qp.New(qp.Config{
			Num: verbs.QPN(2 + i), Type: verbs.RC, PD: 1, SendCQ: e.lane[i], RecvCQ: e.lane[i],
			Cap: verbs.QPCap{MaxSendWR: engineBatch, MaxRecvWR: engineBatch, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: -1},
		}, &e.env[i])
		check(err)
		e.q[i] = q
	}
	for i, q := range e.q {
		for s := verbs.QPInit; s <= verbs.QPRTS; s++ {
			a := benchAttr(s, e.q[1-i].Num())
			check(q.Modify(0, &a))
		}
		q.SetWindow(qp.NewWindow(qp.WindowConfig{Initial: 1 << 20, Max: 1 << 20}))
	}
	for range engineBatch {
		e.sends = append(e.sends, verbs.SendWR{Opcode: verbs.Send, SGList: sge})
		e.recvs = append(e.recvs, verbs.RecvWR{SGList: sge})
	}
	e.sends[engineBatch-1].Flags = verbs.Signaled
	return e
}

// messages sends batches of messages and polls all completions.
func (e *engines) messages() (int, time.Duration) {
	start := time.Now()
	for range engineRounds {
		_, _, err := e.q[1].PostRecv(e.recvs)
		check(err)
		_, _, err = e.q[0].PostSend(e.sends)
		check(err)
		for e.carry(0)+e.carry(1) > 0 {
		}
		if got := drain(e.lane[0]) + drain(e.lane[1]); got != 1+engineBatch {
			check(fmt.Errorf("%d completions of %d messages", got, engineBatch))
		}
	}
	return engineBatch * engineRounds, time.Since(start)
}

// carry moves what one engine has to send to the other, and makes completions visible.
func (e *engines) carry(from int) (n int) {
	e.now += 1000
	for e.q[from].Service(e.now) {
	}
	for e.q[from].NextPacket(e.now, &e.out) == qp.NextPacket {
		p := &e.out.Packet
		if p.Payload = nil; e.out.N > 0 {
			p.Payload = e.out.Gather[0]
		}
		e.q[1-from].HandlePacket(e.now, p)
		e.q[from].Sent(e.now)
		n++
	}
	for i := range e.env {
		for _, lane := range e.env[i].Dirty {
			lane.Commit()
		}
		e.env[i].Dirty = e.env[i].Dirty[:0]
	}
	return n
}
