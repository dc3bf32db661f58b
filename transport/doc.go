// Package transport is RDMA verbs over UDP: what programs import to open a device, register
// memory, connect queue pairs and exchange messages with any RoCEv2 peer.
//
// A [Device] is one UDP port. [Device.Dial] and [Device.Listen] connect; both give a [QP],
// to which work requests of package verbs are posted, and whose completions come out of a
// [CQ]:
//
//	dev, err := transport.Open(transport.Config{})
//	qp, err := dev.Dial(ctx, server, transport.ConnParam{})
//	err = qp.PostSend(verbs.SendWR{WRID: 1, Opcode: verbs.Send, Flags: verbs.Signaled, SGList: mr.SGL(0, n)})
//	wc, err := qp.CQ().Next(ctx)
//
// # Sending before it is allowed
//
// [ConnRequest.Accept] returns with the queue pair in RTR: it may receive, but not send until
// the RTU arrives. Post all the same. What is posted in RTR is taken and waits; the RTU, or
// the peer's first message if that comes first, moves the queue pair to RTS and publishes it
// in one step, in order. By the time a program can see that first message's completion, the
// queue pair is in RTS. If the connection fails instead, what waited completes with
// verbs.WRFlushErr.
//
// # Who owns memory, and when
//
// A buffer belongs to its program until a posted request names it, and to the transport from
// then until that request completes:
//
//   - a SEND or WRITE reads it, at any time and more than once: don't write it;
//   - a receive, READ or atomic writes it: don't touch it;
//   - inline data is copied while it is posted: reuse it at once.
//
// A send that is not Signaled completes silently. A later completion of the same queue pair's
// send queue says that it has, as sends complete in order. [QP.Close] ends all claims of its
// posted requests, [MR.Close] all claims to its buffer.
//
// What the peer wrote is visible once a completion reports it: the completion is written
// after the data and read before it. For RDMA WRITEs, which complete silently at their
// target, it is [MR.Placed]: a program that sees the count grow may read what was written.
// Reading memory while the peer writes it is a data race, here as anywhere.
//
// A region's key may go to a peer for as long as the region lives, or a memory window ([MW])
// opens a part of it under a key of its own, which the program or the peer takes back.
//
// # Sharing
//
// A [CQ] and an [SRQ], a shared receive queue, may serve any number of queue pairs. A
// completion queue must hold all that can complete before it is polled: it reports CQ_ERR when
// it overflows, [ErrCQOverrun] to those who wait, and its queue pairs go to ERR; [CQ.Resize]
// gives it room in time. An SRQ that runs dry makes peers wait (RNR); [SRQ.SetLimit] gives
// notice before it does, [SRQ.Resize] more room.
//
// # Progress and waiting
//
// A device makes progress whenever somebody drives it: its own thread does if nobody else
// will. [CQ.Poll] makes at most one bounded step and never blocks: a program that polls
// drives the device itself and gets the shortest latency. [CQ.Wait] and [CQ.Next] poll for
// Config.Spin and then sleep: the only waiter of a device on the socket itself, several on
// their queues, woken by the device's thread. [CQ.RequestNotify] and [CQ.WaitNotify] are the pair that
// libibverbs has instead, and can wait for solicited completions alone. PostSend sends at once
// when nothing else is under way to that peer; otherwise what is posted goes out with the next
// step, in batches.
//
// On a machine with one CPU, set GOMAXPROCS to 2. A waiter sleeps in a system call, and Go's
// monitor wakes up every 20 us to take the only processor away from it: a round trip takes
// twice as long. Where it is 1 when the device is opened, pollers yield after each step, so that both
// ends may live in one process.
//
// An acknowledgement leaves with the next step, or together with what the receiver posts. A
// program that takes a message by Poll and then neither polls, posts nor waits leaves it to
// the device's thread, which is a few milliseconds later.
//
// Posting, polling and modifying are safe from any number of goroutines. They allocate
// nothing and take no lock that could be held for long.
//
// # Several wires
//
// A device is one wire: a socket, a thread, and one goroutine at a time that drives it. On a
// machine with cores to spare Config.Wires divides it, on the same UDP port: queue pairs take
// turns at the wires, the kernel brings each packet to its queue pair's, and what one wire does
// keeps no other waiting. Nothing else changes: completion queues, shared receive queues,
// memory and listeners serve all wires. Completions of different queue pairs in one completion
// queue are in no order, as ever.
//
// # Datagrams and unreliable connections
//
// A UD queue pair ([PD.CreateQP], driven with [QP.Modify]) exchanges messages of up to one MTU
// with any number of others. A work request says where its message goes: an address handle
// ([PD.CreateAH]), a queue pair number and a Q_Key, which must be the receiver's. Receive
// buffers begin with 40 bytes of GRH ([GRHLen]), which wc.ByteLen counts; [AVFromWC] finds
// the sender's address in it. A message that finds no receive, or does not fit into the
// oldest one, is dropped and counted. Programs find each other's queue pairs in their own
// ways, or by service ports as rdma_cm does ([Device.ServeUD], [Device.ResolveUD]); a
// multicast group ([QP.AttachMulticast]) reaches many at once.
//
// A UC connection (ConnParam.Type) has messages of any length and RDMA WRITEs, in order, but
// whatever lost a packet is gone. On both, a send completes when it has left; one that cannot
// leave moves the queue pair to SQE, in which receiving goes on and sends are flushed until
// the program moves it back to RTS. Nothing paces what is posted: who sends more than the
// receiver takes in loses messages, there where it is slow: [Device.Counters] of the receiver
// tells a socket buffer that was full (udp_rx_dropped: nobody drove the device, or not fast
// enough; Config.RecvBuffer) from a receive that was not posted (qp_dropped_no_recv) and one
// too short (qp_dropped_length).
//
// # Errors
//
// A completion's status is an error: errors.Is(err, verbs.RetryExcErr) says that the peer is
// gone. Any status but a flush moves an RC queue pair to ERR, in which everything posted is
// flushed; a connection's peer is told, and [QP.Wait] returns. Closed objects return
// [ErrClosed], which is net.ErrClosed.
//
// Asynchronous events ([Device.NextEvent]) are for those who want to know more; nobody has
// to read them.
package transport
