package interop

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"strconv"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// side is perftest's side channel. Messages have no length of their own: both ends know what
// comes next.
type side interface {
	send(ctx context.Context, b []byte) error
	recv(ctx context.Context, n int) ([]byte, error)
	// encode and decode translate records, whose form depends on the channel.
	encode(e linuxpeer.End) []byte
	decode(b []byte) (linuxpeer.End, error)
}

// tcpSide is the side channel over TCP. perftest reads a message with a single read, so it
// must be written with a single write.
type tcpSide struct{ net.Conn }

func (s tcpSide) send(_ context.Context, b []byte) error {
	_, err := s.Write(b)
	return err
}

func (s tcpSide) recv(_ context.Context, n int) ([]byte, error) {
	b := make([]byte, n)
	_, err := io.ReadFull(s, b)
	return b, err
}

// tcpRecord is the length of a record over TCP: hexadecimal fields, each followed by a colon
// (LID, READs, QPN, PSN, R_Key, address, 16 bytes of GID, SRQ number), and a NUL.
const tcpRecord = 108

func (tcpSide) encode(e linuxpeer.End) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%04x:%04x:%06x:%06x:%08x:%016x:", 0, e.Reads, uint32(e.QPN), uint32(e.PSN), e.RKey, e.Addr)
	for _, g := range e.GID.As16() {
		fmt.Fprintf(&b, "%02x:", g)
	}
	fmt.Fprintf(&b, "%08x:\x00", 0)
	return b.Bytes()
}

func (tcpSide) decode(b []byte) (e linuxpeer.End, err error) {
	if len(b) != tcpRecord {
		return e, fmt.Errorf("record of %d bytes, want %d", len(b), tcpRecord)
	}
	var f [23]uint64
	at := 0
	for i, width := range [23]int{0: 4, 1: 4, 2: 6, 3: 6, 4: 8, 5: 16, 22: 8} {
		if width == 0 {
			width = 2
		}
		if b[at+width] != ':' {
			return e, fmt.Errorf("record %q: no colon after field %d", b, i)
		}
		if f[i], err = strconv.ParseUint(string(b[at:at+width]), 16, 64); err != nil {
			return e, fmt.Errorf("record %q: field %d: %w", b, i, err)
		}
		at += width + 1
	}
	var gid [16]byte
	for i := range gid {
		gid[i] = byte(f[6+i])
	}
	return linuxpeer.End{
		Reads: int(f[1]), QPN: verbs.QPN(f[2]), PSN: verbs.PSN(f[3]), RKey: uint32(f[4]), Addr: f[5], GID: netip.AddrFrom16(gid).Unmap(),
	}, nil
}

// cmSide is the side channel over a connection: one SEND a message.
type cmSide struct {
	e   *linuxpeer.Endpoint
	buf *transport.MR // of the one receive
}

func (s *cmSide) send(ctx context.Context, b []byte) error {
	return s.e.Do(ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: b})
}

func (s *cmSide) recv(ctx context.Context, n int) ([]byte, error) {
	if err := s.e.Expect(ctx, n); err != nil {
		return nil, err
	}
	b := bytes.Clone(s.buf.Bytes()[:n])
	return b, s.e.PostRecv(verbs.RecvWR{SGList: s.buf.SGL(0, cmRecord)})
}

// cmRecord is the length of a record over a connection, big-endian:
//
//	0   LID (4)    4  READs (4)   8  QPN (4)   12  PSN (4), not used
//	16  R_Key (4)  20 padding (4), any bytes
//	24  address (8)
//	32  GID (16)
//	48  SRQ number (4)  52  GID index (4)
const cmRecord = 56

func (*cmSide) encode(e linuxpeer.End) []byte {
	b := make([]byte, 0, cmRecord)
	for _, v := range []uint32{0, uint32(e.Reads), uint32(e.QPN), uint32(e.PSN), e.RKey, 0} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	b = binary.BigEndian.AppendUint64(b, e.Addr)
	gid := e.GID.As16()
	b = append(b, gid[:]...)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 1)
}

func (*cmSide) decode(b []byte) (e linuxpeer.End, err error) {
	return linuxpeer.End{
		Reads: int(binary.BigEndian.Uint32(b[4:])), QPN: verbs.QPN(binary.BigEndian.Uint32(b[8:])),
		PSN: verbs.PSN(binary.BigEndian.Uint32(b[12:])), RKey: binary.BigEndian.Uint32(b[16:]),
		Addr: binary.BigEndian.Uint64(b[24:]), GID: netip.AddrFrom16([16]byte(b[32:48])).Unmap(),
	}, nil
}

// exchange is the only figure of the side channel: the client writes and then reads, the
// server reads and then writes, messages of equal length.
func (p *perftest) exchange(ctx context.Context, b []byte) (theirs []byte, err error) {
	if p.client {
		if err := p.side.send(ctx, b); err != nil {
			return nil, fmt.Errorf("side channel: %w", err)
		}
	}
	if theirs, err = p.side.recv(ctx, len(b)); err != nil {
		return nil, fmt.Errorf("side channel: %w", err)
	}
	if !p.client {
		if err := p.side.send(ctx, b); err != nil {
			return nil, fmt.Errorf("side channel: %w", err)
		}
	}
	return theirs, nil
}

// perftestVersion is what we say we are: records changed later, and older ones do not accept
// each other.
const perftestVersion = "6.06"

// hello exchanges version, page size, length of a cache line and MTU, and returns the MTU
// that both can do.
func (p *perftest) hello(ctx context.Context) (verbs.MTU, error) {
	mtu := p.MTU
	if mtu == 0 {
		mtu = p.dev.Attr().MaxMTU
	}
	var version [16]byte
	copy(version[:], perftestVersion)
	for _, b := range [][]byte{version[:], {0, 0, 0x10, 0}, {0, 0, 0, 64}} {
		if _, err := p.exchange(ctx, b); err != nil {
			return 0, err
		}
	}
	theirs, err := p.exchange(ctx, []byte{'0' + byte(mtu), 0})
	if err != nil {
		return 0, err
	}
	t := verbs.MTU(theirs[0] - '0')
	if !t.Valid() {
		return 0, fmt.Errorf("MTU code %q", theirs)
	}
	return min(mtu, t), nil
}

// handshakes is how many of them come before the data.
func (p *perftest) handshakes() int {
	switch p.Test {
	case "write_bw", "read_bw", "atomic_bw":
		return 3
	}
	return 4
}

// handshake exchanges records. It is also perftest's barrier, so it happens again and again;
// the last record counts.
func (p *perftest) handshake(ctx context.Context) error {
	theirs, err := p.exchange(ctx, p.side.encode(p.own))
	if err != nil {
		return err
	}
	p.peer, err = p.side.decode(theirs)
	return err
}

// tail is what follows the data. Bandwidth tests in which the server did nothing tell it the
// results: size, iterations, peak, average and message rate. Ours are zeros, as nothing is
// measured here.
func (p *perftest) tail(ctx context.Context) error {
	switch p.Test {
	case "write_lat":
		return nil
	case "send_bw", "send_lat", "read_lat", "atomic_lat":
		return p.handshake(ctx)
	}
	if err := p.handshake(ctx); err != nil {
		return err
	}
	for _, v := range []uint64{uint64(p.Size), uint64(p.Count), math.Float64bits(0), math.Float64bits(0), math.Float64bits(0)} {
		if _, err := p.exchange(ctx, binary.BigEndian.AppendUint64(nil, v)); err != nil {
			return err
		}
	}
	return p.handshake(ctx)
}
