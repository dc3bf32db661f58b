package transport

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// TapPacket is a copy of one datagram.
type TapPacket struct {
	Time     time.Time
	Out      bool // sent by us
	Src, Dst netip.AddrPort
	// ID is the IPv4 Identification that its ICRC covers; 0 on IPv6.
	ID      uint16
	Payload []byte // the UDP payload: BTH to ICRC
}

// tapDepth bounds the datagrams that wait for Config.Tap.
const tapDepth = 4096

// tapQueue carries copies from the wires to the tap's goroutine.
type tapQueue struct {
	epoch   time.Time
	queue   chan *TapPacket
	skipped atomic.Uint64
	done    chan struct{}
}

func newTapQueue(epoch time.Time, f func(*TapPacket)) *tapQueue {
	t := &tapQueue{epoch: epoch, queue: make(chan *TapPacket, tapDepth), done: make(chan struct{})}
	go func() {
		defer close(t.done)
		for p := range t.queue {
			f(p)
		}
	}()
	return t
}

// Packet implements wire.Tap.
func (t *tapQueue) Packet(now verbs.Instant, out bool, src, dst netip.AddrPort, id uint16, pieces [][]byte) {
	if len(t.queue) == cap(t.queue) {
		t.skipped.Add(1)
		return
	}
	p := &TapPacket{Time: t.epoch.Add(time.Duration(now)), Out: out, Src: src, Dst: dst, ID: id}
	for _, b := range pieces {
		p.Payload = append(p.Payload, b...)
	}
	select {
	case t.queue <- p:
	default:
		t.skipped.Add(1)
	}
}

// close hands over what is queued and ends the goroutine. No wire may be stepped any more.
func (t *tapQueue) close() {
	close(t.queue)
	<-t.done
}
