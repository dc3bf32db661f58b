package cm

// Pending reports whether NextMAD may have something to send at this moment.
func (c *CM) Pending() bool { return c.outgoing.len() > 0 || c.replies.len() > 0 }
