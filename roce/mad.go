package roce

import (
	"encoding/binary"
	"errors"
)

// Lengths of a management datagram in bytes. A MAD is the whole payload of one UD SEND
// only packet from QP1 to QP1 with [GSIQKey].
const (
	MADLen       = 256
	MADHeaderLen = 24
	// CMMessageLen is what the header leaves: one message of the connection manager.
	CMMessageLen = MADLen - MADHeaderLen
)

// Header values of the connection manager's MADs.
const (
	MADBaseVersion = 1
	ClassCM        = 0x07
	CMClassVersion = 2
	// MethodSend is the method of every CM message, answers included.
	MethodSend = 0x03
)

// AttrID says what a CM MAD carries (IBTA Vol 1, 16.7).
type AttrID uint16

// The messages of the connection manager.
const (
	AttrREQ     AttrID = 0x10
	AttrMRA     AttrID = 0x11
	AttrREJ     AttrID = 0x12
	AttrREP     AttrID = 0x13
	AttrRTU     AttrID = 0x14
	AttrDREQ    AttrID = 0x15
	AttrDREP    AttrID = 0x16
	AttrSIDRReq AttrID = 0x17
	AttrSIDRRep AttrID = 0x18
	AttrLAP     AttrID = 0x19
	AttrAPR     AttrID = 0x1A
)

var attrNames = [...]string{"REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP", "LAP", "APR"}

// String returns the message's name.
func (a AttrID) String() string {
	if i := int(a) - int(AttrREQ); i >= 0 && i < len(attrNames) {
		return attrNames[i]
	}
	return string(appendHex([]byte("ATTR_0x"), uint64(a), 4))
}

// ErrMAD: the payload is not 256 bytes long, or the CM message not 232.
var ErrMAD = errors.New("roce: a MAD has 256 bytes")

// MAD is the header common to management datagrams, and what follows it:
//
//	0      base version
//	1      management class
//	2      class version
//	3      method
//	4-5    status
//	6-7    class specific
//	8-15   transaction ID
//	16-17  attribute ID
//	18-19  reserved
//	20-23  attribute modifier
//	24-255 data
type MAD struct {
	BaseVersion, MgmtClass, ClassVersion, Method uint8

	Status, ClassSpecific uint16
	// TID is chosen by whoever begins an exchange and repeated in its answers.
	TID     uint64
	AttrID  AttrID
	Resv18  uint16
	AttrMod uint32
	// Data is the 232 bytes behind the header; after Decode it aliases the input.
	Data []byte
}

// NewCMMAD returns the header of a CM message; Data is nil.
func NewCMMAD(attr AttrID, tid uint64) MAD {
	return MAD{
		BaseVersion: MADBaseVersion, MgmtClass: ClassCM, ClassVersion: CMClassVersion, Method: MethodSend,
		TID: tid, AttrID: attr,
	}
}

// IsCM reports a MAD that the connection manager understands: base version 1, class CM,
// class version 2, method Send.
func (m *MAD) IsCM() bool {
	return m.BaseVersion == MADBaseVersion && m.MgmtClass == ClassCM && m.ClassVersion == CMClassVersion && m.Method == MethodSend
}

// Decode reads a MAD. It fails with ErrMAD when b is not exactly 256 bytes long.
func (m *MAD) Decode(b []byte) error {
	if len(b) != MADLen {
		*m = MAD{}
		return ErrMAD
	}
	m.BaseVersion, m.MgmtClass, m.ClassVersion, m.Method = b[0], b[1], b[2], b[3]
	m.Status = binary.BigEndian.Uint16(b[4:])
	m.ClassSpecific = binary.BigEndian.Uint16(b[6:])
	m.TID = binary.BigEndian.Uint64(b[8:])
	m.AttrID = AttrID(binary.BigEndian.Uint16(b[16:]))
	m.Resv18 = binary.BigEndian.Uint16(b[18:])
	m.AttrMod = binary.BigEndian.Uint32(b[20:])
	m.Data = b[MADHeaderLen:MADLen:MADLen]
	return nil
}

// PutHeader writes the 24 bytes of the header to b. A message is written behind it
// with its Put, to b[MADHeaderLen:MADLen], without a copy in between.
func (m *MAD) PutHeader(b []byte) {
	_ = b[MADHeaderLen-1]
	b[0], b[1], b[2], b[3] = m.BaseVersion, m.MgmtClass, m.ClassVersion, m.Method
	binary.BigEndian.PutUint16(b[4:], m.Status)
	binary.BigEndian.PutUint16(b[6:], m.ClassSpecific)
	binary.BigEndian.PutUint64(b[8:], m.TID)
	binary.BigEndian.PutUint16(b[16:], uint16(m.AttrID))
	binary.BigEndian.PutUint16(b[18:], m.Resv18)
	binary.BigEndian.PutUint32(b[20:], m.AttrMod)
}

// Append appends 256 bytes: the header and Data, which is filled up with zeros. Data
// longer than 232 bytes is the caller's bug and panics.
func (m *MAD) Append(dst []byte) []byte {
	var zero [MADLen]byte
	n := len(dst)
	dst = append(dst, zero[:]...)
	m.PutHeader(dst[n:])
	putPrivate(dst[n+MADHeaderLen:], m.Data)
	return dst
}
