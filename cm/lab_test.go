package cm

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// lab is one CM and a forger, who writes MADs as the peer might, or an attacker.
type lab struct {
	*CM
	t   testing.TB
	now verbs.Instant
	// id is the connection under test.
	id ConnID
	// What the forger says of itself, and where it sends from and to.
	peer  uint32
	guid  uint64
	qpn   verbs.QPN
	tid   uint64
	from  netip.AddrPort
	to    netip.Addr
	sends []string
	mads  []Out
}

const ourQPN = 0x22

func newLab(t testing.TB, cfg Config) *lab {
	if cfg.Rand == nil {
		cfg.Rand = rand.New(rand.NewPCG(7, 7)).Uint32
	}
	cfg.GUID = 0x0b0b
	l := &lab{
		CM: New(cfg), t: t, now: 1000, peer: 0xc0ffee, guid: 0xabba, qpn: 0x77, tid: 0x2_0000_0001,
		from: netip.AddrPortFrom(addrA, 55410), to: addrB,
	}
	if err := l.Listen(tcp); err != nil {
		t.Fatal(err)
	}
	return l
}

// put is a message of the connection manager.
type put interface{ Put(b []byte) }

// forge lets a MAD arrive.
func (l *lab) forge(m Message, body put) {
	var mad [roce.MADLen]byte
	h := roce.NewCMMAD(m.attr(), l.tid)
	h.PutHeader(mad[:])
	body.Put(mad[roce.MADHeaderLen:])
	l.HandleMAD(l.now, l.from, l.to, mad[:])
}

func (l *lab) req() *roce.REQ {
	var private [roce.REQPrivateLen]byte
	h := roce.IPCMHeader{Src: l.from.Addr(), Dst: l.to, SrcPort: 1}
	h.Put(private[:])
	return &roce.REQ{
		LocalCommID: l.peer, ServiceID: tcp, LocalCAGUID: l.guid, LocalQPN: l.qpn, PathMTU: verbs.MTU1024, StartingPSN: 5,
		Primary: roce.CMPath{LocalGID: roce.GIDFromAddr(l.from.Addr()), RemoteGID: roce.GIDFromAddr(l.to)}, PrivateData: private[:],
	}
}

func (l *lab) rep() *roce.REP {
	return &roce.REP{LocalCommID: l.peer, RemoteCommID: uint32(l.id), LocalQPN: l.qpn, LocalCAGUID: l.guid, StartingPSN: 5}
}

func (l *lab) mra(m roce.CMMessage, code verbs.AckTimeout) *roce.MRA {
	return &roce.MRA{LocalCommID: l.peer, RemoteCommID: uint32(l.id), Message: m, ServiceTimeout: code}
}

func (l *lab) rej(m roce.CMMessage, reason verbs.RejectReason) *roce.REJ {
	r := &roce.REJ{LocalCommID: l.peer, RemoteCommID: uint32(l.id), Message: m, Reason: reason}
	switch {
	case reason == verbs.RejectTimeout:
		// Whoever times out need not know our ID.
		r.RemoteCommID, r.Info, r.InfoLen = 0, guidBytes(l.guid), 8
	case m == roce.MessageREQ:
		r.LocalCommID = 0
	}
	return r
}

func (l *lab) rtu() *roce.RTU {
	return &roce.RTU{LocalCommID: l.peer, RemoteCommID: uint32(l.id), PrivateData: []byte("rtu")}
}

func (l *lab) dreq(qpn verbs.QPN) *roce.DREQ {
	return &roce.DREQ{LocalCommID: l.peer, RemoteCommID: uint32(l.id), RemoteQPN: qpn}
}

func (l *lab) drep() *roce.DREP {
	return &roce.DREP{LocalCommID: l.peer, RemoteCommID: uint32(l.id)}
}

func (l *lab) lap() *roce.LAP {
	return &roce.LAP{LocalCommID: l.peer, RemoteCommID: uint32(l.id), RemoteQPN: ourQPN}
}

func (l *lab) apr() *roce.APR {
	return &roce.APR{LocalCommID: l.peer, RemoteCommID: uint32(l.id)}
}

// connect is our Connect to the forger; it takes over the transaction ID.
func (l *lab) connect() {
	l.t.Helper()
	id, err := l.Connect(l.now, ReqParams{
		Path: Path{Local: l.to, Remote: netip.AddrPortFrom(l.from.Addr(), 0)}, ServiceID: tcp, Type: verbs.RC, QPN: ourQPN, MTU: verbs.MTU1024,
	})
	l.must(err)
	l.id, l.tid = id, l.conns[id].tid
}

// request is a REQ of the forger's; the connection that it makes is the one under test.
func (l *lab) request() {
	l.t.Helper()
	l.forge(REQ, l.req())
	ev, ok := l.NextEvent()
	if !ok || ev.Type != ReqReceived {
		l.t.Fatalf("no request: %v", ev.Type)
	}
	l.id = ev.Conn
}

func (l *lab) accept() error { return l.Accept(l.now, l.id, RepParams{QPN: ourQPN}) }

func (l *lab) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// said returns the kinds of MADs that the CM has to send, and keeps them in mads.
func (l *lab) said() string {
	var kinds []string
	l.mads = l.mads[:0]
	var out Out
	for l.NextMAD(&out) {
		var h roce.MAD
		h.Decode(out.MAD[:])
		m := Message(h.AttrID - roce.AttrREQ)
		kind := m.String()
		if m == REJ {
			var rej roce.REJ
			rej.Decode(h.Data)
			kind += "(" + rej.Message.String() + "," + itoa(int(rej.Reason)) + ")"
		}
		kinds = append(kinds, kind)
		l.mads = append(l.mads, out)
		if len(kinds) > 1000 {
			l.t.Fatal("it does not stop talking")
		}
	}
	return list(kinds)
}

// happened returns the types of the events that wait.
func (l *lab) happened() string {
	var types []string
	for {
		ev, ok := l.NextEvent()
		if !ok {
			return list(types)
		}
		s := ev.Type.String()
		if ev.Reason != 0 {
			s += "(" + itoa(int(ev.Reason)) + ")"
		}
		types = append(types, s)
	}
}

// dropped returns the reasons for drops so far, each as often as it was counted.
func (l *lab) dropped() string {
	var why []string
	for d := range drops {
		for range min(l.counters.Dropped[d].Load(), 5) {
			why = append(why, d.String())
		}
	}
	return list(why)
}

func list(s []string) string {
	if len(s) == 0 {
		return "-"
	}
	return strings.Join(s, " ")
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + itoa(n%10)
}

// word names an error in one word.
func word(err error) string {
	for _, e := range []struct {
		err  error
		word string
	}{
		{nil, "ok"}, {ErrState, "ErrState"}, {ErrEstablished, "ErrEstablished"}, {ErrUnknownConn, "ErrUnknownConn"},
	} {
		if errors.Is(err, e.err) {
			return e.word
		}
	}
	return "other"
}
