package transport

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/role"
	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// How long the wire's thread rests while others drive: shortNap, and twice as long after each
// nap during which they drove busyDrives times for each shortNap of it, up to longNap. Packets
// and deadlines are late by at most this much when a driver stops without parking; a post
// that cannot leave at once ends a long nap.
// Every look of the thread takes its processor from a spinner for tens of microseconds.
const (
	shortNap   = 500 * time.Microsecond
	longNap    = 4 * time.Millisecond
	busyDrives = 4
)

// port is one wire with its socket, its thread and the role that says who may drive it.
type port struct {
	dev   *Device
	index int
	sock  *udp.Socket
	poll  *udp.Poller
	wire  *wire.Wire
	role  *role.Role

	watch *watch // how a waiter rests in the thread's place; nil where none can

	mail *mailbox // what other wires were sent and is for this one; nil with one wire

	yields   bool   // pollers yield after each step
	transmit func() // sends what posters left; made once, so that a post allocates nothing
	failed   bool   // the link's death was reported; owner of the role
	done     chan struct{}
}

func newPort(d *Device, index int, sock *udp.Socket) (*port, error) {
	p := &port{
		dev: d, index: index, sock: sock, done: make(chan struct{}),
		yields: !udp.Direct || runtime.GOMAXPROCS(0) == 1,
	}
	var tap wire.Tap
	if d.tap != nil {
		tap = d.tap
	}
	var err error
	p.wire, err = wire.New(wire.Config{
		Link: sock, Mem: d.mrs, Upcalls: upcalls{p}, Rand: func() uint32 { return uint32(random64()) },
		Index: index, Wires: d.wires(), Siblings: siblings{p}, GUID: d.guid, CM: d.cfg.cm(), MaxMTU: d.maxMTU, Tap: tap,
	})
	if err != nil {
		return nil, err
	}
	if p.poll, err = udp.NewPoller(sock); err != nil {
		return nil, err
	}
	var drv role.Driver = driver{p}
	if d.wires() > 1 {
		p.mail = new(mailbox)
		drv = sharedDriver{driver{p}}
	}
	p.role = role.New(drv, newSleeper(p))
	if udp.Direct {
		if p.watch, err = newWatch(p); err != nil {
			return nil, errors.Join(err, p.poll.Close())
		}
	}
	p.transmit = func() { p.wire.Transmit(d.now()) }
	return p, nil
}

// start begins the wire's thread.
func (p *port) start() {
	go func() {
		defer close(p.done)
		p.role.Run()
	}()
}

// do runs f under the role and returns its error, ErrClosed when the port is closed. Not
// from an upcall.
func (p *port) do(f func() error) (err error) {
	if e := p.role.Do(func() { err = f() }); e != nil {
		return ErrClosed
	}
	return err
}

// drive makes one step if nobody else drives.
func (p *port) drive() {
	// Whoever polls may spin. An owner that was preempted in mid-step, the socket's reader when
	// there is one, and everybody else where one goroutine runs at a time, need a processor, and the
	// scheduler takes none from a spinner for 10 ms.
	if !p.role.Poll(1) || p.yields {
		runtime.Gosched()
	}
}

// ring is the doorbell: the queue pair has something new. The first mark since the owner
// last looked sends at once if nobody owns the wire and nothing is under way to that peer;
// otherwise what is posted meanwhile goes out together with the owner's next step.
func (p *port) ring(q *wire.QP) {
	if !p.wire.Ring(q) {
		return
	}
	if !q.PeerBusy() && p.role.TryDrive(p.transmit) {
		return
	}
	p.role.Ring()
}

// shutdown tells the peers of open connections once and ends the thread.
func (p *port) shutdown() error {
	err := p.role.Close(func() { p.wire.Shutdown(p.dev.now()) })
	if errors.Is(err, role.ErrClosed) {
		err = nil // the thread has ended already, which is what was wanted
	}
	<-p.done
	return err
}

// close comes after shutdown and closes the socket.
func (p *port) close() error {
	var err error
	if p.watch != nil {
		err = p.watch.close()
	}
	return errors.Join(err, p.poll.Close(), p.sock.Close())
}

// collect adds the socket's and the role's counters.
func (p *port) collect(m map[string]uint64) {
	stats := p.sock.Stats()
	collect(m, "udp", &stats)
	collect(m, "role", &p.role.Counters)
}

// driver is the port as the role sees it.
type driver struct{ p *port }

func (d driver) Step() (more bool) {
	p := d.p
	p.wire.Step(p.dev.now())
	if err := p.wire.Err(); err != nil && !p.failed {
		p.failed = true
		go p.dev.fail(err) // it waits for locks, and the role must not
	}
	return p.wire.More()
}

func (d driver) Pending() bool { return d.p.wire.Pending() }

func (d driver) NextDeadline() verbs.Instant { return d.p.wire.NextDeadline() }

// sleeper is how the port's thread rests.
//
// It sleeps in a system call, and naps as a goroutine. In a system call it would hold a P, which the
// runtime's monitor takes away after each nap: by that the monitor keeps itself awake, every
// hundred microseconds, and each time interrupts whoever spins on its processor.
type sleeper struct {
	p    *port
	want udp.Events

	nap   time.Duration // the next one
	long  atomic.Bool   // the present one is more than short
	timer *time.Timer
	rouse chan struct{} // holds a token after Rouse
}

func newSleeper(p *port) *sleeper {
	s := &sleeper{p: p, nap: shortNap, timer: time.NewTimer(longNap), rouse: make(chan struct{}, 1)}
	s.timer.Stop()
	return s
}

func (s *sleeper) Arm()    { s.want = udp.Readable }
func (s *sleeper) Disarm() { s.want, s.nap = 0, shortNap }
func (s *sleeper) Wake()   { s.p.poll.Kick() }

func (s *sleeper) Sleep(until verbs.Instant) { s.p.sleep(s.p.poll, s.want, until) }

// sleep sleeps on a poller of the port's socket.
func (p *port) sleep(poll *udp.Poller, want udp.Events, until verbs.Instant) {
	timeout := int64(-1)
	if until != verbs.Never {
		timeout = max(0, int64(until-p.dev.now()))
	}
	// An error says that the poller is closed, which happens after the last sleep, or that the
	// system call failed, which must not turn the sleeper into a busy loop.
	if _, err := poll.Wait(want, timeout); err != nil {
		time.Sleep(shortNap)
	}
}

func (s *sleeper) Nap(driven uint64) {
	if driven < busyDrives*uint64(s.nap/shortNap) {
		s.nap = shortNap
	}
	s.long.Store(s.nap > shortNap)
	s.timer.Reset(s.nap)
	select {
	case <-s.timer.C:
		s.nap = min(2*s.nap, longNap)
	case <-s.rouse:
		s.timer.Stop()
		s.nap = shortNap
	}
	s.long.Store(false)
}

func (s *sleeper) Doze() {
	<-s.rouse
	s.nap = shortNap
}

func (s *sleeper) Hurry() {
	if s.long.Load() && s.long.Swap(false) {
		s.Rouse()
	}
}

func (s *sleeper) Rouse() {
	select {
	case s.rouse <- struct{}{}:
	default:
	}
}
