package transport_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// post posts a send and returns how it ended, while the peer's device is driven by nobody but
// its own thread.
func post(t *testing.T, q *transport.QP, wr verbs.SendWR) verbs.WCStatus {
	t.Helper()
	wr.Flags |= verbs.Signaled
	if err := q.PostSend(wr); err != nil {
		t.Fatal(err)
	}
	wc, err := q.SendCQ().Next(deadline(t))
	if err != nil && wc.Status == verbs.WCSuccess {
		t.Fatal(err)
	}
	return wc.Status
}

func want(t *testing.T, what string, got, want verbs.WCStatus) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// TestMemoryWindow: a window opens what the region itself does not, to one queue pair, until
// it is taken back by the program, by the peer's SEND with invalidate, or with its queue pair.
func TestMemoryWindow(t *testing.T) {
	a, b := open(t, "127.1.20.1", transport.Config{}), open(t, "127.1.20.2", transport.Config{})
	ctx := deadline(t)
	amr := register(t, a, 64, verbs.LocalWrite)
	bmr := register(t, b, 4096, verbs.LocalWrite|verbs.MWBind)
	mw, err := b.PD().AllocMW()
	if err != nil {
		t.Fatal(err)
	}
	write := func(key uint32, off int) verbs.SendWR {
		return verbs.SendWR{Opcode: verbs.RDMAWrite, RKey: key, RemoteAddr: bmr.Addr() + uint64(off), SGList: amr.SGL(0, 64)}
	}
	bind := func(q *transport.QP) uint32 {
		wr := mw.Bind(bmr, 128, 256, verbs.RemoteWrite)
		want(t, "bind", post(t, q, wr), verbs.WCSuccess)
		if mw.RKey() != wr.RKey {
			t.Fatalf("the window's key is %#x, bound was %#x", mw.RKey(), wr.RKey)
		}
		return wr.RKey
	}
	copy(amr.Bytes(), "through the window")

	// Opened, used, closed by LOCAL_INV.
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	key := bind(qb)
	want(t, "WRITE", post(t, qa, write(key, 128)), verbs.WCSuccess)
	if bmr.Placed() != 1 || string(bmr.Bytes()[128:128+18]) != "through the window" {
		t.Errorf("%d placed, memory holds %q", bmr.Placed(), bmr.Bytes()[128:128+18])
	}
	if err := bmr.Close(); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("close of a bound region: %v", err)
	}
	if err := bmr.Rereg(nil, 0); !errors.Is(err, transport.ErrInUse) {
		t.Errorf("reregister a bound region: %v", err)
	}
	want(t, "LOCAL_INV", post(t, qb, verbs.SendWR{Opcode: verbs.LocalInv, InvalidateRKey: key}), verbs.WCSuccess)
	want(t, "WRITE after LOCAL_INV", post(t, qa, write(key, 128)), verbs.RemAccessErr)

	// Another queue pair of the same domain does not see it; neither does memory outside.
	qa, qb = pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	qa2, _ := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	key = bind(qb)
	want(t, "WRITE on another queue pair", post(t, qa2, write(key, 128)), verbs.RemAccessErr)
	want(t, "WRITE at the window's end", post(t, qa, write(key, 320)), verbs.WCSuccess)
	want(t, "WRITE beyond", post(t, qa, write(key, 321)), verbs.RemAccessErr)
	if err := qb.Close(); err != nil {
		t.Fatal(err)
	}

	// The queue pair's end has closed it: it can be bound again. The peer gives it back.
	qa, qb = pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	key = bind(qb)
	if err := qb.PostRecv(verbs.RecvWR{WRID: 5, SGList: bmr.SGL(0, 64)}); err != nil {
		t.Fatal(err)
	}
	inv := verbs.SendWR{Opcode: verbs.SendWithInv, InvalidateRKey: key, SGList: amr.SGL(0, 64)}
	want(t, "SEND with invalidate", post(t, qa, inv), verbs.WCSuccess)
	wc, err := qb.CQ().Next(ctx)
	if err != nil || wc.WRID != 5 || wc.Flags != verbs.WithInv || wc.InvalidatedRKey != key || wc.ByteLen != 64 {
		t.Errorf("received %+v, %v", wc, err)
	}
	want(t, "WRITE after SEND with invalidate", post(t, qa, write(key, 128)), verbs.RemAccessErr)

	// Closed under the peer.
	qa, qb = pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	key = bind(qb)
	if err := mw.Close(); err != nil {
		t.Fatal(err)
	}
	want(t, "WRITE after Close", post(t, qa, write(key, 128)), verbs.RemAccessErr)
	if err := errors.Join(bmr.Close(), amr.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestBindRefused: what the standard forbids completes with MW_BIND_ERR and ends the queue
// pair; so does the invalidation of what cannot be, here and at the peer (class J: no NAK, the
// peer's SEND runs out of retries or is flushed with the connection).
func TestBindRefused(t *testing.T) {
	a, b := open(t, "127.1.21.1", transport.Config{}), open(t, "127.1.21.2", transport.Config{})
	mr, fixed := register(t, b, 64, verbs.LocalWrite|verbs.MWBind), register(t, b, 64, verbs.LocalWrite|verbs.RemoteWrite)
	pd, err := b.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	mw, err1 := b.PD().AllocMW()
	foreign, err2 := pd.AllocMW()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		wr   verbs.SendWR
	}{
		{"a region without MWBind", mw.Bind(fixed, 0, 64, verbs.RemoteRead)},
		{"a window of another domain", foreign.Bind(mr, 0, 64, verbs.RemoteRead)},
		{"a local right", mw.Bind(mr, 0, 64, verbs.LocalWrite)},
		{"LOCAL_INV of a region", verbs.SendWR{Opcode: verbs.LocalInv, InvalidateRKey: fixed.RKey()}},
		{"LOCAL_INV of nothing", verbs.SendWR{Opcode: verbs.LocalInv, InvalidateRKey: mw.RKey() ^ 0x100}},
	} {
		_, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
		want(t, tc.name, post(t, qb, tc.wr), verbs.MWBindErr)
		if s := qb.State(); s != verbs.QPErr {
			t.Errorf("%s: the queue pair is in %v", tc.name, s)
		}
	}
	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	if err := qb.PostRecv(verbs.RecvWR{WRID: 5}); err != nil {
		t.Fatal(err)
	}
	if st := post(t, qa, verbs.SendWR{Opcode: verbs.SendWithInv, InvalidateRKey: fixed.RKey()}); st == verbs.WCSuccess {
		t.Error("SEND with invalidate of a region succeeded")
	}
	wc, err := qb.CQ().Next(deadline(t))
	if wc.WRID != 5 || !errors.Is(err, verbs.RemInvReqErr) || qb.State() != verbs.QPErr {
		t.Errorf("received %+v, %v in %v", wc, err, qb.State())
	}
}

// F18: deregistration while WRITEs arrive. Once Close has returned the buffer is the
// program's alone, and the race detector watches; the peer hears REM_ACCESS_ERR.
func TestDeregisterUnderWrites(t *testing.T) {
	a, b := open(t, "127.1.22.1", transport.Config{}), open(t, "127.1.22.2", transport.Config{})
	const size = 32 << 10
	amr := register(t, a, size, 0)
	for i := range amr.Bytes() {
		amr.Bytes()[i] = 0xAA
	}
	for i := range 12 {
		qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
		bmr := register(t, b, size, verbs.LocalWrite|verbs.RemoteWrite)
		where := bmr.Remote()
		done := make(chan verbs.WCStatus, 1)
		go func() {
			for {
				for range 4 {
					_ = qa.PostSend(verbs.SendWR{
						Opcode: verbs.RDMAWrite, Flags: verbs.Signaled, RKey: where.RKey, RemoteAddr: where.Addr, SGList: amr.SGL(0, size),
					}) // full or in error: a completion says which
				}
				if wc, err := qa.CQ().Next(t.Context()); err != nil {
					done <- wc.Status
					return
				}
			}
		}()
		for bmr.Placed() < uint64(1+i) {
		}
		var err error
		if i%2 == 0 {
			err = bmr.Close()
		} else {
			err = bmr.Rereg(nil, verbs.LocalWrite)
		}
		if err != nil {
			t.Fatal(err)
		}
		clear(bmr.Bytes())
		want(t, "WRITE into what was closed", <-done, verbs.RemAccessErr)
		for j, x := range bmr.Bytes() {
			if x != 0 {
				t.Fatalf("round %d: byte %d was written after Close", i, j)
			}
		}
		_ = errors.Join(qa.Close(), qb.Close())
	}
}

// TestRereg: a region changes its rights and its domain; posted requests keep the old key and
// fail, new ones work.
func TestRereg(t *testing.T) {
	a, b := open(t, "127.1.23.1", transport.Config{}), open(t, "127.1.23.2", transport.Config{})
	amr, bmr := register(t, a, 64, verbs.LocalWrite), register(t, b, 64, verbs.LocalWrite)
	qa, _ := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{})
	before := bmr.Remote()
	if err := bmr.Rereg(nil, verbs.LocalWrite|verbs.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	now := bmr.Remote()
	if now.Addr != before.Addr || now.RKey == before.RKey || now.RKey>>8 != before.RKey>>8 {
		t.Errorf("from %+v to %+v", before, now)
	}
	write := verbs.SendWR{Opcode: verbs.RDMAWrite, RKey: now.RKey, RemoteAddr: now.Addr, SGList: amr.SGL(0, 64)}
	want(t, "WRITE with the new right", post(t, qa, write), verbs.WCSuccess)
	if err := bmr.Rereg(nil, verbs.RemoteWrite); err == nil {
		t.Error("RemoteWrite without LocalWrite accepted")
	}
	want(t, "WRITE after a refused change", post(t, qa, write), verbs.WCSuccess)
	pd, err := b.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	if err := bmr.Rereg(a.PD(), 0); err == nil {
		t.Error("a domain of another device accepted")
	}
	if err := bmr.Rereg(pd, verbs.LocalWrite|verbs.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	write.RKey = bmr.RKey()
	want(t, "WRITE into another domain", post(t, qa, write), verbs.RemAccessErr)

	qa, qb := pair(t, a, b, transport.ConnParam{}, transport.ConnParam{PD: pd})
	if err := qb.PostRecv(verbs.RecvWR{WRID: 1, SGList: bmr.SGL(0, 64)}); err != nil {
		t.Fatal(err)
	}
	if err := bmr.Rereg(nil, verbs.LocalWrite); err != nil {
		t.Fatal(err)
	}
	if st := post(t, qa, verbs.SendWR{Opcode: verbs.Send, SGList: amr.SGL(0, 64)}); st != verbs.RemOpErr {
		t.Errorf("SEND into a receive with an old key: %v", st)
	}
	if _, err := qb.CQ().Next(deadline(t)); !errors.Is(err, verbs.LocProtErr) {
		t.Errorf("a receive with an old key: %v", err)
	}
	if err := bmr.Close(); err != nil {
		t.Fatal(err)
	}
	if err := bmr.Rereg(nil, 0); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("reregister what is closed: %v", err)
	}
}

// TestMemoryOutlivesSteps: what ends a claim to memory returns when no step that began before
// can still hold it.
func TestMemoryOutlivesSteps(t *testing.T) {
	dev := open(t, "127.1.30.1", transport.Config{})
	mr := register(t, dev, 64, verbs.LocalWrite)
	mw, err := dev.PD().AllocMW()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		end  func() error
	}{
		{"Rereg", func() error { return mr.Rereg(nil, 0) }},
		{"MW.Close", mw.Close},
		{"MR.Close", mr.Close},
	} {
		release := transport.HoldWires(dev)
		var released atomic.Bool
		early := make(chan bool, 1)
		go func() {
			if err := tc.end(); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			early <- !released.Load()
		}()
		select {
		case <-early:
			t.Errorf("%s returned in the middle of a step", tc.name)
			release()
			continue
		case <-time.After(20 * time.Millisecond): // long enough to catch a wrong one
		}
		released.Store(true)
		release()
		if <-early {
			t.Errorf("%s returned before the end of the step", tc.name)
		}
	}
}
