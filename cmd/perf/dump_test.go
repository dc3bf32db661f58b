package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

const captures = "../../roce/testdata/captures"

// TestDumpCaptures: every packet of a real peer is good, but for ten that a probe broke on
// purpose.
func TestDumpCaptures(t *testing.T) {
	files, err := filepath.Glob(captures + "/*.pcap")
	if err != nil || len(files) < 50 {
		t.Fatalf("%d captures, %v", len(files), err)
	}
	packets := 0
	for _, file := range files {
		r := perf(t, "dump", file)
		lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
		packets += len(lines) - 1
		bad := strings.Count(r.stdout, "  BAD   ")
		wantBad, wantCode := 0, exitOK
		if filepath.Base(file) == "userspace_probe.pcap" {
			wantBad, wantCode = 10, exitFailed
		}
		total := fmt.Sprintf("%d packets: %d good, %d bad ICRC", len(lines)-1, len(lines)-1-wantBad, wantBad)
		if r.code != wantCode || bad != wantBad || !strings.HasPrefix(lines[len(lines)-1], total) {
			t.Errorf("%s: exit %d, %d bad, %q, want %q; %s", file, r.code, bad, lines[len(lines)-1], total, r.stderr)
		}
	}
	if packets != 2780 {
		t.Errorf("%d packets, want 2780", packets)
	}
}

// TestDumpLines: how packets look.
func TestDumpLines(t *testing.T) {
	out := good(t, "dump", captures+"/rping_v6.pcap")
	for _, want := range []string{
		"   0.000000  [fd77::2]:55410 > [fd77::3]:4791  good  CM_REQ psn=000003 tid=0x0000000288e0e01c ",
		"   0.025739  [fd77::2]:60407 > [fd77::3]:4791  good  SEND_ONLY psn=5c63b0 len=16 ackreq dqpn=0x000012\n",
		"   0.026253  [fd77::3]:60407 > [fd77::2]:4791  good  ACK psn=5c63b0 msn=1 dqpn=0x000012\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// frames reads a capture of ours.
func frames(t testing.TB, name string) (all [][]byte) {
	t.Helper()
	f, err := os.Open(filepath.Join(captures, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if r.LinkType() != layers.LinkTypeEthernet {
		t.Fatalf("link type %v", r.LinkType())
	}
	for {
		b, _, err := r.ReadPacketData()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
}

// write writes frames as a pcap of a link type; change makes a frame's bytes and length.
func write(t testing.TB, link layers.LinkType, all [][]byte, change func(b []byte) ([]byte, int)) string {
	t.Helper()
	var buf bytes.Buffer
	w := pcapgo.NewWriter(&buf)
	if err := w.WriteFileHeader(1<<16, link); err != nil {
		t.Fatal(err)
	}
	for i, b := range all {
		b, n := change(bytes.Clone(b))
		ci := gopacket.CaptureInfo{Timestamp: time.Unix(int64(i), 0), CaptureLength: len(b), Length: n}
		if err := w.WritePacket(ci, b); err != nil {
			t.Fatal(err)
		}
	}
	return save(t, buf.Bytes())
}

func save(t testing.TB, b []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "x.pcap")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func asIs(b []byte) ([]byte, int) { return b, len(b) }

// TestDumpLinks puts the same packets behind every link layer, in pcap and pcapng.
func TestDumpLinks(t *testing.T) {
	for _, name := range []string{"rping_v4.pcap", "rping_v6.pcap"} {
		all := frames(t, name)
		want := fmt.Sprintf("%d packets: %d good, 0 bad ICRC\n", len(all), len(all))
		behind := func(header ...byte) func(b []byte) ([]byte, int) {
			return func(b []byte) ([]byte, int) { return asIs(append(header[:len(header):len(header)], b[14:]...)) }
		}
		etherType := all[0][12:14]
		zeros := func(n int) []byte { return make([]byte, n) }
		for _, tc := range []struct {
			link   layers.LinkType
			change func(b []byte) ([]byte, int)
		}{
			{layers.LinkTypeEthernet, asIs},
			{layers.LinkTypeEthernet, func(b []byte) ([]byte, int) { return asIs(append(b, 0, 0, 0, 0)) }}, // padding
			{layers.LinkTypeEthernet, behind(append(append(zeros(12), 0x81, 0, 0, 7), etherType...)...)},
			{layers.LinkTypeEthernet, behind(append(append(zeros(12), 0x88, 0xA8, 0, 7, 0x81, 0, 0, 8), etherType...)...)},
			{layers.LinkTypeLinuxSLL, behind(append(zeros(14), etherType...)...)},
			{linkLinuxSLL2, behind(append(bytes.Clone(etherType), zeros(18)...)...)},
			{layers.LinkTypeNull, behind(2, 0, 0, 0)},
			{layers.LinkTypeLoop, behind(0, 0, 0, 2)},
			{layers.LinkTypeRaw, behind()},
			{layers.LinkType(12), behind()},
			{layers.LinkTypeIPv4, behind()},
			{layers.LinkTypeIPv6, behind()},
		} {
			if out := good(t, "dump", write(t, tc.link, all, tc.change)); !strings.HasSuffix(out, want) {
				t.Errorf("%s over link type %d:\n%s", name, tc.link, out)
			}
		}
		var buf bytes.Buffer
		w, err := pcapgo.NewNgWriter(&buf, layers.LinkTypeEthernet)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range all {
			ci := gopacket.CaptureInfo{Timestamp: time.Unix(1, 0), CaptureLength: len(b), Length: len(b)}
			if err := w.WritePacket(ci, b); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		if out := good(t, "dump", save(t, buf.Bytes())); !strings.HasSuffix(out, want) {
			t.Errorf("%s as pcapng:\n%s", name, out)
		}
	}
}

// TestDumpBitFlips: a bit changed anywhere in the ICRC's reach is noticed; in what routers
// change, and in front of IP, it is not.
func TestDumpBitFlips(t *testing.T) {
	frame := frames(t, "rping_v4.pcap")[3:4]
	flipped := func(at int) result {
		return perf(t, "dump", write(t, layers.LinkTypeEthernet, frame, func(b []byte) ([]byte, int) {
			b[at] ^= 0x08
			return asIs(b)
		}))
	}
	const ip, udp, bth = 14, 34, 42
	for _, at := range []int{ip + 4, ip + 15, ip + 19, udp + 1, bth, bth + 3, bth + 7, bth + 11, len(frame[0]) - 5, len(frame[0]) - 1} {
		if r := flipped(at); r.code != exitFailed || !strings.Contains(r.stdout, "  BAD   ") || !strings.Contains(r.stderr, "1 packets with a wrong ICRC") {
			t.Errorf("byte %d: exit %d\n%s%s", at, r.code, r.stdout, r.stderr)
		}
	}
	for _, at := range []int{0, ip + 1, ip + 8, ip + 10, udp + 6, bth + 4} {
		if r := flipped(at); r.code != exitOK {
			t.Errorf("byte %d: exit %d\n%s%s", at, r.code, r.stdout, r.stderr)
		}
	}
}

// TestDumpDamaged: files and packets that end early are told apart from wrong ones.
func TestDumpDamaged(t *testing.T) {
	all := frames(t, "rping_v4.pcap")
	path := filepath.Join(captures, "rping_v4.pcap")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ file, want string }{
		"empty file":    {save(t, nil), "not a capture"},
		"half a header": {save(t, b[:10]), "not a pcap or pcapng capture"},
		"text":          {save(t, []byte("hello, world; this is no capture")), "not a pcap or pcapng capture"},
		"in a packet":   {save(t, b[:len(b)-5]), fmt.Sprintf("the file ends in the middle of packet %d", len(all))},
		"in its header": {save(t, b[:24+5]), "the file ends in the middle of packet 1"},
		"snap length": {write(t, layers.LinkTypeEthernet, all, func(b []byte) ([]byte, int) { return b[:60], len(b) }),
			fmt.Sprintf("%d packets were cut short by the capture", len(all))},
	} {
		r := perf(t, "dump", tc.file)
		if r.code != exitFailed || !strings.Contains(r.stderr, tc.want) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: exit %d, stderr %q, want %q", name, r.code, r.stderr, tc.want)
		}
	}
	for n := range all[0] {
		// However short a frame is, it is skipped or told to be cut.
		r := perf(t, "dump", write(t, layers.LinkTypeEthernet, all[:1], func(b []byte) ([]byte, int) { return b[:n], len(b) }))
		if n < 42 && !strings.Contains(r.stdout, "1 others skipped") || n >= 42 && !strings.Contains(r.stdout, "1 cut short") {
			t.Errorf("%d bytes: exit %d, %s", n, r.code, r.stdout)
		}
	}
}

// TestDumpSkips: what is not RoCEv2 is counted, and a train from the loopback interface is
// explained.
func TestDumpSkips(t *testing.T) {
	all := frames(t, "rping_v4.pcap")[:3]
	i := 0
	out := good(t, "dump", write(t, layers.LinkTypeEthernet, all, func(b []byte) ([]byte, int) {
		switch i++; i {
		case 1:
			binary.BigEndian.PutUint16(b[36:], 53) // another port
		case 2:
			b[23] = 6 // TCP
		}
		return asIs(b)
	}))
	if !strings.HasSuffix(out, "1 packets: 1 good, 0 bad ICRC; 2 others skipped\n") {
		t.Errorf("got\n%s", out)
	}
	r := perf(t, "dump", write(t, layers.LinkTypeEthernet, all[:1], func(b []byte) ([]byte, int) {
		b = append(b, make([]byte, 9000)...)
		binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
		binary.BigEndian.PutUint16(b[38:], uint16(len(b)-34))
		return asIs(b)
	}))
	if r.code != exitFailed || !strings.Contains(r.stdout, "trains of segments") {
		t.Errorf("a train: exit %d\n%s", r.code, r.stdout)
	}
}

// FuzzDump: whatever a file holds, dump ends and does not panic.
func FuzzDump(f *testing.F) {
	for _, name := range []string{"rping_v4.pcap", "cm_reject_v6.pcap"} {
		b, err := os.ReadFile(filepath.Join(captures, name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:min(len(b), 2000)])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = dump(io.Discard, bytes.NewReader(b), true) // an error is fine
	})
}
