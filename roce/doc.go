// Package roce is the codec of RoCEv2: the InfiniBand transport headers inside a UDP
// datagram, the invariant CRC that closes it, and the management datagrams (MADs) of
// the connection manager. It prints a packet as one line, too.
//
// It is not a transport: it opens no socket, keeps no state and judges no sequence.
// Bytes go in and values come out, or the other way round, and nothing is allocated in
// either direction. Everything is big-endian but the ICRC itself.
//
//	Ethernet | IP | UDP, port 4791 | BTH (12) | extension headers | payload | pad (0-3) | ICRC (4)
//	                               |<-------------- Packet.Decode reads this -------------->|
//
// A receiver checks the ICRC with the [Path] the datagram came along, then decodes:
//
//	path := roce.NewPath(src, dst)           // kept per peer; both ports count
//	if ipID, ok := path.Solve(datagram); ok { // or Check, when the IPv4 ID is known
//		var p roce.Packet
//		if err := p.Decode(datagram); err == nil {
//			use(p.Opcode, p.PSN, p.Payload)
//		}
//	}
//
// A sender appends the headers, payload and pad, and closes the packet:
//
//	b := p.Append(buf[:0])
//	b = b[:len(b)+roce.ICRCLen]
//	roce.PutICRC(b[len(b)-roce.ICRCLen:], path.ICRC(b[:len(b)-roce.ICRCLen], 0))
//
// Layouts follow the InfiniBand Architecture Specification (IBTA Vol 1) and its annex
// A17 (RoCEv2); values that only practice settles follow Linux rdma_rxe and ib_cm.
package roce
