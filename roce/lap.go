package roce

import (
	"encoding/binary"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// LAP offers an alternate path to an established connection:
//
//	0-3    local communication ID
//	4-7    remote communication ID
//	8-11   reserved
//	12-14  remote QPN              15  remote CM response timeout(5) reserved(3)
//	16-19  reserved
//	20-21  alternate local LID
//	22-23  alternate remote LID
//	24-39  alternate local GID
//	40-55  alternate remote GID
//	56-58  flow label(20) reserved(4)
//	59     traffic class
//	60     hop limit
//	61     reserved(2) packet rate(6)
//	62     SL(4) subnet local(1) reserved(3)
//	63     local ACK timeout(5) reserved(3)
//	64     private data, 168
type LAP struct {
	LocalCommID, RemoteCommID uint32
	Resv8                     uint32
	RemoteQPN                 QPN
	RemoteCMTimeout           verbs.AckTimeout // 5 bits
	Resv15                    uint8            // 3 bits
	Resv16                    uint32
	// Alternate is the path. Its Resv36 has 4 bits here, at byte 58.
	Alternate   CMPath
	Resv61      uint8  // 2 bits
	PrivateData []byte // at most 168 bytes
}

// Decode reads a LAP.
func (m *LAP) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.Resv8 = binary.BigEndian.Uint32(b[8:])
	m.RemoteQPN = QPN(u24(b[12:]))
	m.RemoteCMTimeout, m.Resv15 = verbs.AckTimeout(b[15]>>3), b[15]&7
	m.Resv16 = binary.BigEndian.Uint32(b[16:])
	p := &m.Alternate
	p.LocalLID = binary.BigEndian.Uint16(b[20:])
	p.RemoteLID = binary.BigEndian.Uint16(b[22:])
	p.LocalGID = GID(b[24:40])
	p.RemoteGID = GID(b[40:56])
	flow := u24(b[56:])
	p.FlowLabel, p.Resv36 = flow>>4, uint8(flow)&0x0F
	p.TrafficClass, p.HopLimit = b[59], b[60]
	m.Resv61, p.PacketRate = b[61]>>6, b[61]&0x3F
	p.SL, p.SubnetLocal, p.Resv42 = b[62]>>4, b[62]&8 != 0, b[62]&7
	p.AckTimeout, p.Resv43 = verbs.AckTimeout(b[63]>>3), b[63]&7
	m.PrivateData = b[64:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes a LAP.
func (m *LAP) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	binary.BigEndian.PutUint32(b[8:], m.Resv8)
	put24(b[12:], uint32(m.RemoteQPN), uint8(m.RemoteCMTimeout)<<3|m.Resv15&7)
	binary.BigEndian.PutUint32(b[16:], m.Resv16)
	p := &m.Alternate
	binary.BigEndian.PutUint16(b[20:], p.LocalLID)
	binary.BigEndian.PutUint16(b[22:], p.RemoteLID)
	copy(b[24:40], p.LocalGID[:])
	copy(b[40:56], p.RemoteGID[:])
	put24(b[56:], p.FlowLabel<<4|uint32(p.Resv36&0x0F), p.TrafficClass)
	b[60] = p.HopLimit
	b[61] = m.Resv61<<6 | p.PacketRate&0x3F
	b[62] = p.SL<<4 | bit(p.SubnetLocal, 3) | p.Resv42&7
	b[63] = uint8(p.AckTimeout)<<3 | p.Resv43&7
	putPrivate(b[64:CMMessageLen], m.PrivateData)
}

// APRUnsupported is the status that refuses a LAP because alternate paths do not exist here.
const APRUnsupported = 2

// APR answers a [LAP]:
//
//	0-3    local communication ID
//	4-7    remote communication ID
//	8      info length
//	9      status
//	10-11  reserved
//	12-83  additional information
//	84     private data, 148
type APR struct {
	LocalCommID, RemoteCommID uint32
	InfoLen                   uint8
	Status                    uint8
	Resv10                    uint16
	Info                      []byte // at most 72 bytes
	PrivateData               []byte // at most 148 bytes
}

// Decode reads an APR.
func (m *APR) Decode(b []byte) error {
	if len(b) != CMMessageLen {
		return ErrMAD
	}
	m.LocalCommID = binary.BigEndian.Uint32(b)
	m.RemoteCommID = binary.BigEndian.Uint32(b[4:])
	m.InfoLen, m.Status = b[8], b[9]
	m.Resv10 = binary.BigEndian.Uint16(b[10:])
	m.Info = b[12 : 12+CMInfoLen : 12+CMInfoLen]
	m.PrivateData = b[84:CMMessageLen:CMMessageLen]
	return nil
}

// Put writes an APR.
func (m *APR) Put(b []byte) {
	_ = b[CMMessageLen-1]
	binary.BigEndian.PutUint32(b, m.LocalCommID)
	binary.BigEndian.PutUint32(b[4:], m.RemoteCommID)
	b[8], b[9] = m.InfoLen, m.Status
	binary.BigEndian.PutUint16(b[10:], m.Resv10)
	putPrivate(b[12:12+CMInfoLen], m.Info)
	putPrivate(b[84:CMMessageLen], m.PrivateData)
}
