package transport_test

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestUDService: a service is found by its port, and what was found is enough to send to it.
func TestUDService(t *testing.T) {
	for _, tc := range []struct{ name, a, b, to string }{
		{"IPv4", "127.1.36.1", "127.1.36.2", "127.1.36.2"},
		{"IPv6", "[::1]:4891", "[::1]:4892", "::1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := open(t, tc.a, transport.Config{ConnectTimeout: time.Minute}), open(t, tc.b, transport.Config{})
			ctx := deadline(t)
			qa, qb := datagrams(t, a), datagrams(t, b)
			amr, bmr := register(t, a, 64, 0), register(t, b, 256, verbs.LocalWrite)
			server, err := b.ServeUD(7174, qb, []byte("welcome"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.ServeUD(7174, qb, nil); !errors.Is(err, transport.ErrInUse) {
				t.Errorf("served twice: %v", err)
			}
			to := netip.AddrPortFrom(netip.MustParseAddr(tc.to), 7174)
			p := transport.ResolveParam{RemotePort: b.LocalAddr().Port(), PrivateData: []byte("hello")}
			s, err := a.ResolveUD(ctx, to, p)
			if err != nil || s.QPN != qb.Num() || s.QKey != qkey || !strings.HasPrefix(string(s.PrivateData), "welcome\x00") {
				t.Fatalf("found %+v, %v", s, err)
			}
			if err := qb.PostRecv(verbs.RecvWR{WRID: 5, SGList: bmr.SGL(0, 256)}); err != nil {
				t.Fatal(err)
			}
			ah, err := a.PD().CreateAH(s.AV)
			if err != nil {
				t.Fatal(err)
			}
			want(t, "send", post(t, qa, verbs.SendWR{Opcode: verbs.Send, SGList: amr.SGL(0, 9), AH: ah.Handle(), RemoteQPN: s.QPN, RemoteQKey: s.QKey}), verbs.WCSuccess)
			if wc, err := qb.CQ().Next(ctx); err != nil || wc.WRID != 5 || wc.ByteLen != transport.GRHLen+9 {
				t.Errorf("received %+v, %v", wc, err)
			}
			var refused *transport.SIDRError
			if _, err := a.ResolveUD(ctx, netip.AddrPortFrom(to.Addr(), 7175), p); !errors.As(err, &refused) || refused.Status != roce.SIDRUnsupported {
				t.Errorf("another port: %v", err)
			}
			if err := server.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := a.ResolveUD(ctx, to, p); !errors.As(err, &refused) {
				t.Errorf("after Close: %v", err)
			}
			if err := server.Close(); !errors.Is(err, transport.ErrClosed) {
				t.Errorf("closed twice: %v", err)
			}
		})
	}
}

// TestUDServiceErrors: nobody there, too much to say, wrong queue pairs, and ends of the wait.
func TestUDServiceErrors(t *testing.T) {
	a, b := open(t, "127.1.37.1", transport.Config{ConnectTimeout: 30 * time.Millisecond}), open(t, "127.1.37.2", transport.Config{ConnectTimeout: time.Hour})
	ctx := deadline(t)
	nobody := netip.MustParseAddrPort("127.1.37.9:7174")
	if _, err := a.ResolveUD(ctx, nobody, transport.ResolveParam{}); !errors.Is(err, transport.ErrUnreachable) {
		t.Errorf("nobody there: %v", err)
	}
	if _, err := a.ResolveUD(ctx, nobody, transport.ResolveParam{PrivateData: make([]byte, 181)}); !errors.Is(err, transport.ErrPrivateData) {
		t.Errorf("too much private data: %v", err)
	}
	for _, to := range []string{"127.1.37.2:0", "0.0.0.0:7174", "[::1]:7174"} {
		if _, err := a.ResolveUD(ctx, netip.MustParseAddrPort(to), transport.ResolveParam{}); err == nil {
			t.Errorf("%s was resolved", to)
		}
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := b.ResolveUD(short, nobody, transport.ResolveParam{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the context ended: %v", err)
	}
	q := datagrams(t, b)
	if _, err := b.ServeUD(0, q, nil); err == nil {
		t.Error("port 0 was served")
	}
	if _, err := b.ServeUD(7174, q, make([]byte, 137)); !errors.Is(err, transport.ErrPrivateData) {
		t.Errorf("too much private data: %v", err)
	}
	cq, err := b.CreateCQ(8)
	if err != nil {
		t.Fatal(err)
	}
	rc, err := b.PD().CreateQP(transport.QPConfig{SendCQ: cq, RecvCQ: cq})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.ServeUD(7174, rc, nil); err == nil {
		t.Error("an RC queue pair serves datagrams")
	}
	done := make(chan error, 1)
	before := b.Counters()["wire_datagrams_out"]
	go func() {
		_, err := b.ResolveUD(ctx, nobody, transport.ResolveParam{})
		done <- err
	}()
	for b.Counters()["wire_datagrams_out"] == before {
		runtime.Gosched() // until it has asked
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, transport.ErrClosed) {
		t.Errorf("the device was closed: %v", err)
	}
}
