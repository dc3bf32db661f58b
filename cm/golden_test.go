package cm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gopacket/gopacket/pcapgo"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// The captures show two Linux hosts with rdma_rxe. Here our CM takes the place of one of
// them: it is fed what the other one sent, told what the program did, and must send, byte
// for byte, what Linux sent. Where we differ on purpose is listed at same.

const captureDir = "../roce/testdata/captures"

// captured is a MAD in a capture.
type captured struct {
	at       time.Duration
	src, dst netip.AddrPort
	msg      Message
	mad      []byte
}

// readCapture returns the CM MADs of a capture.
func readCapture(t *testing.T, name string) (all []captured) {
	t.Helper()
	f, err := os.Open(filepath.Join(captureDir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var first time.Time
	for {
		frame, ci, err := r.ReadPacketData()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		ip := frame[14:]
		var src, dst netip.Addr
		switch ip[0] >> 4 {
		case 4:
			src, dst = netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
			ip = ip[20:]
		case 6:
			src, dst = netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
			ip = ip[40:]
		}
		bth := ip[8:]
		if bth[0] != 0x64 || !bytes.Equal(bth[5:8], []byte{0, 0, 1}) {
			continue
		}
		if first.IsZero() {
			first = ci.Timestamp
		}
		mad := bth[20 : 20+roce.MADLen]
		all = append(all, captured{
			at:  ci.Timestamp.Sub(first),
			src: netip.AddrPortFrom(src, binary.BigEndian.Uint16(ip)), dst: netip.AddrPortFrom(dst, binary.BigEndian.Uint16(ip[2:])),
			msg: Message(binary.BigEndian.Uint16(mad[16:]) - uint16(roce.AttrREQ)), mad: mad,
		})
	}
}

// ids returns the communication IDs of the sender and the receiver of a MAD.
func (m *captured) ids() (local, remote uint32) {
	return binary.BigEndian.Uint32(m.mad[24:]), binary.BigEndian.Uint32(m.mad[28:])
}

func (m *captured) tid() uint64 { return binary.BigEndian.Uint64(m.mad[8:]) }

// replay lets our CM be one of the hosts of a capture.
type replay struct {
	*CM
	t      *testing.T
	all    []captured
	us     netip.Addr
	active bool
	now    verbs.Instant
	rand   []uint32 // what Config.Rand returns next
	events map[ConnID]EventType
	sent   int
}

// same fails unless the next thing we say is what Linux said, except that the transaction
// ID of a passive side's DREQ is its own choice, and that an MRA of ours asks for less time.
func (r *replay) same(want *captured) {
	r.t.Helper()
	var out Out
	if !r.NextMAD(&out) {
		r.t.Fatalf("at %v nothing to send, want %v", want.at, want.msg)
	}
	r.sent++
	w := bytes.Clone(want.mad)
	switch {
	case want.msg == DREQ && !r.active:
		copy(w[8:16], out.MAD[8:16])
		if tid := binary.BigEndian.Uint64(out.MAD[8:]); tid>>32 != tidMagic<<16|4791 {
			r.t.Errorf("transaction ID %x", tid)
		}
	case want.msg == MRA:
		w[24+9] = uint8(mraServiceTime) << 3
	}
	if !bytes.Equal(out.MAD[:], w) {
		r.t.Fatalf("at %v we send\n%s, Linux\n%s", want.at, hex.Dump(out.MAD[:]), hex.Dump(w))
	}
	if out.Remote != netip.AddrPortFrom(want.dst.Addr(), 4791) || out.Local != want.src.Addr() {
		r.t.Errorf("sent from %v to %v, want %v to %v", out.Local, out.Remote, want.src, want.dst)
	}
}

// arrived reports whether the MAD i got to our place: captures on the sender's
// side show also those that the network lost, betrayed by what followed.
func (r *replay) arrived(i int) bool {
	local, _ := r.all[i].ids()
	for _, m := range r.all[i+1:] {
		if _, remote := m.ids(); remote != local || m.src.Addr() != r.us {
			continue
		}
		switch {
		case r.all[i].msg == RTU && (m.msg == REP || m.msg == REJ):
			return false
		case r.all[i].msg == DREQ && m.msg == DREP:
			return true
		}
	}
	return r.all[i].msg != DREQ
}

func (r *replay) drain() {
	for {
		ev, ok := r.NextEvent()
		if !ok {
			return
		}
		r.events[ev.Conn] = ev.Type
	}
}

// say makes our CM say the captured MAD: by calling it as the program did, or, when it is a repetition, by
// letting its timer expire.
func (r *replay) say(m *captured) {
	r.t.Helper()
	local, remote := m.ids()
	id := ConnID(local)
	body := m.mad[roce.MADHeaderLen:]
	var err error
	switch state := r.State(id); m.msg {
	case REQ:
		if state == ReqSent {
			r.HandleTimeout(r.conns[id].next)
			break
		}
		var req roce.REQ
		var ip roce.IPCMHeader
		req.Decode(body)
		ip.Decode(req.PrivateData)
		r.rand = []uint32{local, 0}
		_, err = r.Connect(r.now, ReqParams{
			Path:      Path{Local: m.src.Addr(), Remote: netip.AddrPortFrom(m.dst.Addr(), 0)},
			ServiceID: req.ServiceID, SrcPort: ip.SrcPort, Type: verbs.RC, QPN: req.LocalQPN, StartPSN: req.StartingPSN,
			MTU: req.PathMTU, ResponderResources: req.ResponderResources, InitiatorDepth: req.InitiatorDepth,
			RetryCnt: req.RetryCount, RNRRetry: req.RNRRetryCount, SRQ: req.SRQ, PrivateData: req.PrivateData[roce.IPCMHeaderLen:],
		})
		// The transaction ID is ours to choose; continue with that of the capture.
		cn := r.conns[id]
		if cn.tid>>32 != tidMagic<<16|4791 {
			r.t.Errorf("transaction ID %x", cn.tid)
		}
		cn.tid = m.tid()
		binary.BigEndian.PutUint64(cn.mad[8:], cn.tid)
	case REP:
		if state == RepSent {
			r.HandleTimeout(r.conns[id].next)
			break
		}
		var rep roce.REP
		rep.Decode(body)
		err = r.Accept(r.now, id, RepParams{
			QPN: rep.LocalQPN, StartPSN: rep.StartingPSN, ResponderResources: rep.ResponderResources,
			InitiatorDepth: rep.InitiatorDepth, RNRRetry: rep.RNRRetryCount, SRQ: rep.SRQ, PrivateData: rep.PrivateData,
		})
	case RTU:
		if state == RepRcvd {
			err = r.Ready(r.now, id, body[8:])
		}
	case REJ:
		if state == RepSent {
			err = r.Reject(r.now, id, verbs.RejectConsumer, nil)
		}
	case DREQ:
		if state == DreqSent {
			r.HandleTimeout(r.conns[id].next)
			break
		}
		err = r.Disconnect(r.now, id, body[12:])
	case MRA, DREP:
	default:
		r.t.Fatalf("%v in the capture", m.msg)
	}
	if err != nil {
		r.t.Fatalf("at %v: %v: %v (remote ID %08x)", m.at, m.msg, err, remote)
	}
	r.same(m)
}

// run replays a capture.
func (r *replay) run() {
	r.t.Helper()
	for i := range r.all[1:] {
		// DREQs that crossed on the way: the capture is the active side's.
		if m, n := &r.all[i], &r.all[i+1]; !r.active && m.msg == DREQ && n.msg == DREQ && m.src != n.src {
			*m, *n = *n, *m
		}
	}
	for i := range r.all {
		m := &r.all[i]
		r.now = verbs.Instant(m.at)
		if m.msg > DREP {
			continue // SIDR
		}
		if m.src.Addr() == r.us {
			r.say(m)
			continue
		}
		if !r.active && !r.arrived(i) {
			continue
		}
		if m.msg == REQ {
			// The next ID is to be the one that Linux chose.
			local, _ := m.ids()
			for _, later := range r.all[i:] {
				if l, remote := later.ids(); later.msg == REP && remote == local {
					r.rand = []uint32{l}
				}
			}
		}
		r.HandleMAD(r.now, m.src, m.dst.Addr(), m.mad)
		r.drain()
		r.check()
	}
	var out Out
	if r.NextMAD(&out) {
		r.t.Errorf("we say more than Linux: %s", hex.Dump(out.MAD[:]))
	}
}

func TestLinuxConversations(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(captureDir, "*.pcap"))
	if err != nil || len(files) == 0 {
		t.Fatal("no captures", err)
	}
	replayed := 0
	for _, file := range files {
		name := filepath.Base(file)
		all := readCapture(t, name)
		if len(all) == 0 || all[0].msg != REQ || name == "userspace_probe.pcap" {
			continue // no CM, SIDR, and REQs that nobody answered
		}
		for _, active := range []bool{true, false} {
			us, role := all[0].dst.Addr(), "passive"
			if active {
				us, role = all[0].src.Addr(), "active"
			}
			// minipeer and minipassive are programs that fill in fields otherwise than Linux does.
			if name[:4] == "mini" && (name[4:6] == "pe") == active {
				continue
			}
			t.Run(name+"/"+role, func(t *testing.T) {
				r := &replay{t: t, all: all, us: us, active: active, events: make(map[ConnID]EventType)}
				var guid uint64
				services := make(map[roce.SID]bool)
				for _, m := range all {
					var req roce.REQ
					var rep roce.REP
					if req.Decode(m.mad[24:]); m.msg == REQ {
						services[req.ServiceID] = true
						if active {
							guid = req.LocalCAGUID
						}
					}
					if rep.Decode(m.mad[24:]); m.msg == REP && !active {
						guid = rep.LocalCAGUID
					}
				}
				hour := time.Hour
				r.CM = New(Config{
					GUID: guid, Ours: func(a netip.Addr) bool { return a == us },
					RetryInitial: hour, ConnectTimeout: 99 * hour, AcceptTimeout: 99 * hour, DisconnectTimeout: 99 * hour,
					RetryMax: time.Second, TimeWait: 99 * hour,
					Rand: func() uint32 {
						if len(r.rand) == 0 {
							return 0x5eed
						}
						n := r.rand[0]
						r.rand = r.rand[1:]
						return n
					},
				})
				r.cfg.RetryMax = time.Second // when an MRA is due; RetryInitial is out of the way
				for s := range services {
					if all[len(all)-1].msg != REJ || len(all) > 2 {
						r.Listen(s)
					}
				}
				r.run()
				replayed += r.sent
				want := map[string]EventType{
					"cm_reject_v4.pcap/active": Rejected, "rping_v4.pcap/active": Disconnected, "rping_v6.pcap/passive": Disconnected,
					"rtu_lost_all_v4.pcap/active": Disconnected, "rtu_lost_first_v4.pcap/passive": Disconnected,
				}[name+"/"+role]
				for _, got := range r.events {
					if want != 0 && got != want {
						t.Errorf("last event %v, want %v", got, want)
					}
				}
				if want != 0 && len(r.events) == 0 {
					t.Error("no event")
				}
			})
		}
	}
	if replayed < 150 {
		t.Errorf("only %d MADs of ours were compared", replayed)
	}
	t.Logf("%d MADs equal those of Linux", replayed)
}
