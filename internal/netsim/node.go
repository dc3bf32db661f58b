package netsim

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// PD is the one protection domain of every node.
const PD qp.PD = 1

// Node is one device of a network. Its On functions, where set, are called during steps.
type Node struct {
	Addr netip.AddrPort
	Wire *wire.Wire
	MRs  *mr.Table
	// MaxSegs is the longest train the node sends; 16 at the start.
	MaxSegs int
	// RecvBuffer is the socket buffer that the node says it has; 0 at the start: unknown.
	RecvBuffer int
	// Dead nodes receive nothing.
	Dead bool
	// Log lists the events of connections and queue pairs, in order, one line each.
	Log []string

	OnConnRequest func(c *wire.Conn, req *cm.Event)
	OnConnEvent   func(c *wire.Conn, t verbs.EventType, private []byte)
	OnQPEvent     func(q *wire.QP, t verbs.EventType)
	OnCompletions func(lane *qp.CQ)

	net    *Net
	inbox  []Packet
	head   int
	nextID uint16
}

// Node adds a device at an IP address, on port 4791, or at ADDR:PORT.
func (n *Net) Node(addr string) *Node {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		ap = netip.AddrPortFrom(netip.MustParseAddr(addr), roce.Port)
	}
	nd := &Node{Addr: ap, nextID: uint16(n.rand.Uint32()), MRs: mr.New(n.rand.Uint64), MaxSegs: 16, net: n}
	nd.Wire, err = wire.New(wire.Config{
		Link: simLink{nd}, Mem: nd.MRs, Upcalls: nd, Rand: n.rand.Uint32, GUID: n.rand.Uint64(),
	})
	if err != nil {
		panic(fmt.Sprintf("netsim: %v", err))
	}
	n.nodes = append(n.nodes, nd)
	n.byAddr[ap] = nd
	return nd
}

// due reports whether the node has something to do at this moment.
func (nd *Node) due(now verbs.Instant) bool {
	return nd.head < len(nd.inbox) || nd.Wire.Pending() || nd.Wire.NextDeadline() <= now
}

// Path returns the way from this node to another.
func (nd *Node) Path(to *Node) cm.Path { return cm.Path{Local: nd.Addr.Addr(), Remote: to.Addr} }

// Register registers a buffer in the node's protection domain.
func (nd *Node) Register(buf []byte, access verbs.Access) *mr.Region {
	r, err := nd.MRs.Register(PD, buf, access)
	if err != nil {
		panic(fmt.Sprintf("netsim: %v", err))
	}
	return r
}

// QP makes a reliable queue pair in INIT with both completions in one lane.
func (nd *Node) QP(lane *qp.CQ, c verbs.QPCap) *wire.QP { return nd.TypedQP(verbs.RC, lane, c) }

// QKey is the Q_Key of every UD queue pair.
const QKey = 0x11111111

// TypedQP makes a queue pair of a type in INIT with both completions in one lane.
func (nd *Node) TypedQP(t verbs.QPType, lane *qp.CQ, c verbs.QPCap) *wire.QP {
	q, err := nd.Wire.CreateQP(qp.Config{Type: t, Cap: c, PD: PD, SendCQ: lane, RecvCQ: lane})
	if err != nil {
		panic(fmt.Sprintf("netsim: %v", err))
	}
	a := verbs.QPAttr{
		Mask:  verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrAccessFlags,
		State: verbs.QPInit, Port: 1,
		AccessFlags: verbs.RemoteWrite | verbs.RemoteRead | verbs.RemoteAtomic,
	}
	if t == verbs.UD {
		a.Mask ^= verbs.AttrAccessFlags | verbs.AttrQKey
		a.QKey = QKey
	}
	if err := nd.Wire.Modify(nd.net.now, q, &a); err != nil {
		panic(fmt.Sprintf("netsim: %v", err))
	}
	return q
}

// Send posts sends and rings when asked to, as a program's thread would.
func (nd *Node) Send(q *wire.QP, wrs ...verbs.SendWR) (int, error) {
	n, ring, err := q.Engine().PostSend(wrs)
	if ring {
		nd.Wire.Ring(q)
	}
	return n, err
}

// Recv posts receives.
func (nd *Node) Recv(q *wire.QP, wrs ...verbs.RecvWR) (int, error) {
	n, ring, err := q.Engine().PostRecv(wrs)
	if ring {
		nd.Wire.Ring(q)
	}
	return n, err
}

// Defaults are connection parameters that suit tests: short timers, a patient peer.
func Defaults() wire.ConnParam {
	return wire.ConnParam{
		ResponderResources: 16, InitiatorDepth: 16, RetryCnt: 7, RNRRetry: 7,
		Timeout: verbs.AckTimeoutFor(16 * time.Millisecond), MinRNRTimer: 4, MTU: verbs.MTU1024,
	}
}

// Connect opens a connection from a's queue pair to b's through REQ, REP and RTU and returns
// both ends once both are established; it fails after a minute of virtual time. Both queue
// pairs must be in INIT.
func (n *Net) Connect(a, b *Node, aq, bq *wire.QP, p wire.ConnParam) (ac, bc *wire.Conn, err error) {
	const service = roce.SID(0x0106_0000 | 7471)
	if err := b.Wire.Listen(service); err != nil {
		return nil, nil, err
	}
	defer b.Wire.Unlisten(service)
	onReq, onA, onB := b.OnConnRequest, a.OnConnEvent, b.OnConnEvent
	defer func() { b.OnConnRequest, a.OnConnEvent, b.OnConnEvent = onReq, onA, onB }()
	var request, up, failed = (*wire.Conn)(nil), 0, error(nil)
	b.OnConnRequest = func(c *wire.Conn, _ *cm.Event) { request = c }
	events := func(_ *wire.Conn, t verbs.EventType, _ []byte) {
		if t == verbs.EventEstablished {
			up++
		} else if t != verbs.EventRTU {
			failed = fmt.Errorf("netsim: connect: %v", t)
		}
	}
	a.OnConnEvent, b.OnConnEvent = events, events
	ac, err = a.Wire.Dial(n.now, aq, wire.DialParam{Path: a.Path(b), Service: service, SrcPort: 40000, ConnParam: p})
	if err != nil {
		return nil, nil, err
	}
	if !n.Run(time.Minute, func() bool { return request != nil || failed != nil }) || failed != nil {
		return nil, nil, fmt.Errorf("netsim: no REQ arrived (%w)", failed)
	}
	if err := b.Wire.Accept(n.now, request, bq, p); err != nil {
		return nil, nil, err
	}
	if !n.Run(time.Minute, func() bool { return up == 2 || failed != nil }) || failed != nil {
		return nil, nil, fmt.Errorf("netsim: not established (%w)", failed)
	}
	return ac, request, nil
}

// ConnRequest implements wire.Upcalls.
func (nd *Node) ConnRequest(c *wire.Conn, req *cm.Event) {
	nd.Log = append(nd.Log, verbs.EventConnectRequest.String())
	if nd.OnConnRequest != nil {
		nd.OnConnRequest(c, req)
	}
}

// ConnEvent implements wire.Upcalls.
func (nd *Node) ConnEvent(c *wire.Conn, t verbs.EventType, private []byte) {
	nd.Log = append(nd.Log, t.String())
	if nd.OnConnEvent != nil {
		nd.OnConnEvent(c, t, private)
	}
}

// QPEvent implements wire.Upcalls.
func (nd *Node) QPEvent(q *wire.QP, t verbs.EventType) {
	nd.Log = append(nd.Log, t.String())
	if nd.OnQPEvent != nil {
		nd.OnQPEvent(q, t)
	}
}

// Completions implements wire.Upcalls.
func (nd *Node) Completions(lane *qp.CQ, _ bool) {
	if nd.OnCompletions != nil {
		nd.OnCompletions(lane)
	}
}
