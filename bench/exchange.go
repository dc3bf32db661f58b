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
const Version = 1

// magic opens all private data: "DBPF".
const magic = 0x44425046

// What a REQ asks for.
const (
	helloControl = 1
	helloData    = 2
)

// hello is the private data of a REQ, 56 bytes, big-endian:
//
//	0   magic
//	4   version (1), kind (1), test (1), flags (1): bidirectional 1, all sizes 2
//	8   session, chosen by the client at random
//	16  message size (8)
//	24  iterations (8)
//	32  duration in ns (8)
//	40  tx depth (2), rx depth (2)
//	44  QPs (2), CQ moderation (2)
//	48  post list (2), inline size (2)
//	52  MTU code (1), QP type (1)
//	54  index of the data connection (2)
//
// A data connection's REQ carries session and index; the rest repeats the control
// connection's and is ignored.
type hello struct {
	version uint8
	kind    uint8
	qpType  verbs.QPType
	index   uint16
	session uint64
	Params
}

const (
	flagBidirectional = 1 << iota
	flagAll
)

var errNotPerf = errors.New("the private data is not perf's")

func (h *hello) encode() []byte {
	b := make([]byte, transport.MaxDialPrivateData)
	binary.BigEndian.PutUint32(b, magic)
	b[4], b[5], b[6] = h.version, h.kind, uint8(h.Test)
	if h.Bidirectional {
		b[7] |= flagBidirectional
	}
	if h.All {
		b[7] |= flagAll
	}
	binary.BigEndian.PutUint64(b[8:], h.session)
	binary.BigEndian.PutUint64(b[16:], uint64(h.Size))
	binary.BigEndian.PutUint64(b[24:], uint64(h.Iters))
	binary.BigEndian.PutUint64(b[32:], uint64(h.Duration))
	for i, v := range [...]int{h.TxDepth, h.RxDepth, h.QPs, h.CQMod, h.PostList, h.Inline} {
		binary.BigEndian.PutUint16(b[40+2*i:], uint16(v))
	}
	b[52], b[53] = uint8(h.MTU), uint8(h.qpType)
	binary.BigEndian.PutUint16(b[54:], h.index)
	return b
}

// decode reads what a peer sent. It fails only when that is no hello at all: magic and
// version have their places in every version.
func (h *hello) decode(b []byte) error {
	if len(b) < transport.MaxDialPrivateData || binary.BigEndian.Uint32(b) != magic {
		return errNotPerf
	}
	u16 := func(i int) int { return int(binary.BigEndian.Uint16(b[i:])) }
	// Sizes beyond what an int holds become a value that Check refuses.
	size := min(binary.BigEndian.Uint64(b[16:]), math.MaxInt32)
	*h = hello{
		version: b[4], kind: b[5], qpType: verbs.QPType(b[53]), index: uint16(u16(54)),
		session: binary.BigEndian.Uint64(b[8:]),
		Params: Params{
			Test: Test(b[6]), Bidirectional: b[7]&flagBidirectional != 0, All: b[7]&flagAll != 0,
			Size:     int(size),
			Iters:    int64(min(binary.BigEndian.Uint64(b[24:]), math.MaxInt64)),
			Duration: time.Duration(min(binary.BigEndian.Uint64(b[32:]), math.MaxInt64)),
			TxDepth:  u16(40), RxDepth: u16(42), QPs: u16(44), CQMod: u16(46), PostList: u16(48), Inline: u16(50),
			MTU: verbs.MTU(b[52]),
		},
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
)

func (k msgKind) String() string {
	if k >= msgStart && k <= msgBye {
		return [...]string{"START", "GO", "DONE", "REPORT", "BYE"}[k-1]
	}
	return fmt.Sprintf("message %d", uint8(k))
}

// message is a message of the control connection, 120 bytes, big-endian:
//
//	0   magic
//	4   kind (1), flags (1): measured 1, interrupted 2; phase (2)
//	8   size, 16 count, 24 duration in ns      (START: of the run; DONE: count; REPORT: as measured)
//	32  peak rate in bytes/s (float64)         (REPORT of a bandwidth test)
//	40  min, 48 max, 56 median, 64 99%, 72 99.9% in ns, 80 mean, 88 deviation (float64), of half
//	    a round trip                           (REPORT of a latency test)
//	96  reserved, up to 120
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
}

const messageLen = 120

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
		lat: Latency{Min: ns(4), Max: ns(5), Median: ns(6), P99: ns(7), P999: ns(8), Mean: f(9), StdDev: f(10)},
	}
	l := &m.lat
	ordered := 0 <= l.Min && l.Min <= l.Median && l.Median <= l.P99 && l.P99 <= l.P999 && l.P999 <= l.Max
	sane := func(f float64) bool { return f >= 0 && f < 1e18 } // false for NaN
	if m.kind < msgStart || m.kind > msgBye || m.size > MaxSize || m.duration < 0 || !ordered ||
		!sane(m.peak) || !sane(l.Mean) || !sane(l.StdDev) {
		return fmt.Errorf("the peer sent a %v with figures that cannot be", m.kind)
	}
	return nil
}
