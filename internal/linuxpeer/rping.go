package linuxpeer

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// RpingPort is rping's default service port.
const RpingPort = 7174

// The sizes that rping takes.
const (
	MinRpingSize = 23
	MaxRpingSize = 65535
)

// Rping says what an rping does.
type Rping struct {
	// Size of a ping in bytes (-S), MinRpingSize to MaxRpingSize. The client's must not exceed
	// the server's.
	Size int
	// Count of pings (-C); 0 is no end. The server's number follows from the client's.
	Count int
	// MTU is the path MTU to ask for or to accept; 0 means the link's.
	MTU verbs.MTU
	// RemotePort is the server's UDP port; 0 means 4791.
	RemotePort uint16
	// Ping, when not nil, is called with each ping (-v): at the server with what it has read,
	// at the client with what came back. data is valid until it returns.
	Ping func(n int, data []byte)
	// Trace, when not nil, hears of every step (-d).
	Trace func(format string, args ...any)
}

func (o *Rping) ping(n int, data []byte) {
	if o.Ping != nil {
		o.Ping(n, data)
	}
}

func (o *Rping) trace(format string, args ...any) {
	if o.Trace != nil {
		o.Trace(format, args...)
	}
}

// advertisement is the length of rping's only message: address, R_Key and length of a buffer,
// big-endian. From the server it says nothing but "go ahead".
const advertisement = verbs.RemoteMRSize

// rpingEnd is what both ends have: a connection, a receive for the other's message, buffers.
type rpingEnd struct {
	*Rping
	Endpoint
	dev *transport.Device
	in  *transport.MR
	mrs []*transport.MR
}

func (o *Rping) end(dev *transport.Device) (*rpingEnd, error) {
	r := &rpingEnd{Rping: o, dev: dev}
	var err error
	r.in, err = r.register(advertisement, verbs.LocalWrite)
	return r, err
}

func (r *rpingEnd) register(n int, access verbs.Access) (*transport.MR, error) {
	mr, err := r.dev.PD().RegisterMR(make([]byte, n), access)
	if err == nil {
		r.mrs = append(r.mrs, mr)
	}
	return mr, err
}

func (r *rpingEnd) close() {
	if r.QP != nil {
		_ = r.QP.Close() // the peer may have been faster
	}
	for _, mr := range r.mrs {
		_ = mr.Close() // it was open
	}
}

func (r *rpingEnd) recv() verbs.RecvWR { return verbs.RecvWR{SGList: r.in.SGL(0, advertisement)} }

// param is what both ends bring into the connection. rping posts one receive.
func (r *rpingEnd) param() transport.ConnParam {
	return transport.ConnParam{
		MTU: r.MTU, Recv: []verbs.RecvWR{r.recv()}, ResponderResources: 1, InitiatorDepth: 1, RemotePort: r.RemotePort,
	}
}

// hear waits for the other's message. Its receive is not posted again.
func (r *rpingEnd) hear(ctx context.Context) error {
	wc, err := r.Received(ctx)
	if err == nil && wc.ByteLen != advertisement {
		err = fmt.Errorf("a message of %d bytes, want %d", wc.ByteLen, advertisement)
	}
	return err
}

// RpingClient is "rping -c -V": for each ping it lets the server READ a text and WRITE it back
// elsewhere, and compares.
//
//	client                     server
//	SEND source's address ->
//	                        <- READ source
//	                        <- SEND go ahead
//	SEND sink's address   ->
//	                        <- WRITE sink
//	                        <- SEND go ahead
//
// It returns how many pings came back.
func RpingClient(ctx context.Context, dev *transport.Device, to netip.AddrPort, o Rping) (pings int, err error) {
	r, err := o.end(dev)
	defer r.close()
	if err != nil {
		return 0, err
	}
	source, err := r.register(o.Size, verbs.RemoteRead)
	if err != nil {
		return 0, err
	}
	sink, err := r.register(o.Size, verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		return 0, err
	}
	if r.QP, err = dev.Dial(ctx, to, r.param()); err != nil {
		return 0, err
	}
	o.trace("connected to %v, QPN %v", to, r.Num())
	for ; pings < o.Count || o.Count == 0; pings++ {
		rpingText(source.Bytes(), pings)
		if err := r.advertise(ctx, "source", source); err != nil {
			return pings, fmt.Errorf("ping %d, source: %w", pings, err)
		}
		if err := r.advertise(ctx, "sink", sink); err != nil {
			return pings, fmt.Errorf("ping %d, sink: %w", pings, err)
		}
		if !bytes.Equal(source.Bytes(), sink.Bytes()) {
			return pings, fmt.Errorf("ping %d came back as %q, want %q", pings, sink.Bytes(), source.Bytes())
		}
		o.ping(pings, sink.Bytes())
		clear(sink.Bytes()) // nobody writes it before the next advertisement
	}
	o.trace("disconnecting")
	return pings, nil
}

// advertise tells the server about a buffer and waits for its go-ahead.
func (r *rpingEnd) advertise(ctx context.Context, what string, mr *transport.MR) error {
	adv, _ := mr.Remote().MarshalBinary() // never fails
	if err := r.Do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: adv}); err != nil {
		return err
	}
	r.trace("SEND: %s is at %#x, key %#x, %d bytes", what, mr.Addr(), mr.RKey(), len(mr.Bytes()))
	if err := r.hear(ctx); err != nil {
		return fmt.Errorf("go-ahead: %w", err)
	}
	r.trace("the server says go ahead")
	return r.PostRecv(r.recv())
}

// rpingText fills b with what rping sends in ping n: a header, letters, and a NUL at the end,
// up to which the server sends it back.
func rpingText(b []byte, n int) {
	at := copy(b, fmt.Sprintf("rdma-ping-%d: ", n))
	const first, last = 'A', 'z'
	c := byte(first + n%(last-first+1))
	for ; at < len(b); at++ {
		b[at] = c
		c++
		if c > last {
			c = first
		}
	}
	b[len(b)-1] = 0
}

// RpingServer is "rping -s": it serves the one connection that ln brings next. It returns how
// many pings it served.
func RpingServer(ctx context.Context, dev *transport.Device, ln *transport.Listener, o Rping) (pings int, err error) {
	req, err := ln.Next(ctx)
	if err != nil {
		return 0, err
	}
	return RpingServe(ctx, dev, req, o)
}

// RpingServe serves a connection that was asked for, as each of "rping -s -P". It returns how
// many pings it served.
func RpingServe(ctx context.Context, dev *transport.Device, req *transport.ConnRequest, o Rping) (pings int, err error) {
	r, err := o.end(dev)
	defer r.close()
	if err != nil {
		return 0, err
	}
	text, err := r.register(o.Size, verbs.LocalWrite)
	if err != nil {
		return 0, err
	}
	if r.QP, err = req.Accept(ctx, r.param()); err != nil {
		return 0, err
	}
	o.trace("accepted %v, QPN %v", r.RemoteAddr(), r.Num())
	for ; ; pings++ {
		source, err := r.advertised(ctx, "source")
		if IsEnd(err) {
			o.trace("the client disconnects")
			return pings, r.Disconnected(ctx)
		}
		if err != nil {
			return pings, fmt.Errorf("ping %d, source: %w", pings, err)
		}
		n := int(source.Length)
		if n > o.Size {
			return pings, fmt.Errorf("ping %d has %d bytes, more than our %d", pings, n, o.Size)
		}
		read := verbs.SendWR{Opcode: verbs.RDMARead, SGList: text.SGL(0, n), RemoteAddr: source.Addr, RKey: source.RKey}
		if err := r.serve(ctx, read); err != nil {
			return pings, fmt.Errorf("ping %d, source: %w", pings, err)
		}
		o.ping(pings, text.Bytes()[:n])
		sink, err := r.advertised(ctx, "sink")
		if err != nil {
			return pings, fmt.Errorf("ping %d, sink: %w", pings, err)
		}
		// rping writes back up to the NUL that ends the text.
		n = bytes.IndexByte(text.Bytes()[:n], 0) + 1
		if n == 0 {
			return pings, fmt.Errorf("ping %d does not end with NUL: %q", pings, text.Bytes())
		}
		write := verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: text.SGL(0, n), RemoteAddr: sink.Addr, RKey: sink.RKey}
		if err := r.serve(ctx, write); err != nil {
			return pings, fmt.Errorf("ping %d, sink: %w", pings, err)
		}
	}
}

// advertised waits for the client to tell about a buffer.
func (r *rpingEnd) advertised(ctx context.Context, what string) (mr verbs.RemoteMR, err error) {
	if err := r.hear(ctx); err != nil {
		return mr, err
	}
	if err := mr.UnmarshalBinary(r.in.Bytes()); err != nil {
		return mr, err
	}
	r.trace("%s is at %#x, key %#x, %d bytes", what, mr.Addr, mr.RKey, mr.Length)
	return mr, r.PostRecv(r.recv())
}

// serve does what the client waits for and tells it to go ahead.
func (r *rpingEnd) serve(ctx context.Context, wr verbs.SendWR) error {
	if err := r.Do(ctx, wr); err != nil {
		return err
	}
	r.trace("%v done, SEND: go ahead", wr.Opcode)
	return r.Do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, advertisement)})
}
