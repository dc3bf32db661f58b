package main

// peerRows compares with other transports.
func peerRows(group string) []pairing {
	return []pairing{
		{group, "64 B round trip against TCP, p50", sendLat, tcpEcho1, p50, 1, 0, true},
	}
}
