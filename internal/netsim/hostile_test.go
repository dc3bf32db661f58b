package netsim

import (
	"bytes"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// victim is a device with a connected queue pair, whose peer is replaced by a forger: his packets have
// the peer's address, the expected PSN and an honest ICRC, and everything else as he likes.
type victim struct {
	t       *testing.T
	net     *Net
	a, b    *Node
	bq      *wire.QP
	lane    *qp.CQ
	around  []byte     // the regions lie in its middle
	mr      *mr.Region // with all rights
	quiet   *mr.Region // the same bytes, with no right for peers
	foreign *mr.Region // the same bytes, in another protection domain
	psn     verbs.PSN
	answers []string
}

const (
	hostileMTU    = 1024
	hostileRegion = 4096
)

func newVictim(t *testing.T, rights verbs.Access) *victim {
	t.Helper()
	net := New(1)
	v := &victim{t: t, net: net, a: net.Node("10.0.0.1"), b: net.Node("10.0.0.2"), lane: qp.NewCQ(64), psn: 0xFFFFFF}
	net.Node("10.0.0.3")
	aq := v.a.QP(qp.NewCQ(64), verbs.QPCap{})
	v.bq = v.b.QP(v.lane, verbs.QPCap{})
	joinByHand(t, net, v.a, v.b, aq, v.bq, time.Second)
	attr := verbs.QPAttr{Mask: verbs.AttrState | verbs.AttrAccessFlags, State: verbs.QPRTS, AccessFlags: rights}
	if err := v.b.Wire.Modify(net.Now(), v.bq, &attr); err != nil {
		t.Fatal(err)
	}
	v.a.Dead = true
	v.around = bytes.Repeat([]byte{untouch}, hostileRegion+2*mixGuard)
	inner := v.around[mixGuard : mixGuard+hostileRegion : mixGuard+hostileRegion]
	all := verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
	v.mr, v.quiet = v.b.Register(inner, all), v.b.Register(inner, verbs.LocalWrite)
	var err error
	if v.foreign, err = v.b.MRs.Register(PD+1, inner, all); err != nil {
		t.Fatal(err)
	}
	if _, err := v.b.Recv(v.bq, verbs.RecvWR{WRID: 1, SGList: sgl(v.mr, 0, 2048)}, verbs.RecvWR{WRID: 2, SGList: sgl(v.mr, 0, 2048)}); err != nil {
		t.Fatal(err)
	}
	net.Rules = append(net.Rules, func(p *Packet) Verdict {
		if p.Src.Addr() == v.b.Addr.Addr() {
			v.answers = append(v.answers, v.answer(p))
		}
		return Verdict{}
	})
	return v
}

// answer names a packet of the victim's.
func (v *victim) answer(p *Packet) string {
	d, ok := p.Decode()
	if !ok {
		v.t.Fatalf("the victim sends what is no packet: %x", p.Payload)
	}
	for _, c := range d.Payload {
		if c != untouch && d.Opcode.IsResponse() {
			v.t.Error("an answer holds bytes from beside the region")
		}
	}
	if d.Opcode != roce.RCAck {
		return d.Opcode.String()
	}
	if roce.IsAck(d.AETH.Syndrome) {
		return "ACK"
	}
	return fmt.Sprintf("NAK %x", d.AETH.Syndrome)
}

// packet is a packet as it would be good.
func (v *victim) packet(op roce.Opcode, n int) *roce.Packet {
	p := &roce.Packet{
		BTH:     roce.BTH{Opcode: op, PKey: roce.DefaultPKey, DestQP: v.bq.Num(), PSN: v.psn, AckReq: true, Pad: roce.PadCount(n)},
		RETH:    roce.RETH{VA: v.mr.Addr(), RKey: v.mr.Key(), DMALen: uint32(n)},
		Atomic:  roce.AtomicETH{VA: v.mr.Addr(), RKey: v.mr.Key()},
		InvRKey: v.mr.Key(),
	}
	if op.HasPayload() {
		p.Payload = bytes.Repeat([]byte{untouch}, n)
	}
	return p
}

// send lets a packet arrive, after spoil has changed its bytes, and signs it.
func (v *victim) send(p *roce.Packet, spoil func(b []byte) []byte) {
	b := p.Append(nil)
	if spoil != nil {
		b = spoil(b)
	}
	path := roce.NewPath(v.a.Addr, v.b.Addr)
	b = append(b, 0, 0, 0, 0)
	roce.PutICRC(b[len(b)-4:], path.ICRC(b[:len(b)-4], 0))
	v.net.launch(Packet{Src: v.a.Addr, Dst: v.b.Addr, Payload: b}, 0)
	v.net.Run(time.Millisecond, nil)
	v.psn = v.psn.Next()
}

// Everything that a peer can do wrong in a packet that is valid as such. Each thing has the
// answer that the standard gives, and is counted; nothing outside the region is read or
// written; and where the queue pair lives on, it does so unharmed.
func TestHostilePackets(t *testing.T) {
	const (
		invalid = "NAK 61" // invalid request
		access  = "NAK 62" // remote access error
		gap     = "NAK 60" // PSN sequence error
		silence = ""
	)
	all := verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic
	type counters = func(v *victim) *atomic.Uint64
	naks := func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().NaksSent }
	other := func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().DroppedOther }
	duplicate := func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Duplicates }
	early := func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().OutOfOrder }
	decode := func(v *victim) *atomic.Uint64 { return &v.b.Wire.Counters.DropDecode }
	one := func(op roce.Opcode, n int, bend func(v *victim, p *roce.Packet)) func(v *victim) {
		return func(v *victim) {
			p := v.packet(op, n)
			if bend != nil {
				bend(v, p)
			}
			v.send(p, nil)
		}
	}
	length := func(n uint32) func(v *victim, p *roce.Packet) {
		return func(_ *victim, p *roce.Packet) { p.RETH.DMALen = n }
	}
	va := func(off uint64) func(v *victim, p *roce.Packet) {
		return func(_ *victim, p *roce.Packet) {
			p.RETH.VA += off
			p.Atomic.VA += off
		}
	}
	key := func(of func(v *victim) uint32) func(v *victim, p *roce.Packet) {
		return func(v *victim, p *roce.Packet) { p.RETH.RKey, p.Atomic.RKey = of(v), of(v) }
	}
	psn := func(d int) func(v *victim, p *roce.Packet) {
		return func(v *victim, p *roce.Packet) { p.PSN = v.psn.Add(d) }
	}
	ack := func(psn verbs.PSN, syndrome uint8) func(v *victim) {
		return func(v *victim) {
			p := v.packet(roce.RCAck, 0)
			p.PSN, p.AETH.Syndrome = psn, syndrome
			v.send(p, nil)
		}
	}
	after := func(first, then func(v *victim)) func(v *victim) {
		return func(v *victim) { first(v); v.answers = nil; then(v) }
	}
	beginSend, beginWrite := one(roce.RCSendFirst, hostileMTU, nil), one(roce.RCWriteFirst, hostileMTU, length(2*hostileMTU))
	post := func(op verbs.Opcode, n int) func(v *victim) {
		return func(v *victim) {
			wr := verbs.SendWR{Opcode: op, Flags: verbs.Signaled, SGList: sgl(v.mr, 0, n), RemoteAddr: 8, RKey: 9}
			if _, err := v.b.Send(v.bq, wr); err != nil {
				v.t.Fatal(err)
			}
			v.net.Run(10*time.Microsecond, nil)
		}
	}
	const psnB = 77 // the victim's first

	type hostile struct {
		name   string
		do     func(v *victim)
		want   string // answers
		state  verbs.QPState
		count  counters
		status string // completions
		rights verbs.Access
	}
	cases := []hostile{
		// Lengths.
		{"SEND longer than the receive", after(beginSend, after(one(roce.RCSendMiddle, hostileMTU, nil), one(roce.RCSendLast, 8, nil))), invalid, verbs.QPErr, naks, "LOC_LEN_ERR WR_FLUSH_ERR", all},
		{"ONLY longer than the MTU", one(roce.RCSendOnly, hostileMTU+4, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"FIRST shorter than the MTU", one(roce.RCSendFirst, hostileMTU-4, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"FIRST with a pad", one(roce.RCSendFirst, hostileMTU-1, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"MIDDLE shorter than the MTU", after(beginSend, one(roce.RCSendMiddle, 8, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"LAST of nothing", after(beginSend, one(roce.RCSendLast, 0, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE with less than its RETH says", one(roce.RCWriteOnly, 64, length(65)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE with more", one(roce.RCWriteOnly, 64, length(63)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE FIRST that is the whole", one(roce.RCWriteFirst, hostileMTU, length(hostileMTU)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE MIDDLE beyond the RETH's length", after(beginWrite, one(roce.RCWriteMiddle, hostileMTU, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE of more than 2 GiB", one(roce.RCWriteFirst, hostileMTU, length(1<<31+1)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ of more than 2 GiB", one(roce.RCReadRequest, 8, length(1<<31+1)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		// What cannot be a packet is none.
		{"pad longer than the payload", func(v *victim) {
			v.send(v.packet(roce.RCSendOnly, 0), func(b []byte) []byte { b[1] |= 0x30; return b })
		}, silence, verbs.QPRTS, decode, "", all},
		{"header cut short", func(v *victim) {
			v.send(v.packet(roce.RCReadRequest, 8), func(b []byte) []byte { return b[:len(b)-8] })
		}, silence, verbs.QPRTS, decode, "", all},
		{"READ request with a payload", func(v *victim) {
			v.send(v.packet(roce.RCReadRequest, 8), func(b []byte) []byte { return append(b, 1, 2, 3, 4) })
		}, silence, verbs.QPRTS, decode, "", all},
		// Ranges.
		{"WRITE one byte beyond", one(roce.RCWriteOnly, 64, va(hostileRegion-63)), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE one byte before", one(roce.RCWriteOnly, 64, va(1<<64-1)), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE that wraps 2^64", one(roce.RCWriteOnly, 64, func(_ *victim, p *roce.Packet) { p.RETH.VA = 1<<64 - 32 }), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE whose later packets leave", one(roce.RCWriteFirst, hostileMTU, length(hostileRegion+1)), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ one byte beyond", one(roce.RCReadRequest, 64, va(hostileRegion-63)), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ that wraps 2^64", one(roce.RCReadRequest, 64, func(_ *victim, p *roce.Packet) { p.RETH.VA = 1<<64 - 32 }), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ of all there is and 1 GiB", one(roce.RCReadRequest, 1<<30, nil), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"FETCH_ADD beyond", one(roce.RCFetchAdd, 0, va(hostileRegion)), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"FETCH_ADD not aligned", one(roce.RCFetchAdd, 0, va(4)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"CMP_SWAP not aligned, last bytes", one(roce.RCCmpSwap, 0, va(hostileRegion-4)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		// Keys and rights.
		{"other variant of a key", one(roce.RCWriteOnly, 64, key(func(v *victim) uint32 { return v.mr.Key() ^ 1 })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"key of nothing", one(roce.RCReadRequest, 64, key(func(v *victim) uint32 { return 0 })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE, region without the right", one(roce.RCWriteOnly, 64, key(func(v *victim) uint32 { return v.quiet.Key() })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ, region without the right", one(roce.RCReadRequest, 64, key(func(v *victim) uint32 { return v.quiet.Key() })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"FETCH_ADD, region without the right", one(roce.RCFetchAdd, 0, key(func(v *victim) uint32 { return v.quiet.Key() })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE, other protection domain", one(roce.RCWriteOnly, 64, key(func(v *victim) uint32 { return v.foreign.Key() })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ, other protection domain", one(roce.RCReadRequest, 64, key(func(v *victim) uint32 { return v.foreign.Key() })), access, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE, queue pair without the right", one(roce.RCWriteOnly, 64, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", verbs.RemoteRead},
		{"READ, queue pair without the right", one(roce.RCReadRequest, 64, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", verbs.RemoteWrite},
		{"FETCH_ADD, queue pair without the right", one(roce.RCFetchAdd, 0, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", verbs.RemoteWrite},
		{"SEND that invalidates a region", one(roce.RCSendOnlyInv, 8, nil), silence, verbs.QPErr, func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Flushed }, "REM_INV_REQ_ERR WR_FLUSH_ERR", all},
		// Messages that splice.
		{"MIDDLE of nothing", one(roce.RCSendMiddle, hostileMTU, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"LAST of nothing begun", one(roce.RCWriteLast, 8, nil), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"FIRST in a SEND", after(beginSend, beginSend), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"ONLY in a SEND", after(beginSend, one(roce.RCSendOnly, 8, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"WRITE LAST in a SEND", after(beginSend, one(roce.RCWriteLast, 8, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"SEND LAST in a WRITE", after(beginWrite, one(roce.RCSendLast, 8, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ in a WRITE", after(beginWrite, one(roce.RCReadRequest, 8, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"atomic in a SEND", after(beginSend, one(roce.RCFetchAdd, 0, nil)), invalid, verbs.QPErr, naks, "WR_FLUSH_ERR WR_FLUSH_ERR", all},
		// PSNs.
		{"PSN ahead", one(roce.RCSendOnly, 8, psn(1)), gap, verbs.QPRTS, early, "", all},
		{"PSN ahead by nearly half", one(roce.RCSendOnly, 8, psn(1<<23-1)), gap, verbs.QPRTS, early, "", all},
		{"duplicate of a SEND that never was", one(roce.RCSendOnly, 8, psn(-1)), "ACK", verbs.QPRTS, duplicate, "", all},
		{"duplicate of a WRITE that never was", one(roce.RCWriteOnly, 8, psn(-1<<22)), "ACK", verbs.QPRTS, duplicate, "", all},
		{"duplicate of a READ that never was", one(roce.RCReadRequest, 8, psn(-1)), silence, verbs.QPRTS, other, "", all},
		{"duplicate of an atomic that never was", one(roce.RCFetchAdd, 0, psn(-1)), silence, verbs.QPRTS, other, "", all},
		{"READ again, with a longer range", after(one(roce.RCReadRequest, 8, nil), func(v *victim) {
			one(roce.RCReadRequest, 16, psn(-1))(v)
		}), silence, verbs.QPRTS, other, "", all},
		{"READ again, of another place", after(one(roce.RCReadRequest, 8, nil), func(v *victim) {
			one(roce.RCReadRequest, 8, func(v *victim, p *roce.Packet) { p.PSN = v.psn.Add(-1); p.RETH.VA += 8 })(v)
		}), silence, verbs.QPRTS, other, "", all},
		{"READ again, with another key", after(one(roce.RCReadRequest, 8, nil), func(v *victim) {
			one(roce.RCReadRequest, 8, func(v *victim, p *roce.Packet) { p.PSN = v.psn.Add(-1); p.RETH.RKey = v.quiet.Key() })(v)
		}), silence, verbs.QPRTS, other, "", all},
		{"atomic where a READ was", after(one(roce.RCReadRequest, 8, nil), one(roce.RCFetchAdd, 0, psn(-1))), silence, verbs.QPRTS, other, "", all},
		// Answers to what was never asked.
		{"ACK of nothing", ack(psnB, 0x1F), silence, verbs.QPRTS, other, "", all},
		{"ACK far ahead", ack(psnB+1000, 0x1F), silence, verbs.QPRTS, other, "", all},
		{"ACK far behind", ack(0x800000+psnB+1, 0x1F), silence, verbs.QPRTS, other, "", all},
		{"sequence NAK of nothing", ack(psnB+1, roce.NakPSNSeq), silence, verbs.QPRTS, other, "", all},
		{"access NAK of nothing", ack(psnB, roce.NakRemAccess), silence, verbs.QPRTS, other, "", all},
		{"RNR NAK of nothing", ack(psnB, 0x21), silence, verbs.QPRTS, other, "", all},
		{"READ response to nothing", one(roce.RCReadRespOnly, 8, func(_ *victim, p *roce.Packet) { p.PSN = psnB }), silence, verbs.QPRTS, other, "", all},
		{"atomic answer to nothing", one(roce.RCAtomicAck, 0, func(_ *victim, p *roce.Packet) { p.PSN = psnB }), silence, verbs.QPRTS, other, "", all},
		{"ACK beyond what was sent", after(post(verbs.Send, 8), ack(psnB+1, 0x1F)), silence, verbs.QPRTS, other, "", all},
		{"reserved syndrome", after(post(verbs.Send, 8), ack(psnB, 0x7F)), silence, verbs.QPRTS, other, "", all},
		{"NAK of RD", after(post(verbs.Send, 8), ack(psnB, 0x64)), silence, verbs.QPRTS, other, "", all},
		{"ACK of a READ", after(post(verbs.RDMARead, 8), ack(psnB, 0x1F)), "RC_READ_REQUEST", verbs.QPRTS, func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Retransmits }, "", all},
		{"READ response to a SEND", after(post(verbs.Send, 8), one(roce.RCReadRespOnly, 8, func(_ *victim, p *roce.Packet) { p.PSN = psnB })), silence, verbs.QPErr, func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Flushed }, "BAD_RESP_ERR WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ response that is too long", after(post(verbs.RDMARead, 8), one(roce.RCReadRespOnly, 12, func(_ *victim, p *roce.Packet) { p.PSN = psnB })), silence, verbs.QPErr, func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Flushed }, "BAD_RESP_ERR WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"READ response that is too short", after(post(verbs.RDMARead, 8), one(roce.RCReadRespOnly, 4, func(_ *victim, p *roce.Packet) { p.PSN = psnB })), silence, verbs.QPErr, func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Flushed }, "BAD_RESP_ERR WR_FLUSH_ERR WR_FLUSH_ERR", all},
		{"atomic answer to a READ", after(post(verbs.RDMARead, 8), one(roce.RCAtomicAck, 0, func(_ *victim, p *roce.Packet) { p.PSN = psnB })), silence, verbs.QPErr, func(v *victim) *atomic.Uint64 { return &v.b.Wire.QPCounters().Flushed }, "BAD_RESP_ERR WR_FLUSH_ERR WR_FLUSH_ERR", all},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			v := newVictim(t, tc.rights)
			tc.do(v)
			got := strings.Join(v.answers, " ")
			if got != tc.want || v.bq.State() != tc.state {
				t.Errorf("answered %q in %v, want %q in %v", got, v.bq.State(), tc.want, tc.state)
			}
			if tc.count(v).Load() == 0 {
				t.Error("not counted")
			}
			var names []string
			var wc [8]verbs.WC
			for _, c := range wc[:v.lane.Poll(wc[:])] {
				names = append(names, strings.SplitN(c.Status.String(), ":", 2)[0])
			}
			if got := strings.Join(names, " "); got != tc.status {
				t.Errorf("completions %q, want %q", got, tc.status)
			}
			if !bytes.Equal(v.around, bytes.Repeat([]byte{untouch}, len(v.around))) {
				t.Error("memory was changed")
			}
			if tc.state != verbs.QPRTS {
				return
			}
			// The queue pair is none the worse: what is expected next is taken.
			v.answers = nil
			v.psn = psnOfVictim(v)
			one(roce.RCSendOnly, 8, nil)(v)
			if n := v.lane.Poll(wc[:]); n != 1 || wc[0].Status != verbs.WCSuccess || wc[0].WRID != 1 {
				t.Errorf("a good SEND after it: %d completions, %v", n, wc[0].Status)
			}
		})
	}
}

// psnOfVictim is what the victim expects next.
func psnOfVictim(v *victim) verbs.PSN {
	next, _, ok := v.bq.Engine().Done()
	if !ok {
		v.t.Fatal("the victim expects nothing")
	}
	return next
}
