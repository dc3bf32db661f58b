package roce

import "encoding/binary"

// SIDRReq asks for the QP behind a service ID (UD):
//
//	0-3   request ID
//	4-5   P_Key                    6-7  reserved
//	8-15  service ID
//	16    private data, 216
type SIDRReq struct {
	RequestID uint32
	PKey      uint16
	Resv6     uint16
	ServiceID SID
	// PrivateData is at most 216 bytes; RDMA_PS services begin it with an [IPCMHeader].
	PrivateData []byte
}

// Decode reads a SIDR_REQ.
func (m *SIDRReq) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.RequestID = binary.BigEndian.Uint32(b)
	m.PKey = binary.BigEndian.Uint16(b[4:])
	m.Resv6 = binary.BigEndian.Uint16(b[6:])
	m.ServiceID = SID(binary.BigEndian.Uint64(b[8:]))
	m.PrivateData = b[16:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a SIDR_REQ.
func (m *SIDRReq) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.RequestID)
	binary.BigEndian.PutUint16(b[4:], m.PKey)
	binary.BigEndian.PutUint16(b[6:], m.Resv6)
	binary.BigEndian.PutUint64(b[8:], uint64(m.ServiceID))
	putPrivate(b[16:CMMessageLen], m.PrivateData)
}

// SIDRStatus is the outcome of a SIDR_REQ.
type SIDRStatus uint8

// Outcomes of a SIDR_REQ.
const (
	SIDRValid              SIDRStatus = 0
	SIDRUnsupported        SIDRStatus = 1
	SIDRReject             SIDRStatus = 2
	SIDRNoQP               SIDRStatus = 3
	SIDRRedirect           SIDRStatus = 4
	SIDRUnsupportedVersion SIDRStatus = 5
)

// SIDRRep answers a [SIDRReq]:
//
//	0-3    request ID
//	4      status
//	5      info length             6-7  reserved
//	8-10   QPN                     11   reserved
//	12-19  service ID
//	20-23  Q_Key
//	24-95  additional information
//	96     private data, 136
type SIDRRep struct {
	RequestID   uint32
	Status      SIDRStatus
	InfoLen     uint8
	Resv6       uint16
	QPN         QPN
	Resv11      uint8
	ServiceID   SID
	QKey        uint32
	Info        []byte // at most 72 bytes
	PrivateData []byte // at most 136 bytes
}

// Decode reads a SIDR_REP.
func (m *SIDRRep) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.RequestID = binary.BigEndian.Uint32(b)
	m.Status, m.InfoLen = SIDRStatus(b[4]), b[5]
	m.Resv6 = binary.BigEndian.Uint16(b[6:])
	m.QPN, m.Resv11 = QPN(u24(b[8:])), b[11]
	m.ServiceID = SID(binary.BigEndian.Uint64(b[12:]))
	m.QKey = binary.BigEndian.Uint32(b[20:])
	m.Info = b[24 : 24+CMInfoLen : 24+CMInfoLen]
	m.PrivateData = b[96:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a SIDR_REP.
func (m *SIDRRep) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.RequestID)
	b[4], b[5] = uint8(m.Status), m.InfoLen
	binary.BigEndian.PutUint16(b[6:], m.Resv6)
	put24(b[8:], uint32(m.QPN), m.Resv11)
	binary.BigEndian.PutUint64(b[12:], uint64(m.ServiceID))
	binary.BigEndian.PutUint32(b[20:], m.QKey)
	putPrivate(b[24:24+CMInfoLen], m.Info)
	putPrivate(b[96:CMMessageLen], m.PrivateData)
}
