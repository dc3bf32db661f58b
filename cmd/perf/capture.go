package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/doorbell-rdma/doorbell/transport"
)

// captureFile writes a device's packets as a capture of raw IP. Trains of segments, which a
// capture on the loopback interface shows unsplit, are single packets here.
type captureFile struct {
	name string
	f    *os.File
	buf  *bufio.Writer
	w    *pcapgo.Writer
	err  error
	b    []byte
}

func createCapture(name string) (*captureFile, error) {
	f, err := os.Create(name)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	c := &captureFile{name: name, f: f, buf: bufio.NewWriterSize(f, 1<<16)}
	c.w = pcapgo.NewWriterNanos(c.buf)
	c.err = c.w.WriteFileHeader(1<<16, layers.LinkTypeRaw)
	return c, nil
}

// packet is a transport.Config.Tap: called by one goroutine.
func (c *captureFile) packet(p *transport.TapPacket) {
	if c.err != nil {
		return
	}
	c.b = append(appendIP(c.b[:0], p.Src, p.Dst, p.ID, len(p.Payload)), p.Payload...)
	ci := gopacket.CaptureInfo{Timestamp: p.Time, CaptureLength: len(c.b), Length: len(c.b)}
	c.err = c.w.WritePacket(ci, c.b)
}

// close writes what is left; the device must be closed before.
func (c *captureFile) close() error {
	err := errors.Join(c.err, c.buf.Flush(), c.f.Close())
	if err != nil {
		return fmt.Errorf("capture: %s: %w", c.name, err)
	}
	return nil
}

// appendIP appends the IP and UDP headers that the kernel put before a payload, as far as
// the ICRC looks at them: TTL and checksums are not covered.
func appendIP(b []byte, src, dst netip.AddrPort, id uint16, n int) []byte {
	n += 8
	if src.Addr().Is4() {
		h := [20]byte{0: 0x45, 6: 0x40, 8: 64, 9: 17}
		binary.BigEndian.PutUint16(h[2:], uint16(20+n))
		binary.BigEndian.PutUint16(h[4:], id)
		s, d := src.Addr().As4(), dst.Addr().As4()
		copy(h[12:], s[:])
		copy(h[16:], d[:])
		sum := uint32(0)
		for i := 0; i < len(h); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(h[i:]))
		}
		sum = sum&0xFFFF + sum>>16
		binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
		b = append(b, h[:]...)
	} else {
		h := [40]byte{0: 0x60, 6: 17, 7: 64}
		binary.BigEndian.PutUint16(h[4:], uint16(n))
		s, d := src.Addr().As16(), dst.Addr().As16()
		copy(h[8:], s[:])
		copy(h[24:], d[:])
		b = append(b, h[:]...)
	}
	b = binary.BigEndian.AppendUint16(b, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	return append(b, 0, 0) // no UDP checksum, as RoCEv2 has it
}
