package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench/floor"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// A ping-pong on one queue pair of a device that has many more, connected ones that do nothing.
// Connecting them takes a while, so the two ends live through all rounds: what the end that
// drives reads is a line for each measurement.

// idleOrder is what an end is told, as JSON.
type idleOrder struct {
	Params      floor.Params
	Connections int            // idle ones
	To          netip.AddrPort // the end that serves; invalid for that one
}

// idleSays is what an end prints, as JSON: where it listens, if it serves; when the connections
// are there what they took; then a result for each line read, if it drives.
type idleSays struct {
	Listens netip.AddrPort
	Idle    *idleCost
	Result  *floor.Result
}

// idleCost is what the connections took at one end.
type idleCost struct {
	Setup     time.Duration
	Heap, RSS int64 // bytes, all together
}

const (
	// dialing is how many connections are being made at a time: each waits for its answer.
	dialing = 32
	// idleLimit is how long connecting may take.
	idleLimit = 60 * time.Second
	// idleMemory is what must be available for a connection, both ends with what the
	// collector leaves over, in bytes.
	idleMemory = 24 << 10
)

// idleEnd is one end, which compare starts.
func (a *app) idleEnd() *cobra.Command {
	return a.end("idle-end", func(ctx context.Context, args []string, stdout io.Writer) error {
		var o idleOrder
		if len(args) != 1 {
			return errors.New("idle-end takes one argument, which perf compare makes")
		}
		if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
			return err
		}
		out := json.NewEncoder(stdout)
		if o.To.IsValid() {
			return driveIdle(ctx, &o, out)
		}
		return serveIdle(ctx, &o, out)
	})
}

// memoryNow is what is in use when garbage has been collected and given back.
func memoryNow() (heap, rss int64) {
	runtime.GC() // twice: finalizers and pools hold things back
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), resident()
}

// idleParam is what an idle connection is made with: small queues, one completion queue for
// all of them.
func (v *verbsLoop) idleParam() (transport.ConnParam, error) {
	cq, err := v.dev.CreateCQ(64)
	return transport.ConnParam{
		SendCQ: cq, RecvCQ: cq,
		Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: -1},
	}, err
}

// connectIdle calls connect n times, dialing at a time, and says what it took.
func connectIdle(n int, connect func() (*transport.QP, error)) ([]*transport.QP, *idleCost, error) {
	heap, rss := memoryNow()
	begin := time.Now()
	qps := make([]*transport.QP, n)
	errs := make([]error, min(dialing, n))
	var wg sync.WaitGroup
	for w := range errs {
		wg.Go(func() {
			for i := w; i < n && errs[w] == nil; i += len(errs) {
				qps[i], errs[w] = connect()
			}
		})
	}
	wg.Wait()
	cost := &idleCost{Setup: time.Since(begin)}
	cost.Heap, cost.RSS = memoryNow()
	cost.Heap, cost.RSS = cost.Heap-heap, cost.RSS-rss
	return qps, cost, errors.Join(errs...)
}

func serveIdle(ctx context.Context, o *idleOrder, out *json.Encoder) (err error) {
	v, err := newVerbsLoop(o.Params, o.Params.Places[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, v.dev.Close()) }()
	v.rests = true
	idle, err := v.idleParam()
	if err != nil {
		return err
	}
	ln, err := v.dev.Listen(service)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := out.Encode(idleSays{Listens: v.dev.LocalAddr()}); err != nil {
		return err
	}
	accept := func(p transport.ConnParam) (*transport.QP, error) {
		req, err := ln.Next(ctx)
		if err != nil {
			return nil, err
		}
		qp, err := req.Accept(ctx, p)
		if err != nil {
			return nil, err
		}
		return qp, qp.Established(ctx)
	}
	if v.small, err = accept(v.param(0, true)); err != nil { // the first is the busy one
		return err
	}
	qps, cost, err := connectIdle(o.Connections, func() (*transport.QP, error) { return accept(idle) })
	if err != nil {
		return err
	}
	if err := out.Encode(idleSays{Idle: cost}); err != nil {
		return err
	}
	err = v.run(ctx, func(wc *verbs.WC) bool {
		if wc.WRID&wrKind == wrSmallRecv {
			v.answer(wc)
		}
		return true
	})
	runtime.KeepAlive(qps)
	return err
}

func driveIdle(ctx context.Context, o *idleOrder, out *json.Encoder) (err error) {
	v, err := newVerbsLoop(o.Params, o.Params.Places[1])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, v.dev.Close()) }()
	idle, err := v.idleParam()
	if err != nil {
		return err
	}
	if v.small, err = v.dial(ctx, o.To, v.param(0, false)); err != nil {
		return err
	}
	qps, cost, err := connectIdle(o.Connections, func() (*transport.QP, error) { return v.dial(ctx, o.To, idle) })
	if err != nil {
		return err
	}
	if err := out.Encode(idleSays{Idle: cost}); err != nil {
		return err
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		r, err := v.measure(ctx)
		if err != nil {
			return err
		}
		if err := out.Encode(idleSays{Result: &r}); err != nil {
			return err
		}
	}
	runtime.KeepAlive(qps)
	return nil
}

// idlePair are the two ends, from the first measurement to the last.
type idlePair struct {
	connections int
	ends        [2]*exec.Cmd // as far as they have been started
	said        [2]*json.Decoder
	complaints  [2]bytes.Buffer
	lines       io.Writer
	cost        [2]idleCost
	kill        context.CancelFunc
	err         error // why there are none
}

// beside measures a ping-pong beside n idle connections, which startIdle has made.
func (e *arena) beside(n int) (map[string]float64, error) {
	p := e.idle[n]
	if p.err != nil {
		return nil, p.err
	}
	r, err := p.measure(startGrace + e.c.each)
	if err != nil {
		return nil, err
	}
	v, err := values(r)
	if err == nil && n > 0 {
		// Of the two ends the dearer one.
		perEnd := func(a, b int64) float64 { return float64(max(a, b)) / 1024 / float64(n) }
		v["idle"], v["setup_sec"] = float64(n), p.cost[1].Setup.Seconds()
		v["heap"] = perEnd(p.cost[0].Heap, p.cost[1].Heap)
		if m := perEnd(p.cost[0].RSS, p.cost[1].RSS); m > 0 {
			v[rss] = m
		}
	}
	return v, err
}

// startIdle starts both ends of a pair and has them connect.
func (e *arena) startIdle(ctx context.Context, n int) {
	p := &idlePair{connections: n}
	e.idle[n] = p
	if have, need := available(), int64(n)*idleMemory; have > 0 && have < need {
		p.err = skipf("%d connections need %d MiB of memory", n, need>>20)
		return
	}
	ctx, p.kill = context.WithCancel(ctx)
	o := idleOrder{Params: floor.Params{Kind: floor.PingPong, Size: 64, Duration: e.c.each, Places: e.places}, Connections: p.connections}
	for i := range o.Params.Places {
		o.Params.Places[i].Addr = loopback[i]
	}
	p.err = p.within(idleLimit, func() error {
		hello, err := p.start(ctx, e, 0, o)
		if err != nil {
			return err
		}
		o.To = hello.Listens
		if _, err := p.start(ctx, e, 1, o); err != nil {
			return err
		}
		says, err := p.hear(0)
		if err == nil && says.Idle == nil {
			err = errors.New("the end that serves did not say what its connections took")
		}
		if err == nil {
			p.cost[0] = *says.Idle
		}
		return err
	})
	for _, cmd := range p.ends {
		if cmd != nil && cmd.Process != nil {
			e.quiet.pids = append(e.quiet.pids, cmd.Process.Pid)
		}
	}
}

// start starts an end and waits for the first thing that it says.
func (p *idlePair) start(ctx context.Context, e *arena, end int, o idleOrder) (says idleSays, err error) {
	order, err := json.Marshal(&o)
	if err != nil {
		return says, err
	}
	cmd := exec.CommandContext(ctx, e.exe, "idle-end", string(order))
	cmd.WaitDelay = time.Second
	cmd.Stderr = &p.complaints[end]
	out, err := cmd.StdoutPipe()
	if err != nil {
		return says, err
	}
	if end == 1 {
		if p.lines, err = cmd.StdinPipe(); err != nil {
			return says, err
		}
	}
	if err := e.places[end].Start(cmd); err != nil {
		return says, err
	}
	p.ends[end], p.said[end] = cmd, json.NewDecoder(out)
	if says, err = p.hear(end); err == nil && says.Idle != nil {
		p.cost[end] = *says.Idle
	}
	return says, err
}

// hear reads what an end says next.
func (p *idlePair) hear(end int) (says idleSays, err error) {
	if err := p.said[end].Decode(&says); err != nil {
		p.kill()
		_ = p.ends[end].Wait() // or its complaint may still be coming
		p.ends[end] = nil
		return says, fmt.Errorf("%d connections: %s", p.connections, lastLine(p.complaints[end].String(), err))
	}
	return says, nil
}

// within kills both ends if f takes too long.
func (p *idlePair) within(d time.Duration, f func() error) error {
	defer time.AfterFunc(d, p.kill).Stop()
	return f()
}

// measure has the end that drives measure once.
func (p *idlePair) measure(limit time.Duration) (r floor.Result, err error) {
	err = p.within(limit, func() error {
		if _, err := io.WriteString(p.lines, "\n"); err != nil {
			return err
		}
		says, err := p.hear(1)
		if err == nil && says.Result == nil {
			err = errors.New("the end that drives did not measure")
		}
		if err == nil {
			r = *says.Result
		}
		return err
	})
	p.err = err // it will not answer again
	return r, err
}

// endIdle ends all of them.
func (e *arena) endIdle() {
	for n, p := range e.idle {
		if p.kill != nil {
			p.kill()
		}
		for _, cmd := range p.ends {
			if cmd != nil {
				_ = cmd.Wait() // killed
			}
		}
		delete(e.idle, n)
	}
	e.quiet.pids = nil
}
