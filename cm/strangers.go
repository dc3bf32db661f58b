package cm

import (
	"net/netip"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// strangers rations what is done for addresses that have not shown that they receive what we
// send to them; the package comment tells why and how.
type strangers struct {
	// share is how many CMs have a purse each, of which every one is the smaller; 0 means 1.
	share int
	// known counts, for each address, the connections that were established with it and are
	// not forgotten yet.
	known map[netip.Addr]int
	// spent is what is missing from a full purse of repetitions, as of at.
	spent int
	at    verbs.Instant
}

const (
	// purse is how many REPs are repeated to strangers before that is rationed.
	purse = 1024
	// refill is the time in which one repetition comes back.
	refill = time.Second / 200
)

// room returns how much of a backlog an address may fill.
func (s *strangers) room(backlog int, from netip.Addr) int {
	if s.known[from.WithZone("")] > 0 {
		return backlog
	}
	return backlog - backlog/4
}

// meet takes note of an address that a connection has just been established with.
func (s *strangers) meet(cn *conn) {
	if s.known == nil {
		s.known = make(map[netip.Addr]int)
	}
	cn.vouches = true
	s.known[cn.path.Remote.Addr().WithZone("")]++
}

// forget ends what meet began.
func (s *strangers) forget(cn *conn) {
	if !cn.vouches {
		return
	}
	cn.vouches = false
	a := cn.path.Remote.Addr().WithZone("")
	if s.known[a]--; s.known[a] == 0 {
		delete(s.known, a)
	}
}

// credit puts one repetition back: a peer has sent something that needed no answer.
func (s *strangers) credit() { s.spent = max(s.spent-1, 0) }

// afford takes a repetition for cn out of the purse, unless its peer is no stranger; false when
// the purse is empty.
func (s *strangers) afford(now verbs.Instant, cn *conn) bool {
	if s.known[cn.path.Remote.Addr().WithZone("")] > 0 {
		return true
	}
	share := max(s.share, 1)
	refill := refill * time.Duration(share)
	if n := now.Sub(s.at) / refill; n >= time.Duration(s.spent) {
		s.spent, s.at = 0, now
	} else if n > 0 {
		s.spent -= int(n)
		s.at = s.at.Add(n * refill)
	}
	if s.spent >= purse/share {
		return false
	}
	s.spent++
	return true
}
