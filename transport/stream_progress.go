package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/park"
	"github.com/doorbell-rdma/doorbell/internal/rsocket"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Whoever calls a method of a stream does its work: takes completions, posts receives and
// control messages. It holds the stream's mu for that, never while it copies or waits.
//
// Data and grants arrive in one completion queue, sends complete in another: a reader that
// sleeps is not woken by what the writer's sends complete. No wake-up is lost. A waiter notes
// its generation, takes the completions and looks at its condition under mu; then it sleeps on
// a queue's bell until that has completions or its generation has changed. A completion that
// another goroutine takes changes the generation of those whom it concerns, and rings.

// streamBatch is how many completions are taken, and receives posted, at a time.
const streamBatch = 32

// streamSpare is how many receives there are beyond the credits: some wait to be posted,
// and control messages take receives without credits.
const streamSpare = 2 * streamBatch

// waiter is a goroutine that waits: the reader, the writer, or who closes.
type waiter struct {
	gen   atomic.Uint32 // changes with what concerns it
	ready func(*CQ) bool

	// Its own:

	seen uint32        // gen before it looked
	last time.Duration // how long it waited the last time
}

func (w *waiter) init() {
	w.ready = func(c *CQ) bool { return !c.empty() || w.gen.Load() != w.seen }
}

// wait waits until the queue has completions or w was kicked since seen.
func (s *Stream) wait(w *waiter, c *CQ, seen uint32) error {
	w.seen = seen
	if w.ready(c) {
		return nil
	}
	start := s.dev.now()
	err := s.await(w, c)
	w.last = time.Duration(s.dev.now() - start)
	return err
}

// patience is how many times Config.Spin a waiter polls whose last wait took no longer. To
// sleep and be woken costs both ends so much that two which have begun to sleep between
// messages that come every few tens of microseconds would never stop to.
const patience = 4

func (s *Stream) await(w *waiter, c *CQ) error {
	if long := patience * s.dev.spin; w.last < long && s.spin(w, c, long-s.dev.spin) {
		return nil
	}
	err := c.await(context.Background(), &c.bell, w.ready)
	if errors.Is(err, ErrClosed) {
		err = net.ErrClosed
	}
	return err
}

// spin polls for a while and reports whether that was enough.
func (s *Stream) spin(w *waiter, c *CQ, long time.Duration) bool {
	if !park.TrySpin() {
		return false
	}
	defer park.EndSpin()
	for start := s.dev.now(); s.dev.now()-start < verbs.Instant(long); {
		for range 16 {
			c.drive()
			if w.ready(c) {
				return true
			}
			park.Pause()
		}
	}
	return false
}

// cq returns the queue in which the end of a wait arrives. While a grant waits for a send to
// complete that comes first, soon: the peer may be waiting for the grant. The caller holds mu.
func (s *Stream) cq(why rsocket.Blocked) *CQ {
	if why == rsocket.BlockedSelf || s.conn.GrantWaits() {
		return s.sendCQ
	}
	return s.recvCQ
}

// kick makes w look around.
func (s *Stream) kick(w *waiter) {
	w.gen.Add(1)
	s.recvCQ.stir()
	s.sendCQ.stir()
}

// advance takes what has completed, and posts what is due. self is who calls. The caller
// holds mu.
func (s *Stream) advance(self *waiter) {
	if s.dead == nil && s.recvCQ.closed.Load() {
		s.dead = net.ErrClosed // the device is
	}
	if s.dead != nil {
		return
	}
	sent, data, grant := s.takeSends(), false, false
	for s.dead == nil {
		n := s.recvCQ.take(s.wcs[:])
		for i := range s.wcs[:n] {
			wc := &s.wcs[i]
			if wc.Status != verbs.WCSuccess {
				s.die(wc.Status)
				break
			}
			s.spent++
			if wc.Flags&verbs.WithImm == 0 || wc.Opcode != verbs.WCRecvRDMAWithImm {
				s.violated(fmt.Errorf("%w: %v where only WRITEs with immediate belong", ErrStreamProtocol, wc.Opcode))
				break
			}
			if err := s.conn.Received(wc.ImmData, wc.ByteLen); err != nil {
				s.violated(err)
				break
			}
			if op, _ := rsocket.ParseImm(wc.ImmData); op == rsocket.OpSGL {
				grant = true
			} else {
				data = true // or an ending, which concerns everybody
				grant = grant || op != rsocket.OpData
			}
		}
		if s.spent >= streamBatch && s.dead == nil {
			s.repost()
		}
		if n < len(s.wcs) {
			break
		}
	}
	s.control()
	if s.dead != nil {
		sent, data, grant = true, true, true
	}
	if data && self != &s.r {
		s.kick(&s.r)
	}
	if (sent || grant) && self != &s.w {
		s.kick(&s.w)
	}
	if (sent || grant) && self != &s.c && s.closed {
		s.kick(&s.c)
	}
}

// takeSends takes the completions of sends and reports whether there were any.
func (s *Stream) takeSends() (some bool) {
	for {
		n := s.sendCQ.take(s.wcs[:])
		for i := range s.wcs[:n] {
			if wc := &s.wcs[i]; wc.Status != verbs.WCSuccess {
				s.die(wc.Status)
				return true
			}
			s.conn.Sent(s.wcs[i].WRID)
		}
		some = some || n > 0
		if n < len(s.wcs) {
			return some
		}
	}
}

// die ends the stream because of a failed completion. A flush only says that something else
// has failed before.
func (s *Stream) die(status verbs.WCStatus) {
	if s.dead != nil {
		return
	}
	for status == verbs.WRFlushErr {
		n := s.sendCQ.take(s.wcs[:1])
		if n == 0 {
			break
		}
		status = s.wcs[0].Status
		if status == verbs.WCSuccess {
			s.conn.Sent(s.wcs[0].WRID)
			status = verbs.WRFlushErr
		}
	}
	reason := s.qp.link.reason()
	switch {
	case status != verbs.WRFlushErr:
		s.dead = fmt.Errorf("%w: %w", syscall.ECONNRESET, status)
	case reason != nil:
		s.dead = fmt.Errorf("%w: %w", syscall.ECONNRESET, reason)
	default:
		s.dead = syscall.ECONNRESET
	}
}

// violated ends the stream because of what the peer did, and the connection with it.
func (s *Stream) violated(err error) {
	s.dead = fmt.Errorf("transport: stream: %w", err)
	// It fails if the connection has ended already, which is what is wanted.
	_ = s.qp.port.do(func() error { return s.qp.port.wire.Disconnect(s.dev.now(), s.qp.conn, nil) })
}

// noBuffers are receives without memory: WRITEs bring their own.
var noBuffers [streamBatch]verbs.RecvWR

// repost posts the spent receives again.
func (s *Stream) repost() {
	for s.spent > 0 {
		n, err := s.qp.PostRecvList(noBuffers[:min(s.spent, len(noBuffers))])
		s.spent -= n
		if err != nil {
			_ = s.fail(err) // it is remembered
			return
		}
	}
}

// control posts the control messages that are due.
func (s *Stream) control() {
	for s.dead == nil && s.conn.NextControl(&s.msg) {
		if s.post() != nil {
			return
		}
	}
}

// post posts s.msg.
func (s *Stream) post() error {
	wr := &s.wrs[0]
	m := &s.msg
	m.WR(wr)
	wr.SGList = s.sges[:0]
	if m.Op == rsocket.OpData {
		mr := s.memory.send
		first := min(m.Length, len(s.memory.sendBuf)-m.Offset)
		wr.SGList = append(wr.SGList, mr.SGE(m.Offset, first))
		if first < m.Length {
			wr.SGList = append(wr.SGList, mr.SGE(0, m.Length-first))
		}
	}
	if _, err := s.qp.PostSendList(s.wrs[:]); err != nil {
		return s.fail(err)
	}
	return nil
}

// fail ends the stream because a post was refused: the queue pair is being closed.
func (s *Stream) fail(err error) error {
	if errors.Is(err, ErrQueueFull) {
		panic("BUG: transport: a stream overfills its queues")
	}
	if s.dead == nil {
		s.dead = fmt.Errorf("%w: %w", syscall.ECONNRESET, err)
		if s.recvCQ.closed.Load() {
			s.dead = net.ErrClosed // the device is
		}
	}
	return s.dead
}

// driveEvery is how long a writer that need not wait lets the wire be before it drives it
// again: what it posts meanwhile, behind a message that is under way, goes out together. It
// counts from the end of the drive, or writes of 64 KiB, which take as long to send, would each
// be followed by one. Only one time in lookEvery it looks at the socket, where mostly nothing is.
const (
	driveEvery = 20 * time.Microsecond
	lookEvery  = 4
)

// nudge drives the wire if it is time to. The caller holds wlock.
func (s *Stream) nudge() {
	if s.dev.now()-s.nudged < verbs.Instant(driveEvery) {
		return
	}
	p := s.qp.port
	if s.nudges++; s.nudges%lookEvery != 0 {
		p.role.TryDrive(p.transmit)
	} else {
		p.drive()
	}
	s.nudged = s.dev.now()
}

// keepalive is the timer's function.
func (s *Stream) keepalive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.dead != nil {
		return
	}
	s.advance(nil)
	if s.dead == nil && s.conn.Keepalive(&s.msg) {
		_ = s.post() // the next caller hears of it
	}
	s.alive.Reset(s.keepAlive)
}
