package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/doorbell-rdma/doorbell/bench"
)

// TestLostLine: what was lost stands below the figures.
func TestLostLine(t *testing.T) {
	for _, test := range []bench.Test{bench.SendLat, bench.WriteBW} {
		r := bench.Result{Test: test, Size: 64, Iters: 90, Lost: 10}
		lines := strings.Split(row(r, bandwidthUnit(false)), "\n")
		if len(lines) != 3 || strings.Join(strings.Fields(lines[1]), " ") != "10 messages lost" || lines[2] != "" {
			t.Errorf("%v: %q", test, lines)
		}
		r.Lost = 0
		if got := row(r, bandwidthUnit(false)); got != lines[0]+"\n" {
			t.Errorf("%v: %q", test, got)
		}
	}
}

// TestRping: both ends as processes; each prints what it should, and both exit well.
func TestRping(t *testing.T) {
	server := start(t, "rping", "-s", "-a", "127.3.27.2", "-v", "-S", "100")
	server.until(t, "Waiting for rping on 127.3.27.2:4791, service port 7174")
	out := good(t, "rping", "-c", "-a", "127.3.27.2", "-I", "127.3.27.1", "-C", "3", "-v", "-V", "-d", "-S", "50")
	r := server.end(t)
	if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "3 pings of 127.3.27.1\n") {
		t.Errorf("server: %+v", r)
	}
	for n := range 3 {
		want := fmt.Sprintf("ping data: rdma-ping-%d: ", n)
		if !strings.Contains(out, "\n"+want) || !strings.Contains(r.stdout, "\nserver "+want) {
			t.Errorf("no %q in\n%s\n%s", want, out, r.stdout)
		}
	}
	for _, want := range []string{"connected to 127.3.27.2:7174", "SEND: source is at", "the server says go ahead", "disconnecting", "3 pings of 50 bytes\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// TestRpingPersistent: -P serves one client after the other and until a signal, whatever one
// of them does.
func TestRpingPersistent(t *testing.T) {
	server := start(t, "rping", "-s", "-P", "--bind", "[::1]:4861", "-p", "7200", "-S", "64")
	server.until(t, "Waiting for rping")
	client := []string{"rping", "-c", "-a", "[::1]:4861", "--bind", "[::1]:4862", "-p", "7200", "-C", "2"}
	good(t, client...)
	r := perf(t, append(client, "-S", "65")...)
	if r.code != exitFailed || !strings.Contains(r.stderr, "the server has disconnected: is its -S less than 65?") || r.stdout != "0 pings of 65 bytes\n" {
		t.Errorf("%+v", r)
	}
	good(t, client...)
	server.untilCount(t, "2 pings of ::1", 2)
	server.signal(t, syscall.SIGTERM)
	if r := server.end(t); r.code != 0 || !strings.Contains(r.stderr, "after 0 pings: ping 0 has 65 bytes, more than our 64") {
		t.Errorf("server: %+v", r)
	}
	// Without -P a signal ends the wait for the one client, and that is no success.
	server = start(t, "rping", "-s", "--bind", "[::1]:4861")
	server.until(t, "Waiting for rping")
	server.signal(t, os.Interrupt)
	if r := server.end(t); r.code != exitInterrupted {
		t.Errorf("%+v", r)
	}
}

// TestPingpong: each program's protocol, both ends as the command; the server is bound to all
// addresses in one case, and learns from TCP which one it is.
func TestPingpong(t *testing.T) {
	for i, tc := range []struct{ program, args string }{
		{"ibv_rc_pingpong", "-s 9000 -n 50 -m 4096 --check -g 1 -d rxe0 -i 1 -l 0"},
		{"ibv_uc_pingpong", "-c UC -n 20 -r 10"},
		{"ibv_ud_pingpong", "-c UD -n 20 --check -e"},
		{"ibv_srq_pingpong", "--srq -q 5 -n 100"},
	} {
		ours, theirs := fmt.Sprintf("127.3.28.%d", 2*i+1), fmt.Sprintf("127.3.28.%d", 2*i+2)
		args := strings.Fields(tc.args)
		server := start(t, append([]string{"pingpong", "--bind", theirs, "-p", "18516"}, args...)...)
		server.until(t, "Waiting for "+tc.program+" on "+theirs+":18516")
		out := good(t, append([]string{"pingpong", theirs, "--bind", ours, "-p", "18516"}, args...)...)
		r := server.end(t)
		if r.code != 0 || r.stderr != "" {
			t.Errorf("%s: server: %+v", tc.program, r)
		}
		for _, want := range []string{" Mbit/sec\n", " iters in ", " usec/iter\n"} {
			if !strings.Contains(out, want) || !strings.Contains(r.stdout, want) {
				t.Errorf("%s: no %q in\n%s\n%s", tc.program, want, out, r.stdout)
			}
		}
	}
}

// TestPingpongSilence: an end whose peer falls silent says how far it came.
func TestPingpongSilence(t *testing.T) {
	server := start(t, "pingpong", "--bind", "127.3.29.2", "-c", "UD", "-n", "10", "--timeout", "0.2")
	server.until(t, "Waiting for ibv_ud_pingpong")
	good(t, "pingpong", "127.3.29.2", "--bind", "127.3.29.1", "-c", "UD", "-n", "5", "--timeout", "5")
	r := server.end(t)
	if want := "perf: 5 messages sent, 5 received: nothing comes, for 200ms; over UD a lost message is not repeated\n"; r.code != exitFailed || r.stderr != want {
		t.Errorf("%+v, want %q", r, want)
	}
}
