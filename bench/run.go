package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// phase is one run of one size.
type phase struct {
	number   uint16 // from 1
	size     int
	iters    uint64        // on each queue pair; 0 if duration decides
	duration time.Duration // 0 if iters decides
	measured bool          // not a warm-up

	clock   time.Duration // the session's clock as last read
	retired bool          // a send has completed since that was last looked at
	stopped bool          // ended before its time
	last    []byte        // what to look at when nothing is under way, in a warm-up
	given   uint64        // up by this side of what the peer, or in a latency test itself, has sent
	waited  uint64        // arrived when wait last looked
	since   time.Duration // when that was more than before
	heard   time.Duration // when complete first looked after the peer's DONE
	meter   meter
	lat     *latencyRecorder
}

// ErrInterrupted is returned by Run when Interrupt, on either side, ended it; the last result
// is what was measured until then.
var ErrInterrupted = errors.New("interrupted")

// Interrupt ends the run early but in good order: it finishes what is under way, and both
// ends report what was measured. Any goroutine may call it.
func (s *Session) Interrupt() { s.interrupt.Store(true) }

// Run runs the test and calls report with each size's result. It returns nil when everything
// ran, ErrInterrupted after Interrupt, ctx.Err() when ctx ended it, ErrPeerGone when the peer
// vanished or closed early. The session is of no more use then.
func (s *Session) Run(ctx context.Context, report func(Result)) error {
	if s.failure != nil {
		return s.failure
	}
	// Waits are without context, because one that can end costs two allocations for each
	// sleep. What ends them instead is the flushing of the control connection.
	defer context.AfterFunc(ctx, s.hangUp)()
	run := s.follow
	if s.client {
		run = s.lead
	}
	err := run(report)
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// hangUp ends the control connection on our side: what was posted on it completes, flushed.
// Any goroutine may call it.
func (s *Session) hangUp() {
	// It fails if the connection has ended already; then it has flushed.
	_ = s.ctrl.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPErr})
}

// warmup is how many messages on each queue pair precede the measurement of a size: enough
// for caches, windows and round-trip estimates, little enough to be done at once.
func (p *Params) warmup(size int) uint64 {
	const bytes = 16 << 20
	n := uint64(max(min(1000, bytes/max(size, 1)/p.QPs), 1))
	if p.Duration == 0 {
		n = min(n, uint64(p.Iters))
	}
	return n
}

// lead is Run on the client's side: it says what comes next.
func (s *Session) lead(report func(Result)) error {
	for _, size := range s.p.Sizes() {
		for _, ph := range []phase{
			{size: size, iters: s.p.warmup(size)},
			{size: size, iters: uint64(s.p.Iters), duration: s.p.Duration, measured: true},
		} {
			ph.number = s.phase.number + 1
			s.phase = ph
			if err := s.runPhase(report); err != nil {
				return err
			}
			if s.phase.stopped {
				return errors.Join(ErrInterrupted, s.farewell())
			}
		}
	}
	return s.farewell()
}

// farewell says BYE and waits until the server has closed.
func (s *Session) farewell() error {
	if err := s.say(message{kind: msgBye}); err != nil {
		return err
	}
	defer time.AfterFunc(5*time.Second, s.hangUp).Stop()
	for {
		switch err := s.poll(); {
		case errors.Is(err, ErrPeerGone):
			return nil // one way or the other; everything was measured and agreed on
		case err != nil:
			return err
		}
	}
}

// follow is Run on the server's side: it does what the client says.
func (s *Session) follow(report func(Result)) error {
	for {
		m, err := s.hear(msgStart, msgBye)
		if err != nil {
			return err
		}
		if m.kind == msgBye {
			if s.phase.stopped {
				return ErrInterrupted
			}
			return nil
		}
		if m.phase != s.phase.number+1 {
			return fmt.Errorf("the peer starts run %d after run %d", m.phase, s.phase.number)
		}
		if m.size > uint64(s.p.Size) || m.count > MaxIters || m.duration > MaxDuration || (m.count == 0) == (m.duration == 0) {
			return fmt.Errorf("the peer asks for %d messages of %d bytes in %v, which was not agreed on", m.count, m.size, m.duration)
		}
		s.phase = phase{number: m.phase, size: int(m.size), iters: m.count, duration: m.duration, measured: m.measured}
		if err := s.runPhase(report); err != nil {
			return err
		}
	}
}

// runPhase moves the data of one phase, exchanges reports and hands the result on.
func (s *Session) runPhase(report func(Result)) error {
	ph := &s.phase
	for _, f := range s.flows {
		f.base = f.posted
	}
	// Before the peer can reach it.
	s.probe()
	if err := s.agree(); err != nil {
		return err
	}
	ph.clock = s.now()
	ph.since = ph.clock
	ph.meter.begin(ph.clock, 2*uint64(s.p.window()*s.p.QPs))
	var err error
	switch {
	case s.p.Test.Latency() && s.client:
		ph.lat = newLatencyRecorder()
		err = s.ping()
	case s.p.Test.answers():
		err = s.pong()
	default:
		err = s.stream()
	}
	if err != nil {
		return err
	}
	mine := message{
		kind: msgReport, measured: ph.measured, interrupted: ph.stopped, size: uint64(ph.size), lost: ph.given,
		count: ph.meter.n, duration: ph.meter.elapsed(), peak: ph.meter.peakRate() * float64(ph.size),
	}
	if ph.lat != nil {
		mine.lat, mine.peak = ph.lat.divided(s.p.Test.parts()), 0
	}
	if err := s.say(mine); err != nil {
		return err
	}
	theirs, err := s.hear(msgReport)
	if err != nil {
		return err
	}
	if theirs.size != mine.size {
		return fmt.Errorf("the peer reports on messages of %d bytes, these had %d", theirs.size, mine.size)
	}
	ph.stopped = ph.stopped || theirs.interrupted
	// Nothing is under way now, so that nobody writes here even if receives share memory.
	if !ph.stopped { // else perhaps nothing was sent
		if err := verify(ph.last); err != nil {
			return err
		}
	}
	if err := s.audit(); err != nil {
		return err
	}
	if !ph.measured {
		return nil
	}
	client, server := &mine, &theirs
	if !s.client {
		client, server = server, client
	}
	report(combine(&s.p, client, server))
	return nil
}

// agree starts a phase on both sides: the client says what it is, the server that it is ready.
func (s *Session) agree() error {
	ph := &s.phase
	if !s.client {
		return s.say(message{kind: msgGo})
	}
	err := s.say(message{
		kind: msgStart, measured: ph.measured, size: uint64(ph.size), count: ph.iters, duration: ph.duration,
	})
	if err == nil {
		_, err = s.hear(msgGo)
	}
	return err
}

// probe prepares the look at what one-sided requests of a warm-up do: it clears the place
// where the first one's message goes.
func (s *Session) probe() {
	ph := &s.phase
	if ph.measured || !s.p.reliable() {
		return
	}
	switch v := s.p.Test.Verb(); {
	case v == VerbWrite && s.exposed != nil:
		ph.last = s.exposed.Bytes()[:ph.size]
	case v == VerbRead && s.local != nil:
		ph.last = s.local.Bytes()[:ph.size]
	}
	clear(ph.last)
}

// audit adds up what atomics have done to our memory since the session began.
func (s *Session) audit() error {
	if s.p.Test.Verb() != VerbAtomic || s.exposed == nil {
		return nil
	}
	sum, want := uint64(0), s.peerTotal
	if s.p.Swap {
		want = 0 // zero for zero
	}
	for b := s.exposed.Bytes(); len(b) >= AtomicSize; b = b[AtomicSize:] {
		sum += binary.NativeEndian.Uint64(b)
	}
	if sum != want {
		return fmt.Errorf("atomics have added up to %d, want %d", sum, want)
	}
	return nil
}

// done tells the peer that all was sent.
func (s *Session) done() error {
	total := uint64(0)
	for _, f := range s.flows {
		total += f.posted
	}
	return s.say(message{kind: msgDone, count: total, interrupted: s.phase.stopped})
}

// heardDone reports whether the peer has sent all of this phase. Its DONE may well come
// before we know that the phase has begun: data and control connections are not ordered.
func (s *Session) heardDone() bool { return s.peerDone >= int(s.phase.number) }

// complete reports whether all that the peer has sent in this phase is here, or given up
// because nothing has come for a while.
func (s *Session) complete() bool {
	ph := &s.phase
	if !s.heardDone() {
		return false
	}
	here := s.arrived()
	if here+s.lost > s.peerTotal && !s.p.reliable() {
		s.lost = s.peerTotal - min(here, s.peerTotal) // what was given up was late
	}
	if here+s.lost >= s.peerTotal {
		return true
	}
	if s.p.reliable() {
		return false
	}
	now := s.now()
	if ph.heard == 0 {
		ph.heard = now
	}
	if here != ph.waited {
		ph.waited, ph.since = here, now
		return false
	}
	if now-max(ph.since, ph.heard) < lossAfter {
		return false
	}
	ph.given = s.peerTotal - here - s.lost
	s.lost += ph.given
	return true
}

// over reports whether a run of the phase's kind has to stop now.
func (s *Session) over() bool {
	ph := &s.phase
	if s.interrupt.Load() || s.peerStop {
		ph.stopped = true
		return true
	}
	return ph.duration > 0 && ph.clock-ph.meter.start >= ph.duration
}

// stream is a side of a bandwidth test, or of one whose requests nobody answers: it posts
// requests, if it does, until the count or the time is up, and waits, if the peer does, until
// it has what the peer says it has sent.
func (s *Session) stream() error {
	ph := &s.phase
	sending := s.posts()
	var base uint64 // completed before this phase
	for _, f := range s.flows {
		base += f.completed
		f.target, f.ready = f.posted, sending
		if sending {
			f.target = f.posted + ph.iters
			if ph.iters == 0 {
				f.target = 1<<64 - 1
			}
		}
	}
	told := !sending
	stopping := false
	for {
		if sending {
			for _, f := range s.flows {
				if f.ready {
					if err := f.push(ph.size); err != nil {
						return err
					}
				}
			}
		}
		if err := s.poll(); err != nil {
			return err
		}
		ph.clock = s.now()
		if sending && ph.retired {
			ph.retired = false
			completed, finished := uint64(0), true
			for _, f := range s.flows {
				completed += f.completed
				finished = finished && f.completed == f.target
			}
			if n := completed - base - ph.meter.n; n > 0 {
				ph.meter.add(ph.clock, n)
			}
			sending = !finished
		}
		if sending && !stopping && s.over() {
			stopping = true
			for _, f := range s.flows {
				f.stop()
			}
			ph.retired = true // all may be complete already
		}
		if !sending && !told {
			if err := s.done(); err != nil {
				return err
			}
			told = true
		}
		if told && (!s.exposes() || s.complete()) {
			break
		}
	}
	if n := s.arrived(); s.exposes() && n > s.peerTotal {
		return fmt.Errorf("received %d messages, the peer has sent %d", n, s.peerTotal)
	}
	return nil
}

// stop sets the target so that the run ends soon, with a signaled send.
func (f *flow) stop() {
	target := f.posted
	if f.unsignaled > 0 {
		target++
	}
	if target < f.target {
		f.target, f.ready = target, true
	}
}

// ping is the client's side of a latency test: one message after the other, each when the one
// before was answered or, where that may happen, is lost.
func (s *Session) ping() error {
	ph, f := &s.phase, s.flows[0]
	here := s.settled(f)
	took := time.Duration(0) // of the message before; what is done about it keeps no answer waiting
	note := func() {
		if took > 0 {
			ph.lat.record(took)
			ph.meter.add(ph.clock, 1)
		}
		took = 0
	}
	for n := uint64(0); !(ph.duration == 0 && n == ph.iters) && !s.over(); n++ {
		want := here + 1
		last := ph.clock
		if err := s.post(f); err != nil {
			return err
		}
		note()
		lost := false
		for here = s.settled(f); here < want && !lost; here = s.settled(f) {
			if err := s.glance(); err != nil {
				return err
			}
			lost = !s.p.reliable() && s.now()-last > lossAfter && s.settled(f) < want
		}
		if lost {
			ph.given++
			if s.onLoss != nil {
				s.onLoss()
			}
			if err := s.sync(); err != nil {
				return err
			}
			here = s.settled(f)
			ph.clock = s.now()
			continue
		}
		ph.clock = s.now()
		took = max(ph.clock-last, 1)
	}
	note()
	return s.done()
}

// settled is how many requests of a latency test are done: answered by the peer's, or where
// nothing answers completed. Of WRITEs it is asked once for each look at the socket, since
// asking is that look.
func (s *Session) settled(f *flow) uint64 {
	if s.p.Test.answers() {
		return s.arrived()
	}
	return f.completed
}

// glance is poll for those who have asked settled: who polls memory has looked at the socket by
// that, and takes what completed without looking again.
func (s *Session) glance() error {
	if s.p.Test.answers() && s.p.Test.Verb() == VerbWrite && s.cq.Len() == 0 {
		return s.idle()
	}
	return s.poll()
}

// sync waits until what was sent before has arrived or never will, both ways, so that no late
// answer is taken for that of a later message. Control and data take the same way.
func (s *Session) sync() error {
	if err := s.say(message{kind: msgSync}); err != nil {
		return err
	}
	_, err := s.hear(msgSync)
	return err
}

// pong is the server's side of a latency test whose messages are answered.
func (s *Session) pong() error {
	f := s.flows[0]
	for {
		for n := s.arrived(); f.posted < n; {
			if err := s.post(f); err != nil {
				return err
			}
		}
		if len(s.inbox) > 0 && s.inbox[0].kind == msgSync {
			if err := s.sync(); err != nil {
				return err
			}
		}
		// What is missing of a service that loses messages the client has given up.
		if s.heardDone() && (!s.p.reliable() || s.arrived() >= s.peerTotal) {
			break
		}
		if err := s.glance(); err != nil {
			return err
		}
	}
	s.phase.clock = s.now()
	return nil
}

// post posts one request of a latency test: unsignaled if an answer says that it arrived.
func (s *Session) post(f *flow) error {
	wr := &f.wrs[0]
	f.aim(wr, f.posted+1, s.phase.size)
	wr.Flags = 0
	if !s.p.Test.answers() {
		wr.Flags = verbs.Signaled
	}
	for {
		_, err := f.qp.PostSendList(f.wrs[:1])
		if err == nil {
			f.posted++
			return nil
		}
		if !errors.Is(err, transport.ErrQueueFull) {
			return f.postFailed(err)
		}
		// The peer's acknowledgements trail its answers.
		if err := s.poll(); err != nil {
			return err
		}
	}
}
