//go:build !doorbellportable

package park

import (
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// epollSleeper sleeps as a wire's thread does: in an edge-triggered epoll, never reading.
type epollSleeper struct {
	*Kicker
	epfd int
}

func newEpollSleeper(t *testing.T) *epollSleeper {
	t.Helper()
	k := newKicker(t)
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(epfd) })
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(k.FD())}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, k.FD(), &ev); err != nil {
		t.Fatal(err)
	}
	return &epollSleeper{k, epfd}
}

// sleep returns false when nothing came for ms milliseconds.
func (s *epollSleeper) sleep(t *testing.T, ms int) bool {
	var ev [4]unix.EpollEvent
	for {
		switch n, err := unix.EpollWait(s.epfd, ev[:], ms); {
		case err == unix.EINTR:
		case err != nil:
			t.Error(err)
			return false
		default:
			s.Disarm()
			return n > 0
		}
	}
}

func TestKickerEpollLosesNothing(t *testing.T) {
	withProcs(t, func(t *testing.T) {
		s := newEpollSleeper(t)
		oneWakeRounds(t, runtime.LockOSThread, func(ready func() bool) bool {
			for !ready() {
				s.Arm()
				if ready() {
					s.Disarm()
					return true
				}
				if !s.sleep(t, int(hung.Milliseconds())) {
					return false
				}
			}
			return true
		}, func() { s.Kick() })
	})
}

// TestKickerCostsNothingAwake: kicks of a sleeper who is awake make no system call, many
// kicks of one sleep make one.
func TestKickerCostsNothingAwake(t *testing.T) {
	s := newEpollSleeper(t)
	if s.Kick() {
		t.Error("a kick of one who is awake made a system call")
	}
	s.Arm()
	if !s.Kick() || s.Kick() || s.Kick() {
		t.Error("three kicks of one sleep made other than one system call")
	}
	if !s.sleep(t, 1000) {
		t.Error("no event")
	}
	s.Arm()
	if s.sleep(t, 1) {
		t.Error("one kick, two events")
	}
	s.Arm()
	s.Kick()
	if !s.Disarm() {
		t.Error("Disarm does not say that there was a kick")
	}
}

// TestKickerCloseWaits: Close waits for a kick that has decided to write and is held up.
func TestKickerCloseWaits(t *testing.T) {
	k, err := NewKicker()
	if err != nil {
		t.Fatal(err)
	}
	k.inflight.Add(1) // the first half of Kick
	closed := make(chan error)
	go func() { closed <- k.Close() }()
	for range 1000 {
		select {
		case err := <-closed:
			t.Fatalf("closed under a kick (%v)", err)
		default:
			runtime.Gosched()
		}
	}
	k.inflight.Add(-1)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestKickerClose: a kick that races with Close writes to the kicker or to nothing, never to
// the file that gets the number next.
func TestKickerClose(t *testing.T) {
	for range 300 {
		k, err := NewKicker()
		if err != nil {
			t.Fatal(err)
		}
		fd := k.FD()
		var wg sync.WaitGroup
		var stop atomic.Bool
		for range 2 {
			wg.Go(func() {
				for !stop.Load() {
					k.Kick()
				}
			})
		}
		k.Arm()
		for range rand.N(200) {
			Pause()
		}
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
		// The number is free, and this takes it.
		next, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		stop.Store(true)
		wg.Wait()
		var buf [8]byte
		if _, err := unix.Read(next, buf[:]); err != unix.EAGAIN {
			t.Errorf("a kick was written to descriptor %d after Close of %d (read: %v)", next, fd, err)
		}
		unix.Close(next)
		if err := k.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("second Close: %v", err)
		}
	}
}
