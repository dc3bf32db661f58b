package cm

import (
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// F56: a slow program. The peer hears an MRA when it repeats itself after a second, not before, and waits.
func TestSlowAccept(t *testing.T) {
	nw, a, b := pair(t, Config{ConnectTimeout: 500 * ms, RetryMax: 200 * ms})
	_, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	id := b.want(ReqReceived).Conn
	nw.advance(199 * ms)
	if n := b.count(MRA); n != 0 {
		t.Errorf("%d MRAs at once", n)
	}
	nw.advance(13 * time.Second) // three times what an MRA asks for
	if mras, reqs := b.count(MRA), a.count(REQ); mras < 3 || mras > 5 || reqs > 11 {
		t.Errorf("%d MRAs for %d REQs", mras, reqs)
	}
	a.quiet()
	b.must(b.Accept(nw.now, id, repParams))
	a.want(RepReceived)
}

// A slow active side: the REP is answered with an MRA and rests.
func TestSlowReady(t *testing.T) {
	nw, a, b := pair(t, Config{AcceptTimeout: 500 * ms, RetryMax: 200 * ms})
	ida, err := a.Connect(nw.now, reqTo(a, b))
	a.must(err)
	b.must(b.Accept(nw.now, b.want(ReqReceived).Conn, repParams))
	a.want(RepReceived)
	nw.advance(9 * time.Second)
	if n := a.count(MRA); n < 2 || n > 4 {
		t.Errorf("%d MRAs", n)
	}
	b.quiet()
	a.must(a.Ready(nw.now, ida, nil))
	b.want(Established)
}

// F56: an MRA stretches the wait in which it comes and no later one, and all of them together are bounded.
func TestMRABounds(t *testing.T) {
	t.Run("one wait", func(t *testing.T) {
		l := at(t, (*lab).connect)
		began := l.now
		l.forge(MRA, l.mra(roce.MessageREQ, 18)) // 1.07 s
		wait := verbs.AckTimeout(18).Duration()
		if got := l.Deadline(); got != began.Add(wait) {
			t.Errorf("waits %v", got.Sub(began))
		}
		l.forge(MRA, l.mra(roce.MessageREQ, 31))
		if got := l.Deadline(); got != began.Add(wait) || l.counters.Duplicate[MRA].Load() != 1 {
			t.Errorf("a second MRA: waits %v", got.Sub(began))
		}
		l.now = l.Deadline()
		l.HandleTimeout(l.now)
		if got := l.said(); got != "REQ" {
			t.Errorf("then sends %s", got)
		}
		if got := l.Deadline().Sub(l.now); got != 2*DefaultRetryInitial {
			t.Errorf("the next wait is %v", got)
		}
	})
	t.Run("code 0", func(t *testing.T) {
		l := at(t, (*lab).connect)
		before := l.Deadline()
		l.forge(MRA, l.mra(roce.MessageREQ, 0))
		if l.Deadline() != before {
			t.Error("it asks for nothing and gets something")
		}
	})
	t.Run("code 31", func(t *testing.T) {
		l := at(t, (*lab).connect)
		l.forge(MRA, l.mra(roce.MessageREQ, 31)) // 2.4 hours
		if got := l.Deadline().Sub(l.now); got != DefaultServiceMax {
			t.Errorf("waits %v", got)
		}
	})
	for _, m := range []roce.CMMessage{roce.MessageREQ, roce.MessageREP} {
		t.Run("without end, "+m.String(), func(t *testing.T) {
			l := at(t, func(l *lab) {
				if m == roce.MessageREQ {
					l.connect()
					return
				}
				l.request()
				l.must(l.accept())
			})
			began := l.now
			for l.happened() == "-" && l.now.Sub(began) < time.Hour {
				l.said()
				l.forge(MRA, l.mra(m, 20))
				l.now = l.Deadline()
				l.HandleTimeout(l.now)
			}
			if got := l.now.Sub(began); got != DefaultConnectTimeout+DefaultServiceMax {
				t.Errorf("ends after %v", got)
			}
		})
	}
}

// After an MRA of ours the peer is quiet for long, so our REJ is kept for as long.
func TestRejectAfterMRA(t *testing.T) {
	l := at(t, (*lab).request)
	l.now = l.now.Add(time.Second)
	l.forge(REQ, l.req())
	l.must(l.Reject(l.now, l.id, verbs.RejectConsumer, []byte("no")))
	if got := l.said(); got != "REJ(REQ,28)" {
		t.Fatal(got)
	}
	for i := range 2 {
		var rej roce.REJ
		rej.Decode(l.mads[0].MAD[24:])
		if rej.LocalCommID != uint32(l.id) || string(rej.PrivateData[:3]) != "no\x00" {
			t.Errorf("%d: %+v", i, rej)
		}
		if i == 0 {
			l.now = l.now.Add(mraServiceTime.Duration())
			l.HandleTimeout(l.now)
			l.forge(REQ, l.req())
			l.said()
		}
	}
	if got := l.happened(); got != "-" {
		t.Error(got)
	}
}
