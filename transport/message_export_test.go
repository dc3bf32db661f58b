package transport

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
