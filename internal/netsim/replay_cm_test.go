package netsim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// conversation is a replay's connection management: our wire dials where the host it plays
// sent a REQ, accepts where it sent a REP and disconnects where it sent a DREQ; everything
// else it does by itself. Its IDs and start PSNs are drawn as the capture has them. Only the
// transaction IDs are its own, as they carry our mark, so those of the peer's answers are
// rewritten.
type conversation struct {
	*replay
	all      []mad
	tids     map[uint64]uint64 // ours by the capture's
	requests map[uint32]*wire.Conn
	conns    map[verbs.QPN]*wire.Conn
	said     []mad // by us
	events   map[*wire.Conn][]verbs.EventType
}

// mad is a management datagram, decoded.
type mad struct {
	*frame
	roce.MAD
	req           roce.REQ
	rep           roce.REP
	local, remote uint32 // communication IDs
}

func decodeMAD(t testing.TB, f *frame) (m mad) {
	m.frame = f
	err := m.MAD.Decode(f.p.Payload)
	if err == nil {
		m.local, m.remote = binary.BigEndian.Uint32(m.Data), binary.BigEndian.Uint32(m.Data[4:])
		switch m.AttrID {
		case roce.AttrREQ:
			m.remote, err = 0, m.req.Decode(m.Data)
		case roce.AttrREP:
			err = m.rep.Decode(m.Data)
		}
	}
	if err != nil {
		t.Fatalf("%v: %v", f, err)
	}
	return m
}

// arrived reports whether the i-th datagram got to us; those of a host that repeats itself
// after our answer did not, nor did the answer to what its host repeats.
func (c *conversation) arrived(i int) bool {
	m := &c.all[i]
	for j := range c.all[i+1:] {
		n := &c.all[i+1+j]
		if m.AttrID == roce.AttrRTU && n.AttrID == roce.AttrREP && n.remote == m.local {
			return false
		}
	}
	return true
}

// handle is what a datagram of the capture stands for.
func (c *conversation) handle(f *frame) {
	i := slices.IndexFunc(c.all, func(m mad) bool { return m.frame == f })
	m := &c.all[i]
	if f.src.Addr() == c.us {
		c.say(m)
	} else if c.arrived(i) {
		c.hear(m)
	}
	c.settle()
}

// crossed puts DREQs that crossed on the way, as host A saw them, into the order in which host
// B did.
func (c *conversation) crossed(frames []*frame) {
	for i := range c.all[1:] {
		a, b := c.all[i], c.all[i+1]
		if a.AttrID == roce.AttrDREQ && b.AttrID == roce.AttrDREQ && b.src.Addr() == c.us && a.remote == b.local {
			c.all[i], c.all[i+1] = b, a
			j, k := slices.Index(frames, a.frame), slices.Index(frames, b.frame)
			frames[j], frames[k] = b.frame, a.frame
		}
	}
}

// say does what our host's program did.
func (c *conversation) say(m *mad) {
	now := c.now
	switch m.AttrID {
	case roce.AttrREQ:
		s := c.side(m.req.LocalQPN)
		if s == nil || c.conns[s.num] != nil {
			return // a repetition
		}
		var ip roce.IPCMHeader
		c.must(ip.Decode(m.req.PrivateData))
		c.draws = []uint32{uint32(m.req.StartingPSN), m.local}
		var err error
		c.conns[s.num], err = c.wire.Dial(now, s.q, wire.DialParam{
			Path:    cm.Path{Local: c.us, Remote: netip.AddrPortFrom(m.dst.Addr(), roce.Port)},
			Service: m.req.ServiceID, SrcPort: ip.SrcPort, ConnParam: c.params(&m.req, s, m.req.PrivateData[roce.IPCMHeaderLen:]),
		})
		c.must(err)
	case roce.AttrREP:
		s := c.side(m.rep.LocalQPN)
		if c.conns[s.num] != nil {
			return
		}
		conn := c.requests[m.remote]
		if conn == nil {
			c.t.Fatalf("%v: no REQ has arrived", m.frame)
		}
		j := slices.IndexFunc(c.all, func(n mad) bool { return n.AttrID == roce.AttrREQ && n.local == m.remote })
		p := c.params(&c.all[j].req, s, m.rep.PrivateData)
		p.ResponderResources, p.InitiatorDepth, p.RNRRetry = m.rep.ResponderResources, m.rep.InitiatorDepth, m.rep.RNRRetryCount
		c.draws = []uint32{uint32(m.rep.StartingPSN)}
		c.must(c.wire.Accept(now, conn, s.q, p))
		c.conns[s.num] = conn
	case roce.AttrDREQ:
		for _, conn := range c.conns {
			if uint32(conn.ID()) == m.local && !slices.Contains(c.events[conn], verbs.EventDisconnected) {
				n := len(c.said)
				if err := c.wire.Disconnect(now, conn, nil); err != nil {
					return // ours has answered the peer's, or this one repeats another
				}
				c.settle()
				if len(c.said) > n {
					c.tids[m.TID] = c.said[n].TID
				}
			}
		}
	}
}

// hear feeds a datagram of the peer's.
func (c *conversation) hear(m *mad) {
	if m.AttrID == roce.AttrREQ {
		for _, n := range c.all {
			if n.AttrID == roce.AttrREP && n.remote == m.local {
				c.draws = []uint32{n.local} // the connection's next ID
				break
			}
		}
	}
	f := *m.frame
	if tid, ok := c.tids[m.TID]; ok {
		b := bytes.Clone(f.raw[:len(f.raw)-roce.ICRCLen])
		binary.BigEndian.PutUint64(b[len(b)-roce.MADLen+8:], tid)
		path := roce.NewPath(f.src, f.dst)
		f.raw = binary.LittleEndian.AppendUint32(b, path.ICRC(b, uint16(f.n)))
	}
	c.inbox = append(c.inbox, &f)
	c.fed++
}

func (c *conversation) params(q *roce.REQ, s *side, private []byte) wire.ConnParam {
	return wire.ConnParam{
		PrivateData: private, ResponderResources: q.ResponderResources, InitiatorDepth: q.InitiatorDepth,
		RetryCnt: q.RetryCount, RNRRetry: q.RNRRetryCount, Timeout: q.Primary.AckTimeout, MinRNRTimer: s.minRNR,
		MTU: q.PathMTU, Access: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic, NoExtension: true,
	}
}

func (c *conversation) side(num verbs.QPN) *side {
	for _, s := range c.qps {
		if s.num == num {
			return s
		}
	}
	return nil
}

// heard files a datagram of ours.
func (c *conversation) heard(s *sent) {
	m := decodeMAD(c.t, &frame{p: s.p})
	for _, n := range c.all {
		if m.AttrID == roce.AttrREQ && n.AttrID == roce.AttrREQ && m.local == n.local {
			c.tids[n.TID] = m.TID
		}
	}
	c.said = append(c.said, m)
}

// Upcalls of the wire.
func (c *conversation) ConnRequest(conn *wire.Conn, req *cm.Event) {
	for _, m := range c.all {
		if m.AttrID == roce.AttrREQ && m.req.LocalQPN == conn.Req.QPN {
			c.requests[m.local] = conn
		}
	}
}

func (c *conversation) ConnEvent(conn *wire.Conn, t verbs.EventType, _ []byte) {
	c.events[conn] = append(c.events[conn], t)
}

// check compares what our connection manager said with what Linux's said, repetitions
// aside, which are a matter of timers.
func (c *conversation) check(x *row) {
	brief := func(all []mad) (lines []string) {
		for _, m := range all {
			line := fmt.Sprintf("%v %08x %08x", m.AttrID, m.local, m.remote)
			switch m.AttrID {
			case roce.AttrREQ:
				r := &m.req
				line += fmt.Sprintf(" %v %v %v %d %d %x", r.LocalQPN, r.StartingPSN, r.PathMTU, r.ResponderResources, r.InitiatorDepth, r.PrivateData)
			case roce.AttrREP:
				r := &m.rep
				// Not the READ depths: ours never promises more than the peer asked for.
				line += fmt.Sprintf(" %v %v %x", r.LocalQPN, r.StartingPSN, r.PrivateData)
			case roce.AttrMRA:
				continue // ours come and go with the timers
			case roce.AttrDREQ, roce.AttrDREP:
				if c.failed() {
					continue // our wire hangs up when its queue pair fails, Linux leaves that to programs
				}
			}
			if !slices.Contains(lines, line) {
				lines = append(lines, line)
			}
		}
		return lines
	}
	linux := slices.DeleteFunc(slices.Clone(c.all), func(m mad) bool { return m.src.Addr() != c.us })
	got, want := brief(c.said), brief(linux)
	if !slices.Equal(got, want) {
		c.t.Errorf("we say\n%s\nLinux\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	x.answers += len(got)
	for num, conn := range c.conns {
		ev := c.events[conn]
		if n := len(slices.DeleteFunc(slices.Clone(ev), func(t verbs.EventType) bool { return t != verbs.EventEstablished })); n != 1 {
			c.t.Errorf("%v: established %d times: %v", num, n, ev)
		}
	}
}

// failed reports whether a queue pair of ours failed, by its peer's fault or its own.
func (c *conversation) failed() bool {
	return slices.ContainsFunc(c.qps, func(s *side) bool {
		return slices.ContainsFunc(s.recvs, func(m *message) bool { return s.refused(m) != 0 }) ||
			slices.ContainsFunc(s.outcomes(), func(st verbs.WCStatus) bool { return st != verbs.WCSuccess })
	})
}

// TestReplayConversations replays captures from REQ to DREP: nothing is set up by hand.
func TestReplayConversations(t *testing.T) {
	var table strings.Builder
	table.WriteString(rowHead)
	skip := map[string]string{
		"cm_slow_accept_v4/active": "Linux asks for patience only when a REQ is repeated, seconds later; ours repeats, and gives up, earlier",
	}
	for _, name := range []string{
		"rping_v4", "rping_v6", "rtu_lost_first_v4", "rep_lost_first_v4", "minipeer_udp_v4", "minipeer_udp_v6",
		"minipassive_udp_v4", "minipassive_udp_v6", "ops_imm_zero_solicited_v4", "ucmatose_v4", "cm_slow_accept_v4",
		"atomic_cas_cm_v4", "read_bw_5000_cm_v4", "send_bw_32768_cm_v4", "write_bw_32768_cm_v4",
		"nak_write_badkey_v4", "nak_send_too_long_v4", "rnr_exceeded_retry2_v4",
	} {
		frames := readFrames(t, name)
		for i, role := range []string{"active", "passive"} {
			t.Run(name+"/"+role, func(t *testing.T) {
				if why := skip[name+"/"+role]; why != "" {
					t.Skip(why)
				}
				frames := slices.Clone(frames)
				us := []netip.Addr{frames[0].src.Addr(), frames[0].dst.Addr()}[i]
				r := newReplay(t, us, discover(t, frames), nil, true)
				r.lossless = true
				c := r.cm
				for _, f := range frames {
					if isCM(f) {
						c.all = append(c.all, decodeMAD(t, f))
					}
				}
				c.crossed(frames)
				services := map[roce.SID]bool{}
				for _, m := range c.all {
					if m.AttrID == roce.AttrREQ && !services[m.req.ServiceID] {
						services[m.req.ServiceID] = true
						r.must(r.wire.Listen(m.req.ServiceID))
					}
				}
				r.play(frames)
				var x row
				r.check(&x)
				c.check(&x)
				table.WriteString(x.line(name, role))
				if name == "rtu_lost_first_v4" && i == 1 {
					if n := r.wire.QPCounters().CommEst.Load(); n != 1 {
						t.Errorf("COMM_EST %d times, want once: the RTU was lost", n)
					}
				}
			})
		}
	}
	t.Logf("\n%s", table.String())
}
