package interop

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// SRQPingpong says what an ibv_srq_pingpong does. Both ends must be told the same.
type SRQPingpong struct {
	QPs   int // -q, 1 to 255
	Size  int // of a message in bytes (-s)
	Count int // of messages each way (-n), of all queue pairs together
	MTU   verbs.MTU
}

// srqLines is how many queue pairs the program tells about, whether it has them or not.
const srqLines = 256

// srqPingpong is one end on its way.
type srqPingpong struct {
	SRQPingpong
	cq      *transport.CQ
	srq     *transport.SRQ
	in, out *transport.MR
	qps     map[verbs.QPN]*srqQP
	order   []*srqQP // as told to the peer
	closers []func()
}

// srqQP is a queue pair and what it waits for until it sends again.
type srqQP struct {
	*rawQP
	sending, awaiting bool
}

func (o SRQPingpong) open(dev *transport.Device) (_ *srqPingpong, err error) {
	p := &srqPingpong{SRQPingpong: o, qps: make(map[verbs.QPN]*srqQP)}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	depth := depth + 2*o.QPs
	if p.in, err = dev.PD().RegisterMR(make([]byte, o.Size), verbs.LocalWrite); err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() { _ = p.in.Close() })
	if p.out, err = dev.PD().RegisterMR(make([]byte, o.Size), 0); err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() { _ = p.out.Close() })
	if p.cq, err = dev.CreateCQ(2*depth + 4*o.QPs); err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() { _ = p.cq.Close() })
	if p.srq, err = dev.PD().CreateSRQ(transport.SRQConfig{MaxWR: depth}); err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() { _ = p.srq.Close() })
	for range depth {
		if err := p.srq.PostRecv(p.recv()); err != nil {
			return nil, err
		}
	}
	for range o.QPs {
		q, err := newRaw(dev, rawConfig{typ: verbs.RC, size: verbs.QPCap{MaxSendWR: 2, MaxRecvWR: 1}, cq: p.cq, srq: p.srq})
		if err != nil {
			return nil, err
		}
		p.closers = append(p.closers, q.close)
		s := &srqQP{rawQP: q, awaiting: true}
		p.qps[q.Num()], p.order = s, append(p.order, s)
	}
	return p, nil
}

func (p *srqPingpong) recv() verbs.RecvWR { return verbs.RecvWR{SGList: p.in.SGL(0, p.Size)} }

func (p *srqPingpong) close() {
	for i := range p.closers {
		p.closers[len(p.closers)-1-i]()
	}
}

// write tells the peer about all queue pairs.
func (p *srqPingpong) write(c net.Conn) error {
	var b []byte
	for i := range srqLines {
		e := end{gid: netip.IPv6Unspecified()}
		if i < len(p.order) {
			e = p.order[i].own
		}
		b = append(b, encodePingpong(e)...)
	}
	_, err := c.Write(b)
	return err
}

// read learns about the peer's.
func (p *srqPingpong) read(c net.Conn) ([]end, error) {
	b := make([]byte, srqLines*pingpongLine)
	if _, err := io.ReadFull(c, b); err != nil {
		return nil, fmt.Errorf("the peer's addresses: %w", err)
	}
	var peers []end
	for i := range p.order {
		e, err := decodePingpong(b[i*pingpongLine:][:pingpongLine])
		if err != nil {
			return nil, err
		}
		peers = append(peers, e)
	}
	return peers, nil
}

func (p *srqPingpong) connect(peers []end) error {
	for i, q := range p.order {
		if err := q.connect(peers[i], p.MTU); err != nil {
			return err
		}
	}
	return nil
}

func (p *srqPingpong) send(q *srqQP) error {
	q.sending, q.awaiting = true, true
	return q.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: p.out.SGL(0, p.Size)})
}

// play sends on each queue pair when its last message has left and one of the peer's has come,
// until enough have gone both ways.
func (p *srqPingpong) play(ctx context.Context, first bool) error {
	if first {
		for _, q := range p.order {
			if err := p.send(q); err != nil {
				return err
			}
		}
	}
	for sent, got := 0, 0; sent < p.Count || got < p.Count; {
		wc, err := p.cq.Next(ctx)
		if err != nil {
			return fmt.Errorf("%d sent, %d received: %w", sent, got, err)
		}
		q := p.qps[wc.QPN]
		if wc.Opcode.IsRecv() {
			if int(wc.ByteLen) != p.Size {
				return fmt.Errorf("a message of %d bytes, want %d", wc.ByteLen, p.Size)
			}
			got, q.awaiting = got+1, false
			if err := p.srq.PostRecv(p.recv()); err != nil {
				return err
			}
		} else {
			sent, q.sending = sent+1, false
		}
		if sent < p.Count && !q.sending && !q.awaiting {
			if err := p.send(q); err != nil {
				return err
			}
		}
	}
	return nil
}

// SRQPingpongClient is "ibv_srq_pingpong HOST". server is the other end's TCP address.
func SRQPingpongClient(ctx context.Context, dev *transport.Device, server netip.AddrPort, o SRQPingpong) error {
	p, err := o.open(dev)
	if err != nil {
		return err
	}
	defer p.close()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", server.String())
	if err != nil {
		return err
	}
	defer c.Close()
	defer bound(ctx, c)()
	if err := p.write(c); err != nil {
		return err
	}
	peers, err := p.read(c)
	if err != nil {
		return err
	}
	if _, err := c.Write([]byte("done\x00")); err != nil {
		return err
	}
	if err := p.connect(peers); err != nil {
		return err
	}
	return p.play(ctx, true)
}

// SRQPingpongServer is ibv_srq_pingpong for one client, who is expected at ln.
func SRQPingpongServer(ctx context.Context, dev *transport.Device, ln net.Listener, o SRQPingpong) error {
	p, err := o.open(dev)
	if err != nil {
		return err
	}
	defer p.close()
	c, err := accept(ctx, ln)
	if err != nil {
		return err
	}
	defer c.Close()
	defer bound(ctx, c)()
	peers, err := p.read(c)
	if err != nil {
		return err
	}
	if err := p.connect(peers); err != nil {
		return err
	}
	if err := p.write(c); err != nil {
		return err
	}
	var done [5]byte
	if _, err := io.ReadFull(c, done[:]); err != nil {
		return fmt.Errorf("done: %w", err)
	}
	return p.play(ctx, false)
}
