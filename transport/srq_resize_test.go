package transport_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestResizeSRQ: a queue is resized again and again while connections take receives from it and the
// program posts them anew. Every message arrives, once and in its connection's order, and at
// the end as many receives are there as there were.
func TestResizeSRQ(t *testing.T) {
	const conns, recvs = 3, 12
	each := 400
	if testing.Short() {
		each = 100
	}
	a, b := open(t, "127.1.24.7", transport.Config{}), open(t, "127.1.24.8", transport.Config{})
	ctx := deadline(t)
	amr, bmr := register(t, a, 64, 0), register(t, b, recvs*64, verbs.LocalWrite)
	srq := createSRQ(t, b.PD(), transport.SRQConfig{MaxWR: 16})
	cq := createCQ(t, b, 256)
	conn := map[verbs.QPN]int{}
	var qas []*transport.QP
	for i := range conns {
		qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{SRQ: srq, RecvCQ: cq})
		qas = append(qas, qa)
		conn[qb.Num()] = i
	}
	post := func(id uint64) {
		if err := srq.PostRecv(verbs.RecvWR{WRID: id, SGList: bmr.SGL(int(id)*64, 64)}); err != nil {
			t.Error(err)
		}
	}
	for i := range uint64(recvs) {
		post(i)
	}
	done := make(chan struct{})
	var helpers sync.WaitGroup
	helpers.Go(func() {
		for size := 16; ; size = 16 + 512 - size { // 16, 512
			select {
			case <-done:
				return
			default:
			}
			if err := srq.Resize(size); err != nil && !errors.Is(err, transport.ErrInUse) {
				t.Errorf("resize to %d: %v", size, err)
				return
			}
		}
	})
	for _, qa := range qas {
		helpers.Go(func() {
			for i := range each {
				wr := verbs.SendWR{Opcode: verbs.SendWithImm, Flags: verbs.Signaled, ImmData: uint32(i), SGList: amr.SGL(0, 64)}
				if err := qa.PostSend(wr); err != nil {
					t.Error(err)
					return
				}
				if wc, err := qa.SendCQ().Next(ctx); err != nil || wc.Status != verbs.WCSuccess {
					t.Errorf("message %d: %v, %v", i, wc.Status, err)
					return
				}
			}
		})
	}
	var next [conns]uint32
	for range conns * each {
		wc, err := cq.Next(ctx)
		if err != nil {
			t.Error(err)
			break
		}
		i := conn[wc.QPN]
		if wc.Status != verbs.WCSuccess || wc.ImmData != next[i] {
			t.Errorf("connection %d: %v, message %d, want %d", i, wc.Status, wc.ImmData, next[i])
			break
		}
		next[i]++
		post(wc.WRID)
	}
	close(done)
	helpers.Wait()
	if n := srq.Len(); n != recvs {
		t.Errorf("%d receives left, want %d", n, recvs)
	}
}

// What Resize refuses, with which errors, and that a refusal changes nothing.
func TestResizeSRQErrors(t *testing.T) {
	dev := open(t, "127.1.24.9", transport.Config{})
	srq := createSRQ(t, dev.PD(), transport.SRQConfig{MaxWR: 16})
	if n, err := srq.PostRecvList(make([]verbs.RecvWR, 9)); n != 9 || err != nil {
		t.Fatal(n, err)
	}
	attr := dev.Attr()
	if err := srq.SetLimit(9); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		maxWR int
		want  error
	}{{0, verbs.ErrBadAttr}, {attr.MaxSRQWR + 1, verbs.ErrBadAttr}, {8, verbs.ErrBadAttr}} {
		if err := srq.Resize(tc.maxWR); !errors.Is(err, tc.want) || srq.Cap() != 16 {
			t.Errorf("%d with a limit of 9: %v, capacity %d", tc.maxWR, err, srq.Cap())
		}
	}
	if err := srq.SetLimit(0); err != nil {
		t.Fatal(err)
	}
	if err := srq.Resize(8); !errors.Is(err, transport.ErrQueueFull) || srq.Cap() != 16 {
		t.Errorf("less than is posted: %v, capacity %d", err, srq.Cap())
	}
	if err := srq.Resize(attr.MaxSRQWR); err != nil || srq.Cap() != attr.MaxSRQWR || srq.Len() != 9 {
		t.Errorf("the largest: %v, capacity %d, %d receives", err, srq.Cap(), srq.Len())
	}
	if err := srq.SetLimit(4096); err != nil { // it has room for them now; fewer are left already
		t.Error(err)
	}
	if ev := event(t, dev, verbs.EventSRQLimitReached); ev.SRQN != srq.Num() {
		t.Errorf("event %+v", ev)
	}
	var err error
	for i := 0; err == nil && i < 100; i++ {
		err = srq.Resize(16 << (i % 2))
	}
	if !errors.Is(err, transport.ErrInUse) {
		t.Errorf("resized for ever without a receive being taken: %v", err)
	}
	if err := srq.Close(); err != nil {
		t.Fatal(err)
	}
	if err := srq.Resize(32); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
