//go:build !interop

package interop

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Without Linux at the other end: the counterparts of this package understand each other.
// They could still share a misunderstanding; that is what the tag "interop" is for.

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair opens two devices on loopback addresses of their own.
func pair(t *testing.T) (client, server *transport.Device) {
	t.Helper()
	open := func(addr string) *transport.Device {
		dev, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort(addr)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = dev.Close() })
		return dev
	}
	return open("127.77.0.1:4791"), open("127.77.0.2:4791")
}

// converse runs both ends at once and reports the errors of both.
func converse(t *testing.T, client, server func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error)
	go func() { done <- server(ctx) }()
	if err := client(ctx); err != nil {
		t.Errorf("client: %v", err)
		cancel()
	}
	if err := <-done; err != nil {
		t.Errorf("server: %v", err)
	}
}

func listen(t *testing.T, dev *transport.Device, port uint16) (*transport.Listener, netip.AddrPort) {
	t.Helper()
	addr := netip.AddrPortFrom(dev.LocalAddr().Addr(), port)
	ln, err := dev.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln, addr
}

func TestRDMAClient(t *testing.T) {
	a, b := pair(t)
	ln, addr := listen(t, b, RDMAPort)
	converse(t, func(ctx context.Context) error {
		return RDMAClient(ctx, a, addr, 0)
	}, func(ctx context.Context) error {
		_, err := RDMAServer(ctx, b, ln, 0)
		return err
	})
}

func TestUcmatose(t *testing.T) {
	a, b := pair(t)
	ln, addr := listen(t, b, RDMAPort)
	for _, o := range []Ucmatose{
		{Connections: 1, Count: 10, Size: 100},
		{Connections: 3, Count: 20, Size: 5000},
		{Connections: 2},
	} {
		converse(t, func(ctx context.Context) error {
			return UcmatoseClient(ctx, a, addr, o)
		}, func(ctx context.Context) error {
			return UcmatoseServer(ctx, b, ln, o)
		})
	}
}

func listenTCP(t *testing.T) (net.Listener, netip.AddrPort) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.77.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln, netip.MustParseAddrPort(ln.Addr().String())
}

func TestPerftest(t *testing.T) {
	a, b := pair(t)
	ln, cmAddr := listen(t, b, PerftestPort)
	tcp, tcpAddr := listenTCP(t)
	for _, test := range []string{"send_bw", "send_lat", "write_bw", "write_lat", "read_bw", "read_lat", "atomic_bw", "atomic_lat"} {
		for _, cm := range []bool{false, true} {
			for _, size := range []int{1, 5000} {
				o := Perftest{Test: test, Size: size, Count: 400, CM: cm, Swap: size == 1}
				addr := tcpAddr
				if cm {
					addr = cmAddr
				}
				t.Run(fmt.Sprintf("%s/cm=%t/size=%d", test, cm, size), func(t *testing.T) {
					converse(t, func(ctx context.Context) error {
						return PerftestClient(ctx, a, addr, o)
					}, func(ctx context.Context) error {
						return PerftestServer(ctx, b, ln, tcp, o)
					})
				})
			}
		}
	}
}

func TestPerftestUnreliable(t *testing.T) {
	a, b := pair(t)
	tcp, addr := listenTCP(t)
	for _, o := range []Perftest{
		{Test: "send_bw", Type: verbs.UC, Size: 5000, Count: 200},
		{Test: "send_lat", Type: verbs.UC, Size: 64, Count: 100},
		{Test: "write_bw", Type: verbs.UC, Size: 5000, Count: 200},
		{Test: "write_lat", Type: verbs.UC, Size: 64, Count: 100},
		{Test: "send_bw", Type: verbs.UD, Size: 1000, Count: 200},
		{Test: "send_lat", Type: verbs.UD, Size: 64, Count: 100},
	} {
		t.Run(fmt.Sprintf("%s/%v", o.Test, o.Type), func(t *testing.T) {
			converse(t, func(ctx context.Context) error {
				return PerftestClient(ctx, a, addr, o)
			}, func(ctx context.Context) error {
				return PerftestServer(ctx, b, nil, tcp, o)
			})
		})
	}
}

func TestUdaddy(t *testing.T) {
	a, b := pair(t)
	o := Udaddy{Count: 10, Size: 100}
	up := make(chan struct{})
	converse(t, func(ctx context.Context) error {
		<-up
		return UdaddyClient(ctx, a, netip.AddrPortFrom(b.LocalAddr().Addr(), UdaddyPort), o)
	}, func(ctx context.Context) error {
		return UdaddyServer(ctx, b, o, up)
	})
}
