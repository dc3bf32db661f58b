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
package qp
