package wire

import (
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// ResizeCQ gives a lane of this wire room for at least depth completions: see [qp.CQ.Resize].
// What was done before becomes visible first. The caller keeps the lane's consumers away.
func (w *Wire) ResizeCQ(now verbs.Instant, lane *qp.CQ, depth int) bool {
	w.deliver(now)
	return lane.Resize(depth)
}
