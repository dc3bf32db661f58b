package wire

import "github.com/doorbell-rdma/doorbell/internal/link"

// Interpose puts what f makes of the link in its place, so that a test can lose and delay
// datagrams of a wire that runs. Owner only.
func (w *Wire) Interpose(f func(link.Link) link.Link) { w.link = f(w.link) }
