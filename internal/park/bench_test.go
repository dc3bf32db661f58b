package park

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
)

// BenchmarkIdle is what a waker pays when nobody has armed: the doorbell of a busy wire.
func BenchmarkIdle(b *testing.B) {
	b.Run("Bell.Ring", func(b *testing.B) {
		var bell Bell
		b.ReportAllocs()
		for b.Loop() {
			bell.Ring()
		}
	})
	b.Run("ThreadParker.Wake", func(b *testing.B) {
		var p ThreadParker
		b.ReportAllocs()
		for b.Loop() {
			p.Wake()
		}
	})
	b.Run("Kicker.Kick", func(b *testing.B) {
		k, err := NewKicker()
		if err != nil {
			b.Fatal(err)
		}
		defer k.Close()
		b.ReportAllocs()
		for b.Loop() {
			k.Kick()
		}
	})
	b.Run("Pause", func(b *testing.B) {
		for b.Loop() {
			Pause()
		}
	})
	b.Run("TrySpin", func(b *testing.B) {
		for b.Loop() {
			if TrySpin() {
				EndSpin()
			}
		}
	})
	b.Run("Bell.ArmDisarm", func(b *testing.B) {
		var bell Bell
		b.ReportAllocs()
		for b.Loop() {
			bell.Arm()
			bell.Disarm()
		}
	})
}

// BenchmarkRing is a round: a ring, and the answer of the waiter it woke, which the ringer
// awaits spinning, as a wire's thread spins on its socket.
func BenchmarkRing(b *testing.B) {
	background := context.Background()
	cancellable, cancel := context.WithCancel(background)
	defer cancel()
	for _, bb := range []struct {
		name        string
		sleep       sleepFunc
		ctx         context.Context
		locked, via bool
	}{
		{"thread", (*Bell).SleepThread, background, true, true},
		{"thread/ctx", (*Bell).SleepThread, cancellable, true, true},
		{"channel/unlocked", (*Bell).Sleep, background, false, false},
		{"channel/locked", (*Bell).Sleep, background, true, false},
		{"channel/locked/via", (*Bell).Sleep, background, true, true},
		{"channel/ctx/locked/via", (*Bell).Sleep, cancellable, true, true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			var bell Bell
			var w *Waker
			if bb.via {
				w = NewWaker()
				defer w.Close()
			}
			var asked, answered atomic.Int64
			n := int64(b.N)
			done := make(chan struct{})
			b.ReportAllocs()
			go func() {
				defer close(done)
				if bb.locked {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
				}
				for i := int64(1); i <= n; i++ {
					asked.Store(i)
					bell.RingVia(w)
					for answered.Load() < i {
						Pause()
					}
				}
			}()
			for i := int64(1); i <= n; i++ {
				for asked.Load() < i {
					t := bell.Arm()
					if asked.Load() >= i {
						bell.Disarm()
					} else {
						bb.sleep(&bell, bb.ctx, t, -1)
					}
				}
				answered.Store(i)
			}
			<-done
		})
	}
}
