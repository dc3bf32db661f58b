package deferral

import (
	"math/rand/v2"

	"github.com/doorbell-rdma/doorbell/internal/netsim"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// traffic is the network of a stage, as a rule of netsim: it decides about every packet
// when it is sent, and counts what the study is about.
type traffic struct {
	stage *stage
	// luck is for each direction and, within it, for management and for data: so that a
	// strategy which sends other data meets the same REP and RTU.
	luck [2][2]*rand.Rand
	fate *rand.Rand // of RTUs
	// free is when a direction takes its next packet, last when its last one arrives.
	free, last [2]verbs.Instant
}

func (t *traffic) begin(seed uint64) {
	for i := range t.luck {
		for j := range t.luck[i] {
			t.luck[i][j] = rand.New(rand.NewPCG(seed, luckOfPackets+uint64(2*i+j)))
		}
	}
	t.fate = rand.New(rand.NewPCG(seed, luckOfRTUs))
}

// rule is the netsim.Rule.
func (t *traffic) rule(p *netsim.Packet) netsim.Verdict {
	from := 0
	if p.Src == t.stage.b.Addr {
		from = 1
	}
	d, ok := p.Decode()
	if !ok {
		return netsim.Verdict{}
	}
	kind, drop, late := 1, false, false
	if d.DestQP == verbs.QPNGSI {
		kind = 0
		drop, late = t.management(&d)
	} else if !d.Opcode.IsResponse() {
		drop = t.request(from, &d)
	}
	if drop {
		return netsim.Verdict{Drop: true}
	}
	return t.pass(from, kind, late)
}

// pass carries a packet in order behind the others of its direction; a late one drops back.
func (t *traffic) pass(from, kind int, late bool) netsim.Verdict {
	cell, now := t.stage.cell, t.stage.now()
	start := max(now, t.free[from])
	t.free[from] = start.Add(cell.Gap)
	at := max(start.Add(cell.Latency+exponential(t.luck[from][kind], cell.Jitter)), t.last[from])
	t.last[from] = at
	if late {
		at = at.Add(cell.RTUDelay)
	}
	return netsim.Verdict{Delay: at.Sub(now) - cell.Latency}
}

// management decides about a REP or RTU.
func (t *traffic) management(d *roce.Packet) (drop, late bool) {
	s := t.stage
	if len(d.Payload) != roce.MADLen {
		return false, false
	}
	local, remote := commIDs(d.Payload)
	switch roce.AttrID(uint16(d.Payload[16])<<8 | uint16(d.Payload[17])) {
	case roce.AttrREP:
		c := s.byServer[local]
		if c == nil {
			return false, false
		}
		if c.rep && s.cell.LinuxREP && s.now().Sub(c.repAt) < linuxREPTimer {
			return true, false // Linux would not have sent it
		}
		if c.rep {
			s.tally.REPs++
		}
		c.rep, c.repAt = true, s.now()
	case roce.AttrRTU:
		c := s.byServer[remote]
		if c == nil {
			return false, false
		}
		c.rtus++
		lost := t.fate.Float64() < s.cell.RTULossRate
		return lost || c.rtus <= s.cell.RTULost, true
	}
	return false, false
}

// request counts a request packet, and drops what a requester without early retransmission
// would not have sent.
func (t *traffic) request(from int, d *roce.Packet) (drop bool) {
	s := t.stage
	c := s.byQP[1-from][d.DestQP]
	if c == nil {
		return false
	}
	again := c.any[from] && !c.highest[from].Before(d.PSN)
	if again && s.cell.AckOnly && s.now().Sub(c.sentAt[from]) < s.cell.AckTimeout.Duration() {
		return true
	}
	c.sentAt[from] = s.now()
	s.tally.Packets++
	switch {
	case again:
		s.tally.Retransmitted++
	default:
		c.highest[from], c.any[from] = d.PSN, true
	}
	if from == 0 {
		return false
	}
	if c.sent == 0 {
		c.sent = s.now()
	}
	if !c.heard {
		s.tally.Violations++
	}
	return false
}
