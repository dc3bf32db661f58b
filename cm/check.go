package cm

import (
	"fmt"
	"strconv"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// debugCheck checks the bookkeeping after each step of a debug build, as long as that is quick.
func (c *CM) debugCheck() {
	if debug && len(c.conns) < 1000 {
		c.check()
	}
}

// check panics when the bookkeeping contradicts itself; tests call it after each step.
func (c *CM) check() {
	bug := func(cn *conn, what string) {
		panic("BUG: cm: " + cn.id.String() + " " + cn.state.String() + ": " + what)
	}
	half := make(map[*listener]int)
	known, alive, timed, lingering, vouching := 0, 0, 0, 0, 0
	for id, cn := range c.conns {
		if id != cn.id || cn.state == Closed {
			bug(cn, "in the map")
		}
		if cn.known {
			if known++; c.byPeer[cn.peerKey()] != cn {
				bug(cn, "byPeer")
			}
		}
		if cn.indexed {
			if alive++; c.byQPN[cn.qpnKey()] != cn {
				bug(cn, "byQPN")
			}
		}
		if cn.at != verbs.Never {
			if timed++; cn.slot < 0 || c.timers[cn.slot] != cn {
				bug(cn, "timer slot")
			}
		}
		if (cn.at == verbs.Never) != (cn.state == Connected) || cn.at > cn.limit || cn.at > cn.next {
			bug(cn, "timer at "+strconv.FormatInt(int64(cn.at), 10))
		}
		if cn.lingers {
			lingering++
		}
		if cn.vouches {
			vouching++
		}
		if cn.listener != nil {
			half[cn.listener]++
		}
		if cn.pending != 0 && !cn.queued {
			bug(cn, "pending but not queued")
		}
		if repeats := cn.next != verbs.Never; repeats && cn.mad == nil {
			bug(cn, "nothing to repeat")
		}
	}
	if known != len(c.byPeer) || alive != len(c.byQPN) || timed != len(c.timers) || lingering != c.lingering ||
		lingering > c.cfg.Backlog {
		panic(fmt.Sprintf("BUG: cm: %d/%d by peer, %d/%d by QPN, %d/%d timers, %d/%d lingering",
			known, len(c.byPeer), alive, len(c.byQPN), timed, len(c.timers), lingering, c.lingering))
	}
	for a, n := range c.strangers.known {
		if vouching -= n; n <= 0 {
			panic(fmt.Sprintf("BUG: cm: %v is known by %d connections", a, n))
		}
	}
	if vouching != 0 {
		panic(fmt.Sprintf("BUG: cm: %d connections vouch for nobody", vouching))
	}
	for _, l := range c.listeners {
		if half[l] != l.halfOpen || l.halfOpen > c.cfg.Backlog {
			panic(fmt.Sprintf("BUG: cm: %d half-open, counted %d", half[l], l.halfOpen))
		}
	}
	for id, q := range c.queries {
		if q.next < c.queryAt || q.limit < c.queryAt || len(c.queries) > maxQueries {
			panic(fmt.Sprintf("BUG: cm: query %08x of %d waits until %d, all until %d", uint32(id), len(c.queries), min(q.next, q.limit), c.queryAt))
		}
	}
	for i, cn := range c.timers {
		if int(cn.slot) != i || i > 0 && c.timers[(i-1)/2].at > cn.at {
			bug(cn, "heap order")
		}
	}
}
