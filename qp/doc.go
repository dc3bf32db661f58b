// Package qp is a queue pair: its state machine, its send and receive queues with the
// deferred doorbell, and the requester and responder that turn work requests into RoCEv2
// packets and packets into completions.
//
// It is a pure state machine. Nothing in here knows sockets, clocks, goroutines or locks:
// a packet, a work request or a time goes in; packets, completions, events and the next
// deadline come out.
//
//	posters (any goroutine)        owner of the wire
//	PostSend -> SendQueue ------>  NextPacket -> packets of the requester and responder
//	PostRecv -> RecvQueue ------>  HandlePacket, HandleTimeout, Modify
//	                               completions -> CQ lanes, committed by the wire
//
// # The deferred doorbell
//
// A post in RTR is taken like any other, but rings no doorbell; the move to RTS publishes
// everything posted so far to the wire in one atomic step. The queue word (gate.go) makes
// posts and transitions miss each other never: the state and the count of reserved slots
// are one word. docs/model/doorbell.pml checks the algorithm exhaustively.
//
// When the first valid request reaches a queue pair in RTR whose RTS attributes are armed
// (ArmRTS), the queue pair moves itself to RTS before the request consumes a receive: so
// it is in RTS before the receive completion can be seen.
//
// # The requester
//
// A send WQE is started when its first packet leaves (requester.go, readreq.go): it gets a
// span of sequence numbers, 64 bits wide inside, of which the PSN is the low 24. Answers
// complete WQEs in order (ack.go, complete.go). What is lost is sent again from the oldest
// unanswered packet on: when the peer says so, when an answer jumps over another, after the
// ack timeout, or early, when the measured round trip says that an answer is overdue
// (retransmit.go); to a silent peer one packet, until it answers. Everything the queue pairs
// of a wire have in flight to one peer is charged to one Window (window.go).
//
// # The shared receive queue
//
// An SRQ (srq.go) is a receive queue without a state, for the queue pairs of several wires.
// A queue pair with one keeps a receive queue of depth 1 of its own, to which recvReady moves
// the oldest shared receive when a message needs one. When it is resized posters go on to a new
// ring, and takers follow when the old one is empty (srqring.go).
//
// # The responder
//
// Requests are checked, done and answered in PSN order (responder.go, respack.go). ACKs
// wait for the next NextPacket, so that a batch of packets gets one; NAKs are sent once;
// READs and atomics are remembered, to be answered again.
//
// # UC and UD
//
// Unreliable queue pairs (unreliable.go, uc.go, ud.go) have the same queues, gate and states.
// A send completes when its last packet is handed out; nobody is told of what is dropped,
// only counters. A UC message that lost a part is dropped whole and leaves its receive to the
// next one; late packets and duplicates, which UDP may make, are dropped too, so that
// messages arrive in order and at most once. A failed send moves the queue pair to SQE
// instead of ERR.
//
// # Errors
//
// A peer's mistakes become NAKs and completions with a status, and move the queue pair to
// ERR, with events. The program's mistakes are errors of Modify and of the posts. Our own
// are panics that begin with "BUG:"; check states what must always hold.
package qp
