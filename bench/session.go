package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Wait says how a session waits for completions.
type Wait uint8

const (
	// WaitSleep uses CQ.Wait, which polls for the device's Config.Spin and then sleeps.
	WaitSleep Wait = iota
	// WaitPoll polls without end.
	WaitPoll
)

// Options are what a side decides for itself.
type Options struct {
	Wait Wait
	// RemotePort is the server's UDP port (Dial); 0 means 4791.
	RemotePort uint16
	// Stall is how long a peer may live without anything moving; 0 means a minute. It is
	// looked at about once a second.
	Stall time.Duration
}

// ErrStalled: the peer lives, yet nothing moves.
var ErrStalled = errors.New("nothing moves, though the peer lives")

// aliveEvery is the time between two looks at whether the peer lives.
const aliveEvery = time.Second

// lossAfter is how long a message of a service that loses some may take. What is late
// nevertheless is counted neither here nor there.
const lossAfter = 200 * time.Millisecond

// A WRID says what completes: kind (8 bits), index of the data queue pair (16), number (40).
// Only the WRID and the status mean anything in a completion that failed.
const (
	kindRecv uint64 = iota + 1
	kindSend
	kindCtrlRecv
	kindCtrlSend
	kindAlive
)

const seqMask = 1<<40 - 1

func wrid(kind uint64, index int, seq uint64) uint64 {
	return kind<<56 | uint64(index)<<40 | seq&seqMask
}

// Session is one end of a test that runs. One goroutine uses it, but for Close, which any
// goroutine may call once.
//
// Everything completes on one completion queue and is handled by that goroutine, so there is
// nothing to lock and one wait covers data, control messages, the peer's death and
// interruption.
type Session struct {
	p      Params
	o      Options
	dev    *transport.Device
	client bool
	id     uint64

	cq      *transport.CQ
	ctrl    *transport.QP
	flows   []*flow
	srq     *transport.SRQ // or nil
	shared  *receives      // of srq
	local   *transport.MR  // what our requests name; nil if there are none
	exposed *transport.MR  // what the peer's requests reach; nil if there are none
	ctrlMR  *transport.MR

	epoch time.Time
	wcs   [64]verbs.WC
	empty int           // polls in a row that found nothing
	steps uint64        // completions that count as progress
	seen  uint64        // steps when idle last looked
	moved time.Duration // when it last found more than before

	inbox     []message // control messages but DONE, in order
	received  uint64    // data messages (SEND) since the session began
	lost      uint64    // how many of the peer's were given up, which RC never does
	peerTotal uint64    // how many the peer says it has sent, as of its last DONE
	peerDone  int       // phases whose DONE has come
	peerStop  bool      // the peer was interrupted and wants no more
	phase     phase

	onLoss    func()      // nil but in tests: a latency test has given a message up
	failure   error       // the session could not be set up; Run returns it
	aliveOut  atomic.Bool // a keep-alive is under way
	interrupt atomic.Bool
	quit      chan struct{}
	once      sync.Once
	wg        sync.WaitGroup
}

// ctrlDepth bounds the control messages on their way in each direction. No more than three
// follow each other without an answer.
const ctrlDepth = 8

// newSession makes a session's completion queue and memory.
func newSession(dev *transport.Device, p Params, o Options, client bool) (*Session, error) {
	if o.Stall == 0 {
		o.Stall = time.Minute
	}
	s := &Session{p: p, o: o, dev: dev, client: client, epoch: time.Now(), quit: make(chan struct{})}
	var err error
	if p.Test.answers() && p.Test.Verb() == VerbWrite {
		s.o.Wait = WaitPoll // there are no completions to sleep on
	}
	// All that can be posted at a time, and so complete before it is polled.
	if s.cq, err = dev.CreateCQ(p.QPs*(p.sendDepth()+p.recvDepth()) + 4*ctrlDepth); err != nil {
		return nil, err
	}
	register := func(n int, access verbs.Access) (mr *transport.MR) {
		if err == nil {
			mr, err = dev.PD().RegisterMR(make([]byte, n), access)
		}
		return mr
	}
	s.ctrlMR = register(ctrlDepth*messageLen, verbs.LocalWrite)
	if s.posts() {
		s.local = register(p.localLen(), verbs.LocalWrite)
	}
	if s.exposes() {
		s.exposed = register(p.exposedLen(), [...]verbs.Access{
			VerbSend: verbs.LocalWrite, VerbWrite: verbs.LocalWrite | verbs.RemoteWrite, VerbRead: verbs.RemoteRead,
			VerbAtomic: verbs.LocalWrite | verbs.RemoteAtomic,
		}[p.Test.Verb()])
	}
	if err == nil && p.SRQ && s.receives() {
		err = s.share()
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	switch v := p.Test.Verb(); {
	case v == VerbRead && s.exposed != nil:
		fill(s.exposed.Bytes(), p.Size)
	case !v.fetches() && s.local != nil:
		fill(s.local.Bytes(), p.Size)
	}
	return s, nil
}

// share makes the shared receive queue.
func (s *Session) share() error {
	s.shared = s.newReceives(0, s.p.QPs*s.p.RxDepth)
	srq, err := s.dev.PD().CreateSRQ(transport.SRQConfig{MaxWR: s.shared.depth, MaxSGE: 1})
	if err != nil {
		return err
	}
	s.srq, s.shared.queue = srq, srq
	_, err = srq.PostRecvList(s.shared.all())
	return err
}

// posts, exposes and receives say what this side does with data: post requests, let requests
// of the peer's reach its memory, and post receives for them.
func (s *Session) posts() bool    { return s.client || s.p.Test.answers() || s.p.Bidirectional }
func (s *Session) exposes() bool  { return !s.client || s.p.Test.answers() || s.p.Bidirectional }
func (s *Session) receives() bool { return s.exposes() && s.p.Test.Verb() == VerbSend }

// arrived is how many of the peer's requests are known to have been done here since the session
// began. Nobody is told of READs and atomics: they count when the peer says so.
func (s *Session) arrived() uint64 {
	switch s.p.Test.Verb() {
	case VerbSend:
		return s.received
	case VerbWrite:
		if s.exposed == nil {
			return 0
		}
		return s.exposed.Placed()
	}
	return s.peerTotal
}

// ctrlParam is what the control connection takes on both sides.
func (s *Session) ctrlParam() transport.ConnParam {
	p := transport.ConnParam{
		SendCQ: s.cq, RecvCQ: s.cq, MTU: s.p.MTU,
		Cap: verbs.QPCap{MaxSendWR: 4 * ctrlDepth, MaxRecvWR: ctrlDepth, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: messageLen},
	}
	for i := range ctrlDepth {
		p.Recv = append(p.Recv, s.ctrlRecv(i))
	}
	return p
}

func (s *Session) ctrlRecv(slot int) verbs.RecvWR {
	return verbs.RecvWR{WRID: wrid(kindCtrlRecv, 0, uint64(slot)), SGList: s.ctrlMR.SGL(slot*messageLen, messageLen)}
}

// begin starts the keep-alive once the control connection exists.
func (s *Session) begin(ctrl *transport.QP) {
	s.ctrl = ctrl
	s.moved = s.now()
	s.wg.Go(func() {
		every := aliveEvery
		if !s.p.reliable() {
			every = lossAfter / 4 // it also wakes who waits for what is lost
		}
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-s.quit:
				return
			case <-tick.C:
			}
			if s.aliveOut.CompareAndSwap(false, true) {
				// Length zero: no key is looked at and no receive is used. A failure to post
				// means that the queue pair is in error, and then its receives have flushed.
				_ = ctrl.PostSend(verbs.SendWR{WRID: wrid(kindAlive, 0, 0), Opcode: verbs.RDMAWrite, Flags: verbs.Signaled})
			}
		}
	})
}

// Params returns the parameters that both ends have agreed on.
func (s *Session) Params() Params { return s.p }

// Err returns why the session could not be set up, on the server's side; then it has no
// connections to describe and Run returns the same.
func (s *Session) Err() error { return s.failure }

// RemoteAddr returns the peer's address and UDP port.
func (s *Session) RemoteAddr() netip.AddrPort { return s.ctrl.RemoteAddr() }

// LocalAddr returns our address towards the peer and our UDP port.
func (s *Session) LocalAddr() netip.AddrPort { return s.ctrl.LocalAddr() }

// Conn describes a data connection.
type Conn struct {
	LocalQPN, RemoteQPN verbs.QPN
	// LocalPSN is the first PSN sent, RemotePSN the first one expected; UD expects none.
	LocalPSN, RemotePSN verbs.PSN
	MTU                 verbs.MTU
}

// Conns describes the data connections in their order.
func (s *Session) Conns() ([]Conn, error) {
	var conns []Conn
	for _, f := range s.flows {
		a, err := f.qp.Attr()
		if err != nil {
			return nil, err
		}
		if s.p.Type == verbs.UD {
			c, err := s.ctrl.Attr()
			if err != nil {
				return nil, err
			}
			a.PathMTU = c.PathMTU // a UD queue pair has no path
		}
		conns = append(conns, Conn{
			LocalQPN: f.qp.Num(), RemoteQPN: f.peer.qpn, LocalPSN: f.psn, RemotePSN: a.RQPSN, MTU: a.PathMTU,
		})
	}
	return conns, nil
}

// Close ends the session's connections and gives its memory back.
func (s *Session) Close() {
	s.once.Do(func() {
		close(s.quit)
		s.wg.Wait()
		if s.ctrl != nil {
			_ = s.ctrl.Close()
		}
		for _, f := range s.flows {
			f.close()
		}
		if s.srq != nil {
			_ = s.srq.Close()
		}
		for _, mr := range []*transport.MR{s.local, s.exposed, s.ctrlMR} {
			if mr != nil {
				_ = mr.Close()
			}
		}
		if s.cq != nil {
			_ = s.cq.Close()
		}
	})
}

// now is the session's clock.
func (s *Session) now() time.Duration { return time.Since(s.epoch) }

// poll handles what has completed, or waits a little. It returns after at most one wait.
func (s *Session) poll() error {
	if s.o.Wait == WaitSleep && s.cq.Len() == 0 {
		// Not Poll, which would drive the device: on one that never spins its thread should.
		return s.idle()
	}
	n := s.cq.Poll(s.wcs[:])
	if n == 0 {
		return s.idle()
	}
	s.empty = 0
	return s.handle(s.wcs[:n])
}

// idle is an empty poll's end: it waits as the options say, and now and then looks whether
// everything stands still.
func (s *Session) idle() error {
	s.empty++
	if s.o.Wait == WaitPoll {
		if s.empty%1024 != 0 {
			return nil
		}
		runtime.Gosched() // another session, or the keep-alive, may need this processor
	} else if err := s.cq.Wait(context.Background()); err != nil {
		if errors.Is(err, transport.ErrCQOverrun) {
			return fmt.Errorf("BUG: bench: more completions than were posted: %w", err)
		}
		return err
	}
	// A peer that lives wakes a sleeper once a second with the answer to a keep-alive.
	if !s.posts() && s.p.Test.Verb().fetches() {
		return nil // nothing that the peer does can be seen here
	}
	switch now, steps := s.now(), s.steps+s.arrived(); {
	case s.seen != steps:
		s.seen, s.moved = steps, now
	case now-s.moved > s.o.Stall:
		return fmt.Errorf("%w: not for %v", ErrStalled, s.o.Stall)
	}
	return nil
}

// handle takes completions in their order.
func (s *Session) handle(wcs []verbs.WC) error {
	for i := range wcs {
		wc := &wcs[i]
		if wc.Status != verbs.WCSuccess {
			return s.failed(wc)
		}
		switch wc.WRID >> 56 {
		case kindRecv:
			s.steps++
			if err := s.flows[wc.WRID>>40&0xFFFF].recvs.consumed(wc); err != nil {
				return err
			}
		case kindSend:
			f := s.flows[wc.WRID>>40&0xFFFF]
			f.completed = advance(f.completed, wc.WRID&seqMask)
			f.ready = true
			s.phase.retired = true
			s.steps++
		case kindCtrlRecv:
			if err := s.control(wc); err != nil {
				return err
			}
		case kindAlive:
			s.aliveOut.Store(false)
		}
	}
	return nil
}

// advance returns the count of 64 bits whose low 40 are seq, at or after count.
func advance(count, seq uint64) uint64 { return count + (seq-count)&seqMask }

// failed says what a completion in error means to the user.
func (s *Session) failed(wc *verbs.WC) error {
	what := map[uint64]string{
		kindRecv: "receiving", kindSend: "sending", kindCtrlRecv: "the control connection",
		kindCtrlSend: "the control connection", kindAlive: "looking after the peer",
	}[wc.WRID>>56]
	if wc.Status == verbs.WRFlushErr {
		return fmt.Errorf("%s: %w", what, ErrPeerGone)
	}
	if wc.Status == verbs.RetryExcErr {
		return fmt.Errorf("%s: %w: %w", what, ErrPeerGone, wc.Status)
	}
	return fmt.Errorf("%s: QP %v: %w", what, wc.QPN, wc.Status)
}

// ErrPeerGone: the peer has closed the connection, or does not answer any more.
var ErrPeerGone = errors.New("the peer is gone")

// control takes a control message in and posts its receive again.
func (s *Session) control(wc *verbs.WC) error {
	slot := int(wc.WRID & seqMask)
	b := s.ctrlMR.Bytes()[slot*messageLen:]
	var m message
	if err := m.decode(b[:min(int(wc.ByteLen), messageLen)]); err != nil {
		return err
	}
	if err := s.ctrl.PostRecv(s.ctrlRecv(slot)); err != nil {
		return fmt.Errorf("the control connection: %w", err)
	}
	if m.kind != msgSync { // which says that something was lost
		s.steps++
	}
	if m.kind == msgDone {
		s.peerTotal, s.peerStop = m.count, s.peerStop || m.interrupted
		s.peerDone++
		return nil
	}
	if len(s.inbox) == ctrlDepth {
		return fmt.Errorf("the peer sent %d messages without waiting for an answer", ctrlDepth+1)
	}
	s.inbox = append(s.inbox, m)
	return nil
}

// say sends a control message.
func (s *Session) say(m message) error {
	if m.kind != msgQueue {
		m.phase = s.phase.number
	}
	err := s.ctrl.PostSend(verbs.SendWR{WRID: wrid(kindCtrlSend, 0, 0), Opcode: verbs.Send, InlineData: m.encode()})
	if err != nil {
		return fmt.Errorf("the control connection: %w", err)
	}
	return nil
}

// hear waits for the next control message and insists on what it is.
func (s *Session) hear(want ...msgKind) (message, error) {
	for len(s.inbox) == 0 {
		if err := s.poll(); err != nil {
			return message{}, err
		}
	}
	m := s.inbox[0]
	s.inbox = s.inbox[1:]
	for _, k := range want {
		if m.kind == k {
			return m, nil
		}
	}
	return message{}, fmt.Errorf("the peer sent %v where %v was due", m.kind, want)
}

// fill writes the pattern that every message carries: its bytes depend on their place in it.
func fill(b []byte, size int) {
	for i := range b {
		b[i] = pattern(i % max(size, 1))
	}
}

func pattern(i int) byte { return byte(i) ^ byte(i>>8)*31 ^ byte(i>>16)*17 }
