package interop

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// PerftestPort is perftest's default port, of TCP and of the connection manager.
const PerftestPort = 18515

// Perftest says what a perftest program does. Both ends must be told the same.
type Perftest struct {
	// Test is the program's name without "ib_": send_bw, send_lat, write_bw, write_lat,
	// read_bw, read_lat, atomic_bw or atomic_lat.
	Test string
	// Type is the service (-c): verbs.RC, which 0 means too, or without CM verbs.UC, for SEND
	// and WRITE, or verbs.UD, for SEND of what fits into a packet. Without RC a lost message
	// leaves both waiting, and there must be no more of them than receives are posted.
	Type verbs.QPType
	Size int // of a message in bytes (-s); atomics always have 8
	// Count of messages or operations (-n), at least 5.
	Count int
	// Swap makes atomics compare and swap instead of fetch and add (-A).
	Swap bool
	// MTU is the path MTU. Programs that use no connection manager agree on the smaller of
	// both; 0 means the link's.
	MTU verbs.MTU
	// CM says that the connection manager connects the queue pairs (-R) and that one of
	// them is the side channel, instead of TCP.
	CM bool
	// Ready, when not nil, makes a client with CM wait until the server listens for the data
	// connection. It does so anew, and says it nowhere: without Ready the client just tries.
	// Of a REQ that came too early and was repeated, one copy may then be refused and the
	// other accepted.
	Ready func(context.Context) error
}

// perftestDepth is how many requests are under way (-t), perftestRecvs how many receives are
// posted (-r).
const (
	perftestDepth = 64
	perftestRecvs = 256
)

// perftestReads is how many READs and atomics we take at a time.
const perftestReads = 16

// verb is the first part of the test's name.
func (o Perftest) verb() string { v, _, _ := strings.Cut(o.Test, "_"); return v }

// latency says that the test measures latency.
func (o Perftest) latency() bool { return strings.HasSuffix(o.Test, "_lat") }

// resolve checks the options.
func (o Perftest) resolve() (Perftest, error) {
	if o.Type == 0 {
		o.Type = verbs.RC
	}
	if v := o.verb(); o.Type != verbs.RC && (o.CM || v != "send" && (v != "write" || o.Type != verbs.UC)) {
		return o, fmt.Errorf("there is no ib_%s over %v", o.Test, o.Type)
	}
	switch o.Test {
	case "atomic_bw", "atomic_lat":
		o.Size = 8
	case "send_bw", "send_lat", "write_bw", "write_lat", "read_bw", "read_lat":
	default:
		return o, fmt.Errorf("no perftest program is called ib_%s", o.Test)
	}
	if o.Count < 5 || o.Size < 1 {
		return o, fmt.Errorf("perftest takes no %d messages of %d bytes", o.Count, o.Size)
	}
	return o, nil
}

// perftest is one end of a test on its way.
type perftest struct {
	Perftest
	dev    *transport.Device
	client bool
	side   side
	// in is what the peer reaches: it begins at the address that the record names. out is
	// what we send from and READ into.
	in, out *transport.MR
	e       *linuxpeer.Endpoint // the data queue pair
	own     linuxpeer.End       // what the record says about us
	peer    linuxpeer.End       // and about the peer
	closers []func()
}

func (p *perftest) atEnd(f func()) { p.closers = append(p.closers, f) }

func (p *perftest) close() {
	for len(p.closers) > 0 {
		last := len(p.closers) - 1
		p.closers[last]()
		p.closers = p.closers[:last]
	}
}

// buffers registers memory. The WRITEs of a test move through a page when they are short.
func (p *perftest) buffers() error {
	size := max(linuxpeer.GRH(p.Type)+p.Size, 4096)
	in, err := p.dev.PD().RegisterMR(make([]byte, size), verbs.LocalWrite|verbs.RemoteWrite|verbs.RemoteRead|verbs.RemoteAtomic)
	if err != nil {
		return err
	}
	p.atEnd(func() { _ = in.Close() })
	out, err := p.dev.PD().RegisterMR(make([]byte, size), verbs.LocalWrite)
	if err != nil {
		return err
	}
	p.atEnd(func() { _ = out.Close() })
	p.in, p.out = in, out
	return nil
}

// caps are the sizes of the data queue pair.
func (p *perftest) caps() verbs.QPCap {
	return verbs.QPCap{MaxSendWR: perftestDepth, MaxRecvWR: perftestRecvs}
}

// recvs are the receives of a test that SENDs; others have none.
func (p *perftest) recvs() (wrs []verbs.RecvWR) {
	if p.verb() == "send" {
		for range min(perftestRecvs, p.Count) {
			wrs = append(wrs, p.recv())
		}
	}
	return wrs
}

func (p *perftest) recv() verbs.RecvWR {
	return verbs.RecvWR{SGList: p.in.SGL(0, linuxpeer.GRH(p.Type)+p.Size)}
}

// PerftestClient is "ib_TEST HOST". server is the other end's address, of TCP or, with CM, of
// its connection manager.
func PerftestClient(ctx context.Context, dev *transport.Device, server netip.AddrPort, o Perftest) error {
	o, err := o.resolve()
	if err != nil {
		return err
	}
	p := &perftest{Perftest: o, dev: dev, client: true}
	defer p.close()
	if err := p.buffers(); err != nil {
		return err
	}
	if o.CM {
		return p.clientCM(ctx, server)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", server.String())
	if err != nil {
		return err
	}
	return p.overTCP(ctx, c)
}

// PerftestServer is "ib_TEST" for one client. With CM the client is expected at ln, else at tcp.
func PerftestServer(ctx context.Context, dev *transport.Device, ln *transport.Listener, tcp net.Listener, o Perftest) error {
	o, err := o.resolve()
	if err != nil {
		return err
	}
	p := &perftest{Perftest: o, dev: dev}
	defer p.close()
	if err := p.buffers(); err != nil {
		return err
	}
	if o.CM {
		return p.serverCM(ctx, ln)
	}
	c, err := linuxpeer.Accept(ctx, tcp)
	if err != nil {
		return err
	}
	return p.overTCP(ctx, c)
}

// overTCP is a whole test whose side channel is TCP; the program drives the queue pair itself.
func (p *perftest) overTCP(ctx context.Context, c net.Conn) error {
	p.atEnd(func() { _ = c.Close() })
	defer linuxpeer.Bound(ctx, c)()
	p.side = tcpSide{c}
	mtu, err := p.hello(ctx)
	if err != nil {
		return err
	}
	q, err := linuxpeer.NewRaw(p.dev, linuxpeer.RawConfig{
		Type: p.Type, Cap: p.caps(), Access: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic, QKey: linuxpeer.RawQKey,
	})
	if err != nil {
		return err
	}
	p.atEnd(q.Close)
	q.Own.Reads = perftestReads
	p.e, p.own = &q.Endpoint, q.Own
	p.own.Addr, p.own.RKey = p.in.Addr(), p.in.RKey()
	for _, wr := range p.recvs() {
		if err := q.PostRecv(wr); err != nil {
			return err
		}
	}
	for i := range p.handshakes() {
		if err := p.handshake(ctx); err != nil {
			return err
		}
		if i == 0 {
			if err := q.Connect(p.peer, mtu); err != nil {
				return err
			}
		}
	}
	if err := p.data(ctx); err != nil {
		return err
	}
	if err := p.tail(ctx); err != nil {
		return err
	}
	if p.Test != "write_lat" {
		// Written by both and read by none: the peer may be gone.
		_ = p.side.send(ctx, []byte("done\x00"))
	}
	return nil
}

// controlParam is the control connection: one receive, no READs.
func (p *perftest) controlParam(buf *transport.MR) transport.ConnParam {
	return transport.ConnParam{
		Recv:               []verbs.RecvWR{{SGList: buf.SGL(0, cmRecord)}},
		ResponderResources: -1, InitiatorDepth: -1, MTU: p.MTU,
	}
}

// dataParam is the data connection.
func (p *perftest) dataParam() transport.ConnParam {
	c := transport.ConnParam{
		Recv: p.recvs(), Cap: p.caps(), MTU: p.MTU, ResponderResources: -1, InitiatorDepth: -1, MinRNRTimer: 640 * time.Microsecond,
	}
	if v := p.verb(); v == "read" || v == "atomic" {
		c.ResponderResources, c.InitiatorDepth = perftestReads, perftestReads
	}
	return c
}

// controlBuffer is the receive buffer of a control connection.
func (p *perftest) controlBuffer() (*transport.MR, error) {
	buf, err := p.dev.PD().RegisterMR(make([]byte, cmRecord), verbs.LocalWrite)
	if err == nil {
		p.atEnd(func() { _ = buf.Close() })
	}
	return buf, err
}

// clientCM is a client's whole test with the connection manager.
func (p *perftest) clientCM(ctx context.Context, server netip.AddrPort) error {
	buf, err := p.controlBuffer()
	if err != nil {
		return err
	}
	control, err := p.dev.Dial(ctx, server, p.controlParam(buf))
	if err != nil {
		return fmt.Errorf("control connection: %w", err)
	}
	p.atEnd(func() { _ = control.Close() })
	p.side = &cmSide{e: &linuxpeer.Endpoint{QP: control}, buf: buf}
	if _, err := p.hello(ctx); err != nil {
		return err
	}
	zeros := make([]byte, cmRecord)
	if _, err := p.exchange(ctx, zeros); err != nil {
		return err
	}
	if p.Ready != nil {
		if err := p.Ready(ctx); err != nil {
			return err
		}
	}
	qp, err := p.dialData(ctx, server)
	if err != nil {
		return fmt.Errorf("data connection: %w", err)
	}
	p.atEnd(func() { _ = qp.Close() })
	p.useCM(qp)
	if _, err := p.exchange(ctx, zeros); err != nil {
		return err
	}
	return p.withCM(ctx)
}

// dialData connects the data queue pair. A server listens anew for it, and may be late.
func (p *perftest) dialData(ctx context.Context, server netip.AddrPort) (*transport.QP, error) {
	const pause = 20 * time.Millisecond
	for {
		qp, err := p.dev.Dial(ctx, server, p.dataParam())
		var rej *transport.RejectError
		if !errors.As(err, &rej) || rej.Reason != verbs.RejectInvalidServiceID {
			return qp, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// serverCM is a server's whole test with the connection manager.
func (p *perftest) serverCM(ctx context.Context, ln *transport.Listener) error {
	buf, err := p.controlBuffer()
	if err != nil {
		return err
	}
	accept := func(c transport.ConnParam) (*transport.QP, error) {
		req, err := ln.Next(ctx)
		if err != nil {
			return nil, err
		}
		qp, err := req.Accept(ctx, c)
		if err == nil {
			p.atEnd(func() { _ = qp.Close() })
		}
		return qp, err
	}
	control, err := accept(p.controlParam(buf))
	if err != nil {
		return fmt.Errorf("control connection: %w", err)
	}
	e := &linuxpeer.Endpoint{QP: control}
	p.side = &cmSide{e: e, buf: buf}
	if _, err := p.hello(ctx); err != nil {
		return err
	}
	zeros := make([]byte, cmRecord)
	if _, err := p.exchange(ctx, zeros); err != nil {
		return err
	}
	qp, err := accept(p.dataParam())
	if err != nil {
		return fmt.Errorf("data connection: %w", err)
	}
	p.useCM(qp)
	if _, err := p.exchange(ctx, zeros); err != nil {
		return err
	}
	if err := p.withCM(ctx); err != nil {
		return err
	}
	return p.e.Disconnected(ctx)
}

func (p *perftest) useCM(qp *transport.QP) {
	p.e = &linuxpeer.Endpoint{QP: qp}
	p.own = linuxpeer.End{QPN: qp.Num(), GID: p.dev.LocalAddr().Addr(), Reads: 1, Addr: p.in.Addr(), RKey: p.in.RKey()}
	if v := p.verb(); v == "read" || v == "atomic" {
		p.own.Reads = perftestReads
	}
}

// withCM is the test itself, once all is connected.
func (p *perftest) withCM(ctx context.Context) error {
	for range p.handshakes() {
		if err := p.handshake(ctx); err != nil {
			return err
		}
	}
	if err := p.data(ctx); err != nil {
		return err
	}
	return p.tail(ctx)
}

// data is what is measured.
func (p *perftest) data(ctx context.Context) (err error) {
	switch {
	case p.Test == "send_lat":
		err = p.alternate(ctx, p.client, p.sendOne, p.takeOne)
	case p.Test == "write_lat":
		err = p.alternate(ctx, !p.client, p.writeOne, p.watchOne)
	case p.Test == "send_bw" && !p.client:
		for n := 0; n < p.Count && err == nil; n++ {
			err = p.takeOne(ctx, n)
		}
	case p.client:
		err = p.stream(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", p.Test, err)
	}
	return nil
}

// alternate sends and takes messages in turn.
func (p *perftest) alternate(ctx context.Context, first bool, send, take func(context.Context, int) error) error {
	for n := range p.Count {
		if first {
			if err := send(ctx, n); err != nil {
				return err
			}
		}
		if err := take(ctx, n); err != nil {
			return err
		}
		if !first {
			if err := send(ctx, n); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *perftest) sendOne(ctx context.Context, n int) error {
	if err := p.e.Do(ctx, verbs.SendWR{Opcode: verbs.Send, SGList: p.out.SGL(0, p.Size)}); err != nil {
		return fmt.Errorf("message %d: %w", n, err)
	}
	return nil
}

// takeOne waits for a message and keeps a receive posted for each that is still to come.
func (p *perftest) takeOne(ctx context.Context, n int) error {
	if err := p.e.Expect(ctx, p.Size); err != nil {
		return fmt.Errorf("message %d: %w", n, err)
	}
	if n+perftestRecvs < p.Count {
		return p.e.PostRecv(p.recv())
	}
	return nil
}

// writeOne WRITEs message n, whose last byte is its number counted from 1.
func (p *perftest) writeOne(ctx context.Context, n int) error {
	p.out.Bytes()[p.Size-1] = byte(n + 1)
	err := p.e.Do(ctx, verbs.SendWR{
		Opcode: verbs.RDMAWrite, SGList: p.out.SGL(0, p.Size), RemoteAddr: p.peer.Addr, RKey: p.peer.RKey,
	})
	if errors.Is(err, verbs.RetryExcErr) && p.client && n == p.Count-1 {
		// The server leaves on our last message without a word: see play.
		return nil
	}
	if err != nil {
		return fmt.Errorf("message %d: %w", n, err)
	}
	return nil
}

// watchOne watches memory until message n has been written there.
func (p *perftest) watchOne(ctx context.Context, n int) error {
	for p.in.Placed() <= uint64(n) {
		if p.e.State() == verbs.QPErr {
			return fmt.Errorf("message %d: the connection has ended", n)
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("message %d: %w", n, err)
		}
		runtime.Gosched()
	}
	if got := p.in.Bytes()[p.Size-1]; got != byte(n+1) {
		return fmt.Errorf("message %d ends with %d, want %d", n, got, byte(n+1))
	}
	return nil
}

// request is request n of a stream. Short ones move through a page of the peer's.
func (p *perftest) request(n int) verbs.SendWR {
	const line, page = 64, 4096
	step, at := (p.Size+line-1)/line*line, 0
	if p.Size <= page/2 {
		at = n * step % (page / step * step)
	}
	wr := verbs.SendWR{WRID: uint64(n), Flags: verbs.Signaled, SGList: p.out.SGL(0, p.Size), RemoteAddr: p.peer.Addr + uint64(at), RKey: p.peer.RKey}
	switch p.verb() {
	case "send":
		wr.Opcode, wr.RemoteAddr, wr.RKey = verbs.Send, 0, 0
	case "write":
		wr.Opcode = verbs.RDMAWrite
	case "read":
		wr.Opcode = verbs.RDMARead
	case "atomic":
		wr.SGList = p.out.SGL(at, 8)
		if wr.Opcode, wr.CompareAdd = verbs.AtomicFetchAdd, 1; p.Swap {
			wr.Opcode, wr.CompareAdd = verbs.AtomicCmpAndSwp, 0
		}
	}
	return wr
}

// stream keeps requests under way until all are done. With -R and without, the client's
// latency tests have one at a time.
func (p *perftest) stream(ctx context.Context) error {
	window := perftestDepth
	if p.latency() {
		window = 1
	}
	if p.verb() == "atomic" {
		window = min(window, 4096/64) // as many as there are addresses, so that no answer overwrites another
	}
	last := map[int]uint64{} // by offset: what a fetch and add found there
	for posted, done := 0, 0; done < p.Count; {
		if posted < p.Count && posted-done < window {
			if err := p.e.PostSend(p.request(posted)); err != nil {
				return fmt.Errorf("request %d: %w", posted, err)
			}
			posted++
			continue
		}
		wc, err := p.e.Sent(ctx)
		if err != nil {
			return fmt.Errorf("request %d: %w", done, err)
		}
		if wc.WRID != uint64(done) {
			return fmt.Errorf("completion %d is of request %d", done, wc.WRID)
		}
		if p.verb() == "atomic" && !p.Swap {
			at := done % 64 * 64
			got := binary.NativeEndian.Uint64(p.out.Bytes()[at:])
			if before, again := last[at]; again && got != before+1 {
				return fmt.Errorf("fetch and add %d found %#x, want %#x", done, got, before+1)
			}
			last[at] = got
		}
		done++
	}
	return nil
}
