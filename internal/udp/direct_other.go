//go:build !linux || doorbellportable

package udp

// Direct says that Recv, Send and Wait are plain system calls of the caller. Where it is
// false a goroutine reads ahead and Wait is a channel operation: then the wire's thread must
// be an ordinary goroutine, and who spins must yield or the reader never runs.
const Direct = false
