package bench

import (
	"cmp"
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
	h := hello{version: Version, kind: helloControl, session: s.id, Params: s.p}
	cp := s.ctrlParam()
	cp.PrivateData, cp.RemotePort = h.encode(), s.o.RemotePort
	ctrl, err := s.dev.Dial(ctx, to, cp)
	if err != nil {
		return Refused(err)
	}
	s.begin(ctrl)
	if err := checkWelcome(ctrl.PrivateData()); err != nil {
		return fmt.Errorf("%v: %w", to, err)
	}
	if s.p.Type == verbs.UD {
		a, err := ctrl.Attr()
		if err != nil {
			return err
		}
		if most := a.PathMTU.Bytes(); s.p.Size > most {
			return &RangeError{"message size over UD to " + to.Addr().String(), int64(s.p.Size), 0, int64(most)}
		}
	}
	h.kind = helloData
	for i := range s.p.QPs {
		f := s.newFlow(i)
		s.flows = append(s.flows, f)
		if s.p.Type == verbs.UD {
			if err := f.openUD(); err != nil {
				return err
			}
			continue
		}
		h.index = uint16(i)
		cp := s.param(f)
		cp.PrivateData, cp.RemotePort = h.encode(), s.o.RemotePort
		qp, err := s.dev.Dial(ctx, to, cp)
		if err != nil {
			return fmt.Errorf("data connection %d of %d: %w", i+1, s.p.QPs, Refused(err))
		}
		if err := f.attach(qp); err != nil {
			return err
		}
	}
	return s.introduce(ctx)
}

// introduce tells the peer about each data queue pair and our memory, and hears the same.
func (s *Session) introduce(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.hangUp)()
	for _, f := range s.flows {
		tell := func() error {
			return s.say(message{kind: msgQueue, phase: uint16(f.index), queue: f.own()})
		}
		if s.client {
			if err := tell(); err != nil {
				return err
			}
		}
		m, err := s.hear(msgQueue)
		if err != nil {
			return cmp.Or(ctx.Err(), err)
		}
		if int(m.phase) != f.index {
			return fmt.Errorf("the peer describes queue pair %d where %d is due", m.phase, f.index)
		}
		if err := f.meet(m.queue); err != nil {
			return err
		}
		if !s.client {
			if err := tell(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Refused finds the server's own words in a rejection: a *RefusedError around err, or err.
func Refused(err error) error {
	var r *transport.RejectError
	if errors.As(err, &r) {
		if text := refusalText(r.PrivateData); text != "" {
			return &RefusedError{Text: text, Err: err}
		}
	}
	return err
}
