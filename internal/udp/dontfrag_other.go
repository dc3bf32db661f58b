//go:build unix && !linux && !darwin && !freebsd

package udp

const (
	recvLimit = "the system's limit for socket buffers above %d"
	sendLimit = recvLimit
)

// dontFragment does nothing: these systems offer no such option for both families.
func dontFragment(uintptr, bool, bool) error { return nil }
