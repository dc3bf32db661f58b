// Package rsocket is the rsockets protocol, by which Linux programs have byte streams over
// RDMA (rdma_create_ep's younger sister in librdmacm), as a pure state machine: connection
// data, messages and completions go in; what may be sent, what was received, and which
// control messages are due come out. It knows no sockets, queue pairs, clocks or locks, and
// copies no payload.
//
// # The protocol
//
// The private data of REQ and REP ([ConnData]) tell where each side keeps a target list of
// two entries, and the first half of its receive ring. A side sends by RDMA WRITE with
// immediate: of data into the peer's ring, in order; of an entry for the next half of its own
// ring into the peer's target list, when that half is free. The immediate says what it was:
//
//	bits 31..29  operation   bits 28..0  value
//	0 DATA                   bytes written into the current target entry
//	4 SGL                    credits: how many DATA messages may have been sent in total, modulo
//	                         2^16; with 16 bytes written, a new entry for the target list as well
//	6 IOMAP_SGL              an entry for the peer's I/O map; we have none, so nobody may send it
//	7 CTRL                   0 disconnect, 1 keepalive, 2 shutdown of the sender's writing
//
// Operations 1, 3 and 5 are reserved, 2 is never sent. All integers of the connection data and
// the immediates are big-endian; target entries have the byte order of the side whose memory
// they are written into.
//
// # Flow
//
//	Hello, Start               connection data, ours and the peer's
//	Room, Send                 a DATA message: where it goes, what its immediate is
//	Sent                       its completion: the send buffer is free again
//	Received                   a completion of a WRITE with immediate
//	Readable, Consume          what has come; what the program has taken
//	NextControl                grants and endings that are due; ask after all of the above
//	CloseWrite, CloseRead, Close
//
// A peer may break every rule: Received and Start return an error then that wraps
// [ErrProtocol], and the stream is of no more use.
package rsocket
