package roce

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// captured is a packet to port 4791 out of testdata/captures.
type captured struct {
	file     string
	n        int // within the file, from 0
	src, dst netip.AddrPort
	ip, udp  []byte // the two headers as captured
	ipID     uint16
	roce     []byte // BTH to ICRC
}

func (c *captured) path() Path { return NewPath(c.src, c.dst) }

// probe is the capture that contains wrong ICRCs on purpose.
const probe = "userspace_probe.pcap"

// captures reads every packet once; tests must not write to them.
var captures = sync.OnceValues(func() ([]captured, error) {
	files, err := filepath.Glob("testdata/captures/*.pcap")
	if err != nil {
		return nil, err
	}
	var all []captured
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r, err := pcapgo.NewReader(f)
		if err != nil {
			return nil, err
		}
		for n := 0; ; n++ {
			data, _, err := r.ReadPacketData()
			if err == io.EOF {
				break
			} else if err != nil {
				return nil, err
			}
			if c, ok := dissect(gopacket.NewPacket(data, r.LinkType(), gopacket.NoCopy)); ok {
				c.file, c.n = filepath.Base(name), n
				all = append(all, c)
			}
		}
	}
	return all, nil
})

// dissect takes a frame apart with gopacket's opinion of IP and UDP.
func dissect(pkt gopacket.Packet) (c captured, ok bool) {
	udp, ok := pkt.TransportLayer().(*layers.UDP)
	if !ok || udp.DstPort != Port {
		return c, false
	}
	ip := pkt.NetworkLayer()
	if v4, ok := ip.(*layers.IPv4); ok {
		c.ipID = v4.Id
	}
	src, _ := netip.AddrFromSlice(ip.NetworkFlow().Src().Raw())
	dst, _ := netip.AddrFromSlice(ip.NetworkFlow().Dst().Raw())
	c.src = netip.AddrPortFrom(src, uint16(udp.SrcPort))
	c.dst = netip.AddrPortFrom(dst, uint16(udp.DstPort))
	c.ip, c.udp, c.roce = ip.LayerContents(), udp.Contents, udp.Payload
	return c, true
}

func eachCaptured(t testing.TB, f func(t testing.TB, c *captured)) {
	t.Helper()
	all, err := captures()
	if err != nil {
		t.Fatal(err)
	}
	for i := range all {
		f(t, &all[i])
	}
}

// referenceICRC computes an ICRC from real headers, byte by byte, sharing nothing with
// the package: the masks are those of IBTA annex A17.
func referenceICRC(ip, udp, packet []byte) uint32 {
	ip, udp, packet = bytes.Clone(ip), bytes.Clone(udp), bytes.Clone(packet)
	if ip[0]>>4 == 4 {
		ip[1], ip[8], ip[10], ip[11] = 0xFF, 0xFF, 0xFF, 0xFF // TOS, TTL, checksum
	} else {
		ip[0] |= 0x0F // traffic class and flow label
		ip[1], ip[2], ip[3], ip[7] = 0xFF, 0xFF, 0xFF, 0xFF
	}
	udp[6], udp[7] = 0xFF, 0xFF
	packet[4] = 0xFF
	crc := crc32.NewIEEE()
	crc.Write(bytes.Repeat([]byte{0xFF}, 8))
	crc.Write(ip)
	crc.Write(udp)
	crc.Write(packet)
	return crc.Sum32()
}

func TestCapturesComplete(t *testing.T) {
	var v4, v6 int
	opcodes := map[Opcode]int{}
	eachCaptured(t, func(t testing.TB, c *captured) {
		if c.src.Addr().Is4() {
			v4++
		} else {
			v6++
		}
		opcodes[Opcode(c.roce[0])]++
	})
	if v4 != 2496 || v6 != 284 {
		t.Errorf("%d IPv4 and %d IPv6 packets, want 2496 and 284", v4, v6)
	}
	if len(opcodes) < 30 {
		t.Errorf("only %d opcodes: %v", len(opcodes), opcodes)
	}
}

// Every packet of a real peer decodes and encodes back to the same bytes.
func TestCapturesRoundTrip(t *testing.T) {
	versions := 0
	eachCaptured(t, func(t testing.TB, c *captured) {
		var p Packet
		err := p.Decode(c.roce)
		if c.file == probe && errors.Is(err, ErrVersion) {
			versions++
			return
		}
		if err != nil {
			t.Errorf("%s #%d: %v", c.file, c.n, err)
			return
		}
		body := c.roce[:len(c.roce)-ICRCLen]
		if got := p.Append(nil); !bytes.Equal(got, body) {
			t.Errorf("%s #%d: encodes to\n%x, want\n%x", c.file, c.n, got, body)
		}
		if p.Pad != PadCount(len(p.Payload)) {
			t.Errorf("%s #%d: pad %d, want PadCount = %d", c.file, c.n, p.Pad, PadCount(len(p.Payload)))
		}
		if p.Len() != len(body) || p.HeaderLen()+len(p.Payload)+int(p.Pad) != len(body) {
			t.Errorf("%s #%d: Len %d, want %d", c.file, c.n, p.Len(), len(body))
		}
	})
	if versions != 1 {
		t.Errorf("%d packets of another transport version, want the one of the probe", versions)
	}
}

// Every ICRC of a real peer is right, in all the ways to compute it, but for the ten
// that the probe got wrong on purpose.
func TestCapturesICRC(t *testing.T) {
	var wrong, noDF []int
	eachCaptured(t, func(t testing.TB, c *captured) {
		path := c.path()
		n := len(c.roce) - ICRCLen
		want := referenceICRC(c.ip, c.udp, c.roce[:n])
		if c.src.Addr().Is4() && c.ip[6]&0x40 == 0 {
			// A Path takes DF as set; the one packet without it is wrong anyhow.
			noDF = append(noDF, c.n)
			if path.Check(c.roce, c.ipID) || binary.LittleEndian.Uint32(c.roce[n:]) == want {
				t.Errorf("%s #%d: no DF, yet the ICRC is right", c.file, c.n)
			}
			wrong = append(wrong, c.n)
			return
		}
		if got := path.ICRC(c.roce[:n], c.ipID); got != want {
			t.Fatalf("%s #%d: ICRC %08x, want %08x", c.file, c.n, got, want)
		}
		if got := gathered(&path, c.roce[:n], c.ipID, Opcode(c.roce[0]).HeaderLen(), 100); got != want {
			t.Fatalf("%s #%d: gathered ICRC %08x, want %08x", c.file, c.n, got, want)
		}
		if got := staged(&path, c.roce[:n], c.ipID); got != want {
			t.Fatalf("%s #%d: staged ICRC %08x, want %08x", c.file, c.n, got, want)
		}
		good := binary.LittleEndian.Uint32(c.roce[n:]) == want
		if got := path.Check(c.roce, c.ipID); got != good {
			t.Errorf("%s #%d: Check = %v", c.file, c.n, got)
		}
		id, ok := path.Solve(c.roce)
		if good && (!ok || id != c.ipID) {
			t.Errorf("%s #%d: Solve = %d, %v, want %d", c.file, c.n, id, ok, c.ipID)
		}
		if !good {
			wrong = append(wrong, c.n)
			if c.file != probe {
				t.Errorf("%s #%d: wrong ICRC", c.file, c.n)
			}
			// Solve may well find an ID that the sender had in mind, but never the
			// one in the IP header.
			if ok && (id == c.ipID || c.src.Addr().Is6()) {
				t.Errorf("%s #%d: Solve = %d, %v on a wrong ICRC", c.file, c.n, id, ok)
			}
		}
	})
	if len(wrong) != 10 {
		t.Errorf("wrong ICRCs %v, want ten", wrong)
	}
	if len(noDF) != 1 {
		t.Errorf("packets without DF %v, want the one of the probe", noDF)
	}
	t.Logf("wrong ICRCs in %s: %v", probe, wrong)
}

func gathered(p *Path, b []byte, ipID uint16, hdr, piece int) uint32 {
	s := p.ICRCStart(len(b)+ICRCLen, ipID, b[:hdr])
	for b = b[hdr:]; len(b) > 0; {
		n := min(piece, len(b))
		s.Update(b[:n])
		b = b[n:]
	}
	return s.Sum()
}

func staged(p *Path, b []byte, ipID uint16) uint32 {
	buf := make([]byte, p.PseudoLen()+len(b))
	p.PutPseudo(buf, len(b)+ICRCLen, ipID)
	copy(buf[p.PseudoLen():], b)
	was := bytes.Clone(buf)
	sum := ICRCStaged(buf, p.PseudoLen())
	if !bytes.Equal(buf, was) {
		panic("ICRCStaged changed its buffer")
	}
	return sum
}

// Every truncation of every distinct packet fails cleanly or decodes to less; the ICRC
// of a truncated packet never checks.
func TestCapturesTruncated(t *testing.T) {
	seen := map[string]bool{}
	eachCaptured(t, func(t testing.TB, c *captured) {
		// Distinct in shape: opcode, length, pad and management attribute.
		key := string(c.roce[:2]) + string(binary.BigEndian.AppendUint16(nil, uint16(len(c.roce))))
		if c.roce[0] == byte(UDSendOnly) && len(c.roce) == 280 {
			key += string(c.roce[36:38])
		}
		if seen[key] {
			return
		}
		seen[key] = true
		path := c.path()
		hl := Opcode(c.roce[0]).HeaderLen()
		for n := range c.roce {
			var p Packet
			b := c.roce[:n:n]
			err := p.Decode(b)
			switch {
			case n < hl+ICRCLen:
				if !errors.Is(err, ErrShort) && !errors.Is(err, ErrVersion) {
					t.Fatalf("%s #%d cut to %d: %v, want ErrShort", c.file, c.n, n, err)
				}
			case err == nil:
				if len(p.Payload) != n-hl-ICRCLen-int(p.Pad) {
					t.Fatalf("%s #%d cut to %d: payload %d", c.file, c.n, n, len(p.Payload))
				}
			}
			if path.Check(b, c.ipID) {
				t.Fatalf("%s #%d cut to %d: ICRC checks", c.file, c.n, n)
			}
			path.Solve(b)
			_ = p.String()
		}
	})
	if len(seen) < 50 {
		t.Errorf("only %d distinct packets", len(seen))
	}
}

// Every CM message of a real peer encodes back to the same bytes.
func TestCapturesCM(t *testing.T) {
	count := map[AttrID]int{}
	eachCaptured(t, func(t testing.TB, c *captured) {
		var p Packet
		if p.Decode(c.roce) != nil || p.Opcode != UDSendOnly || p.DestQP != 1 {
			return
		}
		var mad MAD
		if err := mad.Decode(p.Payload); err != nil {
			t.Fatalf("%s #%d: %v", c.file, c.n, err)
		}
		if !mad.IsCM() {
			t.Errorf("%s #%d: %+v is no CM MAD", c.file, c.n, mad)
		}
		if got := mad.Append(nil); !bytes.Equal(got, p.Payload) {
			t.Errorf("%s #%d: MAD encodes to\n%x, want\n%x", c.file, c.n, got, p.Payload)
		}
		m := newMessage(mad.AttrID)
		if m == nil {
			t.Fatalf("%s #%d: attribute %v", c.file, c.n, mad.AttrID)
		}
		count[mad.AttrID]++
		if err := m.Decode(mad.Data); err != nil {
			t.Fatalf("%s #%d: %v", c.file, c.n, err)
		}
		got := bytes.Repeat([]byte{0xA5}, CMMessageLen)
		m.Put(got)
		if !bytes.Equal(got, mad.Data) {
			t.Errorf("%s #%d: %v encodes to\n%x, want\n%x", c.file, c.n, mad.AttrID, got, mad.Data)
		}
		// What rdma_cm says inside agrees with the addresses outside.
		var private []byte
		switch m := m.(type) {
		case *REQ:
			if AddrFromGID(m.Primary.LocalGID) != c.src.Addr() || AddrFromGID(m.Primary.RemoteGID) != c.dst.Addr() {
				t.Errorf("%s #%d: GIDs %v and %v in a packet from %v to %v", c.file, c.n, m.Primary.LocalGID, m.Primary.RemoteGID, c.src, c.dst)
			}
			if m.Primary.LocalGID != GIDFromAddr(c.src.Addr()) {
				t.Errorf("%s #%d: GIDFromAddr(%v)", c.file, c.n, c.src.Addr())
			}
			if c.file == probe {
				return // its REQs keep the template's IP CM header
			}
			private = m.PrivateData
		case *SIDRReq:
			private = m.PrivateData
		default:
			return
		}
		var h IPCMHeader
		if err := h.Decode(private); err != nil {
			t.Fatalf("%s #%d: %v", c.file, c.n, err)
		}
		if h.Src != c.src.Addr() || h.Dst != c.dst.Addr() || h.SrcPort == 0 {
			t.Errorf("%s #%d: %+v in a packet from %v to %v", c.file, c.n, h, c.src, c.dst)
		}
		back := bytes.Repeat([]byte{0xA5}, IPCMHeaderLen)
		h.Put(back)
		if !bytes.Equal(back, private[:IPCMHeaderLen]) {
			t.Errorf("%s #%d: IP CM header encodes to %x, want %x", c.file, c.n, back, private[:IPCMHeaderLen])
		}
	})
	for _, a := range []AttrID{AttrREQ, AttrREP, AttrRTU, AttrREJ, AttrMRA, AttrDREQ, AttrDREP, AttrSIDRReq, AttrSIDRRep} {
		if count[a] == 0 {
			t.Errorf("no %v among the captures", a)
		}
	}
	t.Logf("%v", count)
}

// message is any CM message.
type message interface {
	Decode([]byte) error
	Put([]byte)
}

func newMessage(a AttrID) message {
	switch a {
	case AttrREQ:
		return new(REQ)
	case AttrMRA:
		return new(MRA)
	case AttrREJ:
		return new(REJ)
	case AttrREP:
		return new(REP)
	case AttrRTU:
		return new(RTU)
	case AttrDREQ:
		return new(DREQ)
	case AttrDREP:
		return new(DREP)
	case AttrSIDRReq:
		return new(SIDRReq)
	case AttrSIDRRep:
		return new(SIDRRep)
	case AttrLAP:
		return new(LAP)
	case AttrAPR:
		return new(APR)
	}
	return nil
}
