// Rawcm connects two queue pairs that the program drives itself, step by step, and says what
// happens: what rdma_cm's users know as an rdma_cm_id with a queue pair of their own, its events,
// rdma_init_qp_attr and ibv_modify_qp. Most programs want Dial and Accept instead, which do all
// of this by themselves; docs/connections.md tells when not.
//
//	rawcm                            both ends, on 127.0.0.1 and 127.0.0.2
//	rawcm -serve -bind 192.0.2.1     serve until interrupted; -reject refuses everybody
//	rawcm 192.0.2.1                  connect to a server; -bind says from where
//
// The other end may be a Linux program over rdma_rxe or a NIC: rawcm as a client talks to
// rdma_server, which receives one message of at most 16 bytes and answers it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "rawcm:", err)
		os.Exit(1)
	}
}

// run is the program. Closing out's reader ends nothing; ctx does.
func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("rawcm", flag.ContinueOnError)
	flags.SetOutput(out)
	var (
		serving = flags.Bool("serve", false, "serve until interrupted")
		reject  = flags.Bool("reject", false, "with -serve: refuse everybody")
		bind    = flags.String("bind", "", "our address, ADDR or ADDR:UDPPORT; all of them by default")
		port    = flags.Uint("p", 7471, "service port")
	)
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	case *port == 0 || *port > 65535:
		return fmt.Errorf("service port %d", *port)
	case *serving && flags.NArg() > 0 || flags.NArg() > 1:
		return errors.New("one of -serve and a host, or neither")
	}
	p := end{out: out, port: uint16(*port)}
	switch {
	case *serving:
		return p.serve(ctx, *bind, *reject)
	case flags.NArg() == 1:
		host, err := netip.ParseAddr(flags.Arg(0))
		if err != nil {
			return err
		}
		return p.connect(ctx, *bind, host)
	}
	// Both ends: loopback addresses are hosts.
	ready := make(chan struct{})
	served := make(chan error, 1)
	p.ready, p.once = ready, true
	go func() { served <- p.serve(ctx, "127.0.0.2", *reject) }()
	select {
	case <-ready:
	case err := <-served:
		return err
	}
	return errors.Join(p.connect(ctx, "127.0.0.1", netip.MustParseAddr("127.0.0.2")), <-served)
}

// end is one side: what it was asked to do, and where it says so.
type end struct {
	out   io.Writer
	port  uint16
	ready chan struct{} // closed when the server listens, if anybody cares
	once  bool          // the server serves one connection
}

func (p *end) say(who, format string, args ...any) {
	// In one write, for both ends may talk at once.
	fmt.Fprintf(p.out, "%s\n", who+": "+fmt.Sprintf(format, args...))
}

// open opens a device at an address as flags write it.
func open(bind string) (*transport.Device, error) {
	var cfg transport.Config
	if bind != "" {
		addr, err := netip.ParseAddrPort(bind)
		if err != nil {
			host, err := netip.ParseAddr(bind)
			if err != nil {
				return nil, err
			}
			addr = netip.AddrPortFrom(host, 0)
		}
		cfg.Bind = addr
	}
	return transport.Open(cfg)
}

// queuePair is a queue pair of ours with what it needs: a completion queue and memory, of which
// the first half is for receiving.
type queuePair struct {
	*transport.QP
	cq *transport.CQ
	mr *transport.MR
}

const half = 64

func newQueuePair(dev *transport.Device) (q queuePair, err error) {
	if q.mr, err = dev.PD().RegisterMR(make([]byte, 2*half), verbs.LocalWrite); err != nil {
		return q, err
	}
	if q.cq, err = dev.CreateCQ(16); err != nil {
		return q, err
	}
	q.QP, err = dev.PD().CreateQP(transport.QPConfig{SendCQ: q.cq, RecvCQ: q.cq, Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4}})
	return q, err
}

func (q queuePair) close() error { return errors.Join(q.Close(), q.cq.Close(), q.mr.Close()) }

// move makes one transition with the attributes that the connection manager knows.
func (q queuePair) move(id *transport.CMID, to verbs.QPState) error {
	attr, err := id.InitQPAttr(to)
	if err != nil {
		return err
	}
	return q.Modify(attr)
}

// prepare moves to INIT and posts a receive, so that the peer's first message finds one.
func (q queuePair) prepare(id *transport.CMID) error {
	if err := q.move(id, verbs.QPInit); err != nil {
		return err
	}
	return q.PostRecv(verbs.RecvWR{SGList: q.mr.SGL(0, half)})
}

func (q queuePair) post(message string) error {
	copy(q.mr.Bytes()[half:], message)
	return q.PostSend(verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: q.mr.SGL(half, len(message))})
}

// exchange waits until our send has completed and a message has come, and returns that.
func (q queuePair) exchange(ctx context.Context) (received string, err error) {
	for sent, got := false, false; !sent || !got; {
		wc, err := q.cq.Next(ctx)
		if err != nil {
			return "", err
		}
		if wc.Opcode.IsRecv() {
			received, got = string(q.mr.Bytes()[:wc.ByteLen]), true
		} else {
			sent = true
		}
	}
	return received, nil
}

// toErr has everything posted flushed; the connection has ended.
func (q queuePair) toErr() error {
	return q.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
}

// connect is the active side.
func (p *end) connect(ctx context.Context, bind string, host netip.Addr) (err error) {
	dev, err := open(bind)
	if err != nil {
		return err
	}
	defer dev.Close()
	id, err := dev.CreateCMID(netip.AddrPortFrom(host, p.port), transport.ConnParam{PrivateData: []byte("hello")})
	if err != nil {
		return err
	}
	q, err := newQueuePair(dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, id.Close(), q.close()) }()
	if err := q.prepare(id); err != nil {
		return err
	}
	if err := id.Connect(ctx, q.QP); err != nil { // REQ
		return err
	}
	p.say("client", "REQ sent to %v, queue pair in %v", id.RemoteAddr(), q.State())
	for {
		ev, err := id.NextEvent(ctx)
		if err != nil {
			return err
		}
		switch ev.Type {
		case verbs.EventConnectResponse:
			p.say("client", "REP received, %q", text(ev.PrivateData))
			if err := errors.Join(q.move(id, verbs.QPRTR), q.move(id, verbs.QPRTS)); err != nil {
				return err
			}
			if err := id.Establish([]byte("here we go")); err != nil { // RTU
				return err
			}
			p.say("client", "RTU sent, queue pair in %v", q.State())
			if err := q.post("a request"); err != nil {
				return err
			}
			answer, err := q.exchange(ctx)
			if err != nil {
				return err
			}
			p.say("client", "received %q", answer)
			if err := id.Disconnect([]byte("bye")); err != nil { // DREQ
				return err
			}
		case verbs.EventDisconnected:
			p.say("client", "DISCONNECTED")
			return q.toErr()
		case verbs.EventRejected:
			return fmt.Errorf("rejected: %v, %q", ev.Reason, text(ev.PrivateData))
		case verbs.EventUnreachable:
			return errors.New("no answer")
		}
	}
}

// serve is the passive side.
func (p *end) serve(ctx context.Context, bind string, reject bool) error {
	dev, err := open(bind)
	if err != nil {
		return err
	}
	defer dev.Close()
	ln, err := dev.Listen(netip.AddrPortFrom(netip.Addr{}, p.port))
	if err != nil {
		return err
	}
	if p.ready != nil {
		close(p.ready)
	}
	for {
		req, err := ln.Next(ctx) // REQ
		if err != nil {
			if errors.Is(err, context.Canceled) {
				return nil
			}
			return err
		}
		p.say("server", "REQ received from %v, %q", req.RemoteAddr().Addr(), text(req.PrivateData()))
		if reject {
			err = req.Reject(0, []byte("nobody today")) // REJ
		} else {
			err = p.serveOne(ctx, dev, req)
		}
		switch {
		case p.once:
			return err
		case err != nil:
			p.say("server", "%v", err)
		}
	}
}

// serveOne serves one connection to its end.
func (p *end) serveOne(ctx context.Context, dev *transport.Device, req *transport.ConnRequest) (err error) {
	id, err := req.CreateCMID(transport.ConnParam{PrivateData: []byte("welcome")})
	if err != nil {
		return err
	}
	q, err := newQueuePair(dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, id.Close(), q.close()) }()
	if err := q.prepare(id); err != nil {
		return err
	}
	// RTR before the REP: from then on requests may come.
	if err := q.move(id, verbs.QPRTR); err != nil {
		return err
	}
	if err := id.Accept(ctx, q.QP); err != nil { // REP
		return err
	}
	// The answer is ready before it may leave. Post it all the same: it waits in the send queue.
	if err := q.post("a greeting"); err != nil {
		return err
	}
	p.say("server", "REP sent, queue pair in %v, a greeting posted", q.State())
	for {
		ev, err := id.NextEvent(ctx)
		if err != nil {
			return err
		}
		switch ev.Type {
		case verbs.EventCommEst:
			// A request was faster than the RTU, which may be late or lost. It is as good.
			p.say("server", "COMM_EST")
			if err := id.Notify(verbs.EventCommEst); err != nil {
				return err
			}
		case verbs.EventEstablished: // the RTU, or our Notify
			if err := q.move(id, verbs.QPRTS); err != nil {
				return err
			}
			waited, _ := q.Published()
			p.say("server", "ESTABLISHED, queue pair in %v, %d send published", q.State(), waited)
			request, err := q.exchange(ctx)
			if err != nil {
				return err
			}
			p.say("server", "received %q", request)
		case verbs.EventRTU:
			p.say("server", "RTU after all, %q", text(ev.PrivateData))
		case verbs.EventDisconnected:
			p.say("server", "DISCONNECTED, %q", text(ev.PrivateData))
			return q.toErr()
		case verbs.EventRejected:
			return fmt.Errorf("given up by the peer: %v", ev.Reason)
		case verbs.EventUnreachable:
			return errors.New("no RTU and no request")
		}
	}
}

// text cuts the padding off private data, whose length messages do not tell.
func text(private []byte) string {
	n := len(private)
	for n > 0 && private[n-1] == 0 {
		n--
	}
	return string(private[:n])
}
