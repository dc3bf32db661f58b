// Package udp makes one unconnected UDP socket into a [link.Link]: it is what a wire
// of a real device sends and receives with. It knows sockets and nothing of RoCEv2,
// but each of its options is there because RoCEv2 needs it:
//
//   - The socket is never connected and never fragments (IP_MTU_DISCOVER=PROBE), because
//     only then does Linux write IPv4 Identification 0 and DF, both of which the
//     invariant CRC of a packet covers. Segment k of a train has Identification k.
//   - An IPv6 socket hears datagrams without a UDP checksum (UDP_NO_CHECK6_RX), for
//     that is how rdma_rxe and NICs send RoCEv2.
//   - A socket bound to a wildcard address learns the local address of each datagram and
//     sets the source of each it sends (PKTINFO): the CRC covers both addresses, and a
//     peer drops what does not come from the address that it dialled.
//   - ICMP errors are not heard (IP_RECVERR off), so that one dead peer cannot fail what
//     is sent to another.
//   - IPv4-mapped addresses exist only between this package and the kernel.
//
// # The way of a datagram
//
//	wire -> Send([]link.Tx) -> iovecs, control messages -> sendmmsg, UDP_SEGMENT for trains
//	wire <- Recv([]link.Rx) <- slots, control messages  <- recvmmsg, UDP_GRO
//	wire's thread: Poller.Wait (ppoll on the socket and an eventfd); Poller.Kick from anywhere
//	lone waiter:   Poller.Claim, then Await (recvmmsg that blocks), and Recv has what it brought
//
// # Two builds
//
// On Linux the system calls are made directly over arrays that are allocated once,
// because the batch calls of golang.org/x/net allocate for each packet and go through the
// netpoller, which costs a locked thread tens of microseconds. Everywhere else, and on
// Linux with the build tag doorbellportable, a goroutine reads a [net.UDPConn] and
// control messages are made and parsed by golang.org/x/net/ipv4 and ipv6: correct, not
// fast. The exported names are the same.
//
// # Faults
//
// What befalls one datagram (too long for the interface, refused by a firewall, no
// route, no memory) is counted by kind and the datagram is treated as lost in the
// network; the protocol above repairs it. Only a dead socket is an error. Abilities of
// the kernel are asked for when the socket is opened and given up when they fail later:
// a train that is refused although its first datagram alone is not goes out one datagram
// at a time, at once, and no train is tried again. [Socket.Caps] and [Socket.Stats] tell.
package udp
