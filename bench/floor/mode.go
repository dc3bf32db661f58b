package floor

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Mode is how near the two CPUs are to each other.
type Mode string

// The modes of a run: fast or slow when the calibrations before and after it agree.
const (
	Fast    Mode = "fast"
	Slow    Mode = "slow"
	Mixed   Mode = "mixed"
	Unknown Mode = "unknown" // there are no two CPUs to hold threads to
)

// slowFrom is the round trip of a cache line from which two CPUs do not share a cache: 45 to
// 110 ns within one, 250 to 550 ns between two on machines of this time.
const slowFrom = 170 * time.Nanosecond

// ModeOf labels a run by the calibrations before and after it.
func ModeOf(before, after time.Duration) Mode {
	switch {
	case before <= 0 || after <= 0:
		return Unknown
	case before < slowFrom && after < slowFrom:
		return Fast
	case before >= slowFrom && after >= slowFrom:
		return Slow
	}
	return Mixed
}

// rounds of a calibration: 6 ms if the CPUs are near, 30 ms if they are far.
const (
	rounds     = 60000
	warmRounds = 1000
)

// apart keeps what two threads write two cache lines from each other.
type apart struct {
	_ [128]byte
	n atomic.Int64
	_ [120]byte
}

// Calibrate measures the round trip of a cache line between two CPUs, in some 10 ms. It is 0
// where threads cannot be held to CPUs or two seconds are not enough, because others have the CPUs.
func Calibrate(cpus [2]int) time.Duration {
	var there, back apart
	var stop atomic.Bool
	away := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		undo, err := pin(cpus[1])
		away <- err
		if err != nil {
			return
		}
		defer undo()
		for i := int64(1); i <= rounds; i++ {
			for there.n.Load() != i {
				if stop.Load() {
					return
				}
			}
			back.n.Store(i)
		}
	}()
	if <-away != nil {
		return 0
	}
	defer stop.Store(true)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	undo, err := pin(cpus[0])
	if err != nil {
		return 0
	}
	defer undo()
	begin := time.Now()
	limit := begin.Add(2 * time.Second)
	for i := int64(1); i <= rounds; i++ {
		if i == warmRounds {
			begin = time.Now()
		}
		if i%64 == 0 && time.Now().After(limit) {
			return 0 // neither waits for long, but both wait for their CPUs
		}
		there.n.Store(i)
		for spins := 1; back.n.Load() != i; spins++ {
			if spins%(1<<16) == 0 && time.Now().After(limit) {
				return 0
			}
		}
	}
	return time.Since(begin) / (rounds - warmRounds)
}
