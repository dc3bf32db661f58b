package netsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const captureDir = "../../roce/testdata/captures"

// frame is a packet of a capture of two Linux hosts.
type frame struct {
	n        int // its number in the file, from 1, as tools count
	at       time.Duration
	src, dst netip.AddrPort
	raw      []byte // BTH to ICRC
	p        roce.Packet
	// unknown: it must have been sent, but what its payload was is not known.
	unknown bool
}

func (f *frame) String() string { return fmt.Sprintf("#%d %v %v", f.n, f.src.Addr(), &f.p) }

// readFrames reads a capture.
func readFrames(t testing.TB, name string) (frames []*frame) {
	t.Helper()
	file, err := os.Open(filepath.Join(captureDir, name+".pcap"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := pcapgo.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	var first time.Time
	for n := 1; ; n++ {
		data, info, err := r.ReadPacketData()
		if err == io.EOF {
			return frames
		}
		if err != nil {
			t.Fatal(err)
		}
		if n == 1 {
			first = info.Timestamp
		}
		pkt := gopacket.NewPacket(data, r.LinkType(), gopacket.NoCopy)
		udp, ok := pkt.TransportLayer().(*layers.UDP)
		if !ok || udp.DstPort != roce.Port {
			continue
		}
		flow := pkt.NetworkLayer().NetworkFlow()
		src, _ := netip.AddrFromSlice(flow.Src().Raw())
		dst, _ := netip.AddrFromSlice(flow.Dst().Raw())
		f := &frame{
			n: n, at: info.Timestamp.Sub(first), raw: udp.Payload,
			src: netip.AddrPortFrom(src, uint16(udp.SrcPort)), dst: netip.AddrPortFrom(dst, uint16(udp.DstPort)),
		}
		if err := f.p.Decode(f.raw); err != nil {
			t.Fatalf("%s #%d: %v", name, n, err)
		}
		frames = append(frames, f)
	}
}

// endpoint is a queue pair of one of the hosts, as far as the capture tells.
type endpoint struct {
	host, peerHost netip.Addr
	num, peer      verbs.QPN // 0 when the capture does not tell
	typ            verbs.QPType
	mtu            verbs.MTU
	sendPSN        verbs.PSN
	recvPSN        verbs.PSN
	timeout        verbs.AckTimeout
	retry, rnr     uint8
	minRNR         verbs.RNRTimer
	qkey           uint32

	in, out []*frame // to it and from it, in order
	sends   []*message
	recvs   []*message // what the peer sent to it
}

// message is a work request of one of the hosts.
type message struct {
	op         verbs.Opcode
	first      *frame // its first packet's first transmission
	psn        verbs.PSN
	n          int // PSNs
	length     uint32
	data       []byte // of SEND and WRITE
	imm, inv   uint32
	solicited  bool
	va         uint64
	rkey       uint32
	atomic     roce.AtomicETH
	consumes   bool // a receive of the peer
	hasImm     bool
	consumesAt verbs.PSN // with this packet
}

func (m *message) holds(psn verbs.PSN) bool { d := psn.Sub(m.psn); return d >= 0 && d < m.n }

func isCM(f *frame) bool { return f.p.DestQP == verbs.QPNGSI }

// pair is the key under which packets of one connection are found: rxe uses one UDP source
// port for both directions of a connection, different ones for different connections.
type pair struct {
	a, b netip.Addr
	port uint16
}

// discover finds the queue pairs of a capture: from REQ and REP where there are any, else
// from the packets alone.
func discover(t testing.TB, frames []*frame) (all []*endpoint) {
	t.Helper()
	find := func(host netip.Addr, num verbs.QPN) *endpoint {
		for _, e := range all {
			if e.host == host && e.num == num {
				return e
			}
		}
		return nil
	}
	mtus := func(payloads int) verbs.MTU {
		m, ok := verbs.MTUForBytes(payloads)
		if !ok {
			m = verbs.MTU1024
		}
		return m
	}
	// Connections made by the connection manager.
	reqs := map[uint32]*roce.REQ{}
	for _, f := range frames {
		if !isCM(f) {
			continue
		}
		var mad roce.MAD
		if err := mad.Decode(f.p.Payload); err != nil {
			t.Fatalf("%v: %v", f, err)
		}
		switch mad.AttrID {
		case roce.AttrREQ:
			q := new(roce.REQ)
			if err := q.Decode(mad.Data); err != nil {
				t.Fatalf("%v: %v", f, err)
			}
			reqs[q.LocalCommID] = q
		case roce.AttrREP:
			p := new(roce.REP)
			if err := p.Decode(mad.Data); err != nil {
				t.Fatalf("%v: %v", f, err)
			}
			q := reqs[p.RemoteCommID]
			if q == nil || find(f.src.Addr(), p.LocalQPN) != nil {
				continue
			}
			passive := &endpoint{
				host: f.src.Addr(), peerHost: f.dst.Addr(), num: p.LocalQPN, peer: q.LocalQPN, typ: verbs.RC, mtu: q.PathMTU,
				sendPSN: q.StartingPSN, recvPSN: p.StartingPSN, timeout: q.Primary.AckTimeout,
				retry: q.RetryCount, rnr: q.RNRRetryCount,
			}
			active := *passive
			active.host, active.peerHost = passive.peerHost, passive.host
			active.num, active.peer = passive.peer, passive.num
			active.sendPSN, active.recvPSN = passive.recvPSN, passive.sendPSN
			active.rnr = p.RNRRetryCount
			all = append(all, &active, passive)
		}
	}
	// All others.
	pairs := map[pair][2]*endpoint{}
	for _, f := range frames {
		if isCM(f) {
			continue
		}
		src, dst := f.src.Addr(), f.dst.Addr()
		if f.p.Opcode.Transport() == roce.TransportUD {
			for _, e := range [][3]any{{src, dst, f.p.DETH.SrcQP}, {dst, src, f.p.DestQP}} {
				if find(e[0].(netip.Addr), e[2].(verbs.QPN)) == nil {
					all = append(all, &endpoint{
						host: e[0].(netip.Addr), peerHost: e[1].(netip.Addr), num: e[2].(verbs.QPN),
						typ: verbs.UD, mtu: verbs.MTU1024, qkey: f.p.DETH.QKey,
					})
				}
			}
			continue
		}
		if find(dst, f.p.DestQP) != nil {
			continue
		}
		k := pair{src, dst, f.src.Port()}
		if dst.Less(src) {
			k.a, k.b = dst, src
		}
		es, ok := pairs[k]
		if !ok {
			es = [2]*endpoint{{host: k.a, peerHost: k.b}, {host: k.b, peerHost: k.a}}
			for _, e := range es {
				e.typ, e.mtu, e.timeout, e.retry, e.rnr = verbs.RC, verbs.MTU1024, 14, 7, 7
				if f.p.Opcode.Transport() == roce.TransportUC {
					e.typ = verbs.UC
				}
			}
			pairs[k] = es
			all = append(all, es[0], es[1])
		}
		for i, e := range es {
			if e.host == dst {
				e.num, es[1-i].peer = f.p.DestQP, f.p.DestQP
			}
		}
	}
	for _, f := range frames {
		if isCM(f) {
			continue
		}
		to := find(f.dst.Addr(), f.p.DestQP)
		to.in = append(to.in, f)
		from := find(f.src.Addr(), f.p.DETH.SrcQP)
		if to.typ != verbs.UD {
			from = nil
			for _, e := range all {
				if e.host == f.src.Addr() && e.peerHost == to.host && e.peer == to.num && e.num == to.peer {
					from = e
				}
			}
		}
		from.out = append(from.out, f)
		if f.p.Opcode == roce.RCSendFirst || f.p.Opcode == roce.RCWriteFirst || f.p.Opcode == roce.RCReadRespFirst {
			from.mtu, to.mtu = mtus(len(f.p.Payload)), mtus(len(f.p.Payload))
		}
		if roce.IsRNR(f.p.AETH.Syndrome) && f.p.Opcode == roce.RCAck {
			from.minRNR = roce.RNRTimerOf(f.p.AETH.Syndrome)
		}
	}
	for _, e := range all {
		if e.num == 0 {
			e.num = 0x7654 // it is never addressed
		}
		if e.peer == 0 {
			e.peer = 0x7654
		}
		e.sends = messages(t, e)
	}
	for _, e := range all {
		if len(e.sends) > 0 {
			e.sendPSN = e.sends[0].psn
		}
		for _, f := range all {
			if e.typ != verbs.UD && f.host == e.peerHost && f.num == e.peer && f.peer == e.num {
				e.recvs = f.sends
				if len(f.sends) > 0 {
					e.recvPSN = f.sends[0].psn
				}
			}
		}
		if e.typ == verbs.UD {
			for _, f := range all {
				for _, m := range f.sends {
					if m.first.dst.Addr() == e.host && m.first.p.DestQP == e.num {
						e.recvs = append(e.recvs, m)
					}
				}
			}
			slices.SortFunc(e.recvs, func(a, b *message) int { return a.first.n - b.first.n })
		}
	}
	return all
}

// messages puts the request packets that an endpoint sent together again, each once. A
// message whose end is not in the capture is left out, and what follows it.
func messages(t testing.TB, e *endpoint) (all []*message) {
	var next verbs.PSN
	var m *message
	whole := true
	for _, f := range e.out {
		p := &f.p
		if p.Opcode.IsResponse() || m != nil && p.PSN != next {
			continue // an answer, a retransmission
		}
		if p.Opcode.StartsMessage() != whole {
			t.Fatalf("%v: the capture lacks something before it", f)
		}
		if whole {
			m = &message{first: f, psn: p.PSN, va: p.RETH.VA, rkey: p.RETH.RKey, atomic: p.Atomic}
			all = append(all, m)
		}
		whole = p.Opcode.EndsMessage()
		m.data = append(m.data, p.Payload...)
		m.n++
		next = p.PSN.Next()
		if p.Opcode.ConsumesRecv() {
			m.consumes, m.consumesAt = true, p.PSN
		}
		if !whole {
			continue
		}
		m.length = uint32(len(m.data))
		m.imm, m.hasImm, m.inv, m.solicited = p.Imm, p.Opcode.HasImm(), p.InvRKey, p.Solicited
		switch op := p.Opcode; {
		case op == roce.RCReadRequest:
			m.op, m.length = verbs.RDMARead, p.RETH.DMALen
			m.n = max(1, (int(m.length)+e.mtu.Bytes()-1)/e.mtu.Bytes())
			next = m.psn.Add(m.n)
		case op == roce.RCCmpSwap:
			m.op, m.length, m.va, m.rkey = verbs.AtomicCmpAndSwp, 8, p.Atomic.VA, p.Atomic.RKey
		case op == roce.RCFetchAdd:
			m.op, m.length, m.va, m.rkey = verbs.AtomicFetchAdd, 8, p.Atomic.VA, p.Atomic.RKey
		case op.IsWrite() && m.hasImm:
			m.op = verbs.RDMAWriteWithImm
		case op.IsWrite():
			m.op = verbs.RDMAWrite
		case op.HasIETH():
			m.op = verbs.SendWithInv
		case m.hasImm:
			m.op = verbs.SendWithImm
		default:
			m.op = verbs.Send
		}
	}
	if !whole {
		all = all[:len(all)-1]
	}
	return all
}

// payloads returns what a stream of packets says in answer to a READ or atomic with this
// PSN, each thing once.
func payloads(stream []*frame, psn verbs.PSN) (all [][]byte) {
	for _, f := range stream {
		p := &f.p
		if p.PSN != psn || !p.Opcode.IsResponse() || p.Opcode == roce.RCAck {
			continue
		}
		b := p.Payload
		if p.Opcode == roce.RCAtomicAck {
			b = binary.NativeEndian.AppendUint64(nil, p.AtomicAck)
		}
		if !slices.ContainsFunc(all, func(a []byte) bool { return bytes.Equal(a, b) }) {
			all = append(all, b)
		}
	}
	return all
}
