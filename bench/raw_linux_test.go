package bench

import (
	"runtime"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawSocket is a UDP socket without a transport: the least that a round trip can cost here.
type rawSocket struct {
	fd   int
	addr unix.RawSockaddrInet4 // the peer's
	buf  [128]byte
}

func newRawSocket(b *testing.B, last byte) *rawSocket {
	b.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: 4791, Addr: [4]byte{127, 3, 44, last}})
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Close(fd) })
	s := &rawSocket{fd: fd}
	s.addr.Family = unix.AF_INET
	s.addr.Addr = [4]byte{127, 3, 44, 3 - last}
	p := (*[2]byte)(unsafe.Pointer(&s.addr.Port)) // big-endian in memory
	p[0], p[1] = 4791>>8, 4791&0xFF
	return s
}

func (s *rawSocket) send(n int) bool {
	_, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(&s.buf)), uintptr(n), 0,
		uintptr(unsafe.Pointer(&s.addr)), unsafe.Sizeof(s.addr))
	return e == 0
}

//go:noinline
func safepoint() {}

// recv spins until a datagram comes; false when stop is set first.
func (s *rawSocket) recv(stop *atomic.Bool) bool {
	for {
		_, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(s.fd), uintptr(unsafe.Pointer(&s.buf)), unsafe.Sizeof(s.buf), 0, 0, 0)
		if e == 0 {
			return true
		}
		if e != unix.EAGAIN && e != unix.EINTR || stop.Load() {
			return false
		}
		safepoint() // lets the garbage collector stop us
	}
}

// BenchmarkRawUDPPingPong is the floor of BenchmarkRoundTrip64: as many bytes as its packets
// have, back and forth between two sockets and two spinning threads, and nothing else.
func BenchmarkRawUDPPingPong(b *testing.B) {
	const packet = 12 + 64 + 4 // BTH, payload, ICRC
	here, there := newRawSocket(b, 1), newRawSocket(b, 2)
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for there.recv(&stop) && there.send(packet) {
		}
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.ReportAllocs()
	for b.Loop() {
		if !here.send(packet) || !here.recv(&stop) {
			b.Fatal("the socket failed")
		}
	}
	stop.Store(true)
	<-done
}
