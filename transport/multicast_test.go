package transport_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// TestMulticastGroup: one message over the loopback interface reaches every queue pair that is
// attached, on the sender's device too, and none that has left.
func TestMulticastGroup(t *testing.T) {
	for _, tc := range []struct{ name, bind, group, send, local string }{
		{"IPv4", "0.0.0.0:4881", "239.255.77.1", "239.255.77.1", "127.1.35.1"},
		{"IPv4 on a dual socket", "[::]:4882", "239.255.77.2", "239.255.77.2", "127.1.35.1"},
		{"IPv6", "[::]:4883", "ff01::77:3", "ff01::77:3%lo", "::1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, _, err := udp.Route(netip.MustParseAddr(tc.send)); err != nil && strings.Contains(tc.send, ":") {
				t.Skip("this host has no route for IPv6 multicast on the loopback interface")
			}
			dev := open(t, tc.bind, transport.Config{})
			ctx := deadline(t)
			group, local := netip.MustParseAddr(tc.group), netip.MustParseAddr(tc.local)
			mr := register(t, dev, 8192, verbs.LocalWrite)
			var qs []*transport.QP
			for i := range 3 {
				q := datagrams(t, dev)
				for k := range 4 {
					if err := q.PostRecv(verbs.RecvWR{WRID: uint64(k), SGList: mr.SGL((4*i+k)*256, 256)}); err != nil {
						t.Fatal(err)
					}
				}
				qs = append(qs, q)
			}
			for _, q := range qs[:2] {
				for range 2 {
					if err := q.AttachMulticast(group, local); err != nil {
						t.Fatal(err)
					}
				}
			}
			ah, err := dev.PD().CreateAH(verbs.AV{Remote: netip.AddrPortFrom(netip.MustParseAddr(tc.send), dev.LocalAddr().Port()), Local: local})
			if err != nil {
				t.Fatal(err)
			}
			copy(mr.Bytes()[4096:], "to all")
			send := func() {
				want(t, "send", post(t, qs[2], verbs.SendWR{
					Opcode: verbs.Send, SGList: mr.SGL(4096, 6), AH: ah.Handle(), RemoteQPN: verbs.QPNMulticast, RemoteQKey: qkey,
				}), verbs.WCSuccess)
			}
			arrives := func(i int, id uint64) {
				t.Helper()
				wc, err := qs[i].CQ().Next(ctx)
				if err != nil || wc.WRID != id || wc.SrcQPN != qs[2].Num() || string(mr.Bytes()[(4*i+int(id))*256+40:][:6]) != "to all" {
					t.Fatalf("to %d: %+v, %v", i, wc, err)
				}
				av, err := transport.AVFromWC(&wc, mr.Bytes()[(4*i+int(id))*256:])
				if err != nil || av.Remote.Addr() != local || av.Local.IsValid() {
					t.Errorf("to %d: came from %+v, %v", i, av, err)
				}
			}
			send()
			arrives(0, 0)
			arrives(1, 0)
			if err := qs[0].DetachMulticast(group, local); err != nil {
				t.Fatal(err)
			}
			send()
			arrives(1, 1)
			if err := errors.Join(qs[1].Close(), qs[0].AttachMulticast(group, local)); err != nil {
				t.Fatal(err)
			}
			send()
			arrives(0, 1)
			if n := qs[0].CQ().Len() + qs[1].CQ().Len() + qs[2].CQ().Len(); n != 0 {
				t.Errorf("%d completions too many", n)
			}
			if err := qs[1].AttachMulticast(group, local); !errors.Is(err, transport.ErrClosed) {
				t.Errorf("attach a closed queue pair: %v", err)
			}
			if err := qs[2].DetachMulticast(group, local); !errors.Is(err, verbs.ErrBadAttr) {
				t.Errorf("detach what is not attached: %v", err)
			}
			if err := qs[0].Close(); err != nil {
				t.Fatal(err)
			}
			if n := transport.Groups(dev); n != 0 {
				t.Errorf("the device is in %d groups in the end", n)
			}
		})
	}
	dev := open(t, "127.1.35.2", transport.Config{})
	if err := datagrams(t, dev).AttachMulticast(netip.MustParseAddr("239.255.77.1"), dev.LocalAddr().Addr()); err == nil || !strings.Contains(err.Error(), "bind all addresses") {
		t.Errorf("on a device with one address: %v", err)
	}
}
