package transport_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// flood sends count messages of size bytes over each of a number of connections at once,
// all of them from one device to another, and checks that every one arrives once, in order.
func flood(t *testing.T, a, b *transport.Device, qps, count, size int) {
	t.Helper()
	ctx := deadline(t)
	ln := listen(t, b, 7480)
	defer ln.Close()
	const depth = 64
	c := verbs.QPCap{MaxSendWR: depth, MaxRecvWR: 2 * depth}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range qps {
			req, err := ln.Next(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			mr := register(t, b, 2*depth*size, verbs.LocalWrite)
			var recv []verbs.RecvWR
			for i := range 2 * depth {
				recv = append(recv, verbs.RecvWR{WRID: uint64(i), SGList: mr.SGL(i*size, size)})
			}
			q, err := req.Accept(ctx, transport.ConnParam{Cap: c, Recv: recv})
			if err != nil {
				t.Error(err)
				return
			}
			wg.Go(func() {
				defer mr.Close()
				for n := range count {
					wc, err := q.CQ().Next(ctx)
					if err != nil {
						t.Errorf("receive %d: %v", n, err)
						return
					}
					if got := binary.BigEndian.Uint32(mr.Bytes()[int(wc.WRID)*size:]); int(wc.ByteLen) != size || got != uint32(n) {
						t.Errorf("receive %d: message %d of %d bytes", n, got, wc.ByteLen)
						return
					}
					if err := q.PostRecv(verbs.RecvWR{WRID: wc.WRID, SGList: mr.SGL(int(wc.WRID)*size, size)}); err != nil {
						t.Errorf("receive %d: %v", n, err)
						return
					}
				}
				_ = q.Wait(ctx) // until the sender has seen the last acknowledgement
				_ = q.Close()
			})
		}
	})
	for range qps {
		q, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7480), transport.ConnParam{Cap: c})
		if err != nil {
			t.Fatal(err)
		}
		mr := register(t, a, depth*size, 0)
		wg.Go(func() {
			defer mr.Close()
			defer q.Close()
			done := 0
			for n := 0; done < count; {
				for n < count && n-done < depth {
					off := n % depth * size
					binary.BigEndian.PutUint32(mr.Bytes()[off:], uint32(n))
					if err := q.PostSend(verbs.SendWR{WRID: uint64(n), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: mr.SGL(off, size)}); err != nil {
						t.Errorf("send %d: %v", n, err)
						return
					}
					n++
				}
				wc, err := q.CQ().Next(ctx)
				if err != nil || wc.WRID != uint64(done) {
					t.Errorf("send %d completed as %d: %v", done, wc.WRID, err)
					return
				}
				done++
			}
		})
	}
	wg.Wait()
}

// TestStockBuffers: what a system grants that nobody has tuned must do. 16 queue pairs send
// small and large messages at once into a socket of 212,992 bytes.
func TestStockBuffers(t *testing.T) {
	for _, size := range []int{64, 4096, 20000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			cfg := transport.Config{RecvBuffer: 106496, SendBuffer: 106496} // the kernel doubles what it is asked for
			a, b := open(t, "127.1.7.1", cfg), open(t, "127.1.7.2", cfg)
			count := 500
			if testing.Short() {
				count = 100
			}
			flood(t, a, b, 16, count, size)
			n := a.Counters()
			t.Logf("%d packets, %d sent again, %d timeouts", n["qp_packets_sent"], n["qp_retransmits"], n["qp_timeouts"])
		})
	}
}

// TestWithoutOffloads: the same without segmentation and receive offload.
func TestWithoutOffloads(t *testing.T) {
	cfg := transport.Config{NoGSO: true, NoGRO: true}
	a, b := open(t, "127.1.8.1", cfg), open(t, "127.1.8.2", cfg)
	flood(t, a, b, 4, 300, 20000)
}

// TestManyPosters: many goroutines post on one queue pair; each goroutine's messages arrive
// in its order, each once.
func TestManyPosters(t *testing.T) {
	a, b := open(t, "127.1.10.1", transport.Config{}), open(t, "127.1.10.2", transport.Config{})
	const posters, each, depth = 8, 500, 64
	c := verbs.QPCap{MaxSendWR: depth, MaxRecvWR: 512}
	bmr := register(t, b, 512*8, verbs.LocalWrite)
	var recv []verbs.RecvWR
	for i := range 512 {
		recv = append(recv, verbs.RecvWR{WRID: uint64(i), SGList: bmr.SGL(i*8, 8)})
	}
	qa, qb := pair(t, a, b, transport.ConnParam{Cap: c}, transport.ConnParam{Cap: c, Recv: recv})
	ctx := deadline(t)
	var wg sync.WaitGroup
	for p := range posters {
		wg.Go(func() {
			for n := range each {
				var msg [8]byte
				binary.BigEndian.PutUint32(msg[:], uint32(p))
				binary.BigEndian.PutUint32(msg[4:], uint32(n))
				for {
					err := qa.PostSend(verbs.SendWR{Opcode: verbs.Send, InlineData: msg[:]})
					if err == nil {
						break
					}
					if !errors.Is(err, transport.ErrQueueFull) || ctx.Err() != nil {
						t.Errorf("poster %d, message %d: %v", p, n, err)
						return
					}
					qa.CQ().Poll(make([]verbs.WC, 1)) // nothing is signaled; it drives the device
				}
			}
		})
	}
	var next [posters]uint32
	for range posters * each {
		wc, err := qb.CQ().Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		msg := bmr.Bytes()[wc.WRID*8:][:8]
		p, n := binary.BigEndian.Uint32(msg), binary.BigEndian.Uint32(msg[4:])
		if p >= posters || next[p] != n {
			t.Fatalf("message %d of poster %d, want %d", n, p, next[p])
		}
		next[p]++
		if err := qb.PostRecv(verbs.RecvWR{WRID: wc.WRID, SGList: bmr.SGL(int(wc.WRID)*8, 8)}); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

// TestOpeningRace: many connections open at once over real sockets; the client's request and
// the server's greeting, posted in RTR, cross; everything arrives exactly once.
func TestOpeningRace(t *testing.T) {
	a, b := open(t, "127.1.11.1", transport.Config{}), open(t, "127.1.11.2", transport.Config{})
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	total, workers := 600, 20
	if testing.Short() {
		total = 100
	}
	small := verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range total {
			req, err := ln.Next(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			wg.Go(func() { serveOne(ctx, t, b, req, small) })
		}
	})
	var left atomic.Int64
	left.Store(int64(total))
	for range workers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				dialOne(ctx, t, a, b, small)
			}
		})
	}
	wg.Wait()
	n := b.Counters()
	t.Logf("%d deferred, %d published, COMM_EST %d", n["qp_deferred"], n["qp_publications"], n["qp_comm_est"])
}

func serveOne(ctx context.Context, t *testing.T, b *transport.Device, req *transport.ConnRequest, c verbs.QPCap) {
	mr := register(t, b, 64, verbs.LocalWrite)
	defer mr.Close()
	q, err := req.Accept(ctx, transport.ConnParam{Cap: c, Recv: []verbs.RecvWR{{SGList: mr.SGL(0, 32)}}})
	if err != nil {
		t.Error(err)
		return
	}
	defer q.Close()
	if err := q.PostSend(verbs.SendWR{Opcode: verbs.Send, InlineData: []byte("greeting")}); err != nil {
		t.Errorf("post in %v: %v", q.State(), err)
	}
	wc, err := q.CQ().Next(ctx)
	if err != nil || string(mr.Bytes()[:wc.ByteLen]) != "request" {
		t.Errorf("request: %+v, %v", wc, err)
	}
	if s := q.State(); s != verbs.QPRTS && s != verbs.QPErr {
		t.Errorf("the request can be seen and the queue pair is in %v", s)
	}
	_ = q.Wait(ctx)
}

func dialOne(ctx context.Context, t *testing.T, a, b *transport.Device, c verbs.QPCap) {
	mr := register(t, a, 64, verbs.LocalWrite)
	defer mr.Close()
	q, err := a.Dial(ctx, netip.AddrPortFrom(b.LocalAddr().Addr(), 7471), transport.ConnParam{
		Cap: c, Recv: []verbs.RecvWR{{WRID: 1, SGList: mr.SGL(0, 32)}, {WRID: 2, SGList: mr.SGL(32, 32)}},
	})
	if err != nil {
		t.Error(err)
		return
	}
	defer q.Close()
	if err := q.PostSend(verbs.SendWR{WRID: 3, Opcode: verbs.Send, Flags: verbs.Signaled, InlineData: []byte("request")}); err != nil {
		t.Error(err)
	}
	var greeted, sent int
	for greeted == 0 || sent == 0 {
		wc, err := q.CQ().Next(ctx)
		switch {
		case err != nil:
			t.Errorf("%+v: %v", wc, err)
			return
		case wc.Opcode == verbs.WCSend:
			sent++
		case wc.WRID == 1 && string(mr.Bytes()[:wc.ByteLen]) == "greeting":
			greeted++
		default:
			t.Errorf("received %+v", wc)
		}
	}
	if greeted != 1 || sent != 1 {
		t.Errorf("%d greetings, %d sends", greeted, sent)
	}
}

// TestPeerKilled: a device that vanishes without a word is noticed within the retry budget.
func TestPeerKilled(t *testing.T) {
	a, b := open(t, "127.1.12.1", transport.Config{}), open(t, "127.1.12.2", transport.Config{})
	qa, _ := pair(t, a, b, transport.ConnParam{AckTimeout: 8 * time.Millisecond, RetryCnt: 3}, transport.ConnParam{})
	transport.Kill(b)
	if err := qa.PostSend(verbs.SendWR{WRID: 1, Opcode: verbs.Send, InlineData: []byte("anybody?")}); err != nil {
		t.Fatal(err)
	}
	ctx := deadline(t)
	if wc, err := qa.CQ().Next(ctx); !errors.Is(err, verbs.RetryExcErr) || wc.WRID != 1 {
		t.Errorf("got %+v, %v", wc, err)
	}
	if err := qa.Wait(ctx); err != nil {
		t.Errorf("the connection ended with %v", err)
	}
}
