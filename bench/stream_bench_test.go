package bench

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Streams beside what they are made of (RDMA WRITEs of the same size; the SENDs of
// BenchmarkRoundTrip64) and beside Go's TCP with the same calls, in one run.

// streamConns connects two devices of this process by a stream.
func streamConns(b *testing.B, client, server string) (net.Conn, net.Conn) {
	b.Helper()
	devA, devB := open(b, client, transport.Config{}), open(b, server, transport.Config{})
	ln, err := devB.ListenStream(netip.AddrPortFrom(netip.Addr{}, servicePort))
	if err != nil {
		b.Fatal(err)
	}
	return connect(b, ln, func() (net.Conn, error) {
		return devA.DialStream(deadline(b), netip.AddrPortFrom(devB.LocalAddr().Addr(), servicePort))
	})
}

func tcpConns(b *testing.B, server string) (net.Conn, net.Conn) {
	b.Helper()
	ln, err := net.Listen("tcp", server+":0")
	if err != nil {
		b.Fatal(err)
	}
	return connect(b, ln, func() (net.Conn, error) { return net.Dial("tcp", ln.Addr().String()) })
}

func connect(b *testing.B, ln net.Listener, dial func() (net.Conn, error)) (ca, cb net.Conn) {
	b.Helper()
	defer ln.Close()
	accepted := make(chan error, 1)
	go func() {
		var err error
		cb, err = ln.Accept()
		accepted <- err
	}()
	ca, err := dial()
	if err != nil {
		b.Fatal(err)
	}
	if err := <-accepted; err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ca.Close(); cb.Close() })
	return ca, cb
}

// connPingPong is the round trip of n bytes.
func connPingPong(b *testing.B, ca, cb net.Conn, n int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, n)
		for {
			if _, err := io.ReadFull(cb, buf); err != nil {
				return
			}
			if _, err := cb.Write(buf); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, n)
	turn := func() {
		if _, err := ca.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(ca, buf); err != nil {
			b.Fatal(err)
		}
	}
	for range 1000 {
		turn()
	}
	b.ReportAllocs()
	for b.Loop() {
		turn()
	}
	b.StopTimer()
	ca.Close()
	<-done
}

// connBulk is one-way traffic in writes of n bytes, until the last one is read.
func connBulk(b *testing.B, ca, cb net.Conn, n int) {
	done := make(chan int64, 1)
	go func() {
		var total int64
		buf := make([]byte, n)
		for {
			k, err := cb.Read(buf)
			total += int64(k)
			if err != nil {
				done <- total
				return
			}
		}
	}()
	buf := make([]byte, n)
	want := int64(0)
	write := func() {
		k, err := ca.Write(buf)
		if err != nil {
			b.Fatal(err)
		}
		want += int64(k)
	}
	for range max(8<<20/n, 1) {
		write()
	}
	b.SetBytes(int64(n))
	b.ReportAllocs()
	for b.Loop() {
		write()
	}
	b.StopTimer()
	ca.Close()
	if got := <-done; got != want {
		b.Errorf("%d of %d bytes arrived", got, want)
	}
}

// BenchmarkStreamPingPong64 is the round trip of 64 bytes over a stream.
func BenchmarkStreamPingPong64(b *testing.B) {
	ca, cb := streamConns(b, "127.3.45.1", "127.3.45.2")
	connPingPong(b, ca, cb, 64)
}

// BenchmarkTCPPingPong64 is the round trip of 64 bytes over Go's TCP.
func BenchmarkTCPPingPong64(b *testing.B) {
	ca, cb := tcpConns(b, "127.3.45.3")
	connPingPong(b, ca, cb, 64)
}

// BenchmarkStreamWrite64K is bulk data over a stream in writes of 64 KiB.
func BenchmarkStreamWrite64K(b *testing.B) {
	ca, cb := streamConns(b, "127.3.46.1", "127.3.46.2")
	connBulk(b, ca, cb, 64<<10)
}

// BenchmarkStreamWrite64 is bulk data over a stream in writes of 64 bytes.
func BenchmarkStreamWrite64(b *testing.B) {
	ca, cb := streamConns(b, "127.3.46.4", "127.3.46.5")
	connBulk(b, ca, cb, 64)
}

// BenchmarkTCPWrite64K is bulk data over Go's TCP in writes of 64 KiB.
func BenchmarkTCPWrite64K(b *testing.B) {
	ca, cb := tcpConns(b, "127.3.46.3")
	connBulk(b, ca, cb, 64<<10)
}

// BenchmarkTCPWrite64 is bulk data over Go's TCP in writes of 64 bytes.
func BenchmarkTCPWrite64(b *testing.B) {
	ca, cb := tcpConns(b, "127.3.46.6")
	connBulk(b, ca, cb, 64)
}

// BenchmarkRDMAWrite64K is bulk data in RDMA WRITEs of 64 KiB, 16 under way, as write_bw
// does: the passive side's program does nothing.
func BenchmarkRDMAWrite64K(b *testing.B) {
	const size, depth = 64 << 10, 16
	qa, qb := benchPair(b, "127.3.47.1", "127.3.47.2", func(*transport.Device) transport.ConnParam { return transport.ConnParam{} })
	src := benchMR(b, qa, size)
	dst, err := qb.PD().RegisterMR(make([]byte, size), verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		b.Fatal(err)
	}
	to := dst.Remote()
	wr := verbs.SendWR{Opcode: verbs.RDMAWrite, Flags: verbs.Signaled, SGList: src.SGL(0, size), RemoteAddr: to.Addr, RKey: to.RKey}
	wcs := make([]verbs.WC, depth)
	free := depth
	write := func() {
		for free == 0 {
			n := qa.CQ().Poll(wcs)
			for i := range wcs[:n] {
				if err := wcs[i].Err(); err != nil {
					b.Fatal(err)
				}
			}
			free += n
		}
		if err := qa.PostSend(wr); err != nil {
			b.Fatal(err)
		}
		free--
	}
	for range 128 {
		write()
	}
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		write()
	}
}
