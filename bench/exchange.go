package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Version is the version of the exchange. Ends of different versions refuse each other.
const Version = 2

// magic opens all private data: "DBPF".
const magic = 0x44425046

// What a REQ asks for.
const (
	helloControl = 1
	helloData    = 2
)

// hello is the private data of a REQ, big-endian:
//
//	0   magic
//	4   version (1), kind (1), test (1), flags (1): bidirectional 1, all sizes 2, shared
//	    receive queue 4, compare and swap 8
//	8   session, chosen by the client at random
//	16  message size (4)
//	20  outstanding READs or atomics (1), reserved (1), connection type (1), MTU code (1)
//	24  iterations (8)
//	32  duration in ns (8)
//	40  tx depth (2), rx depth (2)
//	44  QPs (2), CQ moderation (2)
//	48  post list (2), inline size (2)
//
// A data connection's REQ carries no more than magic, version, kind and session, and behind
// them at 16 its index (2): the transport's own extension needs what is left, and without it
// there are no large windows.
type hello struct {
	version uint8
	kind    uint8
	index   uint16
	session uint64
	Params
}

// flags returns the parameters that are one bit each, in the order of their bits.
func (h *hello) flags() [4]*bool { return [4]*bool{&h.Bidirectional, &h.All, &h.SRQ, &h.Swap} }

var errNotPerf = errors.New("the private data is not perf's")

func (h *hello) encode() []byte {
	b := make([]byte, transport.MaxDialPrivateData)
	binary.BigEndian.PutUint32(b, magic)
	b[4], b[5], b[6] = h.version, h.kind, uint8(h.Test)
	binary.BigEndian.PutUint64(b[8:], h.session)
	if h.kind == helloData {
		binary.BigEndian.PutUint16(b[16:], h.index)
		return b[:18]
	}
	for i, f := range h.flags() {
		if *f {
			b[7] |= 1 << i
		}
	}
	binary.BigEndian.PutUint32(b[16:], uint32(h.Size))
	b[20], b[22], b[23] = uint8(h.Outs), uint8(h.Type), uint8(h.MTU)
	binary.BigEndian.PutUint64(b[24:], uint64(h.Iters))
	binary.BigEndian.PutUint64(b[32:], uint64(h.Duration))
	for i, v := range [...]int{h.TxDepth, h.RxDepth, h.QPs, h.CQMod, h.PostList, h.Inline} {
		binary.BigEndian.PutUint16(b[40+2*i:], uint16(v))
	}
	return b
}

// decode reads what a peer sent. It fails only when that is no hello at all: magic and
// version have their places in every version.
func (h *hello) decode(b []byte) error {
	if len(b) < transport.MaxDialPrivateData || binary.BigEndian.Uint32(b) != magic {
		return errNotPerf
	}
	u16 := func(i int) int { return int(binary.BigEndian.Uint16(b[i:])) }
	*h = hello{
		version: b[4], kind: b[5], session: binary.BigEndian.Uint64(b[8:]),
	}
	if h.kind == helloData {
		h.index = uint16(u16(16))
		return nil
	}
	*h = hello{
		version: h.version, kind: h.kind, session: h.session,
		Params: Params{
			Test: Test(b[6]), Type: verbs.QPType(b[22]), MTU: verbs.MTU(b[23]), Outs: int(b[20]),
			// Sizes beyond what an int holds become a value that Check refuses.
			Size:     int(min(binary.BigEndian.Uint32(b[16:]), math.MaxInt32)),
			Iters:    int64(min(binary.BigEndian.Uint64(b[24:]), math.MaxInt64)),
			Duration: time.Duration(min(binary.BigEndian.Uint64(b[32:]), math.MaxInt64)),
			TxDepth:  u16(40), RxDepth: u16(42), QPs: u16(44), CQMod: u16(46), PostList: u16(48), Inline: u16(50),
		},
	}
	for i, f := range h.flags() {
		*f = b[7]&(1<<i) != 0
	}
	return nil
}

// welcome is the private data of a REP: magic and version.
func welcome() []byte {
	b := binary.BigEndian.AppendUint32(nil, magic)
	return append(b, Version)
}

func checkWelcome(b []byte) error {
	switch {
	case len(b) < 5 || binary.BigEndian.Uint32(b) != magic:
		return errors.New("what listens there is not perf")
	case b[4] != Version:
		return fmt.Errorf("the server speaks version %d of perf's exchange, this is version %d", b[4], Version)
	}
	return nil
}

// refusal is the private data of a REJ: magic, version, and why in words, zero-padded.
func refusal(why string) []byte {
	b := binary.BigEndian.AppendUint32(nil, magic)
	b = append(b, Version)
	return append(b, why[:min(len(why), transport.MaxRejectPrivateData-len(b))]...)
}

// refusalText returns the words of a REJ, without anything a terminal would obey.
func refusalText(b []byte) string {
	if len(b) < 5 || binary.BigEndian.Uint32(b) != magic {
		return ""
	}
	text := strings.TrimRight(string(b[5:]), "\x00")
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7F || r > 0x7E {
			return '?'
		}
		return r
	}, text)
}

// msgKind is what a message on the control connection says.
type msgKind uint8

const (
	msgStart  msgKind = 1 // client: run this
	msgGo     msgKind = 2 // server: ready
	msgDone   msgKind = 3 // whoever sends: that was all, count messages since the session began
	msgReport msgKind = 4 // both: what was measured
	msgBye    msgKind = 5 // client: no more
	msgQueue  msgKind = 6 // both: one of our data queue pairs, and our memory
	msgSync   msgKind = 7 // both: what was sent before this has arrived, or never will
)

func (k msgKind) valid() bool { return k >= msgStart && k <= msgSync }

func (k msgKind) String() string {
	if k.valid() {
		return [...]string{"START", "GO", "DONE", "REPORT", "BYE", "QUEUE", "SYNC"}[k-1]
	}
	return fmt.Sprintf("message %d", uint8(k))
}

// message is a message of the control connection, 128 bytes, big-endian:
//
//	0   magic
//	4   kind (1), flags (1): measured 1, interrupted 2; phase, in QUEUE index (2)
//	8   size, 16 count, 24 duration in ns      (START: of the run; DONE: count; REPORT: as measured)
//	32  peak rate in bytes/s (float64)         (REPORT of a bandwidth test)
//	40  min, 48 max, 56 median, 64 99%, 72 99.9% in ns, 80 mean, 88 deviation (float64), of half
//	    a round trip                           (REPORT of a latency test)
//	96  messages lost                          (REPORT, of what the peer has sent)
//	104 queue pair number, Q_Key, address (8), R_Key, length of what it may be reached by (QUEUE)
type message struct {
	kind        msgKind
	measured    bool
	interrupted bool
	phase       uint16
	size        uint64
	count       uint64
	duration    time.Duration
	peak        float64
	lat         Latency
	lost        uint64
	queue       queue
}

// queue is what the peer must know about a data queue pair.
type queue struct {
	qpn    verbs.QPN
	qkey   uint32
	memory verbs.RemoteMR
}

const messageLen = 128

func (m *message) encode() []byte {
	b := make([]byte, messageLen)
	binary.BigEndian.PutUint32(b, magic)
	b[4] = uint8(m.kind)
	if m.measured {
		b[5] |= 1
	}
	if m.interrupted {
		b[5] |= 2
	}
	binary.BigEndian.PutUint16(b[6:], m.phase)
	for i, v := range [...]uint64{
		m.size, m.count, uint64(m.duration), math.Float64bits(m.peak),
		uint64(m.lat.Min), uint64(m.lat.Max), uint64(m.lat.Median), uint64(m.lat.P99), uint64(m.lat.P999),
		math.Float64bits(m.lat.Mean), math.Float64bits(m.lat.StdDev),
	} {
		binary.BigEndian.PutUint64(b[8+8*i:], v)
	}
	binary.BigEndian.PutUint64(b[96:], m.lost)
	binary.BigEndian.PutUint32(b[104:], uint32(m.queue.qpn))
	binary.BigEndian.PutUint32(b[108:], m.queue.qkey)
	_, _ = m.queue.memory.AppendBinary(b[:112]) // never fails, and has room
	return b
}

// decode reads a peer's message and refuses figures that cannot be.
func (m *message) decode(b []byte) error {
	if len(b) != messageLen || binary.BigEndian.Uint32(b) != magic {
		return errors.New("the peer sent something that is no message of perf")
	}
	u := func(i int) uint64 { return binary.BigEndian.Uint64(b[8+8*i:]) }
	ns := func(i int) time.Duration { return time.Duration(u(i)) }
	f := func(i int) float64 { return math.Float64frombits(u(i)) }
	*m = message{
		kind: msgKind(b[4]), measured: b[5]&1 != 0, interrupted: b[5]&2 != 0, phase: binary.BigEndian.Uint16(b[6:]),
		size: u(0), count: u(1), duration: ns(2), peak: f(3),
		lat:  Latency{Min: ns(4), Max: ns(5), Median: ns(6), P99: ns(7), P999: ns(8), Mean: f(9), StdDev: f(10)},
		lost: binary.BigEndian.Uint64(b[96:]),
		queue: queue{
			qpn: verbs.QPN(binary.BigEndian.Uint32(b[104:])) & verbs.QPNMask, qkey: binary.BigEndian.Uint32(b[108:]),
		},
	}
	_ = m.queue.memory.UnmarshalBinary(b[112:]) // cannot fail: it is there
	l := &m.lat
	ordered := 0 <= l.Min && l.Min <= l.Median && l.Median <= l.P99 && l.P99 <= l.P999 && l.P999 <= l.Max
	sane := func(f float64) bool { return f >= 0 && f < 1e18 } // false for NaN
	if !m.kind.valid() || m.size > MaxSize || m.duration < 0 || !ordered ||
		!sane(m.peak) || !sane(l.Mean) || !sane(l.StdDev) {
		return fmt.Errorf("the peer sent a %v with figures that cannot be", m.kind)
	}
	return nil
}
