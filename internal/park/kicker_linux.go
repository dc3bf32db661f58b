//go:build !doorbellportable

package park

import (
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/doorbell-rdma/doorbell/internal/yield"
	"golang.org/x/sys/unix"
)

// Kicker wakes a thread that sleeps in epoll, and makes no system call while it is awake.
// Make it with NewKicker.
//
// Arm, Disarm and Sleep belong to the sleeper, Kick to anyone, on any thread.
//
// Put FD into the epoll set once, with EPOLLIN|EPOLLET: edge-triggered, nothing needs to be
// read from it, since every kick is a new edge. A kick that comes at the very end of a sleep
// may leave an edge that ends the next sleep at once; a sleeper looks around when it wakes
// anyway.
type Kicker struct {
	word atomic.Uint32 // awake or armed
	// inflight counts kicks that may be about to write; Close waits for them, or they would
	// write into whatever file gets the descriptor's number next.
	inflight atomic.Int32
	fd       int
}

// NewKicker makes a Kicker that is awake. The error is that of eventfd(2): no descriptors left.
func NewKicker() (*Kicker, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	return &Kicker{fd: fd}, nil
}

// FD returns the descriptor that becomes readable with a kick; -1 where the platform has
// none, and Sleep is the only way to wait.
func (k *Kicker) FD() int { return k.fd }

// Arm announces a sleep: from here on a Kick is noticed. Look for work again after it, then
// sleep in epoll and Disarm, or Disarm, or Sleep.
func (k *Kicker) Arm() {
	k.word.Store(armed)
	yield.Point()
}

// Disarm says that the sleeper is awake. It reports whether there was a Kick since Arm.
func (k *Kicker) Disarm() bool { return k.word.Swap(awake) != armed }

// Kick wakes the sleeper if it has armed. Call it after giving it work. It never blocks,
// costs one load while the sleeper is awake, and reports whether it made the system call.
// After Close it does nothing.
func (k *Kicker) Kick() bool {
	if k.word.Load() != armed {
		return false
	}
	k.inflight.Add(1)
	yield.Point()
	kicked := k.word.Swap(awake) == armed
	if kicked {
		yield.Point()
		one := uint64(1)
		// Cannot block: the descriptor is non-blocking. Cannot fail either: the counter
		// has room for 2^64-2 kicks.
		unix.RawSyscall(unix.SYS_WRITE, uintptr(k.fd), uintptr(unsafe.Pointer(&one)), 8)
	}
	k.inflight.Add(-1)
	return kicked
}

// Sleep sleeps until there was a Kick since Arm, or for timeout: not at all if it is 0,
// without end if it is negative. It reports whether there was a Kick, and disarms. It is for
// sleepers that wait for kicks alone; others sleep in an epoll of their own.
func (k *Kicker) Sleep(timeout time.Duration) bool {
	d := newDeadline(timeout)
	for left := timeout; left != 0 && k.word.Load() == armed; left = d.left() {
		yield.Point()
		k.poll(left)
	}
	return k.Disarm()
}

// poll waits until the descriptor is readable and empties it. It may return early.
func (k *Kicker) poll(timeout time.Duration) {
	fds := [1]unix.PollFd{{Fd: int32(k.fd), Events: unix.POLLIN}}
	var tsp *unix.Timespec
	if timeout >= 0 {
		ts := unix.NsecToTimespec(int64(min(timeout, time.Hour)))
		tsp = &ts
	}
	if n, _ := unix.Ppoll(fds[:], tsp, nil); n > 0 {
		var count uint64
		unix.RawSyscall(unix.SYS_READ, uintptr(k.fd), uintptr(unsafe.Pointer(&count)), 8)
	}
}

// Close gives the descriptor back. The sleeper calls it, or somebody after its last sleep.
// It waits for kicks that are under way, which is a matter of one system call.
func (k *Kicker) Close() error {
	k.word.Store(awake)
	for k.inflight.Load() != 0 {
		runtime.Gosched()
	}
	if k.fd < 0 {
		return os.ErrClosed
	}
	err := unix.Close(k.fd)
	k.fd = -1
	return os.NewSyscallError("close", err)
}
