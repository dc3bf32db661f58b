package qp

import (
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// WindowConfig sets a window up. The zero value suits a peer of whom nothing is known.
type WindowConfig struct {
	// Initial is how many bytes may be in flight at first, in the currency of Window; 0
	// means 32 packets of 1024 bytes. A peer that told the size of its socket's receive
	// buffer gets that size here and in Max.
	Initial int
	// Max is what the window may grow to; 0 means 1 MiB.
	Max int
	// PSNs bounds the unacknowledged PSNs of each queue pair, up to 2^22; 0 means 128,
	// which is what Linux rxe allows itself.
	PSNs int
	// Reads is how many bytes of our own receive buffer READ responses may fill; 0 means
	// 128 KiB. Responses are not acknowledged, so only the requester can pace them: it
	// asks for no more than this at a time.
	Reads int
	// ReadsAlone is the same as long as the peer sends next to nothing by itself; less than
	// Reads means Reads.
	ReadsAlone int
	// Trains says that what we send in a train arrives in the peer's socket as one buffer.
	Trains bool
}

const (
	defaultInitial = 32 * (datagramCost + 1024)
	defaultMax     = 1 << 20
	defaultPSNs    = 128
	maxPSNs        = 1 << 22
	defaultReads   = 128 << 10

	// datagramCost is what a datagram takes of a socket's receive buffer beyond its bytes:
	// Linux charges the sk_buff and the smallest head, 832 bytes even for an empty one.
	datagramCost = 832
	// datagramFree is how many bytes fit into that smallest head.
	datagramFree = 128
	// windowFloor is the smallest window that congestion leaves.
	windowFloor = 4 * (datagramCost + 4096)
	// smallCost is what a packet costs at the most that counts as small.
	smallCost = datagramCost + 256
	// politeLimit is what packets that are not small may fill of a window while small ones want
	// to pass: they share the peer's socket, which is emptied in order. It is so for as many
	// bytes as politeSpan after the last of those.
	politeLimit = 256 << 10
	politeSpan  = 16 << 20
	// theirsLimit is how much the peer may have sent by itself lately and still be one who sends
	// nothing; theirsMost bounds how much is remembered, and theirsFade how much more READ
	// responses it takes to forget it.
	theirsLimit = 64 << 10
	theirsMost  = 1 << 20
	theirsFade  = 16
	// maxReadChunk bounds the response packets of one READ request.
	maxReadChunk = 1 << 15
)

// Outstanding PSNs stay below 2^23, or a PSN would not tell duplicates from news: the bound
// per queue pair may be overrun by one READ request.
const _ = uint(1<<23 - 1 - (maxPSNs + maxReadChunk))

// Window bounds what all queue pairs of a wire together have in flight to one peer, in the
// currency of the kernel that has to hold it: a lone datagram costs its sk_buff, about 832
// bytes however small, so 16 queue pairs with 64 small packets each would drown a stock
// socket buffer of 212,992 bytes. It grows while the peer keeps up and shrinks when packets
// are lost or their round trip grows (additive increase, multiplicative decrease).
//
// It also keeps what belongs to the path and not to a queue pair: the round trip time.
// Only the wire's owner touches it.
type Window struct {
	cfg   WindowConfig
	limit int64
	used  int64
	// need is the least room that somebody was refused for, needReads the same of our own
	// buffer; 0 when nobody was.
	need, needReads int64
	// grown collects acknowledged bytes until they are worth a packet's growth.
	grown    int64
	slowFrom int64 // from here on the window grows by one packet a round trip
	cutAt    verbs.Instant
	everCut  bool
	// spared is what limit and slowFrom were before silence cut the window, 0 for nothing to go
	// back to: see needless.
	spared, sparedSlow int64
	// polite is for how many bytes more the small ones are let pass.
	polite int64
	// inbound is what READ responses that were asked for will take of our own buffer.
	inbound int64
	// theirs is what the peer has sent by itself lately: it shares our buffer with them.
	theirs int64

	srtt, rttvar, minRTT time.Duration // srtt 0: nothing measured yet

	// heardAt is when the peer last answered anything, newest when the newest packet that
	// it has acknowledged was sent.
	heardAt, newest verbs.Instant

	// backoff counts how often the silent peer was asked since a round trip was last measured:
	// while all that is sent is sent again nothing is measured, and a round trip that has
	// become long would never be found out (RFC 6298, 5.5 to 5.7).
	backoff uint8
	// asker is the queue pair that last sent again to a silent peer, at askedAt; others says that
	// one more wanted to meanwhile.
	asker   verbs.QPN
	askedAt verbs.Instant
	others  bool
}

// NewWindow makes an open window.
func NewWindow(cfg WindowConfig) *Window {
	w := &Window{}
	w.Configure(cfg)
	return w
}

// Configure replaces the configuration, as when the peer has told its buffer size, and
// starts growth afresh. What is in flight and the round trip time stay.
func (w *Window) Configure(cfg WindowConfig) {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&cfg.Initial, defaultInitial)
	def(&cfg.Max, max(defaultMax, cfg.Initial))
	def(&cfg.PSNs, defaultPSNs)
	def(&cfg.Reads, defaultReads)
	cfg.ReadsAlone = max(cfg.ReadsAlone, cfg.Reads)
	cfg.PSNs = min(cfg.PSNs, maxPSNs)
	cfg.Initial = min(cfg.Initial, cfg.Max)
	w.cfg = cfg
	w.limit, w.slowFrom = int64(cfg.Initial), int64(cfg.Max)
	w.grown, w.everCut, w.spared = 0, false, 0
}

// HasRoom reports whether queue pairs that got NextBlocked should try again: when a quarter
// of the window is free, so that they send trains and not every packet by itself.
func (w *Window) HasRoom() bool {
	if w.need == 0 && w.needReads == 0 {
		return true
	}
	room := false
	limit := w.most(w.need)
	if w.need != 0 && (w.used == 0 || w.used+max(w.need, limit/4) <= limit) {
		w.need, room = 0, true
	}
	if w.needReads != 0 && (w.inbound == 0 || w.inbound+w.needReads <= w.readLimit()) {
		w.needReads, room = 0, true
	}
	return room
}

// Used and Limit return what is in flight and what may be.
func (w *Window) Used() int { return int(w.used) }

// Limit: see Used.
func (w *Window) Limit() int { return int(w.limit) }

// RTT returns the smoothed round trip time, 0 before the first measurement.
func (w *Window) RTT() time.Duration { return w.srtt }

// cost is what a packet with a payload of n bytes takes of the peer's buffer.
func (w *Window) cost(n uint32) int64 {
	if w.cfg.Trains {
		// A train is one buffer of pages, about 1.15 times its bytes.
		return int64(n+64) * 37 / 32
	}
	return datagramCost + int64(max(n, datagramFree)) - datagramFree
}

// refuse remembers that somebody wanted cost more bytes and did not get them.
func (w *Window) refuse(cost int64) {
	if w.need == 0 || cost < w.need {
		w.need = cost
	}
}

// most is what a packet of this cost may fill the window up to.
func (w *Window) most(cost int64) int64 {
	if w.polite > 0 && cost > smallCost {
		return min(w.limit, politeLimit)
	}
	return w.limit
}

func (w *Window) charge(n int64) {
	w.used += n
	w.polite -= min(n, w.polite)
}

// passing tells the window that a small message left, alone on its queue pair, behind n bytes of
// others.
func (w *Window) passing(n int64) {
	if n > politeLimit/2 {
		w.polite = politeSpan
	}
}

// release gives n bytes back without a word on how it went: they were sent again.
func (w *Window) release(n int64) {
	w.used -= n
	if w.used < 0 {
		panic("BUG: qp: more bytes given back to a window than were charged")
	}
}

// acked gives n acknowledged bytes back and lets the window grow if it was in the way: a
// window that nobody fills says nothing about the path.
func (w *Window) acked(n int64) {
	full := w.used*2 >= w.limit
	w.release(n)
	if !full || w.limit >= int64(w.cfg.Max) {
		return
	}
	if w.limit < w.slowFrom {
		w.limit += n
	} else if w.grown += n; w.grown >= w.limit {
		w.grown -= w.limit
		w.limit += datagramCost + 1024
	}
	w.limit = min(w.limit, int64(w.cfg.Max))
}

// lost tells the window that packets vanished: by a gap the receiver saw, or, worse, by
// silence. It shrinks once a round trip; by silence only if it was in use, for half of a window
// that is mostly empty hinders nobody now and everybody later.
func (w *Window) lost(now verbs.Instant, silence bool) {
	switch {
	case !silence:
		w.cut(now, 7, 10, windowFloor)
		w.needful()
	case w.used*2 >= w.most(smallCost+1):
		limit, slowFrom := w.limit, w.slowFrom
		if w.cut(now, 1, 2, windowFloor) && w.spared == 0 {
			w.spared, w.sparedSlow = limit, slowFrom
		}
	}
}

// needless tells the window that what was taken for lost by silence has arrived: the peer was
// only late. It opens again as far as it was (as RFC 4015 does for TCP).
func (w *Window) needless() {
	if w.spared > w.limit {
		w.limit, w.slowFrom = w.spared, w.sparedSlow
	}
	w.spared = 0
}

// needful tells the window that what was taken for lost by silence was.
func (w *Window) needful() { w.spared = 0 }

// cut shrinks the window, not below floor, and reports whether it was time to.
func (w *Window) cut(now verbs.Instant, num, den, floor int64) bool {
	if w.everCut && now.Sub(w.cutAt) < max(w.srtt, time.Millisecond) {
		return false
	}
	w.everCut, w.cutAt = true, now
	w.limit = max(w.limit*num/den, min(floor, w.limit))
	w.slowFrom, w.grown = w.limit, 0
	return true
}

// sample takes in one round trip of a packet that was sent once (Karn), as RFC 6298 does.
func (w *Window) sample(now verbs.Instant, d time.Duration) {
	d = max(d, 1)
	w.newest = max(w.newest, now-verbs.Instant(d))
	w.backoff = 0
	if w.srtt == 0 {
		w.srtt, w.rttvar, w.minRTT = d, d/2, d
		return
	}
	diff := d - w.srtt
	w.srtt += diff / 8
	w.rttvar += (max(diff, -diff) - w.rttvar) / 4
	w.minRTT = min(d, w.minRTT+w.minRTT/1024+1) // forget an old path slowly
	// A queue is building up; scheduling jitter stays below 2 ms. On a machine whose processors
	// are all taken it does not, and no window shortens that round trip: what the peer said it
	// has room for is left.
	if w.srtt > 2*w.minRTT+2*time.Millisecond {
		w.cut(now, 7, 8, int64(w.cfg.Initial))
	}
}

const (
	// rtoFloor keeps a garbage collection or a busy scheduler at the peer from being taken
	// for loss; rtoUnknown serves until a round trip was measured.
	rtoFloor   = 3 * time.Millisecond
	rtoUnknown = 10 * time.Millisecond
	rtoCeiling = time.Second
	// maxBackoff bounds the doublings of repeated early retransmissions.
	maxBackoff = 8
)

// rto is how long an answer may take before packets are sent again early; backoff doubles it.
func (w *Window) rto(backoff uint8) time.Duration {
	d := rtoUnknown
	if w.srtt != 0 {
		d = max(w.srtt+4*w.rttvar, rtoFloor)
	}
	return min(d<<min(max(backoff, w.backoff), maxBackoff), rtoCeiling)
}

// overdue reports whether a queue pair should send again a packet that was sent at a time and
// has no answer. It should when something that was sent later was answered: the packet is lost. It
// should not when the peer has answered lately: then it waits there behind those of others.
// When the peer is silent nobody knows, and one packet is enough to find out: of a thousand queue
// pairs one asks at a time, another one the next time, and less and less often. When the peer has
// answered since, and is silent again, whatever was sent before the question is lost.
func (w *Window) overdue(now, sent verbs.Instant, q verbs.QPN) bool {
	switch {
	case w.newest >= sent:
		return true
	case now.Sub(w.heardAt) < w.rto(0):
		return false
	case w.heardAt > w.askedAt && w.askedAt >= sent:
		return true
	case now.Sub(w.askedAt) < w.rto(0):
		w.others = w.others || w.asker != q
		return false
	case w.others && w.asker == q:
		w.others = false
		return false
	}
	w.asker, w.askedAt, w.others = q, now, false
	w.backoff = min(w.backoff+1, maxBackoff)
	return true
}

// readChunk is how many response packets one READ request asks for at the most: half of
// what our buffer may take in any case, so that the next request overlaps the answers to the last. It
// does not change while a queue pair lives in RTS, because a request that is sent again
// must stay inside the one that the responder remembers.
func (w *Window) readChunk(mtu uint32) uint32 {
	n := int64(w.cfg.Reads) / 2 / w.readCost(mtu)
	return uint32(min(max(n, 1), maxReadChunk))
}

// readCost is what one READ response packet takes of our own buffer.
func (w *Window) readCost(mtu uint32) int64 { return datagramCost + int64(mtu) }

// readRoom reports whether n more response packets may be asked for.
func (w *Window) readRoom(n, mtu uint32) bool {
	return w.inbound == 0 || w.inbound+int64(n)*w.readCost(mtu) <= w.readLimit()
}

// readLimit is what READ responses may fill of our buffer at present.
func (w *Window) readLimit() int64 {
	if w.theirs > theirsLimit {
		return int64(w.cfg.Reads)
	}
	return int64(w.cfg.ReadsAlone)
}

// arrived tells the window of n bytes that the peer sent by itself.
func (w *Window) arrived(n uint32) { w.theirs = min(w.theirs+w.cost(n), theirsMost) }

// refuseReads remembers that somebody wanted to ask for n response packets.
func (w *Window) refuseReads(n, mtu uint32) {
	if c := int64(n) * w.readCost(mtu); w.needReads == 0 || c < w.needReads {
		w.needReads = c
	}
}

func (w *Window) chargeReads(n, mtu uint32) {
	c := int64(n) * w.readCost(mtu)
	w.inbound += c
	w.theirs -= min(c/theirsFade, w.theirs)
}

func (w *Window) releaseReads(n, mtu uint32) {
	w.inbound -= int64(n) * w.readCost(mtu)
	if w.inbound < 0 {
		panic("BUG: qp: more READ responses given back to a window than were charged")
	}
}
