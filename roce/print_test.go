package roce

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"testing"
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
