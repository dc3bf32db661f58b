package transport

import "github.com/doorbell-rdma/doorbell/verbs"

// A side that only receives would never find out that its peer's machine has gone. So a timer
// asks now and then, with an RDMA WRITE of no bytes: it takes no receive of the peer and its
// program does not see it, but its device has to acknowledge it, or the connection fails as
// it does for anything else that was sent.

// ask is the timer's function: it takes what has completed, which is how a failure is noticed
// when nobody is in a call, and asks again unless something is under way that will tell.
func (c *Conn) ask() {
	c.poll()
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.sendErr() != nil || c.alive == nil {
		return // nobody is there to ask
	}
	c.reap()
	// What was posted since the last request that will complete tells nobody anything.
	if waiting := c.posted - c.reaped; waiting <= uint32(c.silent) && waiting < uint32(len(c.ring)) {
		// It fails when the queue pair is gone, and then somebody has said so.
		_ = c.enqueue(&verbs.SendWR{Opcode: verbs.RDMAWrite, Flags: verbs.Signaled}, -1)
	}
	c.alive.Reset(c.keepAlive)
}

// stopAsking ends the keepalives.
func (c *Conn) stopAsking() {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.alive != nil {
		c.alive.Stop()
		c.alive = nil
	}
}
