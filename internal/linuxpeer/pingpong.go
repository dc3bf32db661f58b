package linuxpeer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// PingpongPort is the default TCP port of the ibv_*_pingpong programs.
const PingpongPort = 18515

// MaxPingpongQPs is the largest number of queue pairs of ibv_srq_pingpong.
const MaxPingpongQPs = 255

// srqLines is how many queue pairs ibv_srq_pingpong tells about, whether it has them or not.
const srqLines = 256

// Pingpong says what an ibv_rc_pingpong, ibv_uc_pingpong, ibv_ud_pingpong or ibv_srq_pingpong
// does. Both ends must be told the same.
type Pingpong struct {
	// Type is verbs.RC, verbs.UC or verbs.UD. Without RC nobody repeats a message that was
	// lost, and both ends wait; over UD a message must fit into a packet.
	Type  verbs.QPType
	Size  int // of a message in bytes (-s)
	Count int // of messages each way (-n), at least 1
	MTU   verbs.MTU
	// QPs, if not 0, makes it ibv_srq_pingpong, on RC: as many queue pairs (-q), up to
	// MaxPingpongQPs, with one shared receive queue. Count is of all of them together.
	QPs int
	// Depth is how many receives are posted (-r), each again as soon as a message took it; 0
	// means 64. A shared receive queue has two for each queue pair more.
	Depth int
	// Check looks at what comes (-c; ibv_srq_pingpong has none), which the peer must have
	// been told too.
	Check bool
	// Patience is how long nothing may happen before it ends with ErrSilence; 0 is for ever.
	Patience time.Duration
}

// ErrSilence: for too long nothing has come.
var ErrSilence = errors.New("nothing comes")

// PingpongResult is what a pingpong gave.
type PingpongResult struct {
	Sent, Received int
	// Elapsed is the time from the end of the exchange to the last message.
	Elapsed time.Duration
}

// What messages carry: fill, but for the first byte of each page, which is 0 if it is checked.
const (
	pingpongPage = 4096
	pingpongFill = 0x7b
)

// pingpong is one end on its way.
type pingpong struct {
	Pingpong
	cq      *transport.CQ
	srq     *transport.SRQ // or nil
	in, out *transport.MR
	qps     map[verbs.QPN]*pingpongQP
	order   []*pingpongQP // as told to the peer
	closers []func()
	result  PingpongResult
}

// pingpongQP is a queue pair and what it waits for until it sends again.
type pingpongQP struct {
	*RawQP
	sending, awaiting bool
}

func (o Pingpong) open(dev *transport.Device) (_ *pingpong, err error) {
	p := &pingpong{Pingpong: o, qps: make(map[verbs.QPN]*pingpongQP)}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	qps := max(o.QPs, 1)
	if p.Depth == 0 {
		p.Depth = 64
	}
	if o.QPs > 0 {
		p.Depth += 2 * qps
	}
	if p.in, err = dev.PD().RegisterMR(make([]byte, GRH(o.Type)+o.Size), verbs.LocalWrite); err != nil {
		return nil, err
	}
	p.atEnd(p.in.Close)
	if p.out, err = dev.PD().RegisterMR(make([]byte, o.Size), 0); err != nil {
		return nil, err
	}
	p.atEnd(p.out.Close)
	for i := range p.out.Bytes() {
		if i%pingpongPage != 0 || !o.Check {
			p.out.Bytes()[i] = pingpongFill
		}
	}
	if p.cq, err = dev.CreateCQ(2*p.Depth + 4*qps); err != nil {
		return nil, err
	}
	p.atEnd(p.cq.Close)
	size := verbs.QPCap{MaxSendWR: 4, MaxRecvWR: p.Depth}
	if o.QPs > 0 {
		if p.srq, err = dev.PD().CreateSRQ(transport.SRQConfig{MaxWR: p.Depth}); err != nil {
			return nil, err
		}
		p.atEnd(p.srq.Close)
		size.MaxRecvWR = 1
	}
	for range qps {
		q, err := NewRaw(dev, RawConfig{Type: o.Type, Cap: size, QKey: RawQKey, CQ: p.cq, SRQ: p.srq})
		if err != nil {
			return nil, err
		}
		p.closers = append(p.closers, q.Close)
		pq := &pingpongQP{RawQP: q, awaiting: true}
		p.qps[q.Num()], p.order = pq, append(p.order, pq)
	}
	for range p.Depth {
		if err := p.post(p.order[0]); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *pingpong) atEnd(end func() error) {
	p.closers = append(p.closers, func() { _ = end() }) // it was open
}

func (p *pingpong) close() {
	for i := range p.closers {
		p.closers[len(p.closers)-1-i]()
	}
}

// post posts a receive, where a message to q finds it.
func (p *pingpong) post(q *pingpongQP) error {
	wr := verbs.RecvWR{SGList: p.in.SGL(0, len(p.in.Bytes()))}
	if p.srq != nil {
		return p.srq.PostRecv(wr)
	}
	return q.PostRecv(wr)
}

func (p *pingpong) send(q *pingpongQP) error {
	q.sending, q.awaiting = true, true
	return q.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: p.out.SGL(0, p.Size)})
}

// play sends and takes the messages: a queue pair sends when its last message has left and one
// of the peer's has come, until enough have gone both ways. The client sends first.
func (p *pingpong) play(ctx context.Context, first bool) error {
	r := &p.result
	start := time.Now()
	defer func() { r.Elapsed = time.Since(start) }()
	patient, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	silence := time.AfterFunc(max(p.Patience, 1), func() {
		if p.Patience > 0 {
			giveUp(fmt.Errorf("%w, for %v", ErrSilence, p.Patience))
		}
	})
	defer silence.Stop()
	if first {
		for _, q := range p.order {
			if err := p.send(q); err != nil {
				return err
			}
		}
	}
	for r.Sent < p.Count || r.Received < p.Count {
		if p.Patience > 0 {
			silence.Reset(p.Patience)
		}
		wc, err := p.cq.Next(patient)
		if err != nil && wc.Status == verbs.WCSuccess && patient.Err() != nil {
			err = context.Cause(patient)
		}
		if r.Received >= p.Count && errors.Is(err, verbs.RetryExcErr) {
			// The peer leaves on our last message without a word. When its ack was lost
			// nobody can tell us any more; how the peer ended does.
			return nil
		}
		if err != nil {
			return fmt.Errorf("%d messages sent, %d received: %w", r.Sent, r.Received, err)
		}
		q := p.qps[wc.QPN]
		if wc.Opcode.IsRecv() {
			if err := p.take(&wc); err != nil {
				return fmt.Errorf("message %d: %w", r.Received, err)
			}
			r.Received++
			q.awaiting = false
			if err := p.post(q); err != nil {
				return err
			}
		} else {
			r.Sent++
			q.sending = false
		}
		if r.Sent < p.Count && !q.sending && !q.awaiting {
			if err := p.send(q); err != nil {
				return err
			}
		}
	}
	return nil
}

// take checks a message.
func (p *pingpong) take(wc *verbs.WC) error {
	if got := int(wc.ByteLen) - GRH(p.Type); got != p.Size {
		return fmt.Errorf("it has %d bytes, want %d", got, p.Size)
	}
	if !p.Check || p.srq != nil {
		return nil
	}
	// ibv_rc_pingpong -c clears one byte of each page at the client and sends back from the
	// buffer it receives into. Nothing comes before we answer, so the buffer is ours.
	for i, b := range p.in.Bytes()[GRH(p.Type):] {
		if i%pingpongPage != 0 && b != pingpongFill || i%pingpongPage == 0 && b != 0 {
			return fmt.Errorf("byte %d is %#x", i, b)
		}
	}
	clear(p.in.Bytes())
	return nil
}

// over plays over a TCP connection, which it closes.
func (p *pingpong) over(ctx context.Context, c net.Conn, client bool) (PingpongResult, error) {
	defer c.Close()
	release := Bound(ctx, c)
	defer release()
	var own []End
	for _, q := range p.order {
		if q.Own.GID.IsUnspecified() {
			// The device is bound to all addresses: the one that leads to the peer's TCP.
			if local, ok := c.LocalAddr().(*net.TCPAddr); ok {
				q.Own.GID = local.AddrPort().Addr().Unmap()
			}
		}
		own = append(own, q.Own)
	}
	lines := 1
	if p.QPs > 0 {
		lines = srqLines
	}
	err := introduce(c, client, lines, own, func(peers []End) error {
		for i, q := range p.order {
			if err := q.Connect(peers[i], p.MTU); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return PingpongResult{}, err
	}
	err = p.play(ctx, client)
	return p.result, err
}

// PingpongClient is "ibv_rc_pingpong HOST", or one of the others. server is the other end's TCP
// address. The result is valid with an error too.
func PingpongClient(ctx context.Context, dev *transport.Device, server netip.AddrPort, o Pingpong) (PingpongResult, error) {
	p, err := o.open(dev)
	if err != nil {
		return PingpongResult{}, err
	}
	defer p.close()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", server.String())
	if err != nil {
		return PingpongResult{}, err
	}
	return p.over(ctx, c, true)
}

// PingpongServer is ibv_rc_pingpong without HOST, or one of the others, for one client, who is
// expected at ln. The result is valid with an error too.
func PingpongServer(ctx context.Context, dev *transport.Device, ln net.Listener, o Pingpong) (PingpongResult, error) {
	p, err := o.open(dev)
	if err != nil {
		return PingpongResult{}, err
	}
	defer p.close()
	c, err := Accept(ctx, ln)
	if err != nil {
		return PingpongResult{}, err
	}
	return p.over(ctx, c, false)
}
