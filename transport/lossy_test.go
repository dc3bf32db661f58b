package transport_test

import (
	"math/rand/v2"
	"sync"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// fate is what happens to a management datagram that a device sends.
type fate uint8

const (
	pass fate = iota
	lose
	// late holds the datagram back until the device has sent others that are not management.
	late
)

// lossyLink decides on the management datagrams that a wire sends. Everything runs under the
// wire's role, so it needs no lock; decide is called by one at a time.
type lossyLink struct {
	link.Link
	decide func(kind roce.AttrID) fate
	held   []link.Tx
	hold   int // how many others go first
	behind int // others sent since held was empty
}

// lossy puts a lossyLink under a device. A late datagram lets hold others go first: 2 are the
// request behind an RTU, and what follows that.
func lossy(d *transport.Device, hold int, decide func(kind roce.AttrID) fate) {
	var mu sync.Mutex
	one := func(kind roce.AttrID) fate {
		mu.Lock()
		defer mu.Unlock()
		return decide(kind)
	}
	transport.Interpose(d, func(l link.Link) link.Link { return &lossyLink{Link: l, hold: hold, decide: one} })
}

// randomLoss loses management datagrams with probability p and holds back half of the RTUs.
func randomLoss(seed uint64, p float64) func(roce.AttrID) fate {
	rnd := rand.New(rand.NewPCG(seed, 0))
	return func(kind roce.AttrID) fate {
		switch {
		case rnd.Float64() < p:
			return lose
		case kind == roce.AttrRTU && rnd.IntN(2) == 0:
			return late
		}
		return pass
	}
}

// cmKind returns the attribute ID of a management datagram, 0 for others.
func cmKind(m *link.Tx) roce.AttrID {
	if m.SegSize > 0 && m.SegSize < m.Len || m.Len != roce.BTHLen+roce.DETHLen+roce.MADLen+roce.ICRCLen {
		return 0
	}
	var d roce.Packet
	if d.Decode(flat(m)) != nil || d.DestQP != verbs.QPNGSI || len(d.Payload) != roce.MADLen {
		return 0
	}
	return roce.AttrID(d.Payload[16])<<8 | roce.AttrID(d.Payload[17])
}

func flat(m *link.Tx) []byte {
	var b []byte
	for _, g := range m.Gather {
		b = append(b, g...)
	}
	return b
}

// Send sends in runs between those messages that have another fate.
func (l *lossyLink) Send(msgs []link.Tx) (int, error) {
	for i := range msgs {
		kind := cmKind(&msgs[i])
		f := pass
		if kind != 0 {
			f = l.decide(kind)
		}
		switch f {
		case lose:
			continue
		case late:
			m := msgs[i]
			m.Gather = [][]byte{flat(&m)}
			l.held = append(l.held, m)
			continue
		}
		n, err := l.Link.Send(msgs[i : i+1])
		if err != nil || n == 0 {
			return i, err
		}
		if kind != 0 || len(l.held) == 0 {
			continue
		}
		if l.behind++; l.behind >= l.hold {
			// Whatever the socket does not take now is lost, as on a network.
			if _, err := l.Link.Send(l.held); err != nil {
				return i + 1, err
			}
			l.held, l.behind = l.held[:0], 0
		}
	}
	return len(msgs), nil
}

// lossOf makes a decision that does something to one kind.
func lossOf(kind roce.AttrID, f fate) func(roce.AttrID) fate {
	return func(k roce.AttrID) fate {
		if k == kind {
			return f
		}
		return pass
	}
}
