package transport

import (
	"context"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/park"
)

// notifier is a completion queue's notification as adapters have it: armed for one event.
//
// No wake-up is lost: a completion is made visible, then armed is looked at; a consumer arms,
// then looks for completions. Whichever comes first, one of them sees the other.
type notifier struct {
	armed  atomic.Uint32 // armedNot, armedSolicited or armedAny
	events atomic.Uint32 // notifications that nobody has waited for; each took an arming
	bell   park.Bell
}

const (
	armedNot uint32 = iota
	armedSolicited
	armedAny
)

// completed is called after completions became visible.
func (n *notifier) completed(solicited bool, w *park.Waker) {
	for {
		a := n.armed.Load()
		if a == armedNot || a == armedSolicited && !solicited {
			return
		}
		if n.armed.CompareAndSwap(a, armedNot) {
			n.events.Add(1)
			n.bell.RingVia(w)
			return
		}
	}
}

// RequestNotify arms the queue for one notification (ibv_req_notify_cq): when the next
// completion becomes visible or, with solicitedOnly, the next that is in error or whose sender
// asked for it with verbs.Solicited. Arming again before that changes nothing, except that
// "any" wins over "solicited only".
//
// Completions that are there already do not notify. So arm, then poll again, then wait:
//
//	for {
//		cq.RequestNotify(false)
//		for n := cq.Poll(wc); n > 0; n = cq.Poll(wc) {
//			... wc[:n]
//		}
//		if err := cq.WaitNotify(ctx); err != nil {
//			return err
//		}
//	}
//
// A notification says that there was something, not that it is still there: a poll after it
// may find nothing. Programs that wait for any completion do better with Wait, which arms by
// itself; this pair is for waiting for solicited ones, and for code that is used to it.
func (c *CQ) RequestNotify(solicitedOnly bool) {
	want := armedAny
	if solicitedOnly {
		want = armedSolicited
	}
	for a := c.notify.armed.Load(); a < want; a = c.notify.armed.Load() {
		if c.notify.armed.CompareAndSwap(a, want) {
			return
		}
	}
}

// WaitNotify blocks until there is a notification, and takes it (ibv_get_cq_event and
// ibv_ack_cq_events in one): each arming gives one, to one waiter. It waits as Wait does and
// returns Wait's errors; a notification that is there wins over them.
func (c *CQ) WaitNotify(ctx context.Context) error {
	for {
		if err := c.await(ctx, &c.notify.bell, (*CQ).notified); err != nil {
			return err
		}
		for n := c.notify.events.Load(); n > 0; n = c.notify.events.Load() {
			if c.notify.events.CompareAndSwap(n, n-1) {
				return nil
			}
		}
	}
}

func (c *CQ) notified() bool { return c.notify.events.Load() > 0 }
