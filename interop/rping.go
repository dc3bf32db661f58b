package interop

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

// Rping says what an rping does.
type Rping struct {
	// Size of a ping in bytes (-S): 23 to 65535. The client's must not exceed the server's.
	Size int
	// Count of pings (-C), at least 1. The server's number follows from the client's.
	Count int
	// MTU is the path MTU to ask for or to accept; 0 means the link's.
	MTU verbs.MTU
}

// advertisement is the length of rping's only message: address, R_Key and length of a buffer,
// big-endian. From the server it says nothing but "go ahead".
const advertisement = verbs.RemoteMRSize

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
func RpingClient(ctx context.Context, dev *transport.Device, to netip.AddrPort, o Rping) error {
	source, err := dev.PD().RegisterMR(make([]byte, o.Size), verbs.RemoteRead)
	if err != nil {
		return err
	}
	defer source.Close()
	sink, err := dev.PD().RegisterMR(make([]byte, o.Size), verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		return err
	}
	defer sink.Close()
	in, err := dev.PD().RegisterMR(make([]byte, advertisement), verbs.LocalWrite)
	if err != nil {
		return err
	}
	defer in.Close()
	recv := verbs.RecvWR{SGList: in.SGL(0, advertisement)}
	qp, err := dev.Dial(ctx, to, transport.ConnParam{
		MTU: o.MTU, Recv: []verbs.RecvWR{recv}, ResponderResources: 1, InitiatorDepth: 1,
	})
	if err != nil {
		return err
	}
	defer qp.Close()
	e := &endpoint{QP: qp}

	// exchange tells the server about a buffer and waits for its go-ahead.
	exchange := func(mr *transport.MR) error {
		adv, _ := mr.Remote().MarshalBinary() // never fails
		if err := e.do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: adv}); err != nil {
			return err
		}
		wc, err := e.received(ctx)
		if err != nil {
			return fmt.Errorf("go-ahead: %w", err)
		}
		if wc.ByteLen != advertisement {
			return fmt.Errorf("go-ahead of %d bytes, want %d", wc.ByteLen, advertisement)
		}
		return e.PostRecv(recv)
	}
	for n := range o.Count {
		rpingText(source.Bytes(), n)
		if err := exchange(source); err != nil {
			return fmt.Errorf("ping %d, source: %w", n, err)
		}
		if err := exchange(sink); err != nil {
			return fmt.Errorf("ping %d, sink: %w", n, err)
		}
		if !bytes.Equal(source.Bytes(), sink.Bytes()) {
			return fmt.Errorf("ping %d came back as %q, want %q", n, sink.Bytes(), source.Bytes())
		}
		clear(sink.Bytes()) // nobody writes it before the next advertisement
	}
	return nil
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

// RpingServer is "rping -s" for one connection. It returns how many pings it served.
func RpingServer(ctx context.Context, dev *transport.Device, ln *transport.Listener, o Rping) (pings int, err error) {
	req, err := ln.Next(ctx)
	if err != nil {
		return 0, err
	}
	text, err := dev.PD().RegisterMR(make([]byte, o.Size), verbs.LocalWrite)
	if err != nil {
		return 0, err
	}
	defer text.Close()
	in, err := dev.PD().RegisterMR(make([]byte, advertisement), verbs.LocalWrite)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	recv := verbs.RecvWR{SGList: in.SGL(0, advertisement)}
	qp, err := req.Accept(ctx, transport.ConnParam{
		MTU: o.MTU, Recv: []verbs.RecvWR{recv}, ResponderResources: 1, InitiatorDepth: 1,
	})
	if err != nil {
		return 0, err
	}
	defer qp.Close()
	e := &endpoint{QP: qp}

	// advertised waits for the client to tell about a buffer.
	advertised := func() (mr verbs.RemoteMR, err error) {
		wc, err := e.received(ctx)
		if err != nil {
			return mr, err
		}
		if wc.ByteLen != advertisement {
			return mr, fmt.Errorf("advertisement of %d bytes, want %d", wc.ByteLen, advertisement)
		}
		if err := mr.UnmarshalBinary(in.Bytes()); err != nil {
			return mr, err
		}
		return mr, e.PostRecv(recv)
	}
	goAhead := verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, advertisement)}
	for ; ; pings++ {
		source, err := advertised()
		if isEnd(err) {
			return pings, e.disconnected(ctx)
		}
		if err != nil {
			return pings, fmt.Errorf("ping %d, source: %w", pings, err)
		}
		n := int(source.Length)
		if n > o.Size {
			return pings, fmt.Errorf("ping %d has %d bytes, more than our %d", pings, n, o.Size)
		}
		err = e.do(ctx, verbs.SendWR{Opcode: verbs.RDMARead, SGList: text.SGL(0, n), RemoteAddr: source.Addr, RKey: source.RKey})
		if err == nil {
			err = e.do(ctx, goAhead)
		}
		if err != nil {
			return pings, fmt.Errorf("ping %d, source: %w", pings, err)
		}
		sink, err := advertised()
		if err != nil {
			return pings, fmt.Errorf("ping %d, sink: %w", pings, err)
		}
		n = bytes.IndexByte(text.Bytes()[:n], 0) + 1
		if n == 0 {
			return pings, fmt.Errorf("ping %d does not end with NUL: %q", pings, text.Bytes())
		}
		err = e.do(ctx, verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: text.SGL(0, n), RemoteAddr: sink.Addr, RKey: sink.RKey})
		if err == nil {
			err = e.do(ctx, goAhead)
		}
		if err != nil {
			return pings, fmt.Errorf("ping %d, sink: %w", pings, err)
		}
	}
}
