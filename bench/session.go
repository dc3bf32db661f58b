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

	cq     *transport.CQ
	ctrl   *transport.QP
	flows  []*flow
	sendMR *transport.MR
	recvMR *transport.MR
	ctrlMR *transport.MR

	epoch time.Time
	wcs   [64]verbs.WC
	empty int           // polls in a row that found nothing
	steps uint64        // completions that count as progress
	seen  uint64        // steps when idle last looked
	moved time.Duration // when it last found more than before

	inbox     []message // control messages but DONE, in order
	received  uint64    // data messages since the session began
	peerTotal uint64    // how many the peer says it has sent, as of its last DONE
	peerDone  int       // phases whose DONE has come
	peerStop  bool      // the peer was interrupted and wants no more
	phase     phase

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
	// All that can be posted at a time, and so complete before it is polled.
	if s.cq, err = dev.CreateCQ(p.QPs*(p.TxDepth+p.RxDepth) + 4*ctrlDepth); err != nil {
		return nil, err
	}
	register := func(n int) (mr *transport.MR) {
		if err == nil {
			mr, err = dev.PD().RegisterMR(make([]byte, n), verbs.LocalWrite)
		}
		return mr
	}
	s.ctrlMR = register(ctrlDepth * messageLen)
	if s.sends() {
		s.sendMR = register(max(p.Size*p.slots(p.TxDepth), 1))
	}
	if s.receives() {
		s.recvMR = register(max(p.Size*p.slots(p.RxDepth), 1))
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	if s.sendMR != nil {
		fill(s.sendMR.Bytes(), p.Size)
	}
	return s, nil
}

// sends and receives say what this side does with data.
func (s *Session) sends() bool    { return s.client || s.p.Test.Latency() || s.p.Bidirectional }
func (s *Session) receives() bool { return !s.client || s.p.Test.Latency() || s.p.Bidirectional }

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
		tick := time.NewTicker(aliveEvery)
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
	// LocalPSN is the first PSN sent, RemotePSN the first one expected.
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
		conns = append(conns, Conn{
			LocalQPN: f.qp.Num(), RemoteQPN: a.DestQPN, LocalPSN: f.psn, RemotePSN: a.RQPSN, MTU: a.PathMTU,
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
			_ = f.qp.Close()
		}
		for _, mr := range []*transport.MR{s.sendMR, s.recvMR, s.ctrlMR} {
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
	switch now := s.now(); {
	case s.seen != s.steps:
		s.seen, s.moved = s.steps, now
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
			s.received++
			s.steps++
			f := s.flows[wc.WRID>>40&0xFFFF]
			if err := f.consumed(wc); err != nil {
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
	s.steps++
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
	m.phase = s.phase.number
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
