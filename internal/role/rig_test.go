package role

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var (
	seedFlag     = flag.Uint64("seed", 0, "seed of the random rounds; 0 draws one")
	patienceFlag = flag.Duration("patience", 20*time.Second, "how long a test waits for what must come about by itself")
	roundsFlag   = flag.Int("rounds", 20_000, "rounds of each test that repeats one; 1000 at most with -short")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *seedFlag == 0 {
		*seedFlag = rand.Uint64()
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if code != 0 {
			fmt.Printf("-seed %d\n", *seedFlag)
		}
		os.Exit(code)
	}))
}

func rounds() int {
	if testing.Short() {
		return min(*roundsFlag, 1000)
	}
	return *roundsFlag
}

// sock is a socket with a wake-up, a clock and a thread's bed: a Sleeper that really blocks,
// in virtual time. Like the model it may be edge-triggered, which is less than epoll gives.
type sock struct {
	edge bool
	// nap is how a nap passes; nil is a few turns of the scheduler. It returns at once when
	// it is told that the token came.
	nap func(token func() bool)

	mu       sync.Mutex
	cond     sync.Cond
	token    bool
	armed    bool
	readable bool
	packets  int
	now      verbs.Instant
	roused   bool
	sleeping bool // in Sleep, with no reason to get up
	dozing   bool // in Doze likewise
	chair    chair
	dead     bool // Close has returned: nobody may come
}

func newSock(edge bool) *sock {
	s := &sock{edge: edge}
	s.cond.L = &s.mu
	s.chair.s = s
	return s
}

func (s *sock) alive() {
	if s.dead {
		panic("used after Close")
	}
}

func (s *sock) Arm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	s.armed = true
}

func (s *sock) Disarm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	s.armed, s.readable = false, false
}

func (s *sock) reason(until verbs.Instant) bool {
	return s.token || s.readable || s.armed && !s.edge && s.packets > 0 || until != verbs.Never && until <= s.now
}

func (s *sock) Sleep(until verbs.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	for !s.reason(until) {
		s.sleeping = true
		s.cond.Wait()
		s.sleeping = false
	}
	s.token = false
}

func (s *sock) Nap(uint64) {
	taken := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.alive()
		t := s.roused
		s.roused = false
		return t
	}
	if s.nap != nil {
		s.nap(taken)
		return
	}
	for range rand.IntN(4) {
		if taken() {
			return
		}
		runtime.Gosched()
	}
}

// Doze is a Nap that only Rouse ends; they have a token of their own.
func (s *sock) Doze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	for !s.roused {
		s.dozing = true
		s.cond.Wait()
		s.dozing = false
	}
	s.roused = false
}

func (s *sock) Rouse() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	s.roused = true
	s.stir()
}

// Hurry may be called after Close.
func (s *sock) Hurry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.dead && rand.IntN(2) == 0 {
		s.roused = true
		s.stir()
	}
}

// chair is where a watcher sleeps on the same socket: a Watcher, level-triggered.
type chair struct {
	s        *sock
	token    bool
	sleeping bool
	claimed  bool
}

func (c *chair) Claim(verbs.Instant) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.alive()
	if c.claimed {
		panic("claimed twice")
	}
	c.claimed = rand.IntN(2) == 0
}

func (c *chair) Unclaim() {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.alive()
	c.claimed = false
}

func (c *chair) Sleep(until verbs.Instant) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	for !c.token && s.packets == 0 && (until == verbs.Never || until > s.now) {
		c.sleeping = true
		s.cond.Wait()
		c.sleeping = false
	}
	c.token, c.claimed = false, false
}

func (c *chair) Wake() {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.alive()
	c.token = true
	c.s.stir()
}

func (c *chair) asleep() bool {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return c.sleeping
}

func (s *sock) Wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	s.token = true
	s.stir()
}

// stir wakes the sleeping thread to look for a reason; it counts as up from here on, so that
// nobody takes it for being at rest.
func (s *sock) stir() {
	s.sleeping, s.dozing, s.chair.sleeping = false, false, false
	s.cond.Broadcast()
}

func (s *sock) deliver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.packets++
	if s.armed {
		s.readable = true
	}
	s.stir()
}

func (s *sock) recv(batch int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive()
	if s.chair.claimed {
		return 0
	}
	n := min(batch, s.packets)
	s.packets -= n
	return n
}

func (s *sock) advance(to verbs.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = max(s.now, to)
	s.stir()
}

func (s *sock) clock() verbs.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

func (s *sock) asleep() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sleeping || s.dozing && s.chair.sleeping
}

// both reports whether the thread and a watcher sleep on the socket, so that a packet wakes two.
func (s *sock) both() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sleeping && s.chair.sleeping
}

// wire is a driver with random work. Its fields without atomics belong to the owner of the
// role, so the race detector sees who enters without it.
type wire struct {
	s      *sock
	bell   bell
	inside bool
	rng    *rand.Rand
	next   verbs.Instant
	steps  int

	mark    atomic.Bool
	work    atomic.Int64 // posted, not yet taken
	sent    atomic.Int64
	got     atomic.Int64 // packets
	fired   atomic.Int64 // deadlines that were set and passed
	timers  atomic.Int64 // deadlines that are set: 0 or 1
	due     atomic.Int64 // what next is, for the test
	onStep  func()       // in each step
	endless bool         // always more to do
}

func (w *wire) enter() {
	if w.inside {
		panic("two owners")
	}
	w.inside = true
	yield.Point()
}

func (w *wire) exit() { w.inside = false }

func (w *wire) Step() (more bool) {
	w.enter()
	defer w.exit()
	w.steps++
	if w.onStep != nil {
		w.onStep()
	}
	batch := 1 + w.rng.IntN(2)
	if n := w.s.recv(batch); n > 0 {
		w.got.Add(int64(n))
		more = n == batch
		w.bell.complete(n)
	}
	yield.Point()
	if w.mark.Load() {
		w.mark.Store(false) // first the mark, then the work
		yield.Point()
		if n := w.work.Swap(0); n > 0 {
			w.transmit(n)
		}
	}
	if w.next <= w.s.clock() {
		w.next = verbs.Never
		w.due.Store(int64(verbs.Never))
		w.timers.Store(0)
		w.fired.Add(1)
	}
	return more || w.endless
}

// transmit sends n posts and sets a random deadline, sometimes an earlier one than there is.
func (w *wire) transmit(n int64) {
	w.sent.Add(n)
	if w.rng.IntN(2) == 0 {
		at := w.s.clock() + 1 + verbs.Instant(w.rng.IntN(3))
		if at < w.next {
			w.next = at
			w.due.Store(int64(at))
			w.timers.Store(1)
		}
	}
	w.bell.complete(int(n))
}

func (w *wire) Pending() bool {
	w.enter()
	defer w.exit()
	return w.mark.Load() || w.endless
}

func (w *wire) NextDeadline() verbs.Instant {
	w.enter()
	defer w.exit()
	return w.next
}

// bell is a CQ's count and its bell, and the one who waits for it.
type bell struct {
	role  *Role
	cqe   atomic.Int64
	armed atomic.Bool
	taken atomic.Int64 // completions that the waiter has taken
	hand  bool         // hand back before parking, now and then
	sit   bool         // watch instead of parking, now and then

	mu     sync.Mutex
	cond   sync.Cond
	rung   bool
	err    error // ends Park
	parked bool  // in Park, with no reason to get up
}

func (b *bell) complete(n int) {
	b.cqe.Add(int64(n))
	yield.Point()
	if b.armed.Swap(false) {
		b.ring(nil)
	}
	b.role.Completed()
}

func (b *bell) ring(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rung, b.err, b.parked = true, err, false
	b.cond.Broadcast()
}

func (b *bell) Ready() bool {
	b.role.Poll(2)
	yield.Point()
	n := b.cqe.Swap(0)
	b.taken.Add(n)
	return n > 0
}

func (b *bell) Arm() {
	yield.Point()
	b.armed.Store(true)
}

func (b *bell) Disarm() { b.armed.Store(false) }

func (b *bell) Park() error {
	if b.sit && rand.IntN(4) > 0 && b.role.Sit() {
		b.role.Watch(func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.rung || b.cqe.Load() > 0
		})
		b.role.Rise()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.rung = false
		return b.err
	}
	if b.sit {
		b.role.Park()
		defer b.role.Unpark()
	} else if b.hand && rand.IntN(2) == 0 {
		b.role.HandBack()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.rung {
		b.parked = true
		b.cond.Wait()
	}
	b.rung = false
	return b.err
}

func (b *bell) resting() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.parked
}

// wait is a waiter until the bell is rung with an error.
func (b *bell) wait() (end func(t *testing.T)) {
	done, over := make(chan error), errors.New("over")
	go func() {
		for {
			if err := Await(b); err != nil {
				done <- err
				return
			}
		}
	}()
	return func(t *testing.T) {
		b.ring(over)
		b.role.Nudge()
		if err := <-done; err != over {
			t.Error(err)
		}
	}
}

// rig is a role with its driver, its sleeper and its thread.
type rig struct {
	*Role
	t  testing.TB
	w  *wire
	s  *sock
	wg sync.WaitGroup
}

func newRig(t testing.TB, edge bool) *rig {
	s := newSock(edge)
	w := &wire{s: s, next: verbs.Never, rng: rand.New(rand.NewPCG(*seedFlag, 1))}
	w.due.Store(int64(verbs.Never))
	w.bell.cond.L = &w.bell.mu
	r := &rig{Role: New(w, s), t: t, w: w, s: s}
	w.bell.role = r.Role
	r.SetWatcher(&s.chair)
	return r
}

// run starts the thread; the test's end closes the role.
func (r *rig) run() *rig {
	r.wg.Go(r.Role.Run)
	r.t.Cleanup(func() {
		r.shut()
		r.wg.Wait()
	})
	return r
}

func (r *rig) shut() {
	if err := r.Close(func() { r.w.enter(); r.w.exit() }); err != nil {
		return
	}
	r.dead()
}

// post is a poster: work, then the mark, and for the first mark the ring.
func (r *rig) post(how int) {
	if how == 0 && r.TryDrive(func() { r.w.enter(); r.w.transmit(1); r.w.exit() }) {
		return
	}
	r.w.work.Add(1)
	yield.Point()
	if r.w.mark.Swap(true) {
		return
	}
	yield.Point()
	if how == 1 {
		r.Drive(1 + rand.IntN(2))
	} else {
		r.Ring()
	}
}

// disturb is what others do at the same time, and then no more.
func (r *rig) disturb(rng *rand.Rand) {
	switch rng.IntN(6) {
	case 0:
		r.Poll(1)
	case 1:
		r.Poll(1 + rng.IntN(3))
		r.Poll(1)
	case 2:
		r.TryDrive(func() { r.w.enter(); r.w.exit() })
	case 3:
		r.HandBack()
	case 4:
		if err := r.Do(func() { r.w.enter(); r.w.exit() }); err != nil {
			panic(err)
		}
	}
}

// rest reports whether nothing can move any more: the thread sleeps, and so does the waiter
// if there is one. All others must have returned.
func (r *rig) rest(waiter bool) bool {
	sleeps := func() uint64 {
		c := &r.Counters
		return c.Sleeps.Load() + c.Dozes.Load() + c.Watches.Load()
	}
	n := sleeps()
	return r.s.asleep() && (!waiter || r.w.bell.resting() || r.s.chair.asleep()) && n == sleeps() && r.s.asleep()
}

// until waits for a condition that must come about by itself.
func (r *rig) until(what string, cond func() bool) {
	r.t.Helper()
	var start time.Time
	for i := 0; !cond(); i++ {
		if runtime.Gosched(); i < 200 {
			continue
		}
		time.Sleep(5 * time.Microsecond) // the core may be wanted for what we wait for
		switch {
		case start.IsZero():
			start = time.Now()
		case i%100 == 0 && time.Since(start) > *patienceFlag:
			// On its own goroutine, because this one's clean-up would wait for what is stranded.
			msg := fmt.Sprintf("%s: stranded: %s (-seed %d)\nowned %v, note %v, drives %d, bed %d, asleep %v\nwork %d, packets %d, due %d, now %d, completions %d, parked %v",
				r.t.Name(), what, *seedFlag, r.word.Owned(), r.word.Pending(), r.word.Drives(), r.bed.Load(), r.s.asleep(),
				r.w.work.Load(), r.s.packets, r.w.due.Load(), r.s.clock(), r.w.bell.cqe.Load(), r.w.bell.resting())
			go func() { panic(msg) }()
			select {}
		}
	}
}

// crowd runs a function on n goroutines at the same time, once per call of round. Between
// rounds they block: on a machine with two cores spinners would only be in the way.
type crowd struct {
	start []chan struct{}
	busy  atomic.Int64
	wg    sync.WaitGroup
}

func newCrowd(n int, fn func(rng *rand.Rand)) *crowd {
	c := &crowd{}
	for i := range n {
		rng := rand.New(rand.NewPCG(*seedFlag, uint64(100+i)))
		start := make(chan struct{}, 1)
		c.start = append(c.start, start)
		c.wg.Go(func() {
			for range start {
				fn(rng)
				c.busy.Add(-1)
			}
		})
	}
	return c
}

// round lets the crowd go once; back says when all are back.
func (c *crowd) round() {
	c.busy.Add(int64(len(c.start)))
	for _, s := range c.start {
		s <- struct{}{}
	}
}

func (c *crowd) back() bool { return c.busy.Load() == 0 }

func (c *crowd) end() {
	for _, s := range c.start {
		close(s)
	}
	c.wg.Wait()
}

// atProcs runs a test with 1, 2 and 4 processors, on a socket that is edge-triggered and on
// one that is level-triggered.
func atProcs(t *testing.T, fn func(t *testing.T, r *rig)) {
	for _, procs := range []int{1, 2, 4} {
		for _, edge := range []bool{true, false} {
			t.Run(fmt.Sprintf("procs=%d/edge=%v", procs, edge), func(t *testing.T) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
				r := newRig(t, edge).run()
				fn(t, r)
				r.shut()
			})
		}
	}
}
