// Package verbs is the vocabulary of RDMA programs: work requests, completions,
// states, attributes, access flags and events, under the names that libibverbs
// and the InfiniBand Architecture Specification (IBTA Volume 1) give them.
//
// It holds plain values only: no sockets, no locks, no behaviour beyond printing,
// validating and converting. Numeric values equal libibverbs' enum values, so a
// number in a log means the same here as there.
//
// A [SendWR] or [RecvWR] goes in through a queue pair, a [WC] comes out of a
// completion queue; a [WCStatus] other than [WCSuccess] is an error value:
//
//	wc, err := cq.Next(ctx)
//	if errors.Is(err, verbs.RemAccessErr) {
//		// the peer's R_Key does not allow what was asked
//	}
package verbs
