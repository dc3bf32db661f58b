package qp

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// The two queues against a sequential model: random histories of posts, slow posts in their
// single steps, transitions, and the wire's taking and retiring. The model knows no queue
// word, sequence numbers or cuts: it remembers of every entry what became of its life.

// modelQueue is what the test needs of a queue.
type modelQueue interface {
	base() *gate
	// post posts a chain in which the request at index bad, if there is one, is malformed.
	post(ids []uint64, bad int) (n int, ring bool, err error)
	writeOne(pos, id uint64)
	moveTo(verbs.QPState) (waiting uint64, counted bool)
	next() (uint64, Fate)
	take()
	retire(uint64)
	idAt(pos uint64) uint64
}

type modelSends struct{ *SendQueue }

func (q modelSends) base() *gate { return &q.gate }
func (q modelSends) post(ids []uint64, bad int) (int, bool, error) {
	wrs := sends(ids...)
	if bad < len(wrs) {
		wrs[bad].Opcode = 15
	}
	return q.Post(wrs)
}
func (q modelSends) writeOne(pos, id uint64)               { q.write(pos, &sends(id)[0]) }
func (q modelSends) moveTo(s verbs.QPState) (uint64, bool) { return q.move(s), true }
func (q modelSends) idAt(pos uint64) uint64                { return q.at(pos).WRID }

type modelRecvs struct{ *RecvQueue }

func (q modelRecvs) base() *gate { return &q.gate }
func (q modelRecvs) post(ids []uint64, bad int) (int, bool, error) {
	wrs := recvs(ids...)
	if bad < len(wrs) {
		wrs[bad].SGList = make([]verbs.SGE, 3)
	}
	return q.Post(wrs)
}
func (q modelRecvs) writeOne(pos, id uint64)               { q.write(pos, &recvs(id)[0]) }
func (q modelRecvs) moveTo(s verbs.QPState) (uint64, bool) { q.move(s); return 0, false }
func (q modelRecvs) idAt(pos uint64) uint64                { return q.at(pos).WRID }

// model is the specification.
type model struct {
	refuse, quiet, uses, flushes stateSet
	sqeSeals                     bool
	badErr                       error

	state   verbs.QPState
	entries []modelEntry // all that were ever reserved
	taken   int
	retired int
	depth   int
	nextID  uint64
}

type modelEntry struct {
	id        uint64
	published bool
	doom      Fate // FateWait while its life goes on
}

// slow is a post that is not finished.
type slow struct {
	first, n int // indexes of entries
	written  int
	unpub    int // how many are still to be published
}

// reserve is what a post of n good requests gets.
func (m *model) reserve(n int) (first, took int, err error) {
	first = len(m.entries)
	if m.refuse.has(m.state) {
		return 0, 0, verbs.ErrBadState
	}
	took = min(n, m.depth-(first-m.retired))
	if took == 0 {
		return 0, 0, verbs.ErrQueueFull
	}
	for range took {
		m.nextID++
		m.entries = append(m.entries, modelEntry{id: m.nextID})
	}
	return first, took, nil
}

func (m *model) rings(first int) bool {
	return !m.quiet.has(m.state) || m.entries[first].doom != FateWait
}

// next is the fate of the oldest entry not taken.
func (m *model) next() Fate {
	if m.taken == len(m.entries) || !m.entries[m.taken].published {
		return FateWait
	}
	switch e := m.entries[m.taken]; {
	case e.doom != FateWait:
		return e.doom
	case m.uses.has(m.state):
		return FateSend
	case m.flushes.has(m.state):
		return FateFlush
	}
	return FateWait
}

// move changes the state; waiting is how many entries the new state lets the wire have, those
// of slow posters included.
func (m *model) move(to verbs.QPState) (waiting int) {
	for i := m.taken; i < len(m.entries); i++ {
		e := &m.entries[i]
		switch {
		case to == verbs.QPReset:
			e.doom = FateForget
		case m.sqeSeals && m.state == verbs.QPSQE && to == verbs.QPRTS && e.doom == FateWait:
			e.doom = FateFlush
		}
		if e.doom == FateWait {
			waiting++
		}
	}
	m.state = to
	if to == verbs.QPReset {
		for m.next() == FateForget {
			m.taken++
		}
		m.retired = m.taken
	}
	return waiting
}

// edges are the transitions of a queue pair.
var edges = [verbs.QPStates][]verbs.QPState{
	verbs.QPReset: {verbs.QPReset, verbs.QPInit},
	verbs.QPInit:  {verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPErr},
	verbs.QPRTR:   {verbs.QPReset, verbs.QPRTS, verbs.QPErr},
	verbs.QPRTS:   {verbs.QPReset, verbs.QPRTS, verbs.QPSQD, verbs.QPSQE, verbs.QPErr},
	verbs.QPSQD:   {verbs.QPReset, verbs.QPSQD, verbs.QPRTS, verbs.QPErr},
	verbs.QPSQE:   {verbs.QPReset, verbs.QPRTS, verbs.QPErr},
	verbs.QPErr:   {verbs.QPReset, verbs.QPErr},
}

// modelTest runs one random history.
func modelTest(t *rapid.T, start uint64, m *model, q modelQueue) {
	var slows []*slow
	at := func(i int) uint64 { return start + uint64(i) }
	settle := func() { // what was sent completes
		q.retire(uint64(m.taken - m.retired))
		m.retired = m.taken
	}
	t.Repeat(map[string]func(*rapid.T){
		"post": func(t *rapid.T) {
			n := rapid.IntRange(0, m.depth+1).Draw(t, "n")
			bad := rapid.IntRange(0, 2*m.depth).Draw(t, "bad")
			ids := make([]uint64, n)
			for i := range ids {
				ids[i] = m.nextID + uint64(i) + 1
			}
			var want struct {
				n    int
				ring bool
				err  error
			}
			switch good := min(n, bad); {
			case good == 0 && n > 0 && m.refuse.has(m.state):
				want.err = verbs.ErrBadState
			case good == 0 && n > 0:
				want.err = m.badErr
			case good > 0:
				first, took, err := m.reserve(good)
				want.n, want.err = took, err
				if err != nil {
					break
				}
				want.ring = m.rings(first)
				for i := range took {
					m.entries[first+i].published = true
				}
				if took < good {
					want.err = verbs.ErrQueueFull
				} else if good < n {
					want.err = m.badErr
				}
			}
			got := want
			got.n, got.ring, got.err = q.post(ids, bad)
			if got != want {
				t.Fatalf("post of %d with the bad one at %d in %v: %v, want %v", n, bad, m.state, got, want)
			}
		},
		"slow post": func(t *rapid.T) {
			n := rapid.IntRange(1, m.depth).Draw(t, "n")
			first, took, wantErr := m.reserve(n)
			pos, got, err := q.base().reserve(uint64(n), m.refuse)
			if err != wantErr || int(got) != took || err == nil && pos != at(first) {
				t.Fatalf("reserve(%d) in %v: %d, %d, %v; want %d, %d, %v", n, m.state, pos-start, got, err, first, took, wantErr)
			}
			if err == nil {
				slows = append(slows, &slow{first: first, n: took, unpub: took})
			}
		},
		"slow step": func(t *rapid.T) {
			if len(slows) == 0 {
				t.Skip("none")
			}
			i := rapid.IntRange(0, len(slows)-1).Draw(t, "which")
			s := slows[i]
			if s.written < s.n {
				q.writeOne(at(s.first+s.written), m.entries[s.first+s.written].id)
				s.written++
				return
			}
			s.unpub--
			q.base().publish(at(s.first+s.unpub), 1)
			m.entries[s.first+s.unpub].published = true
			if s.unpub > 0 {
				return
			}
			if got, want := q.base().mustRing(at(s.first), m.quiet), m.rings(s.first); got != want {
				t.Fatalf("the poster of %d rings: %v in %v, want %v", s.first, got, m.state, want)
			}
			slows = append(slows[:i], slows[i+1:]...)
		},
		"move": func(t *rapid.T) {
			to := rapid.SampledFrom(edges[m.state]).Draw(t, "to")
			want := m.move(to)
			if got, counted := q.moveTo(to); counted && int(got) != want {
				t.Fatalf("the move to %v let %d go, want %d", to, got, want)
			}
		},
		"wire": func(t *rapid.T) {
			for range rapid.IntRange(1, m.depth).Draw(t, "budget") {
				pos, fate := q.next()
				if want := m.next(); fate != want || pos != at(m.taken) {
					t.Fatalf("next in %v: %v at %d, want %v at %d", m.state, fate, pos-start, want, m.taken)
				}
				if fate == FateWait {
					return
				}
				if got, want := q.idAt(pos), m.entries[m.taken].id; got != want {
					t.Fatalf("entry %d is request %d, want %d", m.taken, got, want)
				}
				if fate != FateSend {
					settle()
				}
				q.take()
				m.taken++
				if fate != FateSend {
					settle()
				}
			}
		},
		"retire": func(t *rapid.T) {
			n := rapid.IntRange(0, m.taken-m.retired).Draw(t, "n")
			q.retire(uint64(n))
			m.retired += n
		},
		"": func(t *rapid.T) {
			checkGate(t, q.base())
			if got, want := q.base().inUse(), len(m.entries)-m.retired; got != want {
				t.Fatalf("%d in use, want %d", got, want)
			}
			if got := q.base().stateNow(); got != m.state {
				t.Fatalf("state %v, want %v", got, m.state)
			}
		},
	})
}

// modelStarts leave room for a history before 2^61.
var modelStarts = []uint64{0, 1, 1<<32 - 20, 1<<61 - 1<<16}

func TestModelSends(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.SampledFrom(modelStarts).Draw(t, "start")
		depth := 1 << rapid.IntRange(0, 3).Draw(t, "log depth")
		modelTest(t, start, &model{
			refuse:   states(verbs.QPReset, verbs.QPInit),
			quiet:    states(verbs.QPRTR, verbs.QPSQD),
			uses:     states(verbs.QPRTS),
			flushes:  states(verbs.QPSQE, verbs.QPErr),
			sqeSeals: true, badErr: verbs.ErrBadOpcode, depth: depth,
		}, modelSends{newSendQueue(verbs.RC, smallCap(depth), false, &testMem{}, testPD, start)})
	})
}

func TestModelRecvs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.SampledFrom(modelStarts).Draw(t, "start")
		depth := 1 << rapid.IntRange(0, 3).Draw(t, "log depth")
		modelTest(t, start, &model{
			refuse:  states(verbs.QPReset),
			quiet:   states(verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPSQE),
			uses:    states(verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPSQE),
			flushes: states(verbs.QPErr),
			badErr:  verbs.ErrTooManySGE, depth: depth,
		}, modelRecvs{newRecvQueue(smallCap(depth), start)})
	})
}
