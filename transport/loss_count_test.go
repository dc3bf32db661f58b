package transport_test

import (
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestDatagramLossIsCounted: UD has no acknowledgements, so a receiver that is slower than the
// sender loses datagrams, here as with any other device. The counters say how many, and which of
// the two ways to lose them it was: no receive was posted, or the socket's buffer was full
// because nobody took from it.
func TestDatagramLossIsCounted(t *testing.T) {
	if !udp.Direct {
		t.Skip("the portable socket path does not hear of the system's drops")
	}
	const size, posted, many = 1000, 40, 2000
	a := open(t, "127.1.30.31", transport.Config{})
	b := open(t, "127.1.30.32", transport.Config{RecvBuffer: 64 << 10})
	qa, qb := datagrams(t, a), datagrams(t, b)
	amr, bmr := register(t, a, size, 0), register(t, b, size+40, verbs.LocalWrite)
	ah, err := a.PD().CreateAH(verbs.AV{Remote: netip.AddrPortFrom(b.LocalAddr().Addr(), b.LocalAddr().Port())})
	if err != nil {
		t.Fatal(err)
	}
	wr := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: amr.SGL(0, size), AH: ah.Handle(), RemoteQPN: qb.Num(), RemoteQKey: qkey}
	ctx, sent := deadline(t), uint64(0)
	send := func(n int) {
		t.Helper()
		for range n {
			sent++
			if err := qa.PostSend(wr); err != nil {
				t.Fatal(err)
			}
			if wc, err := qa.SendCQ().Next(ctx); err != nil || wc.Status != verbs.WCSuccess {
				t.Fatalf("%v, %v", wc.Status, err)
			}
		}
	}
	for i := range posted {
		if err := qb.PostRecv(verbs.RecvWR{WRID: uint64(i), SGList: bmr.SGL(0, size+40)}); err != nil {
			t.Fatal(err)
		}
	}
	release := transport.HoldWires(b)
	send(many)
	release()
	// The system tells of its drops with the next datagram that it does not drop.
	var received, overflow uint64
	waitFor(t, func() bool {
		c := b.Counters()
		received, overflow = c["wire_datagrams_in"], c["udp_rx_dropped"]
		if received+overflow == sent && overflow > 0 {
			return true
		}
		send(1)
		return false
	})
	wcs := make([]verbs.WC, 2*posted)
	got := qb.CQ().Poll(wcs)
	for _, wc := range wcs[:got] {
		if wc.Status != verbs.WCSuccess || wc.ByteLen != size+40 {
			t.Errorf("%+v", wc)
		}
	}
	if n := b.Counters()["qp_dropped_no_recv"]; got != posted || n != received-posted {
		t.Errorf("%d messages for %d receives; of %d datagrams that came %d found no receive", got, posted, received, n)
	}
	if qb.State() != verbs.QPRTS {
		t.Errorf("state %v", qb.State())
	}
}
