package transport_test

import (
	"errors"
	"io"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
)

// TestStreamWaiters: two readers and a writer wait on one stream, all for the completions of one
// queue. Whoever of them drives wakes whose turn it is: data that arrives once reaches a
// reader, room that comes once the writer, and the end both readers.
func TestStreamWaiters(t *testing.T) {
	rounds := 80
	if testing.Short() {
		rounds = 20
	}
	a, b := open(t, "127.1.54.5", transport.Config{}), open(t, "127.1.54.6", transport.Config{})
	x, y := streamPair(t, a, b, transport.StreamConfig{SendBuffer: 8192, RecvBuffer: 8192})
	ctx := deadline(t)
	read, ended, wrote := make(chan byte, 2), make(chan error, 2), make(chan error, 1)
	for range 2 {
		go func() {
			var one [1]byte
			for {
				if _, err := x.Read(one[:]); err != nil {
					ended <- err
					return
				}
				read <- one[0]
			}
		}()
	}
	block, in := noise(5, 64<<10), make([]byte, 64<<10)
	for i := range rounds {
		go func() { // more than there is room for
			_, err := x.Write(block)
			wrote <- err
		}()
		if _, err := y.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-read:
			if got != byte(i) {
				t.Fatalf("round %d: read %d", i, got)
			}
		case err := <-ended:
			t.Fatalf("round %d: a reader: %v", i, err)
		case <-ctx.Done():
			t.Fatalf("round %d: no reader wakes up", i)
		}
		if _, err := io.ReadFull(y, in); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-wrote:
			if err != nil {
				t.Fatal(err)
			}
		case <-ctx.Done():
			t.Fatalf("round %d: the writer does not wake up", i)
		}
	}
	if err := y.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		select {
		case err := <-ended:
			if !errors.Is(err, io.EOF) {
				t.Errorf("a reader ends with %v", err)
			}
		case <-ctx.Done():
			t.Fatal("a reader does not hear of the end")
		}
	}
}
