// Package cm is the InfiniBand connection manager (IBTA Vol 1, chapter 12) as a pure
// state machine: management datagrams (MADs), calls and times go in; MADs, events and
// the next deadline come out. It holds no sockets, clocks, goroutines, locks or logs, and
// knows nothing of queue pairs but the numbers that a connection needs. One [CM] serves
// one device; all its methods, [CM.Counters] excepted, belong to whoever owns that
// device's wire 0, where QP1 lives.
//
//	         Connect Accept Ready Established Reject Disconnect Destroy
//	                               |
//	HandleMAD  -->  +--------------v--------------+  -->  NextMAD
//	                |             CM              |
//	HandleTimeout ->+-----------------------------+  -->  NextEvent, Deadline
//
// # The active side
//
//	   Connect: send REQ
//	         |
//	+--------v--------+   MRA    +---------------+
//	|     ReqSent     |--------->|  MRAReqRcvd   |
//	|  REQ again and  |<---------|  REQ rests    |
//	|  again          | wait over|               |
//	+--------+--------+          +-------+-------+
//	         | REP                       | REP          either: a REJ --> Timewait,
//	+--------v---------------------------v-------+      5 s without a REP --> Rejecting
//	|  RepRcvd: the program moves its QP to RTS  |
//	+--------+-----------------------------------+
//	         | Ready: send RTU, and again for each further REP
//	         v
//	    Established
//
// # The passive side
//
//	   REQ at a listener
//	         |
//	+--------v--------+   Reject, Destroy: send REJ --> Rejecting
//	|     ReqRcvd     |   a REJ, the peer gave up --> Timewait
//	+--------+--------+
//	         | Accept: send REP
//	+--------v--------+   MRA    +---------------+
//	|     RepSent     |--------->|  MRARepRcvd   |
//	|  REP again and  |<---------|  REP rests    |
//	|  again          | wait over|               |
//	+--------+--------+          +-------+-------+
//	         | RTU, or Established       |              either: a REJ --> Timewait,
//	         | (COMM_EST)                |              5 s without an RTU --> Rejecting
//	         v                           |
//	    Established <--------------------+
//
// # Both
//
//	Established --- Disconnect: send DREQ ---> DreqSent --- DREP, DREQ or 1 s ---> Timewait
//	Established --- DREQ: send DREP ---> Timewait
//	Rejecting, Timewait --- 0.5 s ---> TimewaitExit
//
// In Rejecting a REJ of ours is said again to a peer who shows that he missed it.
//
// # What a program may count on
//
// Every [ConnID] that Connect returned or a ReqReceived event announced ends with exactly
// one TimewaitExit event, its last; until then the ID is not used again. In between
// come, at most once each and in this order: ReqReceived or RepReceived; Established
// (passive side only, when an RTU brought it); RTULate; and one of Rejected, Unreachable
// and Disconnected. After Destroy only TimewaitExit comes.
//
// # Timers
//
// Linux waits 4 to 6 seconds before it repeats a CM message. Here REQ, REP and DREQ are
// repeated after RetryInitial, then after twice as long each time, at most RetryMax,
// until ConnectTimeout, AcceptTimeout or DisconnectTimeout is over. What the messages
// say about timeouts stays what Linux says, so that its patience with us is unchanged.
// An MRA (message receipt acknowledged) stretches the wait in which it comes and no
// later one; however many come, a wait ends after its timeout plus ServiceMax.
//
// # The peer's UDP port
//
// MADs normally travel to port 4791, whatever port they came from (Linux sends from
// 55410). So that a device on another port can be answered, the transaction ID of our
// REQ, and of a DREQ whose transaction ID we choose, is
//
//	bits 63-48  0xD0BE
//	bits 47-32  our UDP port
//	bits 31-0   random
//
// Everybody echoes transaction IDs. The receiver of a REQ (or of a DREQ that belongs to
// no connection) takes the port from there only when it equals the source port of the
// datagram, else it takes 4791. So nobody can aim answers at a port that he does not
// send from.
//
// # Datagrams
//
// UD has no connections. SIDR asks a peer which queue pair and Q_Key a service ID stands for
// (ResolveSIDR, repeated like a REQ) and answers from a table (ServeSIDR).
//
// # Hostile input
//
// One received MAD causes at most one answer; what is sent to strangers beyond that is rationed,
// see below. A REQ that nobody accepts costs a
// bounded place in its listener's backlog, or nothing. A MAD for a connection counts only when it
// comes from the peer's address and, during the handshake, repeats its transaction ID:
// communication ID and transaction ID together are 64 bits that an attacker off the path must
// guess. All queues are bounded; what does not fit is dropped and counted, and the
// protocol's retransmissions repair it.
//
// # Floods of REQs
//
// A cookie, as TCP has it against floods of SYNs, is not to be had: the first message in which a
// peer repeats a number of ours is the RTU, the REP that it answers names a queue pair, so by
// then the program has made one; and no peer in the field sends its REQ again with something of
// ours in it. So the scheme is admission and rationing, by what an address has shown:
//
//   - An address is known while a connection with it is established, or in timewait: its RTU
//     has repeated a communication ID of ours, or its first request a PSN, which who forges
//     addresses does not see. All others are strangers.
//   - A listener's connections between REQ and RTU are bounded (Config.Backlog). REQs beyond
//     are dropped in silence: no state, no answer. Strangers get three quarters of the places,
//     so a flood of forged REQs keeps out newcomers in proportion to its share, but not those who
//     are at home here. Nobody is thrown out for a newcomer: under an honest rush that would
//     throw out who is nearly done.
//   - A stranger's REQ gets one REP. Its repetitions by the timer, and the REJ when they were in
//     vain, are what a forger could turn on a third party, ten for one REQ; they are taken out of
//     a purse for all strangers together: 1,024 at most, 200 more a second, one more for each
//     RTU and for each REQ that is repeated while its REP is under way. An empty purse withholds
//     them (counted), and what peers repeat themselves goes on mending what was lost.
package cm
