package udp

import "golang.org/x/net/bpf"

// OpenShared opens n sockets on one address and port. steer is a program that the kernel runs on
// each UDP payload that arrives, and that returns which of them gets it: an index below n.
// Somebody else who has the port, or all of these sockets, is an error that matches
// [syscall.EADDRINUSE], as with Open.
//
// A kernel that refuses steer is a warning: then what one peer sends arrives at one of the
// sockets. An error that matches [errors.ErrUnsupported] says that the system has no such
// sockets; one socket there is everywhere, and it is opened as Open does.
func OpenShared(cfg Config, n int, steer []bpf.RawInstruction) ([]*Socket, error) {
	if n == 1 {
		s, err := Open(cfg)
		return []*Socket{s}, err
	}
	return openShared(cfg, n, steer)
}
