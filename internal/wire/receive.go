package wire

import (
	"net/netip"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// receive takes one batch of buffers from the link and hands their datagrams on.
func (w *Wire) receive(now verbs.Instant) (work int) {
	w.full = false
	if w.failed != nil {
		return 0
	}
	n, err := w.link.Recv(w.rx[:])
	w.full = n == len(w.rx)
	if err != nil {
		w.failed = err
		return 0
	}
	for i := range n {
		work += w.receiveBuffer(now, &w.rx[i])
	}
	return work
}

// receiveBuffer splits a train into its datagrams.
func (w *Wire) receiveBuffer(now verbs.Instant, rx *link.Rx) (datagrams int) {
	w.Counters.BytesIn.Add(uint64(len(rx.Buf)))
	if rx.Truncated {
		w.Counters.DatagramsIn.Add(1)
		w.Counters.DropTruncated.Add(1)
		return 1
	}
	if rx.SegSize <= 0 || rx.SegSize >= len(rx.Buf) {
		w.Counters.DatagramsIn.Add(1)
		w.receiveDatagram(now, rx, rx.Buf, 0)
		return 1
	}
	w.Counters.TrainsIn.Add(1)
	for b := rx.Buf; len(b) > 0; datagrams++ {
		n := min(rx.SegSize, len(b))
		w.receiveDatagram(now, rx, b[:n:n], datagrams)
		b = b[n:]
	}
	w.Counters.DatagramsIn.Add(uint64(datagrams))
	return datagrams
}

// receiveDatagram checks one UDP payload, in the order of the standard's packet header
// validation (IBTA Vol 1, 9.6.1; annex A17): what can be wrong before the queue pair is
// known, the queue pair, the addresses, the P_Key, the ICRC. Everything wrong is dropped
// without an answer and counted. seg is the datagram's place in its train.
func (w *Wire) receiveDatagram(now verbs.Instant, rx *link.Rx, b []byte, seg int) {
	p := &w.in
	if err := p.Decode(b); err != nil {
		w.Counters.DropDecode.Add(1)
		return
	}
	if p.PKey&0x7FFF != roce.DefaultPKey&0x7FFF {
		w.Counters.DropPKey.Add(1)
		return
	}
	if p.DestQP == verbs.QPNGSI {
		if w.cfg.Wires > 1 && w.misdirected(Owner(b, w.cfg.Wires), rx, b, seg) {
			return
		}
		w.receiveGSI(now, rx, b, seg)
		return
	}
	if p.DestQP == verbs.QPNMulticast {
		w.receiveMulticast(now, rx, b, seg)
		return
	}
	q := w.qps.find(p.DestQP)
	if q == nil {
		if !w.misdirected(int(p.DestQP>>Shift), rx, b, seg) {
			w.receiveLate(now, rx, b, seg)
		}
		return
	}
	if !transportFits(p.Opcode, q.q.Type()) {
		w.Counters.DropTransport.Add(1)
		return
	}
	if q.q.Type() == verbs.UD {
		w.receiveUD(now, rx, b, seg, q)
		return
	}
	if q.peer == nil || rx.Src.Addr() != q.dst.Addr() || rx.Dst != q.src {
		w.Counters.DropAddress.Add(1)
		return
	}
	if rx.Src.Port() != q.rxPort {
		// The source port is flow entropy; ours is always the same, others' may differ.
		q.rxPort = rx.Src.Port()
		q.rxPath = roce.NewPath(rx.Src, netip.AddrPortFrom(q.src, w.local.Port()))
	}
	id, ok := w.checkICRC(&q.rxPath, &q.peer.ids, b, seg)
	w.tap(now, rx, id, b)
	if !ok {
		w.Counters.DropICRC.Add(1)
		return
	}
	w.env.Counters.PacketsReceived.Add(1)
	q.q.HandlePacket(now, p)
	w.after(q)
	if q.peer != nil {
		q.peer.note()
	}
}

// receiveUD handles a datagram for a UD queue pair, which takes them from anybody.
func (w *Wire) receiveUD(now verbs.Instant, rx *link.Rx, b []byte, seg int, q *QP) {
	if rx.Src.Addr().Is4() != rx.Dst.Is4() || rx.Dst.IsMulticast() {
		w.Counters.DropAddress.Add(1)
		return
	}
	s := w.from.find(rx.Src, rx.Dst, w.local.Port())
	id, ok := w.checkICRC(&s.path, &s.ids, b, seg)
	w.tap(now, rx, id, b)
	if !ok {
		w.Counters.DropICRC.Add(1)
		return
	}
	w.env.Counters.PacketsReceived.Add(1)
	q.q.HandleDatagram(now, &w.in, rx.Src.Addr(), rx.Dst, 0)
	w.after(q)
}

// transportFits reports whether packets of an opcode are for queue pairs of a type.
func transportFits(op roce.Opcode, t verbs.QPType) bool {
	switch op.Transport() {
	case roce.TransportRC:
		return t == verbs.RC
	case roce.TransportUC:
		return t == verbs.UC
	case roce.TransportUD:
		return t == verbs.UD
	}
	return false
}

// idRun is what is known of the IPv4 Identifications that somebody's packets carry.
type idRun struct {
	last uint16
	// own counts, from 0 to ownMost, how many packets had the Identification that Doorbell makes
	// its system write: it goes up with each such packet, and down with each whose is beyond
	// any train's.
	own uint8
}

const (
	// ownIDs is the count from which on a sender is believed to control its Identifications: by
	// chance, or because it counts, none gets that far.
	ownIDs  = 32
	ownMost = 64
	// maxTrain is the number of segments of the longest train that any system sends: their
	// Identifications are their places in it.
	maxTrain = 128
)

// checkICRC verifies the ICRC of a datagram. On IPv4 the ICRC covers the Identification,
// which a socket does not show: it is predicted (its place in the train, one more than the
// peer's last) and only when no prediction holds solved for, which leaves 16 check bits.
//
// From a sender who was seen to write its Identifications itself, as Doorbell does, those beyond a
// train's are refused: this leaves 25 bits. When something on the way begins to write others,
// which it may (RFC 6864, 4.1), the first few are lost.
//
// run is where the sender's Identifications are remembered; nil for one unknown.
func (w *Wire) checkICRC(path *roce.Path, run *idRun, b []byte, seg int) (id uint16, ok bool) {
	if path.IPv6() {
		return 0, path.Check(b, 0)
	}
	if id = uint16(seg); path.Check(b, id) {
		if run != nil {
			run.last = id
			if run.own < ownMost {
				run.own++
			}
		}
		return id, true
	}
	if run != nil {
		if id = run.last + 1; path.Check(b, id) {
			run.last = id
			return id, true
		}
	}
	id, ok = path.Solve(b)
	if !ok {
		return 0, false
	}
	if run != nil {
		if id >= maxTrain && run.own > 0 {
			if run.own--; run.own >= ownIDs {
				w.Counters.FarIDs.Add(1)
				return id, false
			}
		}
		if far := id - run.last; far > farID && -far > farID {
			w.Counters.FarIDs.Add(1)
		}
		run.last = id
	}
	w.Counters.SolvedIDs.Add(1)
	return id, true
}

// farID is how far an Identification may be from the one before and still belong to one
// run: Linux counts per destination, and a window of packets may be lost in between.
const farID = 1024

func (w *Wire) tap(now verbs.Instant, rx *link.Rx, id uint16, b []byte) {
	if w.cfg.Tap == nil {
		return
	}
	pieces := [1][]byte{b}
	w.cfg.Tap.Packet(now, false, rx.Src, netip.AddrPortFrom(rx.Dst, w.local.Port()), id, pieces[:])
}

// receiveGSI handles a management datagram.
func (w *Wire) receiveGSI(now verbs.Instant, rx *link.Rx, b []byte, seg int) {
	p := &w.in
	if p.Opcode != roce.UDSendOnly || len(p.Payload) != roce.MADLen {
		w.Counters.DropGSI.Add(1)
		return
	}
	if p.DETH.QKey != roce.GSIQKey {
		w.Counters.DropQKey.Add(1)
		return
	}
	if rx.Src.Addr().Is4() != rx.Dst.Is4() {
		w.Counters.DropAddress.Add(1)
		return
	}
	path := roce.NewPath(rx.Src, netip.AddrPortFrom(rx.Dst, w.local.Port()))
	var run *idRun
	if known := w.peers[rx.Src]; known != nil {
		run = &known.ids
	}
	id, ok := w.checkICRC(&path, run, b, seg)
	w.tap(now, rx, id, b)
	if !ok {
		w.Counters.DropICRC.Add(1)
		return
	}
	w.cm.HandleMAD(now, rx.Src, rx.Dst, p.Payload)
	// At once: what a REQ or RTU leads to must be done before the next packet of the same
	// batch, which may be the first one on the connection.
	w.cmEvents(now)
}
