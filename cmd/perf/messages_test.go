package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSendBWMessages runs every method over every payload, both ends in processes of their own.
func TestSendBWMessages(t *testing.T) {
	file := filepath.Join(t.TempDir(), "out.json")
	for i, tc := range []struct {
		compress, payload string
		least, most       float64 // wire bytes per byte
	}{
		{"none", "text", 1, 1.2}, {"s2", "text", 0.1, 0.5}, {"zstd", "text", 0.05, 0.3},
		{"s2", "random", 1, 1.2}, {"zstd", "zero", 0.0001, 0.1},
	} {
		server, client := fmt.Sprintf("127.3.90.%d", 2*i+1), fmt.Sprintf("127.3.90.%d", 2*i+2)
		p := start(t, "send_bw", "--bind", server, "--compress", tc.compress, "-s", "30000")
		p.until(t, "Waiting for a client")
		out := good(t, "send_bw", server, "--bind", client, "--compress", tc.compress, "--payload", tc.payload,
			"-s", "30000", "-n", "300", "--out_json_file", file)
		if !strings.Contains(out, "Compression : "+tc.compress) || !strings.Contains(out, " 30000      300 ") {
			t.Errorf("%v: the report is\n%s", tc, out)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var doc struct {
			Results struct {
				Size    int     `json:"MsgSize"`
				Iters   int     `json:"n_iterations"`
				Average float64 `json:"BW_average"`
				Rate    float64 `json:"MsgRate"`
				Elapsed float64 `json:"elapsed_sec"`
				Wire    float64 `json:"wire_bytes_per_byte"`
			} `json:"results"`
		}
		if err := json.Unmarshal(b, &doc); err != nil {
			t.Fatal(err)
		}
		r := doc.Results
		if r.Size != 30000 || r.Iters != 300 || r.Wire < tc.least || r.Wire > tc.most {
			t.Errorf("%v: %+v", tc, r)
		}
		// The rate is rounded to one message a second, which is 0.03 MiB.
		if bw := r.Rate * 1e6 * 30000 / (1 << 20); bw < r.Average*0.999-0.03 || bw > r.Average*1.001+0.03 {
			t.Errorf("%v: average %v, by the rate %v", tc, r.Average, bw)
		}
		if got := p.end(t); got.code != 0 || !strings.Contains(got.stdout, "Received 600 messages, 18000000 bytes") {
			t.Errorf("%v: the server ended with %d\n%s%s", tc, got.code, got.stdout, got.stderr)
		}
	}
}

func TestSendBWMessagesRefused(t *testing.T) {
	for _, args := range [][]string{
		{"--compress", "gzip"}, {"--payload", "poems"}, {"--compress", "s2", "-q", "2"}, {"--payload", "zero", "-b"},
		{"--compress", "s2", "-s", "0"}, {"--compress", "s2", "-a"}, {"--compress", "s2", "-s", "100000000"},
	} {
		if r := perf(t, append([]string{"send_bw", "192.0.2.9", "--bind=192.0.2.1"}, args...)...); r.code != 2 || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%v: exit %d, %q", args, r.code, r.stderr)
		}
	}
	if r := perf(t, "write_bw", "192.0.2.9", "--compress", "s2"); r.code != 2 {
		t.Errorf("write_bw took --compress: %d, %q", r.code, r.stderr)
	}
	// A server of verbs, and one that does not compress.
	v := start(t, "send_bw", "--bind", "127.3.91.1")
	v.until(t, "Waiting for a client")
	if r := perf(t, "send_bw", "127.3.91.1", "--bind", "127.3.91.2", "--compress", "s2"); r.code != 1 || !strings.Contains(r.stderr, "measures verbs, not messages") {
		t.Errorf("against a server of verbs: exit %d, %q", r.code, r.stderr)
	}
	p := start(t, "send_bw", "--bind", "127.3.91.3", "--compress", "none")
	p.until(t, "Waiting for a client")
	if r := perf(t, "send_bw", "127.3.91.3", "--bind", "127.3.91.4", "--compress", "s2"); r.code != 1 || !strings.Contains(r.stderr, "start it with --compress s2") {
		t.Errorf("against --compress none: exit %d, %q", r.code, r.stderr)
	}
}

// TestServeMessages: perf serve takes message tests of any method, beside those of verbs, and
// refuses what is beyond its memory.
func TestServeMessages(t *testing.T) {
	p := start(t, "serve", "--bind", "127.3.92.1", "--max-memory", "16777216")
	p.until(t, "Serving on")
	for i, compress := range []string{"none", "s2", "zstd"} {
		args := []string{"send_bw", "127.3.92.1", "--bind", fmt.Sprintf("127.3.92.%d", 2+i), "--compress", compress, "-r", "16", "-s", "3000", "-n", "200"}
		if out := good(t, args...); !strings.Contains(out, "Compression : "+compress) || !strings.Contains(out, " 3000       200 ") {
			t.Errorf("%v: the report is\n%s", args, out)
		}
	}
	good(t, "send_bw", "127.3.92.1", "--bind", "127.3.92.2", "-n", "100")
	if r := perf(t, "send_bw", "127.3.92.1", "--bind", "127.3.92.2", "--compress", "s2", "-s", "16000000"); r.code != 1 || !strings.Contains(r.stderr, "--max-memory") {
		t.Errorf("beyond the server's memory: exit %d, %q", r.code, r.stderr)
	}
	p.signal(t, os.Interrupt)
	out := p.end(t)
	if n := strings.Count(out.stdout, ": 400, with 1200000 bytes, warm-up included\n"); n != 3 || out.code != 0 {
		t.Errorf("exit %d, %d of 3 message tests in the report:\n%s%s", out.code, n, out.stdout, out.stderr)
	}
}
