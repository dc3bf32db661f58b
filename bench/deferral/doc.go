// Package deferral is the study of what the deferred doorbell costs, and what the
// alternatives to it cost.
//
// An RDMA connection opens with REQ, REP and RTU. The server's queue pair may send only when
// the RTU, or a first request, has come; but a server that greets, or that answers a request
// which overtook the RTU, has something to send before. Four ways out are compared, each the
// same server on the same network:
//
//	a  deferred doorbell   post in RTR; the wire publishes on the move to RTS, which it makes itself
//	b  program-side queue  keep it; on ESTABLISHED move to RTS and post all of it
//	c  RTS before REP      as Linux's rdma_cm has its queue pair; post at once, against the rule
//	d  refused and retried posts fail in RTR; try again every so often
//
// Strategy a is the wire's own (internal/wire); b, c and d are programs over its interface
// for consumers who drive their queue pairs themselves.
//
// The study has two halves. Cells run in virtual time (internal/netsim), where a seed
// decides everything: Cells lists them, one axis at a time about a base cell. Costs of the
// processor are measured in real time, as medians of several runs.
//
//	Run --> cells: jobs of trials, over all cores --> Outcome for each cell and strategy
//	    \-> costs: post, publication, first packet, one after the other --> Costs
//	Report --> WriteTable, WriteJSON (schema.json), WritePlots
//
// # The model
//
// What virtual time leaves out is put back as parameters, which a Cell holds and the report
// prints:
//
//   - The network carries packets in order; each takes Latency and an exponentially
//     distributed jitter, and a direction carries one packet every Gap.
//   - A program's events reach it through a thread that sleeps: Wake until it runs, half of
//     it fixed and half exponentially distributed, and then Handle for each event, one after
//     the other. So are b, c and d told of the RTU, and all four of the REQ. What a wire does
//     by itself takes no time.
//   - The client sees completions at once, and so does the server: both poll.
//   - In d a refused post is tried again after Poll and up to a tenth more.
//
// What is drawn for a trial depends on the seed and the trial's number, and not on the cell
// or the strategy: the strategies meet the same luck, and so can be compared with small samples.
package deferral
