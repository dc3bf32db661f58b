package qp

import (
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Config says what a queue pair is made of.
type Config struct {
	Num  verbs.QPN
	Type verbs.QPType
	Cap  verbs.QPCap // zero fields take the defaults that verbs.QPCap documents
	// SQSigAll makes every send signaled.
	SQSigAll bool
	PD       PD
	// SendCQ and RecvCQ are lanes of the wire that will own the queue pair; required; they
	// may be the same.
	SendCQ, RecvCQ *CQ
}
