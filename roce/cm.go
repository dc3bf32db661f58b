package roce

import (
	"encoding/binary"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// The messages of the connection manager (IBTA Vol 1, 12.6), each 232 bytes behind the
// MAD header. Conventions of all of them:
//
//   - Decode takes exactly CMMessageLen bytes, fails with ErrMAD for any other length,
//     and checks nothing else; Put writes exactly CMMessageLen bytes, which b must have.
//   - PrivateData and Info alias the input after Decode and then have their full size: a
//     message has no field for their length. Put copies them and fills up with zeros;
//     longer than full size is the caller's bug and panics.
//   - ResvN is the reserved field at byte N, kept because newer kernels put vendor and
//     ECE bits there. Senders leave it zero.
//   - A field narrower than its Go type is cut to its width by Put.
//   - Bit 0 of a byte is its most significant one, as in the specification.

// Sizes of private data in bytes.
const (
	REQPrivateLen     = 92
	MRAPrivateLen     = 222
	REJPrivateLen     = 148
	REPPrivateLen     = 196
	RTUPrivateLen     = 224
	DREQPrivateLen    = 220
	DREPPrivateLen    = 224
	LAPPrivateLen     = 168
	APRPrivateLen     = 148
	SIDRReqPrivateLen = 216
	SIDRRepPrivateLen = 136
	// CMInfoLen is the size of the additional information in REJ, APR and SIDR_REP.
	CMInfoLen = 72
)

// putPrivate copies src to dst and clears the rest of dst.
func putPrivate(dst, src []byte) {
	if len(src) > len(dst) {
		panic("BUG: roce: private data is longer than the message has room for")
	}
	clear(dst[copy(dst, src):])
}

// u24 reads 24 bits; put24 writes them, and the byte behind them.
func u24(b []byte) uint32 { return binary.BigEndian.Uint32(b) >> 8 }

func put24(b []byte, v uint32, next uint8) { binary.BigEndian.PutUint32(b, v<<8|uint32(next)) }

// TransportService is the QP type that a REQ asks for.
type TransportService uint8

// Transport services of a REQ.
const (
	ServiceRC  TransportService = 0
	ServiceUC  TransportService = 1
	ServiceRD  TransportService = 2
	ServiceXRC TransportService = 3
)

// CMPath is a path in a REQ: the primary one, or the alternate one, which does not
// exist when its LocalLID is 0. 44 bytes:
//
//	0-1    local LID
//	2-3    remote LID
//	4-19   local GID
//	20-35  remote GID
//	36     flow label(20) reserved(6) packet rate(6)
//	40     traffic class
//	41     hop limit
//	42     SL(4) subnet local(1) reserved(3)
//	43     local ACK timeout(5) reserved(3)
type CMPath struct {
	// LocalLID and RemoteLID are 0xFFFF on RoCE when HopLimit exceeds 1, else 0.
	LocalLID, RemoteLID uint16
	// LocalGID and RemoteGID are the sender's and the receiver's address.
	LocalGID, RemoteGID GID
	FlowLabel           uint32 // 20 bits
	Resv36              uint8  // 6 bits
	PacketRate          uint8  // 6 bits: 2 is 2.5 Gb/s, 3 10, 15 25, 16 100, …
	TrafficClass        uint8
	HopLimit            uint8
	SL                  uint8 // 4 bits
	SubnetLocal         bool
	Resv42              uint8 // 3 bits
	// AckTimeout is the code for the QP's timer, 5 bits.
	AckTimeout verbs.AckTimeout
	Resv43     uint8 // 3 bits
}

const cmPathLen = 44

func (p *CMPath) decode(b []byte) {
	_ = b[cmPathLen-1]
	p.LocalLID = binary.BigEndian.Uint16(b)
	p.RemoteLID = binary.BigEndian.Uint16(b[2:])
	p.LocalGID = GID(b[4:20])
	p.RemoteGID = GID(b[20:36])
	w := binary.BigEndian.Uint32(b[36:])
	p.FlowLabel, p.Resv36, p.PacketRate = w>>12, uint8(w>>6)&0x3F, uint8(w)&0x3F
	p.TrafficClass, p.HopLimit = b[40], b[41]
	p.SL, p.SubnetLocal, p.Resv42 = b[42]>>4, b[42]&8 != 0, b[42]&7
	p.AckTimeout, p.Resv43 = verbs.AckTimeout(b[43]>>3), b[43]&7
}

func (p *CMPath) put(b []byte) {
	_ = b[cmPathLen-1]
	binary.BigEndian.PutUint16(b, p.LocalLID)
	binary.BigEndian.PutUint16(b[2:], p.RemoteLID)
	copy(b[4:20], p.LocalGID[:])
	copy(b[20:36], p.RemoteGID[:])
	binary.BigEndian.PutUint32(b[36:], p.FlowLabel<<12|uint32(p.Resv36&0x3F)<<6|uint32(p.PacketRate&0x3F))
	b[40], b[41] = p.TrafficClass, p.HopLimit
	b[42] = p.SL<<4 | bit(p.SubnetLocal, 3) | p.Resv42&7
	b[43] = uint8(p.AckTimeout)<<3 | p.Resv43&7
}

// REQ asks for a connection:
//
//	0-3    local communication ID
//	4-7    reserved
//	8-15   service ID
//	16-23  local CA GUID
//	24-27  reserved
//	28-31  local Q_Key
//	32-34  local QPN               35  responder resources
//	36-38  local EECN              39  initiator depth
//	40-42  remote EECN             43  remote CM response timeout(5) transport service(2) flow control(1)
//	44-46  starting PSN            47  local CM response timeout(5) retry count(3)
//	48-49  P_Key                   50  path MTU(4) RDC exists(1) RNR retry count(3)
//	                               51  max CM retries(4) SRQ(1) extended transport(3)
//	52-95  primary path
//	96-139 alternate path
//	140    private data, 92
type REQ struct {
	LocalCommID uint32
	Resv4       uint32
	ServiceID   SID
	LocalCAGUID uint64
	Resv24      uint32
	LocalQKey   uint32
	LocalQPN    QPN
	// ResponderResources is the READ and atomic depth the sender accepts as a target,
	// InitiatorDepth the one it will itself use.
	ResponderResources, InitiatorDepth uint8
	LocalEECN, RemoteEECN              uint32 // 24 bits, 0
	// RemoteCMTimeout is how long the receiver may take to answer, LocalCMTimeout the
	// sender. 5 bits.
	RemoteCMTimeout, LocalCMTimeout verbs.AckTimeout
	TransportService                TransportService // 2 bits
	FlowControl                     bool
	// StartingPSN is what the receiver must start sending with: the PSN that the sender
	// of this message expects, not the one it will send.
	StartingPSN   PSN
	RetryCount    uint8 // 3 bits
	PKey          uint16
	PathMTU       verbs.MTU // 4 bits
	RDCExists     bool
	RNRRetryCount uint8 // 3 bits
	MaxCMRetries  uint8 // 4 bits
	SRQ           bool
	ExtTransport  uint8 // 3 bits
	Primary       CMPath
	Alternate     CMPath
	// PrivateData is at most 92 bytes; RDMA_PS services begin it with an [IPCMHeader].
	PrivateData []byte
}

// Decode reads a REQ.
func (m *REQ) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.Resv4 = binary.BigEndian.Uint32(b[4:])
	m.ServiceID = SID(binary.BigEndian.Uint64(b[8:]))
	m.LocalCAGUID = binary.BigEndian.Uint64(b[16:])
	m.Resv24 = binary.BigEndian.Uint32(b[24:])
	m.LocalQKey = binary.BigEndian.Uint32(b[28:])
	m.LocalQPN, m.ResponderResources = QPN(u24(b[32:])), b[35]
	m.LocalEECN, m.InitiatorDepth = u24(b[36:]), b[39]
	m.RemoteEECN = u24(b[40:])
	m.RemoteCMTimeout = verbs.AckTimeout(b[43] >> 3)
	m.TransportService = TransportService(b[43] >> 1 & 3)
	m.FlowControl = b[43]&1 != 0
	m.StartingPSN = PSN(u24(b[44:]))
	m.LocalCMTimeout, m.RetryCount = verbs.AckTimeout(b[47]>>3), b[47]&7
	m.PKey = binary.BigEndian.Uint16(b[48:])
	m.PathMTU, m.RDCExists, m.RNRRetryCount = verbs.MTU(b[50]>>4), b[50]&8 != 0, b[50]&7
	m.MaxCMRetries, m.SRQ, m.ExtTransport = b[51]>>4, b[51]&8 != 0, b[51]&7
	m.Primary.decode(b[52:])
	m.Alternate.decode(b[52+cmPathLen:])
	m.PrivateData = b[140:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a REQ.
func (m *REQ) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.Resv4)
	binary.BigEndian.PutUint64(b[8:], uint64(m.ServiceID))
	binary.BigEndian.PutUint64(b[16:], m.LocalCAGUID)
	binary.BigEndian.PutUint32(b[24:], m.Resv24)
	binary.BigEndian.PutUint32(b[28:], m.LocalQKey)
	put24(b[32:], uint32(m.LocalQPN), m.ResponderResources)
	put24(b[36:], m.LocalEECN, m.InitiatorDepth)
	put24(b[40:], m.RemoteEECN, uint8(m.RemoteCMTimeout)<<3|uint8(m.TransportService&3)<<1|bit(m.FlowControl, 0))
	put24(b[44:], uint32(m.StartingPSN), uint8(m.LocalCMTimeout)<<3|m.RetryCount&7)
	binary.BigEndian.PutUint16(b[48:], m.PKey)
	b[50] = uint8(m.PathMTU)<<4 | bit(m.RDCExists, 3) | m.RNRRetryCount&7
	b[51] = m.MaxCMRetries<<4 | bit(m.SRQ, 3) | m.ExtTransport&7
	m.Primary.put(b[52:])
	m.Alternate.put(b[52+cmPathLen:])
	putPrivate(b[140:CMMessageLen], m.PrivateData)
}

// REP accepts a connection:
//
//	0-3    local communication ID
//	4-7    remote communication ID
//	8-11   local Q_Key
//	12-14  local QPN               15  reserved
//	16-18  local EE context        19  reserved
//	20-22  starting PSN            23  reserved
//	24     responder resources
//	25     initiator depth
//	26     target ACK delay(5) failover accepted(2) flow control(1)
//	27     RNR retry count(3) SRQ(1) reserved(4)
//	28-35  local CA GUID
//	36     private data, 196
type REP struct {
	LocalCommID, RemoteCommID uint32
	LocalQKey                 uint32
	LocalQPN                  QPN
	Resv15                    uint8
	LocalEECN                 uint32 // 24 bits
	Resv19                    uint8
	// StartingPSN is what the receiver must start sending with; see REQ.
	StartingPSN                        PSN
	Resv23                             uint8
	ResponderResources, InitiatorDepth uint8
	TargetAckDelay                     verbs.AckTimeout // 5 bits
	FailoverAccepted                   uint8            // 2 bits: 0 accepted, 1 not supported, 2 rejected
	FlowControl                        bool
	RNRRetryCount                      uint8 // 3 bits
	SRQ                                bool
	Resv27                             uint8 // 4 bits
	LocalCAGUID                        uint64
	PrivateData                        []byte // at most 196 bytes
}

// Decode reads a REP.
func (m *REP) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.LocalQKey = binary.BigEndian.Uint32(b[8:])
	m.LocalQPN, m.Resv15 = QPN(u24(b[12:])), b[15]
	m.LocalEECN, m.Resv19 = u24(b[16:]), b[19]
	m.StartingPSN, m.Resv23 = PSN(u24(b[20:])), b[23]
	m.ResponderResources, m.InitiatorDepth = b[24], b[25]
	m.TargetAckDelay, m.FailoverAccepted, m.FlowControl = verbs.AckTimeout(b[26]>>3), b[26]>>1&3, b[26]&1 != 0
	m.RNRRetryCount, m.SRQ, m.Resv27 = b[27]>>5, b[27]&0x10 != 0, b[27]&0x0F
	m.LocalCAGUID = binary.BigEndian.Uint64(b[28:])
	m.PrivateData = b[36:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a REP.
func (m *REP) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	binary.BigEndian.PutUint32(b[8:], m.LocalQKey)
	put24(b[12:], uint32(m.LocalQPN), m.Resv15)
	put24(b[16:], m.LocalEECN, m.Resv19)
	put24(b[20:], uint32(m.StartingPSN), m.Resv23)
	b[24], b[25] = m.ResponderResources, m.InitiatorDepth
	b[26] = uint8(m.TargetAckDelay)<<3 | m.FailoverAccepted&3<<1 | bit(m.FlowControl, 0)
	b[27] = m.RNRRetryCount<<5 | bit(m.SRQ, 4) | m.Resv27&0x0F
	binary.BigEndian.PutUint64(b[28:], m.LocalCAGUID)
	putPrivate(b[36:CMMessageLen], m.PrivateData)
}

// RTU says that the sender of the REQ is ready to use the connection:
//
//	0-3  local communication ID
//	4-7  remote communication ID
//	8    private data, 224
type RTU struct {
	LocalCommID, RemoteCommID uint32
	PrivateData               []byte // at most 224 bytes
}

// Decode reads an RTU.
func (m *RTU) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.PrivateData = b[8:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes an RTU.
func (m *RTU) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	putPrivate(b[8:CMMessageLen], m.PrivateData)
}

// CMMessage is what MRA and REJ answer to.
type CMMessage uint8

// The messages that can be put off or refused.
const (
	MessageREQ   CMMessage = 0
	MessageREP   CMMessage = 1
	MessageOther CMMessage = 2 // LAP in an MRA
)

// String names the message.
func (m CMMessage) String() string {
	switch m {
	case MessageREQ:
		return "REQ"
	case MessageREP:
		return "REP"
	}
	return "other"
}

// MRA says that a message has come and its answer will take some time:
//
//	0-3  local communication ID
//	4-7  remote communication ID
//	8    message(2) reserved(6)
//	9    service timeout(5) reserved(3)
//	10   private data, 222
type MRA struct {
	LocalCommID, RemoteCommID uint32
	Message                   CMMessage        // 2 bits
	Resv8                     uint8            // 6 bits
	ServiceTimeout            verbs.AckTimeout // 5 bits
	Resv9                     uint8            // 3 bits
	PrivateData               []byte           // at most 222 bytes
}

// Decode reads an MRA.
func (m *MRA) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.Message, m.Resv8 = CMMessage(b[8]>>6), b[8]&0x3F
	m.ServiceTimeout, m.Resv9 = verbs.AckTimeout(b[9]>>3), b[9]&7
	m.PrivateData = b[10:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes an MRA.
func (m *MRA) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	b[8] = uint8(m.Message)<<6 | m.Resv8&0x3F
	b[9] = uint8(m.ServiceTimeout)<<3 | m.Resv9&7
	putPrivate(b[10:CMMessageLen], m.PrivateData)
}

// REJ refuses a connection or ends one that was being made:
//
//	0-3    local communication ID
//	4-7    remote communication ID
//	8      message rejected(2) reserved(6)
//	9      info length(7) reserved(1)
//	10-11  reason
//	12-83  additional information (ARI)
//	84     private data, 148
type REJ struct {
	// LocalCommID is 0 when a REQ is refused before there is an ID.
	LocalCommID, RemoteCommID uint32
	Message                   CMMessage // 2 bits
	Resv8                     uint8     // 6 bits
	InfoLen                   uint8     // 7 bits: bytes of Info that mean something
	Resv9                     uint8     // 1 bit
	Reason                    verbs.RejectReason
	Info                      []byte // at most 72 bytes
	PrivateData               []byte // at most 148 bytes
}

// Decode reads a REJ.
func (m *REJ) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.Message, m.Resv8 = CMMessage(b[8]>>6), b[8]&0x3F
	m.InfoLen, m.Resv9 = b[9]>>1, b[9]&1
	m.Reason = verbs.RejectReason(binary.BigEndian.Uint16(b[10:]))
	m.Info = b[12 : 12+CMInfoLen : 12+CMInfoLen]
	m.PrivateData = b[84:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a REJ.
func (m *REJ) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	b[8] = uint8(m.Message)<<6 | m.Resv8&0x3F
	b[9] = m.InfoLen<<1 | m.Resv9&1
	binary.BigEndian.PutUint16(b[10:], uint16(m.Reason))
	putPrivate(b[12:12+CMInfoLen], m.Info)
	putPrivate(b[84:CMMessageLen], m.PrivateData)
}

// DREQ asks to end a connection:
//
//	0-3   local communication ID
//	4-7   remote communication ID
//	8-10  remote QPN               11  reserved
//	12    private data, 220
type DREQ struct {
	LocalCommID, RemoteCommID uint32
	// RemoteQPN is the receiver's; it ignores a DREQ that names another.
	RemoteQPN   QPN
	Resv11      uint8
	PrivateData []byte // at most 220 bytes
}

// Decode reads a DREQ.
func (m *DREQ) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.RemoteQPN, m.Resv11 = QPN(u24(b[8:])), b[11]
	m.PrivateData = b[12:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a DREQ.
func (m *DREQ) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	put24(b[8:], uint32(m.RemoteQPN), m.Resv11)
	putPrivate(b[12:CMMessageLen], m.PrivateData)
}

// DREP answers a DREQ; its layout is that of an [RTU].
type DREP struct {
	LocalCommID, RemoteCommID uint32
	PrivateData               []byte // at most 224 bytes
}

// Decode reads a DREP.
func (m *DREP) Decode(b []byte) error { return (*RTU)(m).Decode(b) }

// Put writes a DREP.
func (m *DREP) Put(b []byte) { (*RTU)(m).Put(b) }
