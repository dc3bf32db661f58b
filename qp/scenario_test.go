package qp

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var update = flag.Bool("update", false, "rewrite what the scenarios in testdata expect")

// TestScenarios plays the conversations in testdata: commands, a line "----", and what is
// then seen: packets as they leave, completions, events, and moves of the state. Commands:
//
//	pair key=value...                  two connected queue pairs; see scenarioPair
//	recv N id=I len=L [at=OFF]         N posts a receive
//	post N OP id=I len=L [at=OFF] [raddr=OFF] [rkey=K] [imm=X] [inv=K] [swap=] [add=] [FLAG...]
//	deliver [drop=P,...] [dup=P,...] [reverse]   hand over what is on the way, both ways; P is a PSN
//	run                                deliver until nothing moves
//	advance D                          let time pass; timers fire
//	inject N OP psn=P [syn=S] [len=L]  a packet that nobody sent arrives at N
//	state N S                          N is modified to RESET, ERR or SQD (with notification)
//	rts N                              N is modified from RTR or SQD to RTS
//	kill N KEY                         the region of this key is closed
//	show N                             state, counters that are not zero
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			got := playScenario(t, string(b))
			if *update {
				if err := os.WriteFile(f, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(b) {
				t.Errorf("%s differs; with -update it would read:\n%s", f, diffLines(string(b), got))
			}
		})
	}
}

// diffLines shows the first lines that differ.
func diffLines(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := 0; i < len(w) || i < len(g); i++ {
		if i >= len(w) || i >= len(g) || w[i] != g[i] {
			return fmt.Sprintf("line %d\nwant:\n%s\ngot:\n%s", i+1,
				strings.Join(w[min(i, len(w)):min(i+12, len(w))], "\n"), strings.Join(g[min(i, len(g)):min(i+12, len(g))], "\n"))
		}
	}
	return "equal"
}

// playScenario executes the commands of a scenario and returns it with what was seen.
func playScenario(t *testing.T, text string) string {
	s := &scenario{t: t}
	var out strings.Builder
	var block []string
	flush := func() {
		ran := false
		for _, line := range block {
			fmt.Fprintln(&out, line)
			if !strings.HasPrefix(line, "#") {
				s.line = line
				s.do(strings.Fields(line))
				ran = true
			}
		}
		if ran {
			fmt.Fprintln(&out, "----")
			out.WriteString(s.seen.String())
			s.seen.Reset()
		}
		block = nil
	}
	expecting := false
	for _, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		switch {
		case line == "":
			flush()
			fmt.Fprintln(&out)
			expecting = false
		case line == "----":
			flush()
			expecting = true
		case !expecting:
			block = append(block, line)
		}
	}
	flush()
	return out.String()
}

type scenario struct {
	t    *testing.T
	p    *pair
	line string
	seen bytes.Buffer
	// ids of what was posted for sending, to tell whose data arrived; where receives are.
	sends []uint64
	recvs map[uint64]int
	state map[*node]verbs.QPState
}

func (s *scenario) fail(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("%q: %s", s.line, fmt.Sprintf(format, args...))
}

// args are the key=value words of a command; bare words have the value "true".
type args map[string]string

func parseArgs(words []string) args {
	a := args{}
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok {
			v = "true"
		}
		a[k] = v
	}
	return a
}

func (s *scenario) num(a args, key string, def uint64, base int) uint64 {
	v, ok := a[key]
	if !ok {
		return def
	}
	n, err := strconv.ParseUint(v, base, 64)
	if err != nil {
		s.fail("%s: %v", key, err)
	}
	return n
}

func (s *scenario) node(name string) *node {
	switch name {
	case "a":
		return s.p.a
	case "b":
		return s.p.b
	}
	s.fail("no node %q", name)
	return nil
}

func (s *scenario) do(w []string) {
	if w[0] != "pair" && s.p == nil {
		s.fail("no pair yet")
	}
	switch w[0] {
	case "pair":
		s.pair(parseArgs(w[1:]))
	case "recv":
		s.recv(s.node(w[1]), parseArgs(w[2:]))
	case "post":
		s.post(s.node(w[1]), w[2], parseArgs(w[3:]))
	case "deliver":
		s.deliver(parseArgs(w[1:]))
	case "run":
		for len(s.p.a.out)+len(s.p.b.out) > 0 {
			s.deliver(nil)
		}
	case "advance":
		d, err := time.ParseDuration(w[1])
		if err != nil {
			s.fail("%v", err)
		}
		s.advance(d)
	case "inject":
		s.inject(s.node(w[1]), w[2], parseArgs(w[3:]))
	case "state":
		s.modify(s.node(w[1]), w[2])
	case "rts":
		n := s.node(w[1])
		attr := s.p.rtsAttr(n)
		if n.q.State() == verbs.QPSQD {
			attr = &verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTS}
		}
		s.p.modify(n, attr)
	case "kill":
		n := s.node(w[1])
		key := s.num(args{"k": w[2]}, "k", 0, 16)
		if !n.mem.Invalidate(testPD, n.q.Num(), uint32(key)) {
			s.fail("no such key")
		}
	case "show":
		s.show(s.node(w[1]))
	default:
		s.fail("unknown command")
	}
	s.look()
}

func (s *scenario) pair(a args) {
	o := options{
		psnA: verbs.PSN(s.num(a, "psn", 0, 16)), psnB: verbs.PSN(s.num(a, "psnb", 0, 16)),
		retry: uint8(s.num(a, "retry", 7, 10)), rnrRetry: uint8(s.num(a, "rnr", 7, 10)),
		rnrTimer: verbs.RNRTimer(s.num(a, "rnrtimer", 12, 10)), timeout: verbs.AckTimeout(s.num(a, "timeout", 14, 10)),
		rdAtomic: uint8(s.num(a, "rd", 4, 10)), cq: int(s.num(a, "cq", 64, 10)),
		armB: a["arm"] != "",
	}
	o.neverTimeout, o.noRdAtomic = o.timeout == 0, o.rdAtomic == 0
	o.destDepth = uint8(s.num(a, "dest", 0, 10))
	o.cap.MaxSendWR = int(s.num(a, "depth", 0, 10))
	o.window.PSNs = int(s.num(a, "psns", 0, 10))
	o.window.Initial = int(s.num(a, "window", 0, 10))
	o.window.Max = int(s.num(a, "window", 0, 10))
	o.window.Reads = int(s.num(a, "reads", 0, 10))
	o.mtu, _ = verbs.MTUForBytes(int(s.num(a, "mtu", 1024, 10)))
	o.noAccess = a["access"] == "none"
	o.noRemoteAccess = a["region"] == "none"
	o.ownPDForRemote = a["region"] == "otherpd"
	switch a["b"] {
	case "rtr":
		o.stateB = verbs.QPRTR
	case "init":
		o.stateB = verbs.QPInit
	}
	s.p = newPair(s.t, o)
	s.p.sent = s.packet
	s.recvs = map[uint64]int{}
	s.sends = nil
	s.state = map[*node]verbs.QPState{s.p.a: s.p.a.q.State(), s.p.b: s.p.b.q.State()}
}

func (s *scenario) recv(n *node, a args) {
	id := s.num(a, "id", 0, 10)
	off := int(s.num(a, "at", id*4096, 10))
	s.recvs[id] = off
	size := int(s.num(a, "len", 4096, 10))
	wr := verbs.RecvWR{WRID: id, SGList: []verbs.SGE{{Addr: recvBase + uint64(off), Length: uint32(size), LKey: recvKey}}}
	if a["badkey"] != "" {
		wr.SGList[0].LKey++
	}
	if _, _, err := n.q.PostRecv([]verbs.RecvWR{wr}); err != nil {
		fmt.Fprintf(&s.seen, "%s error: %v\n", n.name, err)
	}
	s.p.pump(n)
}

var scenarioOps = map[string]verbs.Opcode{
	"send": verbs.Send, "sendimm": verbs.SendWithImm, "sendinv": verbs.SendWithInv, "write": verbs.RDMAWrite,
	"writeimm": verbs.RDMAWriteWithImm, "read": verbs.RDMARead, "cas": verbs.AtomicCmpAndSwp,
	"fadd": verbs.AtomicFetchAdd, "localinv": verbs.LocalInv, "bindmw": verbs.BindMW,
}

func (s *scenario) post(n *node, op string, a args) {
	code, ok := scenarioOps[op]
	if !ok {
		s.fail("no operation %q", op)
	}
	id := s.num(a, "id", 0, 10)
	def := uint64(64)
	if code == verbs.AtomicCmpAndSwp || code == verbs.AtomicFetchAdd {
		def = 8
	}
	size := int(s.num(a, "len", def, 10))
	off := int(s.num(a, "at", id*4096, 10))
	wr := sendWR(code, id, off, size)
	switch {
	case code == verbs.LocalInv || code == verbs.BindMW:
		wr.SGList = nil
	case !isRead(code):
		fill(n.send.buf[off:][:size], id)
		s.sends = append(s.sends, id)
	default:
		s.recvs[id] = off
	}
	wr.RemoteAddr = remoteBase + s.num(a, "raddr", 0, 10)
	wr.RKey = uint32(s.num(a, "rkey", remoteKey, 16))
	wr.ImmData = uint32(s.num(a, "imm", 0, 16))
	wr.InvalidateRKey = uint32(s.num(a, "inv", windowKey, 16))
	wr.CompareAdd = s.num(a, "add", s.num(a, "cmp", 0, 10), 10)
	wr.Swap = s.num(a, "swap", 0, 10)
	if a["badkey"] != "" {
		wr.SGList[0].LKey++
	}
	for flag, bit := range map[string]verbs.SendFlags{"fence": verbs.Fence, "solicited": verbs.Solicited, "inline": verbs.Inline} {
		if a[flag] != "" {
			wr.Flags |= bit
		}
	}
	if a["unsignaled"] != "" {
		wr.Flags &^= verbs.Signaled
	}
	if _, _, err := n.q.PostSend([]verbs.SendWR{wr}); err != nil {
		fmt.Fprintf(&s.seen, "%s error: %v\n", n.name, err)
	}
	s.p.pump(n)
}

// deliver hands over what is on the way in both directions, then lets both answer.
func (s *scenario) deliver(a args) {
	psns := func(key string) map[verbs.PSN]bool {
		m := map[verbs.PSN]bool{}
		for _, f := range strings.Split(a[key], ",") {
			if f != "" && f != "all" {
				m[verbs.PSN(s.num(args{"p": f}, "p", 0, 16))] = true
			}
		}
		return m
	}
	drop, dup := psns("drop"), psns("dup")
	x, y := s.p.a.take(), s.p.b.take()
	for _, dir := range []struct {
		to *node
		ps [][]byte
	}{{s.p.b, x}, {s.p.a, y}} {
		var arrive [][]byte
		for _, b := range dir.ps {
			var p roce.Packet
			if err := p.Decode(b); err != nil {
				s.fail("%v", err)
			}
			if drop[p.PSN] || a["drop"] == "all" {
				continue
			}
			arrive = append(arrive, b)
			if dup[p.PSN] {
				arrive = append(arrive, b)
			}
		}
		if a["reverse"] != "" {
			for i, j := 0, len(arrive)-1; i < j; i, j = i+1, j-1 {
				arrive[i], arrive[j] = arrive[j], arrive[i]
			}
		}
		s.p.deliver(dir.to, arrive...)
	}
	s.p.pump(s.p.a)
	s.p.pump(s.p.b)
}

// advance says when a timer made something happen.
func (s *scenario) advance(d time.Duration) {
	end := s.p.now.Add(d)
	for {
		at := min(s.p.a.q.Deadline(), s.p.b.q.Deadline())
		if at > end {
			s.p.now = end
			return
		}
		fmt.Fprintf(&s.seen, "(%v later)\n", max(at.Sub(s.p.now), 0))
		s.p.advance(max(at.Sub(s.p.now), 0))
		s.look()
	}
}

func (s *scenario) inject(n *node, op string, a args) {
	p := roce.Packet{BTH: roce.BTH{PKey: roce.DefaultPKey, DestQP: n.q.Num(), PSN: verbs.PSN(s.num(a, "psn", 0, 16)), AckReq: true}}
	for o := range roce.Opcode(32) {
		if strings.TrimPrefix(o.String(), "RC_") == op {
			p.Opcode = o
		}
	}
	if v, ok := a["op"]; ok {
		p.Opcode = roce.Opcode(s.num(args{"o": v}, "o", 0, 16))
	}
	p.AETH.Syndrome = uint8(s.num(a, "syn", uint64(roce.AckNoCredit), 16))
	p.RETH = roce.RETH{VA: remoteBase + s.num(a, "raddr", 0, 10), RKey: uint32(s.num(a, "rkey", remoteKey, 16)), DMALen: uint32(s.num(a, "dma", 0, 10))}
	p.Atomic = roce.AtomicETH{VA: p.RETH.VA, RKey: p.RETH.RKey, SwapAdd: 1}
	p.Payload = make([]byte, s.num(a, "len", 0, 10))
	p.Pad = uint8(s.num(a, "pad", uint64(roce.PadCount(len(p.Payload))), 10))
	n.q.HandlePacket(s.p.now, &p)
	s.p.check(n)
	s.p.pump(n)
}

func (s *scenario) modify(n *node, name string) {
	for st := range verbs.QPState(verbs.QPStates) {
		if st.String() != name {
			continue
		}
		a := &verbs.QPAttr{Mask: verbs.AttrState, State: st}
		if st == verbs.QPSQD {
			a.Mask |= verbs.AttrEnSQDAsyncNotify
			a.EnSQDAsyncNotify = true
		}
		s.p.modify(n, a)
		return
	}
	s.fail("no state %q", name)
}

// look pumps both ends and tells what came of it.
func (s *scenario) look() {
	if s.p == nil {
		return
	}
	for _, n := range []*node{s.p.a, s.p.b} {
		s.p.pump(n)
		n.events.Each(func(e verbs.EventType) { fmt.Fprintf(&s.seen, "%s event %v\n", n.name, e) })
		n.events = 0
		if st := n.q.State(); st != s.state[n] {
			fmt.Fprintf(&s.seen, "%s is %v\n", n.name, st)
			s.state[n] = st
		}
		for _, wc := range n.wcs {
			s.completion(n, wc)
		}
		n.wcs = nil
	}
}

func (s *scenario) completion(n *node, wc verbs.WC) {
	if wc.Status != verbs.WCSuccess {
		fmt.Fprintf(&s.seen, "%s wc id=%d %s\n", n.name, wc.WRID, wc.Status.String())
		return
	}
	fmt.Fprintf(&s.seen, "%s wc id=%d %v", n.name, wc.WRID, wc.Opcode)
	if wc.Opcode.IsRecv() || wc.ByteLen != 0 {
		fmt.Fprintf(&s.seen, " len=%d", wc.ByteLen)
	}
	off := s.recvs[wc.WRID]
	switch wc.Opcode {
	case verbs.WCRecv:
		from := "?"
		for _, id := range s.sends {
			if matches(n.recv.buf[off:][:wc.ByteLen], id) {
				from = fmt.Sprint(id)
				break
			}
		}
		fmt.Fprintf(&s.seen, " data=%s", from)
	case verbs.WCCompSwap, verbs.WCFetchAdd:
		fmt.Fprintf(&s.seen, " was=%d", hostUint64(n.recv.buf[off:]))
	}
	if wc.Flags&verbs.WithImm != 0 {
		fmt.Fprintf(&s.seen, " imm=%x", wc.ImmData)
	}
	if wc.Flags&verbs.WithInv != 0 {
		fmt.Fprintf(&s.seen, " inv=%x", wc.InvalidatedRKey)
	}
	if wc.Flags&verbs.WithSolicited != 0 {
		s.seen.WriteString(" solicited")
	}
	s.seen.WriteByte('\n')
}

// packet prints a packet as it leaves.
func (s *scenario) packet(n *node, p *roce.Packet) {
	w := &s.seen
	fmt.Fprintf(w, "%s→%s ", n.name, n.peer.name)
	switch syn := p.AETH.Syndrome; {
	case p.Opcode != roce.RCAck:
		w.WriteString(strings.TrimPrefix(p.Opcode.String(), "RC_"))
	case roce.IsAck(syn):
		w.WriteString("ACK")
	case roce.IsRNR(syn):
		fmt.Fprintf(w, "RNR_NAK timer=%d", roce.RNRTimerOf(syn))
	default:
		fmt.Fprintf(w, "NAK %s", map[uint8]string{
			roce.NakPSNSeq: "seqerr", roce.NakInvReq: "invreq", roce.NakRemAccess: "access", roce.NakRemOp: "remop",
		}[syn])
	}
	fmt.Fprintf(w, " psn=%v", p.PSN)
	if p.Opcode.HasPayload() {
		fmt.Fprintf(w, " len=%d", len(p.Payload))
	}
	if p.Opcode.HasRETH() {
		fmt.Fprintf(w, " va=+%d dma=%d", p.RETH.VA-remoteBase, p.RETH.DMALen)
	}
	if p.Opcode.HasAETH() {
		fmt.Fprintf(w, " msn=%d", p.AETH.MSN)
	}
	if p.Opcode.HasAtomicAck() {
		fmt.Fprintf(w, " was=%d", p.AtomicAck)
	}
	if p.Opcode.HasImm() {
		fmt.Fprintf(w, " imm=%x", p.Imm)
	}
	if p.Opcode.HasIETH() {
		fmt.Fprintf(w, " inv=%x", p.InvRKey)
	}
	if p.Solicited {
		w.WriteString(" solicited")
	}
	if p.AckReq {
		w.WriteString(" ackreq")
	}
	w.WriteByte('\n')
	if !p.MigReq || p.PKey != roce.DefaultPKey || p.DestQP != n.peer.q.Num() {
		s.fail("bad header %+v", p.BTH)
	}
}

func (s *scenario) show(n *node) {
	c := &n.env.Counters
	fmt.Fprintf(&s.seen, "%s %v", n.name, n.q.State())
	for _, f := range []struct {
		name string
		v    uint64
	}{
		{"retransmits", c.Retransmits.Load()}, {"timeouts", c.Timeouts.Load()}, {"early", c.EarlyRetransmits.Load()},
		{"acks", c.AcksSent.Load()}, {"naks", c.NaksSent.Load()}, {"rnrnaks", c.RNRNaksSent.Load()},
		{"naksin", c.NaksReceived.Load()}, {"rnrin", c.RNRNaksReceived.Load()}, {"dups", c.Duplicates.Load()},
		{"outoforder", c.OutOfOrder.Load()}, {"dropstate", c.DroppedState.Load()}, {"dropother", c.DroppedOther.Load()},
		{"deferred", c.Deferred.Load()}, {"publications", c.Publications.Load()}, {"commest", c.CommEst.Load()},
		{"overruns", c.CQOverruns.Load()}, {"flushed", c.Flushed.Load()}, {"blocked", c.WindowBlocked.Load()},
	} {
		if f.v != 0 {
			fmt.Fprintf(&s.seen, " %s=%d", f.name, f.v)
		}
	}
	fmt.Fprintln(&s.seen)
}
