package transport

import "context"

// Arrived returns how many messages have arrived since the connection began.
func Arrived(c *Conn) int {
	c.dev.drive()
	c.recvMu.Lock()
	defer c.recvMu.Unlock()
	if !c.cq.empty() {
		c.take()
	}
	return int(c.arrived)
}

// Uncompressed makes a stream forget what was agreed: it writes, and reads, bare bytes.
func Uncompressed(s *Stream) { s.pack = nil }

// Failed reports whether the connection is known to be of no more use. It looks at nothing else.
func Failed(c *Conn) bool { return c.failure.Load() != nil }

// Asks reports whether the connection sends keepalives.
func Asks(c *Conn) bool {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	return c.alive != nil
}

// Overtake does what a goroutine does that waits for something of c until it goes to sleep, has
// arrive make a completion, and takes that as another goroutine would. It reports whether the
// waiter would look again, and whether the bell has rung for it since the completion was taken.
func Overtake(c *Conn, arrive func()) (looks, rung bool) {
	w := c.waiter()
	c.poll()
	w.seen = c.changes.Load()
	arrive()
	for c.cq.empty() {
		c.dev.drive()
	}
	c.dev.stepped() // nobody rings for the arrival itself after this
	t := c.cq.bell.Arm()
	c.poll()
	looks = w.ready(c.cq)
	return looks, c.cq.bell.Sleep(context.Background(), t, 0) == nil
}
