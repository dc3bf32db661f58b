package netsim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var mixSeed = flag.Int("mixseed", -1, "play only this seed of TestEveryOperationUnderFaults")

// TestEveryOperationUnderFaults lets two devices do everything that RC has to each other, over
// several queue pairs, while the network loses, doubles, delays and damages packets, and
// compares with a model of memory and messages (mix_model_test.go): every byte of memory, inside the regions
// and around them, is what it would be if each operation had been done once, in order;
// atomics and receives bring what they must; completions are in order and complete. The queue
// pairs are closed without waiting, and nothing stays behind.
func TestEveryOperationUnderFaults(t *testing.T) {
	seeds, ops := mixSeeds, mixOps
	if testing.Short() || raceEnabled {
		seeds, ops = 4, 500
	}
	for seed := range uint64(seeds) {
		if *mixSeed >= 0 && seed != uint64(*mixSeed) {
			continue
		}
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			m := newMix(t, seed, ops)
			m.run()
			m.compare()
			m.close()
			m.report()
		})
	}
}

// mix is one seed's run.
type mix struct {
	t    *testing.T
	seed uint64
	r    *rand.Rand
	net  *Net
	shape
	sides  [2]*mixSide
	posted int
	ops    int
	kinds  map[verbs.Opcode]int
}

// shape is how the devices of a seed are built; that each thing occurs in the first few seeds
// is not left to chance.
type shape struct {
	qps, depth    int
	srq, oneLane  bool
	sigAll, v6    bool
	runIDs        bool
	mtu           verbs.MTU
	reads         uint8
	buffer, trunk int // what the nodes say of their sockets; the longest train
	late          time.Duration
	faults        Faults
}

func shapeOf(seed uint64, r *rand.Rand) shape {
	pick := func(p ...float64) float64 { return p[r.IntN(len(p))] }
	return shape{
		qps: 1 + int(seed)%4, depth: []int{1, 8, 32, 16}[seed/4%4|(seed&1)],
		srq: seed%2 == 1, oneLane: seed%3 != 0, sigAll: seed%7 == 6, v6: seed%2 == 0, runIDs: seed%4 == 3,
		mtu: verbs.MTU(1 + seed%5), reads: []uint8{1, 4, 16}[r.IntN(3)],
		buffer: []int{0, 0, 212992, 4 << 20}[r.IntN(4)], trunk: []int{1, 4, 16}[r.IntN(3)],
		late: []time.Duration{50 * time.Microsecond, time.Millisecond, 20 * time.Millisecond}[r.IntN(3)],
		faults: Faults{
			Drop: pick(0.002, 0.01, 0.03), Duplicate: pick(0.002, 0.01, 0.05),
			Reorder: pick(0.002, 0.01, 0.05), Corrupt: pick(0.002, 0.01, 0.03),
		},
	}
}

func newMix(t *testing.T, seed uint64, ops int) *mix {
	r := rand.New(rand.NewPCG(seed, 0x313))
	m := &mix{t: t, seed: seed, r: r, net: New(seed), shape: shapeOf(seed, r), ops: ops, kinds: map[verbs.Opcode]int{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to play it again: go test -run TestEveryOperationUnderFaults -mixseed %d; %+v", seed, m.shape)
		}
	})
	m.net.ReorderDelay = m.late
	m.net.Faults = m.faults
	m.net.RunIDs = m.runIDs
	addrs := [2]string{"10.0.0.1", "10.0.0.2"}
	if m.v6 {
		addrs = [2]string{"fd00::1", "fd00::2"}
	}
	for i, addr := range addrs {
		nd := m.net.Node(addr)
		nd.MaxSegs, nd.RecvBuffer = m.trunk, m.buffer
		m.sides[i] = m.newSide(nd, i)
	}
	m.sides[0].peer, m.sides[1].peer = m.sides[1], m.sides[0]
	for i := range m.qps {
		m.connect(i)
	}
	for _, s := range m.sides {
		s.node.OnCompletions = s.completions
	}
	return m
}

func (m *mix) fatalf(format string, args ...any) {
	m.t.Helper()
	m.t.Fatalf("seed %d, after %d operations: %s", m.seed, m.posted, fmt.Sprintf(format, args...))
}

func (m *mix) connect(i int) {
	var ends [2]*mixEnd
	for k, s := range m.sides {
		ends[k] = s.newEnd(i)
	}
	ends[0].peer, ends[1].peer = ends[1], ends[0]
	p := Defaults()
	p.MTU, p.ResponderResources, p.InitiatorDepth = m.mtu, m.reads, m.reads
	p.Timeout = verbs.AckTimeoutFor(64 * time.Millisecond)
	a, b := i&1, 1-i&1 // who asks
	ac, bc, err := m.net.Connect(m.sides[a].node, m.sides[b].node, ends[a].q, ends[b].q, p)
	if err != nil {
		m.fatalf("%v", err)
	}
	ends[a].conn, ends[b].conn = ac, bc
}

// run posts until enough is posted, and waits until everything is complete.
func (m *mix) run() {
	if !m.net.Run(time.Hour, m.pump) {
		for _, s := range m.sides {
			for _, e := range s.ends {
				if len(e.posted) > 0 {
					m.t.Logf("oldest: %+v", e.posted[0].wr)
				}
				m.t.Logf("%v: %d posted, %d messages expected, %d receives posted, %v", s.node.Addr, len(e.posted), len(e.messages), len(e.recvs), e.q.State())
			}
		}
		m.fatalf("stuck at %v", time.Duration(m.net.Now()))
	}
}

// pump is called whenever the network has come to rest for a moment. It reports whether all is done.
func (m *mix) pump() bool {
	done := true
	for _, s := range m.sides {
		if m.r.IntN(64) == 0 {
			s.dry = !s.dry // a drought: no receives are posted for a while
		}
		if !s.dry && m.r.IntN(8) == 0 {
			s.supplyLate()
		}
		for _, e := range s.ends {
			if len(e.posted) == 0 || m.r.IntN(4) > 0 {
				e.postSome()
			}
			if len(e.posted) > 0 || len(e.messages) > 0 {
				done = false
			}
		}
	}
	return done && m.posted >= m.ops
}

// compare looks at everything that is left when all is done.
func (m *mix) compare() {
	dropped := 0
	for _, s := range m.sides {
		c := &s.node.Wire.Counters
		for _, d := range []*atomic.Uint64{
			&c.DropDecode, &c.DropPKey, &c.DropNoQP, &c.DropTransport, &c.DropAddress, &c.DropICRC, &c.DropQKey, &c.DropGSI,
		} {
			dropped += int(d.Load())
		}
	}
	if dropped != m.net.Damaged {
		m.fatalf("%d packets arrived damaged and %d were dropped", m.net.Damaged, dropped)
	}
	for _, s := range m.sides {
		s.compareMemory()
		s.compareCounter()
		s.compareReceives()
		for _, e := range s.ends {
			if st := e.q.State(); st != verbs.QPRTS {
				m.fatalf("a queue pair of %v is in %v", s.node.Addr, st)
			}
		}
		for _, l := range s.lanes {
			if l.Len() != 0 {
				m.fatalf("%d completions too many", l.Len())
			}
		}
	}
}

// close ends all connections from one side or the other, without a pause, while packets are
// still lost: both sides' tables are empty in the end.
func (m *mix) close() {
	for _, s := range m.sides {
		s.node.OnCompletions = nil // what is left are receives, which are flushed
		for _, e := range s.ends {
			if m.r.IntN(2) == 0 {
				s.node.Wire.Hangup(m.net.Now(), e.conn)
				s.node.Wire.DestroyQP(m.net.Now(), e.q)
				e.closed = true
			}
		}
	}
	m.net.Run(10*time.Second, nil)
	for _, s := range m.sides {
		for _, e := range s.ends {
			if !e.closed {
				s.node.Wire.Hangup(m.net.Now(), e.conn)
				s.node.Wire.DestroyQP(m.net.Now(), e.q)
			}
		}
	}
	m.net.Run(time.Minute, nil)
	for _, s := range m.sides {
		if c, q := s.node.Wire.Conns(), s.node.Wire.QPs(); c != 0 || q != 0 {
			m.fatalf("%d connections and %d queue pairs are left", c, q)
		}
	}
}

// report says what the seed has done, and fails when it did not do what it is for.
func (m *mix) report() {
	n := m.net
	var again, dup, icrc, rnr uint64
	for _, s := range m.sides {
		c := s.node.Wire.QPCounters()
		again += c.Retransmits.Load()
		dup += c.Duplicates.Load()
		rnr += c.RNRNaksSent.Load()
		icrc += s.node.Wire.Counters.DropICRC.Load()
	}
	m.t.Logf("seed %d: %d operations %v; packets: %d dropped, %d doubled, %d late, %d damaged (%d by ICRC); %d sent again, %d duplicates, %d RNR, in %v",
		m.seed, m.posted, m.kinds, n.Dropped, n.Duplicated, n.Reordered, n.Corrupted, icrc, again, dup, rnr, time.Duration(n.Now()))
	if testing.Short() || raceEnabled {
		return // too few to be sure of each
	}
	if n.Dropped == 0 || n.Duplicated == 0 || n.Reordered == 0 || icrc == 0 || again == 0 || dup == 0 || rnr == 0 {
		m.t.Errorf("seed %d: a fault did not occur", m.seed)
	}
	for _, op := range mixOpcodes {
		if m.kinds[op] == 0 {
			m.t.Errorf("seed %d: no %v", m.seed, op)
		}
	}
}

// lanesFor makes the completion queues of a side: one for everything, or two.
func (m *mix) lanesFor() []*qp.CQ {
	if m.oneLane {
		return []*qp.CQ{qp.NewCQ(4096)}
	}
	return []*qp.CQ{qp.NewCQ(2048), qp.NewCQ(2048)}
}

// pieces makes a gather or scatter list of n bytes at off, in up to most pieces, some of them
// empty, each through one of two keys of the same memory.
func (m *mix) pieces(regions [2]*mr.Region, off, n, most int) (l []verbs.SGE) {
	if n == 0 && m.r.IntN(2) == 0 {
		return nil
	}
	for k := 1 + m.r.IntN(most); k > 0; k-- {
		part := n
		if k > 1 {
			part = m.r.IntN(n + 1)
		}
		l = append(l, sgl(regions[m.r.IntN(2)], off, part)...)
		off, n = off+part, n-part
	}
	return l
}
