package netsim

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestTsharkUnderstandsUs captures a connection with everything that it carries and lets
// tshark dissect it: RoCE with CM messages, nothing malformed.
func TestTsharkUnderstandsUs(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Skip("tshark is not installed (apt-get install tshark)")
	}
	for _, addrs := range [][2]string{{"10.0.0.1", "10.0.0.2"}, {"fd00::1", "fd00::2"}} {
		var pcap bytes.Buffer
		net := New(9)
		if err := net.Capture(&pcap); err != nil {
			t.Fatal(err)
		}
		a, b := net.Node(addrs[0]), net.Node(addrs[1])
		newStream(t, 9, net, a, b, 16, 3000, Defaults()).run(50, time.Minute)
		if err := b.Wire.Listen(service); err != nil {
			t.Fatal(err)
		}
		o := open(t, net, a, b, true)
		net.Run(time.Second, func() bool { return o.greetings == 1 && o.requests == 1 })
		o.finish()
		file := filepath.Join(t.TempDir(), "x.pcap")
		if err := os.WriteFile(file, pcap.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		// The heuristic dissectors guess a protocol in message payloads; only RoCE is of interest.
		args := []string{"-r", file, "-T", "fields",
			"-e", "frame.number", "-e", "infiniband.bth.opcode", "-e", "infiniband.mad.attributeid", "-e", "_ws.malformed"}
		for _, guess := range []string{"smc", "smb_direct", "rpcordma", "nvme-rdma", "lnet", "iser", "infiniband.eoib", "infiniband_sdp", "fcoib"} {
			args = append(args, "--disable-protocol", guess)
		}
		out, err := exec.Command(tshark, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("tshark: %v\n%s", err, out)
		}
		lines := strings.Split(strings.Trim(string(out), "\n"), "\n")
		mads := map[string]int{}
		frames := 0
		for _, line := range lines {
			f := strings.Split(line, "\t")
			if len(f) < 4 {
				continue // tshark's own remarks
			}
			frames++
			if f[1] == "" {
				t.Errorf("frame %s is not dissected as RoCE", f[0])
			}
			if f[3] != "" {
				t.Errorf("frame %s is malformed: %s", f[0], line)
			}
			mads[f[2]]++
		}
		if frames != net.nth {
			t.Errorf("%d frames dissected, %d sent:\n%.500s", frames, net.nth, out)
		}
		for name, id := range map[string]string{"REQ": "0x0010", "REP": "0x0013", "RTU": "0x0014", "DREQ": "0x0015", "DREP": "0x0016"} {
			if mads[id] == 0 && mads[strings.Replace(id, "0x00", "0x", 1)] == 0 {
				t.Errorf("no %s among the CM messages %v", name, mads)
			}
		}
	}
}
