package bench

import (
	"fmt"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// Test names a workload.
type Test uint8

// The workloads.
const (
	// SendLat sends a message back and forth; its figures are half round trips.
	SendLat Test = 1
	// SendBW sends as many messages as the depths allow.
	SendBW Test = 2
)

// String returns the name that perftest and the command line use.
func (t Test) String() string {
	switch t {
	case SendLat:
		return "send_lat"
	case SendBW:
		return "send_bw"
	}
	return fmt.Sprintf("test %d", uint8(t))
}

// Valid reports whether the test exists.
func (t Test) Valid() bool { return t == SendLat || t == SendBW }

// Latency reports whether the test measures times rather than rates.
func (t Test) Latency() bool { return t == SendLat }

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
	// maxPosted bounds what a session may have posted in all its queues.
	maxPosted = 1 << 20
)

// Params says what to run. The client's parameters are the session's.
type Params struct {
	Test Test
	// Size is the length of a message in bytes, 0 to MaxSize. With All it is the largest
	// of the sizes, which are 2, 4, 8 and so on.
	Size int
	All  bool
	// Iters is the number of messages (SendLat: of round trips) on each queue pair, 1 to
	// MaxIters; 0 if Duration decides.
	Iters int64
	// Duration is how long each size runs, up to MaxDuration; 0 if Iters decides.
	Duration time.Duration
	// TxDepth and RxDepth bound the sends and receives posted on a queue pair, 1 to MaxDepth.
	TxDepth, RxDepth int
	// QPs is the number of data connections, 1 to MaxQPs; SendLat has one.
	QPs int
	// CQMod is how many sends share a completion, 1 to MaxCQMod.
	CQMod int
	// PostList is how many sends are posted at a time, 1 to MaxPostList.
	PostList int
	// Inline is the largest message copied at post time, 0 to MaxInline.
	Inline int
	// MTU is the path MTU to ask for; 0 leaves it to the devices.
	MTU verbs.MTU
	// Bidirectional lets the server send as well (SendBW).
	Bidirectional bool
}

// Defaults returns perftest's parameters for a test.
func Defaults(t Test) Params {
	p := Params{Test: t, Size: 65536, Iters: 1000, TxDepth: 128, RxDepth: 512, QPs: 1, CQMod: 100, PostList: 1}
	if t.Latency() {
		p.Size, p.TxDepth, p.CQMod, p.Inline = 2, 1, 1, 236
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
		{"message size", int64(p.Size), 0, MaxSize},
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

// window is how many messages of a queue pair may be without completion. It stays below the
// peer's receive ring by what that gathers, so that a message meets a receive as long as the
// peer keeps up.
func (p *Params) window() int { return max(min(p.TxDepth, p.RxDepth-p.repost()+1), 1) }

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
	n := p.slots(p.RxDepth)
	if p.Test.Latency() || p.Bidirectional {
		n += p.slots(p.TxDepth)
	}
	return int64(p.Size)*int64(n) + queueEntry*int64(p.QPs)*int64(p.TxDepth+p.RxDepth)
}
