package qp

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// The race harness. In every round posters post once each, and nothing after it, while the
// wire takes its queue through some transitions. The wire sleeps whenever there is no mark,
// as the transport's does, and looks at the queue only when there is one. When the posters
// have returned and the wire sleeps, nobody will ever ring again: everything must have come
// to its fate by then. No clock decides anything.
//
// With -tags doorbellyield the code under test gives way in its narrow places.

// sleeper is a wire's ready mark and its sleep. Setting the mark comes before looking for a
// sleeper, and going to sleep before looking for the mark.
type sleeper struct {
	ready  atomic.Bool
	asleep atomic.Bool
	over   atomic.Bool // the posters have returned
	wake   chan struct{}
}

func (s *sleeper) ring() {
	s.ready.Store(true)
	yield.Point()
	s.rouse()
}

func (s *sleeper) rouse() {
	if s.asleep.CompareAndSwap(true, false) {
		s.wake <- struct{}{}
	}
}

// wait sleeps until there is a mark, and takes it; false when there will never be one.
func (s *sleeper) wait() bool {
	for {
		if s.ready.Swap(false) {
			return true
		}
		if s.over.Load() {
			return s.ready.Swap(false) // rung before the last poster returned
		}
		s.asleep.Store(true)
		yield.Point()
		if (s.ready.Load() || s.over.Load()) && s.asleep.CompareAndSwap(true, false) {
			continue
		}
		<-s.wake
	}
}

// racing is a queue in the harness: *SendQueue or *RecvQueue.
type racing interface {
	// post posts a chain; slow ones dawdle between reserving and publishing, and call
	// reserved in between.
	post(ids []uint64, slow bool, reserved func()) (n int, ring bool, err error)
	moveTo(verbs.QPState)
	next() (uint64, Fate)
	take()
	retire(uint64)
	// whole returns the WRID at pos, and whether all of the entry says the same.
	whole(pos uint64) (id uint64, ok bool)
	base() *gate
}

// racingMem is the memory of racing sends: a poster's Local dawdles. A poster asks for each
// of its requests when it checks, and again when it has reserved the slots and writes them.
type racingMem struct {
	testMem
	asks [racePosters]struct {
		n        int
		reserved func()
	}
}

func (m *racingMem) Local(pd PD, key uint32, addr uint64, n uint32, need verbs.Access) ([]byte, verbs.WCStatus) {
	a := &m.asks[(addr-sendBase)/4]
	if a.n--; a.n == -1 {
		a.reserved()
	}
	dawdle()
	return m.testMem.Local(pd, key, addr, n, need)
}

// dawdle gives way or burns a little time.
func dawdle() {
	if r := rand.Uint32(); r&3 == 0 {
		runtime.Gosched()
	} else {
		burn(r >> 8 & 255)
	}
}

func burn(n uint32) {
	for range n {
		burnt.Load()
	}
}

var burnt atomic.Uint32

type racingSends struct {
	*SendQueue
	mem *racingMem
}

func newRacingSends() racing {
	mem := &racingMem{}
	mem.add(testPD, sendKey, sendBase, 4*racePosters, 0)
	return racingSends{newSendQueue(verbs.RC, smallCap(4), false, mem, testPD, 0), mem}
}

func (q racingSends) post(ids []uint64, slow bool, reserved func()) (int, bool, error) {
	var wrs [2]verbs.SendWR
	var sge [2][1]verbs.SGE
	poster := posterOf(ids[0])
	for i, id := range ids {
		sge[i][0] = verbs.SGE{Addr: sendBase + 4*uint64(poster), Length: 4, LKey: sendKey}
		wrs[i] = verbs.SendWR{WRID: id, RemoteAddr: id, Swap: id, Opcode: verbs.Send, SGList: sge[i][:]}
		if slow {
			wrs[i].Flags = verbs.Inline
		}
	}
	q.mem.asks[poster].n, q.mem.asks[poster].reserved = len(ids), reserved
	return q.Post(wrs[:len(ids)])
}

func (q racingSends) moveTo(s verbs.QPState) { q.move(s) }
func (q racingSends) base() *gate            { return &q.gate }
func (q racingSends) whole(pos uint64) (uint64, bool) {
	w := q.at(pos)
	return w.WRID, w.RemoteAddr == w.WRID && w.Swap == w.WRID && w.Length == 4
}

type racingRecvs struct{ *RecvQueue }

func newRacingRecvs() racing { return racingRecvs{newRecvQueue(smallCap(4), 0)} }

func (q racingRecvs) post(ids []uint64, slow bool, reserved func()) (int, bool, error) {
	var wrs [2]verbs.RecvWR
	var sge [2][1]verbs.SGE
	for i, id := range ids {
		sge[i][0] = verbs.SGE{Addr: id, Length: uint32(id)}
		wrs[i] = verbs.RecvWR{WRID: id, SGList: sge[i][:]}
	}
	if !slow {
		return q.Post(wrs[:len(ids)])
	}
	// What Post does, with pauses: a receive has no data to dawdle over.
	pos, n, err := q.reserve(uint64(len(ids)), recvRefuse)
	reserved()
	dawdle()
	for i := range n {
		q.write(pos+i, &wrs[i])
		dawdle()
	}
	if err == nil {
		q.publish(pos, n)
		dawdle()
	}
	return int(n), err == nil && q.mustRing(pos, recvNoRing), err
}

func (q racingRecvs) moveTo(s verbs.QPState) { q.move(s) }
func (q racingRecvs) base() *gate            { return &q.gate }
func (q racingRecvs) whole(pos uint64) (uint64, bool) {
	w := q.at(pos)
	return w.WRID, w.Length == w.WRID && q.sgList(pos)[0].Addr == w.WRID
}

// raceRound is one round: what the posters did and what the wire saw.
type raceRound struct {
	q     racing
	bell  sleeper
	left  atomic.Int32 // posters that have not returned
	calls [racePosters]raceCall
	saw   []raceSeen
	// How many lives have ended, by RESET or by leaving SQE: posters learn from it in which
	// life their slots were reserved. begun is raised before a life ends by leaving SQE,
	// ended after it. A RESET raises both afterwards: nothing is reserved in RESET, so that
	// a slot which is reserved when begun is read was reserved in that life or an earlier one.
	begun, ended atomic.Int32
}

type raceCall struct {
	ids        [2]uint64
	n          int
	err        error
	from, upTo int32 // it was reserved in one of these lives
}

type raceSeen struct {
	id    uint64
	fate  Fate
	state verbs.QPState
	life  int32
}

const racePosters = 3

// posterOf returns whose request it is.
func posterOf(id uint64) int { return int(id / 10) }

// chainOf is how many requests a poster posts in its call; together they fill the queue.
func chainOf(poster int) int { return 1 + poster&1 }

func (r *raceRound) post(poster int, rng *rand.Rand) {
	c := &r.calls[poster]
	for i := range c.ids {
		c.ids[i] = uint64(poster*10 + i + 1)
	}
	burn(rng.Uint32() & 511)
	c.from = r.ended.Load()
	c.upTo = -1
	reserved := func() { c.upTo = r.begun.Load() }
	var ring bool
	c.n, ring, c.err = r.q.post(c.ids[:chainOf(poster)], rng.Uint32()&1 == 0, reserved)
	if c.upTo < 0 {
		reserved()
	}
	if ring {
		r.bell.ring()
	}
	if r.left.Add(-1) == 0 {
		r.bell.over.Store(true)
		r.bell.rouse()
	}
}

// serve is a step of the wire. What is sent is retired when the step ends.
func (r *raceRound) serve() error {
	started := uint64(0)
	for {
		pos, fate := r.q.next()
		if fate == FateWait || fate == FateSend && r.q.base().state != verbs.QPRTS {
			break
		}
		id, ok := r.q.whole(pos)
		if !ok {
			return fmt.Errorf("position %d was read before it was written", pos)
		}
		r.saw = append(r.saw, raceSeen{id, fate, r.q.base().state, r.begun.Load()})
		r.q.take()
		if fate == FateSend {
			started++
			continue
		}
		if started > 0 {
			r.q.retire(started)
			started = 0
		}
		r.q.retire(1)
	}
	if started > 0 {
		r.q.retire(started)
	}
	return nil
}

// wire takes the queue along the path and serves it until there is nothing left to wait for.
func (r *raceRound) wire(path []verbs.QPState, rng *rand.Rand) error {
	for _, s := range path {
		burn(rng.Uint32() & 511)
		switch leavesSQE := r.q.base().state == verbs.QPSQE; {
		case s == verbs.QPReset:
			r.q.moveTo(s)
			r.begun.Add(1)
			r.ended.Add(1)
		case leavesSQE:
			r.begun.Add(1)
			r.q.moveTo(s)
			r.ended.Add(1)
		default:
			r.q.moveTo(s)
		}
		r.bell.ring()
		if rng.Uint32()&1 == 0 && r.bell.ready.Swap(false) {
			if err := r.serve(); err != nil {
				return err
			}
		}
	}
	for r.bell.wait() {
		if err := r.serve(); err != nil {
			return err
		}
	}
	return r.verdict()
}

// verdict judges the round when all is quiet.
func (r *raceRound) verdict() error {
	g := r.q.base()
	life := r.begun.Load()
	reserved := g.ctl.Load() >> stateBits
	waits := g.state == verbs.QPRTR || g.state == verbs.QPSQD
	switch {
	case g.taken < g.sealed.Load():
		return fmt.Errorf("of %d positions whose life has ended %d are still there", g.sealed.Load(), g.sealed.Load()-g.taken)
	case !waits && g.taken != reserved:
		return fmt.Errorf("%d entries are stranded in %v", reserved-g.taken, g.state)
	case g.retired.Load() != g.taken:
		return fmt.Errorf("taken %d, retired %d", g.taken, g.retired.Load())
	}
	for p := range r.calls {
		c := &r.calls[p]
		if c.err != nil && !errors.Is(c.err, verbs.ErrQueueFull) && !errors.Is(c.err, verbs.ErrBadState) {
			return c.err
		}
		at := -1
		for i, id := range c.ids {
			here := slices.IndexFunc(r.saw, func(s raceSeen) bool { return s.id == id })
			if here < 0 {
				if i < c.n && c.from == life && !waits {
					return fmt.Errorf("request %d was posted in the last life and has vanished", id)
				}
				continue
			}
			if slices.ContainsFunc(r.saw[here+1:], func(s raceSeen) bool { return s.id == id }) {
				return fmt.Errorf("request %d left twice", id)
			}
			s := r.saw[here]
			if i >= c.n {
				return fmt.Errorf("request %d was refused and left the queue", id)
			}
			if i > 0 && (here != at+1 || at < 0) {
				return fmt.Errorf("request %d does not follow the one before it in its chain", id)
			}
			at = here
			switch s.fate {
			case FateSend:
				if s.life < c.from || s.life > c.upTo || s.state != verbs.QPRTS {
					return fmt.Errorf("request %d, posted in life %d to %d, was sent in life %d and %v", id, c.from, c.upTo, s.life, s.state)
				}
			case FateFlush:
				if s.state != verbs.QPErr && s.state != verbs.QPSQE && s.life <= c.from {
					return fmt.Errorf("request %d, posted in life %d to %d, was flushed in life %d and %v", id, c.from, c.upTo, s.life, s.state)
				}
			case FateForget:
				if s.life <= c.from {
					return fmt.Errorf("request %d, posted in life %d to %d, was forgotten in life %d", id, c.from, c.upTo, s.life)
				}
			}
		}
	}
	return nil
}

// race runs rounds at each of several GOMAXPROCS: fewer where there are more of them than
// processors, for then the system takes a processor away in the middle of everything, and
// that takes time.
func race(t *testing.T, rounds int, newQueue func() racing, start []verbs.QPState, path ...verbs.QPState) {
	if underRace || yield.Enabled {
		rounds = max(rounds/20, 500)
	}
	if testing.Short() {
		rounds /= 10
	}
	for _, procs := range []int{1, 2, 4} {
		rounds := rounds
		if procs > runtime.NumCPU() {
			rounds /= 20
		}
		t.Run(fmt.Sprintf("procs=%d", procs), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			seed := uint64(time.Now().UnixNano())
			if err := raceRounds(rounds, seed, newQueue, start, path); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		})
	}
}

// raceRounds keeps its goroutines through all rounds: they meet in the current round.
func raceRounds(rounds int, seed uint64, newQueue func() racing, start, path []verbs.QPState) error {
	var current atomic.Pointer[raceRound]
	var posters sync.WaitGroup
	var stop atomic.Bool
	for p := range racePosters {
		posters.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(p)))
			var last *raceRound
			for !stop.Load() {
				r := current.Load()
				if r == last {
					runtime.Gosched()
					continue
				}
				r.post(p, rng)
				last = r
			}
		})
	}
	defer func() {
		stop.Store(true)
		posters.Wait()
	}()
	rng := rand.New(rand.NewPCG(seed, racePosters))
	wake := make(chan struct{}, 1)
	for i := range rounds {
		r := &raceRound{q: newQueue()}
		r.bell.wake = wake
		r.left.Store(racePosters)
		for _, s := range start {
			r.q.moveTo(s)
		}
		current.Store(r)
		if err := r.wire(path, rng); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
	}
	return nil
}

var (
	inINIT = []verbs.QPState{verbs.QPInit}
	inRTR  = []verbs.QPState{verbs.QPInit, verbs.QPRTR}
	inRTS  = []verbs.QPState{verbs.QPInit, verbs.QPRTR, verbs.QPRTS}
)

// Posts that race with the move to RTS are sent without a further post.
func TestRaceRTS(t *testing.T) { race(t, 100_000, newRacingSends, inRTR, verbs.QPRTS) }

// Posts that race with a wire that goes to sleep.
func TestRaceSleep(t *testing.T) { race(t, 20_000, newRacingSends, inRTS) }

// Posts that race with the move to ERR are flushed once.
func TestRaceErr(t *testing.T) { race(t, 10_000, newRacingSends, inRTR, verbs.QPErr) }

func TestRaceRTSErr(t *testing.T) {
	race(t, 10_000, newRacingSends, inRTR, verbs.QPRTS, verbs.QPErr)
}

// Posts that race with RESET and the next life belong to one life only.
func TestRaceReset(t *testing.T) {
	race(t, 20_000, newRacingSends, inRTR, verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPRTS)
}

// And in the next life's RTR nothing of the last one is left, although the gate is closed.
func TestRaceResetRTR(t *testing.T) {
	race(t, 10_000, newRacingSends, inRTR, verbs.QPReset, verbs.QPInit, verbs.QPRTR)
}

func TestRaceSQD(t *testing.T) {
	race(t, 10_000, newRacingSends, inRTS, verbs.QPSQD, verbs.QPRTS)
}

// A chain is visible whole: when its first entry is, the last one is too.
func TestRaceChain(t *testing.T) {
	const depth, rounds = 64, 2000
	q := newSendQueue(verbs.RC, smallCap(depth), false, &testMem{}, testPD, 0)
	q.move(verbs.QPInit)
	q.move(verbs.QPRTR)
	q.move(verbs.QPRTS)
	var poster sync.WaitGroup
	poster.Go(func() {
		wrs := make([]verbs.SendWR, depth)
		for i := range wrs {
			wrs[i].WRID = uint64(i)
		}
		for range rounds {
			for n := 0; n == 0; {
				runtime.Gosched()
				if n, _, _ = q.Post(wrs); n != 0 && n != depth {
					t.Errorf("%d of an empty queue's %d slots taken", n, depth)
				}
			}
		}
	})
	for range rounds {
		for !q.readable() {
			runtime.Gosched()
		}
		if last := q.taken + depth - 1; !q.slots.Readable(last) && !t.Failed() {
			t.Errorf("position %d is visible and %d is not", q.taken, last)
		}
		for i := range uint64(depth) {
			for !q.readable() {
				runtime.Gosched() // only when the test has failed already
			}
			pos, fate := q.next()
			if id := q.at(pos).WRID; fate != FateSend || id != i {
				t.Fatalf("%v for request %d, want %d", fate, id, i)
			}
			q.take()
		}
		q.retire(depth)
	}
	poster.Wait()
}

// What SQE has sealed is flushed even if the gate has closed again.
func TestRaceSQE(t *testing.T) {
	race(t, 10_000, newRacingSends, inRTS, verbs.QPSQE, verbs.QPRTS, verbs.QPSQD)
}

func TestRaceRecvErr(t *testing.T) { race(t, 20_000, newRacingRecvs, inINIT, verbs.QPRTR, verbs.QPErr) }

func TestRaceRecvReset(t *testing.T) {
	race(t, 10_000, newRacingRecvs, inRTR, verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPErr)
}
