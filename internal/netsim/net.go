// Package netsim is a network without sockets and without waiting: nodes that each run one
// internal/wire, the very code that ships, joined by a virtual network with a virtual clock.
// A seed decides everything, so a failure can be run again.
//
//	net := netsim.New(seed)
//	net.Faults = netsim.Faults{Drop: 0.01, Duplicate: 0.01, Reorder: 0.01}
//	a, b := net.Node("10.0.0.1"), net.Node("10.0.0.2")
//	... create queue pairs, post, and
//	net.Run(time.Second, func() bool { return done })
//
// Nothing in it is safe for concurrent use; a test that wants races runs posters of its own
// against a wire.
package netsim

import (
	"container/heap"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Packet is a datagram on its way.
type Packet struct {
	Src, Dst netip.AddrPort
	// ID is the IPv4 Identification it was sent with.
	ID      uint16
	Payload []byte
	// Nth counts the packets of the network, from 1.
	Nth int
	// Damaged says that the ICRC no longer holds.
	Damaged bool
}

// Decode reads the packet; false when it is not RoCEv2.
func (p *Packet) Decode() (roce.Packet, bool) {
	var d roce.Packet
	err := d.Decode(p.Payload)
	return d, err == nil
}

// CM returns the attribute ID of the management datagram in the packet, 0 for other packets.
func (p *Packet) CM() uint16 {
	d, ok := p.Decode()
	if !ok || d.DestQP != verbs.QPNGSI || len(d.Payload) != roce.MADLen {
		return 0
	}
	return uint16(d.Payload[16])<<8 | uint16(d.Payload[17])
}

// Verdict is what a rule decides about a packet. The zero Verdict lets it pass.
type Verdict struct {
	Drop bool
	// Copies is how many more times it is delivered.
	Copies int
	// Delay is added to the network's latency.
	Delay time.Duration
	// Corrupt flips bits, see Net.damage.
	Corrupt bool
}

// Rule looks at a packet before the random faults; the first rule with a verdict other than
// the zero one decides.
type Rule func(*Packet) Verdict

// Faults are probabilities, each drawn for each packet that no rule decided on.
type Faults struct {
	Drop, Duplicate, Reorder, Corrupt float64
}

// Net is a network.
type Net struct {
	// Latency is how long a packet travels; 10 us at the start.
	Latency time.Duration
	// ReorderDelay bounds by how much a reordered or duplicated packet is late; 200 us at the start.
	ReorderDelay time.Duration
	Faults       Faults
	Rules        []Rule
	// RunIDs makes nodes' packets carry a running Identification, as foreign stacks do.
	RunIDs bool

	// What has happened to packets so far. Damaged counts those of Delivered whose ICRC does
	// not hold: each must end in one of the receiver's drop counters.
	Dropped, Duplicated, Reordered, Corrupted, Delivered, Damaged int

	rand    *rand.Rand
	now     verbs.Instant
	nodes   []*Node
	byAddr  map[netip.AddrPort]*Node
	flights flights
	order   uint64
	nth     int
	pcap    *pcapgo.Writer
}

// New makes an empty network; the same seed gives the same run.
func New(seed uint64) *Net {
	return &Net{
		Latency: 10 * time.Microsecond, ReorderDelay: 200 * time.Microsecond,
		rand: rand.New(rand.NewPCG(seed, 0xD00BE11)), byAddr: make(map[netip.AddrPort]*Node),
	}
}

// Now returns the virtual time.
func (n *Net) Now() verbs.Instant { return n.now }

// Rand returns the network's source of randomness.
func (n *Net) Rand() *rand.Rand { return n.rand }

// Capture writes every packet that is sent from now on to w, in pcap format (raw IP).
func (n *Net) Capture(w io.Writer) error {
	n.pcap = pcapgo.NewWriterNanos(w)
	return n.pcap.WriteFileHeader(1<<16, layers.LinkTypeRaw)
}

// flight is a packet with its time of arrival.
type flight struct {
	at    verbs.Instant
	order uint64
	to    *Node
	p     Packet
}

type flights []flight

func (f flights) Len() int { return len(f) }
func (f flights) Less(i, j int) bool {
	return f[i].at < f[j].at || f[i].at == f[j].at && f[i].order < f[j].order
}
func (f flights) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)   { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	old := *f
	x := old[len(old)-1]
	old[len(old)-1] = flight{}
	*f = old[:len(old)-1]
	return x
}

// send puts a packet on the network.
func (n *Net) send(p Packet) {
	n.nth++
	p.Nth = n.nth
	n.record(&p)
	var v Verdict
	for _, rule := range n.Rules {
		if v = rule(&p); v != (Verdict{}) {
			break
		}
	}
	if v == (Verdict{}) {
		v = n.chance()
	}
	if v.Drop {
		n.Dropped++
		return
	}
	if v.Corrupt {
		n.Corrupted++
		n.damage(&p)
	}
	if v.Delay > 0 {
		n.Reordered++
	}
	n.launch(p, v.Delay)
	for range v.Copies {
		n.Duplicated++
		dup := p
		dup.Payload = append([]byte(nil), p.Payload...)
		n.launch(dup, v.Delay+n.someDelay())
	}
}

// damage flips bits of a packet: one, a few anywhere, a burst, or one of the sender's address
// and port, which the ICRC covers too.
func (n *Net) damage(p *Packet) {
	flip := func(b []byte, bit int) { b[bit/8] ^= 1 << (bit % 8) }
	was, src := string(p.Payload), p.Src
	bits := 8 * len(p.Payload)
	switch n.rand.IntN(8) {
	case 0:
		b := append(p.Src.Addr().AsSlice(), byte(p.Src.Port()>>8), byte(p.Src.Port()))
		flip(b, n.rand.IntN(8*len(b)))
		port := len(b) - 2
		addr, _ := netip.AddrFromSlice(b[:port])
		p.Src = netip.AddrPortFrom(addr, uint16(b[port])<<8|uint16(b[port+1]))
	case 1:
		for range 2 + n.rand.IntN(7) {
			flip(p.Payload, n.rand.IntN(bits))
		}
	case 2:
		at := n.rand.IntN(bits)
		flip(p.Payload, at)
		for i := at + 1; i < min(at+32, bits); i++ {
			if n.rand.IntN(2) == 0 {
				flip(p.Payload, i)
			}
		}
	default:
		flip(p.Payload, n.rand.IntN(bits))
	}
	// The fifth byte (FECN, BECN) is not covered: routers may change it (annex A17).
	p.Damaged = p.Src != src || string(p.Payload[:4]) != was[:4] || string(p.Payload[5:]) != was[5:]
}

func (n *Net) chance() (v Verdict) {
	hit := func(p float64) bool { return p > 0 && n.rand.Float64() < p }
	v.Drop = hit(n.Faults.Drop)
	v.Corrupt = hit(n.Faults.Corrupt)
	if hit(n.Faults.Duplicate) {
		v.Copies = 1
	}
	if hit(n.Faults.Reorder) {
		v.Delay = n.someDelay()
	}
	return v
}

func (n *Net) someDelay() time.Duration {
	return time.Duration(1 + n.rand.Int64N(int64(n.ReorderDelay)))
}

func (n *Net) launch(p Packet, delay time.Duration) {
	to := n.byAddr[p.Dst]
	if to == nil {
		return // nobody there: silence, as on a real network
	}
	n.order++
	heap.Push(&n.flights, flight{n.now.Add(n.Latency + delay), n.order, to, p})
}

// record writes a packet to the capture. A capture that fails stops the run: a test that
// asked for one wants it.
func (n *Net) record(p *Packet) {
	if n.pcap == nil {
		return
	}
	raw, err := Raw(p.Src, p.Dst, p.ID, p.Payload)
	if err == nil {
		err = n.pcap.WritePacket(gopacket.CaptureInfo{
			Timestamp: time.Unix(0, int64(n.now)), CaptureLength: len(raw), Length: len(raw),
		}, raw)
	}
	if err != nil {
		panic(fmt.Sprintf("netsim: capture: %v", err))
	}
}

// Raw builds the IP packet around a UDP payload, as our sockets send it: DF, the given
// Identification, TTL or hop limit 64, UDP checksum 0.
func Raw(src, dst netip.AddrPort, id uint16, payload []byte) ([]byte, error) {
	udp := &layers.UDP{SrcPort: layers.UDPPort(src.Port()), DstPort: layers.UDPPort(dst.Port()), Length: uint16(8 + len(payload))}
	buf := gopacket.NewSerializeBuffer()
	var ip gopacket.SerializableLayer
	if src.Addr().Is4() {
		ip = &layers.IPv4{
			Version: 4, IHL: 5, Id: id, Flags: layers.IPv4DontFragment, TTL: 64, Protocol: layers.IPProtocolUDP,
			Length: uint16(28 + len(payload)), SrcIP: src.Addr().AsSlice(), DstIP: dst.Addr().AsSlice(),
		}
	} else {
		ip = &layers.IPv6{
			Version: 6, HopLimit: 64, NextHeader: layers.IPProtocolUDP,
			Length: uint16(8 + len(payload)), SrcIP: src.Addr().AsSlice(), DstIP: dst.Addr().AsSlice(),
		}
	}
	err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{ComputeChecksums: true}, ip)
	if err != nil {
		return nil, err
	}
	head := append([]byte(nil), buf.Bytes()...)
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{}, udp, gopacket.Payload(payload)); err != nil {
		return nil, err
	}
	return append(head, buf.Bytes()...), nil
}

// Run steps all nodes and moves time on until done reports true, and returns true; or false
// when limit of virtual time has passed or nothing can happen any more.
func (n *Net) Run(limit time.Duration, done func() bool) bool {
	end := n.now.Add(limit)
	for {
		n.settle()
		if done != nil && done() {
			return true
		}
		at := n.next()
		if slices.ContainsFunc(n.nodes, func(nd *Node) bool { return nd.due(n.now) }) {
			at = n.now // done has posted something
		}
		if at > end {
			n.now = end
			return done == nil
		}
		n.now = max(n.now, at)
		n.arrive()
	}
}

// settle steps every node until none has anything to do at this moment.
func (n *Net) settle() {
	for busy := true; busy; {
		busy = false
		for _, node := range n.nodes {
			for rounds := 0; node.due(n.now); rounds++ {
				if rounds > 1_000_000 {
					panic("netsim: a node never comes to rest")
				}
				node.Wire.Step(n.now)
				busy = true
			}
		}
	}
}

// next returns when something happens next.
func (n *Net) next() verbs.Instant {
	at := verbs.Never
	if len(n.flights) > 0 {
		at = n.flights[0].at
	}
	for _, node := range n.nodes {
		at = min(at, node.Wire.NextDeadline())
	}
	return at
}

// arrive moves what has arrived into the nodes' inboxes.
func (n *Net) arrive() {
	for len(n.flights) > 0 && n.flights[0].at <= n.now {
		f := heap.Pop(&n.flights).(flight)
		if !f.to.Dead {
			f.to.inbox = append(f.to.inbox, f.p)
			n.Delivered++
			if f.p.Damaged {
				n.Damaged++
			}
		}
	}
}

// simLink is a node's link.Link.
type simLink struct{ node *Node }

func (l simLink) Recv(msgs []link.Rx) (int, error) {
	nd := l.node
	i := 0
	for ; i < len(msgs) && nd.head < len(nd.inbox); i++ {
		p := &nd.inbox[nd.head]
		nd.head++
		msgs[i] = link.Rx{Buf: p.Payload, Src: p.Src, Dst: p.Dst.Addr()}
	}
	if nd.head == len(nd.inbox) {
		nd.inbox, nd.head = nd.inbox[:0], 0
	}
	return i, nil
}

func (l simLink) Send(msgs []link.Tx) (int, error) {
	nd := l.node
	for i := range msgs {
		m := &msgs[i]
		flat := make([]byte, 0, m.Len)
		for _, g := range m.Gather {
			flat = append(flat, g...)
		}
		if len(flat) != m.Len {
			return i, fmt.Errorf("netsim: a message of %d bytes says %d", len(flat), m.Len)
		}
		seg := m.SegSize
		if seg <= 0 {
			seg = len(flat)
		}
		for id := 0; len(flat) > 0; id++ {
			k := min(seg, len(flat))
			if nd.net.RunIDs {
				nd.sendForeign(m, flat[:k])
				flat = flat[k:]
				continue
			}
			nd.net.send(Packet{
				Src: netip.AddrPortFrom(m.Src, nd.Addr.Port()), Dst: m.Dst, ID: uint16(id),
				Payload: append([]byte(nil), flat[:k]...),
			})
			flat = flat[k:]
		}
	}
	return len(msgs), nil
}

// sendForeign sends a datagram with a running Identification and the ICRC that belongs to it.
func (nd *Node) sendForeign(m *link.Tx, payload []byte) {
	src := netip.AddrPortFrom(m.Src, nd.Addr.Port())
	if nd.nextID++; nd.nextID%16 == 0 {
		nd.nextID += uint16(nd.net.rand.IntN(4)) // others' packets in between
	}
	b := append([]byte(nil), payload...)
	path := roce.NewPath(src, m.Dst)
	body := b[:len(b)-roce.ICRCLen]
	roce.PutICRC(b[len(body):], path.ICRC(body, nd.nextID))
	nd.net.send(Packet{Src: src, Dst: m.Dst, ID: nd.nextID, Payload: b})
}

func (l simLink) Caps() link.Caps {
	nd := l.node
	return link.Caps{MaxSegs: nd.MaxSegs, MaxBytes: 65000, ControlsID: true, RecvBuffer: nd.RecvBuffer}
}

func (l simLink) LocalAddr() netip.AddrPort { return l.node.Addr }
