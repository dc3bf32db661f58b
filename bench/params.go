package bench

import (
	"fmt"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Verb is what a test's messages are.
type Verb uint8

// The verbs of the workloads.
const (
	VerbSend Verb = iota
	VerbWrite
	VerbRead
	VerbAtomic
)

// String returns the name that perftest and the command line use.
func (v Verb) String() string { return [...]string{"send", "write", "read", "atomic"}[v&3] }

// fetches reports whether the requester gets something, which nobody notices at the other end.
func (v Verb) fetches() bool { return v == VerbRead || v == VerbAtomic }

// Test names a workload: a verb, and whether times or rates are measured.
type Test uint8

// The workloads.
const (
	// SendLat sends a message back and forth; its figures are half round trips.
	SendLat Test = iota + 1
	// SendBW sends as many messages as the depths allow.
	SendBW
	// WriteLat writes back and forth, each end polling its memory; its figures are half round
	// trips.
	WriteLat
	// WriteBW writes as many messages as the depth allows.
	WriteBW
	// ReadLat reads one message after the other; its figures are whole operations.
	ReadLat
	// ReadBW reads as many messages at a time as the depths allow.
	ReadBW
	// AtomicLat executes one atomic after the other; its figures are whole operations.
	AtomicLat
	// AtomicBW executes as many atomics at a time as the depths allow.
	AtomicBW
)

// Verb returns what the test's messages are.
func (t Test) Verb() Verb { return Verb((t - 1) / 2) }

// Latency reports whether the test measures times rather than rates.
func (t Test) Latency() bool { return t%2 == 1 }

// Valid reports whether the test exists.
func (t Test) Valid() bool { return t >= SendLat && t <= AtomicBW }

// String returns the name that perftest and the command line use.
func (t Test) String() string {
	switch {
	case !t.Valid():
		return fmt.Sprintf("test %d", uint8(t))
	case t.Latency():
		return t.Verb().String() + "_lat"
	}
	return t.Verb().String() + "_bw"
}

// answers reports whether the server answers each message with one of its own.
func (t Test) answers() bool { return t.Latency() && !t.Verb().fetches() }

// parts is what part of the time from post to done a latency test reports: perftest's choice.
func (t Test) parts() int {
	if t.answers() {
		return 2
	}
	return 1
}

// Limits of parameters; the smallest value of each is beside its field.
const (
	MaxSize     = 1 << 30
	MaxSizeAll  = 1 << 23
	MaxIters    = 1e10
	MaxDuration = 24 * time.Hour
	MaxDepth    = 16384
	MaxQPs      = 1024
	MaxCQMod    = 1024
	MaxPostList = 1024
	MaxInline   = 1024
	MaxOuts     = 128
	// AtomicSize is the size of every atomic.
	AtomicSize = 8
	// maxShared bounds a shared receive queue.
	maxShared = 1 << 16
	// maxPosted bounds what a session may have posted in all its queues.
	maxPosted = 1 << 20
)

// Params says what to run. The client's parameters are the session's.
type Params struct {
	Test Test
	// Type is the service: verbs.RC; verbs.UC for SEND and WRITE; verbs.UD for SEND. But on RC
	// messages may be lost, which ends no run and is counted (Result.Lost).
	Type verbs.QPType
	// Size is the length of a message in bytes: 0, or 1 but for SEND, to MaxSize; over UD to the
	// path MTU; of atomics AtomicSize. With All it is the largest of the sizes, which are 2, 4,
	// 8 and so on.
	Size int
	All  bool
	// Iters is the number of messages (of SendLat and WriteLat: of round trips) on each queue
	// pair, 1 to MaxIters; 0 if Duration decides.
	Iters int64
	// Duration is how long each size runs, up to MaxDuration; 0 if Iters decides.
	Duration time.Duration
	// TxDepth and RxDepth bound the sends and receives posted on a queue pair, 1 to MaxDepth.
	// Only SEND takes receives.
	TxDepth, RxDepth int
	// QPs is the number of data connections, 1 to MaxQPs; latency tests have one.
	QPs int
	// SRQ puts all receives of a side into one shared queue, as many as without (SEND).
	SRQ bool
	// CQMod is how many sends share a completion, 1 to MaxCQMod.
	CQMod int
	// PostList is how many sends are posted at a time, 1 to MaxPostList.
	PostList int
	// Inline is the largest message copied at post time, 0 to MaxInline (SEND, WRITE).
	Inline int
	// Outs is how many READs or atomics of a queue pair may be under way, 1 to MaxOuts; 0 for
	// other tests.
	Outs int
	// Swap makes atomics compare and swap instead of fetch and add.
	Swap bool
	// MTU is the path MTU to ask for; 0 leaves it to the devices.
	MTU verbs.MTU
	// Bidirectional lets the server send as well (bandwidth tests).
	Bidirectional bool
}

// Defaults returns perftest's parameters for a test.
func Defaults(t Test) Params {
	p := Params{
		Test: t, Type: verbs.RC, Size: 65536, Iters: 1000, TxDepth: 128, RxDepth: 512, QPs: 1, CQMod: 100, PostList: 1,
	}
	if t.Latency() {
		p.Size, p.TxDepth, p.CQMod, p.Inline = 2, 1, 1, 236
	}
	switch v := t.Verb(); {
	case t == WriteBW:
		p.Iters = 5000
	case t == WriteLat:
		p.Inline = 220
	case v.fetches():
		p.Inline, p.Outs = 0, 16
		if v == VerbAtomic {
			p.Size = AtomicSize
		}
	}
	return p
}

// RangeError is a parameter out of its range.
type RangeError struct {
	Name            string
	Value, Min, Max int64
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("%s is %d, want %d to %d", e.Name, e.Value, e.Min, e.Max)
}

// Check returns what is wrong with the parameters, or nil.
func (p *Params) Check() error {
	if !p.Test.Valid() {
		return fmt.Errorf("unknown %v", p.Test)
	}
	for _, r := range []RangeError{
		{"iterations", p.Iters, 0, MaxIters},
		{"duration in ns", int64(p.Duration), 0, int64(MaxDuration)},
		{"tx depth", int64(p.TxDepth), 1, MaxDepth},
		{"rx depth", int64(p.RxDepth), 1, MaxDepth},
		{"number of QPs", int64(p.QPs), 1, MaxQPs},
		{"CQ moderation", int64(p.CQMod), 1, MaxCQMod},
		{"post list", int64(p.PostList), 1, MaxPostList},
		{"inline size", int64(p.Inline), 0, MaxInline},
		{"MTU code", int64(p.MTU), 0, int64(verbs.MTU4096)},
		{"posted work requests (QPs times both depths)", int64(p.QPs) * int64(p.TxDepth+p.RxDepth), 0, maxPosted},
	} {
		if r.Value < r.Min || r.Value > r.Max {
			return &r
		}
	}
	if err := p.checkService(); err != nil {
		return err
	}
	switch {
	case (p.Iters == 0) == (p.Duration == 0):
		return fmt.Errorf("one of iterations and duration must be given, not both")
	case p.All && (p.Size < 2 || p.Size > MaxSizeAll):
		return &RangeError{"largest message size", int64(p.Size), 2, MaxSizeAll}
	case p.Test.Latency() && p.QPs != 1:
		return &RangeError{"number of QPs of a latency test", int64(p.QPs), 1, 1}
	case p.Test.Latency() && p.Bidirectional:
		return fmt.Errorf("a latency test is never bidirectional")
	}
	return nil
}

// checkService returns what the verb or the service does not have.
func (p *Params) checkService() error {
	v := p.Test.Verb()
	smallest, largest, outs := 0, MaxSize, 0
	if v != VerbSend {
		smallest = 1
	}
	if p.Type == verbs.UD {
		largest = verbs.MTU4096.Bytes()
		if p.MTU != 0 {
			largest = p.MTU.Bytes()
		}
	}
	if v == VerbAtomic {
		smallest, largest = AtomicSize, AtomicSize
	}
	if v.fetches() {
		outs = MaxOuts
	}
	switch {
	case p.Type != verbs.RC && p.Type != verbs.UC && p.Type != verbs.UD:
		return fmt.Errorf("unknown connection type %v, want RC, UC or UD", p.Type)
	case p.Type != verbs.RC && v.fetches():
		return fmt.Errorf("connection type %v has no READs and atomics: %v needs RC", p.Type, p.Test)
	case p.Type == verbs.UD && v == VerbWrite:
		return fmt.Errorf("connection type UD has no WRITEs: %v needs RC or UC", p.Test)
	case p.Size < smallest || p.Size > largest:
		return &RangeError{fmt.Sprintf("message size of %v over %v", p.Test, p.Type), int64(p.Size), int64(smallest), int64(largest)}
	case p.All && v == VerbAtomic:
		return fmt.Errorf("atomics have one size")
	case p.SRQ && v != VerbSend:
		return fmt.Errorf("%v takes no receives, so there is nothing to share", p.Test)
	case p.SRQ && p.QPs*p.RxDepth > maxShared:
		return &RangeError{"shared receives (QPs times rx depth)", int64(p.QPs) * int64(p.RxDepth), 1, maxShared}
	case p.Inline > 0 && v.fetches():
		return fmt.Errorf("%v sends nothing that could be inline", p.Test)
	case p.Outs < min(outs, 1) || p.Outs > outs:
		return &RangeError{fmt.Sprintf("outstanding requests of %v", p.Test), int64(p.Outs), int64(min(outs, 1)), int64(outs)}
	case p.Swap && v != VerbAtomic:
		return fmt.Errorf("%v executes no atomics", p.Test)
	}
	return nil
}

// Sizes returns the message sizes in the order they run.
func (p *Params) Sizes() []int {
	if !p.All {
		return []int{p.Size}
	}
	var sizes []int
	for n := 2; n <= p.Size; n *= 2 {
		sizes = append(sizes, n)
	}
	return sizes
}

// repost is how many receives are gathered before they are posted again.
func (p *Params) repost() int { return min(max(p.RxDepth/4, 1), 64) }

// window is how many messages of a queue pair may be without completion. For SEND it stays
// below the peer's receive ring by what that gathers, so that a message meets a receive as long
// as the peer keeps up.
func (p *Params) window() int {
	if p.Test.Verb() != VerbSend {
		return p.TxDepth
	}
	return max(min(p.TxDepth, p.RxDepth-p.repost()+1), 1)
}

// sendDepth and recvDepth are what a queue pair has room for.
func (p *Params) sendDepth() int {
	if p.Test.answers() {
		return max(p.TxDepth, 64) // acknowledgements may trail the answers by a few messages
	}
	return p.TxDepth
}

func (p *Params) recvDepth() int {
	if p.Test.Verb() != VerbSend {
		return 0
	}
	return p.RxDepth
}

// head is what lies in front of a message in a receive buffer.
func (p *Params) head() int {
	if p.Type == verbs.UD {
		return transport.GRHLen
	}
	return 0
}

// reliable reports whether what was sent arrives.
func (p *Params) reliable() bool { return p.Type == verbs.RC }

// slots is how many messages lie side by side in a buffer: one for each that the queues may
// hold if that stays within a megabyte; else they share, as perftest's share one. So small
// messages are not all in one cache line, and large ones do not take gigabytes.
func (p *Params) slots(depth int) int {
	return min(p.QPs*depth, max(1<<20/max(p.Size, 1), 1))
}

// slot is where the message of a number on a queue pair lies.
func (p *Params) slot(depth, index int, n uint64) int {
	return int((uint64(index)*uint64(depth) + n) % uint64(p.slots(depth)))
}

// exclusive reports whether no two posted receives share memory that both may get a message
// into at the same time.
func (p *Params) exclusive() bool {
	return p.Test.Latency() || p.slots(p.RxDepth) == p.QPs*p.RxDepth
}

// queueEntry is about what a posted request and its completion take, in bytes.
const queueEntry = 128

// memory is about what the server allocates for messages and queues, in bytes.
func (p *Params) memory() int64 {
	open := int64(p.exposedLen())
	if p.Test.answers() || p.Bidirectional {
		open += int64(p.localLen())
	}
	return open + queueEntry*int64(p.QPs)*int64(p.TxDepth+p.recvDepth())
}

// localLen is the length of what a side's requests name: its slots are those of the sends.
func (p *Params) localLen() int { return max(p.Size*p.slots(p.TxDepth), 1) }

// exposedLen is the length of what the peer's requests reach: the slots of receives, or for
// the others again those of the sends, so that a request is as far into the one as into the
// other.
func (p *Params) exposedLen() int {
	if p.Test.Verb() == VerbSend {
		return max((p.Size+p.head())*p.slots(p.RxDepth), 1)
	}
	return p.localLen()
}
