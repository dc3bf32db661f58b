package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// RefusedError is a server's refusal, in its own words.
type RefusedError struct {
	// Text is what the server says; it is printable ASCII.
	Text string
	// Err is the transport's error.
	Err error
}

func (e *RefusedError) Error() string { return "the server refuses: " + e.Text }
func (e *RefusedError) Unwrap() error { return e.Err }

// Dial asks the server at a service port to run a test and connects all its queue pairs.
//
// The errors are those of Params.Check and of transport's Dial; *RefusedError when the server
// says why it refuses.
func Dial(ctx context.Context, dev *transport.Device, to netip.AddrPort, p Params, o Options) (*Session, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	s, err := newSession(dev, p, o, true)
	if err != nil {
		return nil, err
	}
	s.id = rand.Uint64()
	if err := s.dial(ctx, to); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Session) dial(ctx context.Context, to netip.AddrPort) error {
	h := hello{version: Version, kind: helloControl, qpType: verbs.RC, session: s.id, Params: s.p}
	cp := s.ctrlParam()
	cp.PrivateData, cp.RemotePort = h.encode(), s.o.RemotePort
	ctrl, err := s.dev.Dial(ctx, to, cp)
	if err != nil {
		return refused(err)
	}
	s.begin(ctrl)
	if err := checkWelcome(ctrl.PrivateData()); err != nil {
		return fmt.Errorf("%v: %w", to, err)
	}
	h.kind = helloData
	for i := range s.p.QPs {
		f := s.newFlow(i)
		h.index = uint16(i)
		cp := s.param(f)
		cp.PrivateData, cp.RemotePort = h.encode(), s.o.RemotePort
		qp, err := s.dev.Dial(ctx, to, cp)
		if err != nil {
			return fmt.Errorf("data connection %d of %d: %w", i+1, s.p.QPs, refused(err))
		}
		s.flows = append(s.flows, f)
		if err := f.attach(qp); err != nil {
			return err
		}
	}
	return nil
}

// refused finds the server's own words in a rejection.
func refused(err error) error {
	var r *transport.RejectError
	if errors.As(err, &r) {
		if text := refusalText(r.PrivateData); text != "" {
			return &RefusedError{Text: text, Err: err}
		}
	}
	return err
}
