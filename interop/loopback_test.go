//go:build !interop

package interop

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doorbell-rdma/doorbell/transport"
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

func TestRping(t *testing.T) {
	a, b := pair(t)
	ln, addr := listen(t, b, RpingPort)
	for _, size := range []int{23, 100, 5000, 65535} {
		const count = 3
		pings := 0
		converse(t, func(ctx context.Context) error {
			return RpingClient(ctx, a, addr, Rping{Size: size, Count: count})
		}, func(ctx context.Context) (err error) {
			pings, err = RpingServer(ctx, b, ln, Rping{Size: size})
			return err
		})
		if pings != count {
			t.Errorf("size %d: served %d pings, want %d", size, pings, count)
		}
	}
}
