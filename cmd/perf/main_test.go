package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// asPerf makes the test's own binary the command, so that tests can kill it.
const asPerf = "DOORBELL_TEST_AS_PERF"

func TestMain(m *testing.M) {
	if os.Getenv(asPerf) != "" {
		main()
	}
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/signal.loop"))
}

// result is what a command line gave.
type result struct {
	code           int
	stdout, stderr string
}

// perf runs a command line in this process.
func perf(t testing.TB, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var stdout, stderr bytes.Buffer
	a := &app{stdout: &stdout, stderr: &stderr, signals: make(chan os.Signal)}
	code := a.run(ctx, args)
	return result{code, stdout.String(), stderr.String()}
}

// good runs a command line that has to succeed.
func good(t testing.TB, args ...string) string {
	t.Helper()
	r := perf(t, args...)
	if r.code != 0 || strings.Contains(r.stderr, "perf: ") && !strings.Contains(r.stderr, "warning") {
		t.Fatalf("perf %s: exit %d\n%s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// process is perf as a process of its own.
type process struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	mu     sync.Mutex
	out    strings.Builder
	wrote  chan struct{} // holds a token when out has grown
	done   chan struct{} // closed when the process has ended and its output was read
}

func start(t testing.TB, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0], args...), wrote: make(chan struct{}, 1), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asPerf+"=1")
	p.cmd.Stderr = &p.stderr
	stdout, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		buf := make([]byte, 4096)
		for {
			n, err := stdout.Read(buf)
			p.mu.Lock()
			p.out.Write(buf[:n])
			p.mu.Unlock()
			select {
			case p.wrote <- struct{}{}:
			default:
			}
			if err != nil {
				_ = p.cmd.Wait() // the exit code is looked at elsewhere
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended long ago
		<-p.done
	})
	return p
}

func (p *process) stdout() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// until waits for text on stdout.
func (p *process) until(t testing.TB, text string) {
	t.Helper()
	p.untilCount(t, text, 1)
}

// untilCount waits until text stands on stdout n times.
func (p *process) untilCount(t testing.TB, text string, n int) {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for strings.Count(p.stdout(), text) < n {
		select {
		case <-p.wrote:
		case <-p.done:
			if strings.Count(p.stdout(), text) < n {
				t.Fatalf("%v ended with %d and without %q\n%s%s", p.cmd.Args[1:], p.cmd.ProcessState.ExitCode(), text, p.stdout(), p.stderr.String())
			}
		case <-timeout:
			t.Fatalf("%v: no %q\n%s", p.cmd.Args[1:], text, p.stdout())
		}
	}
}

// end waits for the end and returns what the process gave.
func (p *process) end(t testing.TB) result {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		t.Fatalf("%v does not end\n%s", p.cmd.Args[1:], p.stdout())
	}
	return result{p.cmd.ProcessState.ExitCode(), p.stdout(), p.stderr.String()}
}

func (p *process) signal(t testing.TB, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Error(err)
	}
}

// serving runs "perf serve" in this process until the test ends, which must end well.
func serving(t testing.TB, bind string, args ...string) {
	t.Helper()
	signals := make(chan os.Signal, 2)
	out := &firstWrite{seen: make(chan struct{})}
	var stderr bytes.Buffer
	a := &app{stdout: out, stderr: &stderr, signals: signals}
	code := make(chan int, 1)
	go func() { code <- a.run(context.Background(), append([]string{"serve", "--bind", bind}, args...)) }()
	select {
	case <-out.seen:
	case c := <-code:
		t.Fatalf("perf serve: exit %d: %s", c, stderr.String())
	}
	t.Cleanup(func() {
		signals <- syscall.SIGTERM
		if c := <-code; c != 0 {
			t.Errorf("perf serve: exit %d: %s", c, stderr.String())
		}
	})
}

// firstWrite says when somebody has written.
type firstWrite struct {
	once sync.Once
	seen chan struct{}
}

func (w *firstWrite) Write(b []byte) (int, error) {
	w.once.Do(func() { close(w.seen) })
	return len(b), nil
}

// TestUsage: a wrong command line is one line on stderr that names flag, value and range, and
// exit code 2. The addresses do not exist, so whatever opens a socket fails differently.
func TestUsage(t *testing.T) {
	const bind = "--bind=192.0.2.1"
	tests := [][]string{ // arguments, then what stderr says
		{"bogus", `unknown command "bogus"`},
		{"--bogus", "unknown flag: --bogus"},
		{"send_lat", "--bogus", "unknown flag: --bogus"},
		{"send_lat", "-s", "flag needs an argument"},
		{"send_lat", bind, "a", "b", `unexpected operand "b"`},
		{"serve", bind, "x", `unexpected operand "x"`},
		{"demo", "x", `unexpected operand "x"`},
		{"dump", "dump takes one FILE"},
		{"send_lat", bind, "-q", "2", "unknown shorthand flag: 'q'"},
		{"send_lat", "--bind", "here", `invalid argument "here" for "--bind" flag: want ADDR`},
		{"send_lat", "--bind", "127.0.0.1:0", `UDP port "0", want 1 to 65535`},
		{"send_lat", bind, "127.0.0.1:99999", `UDP port "99999", want 1 to 65535`},
		{"send_lat", bind, "0.0.0.0", "not the address of one host"},
		{"send_lat", bind, "[::1", "want HOST or HOST:UDPPORT"},
		{"send_lat", bind, ":4791", "the host is missing"},
		{"send_bw", bind, "-D", "1", "-n", "5", "-n and -D exclude each other"},
		{"send_bw", bind, "-m", "1500", `"1500" for "-m, --mtu" flag: want 256, 512, 1024, 2048 or 4096`},
		{"send_bw", bind, "--wait", "forever", `"forever" for "--wait" flag: want poll or adaptive or block`},
		{"send_bw", bind, "-c", "XRC", `"XRC" for "-c, --connection" flag: want RC or UC or UD`},
		{"send_bw", bind, "-a", "-s", "1", "largest message size is 1, want 2 to 8388608"},
		{"send_bw", bind, "-c", "UD", "-s", "5000", "message size of send_bw over UD is 5000, want 0 to 4096"},
		{"send_lat", bind, "-c", "UD", "-m", "256", "-s", "257", "message size of send_lat over UD is 257, want 0 to 256"},
		{"send_bw", bind, "--use-srq", "-q", "1000", "shared receives (QPs times rx depth) is 512000, want 1 to 65536"},
		{"write_lat", bind, "-c", "UD", "connection type UD has no WRITEs: write_lat needs RC or UC"},
		{"write_lat", bind, "-e", "write_lat polls memory"},
		{"write_lat", bind, "--wait", "block", "write_lat polls memory"},
		{"write_bw", bind, "-s", "0", "message size of write_bw over RC is 0, want 1 to 1073741824"},
		{"write_bw", bind, "-r", "5", "unknown shorthand flag: 'r'"},
		{"write_bw", bind, "--use-srq", "unknown flag: --use-srq"},
		{"write_bw", bind, "-o", "5", "unknown shorthand flag: 'o'"},
		{"read_bw", bind, "-c", "UC", "connection type UC has no READs and atomics: read_bw needs RC"},
		{"read_lat", bind, "-c", "UD", "connection type UD has no READs and atomics: read_lat needs RC"},
		{"read_bw", bind, "-o", "0", `invalid argument "0" for "-o, --outs" flag: want a whole number from 1 to 128`},
		{"read_bw", bind, "-o", "129", "want a whole number from 1 to 128"},
		{"read_bw", bind, "-I", "5", "unknown shorthand flag: 'I'"},
		{"read_lat", bind, "-b", "unknown shorthand flag: 'b'"},
		{"atomic_bw", bind, "-A", "ADD", `"ADD" for "-A, --atomic_type" flag: want CMP_AND_SWAP or FETCH_AND_ADD`},
		{"atomic_bw", bind, "-c", "UC", "connection type UC has no READs and atomics: atomic_bw needs RC"},
		{"atomic_lat", bind, "-s", "8", "unknown shorthand flag: 's'"},
		{"atomic_lat", bind, "-a", "unknown shorthand flag: 'a'"},
		{"rping", bind, "rping is either server (-s) or client (-c)"},
		{"rping", bind, "-s", "-c", "rping is either server (-s) or client (-c)"},
		{"rping", bind, "-c", "the client takes the server's address: -a HOST"},
		{"rping", bind, "-c", "-a", "0.0.0.0", "not the address of one host"},
		{"rping", bind, "-c", "-P", "-a", "192.0.2.2", "-P is the server's"},
		{"rping", bind, "-s", "-a", "192.0.2.2", "the server's -a is its --bind: give one of them"},
		{"rping", bind, "-s", "-S", "22", `invalid argument "22" for "-S, --size" flag: want a whole number from 23 to 65535`},
		{"rping", bind, "-s", "-S", "65536", "want a whole number from 23 to 65535"},
		{"rping", bind, "-s", "x", `unexpected operand "x"`},
		{"rping", "-s", "-a", "here", `invalid argument "here" for "--bind" flag`},
		{"pingpong", bind, "a", "b", `unexpected operand "b"`},
		{"pingpong", bind, "-c", "UC", "--srq", "--srq and -c UC exclude each other"},
		{"pingpong", bind, "--srq", "--check", "--srq and --check exclude each other"},
		{"pingpong", bind, "-q", "3", "-q is ibv_srq_pingpong's: it goes with --srq"},
		{"pingpong", bind, "--srq", "-q", "256", "want a whole number from 1 to 255"},
		{"pingpong", bind, "-c", "UD", "-s", "4097", "over UD a message is one packet, of at most 4096 bytes"},
		{"pingpong", bind, "-s", "0", "want a whole number from 1 to"},
		{"pingpong", "--bind", "192.0.2.1:4792", "the pingpongs speak over UDP port 4791"},
		{"pingpong", bind, "192.0.2.2:4792", "the pingpongs speak over UDP port 4791; -p is the TCP port"},
		{"send_bw", bind, "-q", "1024", "-t", "16384", "posted work requests"},
		{"send_bw", bind, "-D", "Inf", "want seconds from 0.001 to 86400"},
		{"send_bw", bind, "-D", "NaN", "want seconds from 0.001 to 86400"},
		{"send_bw", bind, "-D", "0x1p1", "want seconds from 0.001 to 86400"},
	}
	numeric := map[string]string{
		"-s": "from 0 to 1073741824", "-n": "from 1 to 10000000000", "-t": "from 1 to 16384", "-r": "from 1 to 16384",
		"-q": "from 1 to 1024", "-Q": "from 1 to 1024", "-l": "from 1 to 1024", "-p": "from 1 to 65535",
		"-I": "from 0 to 1024", "-D": "from 0.001 to 86400", "--rcvbuf": "from 0 to 1073741824", "--sndbuf": "from 0 to 1073741824",
		"--wires": "from 1 to 16",
	}
	for flag, limits := range numeric {
		for _, v := range []string{"-1", "abc", "", "10k", "0x10", "1e3", "99999999999999999999", "+", " 5"} {
			tests = append(tests, []string{"send_bw", bind, flag, v, fmt.Sprintf("invalid argument %q for", v)})
			tests = append(tests, []string{"send_bw", bind, flag, v, limits})
		}
	}
	for _, zero := range []string{"-n", "-t", "-r", "-q", "-Q", "-l", "-p", "-D"} {
		tests = append(tests, []string{"send_bw", bind, zero, "0", `invalid argument "0" for`})
	}
	for _, tc := range tests {
		args, want := tc[:len(tc)-1], tc[len(tc)-1]
		r := perf(t, args...)
		if r.code != exitUsage || r.stdout != "" || !strings.Contains(r.stderr, want) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("perf %q: exit %d, stdout %q, stderr %q, want %q", args, r.code, r.stdout, r.stderr, want)
		}
	}
}

// TestFailures: what goes wrong at run time is one helpful line and exit code 1.
func TestFailures(t *testing.T) {
	serving(t, "127.3.20.2", "--max-memory", "1048576")
	for _, tc := range []struct{ args, want string }{
		{"send_lat --bind 192.0.2.1", "192.0.2.1:4791: bind: cannot assign requested address; no interface has this address"},
		{"serve --bind 127.3.20.2", "on loopback give each end an address"},
		{"send_lat 127.3.20.2 --bind 127.3.20.1 -p 9", "refused: nobody listens on service port 9 of 127.3.20.2:4791; start perf serve there"},
		{"send_lat ::1 --bind 127.3.20.1", "different IP versions"},
		{"send_bw 127.3.20.2 --bind 127.3.20.1 -s 1000001", "the server refuses: this test takes 1081921 bytes of memory here"},
		{"send_lat 127.3.20.2 --bind 127.3.20.1 --capture /nonexistent/x.pcap", "capture: open /nonexistent/x.pcap"},
		{"send_lat 127.3.20.2 --bind 127.3.20.1 -n 5 --out_json_file /nonexistent/x.json", "open /nonexistent/x.json"},
		{"dump /nonexistent", "no such file"},
		{"send_lat 127.3.20.2 --bind 127.3.20.1 -c UD -n 5 -s 0 -p 9", "refused: nobody listens on service port 9"},
		{"rping -c -a 127.3.20.2 --bind 127.3.20.1 -C 1", "refused: nobody listens on service port 7174 of 127.3.20.2:4791; start rping -s there"},
		{"pingpong 127.3.20.2 --bind 127.3.20.1 -p 9", "refused: nobody listens on TCP port 9 of 127.3.20.2; start perf pingpong or ibv_rc_pingpong there"},
		{"pingpong --bind 127.3.20.2", "on loopback give each end an address"},
	} {
		r := perf(t, strings.Fields(tc.args)...)
		if r.code != exitFailed || !strings.Contains(r.stderr, tc.want) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("perf %s: exit %d, stderr %q, want %q", tc.args, r.code, r.stderr, tc.want)
		}
	}
}

func TestUnreachable(t *testing.T) {
	t.Parallel() // it waits more than it works
	r := perf(t, "send_lat", "127.3.20.99", "--bind", "127.3.20.3")
	if want := "no answer from 127.3.20.99:4791 within 5s"; r.code != exitFailed || !strings.Contains(r.stderr, want) {
		t.Errorf("exit %d, stderr %q, want %q", r.code, r.stderr, want)
	}
}

// testNames are the tests.
var testNames = []string{"send_lat", "send_bw", "write_lat", "write_bw", "read_lat", "read_bw", "atomic_lat", "atomic_bw"}

func TestHelp(t *testing.T) {
	for _, cmd := range append(slices.Clone(testNames), "serve", "demo", "dump", "rping", "pingpong") {
		out := good(t, cmd, "--help")
		if !strings.Contains(out, "Examples:\n  perf "+cmd) {
			t.Errorf("%s: no example in\n%s", cmd, out)
		}
	}
	if out := good(t, "--help"); !strings.Contains(out, "send_lat") || !strings.Contains(out, "dump") {
		t.Errorf("help:\n%s", out)
	}
}

// document is a JSON report.
type document struct {
	Info    map[string]any `json:"test_info"`
	Results json.RawMessage
}

// TestJSON reads the reports back and does their sums.
func TestJSON(t *testing.T) {
	serving(t, "127.3.21.2")
	dir := t.TempDir()
	var info map[string]any
	client := func(args string) []map[string]float64 {
		t.Helper()
		file := filepath.Join(dir, "report.json")
		out := good(t, append(strings.Fields(args), "127.3.21.2", "--bind", "127.3.21.1", "--out_json", "--out_json_file", file)...)
		if b, err := os.ReadFile(file); err != nil || string(b) != out {
			t.Errorf("%s: the file differs from stdout: %v\n%s\n%s", args, err, b, out)
		}
		var doc document
		dec := json.NewDecoder(strings.NewReader(out))
		if err := dec.Decode(&doc); err != nil {
			t.Fatalf("%s: %v in\n%s", args, err, out)
		}
		if _, err := dec.Token(); err != io.EOF {
			t.Errorf("%s: more than a document on stdout", args)
		}
		if info = doc.Info; info["Mtu"] != 4096.0 {
			t.Errorf("%s: %v", args, info)
		}
		var one map[string]float64
		if json.Unmarshal(doc.Results, &one) == nil {
			return []map[string]float64{one}
		}
		var all []map[string]float64
		if err := json.Unmarshal(doc.Results, &all); err != nil {
			t.Fatalf("%s: %v", args, err)
		}
		return all
	}
	near := func(a, b float64) bool { return a >= 0.99*b-1e-5 && a <= 1.01*b+1e-5 }
	bw := func(args string, size, iters float64, unit, directions float64) {
		t.Helper()
		r := client(args)[0]
		if r["MsgSize"] != size || iters > 0 && r["n_iterations"] != iters {
			t.Errorf("%s: %v", args, r)
		}
		rate := (r["n_iterations"] - r["n_lost"]) / r["elapsed_sec"] / 1e6
		if directions == 1 && !near(r["MsgRate"], rate) || !near(r["BW_average"], r["MsgRate"]*1e6*size/unit) || r["BW_peak"] < 0.99*r["BW_average"] {
			t.Errorf("%s: %v, rate %v", args, r, rate)
		}
	}
	const mib, gbit = 1 << 20, 1e9 / 8
	bw("send_bw -s 1000 -n 700", 1000, 700, mib, 1)
	bw("send_bw -s 0 -n 50", 0, 50, mib, 1)
	bw("send_bw -s 1 -n 1", 1, 1, mib, 1)
	bw("send_bw -s 4096 -n 500 --report_gbits -l 7", 4096, 500, gbit, 1)
	bw("send_bw -s 4096 -n 300 -b -q 2", 4096, 600, mib, 2)
	bw("send_bw -D 0.05", 65536, 0, mib, 1)
	bw("send_bw -c UC -s 4096 -n 100", 4096, 100, mib, 1)
	if _, told := client("send_bw -c UD -n 50")[0]["n_lost"]; !told || info["Connection_type"] != "UD" || info["rdma_cm_QPs"] != "OFF" {
		t.Errorf("UD: %v", info)
	}
	bw("send_bw -s 100 -n 200 --use-srq -q 3", 100, 600, mib, 1)
	if info["Using_SRQ"] != "ON" || info["Connection_type"] != "RC" || info["test"] != "Send_BW_Test" {
		t.Errorf("SRQ: %v", info)
	}
	bw("write_bw -s 3000 -n 200 -b", 3000, 200, mib, 2)
	if info["test"] != "RDMA_Write_Bidirectional_BW_Test" || info["Outstand_reads"] != nil {
		t.Errorf("WRITE: %v", info)
	}
	bw("write_bw -c UC -s 3000 -n 20 -I 1024", 3000, 20, mib, 1)
	bw("read_bw -s 3000 -n 200 -q 2 -o 3 -t 10", 3000, 400, mib, 1)
	if info["test"] != "RDMA_Read_BW_Test" || info["Outstand_reads"] != 3.0 {
		t.Errorf("READ: %v", info)
	}
	bw("atomic_bw -n 200 -A CMP_AND_SWAP -l 3", 8, 200, mib, 1)
	if info["Atomic_type"] != "CMP_AND_SWAP" || info["test"] != "Atomic_CMP_AND_SWAP_Post_List_BW_Test" {
		t.Errorf("atomics: %v", info)
	}
	for _, args := range []string{"read_lat -s 64 -n 100", "atomic_lat -n 100"} {
		if r := client(args)[0]; r["t_min"] <= 0 || !near(r["t_avg"]*r["n_iterations"], r["elapsed_sec"]*1e6) { // whole operations
			t.Errorf("%s: %v", args, r)
		}
	}
	for _, args := range []string{"write_lat -n 100 -c UC", "write_lat -s 5000 -n 50", "send_lat -c UC -n 100", "send_lat -c UD -n 100", "send_lat -s 64 -n 300", "send_lat -n 1", "send_lat -D 0.05 -s 4096 --wait block", "send_lat -n 100 --wait poll"} {
		r := client(args)[0]
		if r["t_min"] <= 0 || r["t_min"] > r["t_typical"] || r["t_typical"] > r["percentile_99"] ||
			r["percentile_99"] > r["percentile_99.9"] || r["percentile_99.9"] > r["t_max"] || r["t_stdev"] < 0 ||
			r["n_lost"] == 0 && !near(r["t_avg"]*2*r["n_iterations"], r["elapsed_sec"]*1e6) {
			t.Errorf("%s: %v", args, r)
		}
	}
	if all := client("send_lat -a -s 256 -n 20"); len(all) != 8 || all[7]["MsgSize"] != 256 {
		t.Errorf("-a: %v", all)
	}
}

// TestTables: both ends of a one-shot test print the same line.
func TestTables(t *testing.T) {
	for i, test := range testNames {
		server := start(t, test, "--bind", fmt.Sprintf("127.3.22.%d", 2*i+2))
		server.until(t, "Waiting for a client on 127.3.22.")
		size := "8" // of atomics
		args := []string{test, fmt.Sprintf("127.3.22.%d", 2*i+2), "--bind", fmt.Sprintf("127.3.22.%d", 2*i+1), "-n", "123"}
		if !strings.HasPrefix(test, "atomic") {
			size = "64"
			args = append(args, "-s", size)
		}
		out := good(t, args...)
		r := server.end(t)
		if r.code != 0 {
			t.Fatalf("server: exit %d: %s", r.code, r.stderr)
		}
		line := func(s string) string {
			for _, l := range strings.Split(s, "\n") {
				if f := strings.Fields(l); len(f) > 2 && f[0] == size && f[1] == "123" {
					return l
				}
			}
			return "no result in\n" + s
		}
		if line(out) != line(r.stdout) {
			t.Errorf("%s: client and server print\n%s\n%s", test, line(out), line(r.stdout))
		}
		for _, want := range []string{" #bytes ", "Connection type : RC", "Mtu             : 4096[B]", "local address:  127.3.22."} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", test, want, out)
			}
		}
	}
}

// TestServeManyClients: three processes at once, over IPv6 with ports of their own.
func TestServeManyClients(t *testing.T) {
	server := start(t, "serve", "--bind", "[::1]:4841")
	server.until(t, "Serving on [::1]:4841")
	var clients []*process
	for i := range 3 {
		test := []string{"send_lat", "send_bw"}[i%2]
		clients = append(clients, start(t, test, "[::1]:4841", "--bind", fmt.Sprintf("[::1]:%d", 4842+i), "-n", "500"))
	}
	for i, c := range clients {
		if r := c.end(t); r.code != 0 {
			t.Errorf("client %d: exit %d: %s%s", i, r.code, r.stdout, r.stderr)
		}
	}
	server.until(t, "session 3:")
	server.signal(t, syscall.SIGTERM)
	if r := server.end(t); r.code != 0 {
		t.Errorf("server: exit %d: %s", r.code, r.stderr)
	}
}

// TestKilledClient: the server notices, says so, and serves the next one.
func TestKilledClient(t *testing.T) {
	t.Parallel() // it waits more than it works
	server := start(t, "serve", "--bind", "127.3.23.2")
	server.until(t, "Serving on")
	for i, args := range []string{"send_lat -D 60", "send_bw -D 60", "send_bw -D 60 -b"} {
		client := start(t, append(strings.Fields(args), "127.3.23.2", "--bind", "127.3.23.1")...)
		client.until(t, "#bytes")
		if err := client.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		server.untilCount(t, "the peer is gone: RETRY_EXC_ERR", i+1)
		good(t, "send_lat", "127.3.23.2", "--bind", "127.3.23.3", "-n", "5")
	}
	server.signal(t, os.Interrupt)
	if r := server.end(t); r.code != 0 || strings.Count(r.stdout, "the peer is gone") != 3 {
		t.Errorf("server: exit %d\n%s%s", r.code, r.stdout, r.stderr)
	}
}

// TestKilledServer: the client notices within the retry budget, one line, exit code 1.
func TestKilledServer(t *testing.T) {
	t.Parallel() // it waits more than it works
	for i, test := range []string{"send_lat", "send_bw"} {
		server := start(t, test, "--bind", fmt.Sprintf("127.3.24.%d", 2*i+2))
		server.until(t, "Waiting")
		client := start(t, test, fmt.Sprintf("127.3.24.%d", 2*i+2), "--bind", fmt.Sprintf("127.3.24.%d", 2*i+1), "-D", "60")
		client.until(t, "#bytes")
		if err := server.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		r := client.end(t)
		if r.code != exitFailed || !strings.Contains(r.stderr, "the peer is gone: RETRY_EXC_ERR") || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: exit %d, stderr %q", test, r.code, r.stderr)
		}
	}
}

// TestInterrupted: Ctrl-C ends a client with a report that covers what was measured.
func TestInterrupted(t *testing.T) {
	serving(t, "127.3.25.2")
	client := start(t, "send_bw", "127.3.25.2", "--bind", "127.3.25.1", "-D", "60")
	client.until(t, "#bytes")
	client.signal(t, os.Interrupt)
	r := client.end(t)
	if r.code != exitInterrupted || !strings.HasPrefix(r.stderr, "perf: interrupted") {
		t.Errorf("exit %d, stderr %q", r.code, r.stderr)
	}
	// While it still looks for the server there is nothing to report.
	client = start(t, "send_bw", "127.3.25.99", "--bind", "127.3.25.1", "--out_json")
	sent := time.NewTicker(50 * time.Millisecond)
	defer sent.Stop()
	for range 100 {
		select {
		case <-sent.C:
			_ = client.cmd.Process.Signal(os.Interrupt) // it may not listen yet, or have ended
			continue
		case <-client.done:
		}
		break
	}
	if r := client.end(t); r.code != exitInterrupted && r.code != -1 || r.stdout != "" {
		t.Errorf("exit %d, stdout %q, stderr %q", r.code, r.stdout, r.stderr)
	}
}

// TestDemo: the demo runs without set-up and tells its story.
func TestDemo(t *testing.T) {
	out := good(t, "demo", "-D", "0.1")
	for _, want := range []string{"CM_REQ", "CM_REP", "posts its greeting in state RTR", "CM_RTU", "the greeting leaves",
		`received "hello from a queue pair in RTR"`, "deferred and published in one step", "round trips: median", "Gb/s"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if n := strings.Count(out, "\n"); n > 40 {
		t.Errorf("%d lines", n)
	}
	// In the order in which it happened, as far as packets and posts order it.
	at := -1
	for _, step := range []string{"CM_REQ", "posts its greeting", "CM_RTU", "the greeting leaves", "received"} {
		if i := strings.Index(out, step); i < at {
			t.Errorf("%q comes too early in\n%s", step, out)
		} else {
			at = i
		}
	}
}

// TestCapture: what --capture writes is good to the last packet, says our own dump.
func TestCapture(t *testing.T) {
	serving(t, "127.3.26.2")
	serving(t, "[::1]:4851")
	for name, args := range map[string]string{
		"v4": "send_bw 127.3.26.2 --bind 127.3.26.1 -n 30 -s 5001", "v6": "send_bw [::1]:4851 --bind [::1]:4852 -n 10 -s 5001",
	} {
		file := filepath.Join(t.TempDir(), name+".pcap")
		good(t, append(strings.Fields(args), "--capture", file)...)
		dump := []string{"dump", file}
		if name == "v6" {
			dump = append(dump, "--any-port")
		}
		out := good(t, dump...)
		for _, want := range []string{"CM_REQ", "CM_REP", "CM_RTU", "SEND_FIRST", "SEND_LAST", "ACK", "CM_DREQ", " 0 bad ICRC"} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", name, want, out)
			}
		}
	}
}
