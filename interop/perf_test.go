//go:build interop && linux

package interop

import (
	"bufio"
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
)

// TestPerf has the command's rping and pingpong talk to Linux's programs: what people try
// first, as they type it. Where the command is not told its address it finds that itself.
func TestPerf(t *testing.T) {
	theRig.setMTU(t, 1500)
	perf := filepath.Join(t.TempDir(), "perf")
	if out, err := exec.Command("go", "build", "-o", perf, "../cmd/perf").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	for _, tc := range []struct {
		ours, linux string
		active      bool // we are the client
		says        string
	}{
		{"rping -c -a 10.77.0.2 -C 5 -v", "rping -s -v", true, "ping data: rdma-ping-4: "},
		{"rping -c -a fd77::2 -C 5 -S 5000 -d", "rping -s -a fd77::2 -v -S 5000", true, "ping data: rdma-ping-4: "},
		{"rping -s -v", "rping -c -a 10.77.0.1 -C 5 -v -V", false, "ping data: rdma-ping-4: "},
		{"rping -s -a fd77::1 -S 5000 -P", "rping -c -a fd77::1 -C 5 -S 5000 -v -V", false, "ping data: rdma-ping-4: "},
		{"pingpong 10.77.0.2 -n 50 --check", "ibv_rc_pingpong -d rxe0 -g 1 -n 50 -c", true, "50 iters in"},
		{"pingpong -n 50 -s 10000", "ibv_rc_pingpong -d rxe0 -g 1 -n 50 -s 10000 10.77.0.1", false, "50 iters in"},
		{"pingpong 10.77.0.2 --bind fd77::1 -n 50", "ibv_rc_pingpong -d rxe0 -g 2 -n 50", true, "50 iters in"},
		{"pingpong --bind fd77::1 -n 50", "ibv_rc_pingpong -d rxe0 -g 2 -n 50 fd77::1", false, "50 iters in"},
		{"pingpong 10.77.0.2 -c UC -n 20", "ibv_uc_pingpong -d rxe0 -g 1 -n 20", true, "20 iters in"},
		{"pingpong -c UC -n 20 --check -m 256", "ibv_uc_pingpong -d rxe0 -g 1 -n 20 -c -m 256 10.77.0.1", false, "20 iters in"},
		{"pingpong 10.77.0.2 -c UD -n 20", "ibv_ud_pingpong -d rxe0 -g 1 -n 20 -s 1024", true, "20 iters in"},
		{"pingpong -c UD -n 20 -s 100", "ibv_ud_pingpong -d rxe0 -g 1 -n 20 -s 100 10.77.0.1", false, "20 iters in"},
		{"pingpong 10.77.0.2 --srq -n 100", "ibv_srq_pingpong -d rxe0 -g 1 -n 100", true, "100 iters in"},
		{"pingpong --srq -q 5 -n 100", "ibv_srq_pingpong -d rxe0 -g 1 -q 5 -n 100 10.77.0.1", false, "100 iters in"},
	} {
		t.Run(strings.ReplaceAll(tc.ours, " ", "_"), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			e := &env{T: t, ctx: ctx, host: host4, guest: guest4}
			cmd := exec.CommandContext(ctx, perf, strings.Fields(tc.ours)...)
			// Without one of them an end waits for ever; then the other's words are of use.
			cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var p *process
			if tc.active {
				port, cm := uint16(linuxpeer.PingpongPort), false
				if strings.HasPrefix(tc.ours, "rping") {
					port, cm = linuxpeer.RpingPort, true
				}
				if p, err = e.serve(tc.linux, port, cm); err != nil {
					t.Fatal(err)
				}
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			said := bufio.NewReader(stdout)
			if !tc.active {
				if line, err := said.ReadString('\n'); err != nil || !strings.HasPrefix(line, "Waiting for ") {
					t.Errorf("perf says %q, %v", line, err)
				}
				if p, err = theRig.start(ctx, tc.linux); err != nil {
					t.Fatal(err)
				}
			}
			failed := e.finish(nil, p, tc.says)
			if strings.HasSuffix(tc.ours, "-P") {
				_ = cmd.Process.Signal(syscall.SIGTERM) // it would serve on
			}
			var out bytes.Buffer
			if _, err := out.ReadFrom(said); err != nil {
				t.Error(err)
			}
			if err := cmd.Wait(); err != nil || failed != nil {
				t.Errorf("perf: %v, the program: %v\n%s%s", err, failed, clip(out.String()), stderr.String())
			}
			want := map[bool]string{true: "5 pings of ", false: tc.says}[strings.HasPrefix(tc.ours, "rping")]
			if !strings.Contains(out.String(), want) {
				t.Errorf("perf did not say %q:\n%s", want, clip(out.String()))
			}
			result := "pass"
			if t.Failed() {
				result = "fail"
			}
			side := map[bool]string{true: "active", false: "passive"}[tc.active]
			ip := map[bool]string{true: "IPv6", false: "IPv4"}[strings.Contains(tc.ours, "fd77")]
			note("perf "+strings.Fields(tc.ours)[0]+" with "+strings.Fields(tc.linux)[0], side, ip, "", result)
		})
	}
}
