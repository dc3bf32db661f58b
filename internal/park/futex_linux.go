//go:build !doorbellportable

package park

import (
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operations of futex(2), from linux/futex.h. All futexes here are private to the process.
const (
	futexWaitPrivate = 0 | 128
	futexWakePrivate = 1 | 128
)

// futexWait sleeps while *word is val, at most for timeout, or without end when that is
// negative. It may return early for any reason (a signal, a wake-up meant for an earlier
// sleep): the caller looks at the word and its clock and calls again.
//
// It uses Syscall6, never RawSyscall6: a raw call would hold the processor (P) while it
// sleeps, and a process with as many sleepers as processors would stand still.
func futexWait(word *atomic.Uint32, val uint32, timeout time.Duration) {
	// The conversions to uintptr in the call keep word and ts alive and in place.
	if timeout < 0 {
		unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWaitPrivate, uintptr(val), 0, 0, 0)
		return
	}
	// The old futex call takes 32-bit seconds on 32-bit machines; returning early is allowed.
	ts := unix.NsecToTimespec(int64(min(timeout, time.Hour)))
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWaitPrivate, uintptr(val),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// futexWake wakes all who sleep on word. It cannot block, so the raw call is safe, and
// cheaper.
func futexWake(word *atomic.Uint32) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWakePrivate, math.MaxInt32, 0, 0, 0)
}
