package floor

import (
	"fmt"
	"net/netip"
	"time"
)

// Kind names a floor.
type Kind string

// The floors.
const (
	PingPong Kind = "udp_pingpong"
	Stream   Kind = "udp_stream"
	Bulk     Kind = "bulk"
	Echo     Kind = "echo"
	Ring     Kind = "ring"
	Chan     Kind = "chan"
)

// Frame is what a RoCEv2 packet adds to the payload of a UDP datagram: 12 bytes of base
// transport header before it and 4 of checksum behind it. A floor that carries as many bytes
// as Doorbell's packets is the fairer one.
const Frame = 12 + 4

// Params says what to measure. Only Kind, Size and one of Duration and Iters are needed.
type Params struct {
	Kind Kind
	// Size is the length in bytes of a datagram with its frame (PingPong and Stream), of a
	// write (Bulk), or of a message without its length (Echo).
	Size int
	// Duration is how long to measure; 0 if Iters decides.
	Duration time.Duration
	// Iters is how many round trips, datagrams, messages or entries to measure; for a
	// Stream rounded up to whole trains.
	Iters int64

	// Block lets both ends sleep in the system call that receives; otherwise they spin.
	Block bool
	// Connected sends by send(2) on connected sockets; otherwise by sendto(2), as a
	// transport has to that speaks to many peers on one socket.
	Connected bool

	// Train is how many datagrams a system call sends (Stream), or how many entries are
	// published at a time (Ring); 0 is 1.
	Train int
	// NoOffload sends trains by sendmmsg and receives them by recvmmsg; otherwise UDP_SEGMENT
	// makes a train one packet of the network stack and UDP_GRO keeps it one.
	NoOffload bool
	// Window is how many datagrams or messages may be under way without an acknowledgement
	// or an echo; 0 is one train, or one message.
	Window int
	// AckEvery is after how many datagrams the receiver acknowledges; 0 is once for a train.
	AckEvery int
	// NoCheck leaves out the checksums on both sides, NoCopy the copy at the receiver.
	NoCheck, NoCopy bool
	// RecvBuffer is the size of the receiver's socket buffer in bytes; 0 asks for 4 MiB.
	RecvBuffer int

	// Exec is the command line that runs an end in a process of its own; nil runs both in
	// this one. Places says where.
	Exec   []string
	Places [2]Place
}

// Place is where an end runs. Index 0 of a pair is the one that serves, 1 the one that drives
// and measures.
type Place struct {
	// CPU is one more than the number of the CPU that the process is held to; 0 leaves it
	// to the scheduler.
	CPU int
	// NetNS is the name of a network namespace, as "ip netns" lists it; empty is ours.
	NetNS string
	// Addr is the address to bind; the zero value is 127.0.0.1.
	Addr netip.Addr
	// Procs is GOMAXPROCS of the process; 0 leaves it to the runtime.
	Procs int
}

func (p Place) addr() netip.Addr {
	if p.Addr.IsValid() {
		return p.Addr
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// Limits of parameters.
const (
	maxSize   = 64 << 20 // of a TCP write
	maxTrain  = 128      // segments of a GSO send, since Linux 6.9
	maxBytes  = 65000    // of a GSO send: a little below the limit the stack splits it
	maxWindow = 1 << 16
)

// Check returns what is wrong with the parameters, or nil.
func (p *Params) Check() error {
	least, most := 1, maxSize
	switch p.Kind {
	case PingPong:
		least, most = 2, maxBytes // one byte is how an end says goodbye
	case Stream:
		least, most = Frame+1, maxBytes
		if !p.NoOffload {
			most = maxBytes / p.train()
		}
	case Bulk:
	case Echo:
		most = 1 << 20
	case Ring, Chan:
		least = 0
	default:
		return fmt.Errorf("floor: unknown kind %q", p.Kind)
	}
	for _, r := range []struct {
		name           string
		got, min, most int
	}{
		{"size", p.Size, least, most},
		{"train", p.train(), 1, maxTrain},
		{"window", p.window(), p.least(), maxWindow},
		{"acknowledgement every", p.ackEvery(), 1, p.window()},
	} {
		if r.got < r.min || r.got > r.most {
			return fmt.Errorf("floor: %s: %s is %d, want %d to %d", p.Kind, r.name, r.got, r.min, r.most)
		}
	}
	if (p.Iters <= 0) == (p.Duration <= 0) {
		return fmt.Errorf("floor: %s: one of Duration and Iters must be given, not both", p.Kind)
	}
	return nil
}

func (p *Params) train() int { return max(p.Train, 1) }

// least is the smallest window: a train has to fit in.
func (p *Params) least() int {
	if p.Kind == Stream {
		return p.train()
	}
	return 1
}

func (p *Params) window() int {
	if p.Window == 0 {
		return p.least()
	}
	return p.Window
}

func (p *Params) ackEvery() int {
	if p.AckEvery == 0 {
		return min(p.train(), p.window())
	}
	return p.AckEvery
}

func (p *Params) payload() int { return p.Size - Frame }

// Result is what a floor gave.
type Result struct {
	// P50, P99 and Mean are of whole round trips (PingPong), from Ops samples. Beyond the
	// first four million round trips the mean alone goes on.
	P50, P99, Mean time.Duration `json:",omitempty"`
	// Ops is the number of round trips, datagrams, writes, messages or entries that were
	// complete at both ends after Elapsed.
	Ops     uint64
	Elapsed time.Duration
	// Bytes is their payload, frames not counted.
	Bytes uint64
	// Lost is how many datagrams never arrived: more than none makes a figure doubtful.
	Lost uint64 `json:",omitempty"`
}

// Rate is operations per second.
func (r Result) Rate() float64 { return float64(r.Ops) / max(r.Elapsed, 1).Seconds() }

// Gbps is payload in gigabits per second.
func (r Result) Gbps() float64 { return float64(r.Bytes) * 8 / float64(max(r.Elapsed, 1)) }

// Each is the time of one operation.
func (r Result) Each() time.Duration { return r.Elapsed / time.Duration(max(r.Ops, 1)) }
