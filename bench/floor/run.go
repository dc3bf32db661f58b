package floor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"
)

// grace is how long a floor may take beyond what it measures.
const grace = 10 * time.Second

// errEnded is the error of an end that was told to stop before its work was done.
var errEnded = errors.New("floor: ended before the work was done")

// Run measures a floor. It returns an error that matches [errors.ErrUnsupported] where the
// system lacks the means. The context ends it early, with an error.
func Run(ctx context.Context, p Params) (Result, error) {
	if err := p.Check(); err != nil {
		return Result{}, err
	}
	limit := grace + p.Duration
	if p.Iters > 0 {
		limit = 10 * time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	switch {
	case p.Kind == Ring, p.Kind == Chan:
		if p.Exec == nil {
			return handOver(ctx, p)
		}
		return alone(ctx, p)
	case p.Exec != nil:
		return Ends(ctx, p)
	}
	return goroutines(ctx, p)
}

// goroutines runs both ends in this process.
func goroutines(ctx context.Context, p Params) (Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ready := make(chan netip.AddrPort, 1)
	served := make(chan error, 1)
	go func() {
		served <- serve(ctx, p, func(at netip.AddrPort) error {
			ready <- at
			return nil
		})
	}()
	select {
	case err := <-served:
		return Result{}, err
	case at := <-ready:
		r, err := drive(ctx, p, at)
		cancel()
		if serr := <-served; err == nil && !errors.Is(serr, errEnded) {
			err = serr
		}
		return r, err
	}
}

// serve is the end that answers; ready is told where it listens.
func serve(ctx context.Context, p Params, ready func(netip.AddrPort) error) error {
	switch p.Kind {
	case PingPong:
		return pong(ctx, p, ready)
	case Stream:
		return sink(ctx, p, ready)
	}
	return serveTCP(ctx, p, ready)
}

// drive is the end that begins, measures and ends.
func drive(ctx context.Context, p Params, to netip.AddrPort) (Result, error) {
	switch p.Kind {
	case PingPong:
		return ping(ctx, p, to)
	case Stream:
		return source(ctx, p, to)
	}
	return driveTCP(ctx, p, to)
}

// order is what an end of its own process is told, as JSON.
type order struct {
	Params Params
	// To is where the other end listens; the zero value makes this the end that serves.
	To netip.AddrPort
}

// hello is what the end that serves prints when it listens.
type hello struct{ Listens netip.AddrPort }

// End is the main function of an end in a process of its own: args are those that followed
// [Params.Exec]. It prints JSON to stdout: where it listens, or a [Result].
func End(ctx context.Context, args []string, stdout io.Writer) error {
	o, err := parseOrder(args)
	if err != nil {
		return err
	}
	if err := o.Params.Check(); err != nil {
		return err
	}
	if o.Params.Kind == Ring || o.Params.Kind == Chan {
		r, err := handOver(ctx, o.Params)
		if err != nil {
			return err
		}
		return json.NewEncoder(stdout).Encode(r)
	}
	return Transport{serve, drive}.follow(ctx, o, stdout)
}

// Transport is something that can be measured like a floor.
type Transport struct {
	// Serve listens at the address of the first place, tells ready where, and serves one
	// other end.
	Serve func(ctx context.Context, p Params, ready func(netip.AddrPort) error) error
	// Drive begins, measures and ends.
	Drive func(ctx context.Context, p Params, to netip.AddrPort) (Result, error)
}

// End is the main function of an end of this transport; see [End].
func (t Transport) End(ctx context.Context, args []string, stdout io.Writer) error {
	o, err := parseOrder(args)
	if err != nil {
		return err
	}
	return t.follow(ctx, o, stdout)
}

func (t Transport) follow(ctx context.Context, o order, stdout io.Writer) error {
	out := json.NewEncoder(stdout)
	if !o.To.IsValid() {
		return t.Serve(ctx, o.Params, func(at netip.AddrPort) error { return out.Encode(hello{at}) })
	}
	r, err := t.Drive(ctx, o.Params, o.To)
	if err != nil {
		return err
	}
	return out.Encode(r)
}

func parseOrder(args []string) (order, error) {
	var o order
	if len(args) != 1 {
		return o, errors.New("floor: an end takes one argument, which Run makes")
	}
	if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
		return o, fmt.Errorf("floor: an end's argument: %w", err)
	}
	o.Params.Exec = nil
	return o, nil
}
