package transport

// StreamRoom reports whether a Write of a byte would not wait.
func StreamRoom(s *Stream) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.dead != nil {
		return false
	}
	n, _ := s.conn.Room(1)
	return n > 0
}
