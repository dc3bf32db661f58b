package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Server takes the tests that clients ask for. Its fields are set before Serve.
type Server struct {
	Device *transport.Device
	// Port is the service port to listen on.
	Port uint16
	// Only, when not 0, is the one test that is served.
	Only Test
	// Once ends Serve when one session has ended.
	Once bool
	// MaxSessions bounds the sessions at a time; 0 means 64.
	MaxSessions int
	// MaxMemory bounds the bytes that all sessions together allocate for messages and queues;
	// 0 means 1 GiB.
	MaxMemory int64
	Options   Options
	// Listening, when not nil, is called once clients may come.
	Listening func()
	// Handle runs a session, on a goroutine of its own, by calling its Run; the server closes
	// the session afterwards. ctx ends with Serve's.
	Handle func(ctx context.Context, s *Session)
	// Messages runs the server's side of a MessageTest, as Handle does a session; nil refuses
	// them. The server closes the connection afterwards.
	Messages func(ctx context.Context, conn *transport.Conn)

	exchanges uint64 // message tests so far; Serve's

	mu       sync.Mutex // guards what follows
	sessions map[sessionKey]*pending
	memory   int64
}

// sessionKey names a session: clients choose the number, so it counts only with the address.
// Message tests have numbers of the server's.
type sessionKey struct {
	addr     netip.Addr
	id       uint64
	messages bool
}

// pending is a session's entry: its memory, and where its data connections arrive.
type pending struct {
	memory int64
	reqs   chan *transport.ConnRequest
}

// connectWithin bounds the time between a control connection and the last of its data
// connections.
const connectWithin = 10 * time.Second

// Serve listens until ctx ends and runs sessions; it returns when all have ended: nil after
// ctx or, with Once, after the one session, otherwise why it cannot listen any more.
func (srv *Server) Serve(ctx context.Context) error {
	ln, err := srv.Device.Listen(netip.AddrPortFrom(netip.Addr{}, srv.Port))
	if err != nil {
		return err
	}
	srv.sessions = make(map[sessionKey]*pending)
	if srv.Listening != nil {
		srv.Listening()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer ln.Close()
	for {
		req, err := ln.Next(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if why := srv.take(ctx, req, &wg, cancel); why != "" {
			// A peer that has given up meanwhile need not be told.
			_ = req.Reject(verbs.RejectConsumer, refusal(why))
		}
	}
}

// take hands a request to its session, making it first if it is a control connection's. It
// returns why not, in words.
func (srv *Server) take(ctx context.Context, req *transport.ConnRequest, wg *sync.WaitGroup, done func()) (why string) {
	if offer, err := transport.OfferOf(req); err == nil {
		return srv.takeMessages(ctx, req, offer, wg, done)
	}
	var h hello
	if err := h.decode(req.PrivateData()); err != nil {
		return "this is a server for perf: " + err.Error()
	}
	if h.version != Version {
		return fmt.Sprintf("the client speaks version %d of perf's exchange, this is version %d", h.version, Version)
	}
	key := sessionKey{addr: req.RemoteAddr().Addr(), id: h.session}
	switch h.kind {
	case helloData:
		// Under the lock, so that nothing is added once dismiss has emptied the channel.
		srv.mu.Lock()
		defer srv.mu.Unlock()
		p := srv.sessions[key]
		if p == nil {
			return "no such session"
		}
		select {
		case p.reqs <- req:
			return ""
		default:
			return "more connections than the session has"
		}
	case helloControl:
		if why := srv.refuse(&h); why != "" {
			return why
		}
		p := &pending{memory: h.memory(), reqs: make(chan *transport.ConnRequest, h.QPs)}
		if why := srv.admit(key, p); why != "" {
			return why
		}
		wg.Go(func() {
			defer srv.dismiss(key, p)
			if srv.run(ctx, req, &h, p) && srv.Once {
				done()
			}
		})
		return ""
	}
	return fmt.Sprintf("unknown kind of connection %d", h.kind)
}

// takeMessages makes a message test of a request. What the client compresses is unpacked; it
// decides about sizes, within the memory that there is.
func (srv *Server) takeMessages(ctx context.Context, req *transport.ConnRequest, offer transport.MessageOffer, wg *sync.WaitGroup, done func()) (why string) {
	if srv.Messages == nil {
		return "this server measures verbs, not messages"
	}
	cfg := transport.MessageConfig{MaxMessage: offer.MaxMessage, Buffers: offer.Buffers, Compression: transport.CompressS2}
	srv.exchanges++
	key := sessionKey{addr: req.RemoteAddr().Addr(), id: srv.exchanges, messages: true}
	p := &pending{memory: int64(cfg.Buffers+3) * int64(cfg.MaxMessage)}
	if why := srv.admit(key, p); why != "" {
		return why
	}
	wg.Go(func() {
		defer srv.dismiss(key, p)
		conn, err := cfg.Accept(ctx, req) // which has refused if it fails
		if err != nil {
			return
		}
		defer conn.Close()
		srv.Messages(ctx, conn)
		if srv.Once {
			done()
		}
	})
	return ""
}

// refuse says what about a client's wishes cannot be met, or nothing.
func (srv *Server) refuse(h *hello) string {
	if err := h.Check(); err != nil {
		return err.Error()
	}
	if srv.Only != 0 && h.Test != srv.Only {
		return fmt.Sprintf("this server runs %v, not %v", srv.Only, h.Test)
	}
	return ""
}

// admit enters a session if there is room for it.
func (srv *Server) admit(key sessionKey, p *pending) string {
	limit, sessions := srv.MaxMemory, srv.MaxSessions
	if limit == 0 {
		limit = 1 << 30
	}
	if sessions == 0 {
		sessions = 64
	}
	if srv.Once {
		sessions = 1
	}
	srv.mu.Lock()
	defer srv.mu.Unlock()
	switch {
	case srv.sessions[key] != nil:
		return "the session exists already"
	case len(srv.sessions) >= sessions:
		return fmt.Sprintf("busy with %d of %d sessions, try again", len(srv.sessions), sessions)
	case p.memory > limit:
		return fmt.Sprintf("this test takes %d bytes of memory here, above the server's limit of %d (--max-memory)", p.memory, limit)
	case p.memory > limit-srv.memory:
		return fmt.Sprintf("busy: the %d bytes that this test takes do not fit beside other sessions, try again", p.memory)
	}
	srv.sessions[key] = p
	srv.memory += p.memory
	return ""
}

func (srv *Server) dismiss(key sessionKey, p *pending) {
	srv.mu.Lock()
	delete(srv.sessions, key)
	srv.memory -= p.memory
	srv.mu.Unlock()
	for {
		select {
		case req := <-p.reqs:
			_ = req.Reject(verbs.RejectConsumer, refusal("the session has ended"))
		default:
			return
		}
	}
}

// run accepts a session's connections and runs it. It reports whether there was a session.
func (srv *Server) run(ctx context.Context, req *transport.ConnRequest, h *hello, p *pending) bool {
	s, err := newSession(srv.Device, h.Params, srv.Options, false)
	if err == nil {
		defer s.Close()
		err = s.accept(ctx, req)
	}
	if err != nil {
		_ = req.Reject(verbs.RejectNoResources, refusal(err.Error())) // as good as it can be told
		return false
	}
	if err := s.gather(ctx, p.reqs); err != nil {
		s.failure = err
	}
	srv.Handle(ctx, s)
	return true
}

// accept answers the control connection's request.
func (s *Session) accept(ctx context.Context, req *transport.ConnRequest) error {
	cp := s.ctrlParam()
	cp.PrivateData = welcome()
	ctrl, err := req.Accept(ctx, cp)
	if err != nil {
		return err
	}
	s.begin(ctrl)
	return nil
}

// gather accepts the data connections, in whatever order they come.
func (s *Session) gather(ctx context.Context, reqs <-chan *transport.ConnRequest) error {
	ctx, cancel := context.WithTimeout(ctx, connectWithin)
	defer cancel()
	s.flows = make([]*flow, s.p.QPs)
	for i := range s.flows {
		s.flows[i] = s.newFlow(i)
	}
	if s.p.Type == verbs.UD {
		for _, f := range s.flows {
			if err := f.openUD(); err != nil {
				return err
			}
		}
		return s.introduce(ctx)
	}
	for n := 0; n < s.p.QPs; {
		var req *transport.ConnRequest
		select {
		case req = <-reqs:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d data connections after %v: %w", n, s.p.QPs, connectWithin, ctx.Err())
		}
		var h hello
		if err := h.decode(req.PrivateData()); err != nil {
			return err
		}
		if int(h.index) >= s.p.QPs || s.flows[h.index].qp != nil || req.Type() != s.p.Type {
			_ = req.Reject(verbs.RejectConsumer, refusal("no such data connection"))
			continue
		}
		f := s.flows[h.index]
		qp, err := req.Accept(ctx, s.param(f))
		if err != nil {
			return errors.Join(err, req.Reject(verbs.RejectNoResources, refusal(err.Error())))
		}
		if err := f.attach(qp); err != nil {
			return err
		}
		n++
	}
	return s.introduce(ctx)
}
