package verbs

import (
	"encoding/binary"
	"errors"
)

// RemoteMR is what a peer must know to reach a memory region: the usual triple that
// programs exchange in private data or in a first message.
type RemoteMR struct {
	Addr   uint64
	RKey   uint32
	Length uint32
}

// RemoteMRSize is the encoded size in bytes.
const RemoteMRSize = 16

// ErrRemoteMR reports that bytes are too short to hold a RemoteMR.
var ErrRemoteMR = errors.New("verbs: a RemoteMR takes 16 bytes")

// AppendBinary appends address (8 bytes), R_Key (4) and length (4), all big-endian,
// the layout rping uses. It never fails.
func (r RemoteMR) AppendBinary(b []byte) ([]byte, error) {
	b = binary.BigEndian.AppendUint64(b, r.Addr)
	b = binary.BigEndian.AppendUint32(b, r.RKey)
	return binary.BigEndian.AppendUint32(b, r.Length), nil
}

// MarshalBinary encodes r as [RemoteMR.AppendBinary] does.
func (r RemoteMR) MarshalBinary() ([]byte, error) { return r.AppendBinary(nil) }

// UnmarshalBinary decodes the first 16 bytes of b and ignores the rest, which
// private data pads with zeros. It fails with ErrRemoteMR when b is shorter.
func (r *RemoteMR) UnmarshalBinary(b []byte) error {
	if len(b) < RemoteMRSize {
		return ErrRemoteMR
	}
	r.Addr = binary.BigEndian.Uint64(b)
	r.RKey = binary.BigEndian.Uint32(b[8:])
	r.Length = binary.BigEndian.Uint32(b[12:])
	return nil
}
