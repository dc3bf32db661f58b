package cm

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// SIDR, service ID resolution, is what UD has instead of a connection: a SIDR_REQ asks which
// queue pair and Q_Key a service ID stands for, a SIDR_REP answers, and nobody remembers
// anything (IBTA Vol 1, 12.11). The side that asks repeats itself; the other one answers each
// time from a table, so strangers cost it no memory.

// MaxSIDRPrivate is the private data that a SIDR_REQ of rdma_cm has room for: 180 bytes.
const MaxSIDRPrivate = roce.SIDRReqPrivateLen - roce.IPCMHeaderLen

// maxQueries bounds the service IDs that are being resolved at a time.
const maxQueries = 256

// SIDRID names a query. It is random and never 0.
type SIDRID uint32

// SIDRService is what a service ID stands for.
type SIDRService struct {
	QPN  verbs.QPN
	QKey uint32
	// PrivateData goes with the answer: at most 136 bytes.
	PrivateData []byte
}

// SIDRParams is what ResolveSIDR needs to know.
type SIDRParams struct {
	Path
	ServiceID roce.SID
	// SrcPort is our port in the service's port space, as the peer will see it.
	SrcPort uint16
	// PrivateData is at most MaxSIDRPrivate bytes, 216 for service IDs not of rdma_cm.
	PrivateData []byte
}

// SIDRInfo is what a query brought.
type SIDRInfo struct {
	ID SIDRID
	// Status says whether the rest means anything.
	Status roce.SIDRStatus
	QPN    verbs.QPN
	QKey   uint32
}

// query is a service ID that is being resolved.
type query struct {
	path        Path
	tid         uint64
	req         roce.SIDRReq // its private data is a copy
	limit, next verbs.Instant
	backoff     time.Duration
}

// ServeSIDR makes SIDR_REQs for a service ID be answered, until UnserveSIDR. Errors:
// ErrServiceInUse, ErrParam, ErrPrivateData.
func (c *CM) ServeSIDR(service roce.SID, s SIDRService) error {
	if _, ok := c.services[service]; ok {
		return ErrServiceInUse
	}
	if !goodQPN(s.QPN) {
		return fmt.Errorf("%w: QPN %v", ErrParam, s.QPN)
	}
	if err := fits(s.PrivateData, roce.SIDRRepPrivateLen); err != nil {
		return err
	}
	s.PrivateData = slices.Clone(s.PrivateData)
	if c.services == nil {
		c.services = make(map[roce.SID]SIDRService)
	}
	c.services[service] = s
	return nil
}

// UnserveSIDR ends what ServeSIDR began.
func (c *CM) UnserveSIDR(service roce.SID) { delete(c.services, service) }

// handleSIDRReq answers.
func (c *CM) handleSIDRReq(in input, m *roce.SIDRReq) {
	rep := roce.SIDRRep{RequestID: m.RequestID, Status: roce.SIDRUnsupported, ServiceID: m.ServiceID}
	if s, ok := c.services[m.ServiceID]; ok {
		rep.Status, rep.QPN, rep.QKey, rep.PrivateData = roce.SIDRValid, s.QPN, s.QKey, s.PrivateData
	}
	c.reply(sender(in.from, in.to, in.tid), in.tid, SIDRRep, rep.Put)
}

// ResolveSIDR asks a peer for the queue pair behind a service ID. A SIDRResolved or
// SIDRUnreachable event follows within ConnectTimeout, unless CancelSIDR is called. Errors:
// ErrAddress, ErrPrivateData, ErrNoIDs.
func (c *CM) ResolveSIDR(now verbs.Instant, p SIDRParams) (SIDRID, error) {
	local, remote := p.Local.Unmap(), p.Remote.Addr().Unmap()
	if !unicast(local) || !unicast(remote) || local.Is4() != remote.Is4() {
		return 0, fmt.Errorf("%w: from %v to %v", ErrAddress, p.Local, p.Remote)
	}
	port := p.Remote.Port()
	if port == 0 {
		port = roce.Port
	}
	room, header := roce.SIDRReqPrivateLen, 0
	if p.ServiceID.IsIP() {
		room, header = MaxSIDRPrivate, roce.IPCMHeaderLen
	}
	if err := fits(p.PrivateData, room); err != nil {
		return 0, err
	}
	if len(c.queries) >= maxQueries {
		return 0, ErrNoIDs
	}
	id := SIDRID(0)
	for id == 0 || c.queries[id] != nil {
		id = SIDRID(c.cfg.ours(c.cfg.Rand()))
	}
	private := make([]byte, header+len(p.PrivateData))
	if header > 0 {
		h := roce.IPCMHeader{Src: local, Dst: remote, SrcPort: p.SrcPort}
		h.Put(private)
	}
	copy(private[header:], p.PrivateData)
	q := &query{
		path: Path{Local: local, Remote: netip.AddrPortFrom(remote, port)}, tid: c.newTID(),
		req:   roce.SIDRReq{RequestID: uint32(id), PKey: defaultPKey, ServiceID: p.ServiceID, PrivateData: private},
		limit: now.Add(c.cfg.ConnectTimeout), backoff: c.cfg.RetryInitial,
	}
	q.next = now.Add(q.backoff)
	if c.queries == nil {
		c.queries = make(map[SIDRID]*query)
	}
	c.queries[id] = q
	c.queryAt = min(c.queryAt, q.next, q.limit)
	c.reply(q.path, q.tid, SIDRReq, q.req.Put)
	return id, nil
}

// CancelSIDR forgets a query: no event will come. One that has ended already is left alone.
func (c *CM) CancelSIDR(id SIDRID) { delete(c.queries, id) }

// handleSIDRRep ends the query that it answers.
func (c *CM) handleSIDRRep(in input, m *roce.SIDRRep) {
	id := SIDRID(m.RequestID)
	q := c.queries[id]
	switch {
	case q == nil:
		c.drop(DropUnknown)
		return
	case in.from.Addr() != q.path.Remote.Addr():
		c.drop(DropPeer)
		return
	case in.tid != q.tid:
		c.drop(DropTID)
		return
	}
	info := SIDRInfo{ID: id, Status: m.Status, QPN: m.QPN, QKey: m.QKey}
	if info.Status == roce.SIDRValid && !goodQPN(m.QPN) {
		info.Status = roce.SIDRNoQP
	}
	delete(c.queries, id)
	c.events.push(queuedEvent{ev: Event{
		Type: SIDRResolved, Service: q.req.ServiceID, Path: q.path, SIDR: info, PrivateData: slices.Clone(m.PrivateData),
	}})
}

// resolveAgain repeats the queries whose time has come and ends those that took too long. They
// are few, so all are looked at; in order, so that a simulation can be run again.
func (c *CM) resolveAgain(now verbs.Instant) {
	c.queryAt = verbs.Never
	for _, id := range slices.Sorted(maps.Keys(c.queries)) {
		q := c.queries[id]
		if q.limit <= now {
			delete(c.queries, id)
			c.counters.TimedOut.Add(1)
			c.events.push(queuedEvent{ev: Event{Type: SIDRUnreachable, Service: q.req.ServiceID, Path: q.path, SIDR: SIDRInfo{ID: id}}})
			continue
		}
		if q.next <= now {
			q.backoff = min(2*q.backoff, c.cfg.RetryMax)
			q.next = now.Add(q.backoff)
			c.counters.Retransmitted[SIDRReq].Add(1)
			c.reply(q.path, q.tid, SIDRReq, q.req.Put)
		}
		c.queryAt = min(c.queryAt, q.next, q.limit)
	}
}
