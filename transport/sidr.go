package transport

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/cm"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// DefaultQKey is the Q_Key of rdma_cm's datagram services (RDMA_UDP_QKEY).
const DefaultQKey = 0x01234567

// MaxResolvePrivateData and MaxServePrivateData bound the private data of a question for a
// datagram service and of its answer.
const (
	MaxResolvePrivateData = cm.MaxSIDRPrivate
	MaxServePrivateData   = roce.SIDRRepPrivateLen
)

// UDService is a datagram service that was found: what a work request needs to reach it, once
// AV has become an address handle.
type UDService struct {
	AV   verbs.AV
	QPN  verbs.QPN
	QKey uint32
	// PrivateData is what the answer brought: 136 bytes, zero-padded.
	PrivateData []byte
}

// SIDRError is a refusal: the host answers, but offers no such service.
type SIDRError struct{ Status roce.SIDRStatus }

var sidrTexts = map[roce.SIDRStatus]string{
	roce.SIDRUnsupported: "no such service", roce.SIDRReject: "rejected", roce.SIDRNoQP: "no queue pair",
	roce.SIDRRedirect: "redirected", roce.SIDRUnsupportedVersion: "unsupported version",
}

func (e *SIDRError) Error() string {
	if s := sidrTexts[e.Status]; s != "" {
		return "transport: datagram service refused: " + s
	}
	return fmt.Sprintf("transport: datagram service refused: status %d", e.Status)
}

// ResolveParam is what goes along with a question for a datagram service.
type ResolveParam struct {
	// PrivateData is at most 180 bytes.
	PrivateData []byte
	// RemotePort is the peer's UDP port; 0 means 4791.
	RemotePort uint16
}

// ResolveUD asks a host which queue pair serves datagrams on a service port, as rdma_cm does
// for RDMA_PS_UDP. It returns a *SIDRError when the host says that none does, ErrUnreachable
// when it does not answer within Config.ConnectTimeout, ctx.Err() when ctx ends first.
func (d *Device) ResolveUD(ctx context.Context, to netip.AddrPort, p ResolveParam) (UDService, error) {
	s, err := d.resolveUD(ctx, to, p)
	if err != nil {
		return UDService{}, fmt.Errorf("transport: resolve %v: %w", to, err)
	}
	return s, nil
}

func (d *Device) resolveUD(ctx context.Context, to netip.AddrPort, p ResolveParam) (s UDService, err error) {
	if err := ctx.Err(); err != nil {
		return s, err
	}
	path, err := d.path(to.Addr(), p.RemotePort)
	if err != nil {
		return s, err
	}
	if to.Port() == 0 {
		return s, errors.New("service port 0")
	}
	answer := make(chan cm.Event, 1)
	port := d.pickPort()
	var id cm.SIDRID
	err = port.do(func() (err error) {
		id, err = port.wire.ResolveSIDR(d.now(), cm.SIDRParams{
			Path: path, ServiceID: roce.ServiceID(roce.PSUDP, to.Port()), SrcPort: d.ephemeralPort(), PrivateData: p.PrivateData,
		}, func(e *cm.Event) { answer <- *e })
		return err
	})
	if errors.Is(err, cm.ErrPrivateData) {
		return s, ErrPrivateData
	}
	if err != nil {
		return s, err
	}
	select {
	case e := <-answer:
		return foundUD(path, &e)
	case <-ctx.Done():
		err = ctx.Err()
	case <-d.done:
		err = ErrClosed
	}
	_ = port.do(func() error { port.wire.CancelSIDR(id); return nil })
	select {
	case e := <-answer: // a result wins over the end of the wait
		return foundUD(path, &e)
	default:
		return s, err
	}
}

func foundUD(path cm.Path, e *cm.Event) (UDService, error) {
	switch {
	case e.Type == cm.SIDRUnreachable:
		return UDService{}, ErrUnreachable
	case e.SIDR.Status != roce.SIDRValid:
		return UDService{}, &SIDRError{Status: e.SIDR.Status}
	}
	return UDService{
		AV: verbs.AV{Remote: path.Remote, Local: path.Local}, QPN: e.SIDR.QPN, QKey: e.SIDR.QKey, PrivateData: e.PrivateData,
	}, nil
}

// UDServer names a queue pair to those who ask for a service port.
type UDServer struct {
	dev     *Device
	service roce.SID
	closed  atomic.Bool
}

// ServeUD answers whoever asks for a service port with a UD queue pair's number, its Q_Key and
// private data, at most 136 bytes. The queue pair must be in RTR or RTS to receive anything.
// ErrInUse means that the port is served already.
func (d *Device) ServeUD(port uint16, q *QP, private []byte) (*UDServer, error) {
	if port == 0 {
		return nil, errors.New("transport: serve: service port 0; choose one from 1 to 65535")
	}
	if t := q.eng.Type(); t != verbs.UD {
		return nil, fmt.Errorf("transport: serve: a %v queue pair serves no datagrams", t)
	}
	attr, err := q.Attr()
	if err != nil {
		return nil, err
	}
	s := &UDServer{dev: d, service: roce.ServiceID(roce.PSUDP, port)}
	for i, p := range d.ports {
		err := p.do(func() error {
			return p.wire.ServeSIDR(s.service, cm.SIDRService{QPN: q.Num(), QKey: attr.QKey, PrivateData: private})
		})
		switch {
		case err == nil:
			continue
		case errors.Is(err, cm.ErrServiceInUse):
			err = ErrInUse
		case errors.Is(err, cm.ErrPrivateData):
			err = ErrPrivateData
		}
		for _, p := range d.ports[:i] {
			_ = p.do(func() error { p.wire.UnserveSIDR(s.service); return nil }) // the reason to report is err
		}
		return nil, fmt.Errorf("transport: serve datagrams on service port %d: %w", port, err)
	}
	return s, nil
}

// Close ends the answers; the queue pair stays. Closing twice is ErrClosed.
func (s *UDServer) Close() error {
	if s.closed.Swap(true) {
		return ErrClosed
	}
	for _, p := range s.dev.ports {
		_ = p.do(func() error { p.wire.UnserveSIDR(s.service); return nil }) // a closed device answers nobody
	}
	return nil
}
