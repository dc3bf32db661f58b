package roce

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

var update = flag.Bool("update", false, "write testdata/print.golden anew")

// The lines of some captures that together have every kind of packet and CM message,
// read and found good by eye.
func TestPrintGolden(t *testing.T) {
	files := map[string]bool{
		"ops_imm_zero_solicited_v4.pcap": true, "cm_slow_accept_v4.pcap": true, "cm_reject_v6.pcap": true,
		"ud_send_lat_cm_v4.pcap": true, "rnr_write_imm_v4.pcap": true, "nak_fadd_badkey_v4.pcap": true,
		"nak_send_too_long_v4.pcap": true, "send_inv_plain_mr_v4.pcap": true, "read_bw_5000_v6.pcap": true,
	}
	var got bytes.Buffer
	lines := map[string]int{}
	eachCaptured(t, func(t testing.TB, c *captured) {
		if !files[c.file] {
			return
		}
		var p Packet
		if err := p.Decode(c.roce); err != nil {
			t.Fatal(err)
		}
		if lines[c.file]++; lines[c.file] <= 24 {
			fmt.Fprintf(&got, "%s %v\n", c.file, &p)
		}
	})
	const golden = "testdata/print.golden"
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	g, w := bytes.Split(got.Bytes(), []byte("\n")), bytes.Split(want, []byte("\n"))
	for i := range max(len(g), len(w)) {
		if i >= len(g) || i >= len(w) || !bytes.Equal(g[i], w[i]) {
			t.Fatalf("line %d of %s differs (-update renews it): got\n%s", i+1, golden, got.Bytes())
		}
	}
}

// What the captures do not have.
func TestPrint(t *testing.T) {
	aeth := func(s uint8) Packet {
		return Packet{BTH: BTH{Opcode: RCAck, PKey: DefaultPKey, PSN: 0xFFFFFF}, AETH: AETH{Syndrome: s, MSN: 3}}
	}
	gsi := func(attr AttrID, m message) Packet {
		mad := NewCMMAD(attr, 0x1122)
		if m != nil {
			mad.Data = make([]byte, CMMessageLen)
			m.Put(mad.Data)
		}
		return Packet{BTH: BTH{Opcode: UDSendOnly, DestQP: 1, PSN: 7}, DETH: DETH{QKey: GSIQKey, SrcQP: 1}, Payload: mad.Append(nil)}
	}
	other := gsi(AttrREQ, nil)
	other.Payload[1] = 0x03
	other.DETH.QKey = 5
	short := gsi(AttrREQ, nil)
	short.Payload = short.Payload[:8]
	tests := []struct {
		p    Packet
		want string
	}{
		{Packet{}, "SEND_FIRST psn=000000 len=0 pkey=0x0000"},
		{Packet{BTH: BTH{Opcode: RCSendFirst, PKey: DefaultPKey, PSN: 0xFFFFFE, AckReq: true}, Payload: make([]byte, 1024)}, "SEND_FIRST psn=fffffe len=1024 ackreq"},
		{Packet{BTH: BTH{Opcode: UCSendLast, PKey: 0x7FFF, FECN: true, BECN: true, TVer: 2, DestQP: 0xABC}}, "UC_SEND_LAST psn=000000 len=0 fecn becn tver=2 pkey=0x7fff dqpn=0x000abc"},
		{Packet{BTH: BTH{Opcode: 0x15, PKey: DefaultPKey}}, "OPCODE_0x15 psn=000000"},
		{Packet{BTH: BTH{Opcode: CNP, PKey: DefaultPKey, BECN: true, DestQP: 9}}, "CNP psn=000000 becn dqpn=0x000009"},
		{Packet{BTH: BTH{Opcode: RCFlush, PKey: DefaultPKey}, FETH: 0x13}, "FLUSH psn=000000 feth=0x13 va=0x0 rkey=0x0 dmalen=0"},
		{aeth(AckNoCredit), "ACK psn=ffffff msn=3"},
		{aeth(AckCredits(64)), "ACK psn=ffffff credits=64 msn=3"},
		{aeth(RNRNak(12)), "RNR_NAK psn=ffffff timer=0.64ms msn=3"},
		{aeth(RNRNak(1)), "RNR_NAK psn=ffffff timer=0.01ms msn=3"},
		{aeth(NakPSNSeq), "NAK psn=ffffff seqerr msn=3"},
		{aeth(NakInvReq), "NAK psn=ffffff invreq msn=3"},
		{aeth(NakRemAccess), "NAK psn=ffffff remaccess msn=3"},
		{aeth(NakRemOp), "NAK psn=ffffff remop msn=3"},
		{aeth(NakInvRD), "NAK psn=ffffff invrd msn=3"},
		{aeth(0x7F), "NAK psn=ffffff syndrome=0x7f msn=3"},
		{aeth(0x80), "ACK psn=ffffff syndrome=0x80 msn=3"},
		{gsi(AttrMRA, &MRA{Message: MessageREP, ServiceTimeout: 20}), "CM_MRA psn=000007 tid=0x0000000000001122 local=0x00000000 remote=0x00000000 of=REP timeout=20"},
		{gsi(AttrREJ, &REJ{Message: MessageOther, Reason: verbs.RejectConsumer, PrivateData: []byte("no")}), "CM_REJ psn=000007 tid=0x0000000000001122 local=0x00000000 remote=0x00000000 of=other reason=28 (refused by the program) private=2"},
		{gsi(AttrLAP, &LAP{RemoteQPN: 5}), "CM_LAP psn=000007 tid=0x0000000000001122 local=0x00000000 remote=0x00000000 qpn=0x000005"},
		{gsi(AttrAPR, &APR{Status: APRUnsupported}), "CM_APR psn=000007 tid=0x0000000000001122 local=0x00000000 remote=0x00000000 status=2"},
		{gsi(AttrREQ, &REQ{TransportService: ServiceUC, ServiceID: 5, PathMTU: verbs.MTU4096}), "CM_REQ psn=000007 tid=0x0000000000001122 local=0x00000000 qpn=0x000000 start=000000 mtu=4096 transport=1 resp=0 init=0 retry=0 rnr=0 acktimeout=0 service=0x0000000000000005"},
		{other, "MAD psn=000007 qkey=0x00000005 class=0x03 method=0x03 attr=0x0010 tid=0x0000000000001122"},
		{short, "UD_SEND_ONLY psn=000007 len=8 pkey=0x0000 dqpn=0x000001 sqpn=0x000001 qkey=0x80010000"},
	}
	for _, tt := range tests {
		if got := tt.p.String(); got != tt.want {
			t.Errorf("got\n%s, want\n%s", got, tt.want)
		}
	}
}
