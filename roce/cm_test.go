package roce

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// field is a field of a CM message where the specification has it: byte offset, bit in
// that byte (0 is the most significant), width in bits.
type field struct {
	name            string
	byte, bit, bits int
}

func pathFields(prefix string, at int) []field {
	return []field{
		{prefix + "LocalLID", at, 0, 16}, {prefix + "RemoteLID", at + 2, 0, 16},
		{prefix + "LocalGID", at + 4, 0, 128}, {prefix + "RemoteGID", at + 20, 0, 128},
		{prefix + "FlowLabel", at + 36, 0, 20}, {prefix + "Resv36", at + 38, 4, 6}, {prefix + "PacketRate", at + 39, 2, 6},
		{prefix + "TrafficClass", at + 40, 0, 8}, {prefix + "HopLimit", at + 41, 0, 8},
		{prefix + "SL", at + 42, 0, 4}, {prefix + "SubnetLocal", at + 42, 4, 1}, {prefix + "Resv42", at + 42, 5, 3},
		{prefix + "AckTimeout", at + 43, 0, 5}, {prefix + "Resv43", at + 43, 5, 3},
	}
}

var ids = []field{{"LocalCommID", 0, 0, 32}, {"RemoteCommID", 4, 0, 32}}

// layouts is the specification's tables of the messages. Each covers all 232 bytes.
var layouts = []struct {
	attr   AttrID
	fields []field
}{
	{AttrREQ, join([]field{
		{"LocalCommID", 0, 0, 32}, {"Resv4", 4, 0, 32}, {"ServiceID", 8, 0, 64}, {"LocalCAGUID", 16, 0, 64},
		{"Resv24", 24, 0, 32}, {"LocalQKey", 28, 0, 32}, {"LocalQPN", 32, 0, 24}, {"ResponderResources", 35, 0, 8},
		{"LocalEECN", 36, 0, 24}, {"InitiatorDepth", 39, 0, 8}, {"RemoteEECN", 40, 0, 24},
		{"RemoteCMTimeout", 43, 0, 5}, {"TransportService", 43, 5, 2}, {"FlowControl", 43, 7, 1},
		{"StartingPSN", 44, 0, 24}, {"LocalCMTimeout", 47, 0, 5}, {"RetryCount", 47, 5, 3}, {"PKey", 48, 0, 16},
		{"PathMTU", 50, 0, 4}, {"RDCExists", 50, 4, 1}, {"RNRRetryCount", 50, 5, 3},
		{"MaxCMRetries", 51, 0, 4}, {"SRQ", 51, 4, 1}, {"ExtTransport", 51, 5, 3},
	}, pathFields("Primary.", 52), pathFields("Alternate.", 96), []field{{"PrivateData", 140, 0, 736}})},
	{AttrMRA, join(ids, []field{{"Message", 8, 0, 2}, {"Resv8", 8, 2, 6}, {"ServiceTimeout", 9, 0, 5}, {"Resv9", 9, 5, 3},
		{"PrivateData", 10, 0, 222 * 8}})},
	{AttrREJ, join(ids, []field{{"Message", 8, 0, 2}, {"Resv8", 8, 2, 6}, {"InfoLen", 9, 0, 7}, {"Resv9", 9, 7, 1},
		{"Reason", 10, 0, 16}, {"Info", 12, 0, 72 * 8}, {"PrivateData", 84, 0, 148 * 8}})},
	{AttrREP, join(ids, []field{{"LocalQKey", 8, 0, 32}, {"LocalQPN", 12, 0, 24}, {"Resv15", 15, 0, 8},
		{"LocalEECN", 16, 0, 24}, {"Resv19", 19, 0, 8}, {"StartingPSN", 20, 0, 24}, {"Resv23", 23, 0, 8},
		{"ResponderResources", 24, 0, 8}, {"InitiatorDepth", 25, 0, 8}, {"TargetAckDelay", 26, 0, 5},
		{"FailoverAccepted", 26, 5, 2}, {"FlowControl", 26, 7, 1}, {"RNRRetryCount", 27, 0, 3}, {"SRQ", 27, 3, 1},
		{"Resv27", 27, 4, 4}, {"LocalCAGUID", 28, 0, 64}, {"PrivateData", 36, 0, 196 * 8}})},
	{AttrRTU, join(ids, []field{{"PrivateData", 8, 0, 224 * 8}})},
	{AttrDREQ, join(ids, []field{{"RemoteQPN", 8, 0, 24}, {"Resv11", 11, 0, 8}, {"PrivateData", 12, 0, 220 * 8}})},
	{AttrDREP, join(ids, []field{{"PrivateData", 8, 0, 224 * 8}})},
	{AttrSIDRReq, []field{{"RequestID", 0, 0, 32}, {"PKey", 4, 0, 16}, {"Resv6", 6, 0, 16}, {"ServiceID", 8, 0, 64},
		{"PrivateData", 16, 0, 216 * 8}}},
	{AttrSIDRRep, []field{{"RequestID", 0, 0, 32}, {"Status", 4, 0, 8}, {"InfoLen", 5, 0, 8}, {"Resv6", 6, 0, 16},
		{"QPN", 8, 0, 24}, {"Resv11", 11, 0, 8}, {"ServiceID", 12, 0, 64}, {"QKey", 20, 0, 32},
		{"Info", 24, 0, 72 * 8}, {"PrivateData", 96, 0, 136 * 8}}},
	{AttrLAP, join(ids, []field{{"Resv8", 8, 0, 32}, {"RemoteQPN", 12, 0, 24}, {"RemoteCMTimeout", 15, 0, 5},
		{"Resv15", 15, 5, 3}, {"Resv16", 16, 0, 32}, {"Alternate.LocalLID", 20, 0, 16}, {"Alternate.RemoteLID", 22, 0, 16},
		{"Alternate.LocalGID", 24, 0, 128}, {"Alternate.RemoteGID", 40, 0, 128}, {"Alternate.FlowLabel", 56, 0, 20},
		{"Alternate.Resv36", 58, 4, 4}, {"Alternate.TrafficClass", 59, 0, 8}, {"Alternate.HopLimit", 60, 0, 8},
		{"Resv61", 61, 0, 2}, {"Alternate.PacketRate", 61, 2, 6}, {"Alternate.SL", 62, 0, 4},
		{"Alternate.SubnetLocal", 62, 4, 1}, {"Alternate.Resv42", 62, 5, 3}, {"Alternate.AckTimeout", 63, 0, 5},
		{"Alternate.Resv43", 63, 5, 3}, {"PrivateData", 64, 0, 168 * 8}})},
	{AttrAPR, join(ids, []field{{"InfoLen", 8, 0, 8}, {"Status", 9, 0, 8}, {"Resv10", 10, 0, 16},
		{"Info", 12, 0, 72 * 8}, {"PrivateData", 84, 0, 148 * 8}})},
}

func join(parts ...[]field) (all []field) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// fillField sets a field to all ones, of its Go type's width, and reports its value.
func fillField(m message, name string) reflect.Value {
	v := reflect.ValueOf(m).Elem()
	for part := range strings.SplitSeq(name, ".") {
		v = v.FieldByName(part)
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Slice:
		v.SetBytes(bytes.Repeat([]byte{0xFF}, CMMessageLen)) // cut by the caller
	case reflect.Array:
		for i := range v.Len() {
			v.Index(i).SetUint(0xFF)
		}
	default:
		v.SetUint(^uint64(0) >> (64 - v.Type().Bits()))
	}
	return v
}

// Each field fills just the bits the specification gives it, and is all that these bits
// set. A field that is too wide for its place must not spill.
func TestCMLayout(t *testing.T) {
	for _, l := range layouts {
		t.Run(l.attr.String(), func(t *testing.T) {
			union := make([]byte, CMMessageLen)
			for _, f := range l.fields {
				want := make([]byte, CMMessageLen)
				for i := range f.bits {
					at := f.byte*8 + f.bit + i
					want[at/8] |= 0x80 >> (at % 8)
				}
				m := newMessage(l.attr)
				v := fillField(m, f.name)
				if v.Kind() == reflect.Slice {
					v.SetBytes(v.Bytes()[:f.bits/8])
				}
				got := bytes.Repeat([]byte{0xA5}, CMMessageLen)
				m.Put(got)
				if !bytes.Equal(got, want) {
					t.Errorf("%s is put at\n%x, want\n%x", f.name, got, want)
				}
				for i, b := range want {
					if union[i]&b != 0 {
						t.Errorf("%s overlaps another field at byte %d", f.name, i)
					}
					union[i] |= b
				}
				// Decoded, these bits set this field and no other.
				back, zero := newMessage(l.attr), newMessage(l.attr)
				if err := back.Decode(want); err != nil {
					t.Fatal(err)
				}
				if err := zero.Decode(make([]byte, CMMessageLen)); err != nil {
					t.Fatal(err)
				}
				for _, g := range l.fields {
					a, b := valueOf(back, g.name), valueOf(zero, g.name)
					if same := reflect.DeepEqual(a, b); same != (g.name != f.name) {
						t.Errorf("bits of %s: %s is %v", f.name, g.name, a)
					}
				}
			}
			if !bytes.Equal(union, bytes.Repeat([]byte{0xFF}, CMMessageLen)) {
				t.Errorf("bits of no field:\n%x", union)
			}
		})
	}
}

func valueOf(m message, name string) any {
	v := reflect.ValueOf(m).Elem()
	for part := range strings.SplitSeq(name, ".") {
		v = v.FieldByName(part)
	}
	return v.Interface()
}

// Whatever bits a message has, it encodes back to them.
func TestCMRandomRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	b, got := make([]byte, CMMessageLen), make([]byte, CMMessageLen)
	for _, l := range layouts {
		for range 200 {
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			m := newMessage(l.attr)
			if err := m.Decode(b); err != nil {
				t.Fatal(err)
			}
			m.Put(got)
			if !bytes.Equal(got, b) {
				t.Fatalf("%v encodes to\n%x, want\n%x", l.attr, got, b)
			}
		}
		for _, n := range []int{0, 1, CMMessageLen - 1, CMMessageLen + 1} {
			if err := newMessage(l.attr).Decode(make([]byte, n)); !errors.Is(err, ErrMAD) {
				t.Errorf("%v of %d bytes: %v, want ErrMAD", l.attr, n, err)
			}
		}
	}
}

// The sizes that programs may fill are those of the specification, and private data
// shorter than that is followed by zeros, not by what the buffer held.
func TestCMPrivateData(t *testing.T) {
	for attr, want := range map[AttrID]int{
		AttrREQ: REQPrivateLen, AttrMRA: MRAPrivateLen, AttrREJ: REJPrivateLen, AttrREP: REPPrivateLen,
		AttrRTU: RTUPrivateLen, AttrDREQ: DREQPrivateLen, AttrDREP: DREPPrivateLen, AttrLAP: LAPPrivateLen,
		AttrAPR: APRPrivateLen, AttrSIDRReq: SIDRReqPrivateLen, AttrSIDRRep: SIDRRepPrivateLen,
	} {
		m := newMessage(attr)
		b := bytes.Repeat([]byte{0xA5}, CMMessageLen)
		if err := m.Decode(b); err != nil {
			t.Fatal(err)
		}
		private := reflect.ValueOf(m).Elem().FieldByName("PrivateData")
		if private.Len() != want || private.Cap() != want {
			t.Errorf("%v: private data of %d (cap %d), want %d", attr, private.Len(), private.Cap(), want)
		}
		private.SetBytes([]byte("ab"))
		out := bytes.Repeat([]byte{0xA5}, CMMessageLen)
		m.Put(out)
		tail := out[CMMessageLen-want:]
		if string(tail[:2]) != "ab" || !bytes.Equal(tail[2:], make([]byte, want-2)) {
			t.Errorf("%v: private data %x", attr, tail)
		}
	}
}

func TestMAD(t *testing.T) {
	m := NewCMMAD(AttrRTU, 0x1122334455667788)
	m.Data = []byte{9, 8, 7}
	if !m.IsCM() {
		t.Error("IsCM is false")
	}
	got := m.Append([]byte("kept"))
	want := append([]byte("kept"), unhex(t, "01070203"+"0000"+"0000"+"1122334455667788"+"0014"+"0000"+"00000000"+"090807")...)
	want = append(want, make([]byte, 4+MADLen-len(want))...)
	if !bytes.Equal(got, want) {
		t.Errorf("encodes to\n%x, want\n%x", got, want)
	}
	for _, n := range []int{0, 24, 255, 257} {
		m := MAD{TID: 1}
		if err := m.Decode(make([]byte, n)); !errors.Is(err, ErrMAD) || m.TID != 0 {
			t.Errorf("%d bytes: %v, TID %d", n, err, m.TID)
		}
	}
	for i, want := range map[int]bool{0: false, 1: false, 2: false, 3: false, 4: true, 16: true} {
		b := bytes.Clone(got[4:])
		b[i]++
		var m MAD
		if err := m.Decode(b); err != nil || m.IsCM() != want {
			t.Errorf("byte %d changed: IsCM = %v, %v", i, m.IsCM(), err)
		}
	}
	for a, want := range map[AttrID]string{0x0F: "ATTR_0x000f", 0x10: "REQ", 0x16: "DREP", 0x17: "SIDR_REQ", 0x18: "SIDR_REP", 0x19: "LAP", 0x1A: "APR", 0x1B: "ATTR_0x001b"} {
		if a.String() != want {
			t.Errorf("attribute %#x is %s, want %s", uint16(a), a, want)
		}
	}
}

func TestServiceID(t *testing.T) {
	tests := []struct {
		ps   PortSpace
		port uint16
		want SID
		text string
		ip   bool
	}{
		{PSTCP, 7471, 0x0000000001061D2F, "tcp:7471", true},
		{PSUDP, 65535, 0x000000000111FFFF, "udp:65535", true},
		{PSIB, 1, 0x00000000013F0001, "ib:1", true},
		{0x0199, 2, 0x0000000001990002, "ps_0x0199:2", true},
		{PSIPoIB, 3, 0x0000000000020003, "0x0000000000020003", false},
	}
	for _, tt := range tests {
		id := ServiceID(tt.ps, tt.port)
		if id != tt.want || id.PortSpace() != tt.ps || id.Port() != tt.port || id.IsIP() != tt.ip || id.String() != tt.text {
			t.Errorf("%v:%d: %#x, %v, %d, %v, %v", tt.ps, tt.port, uint64(id), id.PortSpace(), id.Port(), id.IsIP(), id)
		}
	}
	if SID(0x0200000001061D2F).IsIP() {
		t.Error("a locally administered service ID is taken for rdma_cm's")
	}
	if PSIPoIB.String() != "ipoib" {
		t.Error(PSIPoIB)
	}
}

func TestIPCMHeader(t *testing.T) {
	v4, v6, mapped := netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("fd77::1"), netip.MustParseAddr("::ffff:10.77.0.2")
	tests := []struct {
		name     string
		src, dst netip.Addr
		want     string
	}{
		{"v4", v4, netip.MustParseAddr("10.77.0.2"), "0040d903" + strings.Repeat("00", 12) + "0a4d0001" + strings.Repeat("00", 12) + "0a4d0002"},
		{"mapped", v4, mapped, "0040d903" + strings.Repeat("00", 12) + "0a4d0001" + strings.Repeat("00", 12) + "0a4d0002"},
		{"v6", v6, netip.MustParseAddr("fd77::2"), "0060d903" + "fd770000000000000000000000000001" + "fd770000000000000000000000000002"},
		{"zone", netip.MustParseAddr("fe80::1%lo"), v6, "0060d903" + "fe800000000000000000000000000001" + "fd770000000000000000000000000001"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := IPCMHeader{Src: tt.src, Dst: tt.dst, SrcPort: 0xD903}
			got := bytes.Repeat([]byte{0xA5}, IPCMHeaderLen+1)
			h.Put(got)
			if !bytes.Equal(got, append(unhex(t, tt.want), 0xA5)) {
				t.Fatalf("encodes to\n%x, want\n%s", got, tt.want)
			}
			var back IPCMHeader
			if err := back.Decode(got); err != nil {
				t.Fatal(err)
			}
			if back.Src != tt.src.Unmap().WithZone("") || back.Dst != tt.dst.Unmap() || back.SrcPort != 0xD903 {
				t.Errorf("decodes to %+v", back)
			}
		})
	}
	good := unhex(t, tests[0].want)
	for name, b := range map[string][]byte{
		"empty": nil, "short": good[:35], "version": append([]byte{0x10}, good[1:]...), "family": append([]byte{0, 0x50}, good[2:]...),
	} {
		var h IPCMHeader
		if err := h.Decode(b); !errors.Is(err, ErrIPCM) {
			t.Errorf("%s: %v, want ErrIPCM", name, err)
		}
	}
	// A mapped address in an IPv6 header is unmapped, so that one peer has one address.
	b := unhex(t, "00600001"+"00000000000000000000ffff0a4d0001"+"fd770000000000000000000000000001")
	var h IPCMHeader
	if err := h.Decode(b); err != nil || h.Src != v4 || h.Dst != v6 {
		t.Errorf("mapped: %+v, %v", h, err)
	}
}

func TestGID(t *testing.T) {
	for addr, want := range map[string]string{
		"10.77.0.1": "00000000000000000000ffff0a4d0001", "::ffff:10.77.0.1": "00000000000000000000ffff0a4d0001",
		"fd77::1": "fd770000000000000000000000000001", "fe80::1%lo": "fe800000000000000000000000000001",
	} {
		a := netip.MustParseAddr(addr)
		g := GIDFromAddr(a)
		if !bytes.Equal(g[:], unhex(t, want)) || AddrFromGID(g) != a.Unmap().WithZone("") || g.String() != a.Unmap().WithZone("").String() {
			t.Errorf("%s: GID %x, back %v, %v", addr, g[:], AddrFromGID(g), g)
		}
	}
	if GIDFromAddr(netip.Addr{}) != (GID{}) {
		t.Error("the invalid address has a GID")
	}
}

func TestSyndromes(t *testing.T) {
	for s := range 256 {
		s := uint8(s)
		ack, rnr, nak := IsAck(s), IsRNR(s), IsNak(s)
		if ack != (s < 0x20) || rnr != (s >= 0x20 && s < 0x40) || nak != (s >= 0x60 && s < 0x80) {
			t.Errorf("syndrome %#x: ACK %v, RNR %v, NAK %v", s, ack, rnr, nak)
		}
		n, ok := Credits(s)
		if ok != (s <= 30) || (ok && AckCredits(n) != s) {
			t.Errorf("syndrome %#x: credits %d, %v", s, n, ok)
		}
	}
	for n, want := range map[uint32]uint8{0: 0, 1: 1, 4: 4, 5: 4, 6: 5, 7: 5, 8: 6, 1000: 19, 1024: 20, 32767: 29, 32768: 30, 1 << 31: 30} {
		if got := AckCredits(n); got != want {
			t.Errorf("AckCredits(%d) = %d, want %d", n, got, want)
		}
	}
	for n := uint32(0); n < 40000; n++ {
		if got, _ := Credits(AckCredits(n)); got > n {
			t.Fatalf("AckCredits(%d) grants %d", n, got)
		}
	}
	for c := range verbs.RNRTimer(32) {
		if s := RNRNak(c); !IsRNR(s) || RNRTimerOf(s) != c {
			t.Errorf("RNR timer %d: syndrome %#x", c, s)
		}
	}
	if RNRNak(0xFF) != 0x3F || !IsNak(NakPSNSeq) || !IsNak(NakInvReq) || !IsNak(NakRemAccess) || !IsNak(NakRemOp) || !IsAck(AckNoCredit) {
		t.Error("syndrome constants")
	}
}
