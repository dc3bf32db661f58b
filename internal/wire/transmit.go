package wire

import (
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const (
	// copyLimit is the largest payload that is copied beside its headers; larger ones are
	// gathered from registered memory. Below a few hundred bytes the copy is cheaper than
	// the two more pieces that a system call would have to walk.
	copyLimit = 512
	arenaSize = 1 << 18
	txBatch   = 64
	// maxPieces bounds the gather lists of a batch together.
	maxPieces = 2048
	// retryBlocked is how long to wait before a link that took less is offered the rest.
	retryBlocked = 500 * time.Microsecond
)

const _ = uint(arenaSize - 16*(roce.MaxHeader+4096+3+roce.ICRCLen))

// transmitter collects packets into trains and trains into batches. Headers, small payloads
// and READ responses are built in an arena; the rest stays where it is.
type transmitter struct {
	w      *Wire
	arena  []byte // length: bytes in use
	msgs   []link.Tx
	pieces [][]byte
	// first is the first message that the link has not taken yet; more than zero only
	// while the link is blocked.
	first     int
	blockedAt verbs.Instant
	caps      link.Caps

	// The open train is the last of msgs; owner nil means that it is closed. All of it goes
	// one way to one queue pair.
	owner *QP
	way   *route
	qpn   verbs.QPN
	segs  int

	// later holds the unreliable queue pairs that have had their turn and want another.
	later runQueue
}

func (t *transmitter) init(w *Wire) {
	t.w = w
	t.arena = make([]byte, 0, arenaSize)
	t.msgs = make([]link.Tx, 0, txBatch)
	t.pieces = make([][]byte, 0, maxPieces)
}

// deadline is when a blocked link wants to be tried again.
func (t *transmitter) deadline() verbs.Instant {
	if t.first < len(t.msgs) {
		return t.blockedAt.Add(retryBlocked)
	}
	return verbs.Never
}

// transmit lets the queue pairs that have something to do send, in turns, and sends what
// the connection manager has to say. Reliable queue pairs have turns until the peer's window or
// the bound is reached. Unreliable ones, which nothing else holds back, have one: what they
// have left is for the next step, so that a deep queue of theirs neither keeps the wire from
// receiving nor pours out in one go.
func (w *Wire) transmit(now verbs.Instant) (work int) {
	w.owing, w.unsent, w.hurry = false, 0, false
	work = w.takeTurns(now)
	blocked := w.tx.deadline() != verbs.Never
	for w.tx.later.n > 0 {
		q := w.tx.later.pop()
		w.run.push(q)
		w.hurry = true
		if !blocked {
			w.timers.update(q, now) // asks for that step: after Transmit there need not be one
		}
	}
	return work
}

func (w *Wire) takeTurns(now verbs.Instant) (work int) {
	t := &w.tx
	if !t.flush(now) {
		return 0
	}
	t.caps = w.link.Caps()
	for t.hasRoom() && w.cm.NextMAD(&w.mad) {
		w.sendMAD(now)
		work++
	}
	for range turns {
		if w.run.n == 0 {
			break
		}
		if !t.hasRoom() && !t.flush(now) {
			return work
		}
		q := w.run.pop()
		q.queued = false
		if q.closed {
			continue
		}
		work += w.serve(now, q)
	}
	t.flush(now)
	return work
}

// serve gives one queue pair its turn.
func (w *Wire) serve(now verbs.Instant, q *QP) (work int) {
	again := q.q.Service(now)
	w.touch(q)
	bytes := 0
packets:
	for range packetsEach {
		if bytes >= bytesEach {
			again = true
			break
		}
		if !w.tx.hasRoom() && !w.tx.flush(now) {
			again = true
			break
		}
		switch q.q.NextPacket(now, &w.out) {
		case qp.NextPacket:
			w.tx.packet(now, q, &w.out)
			q.q.Sent(now)
			bytes += w.out.Len
			work++
			if work == packetsEach {
				again = true
			}
		case qp.NextBlocked:
			q.peer.block(q)
			break packets
		default:
			break packets
		}
	}
	w.tx.owner = nil // trains are of one queue pair's turn
	w.timers.update(q, q.q.Deadline())
	if q.peer != nil {
		q.peer.note()
		w.wakeBlocked(q.peer)
	}
	if again {
		w.resume(q)
		work++
	} else if q.failed {
		w.sayFailed(now, q)
	}
	return work
}

// resume schedules a queue pair that was not done when its turn ended.
func (w *Wire) resume(q *QP) {
	if q.q.Type() == verbs.RC || q.queued || q.closed {
		w.schedule(q)
		return
	}
	q.queued = true
	w.tx.later.push(q)
}

// hasRoom reports whether one more packet fits, whatever its shape.
func (t *transmitter) hasRoom() bool {
	return len(t.msgs) < txBatch &&
		cap(t.arena)-len(t.arena) >= roce.MaxHeader+4096+3+roce.ICRCLen &&
		cap(t.pieces)-len(t.pieces) >= qp.MaxGather+2
}

// packet adds a packet of q to the batch: to the open train when it fits there.
func (t *transmitter) packet(now verbs.Instant, q *QP, out *qp.Out) {
	p := &out.Packet
	p.Pad = roce.PadCount(out.Len)
	size := p.HeaderLen() + out.Len + int(p.Pad) + roce.ICRCLen
	w := t.w
	way := &q.route
	if out.AH != 0 {
		way = &w.ahs.find(out.AH).route // the queue pair has just asked for it
	}
	id := t.place(q, way, p.DestQP, size)
	w.env.Counters.PacketsSent.Add(1)

	start := len(t.arena)
	t.arena = p.AppendHeaders(t.arena)
	if out.Unstable || out.Len <= copyLimit {
		for i := range out.N {
			t.arena = append(t.arena, out.Gather[i]...)
		}
		t.arena = append(t.arena, zeros[:p.Pad]...)
		sum := way.txPath.ICRC(t.arena[start:], id)
		t.arena = append(t.arena, 0, 0, 0, 0)
		roce.PutICRC(t.arena[len(t.arena)-4:], sum)
		t.piece(t.arena[start:])
	} else {
		crc := way.txPath.ICRCStart(size, id, t.arena[start:])
		t.piece(t.arena[start:])
		for i := range out.N {
			crc.Update(out.Gather[i])
			t.piece(out.Gather[i])
		}
		start = len(t.arena)
		t.arena = append(t.arena, zeros[:p.Pad]...)
		crc.Update(t.arena[start:])
		t.arena = append(t.arena, 0, 0, 0, 0)
		roce.PutICRC(t.arena[len(t.arena)-4:], crc.Sum())
		t.piece(t.arena[start:])
	}
	m := &t.msgs[len(t.msgs)-1]
	m.Len += size
	if w.cfg.Tap != nil {
		t.tapLast(now, m, size, id)
	}
}

var zeros [4]byte

// place opens a message for a packet of q with a UDP payload of size bytes, or finds that
// it joins the open train: from the same queue pair to the same, no longer than the first, and
// every one before it as long as the first. It returns the IPv4 Identification the packet will have: its
// place in the train.
func (t *transmitter) place(q *QP, way *route, dest verbs.QPN, size int) (id uint16) {
	if t.owner == q && q != nil && t.way == way && t.qpn == dest {
		m := &t.msgs[len(t.msgs)-1]
		first := m.SegSize
		if first == 0 {
			first = m.Len
		}
		if size <= first && t.segs < t.caps.MaxSegs && m.Len+size <= t.caps.MaxBytes {
			if t.segs == 1 {
				m.SegSize = first
			}
			t.segs++
			if size < first {
				t.owner = nil // a shorter one ends the train
			}
			return uint16(t.segs - 1)
		}
	}
	t.owner, t.way, t.qpn, t.segs = q, way, dest, 1
	n := len(t.pieces)
	m := link.Tx{Gather: t.pieces[n:n:cap(t.pieces)]}
	if q != nil {
		m.Dst, m.Src, m.TrafficClass = way.dst, way.src, way.class
	}
	t.msgs = append(t.msgs, m)
	return 0
}

// piece appends to the last message's gather list; a piece that continues the one before in
// the arena becomes part of it.
func (t *transmitter) piece(b []byte) {
	m := &t.msgs[len(t.msgs)-1]
	if n := len(m.Gather); n > 0 {
		last := m.Gather[n-1]
		if joined := len(last) + len(b); cap(last) >= joined && &last[:joined][len(last)] == &b[0] {
			m.Gather[n-1] = last[:joined]
			return
		}
	}
	t.pieces = append(t.pieces, b)
	m.Gather = m.Gather[:len(m.Gather)+1]
}

// tapLast shows the last packet of message m to the tap.
func (t *transmitter) tapLast(now verbs.Instant, m *link.Tx, size int, id uint16) {
	var flat [roce.MaxHeader + 4096 + 8]byte
	n := len(flat)
	for i := len(m.Gather) - 1; i >= 0 && len(flat)-n < size; i-- {
		piece := m.Gather[i]
		if rest := size - (len(flat) - n); len(piece) > rest {
			piece = piece[len(piece)-rest:]
		}
		n -= len(piece)
		copy(flat[n:], piece)
	}
	pieces := [1][]byte{flat[n:]}
	t.w.cfg.Tap.Packet(now, true, netip.AddrPortFrom(m.Src, t.w.local.Port()), m.Dst, id, pieces[:])
}

// flush offers everything to the link; false when some of it must wait.
func (t *transmitter) flush(now verbs.Instant) bool {
	t.owner = nil
	if len(t.msgs) == 0 {
		return true
	}
	w := t.w
	for t.first < len(t.msgs) && w.failed == nil {
		n, err := w.link.Send(t.msgs[t.first:])
		if err != nil {
			w.failed = err
			break
		}
		for i := range n {
			m := &t.msgs[t.first+i]
			segs := 1
			if m.SegSize > 0 {
				segs = (m.Len + m.SegSize - 1) / m.SegSize
				w.Counters.TrainsOut.Add(1)
			}
			w.Counters.DatagramsOut.Add(uint64(segs))
			w.Counters.BytesOut.Add(uint64(m.Len))
		}
		t.first += n
		if n == 0 || t.first < len(t.msgs) {
			w.Counters.SendBlocked.Add(1)
			t.blockedAt = now
			return false
		}
	}
	clear(t.pieces) // keep no program's memory alive
	t.msgs, t.pieces, t.arena, t.first = t.msgs[:0], t.pieces[:0], t.arena[:0], 0
	return true
}

// Quiesce lets go of all registered memory. Between steps the wire holds some only while the
// link is blocked: then what waits is offered once more and the rest dropped, as a network
// may; what must arrive is sent again.
func (w *Wire) Quiesce(now verbs.Instant) {
	t := &w.tx
	if t.flush(now) {
		return
	}
	w.Counters.DropBlocked.Add(uint64(len(t.msgs) - t.first))
	clear(t.pieces)
	t.msgs, t.pieces, t.arena, t.first = t.msgs[:0], t.pieces[:0], t.arena[:0], 0
}

// sendMAD adds the management datagram in w.mad to the batch.
func (w *Wire) sendMAD(now verbs.Instant) {
	t := &w.tx
	src := w.mad.Path.Local
	if !src.IsValid() || src.IsUnspecified() {
		src = w.local.Addr()
	}
	dst := w.mad.Path.Remote
	if src.Is4() != dst.Addr().Is4() || src.IsUnspecified() {
		w.Counters.DropAddress.Add(1)
		return
	}
	p := roce.Packet{BTH: roce.BTH{
		Opcode: roce.UDSendOnly, MigReq: true, PKey: roce.DefaultPKey, DestQP: verbs.QPNGSI, PSN: w.gsiPSN,
	}, DETH: roce.DETH{QKey: roce.GSIQKey, SrcQP: verbs.QPNGSI}}
	w.gsiPSN = w.gsiPSN.Next()
	path := roce.NewPath(netip.AddrPortFrom(src, w.local.Port()), dst)
	t.lone(now, &p, w.mad.MAD[:], &path, link.Tx{Dst: dst, Src: src})
}

// lone adds a packet that belongs to no queue pair's train; to says where it goes. Its payload
// is a multiple of four bytes long.
func (t *transmitter) lone(now verbs.Instant, p *roce.Packet, payload []byte, path *roce.Path, to link.Tx) {
	id := t.place(nil, nil, p.DestQP, 0)
	m := &t.msgs[len(t.msgs)-1]
	m.Dst, m.Src, m.TrafficClass = to.Dst, to.Src, to.TrafficClass
	start := len(t.arena)
	t.arena = p.AppendHeaders(t.arena)
	t.arena = append(t.arena, payload...)
	sum := path.ICRC(t.arena[start:], id)
	t.arena = append(t.arena, 0, 0, 0, 0)
	roce.PutICRC(t.arena[len(t.arena)-4:], sum)
	t.piece(t.arena[start:])
	m.Len = len(t.arena) - start
	if t.w.cfg.Tap != nil {
		t.tapLast(now, m, m.Len, id)
	}
}
