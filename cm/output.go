package cm

import (
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// part is a set of the messages that a connection can have to send, in the order in
// which they go out: an RTU is worth nothing behind the DREQ of the same connection.
type part uint8

const (
	sendMRA part = 1 << iota
	sendRTU
	sendAgain // the REQ, REP or DREQ in conn.mad
	sendREJ
	sendDREP
)

// mraServiceTime is the time that our MRAs ask for: 4.3 s. Linux asks for 69 s, but then a
// program that dies meanwhile is noticed only after that; a peer that is still waiting
// repeats its message and gets another MRA.
const mraServiceTime verbs.AckTimeout = 20

// maxReplies bounds the queue of answers that belong to no connection.
const maxReplies = 256

// reply is an answer that belongs to no connection.
type reply struct {
	msg Message
	out Out
}

// send queues messages of a connection. What is queued already stays one message.
func (c *CM) send(cn *conn, what part) {
	cn.pending |= what
	if !cn.queued {
		cn.queued = true
		c.outgoing.push(cn)
	}
}

// startRepeating sends a REQ, REP or DREQ and repeats it until unrepeat, or until total is
// over.
func (c *CM) startRepeating(
	now verbs.Instant, cn *conn, m Message, tid uint64, total time.Duration, put func(b []byte),
) {
	cn.mad = new([roce.MADLen]byte)
	h := roce.NewCMMAD(m.attr(), tid)
	h.PutHeader(cn.mad[:])
	put(cn.mad[roce.MADHeaderLen:])
	cn.sent &^= sendAgain
	cn.began, cn.limit = now, now.Add(total)
	cn.backoff = c.cfg.RetryInitial
	cn.next = now.Add(cn.backoff)
	c.arm(cn)
	c.send(cn, sendAgain)
}

// unrepeat ends what startRepeating began, also the first sending if it has not happened yet.
func (c *CM) unrepeat(cn *conn) {
	cn.mad, cn.next = nil, verbs.Never
	cn.pending &^= sendAgain
}

// reply queues an answer that belongs to no connection, unless too many wait.
func (c *CM) reply(to Path, tid uint64, m Message, put func(b []byte)) {
	if c.replies.len() >= maxReplies {
		c.drop(DropReplies)
		return
	}
	r := reply{msg: m, out: Out{Path: to}}
	h := roce.NewCMMAD(m.attr(), tid)
	h.PutHeader(r.out.MAD[:])
	put(r.out.MAD[roce.MADHeaderLen:])
	c.replies.push(r)
}

// Pending reports whether NextMAD may have something to send. It errs only towards true,
// and NextMAD puts that right.
func (c *CM) Pending() bool { return c.outgoing.len() > 0 || c.replies.len() > 0 }

// NextMAD writes the next MAD to be sent to out; false when there is none. Connections
// come before answers to strangers, so that a flood of those delays nobody.
func (c *CM) NextMAD(out *Out) bool {
	for {
		cn, ok := c.outgoing.pop()
		if !ok {
			break
		}
		cn.queued = false
		if cn.pending == 0 {
			continue
		}
		what := cn.pending & -cn.pending
		cn.pending &^= what
		if cn.pending != 0 {
			c.send(cn, 0)
		}
		out.Path = cn.path
		m := c.format(cn, what, &out.MAD)
		c.counters.Sent[m].Add(1)
		if cn.sent&what != 0 {
			c.counters.Retransmitted[m].Add(1)
		}
		cn.sent |= what
		return true
	}
	r, ok := c.replies.pop()
	if !ok {
		return false
	}
	*out = r.out
	c.counters.Sent[r.msg].Add(1)
	return true
}

// format writes one message of a connection.
func (c *CM) format(cn *conn, what part, mad *[roce.MADLen]byte) Message {
	if what == sendAgain {
		*mad = *cn.mad
		if cn.state == Timewait {
			cn.mad = nil // the only DREQ of a connection that was destroyed
		}
		var h roce.MAD
		_ = h.Decode(mad[:]) // we wrote it
		return Message(h.AttrID - roce.AttrREQ)
	}
	m, tid, body := MRA, cn.tid, mad[roce.MADHeaderLen:]
	switch what {
	case sendMRA:
		mra := roce.MRA{LocalCommID: uint32(cn.id), RemoteCommID: cn.remote, ServiceTimeout: mraServiceTime}
		if cn.active {
			mra.Message = roce.MessageREP
		}
		mra.Put(body)
	case sendRTU:
		m = RTU
		rtu := roce.RTU{LocalCommID: uint32(cn.id), RemoteCommID: cn.remote, PrivateData: cn.private}
		rtu.Put(body)
	case sendREJ:
		m = REJ
		c.putREJ(cn, body)
	case sendDREP:
		m, tid = DREP, cn.dreqTID
		drep := roce.DREP{LocalCommID: uint32(cn.id), RemoteCommID: cn.remote}
		drep.Put(body)
	default:
		panic("BUG: cm: nothing to send")
	}
	h := roce.NewCMMAD(m.attr(), tid)
	h.PutHeader(mad[:])
	return m
}

// putREJ writes the REJ of a connection. As in Linux, one that says "timeout" carries
// our GUID, because the peer may have to find its connection by that and our ID, and
// one that refuses a REQ has no ID of ours, unless an MRA has told it before.
func (c *CM) putREJ(cn *conn, b []byte) {
	rej := roce.REJ{
		LocalCommID: uint32(cn.id), RemoteCommID: cn.remote, Message: cn.rejects, Reason: cn.reason,
		PrivateData: cn.private,
	}
	if cn.rejects == roce.MessageREQ && !cn.patience {
		rej.LocalCommID = 0
	}
	if cn.reason == verbs.RejectTimeout {
		rej.Info, rej.InfoLen = guidBytes(c.cfg.GUID), 8
	}
	rej.Put(b)
}
