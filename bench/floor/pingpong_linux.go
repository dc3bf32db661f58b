package floor

import (
	"context"
	"net/netip"
	"time"
)

// goodbye is the length of the datagram that ends the other end.
const goodbye = 1

// ping sends a datagram, waits for the answer, and so on.
func ping(ctx context.Context, p Params, to netip.AddrPort) (Result, error) {
	s, err := openSocket(ctx, &p, netip.AddrPortFrom(p.Places[1].addr(), 0))
	if err != nil {
		return Result{}, err
	}
	defer s.close()
	s.aim(to)
	if p.Connected {
		if err := s.connect(); err != nil {
			return Result{}, err
		}
	}
	out, in := make([]byte, p.Size), make([]byte, p.Size)
	samples := newSamples(&p)
	var begin, last time.Time
	ops := uint64(0)
	for i := 0; ; i++ {
		if err := s.send(out); err != nil {
			return Result{}, err
		}
		if _, err := s.recv(in); err != nil {
			return Result{}, err
		}
		if i < warmUp {
			begin = time.Now()
			last = begin
			continue
		}
		now := time.Now()
		samples.Add(now.Sub(last))
		last = now
		ops++
		if ops == uint64(p.Iters) || p.Iters == 0 && now.Sub(begin) >= p.Duration {
			break
		}
	}
	for range 3 {
		_ = s.send(out[:goodbye])
	}
	r := Result{Ops: ops, Elapsed: last.Sub(begin)}
	samples.Into(&r)
	return r, nil
}

// pong sends every datagram back.
func pong(ctx context.Context, p Params, ready func(netip.AddrPort) error) error {
	s, err := openSocket(ctx, &p, netip.AddrPortFrom(p.Places[0].addr(), 0))
	if err != nil {
		return err
	}
	defer s.close()
	at, err := s.local()
	if err == nil {
		err = ready(at)
	}
	if err != nil {
		return err
	}
	b := make([]byte, p.Size)
	n, err := s.recvFirst(b)
	if err == nil && p.Connected {
		err = s.connect()
	}
	for err == nil && n != goodbye {
		if err = s.send(b[:n]); err == nil {
			n, err = s.recv(b)
		}
	}
	return err
}
