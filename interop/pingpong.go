package interop

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// PingpongPort is the default TCP port of the ibv_*_pingpong programs.
const PingpongPort = 18515

// Pingpong says what an ibv_rc_pingpong, ibv_uc_pingpong or ibv_ud_pingpong does. Both ends
// must be told the same.
type Pingpong struct {
	// Type is verbs.RC, verbs.UC or verbs.UD. Without RC a lost message leaves both waiting
	// for ever; over UD a message must fit into a packet.
	Type  verbs.QPType
	Size  int // of a message in bytes (-s)
	Count int // of messages each way (-n)
	MTU   verbs.MTU
}

// depth is the number of receives (-r), reposted one by one.
const depth = 64

// pingpongPage is how far apart the bytes are that -c checks, and that must be 0; the others
// are 0x7b.
const pingpongPage = 4096

// pingpong is one end on its way.
type pingpong struct {
	Pingpong
	qp      *rawQP
	in, out *transport.MR
}

func (o Pingpong) open(dev *transport.Device) (*pingpong, error) {
	p := &pingpong{Pingpong: o}
	var err error
	if p.in, err = dev.PD().RegisterMR(make([]byte, grh(o.Type)+o.Size), verbs.LocalWrite); err != nil {
		return nil, err
	}
	if p.out, err = dev.PD().RegisterMR(make([]byte, o.Size), 0); err != nil {
		p.close()
		return nil, err
	}
	for i := range p.out.Bytes() {
		if i%pingpongPage != 0 {
			p.out.Bytes()[i] = 0x7b
		}
	}
	if p.qp, err = newRaw(dev, rawConfig{typ: o.Type, size: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: depth}, qkey: rawQKey}); err != nil {
		p.close()
		return nil, err
	}
	for range depth {
		if err := p.qp.PostRecv(p.recv()); err != nil {
			p.close()
			return nil, err
		}
	}
	return p, nil
}

func (p *pingpong) recv() verbs.RecvWR { return verbs.RecvWR{SGList: p.in.SGL(0, grh(p.Type)+p.Size)} }

func (p *pingpong) close() {
	if p.qp != nil {
		p.qp.close()
	}
	for _, mr := range []*transport.MR{p.in, p.out} {
		if mr != nil {
			_ = mr.Close() // it was open
		}
	}
}

// pingpongLine is the length of what both ends write: LID, QPN, PSN and GID in hexadecimal,
// with colons between, and a NUL.
const pingpongLine = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1

func encodePingpong(e end) []byte {
	gid := e.gid.As16()
	return fmt.Appendf(nil, "%04x:%06x:%06x:%x\x00", 0, uint32(e.qpn), uint32(e.psn), gid[:])
}

func decodePingpong(b []byte) (e end, err error) {
	f := strings.Split(strings.TrimSuffix(string(b), "\x00"), ":")
	if len(b) != pingpongLine || len(f) != 4 {
		return e, fmt.Errorf("the peer's address is %q", b)
	}
	qpn, err1 := strconv.ParseUint(f[1], 16, 24)
	psn, err2 := strconv.ParseUint(f[2], 16, 24)
	gid, err3 := hex.DecodeString(f[3])
	if err := errors.Join(err1, err2, err3); err != nil || len(gid) != 16 {
		return e, fmt.Errorf("the peer's address is %q: %w", b, err)
	}
	return end{qpn: verbs.QPN(qpn), psn: verbs.PSN(psn), gid: netip.AddrFrom16([16]byte(gid)).Unmap(), reads: 1}, nil
}

func (p *pingpong) write(c net.Conn) error {
	_, err := c.Write(encodePingpong(p.qp.own))
	return err
}

func (p *pingpong) read(c net.Conn) (peer end, err error) {
	var b [pingpongLine]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return peer, fmt.Errorf("the peer's address: %w", err)
	}
	return decodePingpong(b[:])
}

// play sends and takes the messages: a side sends when its last message has left and one of
// the peer's has come. The client sends first.
func (p *pingpong) play(ctx context.Context, first bool) error {
	for n := range p.Count {
		if !first || n > 0 {
			if err := p.take(ctx, n); err != nil {
				return err
			}
		}
		err := p.qp.do(ctx, verbs.SendWR{Opcode: verbs.Send, SGList: p.out.SGL(0, p.Size)})
		if errors.Is(err, verbs.RetryExcErr) && !first && n == p.Count-1 {
			// The client leaves on our last message without a word. When its ack was lost
			// nobody can tell us any more; how the client ended does.
			return nil
		}
		if err != nil {
			return fmt.Errorf("message %d: %w", n, err)
		}
	}
	if first {
		return p.take(ctx, p.Count)
	}
	return nil
}

// take waits for a message and checks it.
func (p *pingpong) take(ctx context.Context, n int) error {
	if err := p.qp.expect(ctx, p.Size); err != nil {
		return fmt.Errorf("message %d: %w", n, err)
	}
	for i, b := range p.in.Bytes()[grh(p.Type):] {
		// ibv_rc_pingpong -c clears one byte of each page at the client and sends back from
		// the buffer it receives into.
		if i%pingpongPage != 0 && b != 0x7b || i%pingpongPage == 0 && b != 0 {
			return fmt.Errorf("message %d: byte %d is %#x", n, i, b)
		}
	}
	clear(p.in.Bytes())
	return p.qp.PostRecv(p.recv())
}

// PingpongClient is "ibv_rc_pingpong -c HOST", or one of the others. server is the other end's TCP address.
func PingpongClient(ctx context.Context, dev *transport.Device, server netip.AddrPort, o Pingpong) error {
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
	peer, err := p.read(c)
	if err != nil {
		return err
	}
	if _, err := c.Write([]byte("done\x00")); err != nil {
		return err
	}
	if err := p.qp.connect(peer, o.MTU); err != nil {
		return err
	}
	return p.play(ctx, true)
}

// PingpongServer is "ibv_rc_pingpong -c", or one of the others, for one client, who is expected at ln.
func PingpongServer(ctx context.Context, dev *transport.Device, ln net.Listener, o Pingpong) error {
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
	peer, err := p.read(c)
	if err != nil {
		return err
	}
	// The client sends as soon as it knows us.
	if err := p.qp.connect(peer, o.MTU); err != nil {
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

// bound makes calls on c fail when ctx ends, until the returned function is called.
func bound(ctx context.Context, c net.Conn) func() bool {
	return context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
}

// accept accepts one connection.
func accept(ctx context.Context, ln net.Listener) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	return ln.Accept()
}
