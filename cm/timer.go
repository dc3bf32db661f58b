package cm

import "github.com/doorbell-rdma/doorbell/verbs"

// timerHeap is a binary heap of connections, earliest deadline first. A connection knows
// its place, so moving or removing it costs O(log n) of those that wait for something;
// established ones are not in it.
type timerHeap []*conn

func (h timerHeap) put(i int, cn *conn) { h[i], cn.slot = cn, int32(i) }

func (h timerHeap) up(i int) {
	cn := h[i]
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].at <= cn.at {
			break
		}
		h.put(i, h[parent])
		i = parent
	}
	h.put(i, cn)
}

func (h timerHeap) down(i int) {
	cn := h[i]
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && h[child+1].at < h[child].at {
			child++
		}
		if cn.at <= h[child].at {
			break
		}
		h.put(i, h[child])
		i = child
	}
	h.put(i, cn)
}

// arm puts cn where its limit and next say, or takes it out when both are Never.
func (c *CM) arm(cn *conn) {
	cn.at = min(cn.limit, cn.next)
	switch {
	case cn.at == verbs.Never && cn.slot < 0:
	case cn.at == verbs.Never:
		i, last := int(cn.slot), len(c.timers)-1
		moved := c.timers[last]
		c.timers[last] = nil
		c.timers = c.timers[:last]
		cn.slot = -1
		if moved != cn {
			c.timers.put(i, moved)
			c.timers.up(i)
			c.timers.down(int(moved.slot))
		}
	case cn.slot < 0:
		c.timers = append(c.timers, cn)
		c.timers.up(len(c.timers) - 1)
	default:
		c.timers.up(int(cn.slot))
		c.timers.down(int(cn.slot))
	}
}

// Deadline returns when HandleTimeout has something to do, [verbs.Never] when nothing
// is waited for.
func (c *CM) Deadline() verbs.Instant {
	if len(c.timers) == 0 {
		return c.queryAt
	}
	return min(c.timers[0].at, c.queryAt)
}

// timeoutBatch bounds the connections that one HandleTimeout looks at.
const timeoutBatch = 1024

// HandleTimeout does what is due at now: repeats messages, ends waits. It may leave some
// of a great many for the next call; Deadline tells.
func (c *CM) HandleTimeout(now verbs.Instant) {
	if c.queryAt <= now {
		c.resolveAgain(now)
	}
	for range timeoutBatch {
		if len(c.timers) == 0 || c.timers[0].at > now {
			return
		}
		c.timeout(now, c.timers[0])
		c.debugCheck()
	}
}

// timeout handles one connection whose time has come.
func (c *CM) timeout(now verbs.Instant, cn *conn) {
	if now < cn.limit {
		c.repeat(now, cn)
		return
	}
	if cn.state != Rejecting && cn.state != Timewait {
		c.counters.TimedOut.Add(1)
	}
	switch cn.state {
	case ReqSent, MRAReqRcvd, RepRcvd, ReqRcvd, RepSent, MRARepRcvd:
		// The event comes first: giving up may free the connection at once.
		c.emit(cn, Event{Type: Unreachable})
		c.giveUp(now, cn, verbs.RejectTimeout, nil)
	case DreqSent:
		reason := cn.reason
		if reason == 0 {
			reason = verbs.RejectTimeout
		}
		c.disconnected(now, cn, reason, nil)
	case Rejecting, Timewait:
		c.free(cn)
	default:
		panic("BUG: cm: timer in state " + cn.state.String())
	}
}

// repeat sends the message that is being repeated once more and doubles the wait. An
// MRA has prolonged only the wait that ends here.
func (c *CM) repeat(now verbs.Instant, cn *conn) {
	switch cn.state {
	case MRAReqRcvd:
		c.setState(cn, ReqSent)
	case MRARepRcvd:
		c.setState(cn, RepSent)
	}
	cn.backoff = min(2*cn.backoff, c.cfg.RetryMax)
	cn.next = now.Add(cn.backoff)
	c.arm(cn)
	if cn.state == RepSent && !c.strangers.afford(now, cn) {
		c.counters.Withheld.Add(1)
		return
	}
	c.send(cn, sendAgain)
}
