package bench

import (
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// The benchmarks here have stable names: a gate compares them from commit to commit. Each
// says what the transport adds to the floor of BenchmarkRawUDPPingPong when both come from
// one run.

// benchPair connects two devices of this process by one connection, with receives posted at
// b by the caller.
func benchPair(b *testing.B, client, server string, param func(*transport.Device) transport.ConnParam) (qa, qb *transport.QP) {
	b.Helper()
	return benchConnect(b, open(b, client, transport.Config{}), open(b, server, transport.Config{}), param)
}

// benchConnect connects devA to devB.
func benchConnect(b *testing.B, devA, devB *transport.Device, param func(*transport.Device) transport.ConnParam) (qa, qb *transport.QP) {
	b.Helper()
	ctx := deadline(b)
	ln, err := devB.Listen(netip.AddrPortFrom(netip.Addr{}, servicePort))
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() {
		req, err := ln.Next(ctx)
		if err == nil {
			qb, err = req.Accept(ctx, param(devB))
		}
		accepted <- err
	}()
	qa, err = devA.Dial(ctx, netip.AddrPortFrom(devB.LocalAddr().Addr(), servicePort), param(devA))
	if err != nil {
		b.Fatal(err)
	}
	if err := <-accepted; err != nil {
		b.Fatal(err)
	}
	if err := qb.Established(ctx); err != nil {
		b.Fatal(err)
	}
	return qa, qb
}

func benchMR(b *testing.B, qp *transport.QP, n int) *transport.MR {
	b.Helper()
	mr, err := qp.PD().RegisterMR(make([]byte, n), verbs.LocalWrite)
	if err != nil {
		b.Fatal(err)
	}
	return mr
}

// BenchmarkRoundTrip64 is the full round trip of 64 bytes, both ends polling.
func BenchmarkRoundTrip64(b *testing.B) {
	qa, qb := benchPair(b, "127.3.40.1", "127.3.40.2", func(*transport.Device) transport.ConnParam { return transport.ConnParam{} })
	roundTrip64(b, qa, qb)
}

// BenchmarkRoundTrip64BesideIdle is the same beside 2,000 connections that do nothing: nothing
// of a step may grow with them. perf compare does it with 100,000.
func BenchmarkRoundTrip64BesideIdle(b *testing.B) {
	devA, devB := open(b, "127.3.40.3", transport.Config{}), open(b, "127.3.40.4", transport.Config{})
	cqs := map[*transport.Device]*transport.CQ{}
	for _, dev := range []*transport.Device{devA, devB} {
		cq, err := dev.CreateCQ(64)
		if err != nil {
			b.Fatal(err)
		}
		cqs[dev] = cq
	}
	for range 2000 {
		benchConnect(b, devA, devB, func(dev *transport.Device) transport.ConnParam {
			return transport.ConnParam{
				SendCQ: cqs[dev], RecvCQ: cqs[dev],
				Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: -1},
			}
		})
	}
	qa, qb := benchConnect(b, devA, devB, func(*transport.Device) transport.ConnParam { return transport.ConnParam{} })
	roundTrip64(b, qa, qb)
}

func roundTrip64(b *testing.B, qa, qb *transport.QP) {
	b.Helper()
	const depth = 16
	var stop atomic.Bool
	// side returns a function that sends and one that waits for a message.
	side := func(qp *transport.QP) (send, recv func() bool) {
		mr := benchMR(b, qp, 2*64)
		rsge, wcs := mr.SGL(64, 64), make([]verbs.WC, depth)
		wr := verbs.SendWR{Opcode: verbs.Send, InlineData: mr.Bytes()[:64]}
		for range depth {
			if err := qp.PostRecv(verbs.RecvWR{SGList: rsge}); err != nil {
				b.Fatal(err)
			}
		}
		got := 0
		send = func() bool {
			err := qp.PostSend(wr)
			if err != nil {
				b.Error(err)
			}
			return err == nil
		}
		recv = func() bool {
			for got == 0 {
				n := qp.CQ().Poll(wcs)
				if n == 0 && stop.Load() {
					return false
				}
				for i := range wcs[:n] {
					if err := wcs[i].Err(); err != nil {
						b.Error(err)
						return false
					}
					if err := qp.PostRecv(verbs.RecvWR{SGList: rsge}); err != nil {
						b.Error(err)
						return false
					}
				}
				got += n
			}
			got--
			return true
		}
		return send, recv
	}
	sendA, recvA := side(qa)
	sendB, recvB := side(qb)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for recvB() && sendB() {
		}
	}()
	for range 1000 {
		if !sendA() || !recvA() {
			b.Fatal("warm-up failed")
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if !sendA() || !recvA() {
			break
		}
	}
	stop.Store(true)
	<-done
}

// stream measures messages in one direction, 128 under way.
func stream(b *testing.B, client, server string, size, list int) {
	const depth, mod = 128, 32
	qa, qb := benchPair(b, client, server, func(*transport.Device) transport.ConnParam {
		return transport.ConnParam{Cap: verbs.QPCap{MaxSendWR: depth, MaxRecvWR: 4 * depth}}
	})
	src, dst := benchMR(b, qa, size), benchMR(b, qb, size)
	var stop atomic.Bool
	var received atomic.Uint64
	done := make(chan struct{})
	recvs := make([]verbs.RecvWR, 4*depth)
	for i := range recvs {
		recvs[i].SGList = dst.SGL(0, size)
	}
	if _, err := qb.PostRecvList(recvs); err != nil {
		b.Fatal(err)
	}
	go func() {
		defer close(done)
		wcs := make([]verbs.WC, depth)
		for spent := 0; ; {
			n := qb.CQ().Poll(wcs)
			if n == 0 && stop.Load() {
				return
			}
			for i := range wcs[:n] {
				if err := wcs[i].Err(); err != nil {
					b.Error(err)
					return
				}
			}
			received.Add(uint64(n))
			for spent += n; spent >= mod; spent -= mod {
				if _, err := qb.PostRecvList(recvs[:mod]); err != nil {
					b.Error(err)
					return
				}
			}
		}
	}()
	wrs := make([]verbs.SendWR, list)
	for i := range wrs {
		wrs[i] = verbs.SendWR{Opcode: verbs.Send, SGList: src.SGL(0, size)}
	}
	wcs := make([]verbs.WC, depth/mod)
	posted, completed := 0, 0
	// send posts until n messages are posted, in lists, keeping the queue full.
	send := func(n int) bool {
		for posted < n {
			if k := min(list, n-posted); posted+k-completed <= depth {
				for i := range wrs[:k] {
					wrs[i].Flags = 0
					if (posted+i+1)%mod == 0 {
						wrs[i].Flags = verbs.Signaled
					}
				}
				if _, err := qa.PostSendList(wrs[:k]); err != nil {
					b.Error(err)
					return false
				}
				posted += k
				continue
			}
			for i := range wcs[:qa.CQ().Poll(wcs)] {
				if err := wcs[i].Err(); err != nil {
					b.Error(err)
					return false
				}
				completed += mod
			}
		}
		return true
	}
	if !send(4 * depth) {
		b.Fatal("warm-up failed")
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	n := posted
	for b.Loop() {
		if n++; (n%list == 0) && !send(n) {
			break
		}
	}
	send(n)
	for received.Load() < uint64(n) && !b.Failed() {
		qa.CQ().Poll(wcs)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
	stop.Store(true)
	<-done
}

// BenchmarkStream64K is bulk data in messages of 64 KiB.
func BenchmarkStream64K(b *testing.B) { stream(b, "127.3.41.1", "127.3.41.2", 65536, 1) }

// BenchmarkMessageRate64 is how many messages of 64 bytes go one way, in lists of 32.
func BenchmarkMessageRate64(b *testing.B) { stream(b, "127.3.42.1", "127.3.42.2", 64, 32) }

// BenchmarkSendLat64 is a whole test as perf runs it, exchange and all: the round trip as the
// workload measures it.
func BenchmarkSendLat64(b *testing.B) {
	r := newRig(b, "127.3.43.1", "127.3.43.2", transport.Config{}, nil)
	p := Defaults(SendLat)
	p.Size, p.Iters = 64, max(int64(b.N), 1)
	client, server := r.run(p, Options{})
	if client.err != nil || server.err != nil {
		b.Fatal(client.err, server.err)
	}
	l := client.results[0].Latency
	b.ReportMetric(float64(2*l.Median.Nanoseconds()), "p50-ns/rtt")
	b.ReportMetric(float64(2*l.P99.Nanoseconds()), "p99-ns/rtt")
	b.ReportMetric(l.Mean*2, "ns/op")
}
