//go:build !doorbellportable

package udp

import (
	"encoding/binary"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Close waits for a kicker that has decided to write and not written yet: its write must
// not hit whoever gets the descriptor's number next.
func TestPollerCloseOwed(t *testing.T) {
	s, err := Open(Config{NoGSO: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p, err := NewPoller(s)
	if err != nil {
		t.Fatal(err)
	}
	p.owed = 1 // as Wait leaves it when it sees such a kick
	var wrote atomic.Bool
	early := make(chan bool)
	go func() {
		_ = p.Close()
		early <- !wrote.Load()
	}()
	// Gives a Close that does not wait the time to be caught; a right one cannot fail here.
	time.Sleep(20 * time.Millisecond)
	wrote.Store(true)
	_, werr := unix.Write(p.event, binary.NativeEndian.AppendUint64(nil, 1))
	if <-early || werr != nil {
		t.Errorf("closed before the kicker had written (%v)", werr)
	}
}
