package roce

import "github.com/doorbell-rdma/doorbell/verbs"

// Syndromes of an AETH (IBTA Vol 1, 9.7.5). Bit 7 is reserved and 0; bits 6-5 tell
// ACK (00), RNR NAK (01) and NAK (11) apart; bits 4-0 are the credit code, the RNR timer
// code or the NAK code.
const (
	// AckNoCredit is an ACK without credit information: no flow control end to end.
	AckNoCredit uint8 = 0x1F
	// NakPSNSeq: a request is missing; its PSN is the NAK's.
	NakPSNSeq uint8 = 0x60
	// NakInvReq: the responder does not do that.
	NakInvReq uint8 = 0x61
	// NakRemAccess: the R_Key does not allow it.
	NakRemAccess uint8 = 0x62
	// NakRemOp: the responder could not complete the request.
	NakRemOp uint8 = 0x63
	// NakInvRD: invalid RD request; it is never sent here.
	NakInvRD uint8 = 0x64

	syndromeRNR uint8 = 0x20
)

// creditTable maps credit codes to message credits.
var creditTable = [31]uint32{
	0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
}

// AckCredits returns the ACK syndrome that grants the most credits not above n.
func AckCredits(n uint32) uint8 {
	code := len(creditTable) - 1
	for creditTable[code] > n {
		code-- // ends at code 0, which grants 0
	}
	return uint8(code)
}

// Credits returns the messages an ACK syndrome grants beyond its MSN. ok is false for
// [AckNoCredit], which sets no limit, and for syndromes that are no ACK.
func Credits(syndrome uint8) (n uint32, ok bool) {
	if int(syndrome) >= len(creditTable) {
		return 0, false
	}
	return creditTable[syndrome], true
}

// RNRNak returns the syndrome of a "receiver not ready" NAK with timer t.
func RNRNak(t verbs.RNRTimer) uint8 { return syndromeRNR | uint8(t)&0x1F }

// RNRTimerOf returns the timer code of an RNR NAK; see [IsRNR].
func RNRTimerOf(syndrome uint8) verbs.RNRTimer { return verbs.RNRTimer(syndrome & 0x1F) }

// IsAck reports a positive acknowledgment. A syndrome for which neither IsAck, IsRNR nor
// IsNak holds is reserved, and the packet is to be dropped.
func IsAck(syndrome uint8) bool { return syndrome>>5 == 0 }

// IsRNR reports a "receiver not ready" NAK.
func IsRNR(syndrome uint8) bool { return syndrome>>5 == 1 }

// IsNak reports any other NAK; which one, the syndrome itself says.
func IsNak(syndrome uint8) bool { return syndrome>>5 == 3 }
