//go:build !linux || doorbellportable

package udp

// Claim, Unclaim and Await are for sockets whose Recv is a system call of the caller: here Claim is
// always refused.
func (p *Poller) Claim() bool { return false }

// Unclaim: see Claim.
func (p *Poller) Unclaim() {}

// Await: see Claim.
func (p *Poller) Await() (idle bool, missed int) { return false, 0 }
