package main

import (
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestBuiltProgram builds the program as a user would and runs both ends in one process.
func TestBuiltProgram(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("127.0.0.2 is a host on Linux only")
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command to build with")
	}
	bin := filepath.Join(t.TempDir(), "rawcm")
	if out, err := exec.CommandContext(t.Context(), goTool, "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, bin, "-p", "7501").CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "address already in use") {
			t.Skip("somebody has port 4791 of 127.0.0.1 or 127.0.0.2")
		}
		t.Fatalf("%v\n%s", err, out)
	}
	// Each end's lines are in order; COMM_EST and RTU come or not, as the datagrams fall.
	for who, want := range map[string][]string{
		"client": {"REQ sent", "REP received, \"welcome\"", "RTU sent, queue pair in RTS", "received \"a greeting\"", "DISCONNECTED"},
		"server": {
			"REQ received from 127.0.0.1, \"hello\"", "REP sent, queue pair in RTR", "ESTABLISHED, queue pair in RTS, 1 send published",
			"received \"a request\"", "DISCONNECTED, \"bye\"",
		},
	} {
		rest := string(out)
		for _, w := range want {
			i := strings.Index(rest, who+": "+w)
			if i < 0 {
				t.Fatalf("%s does not say %q:\n%s", who, w, out)
			}
			rest = rest[i+1:]
		}
	}
}

// TestTwoEnds runs server and client apart, and a server that refuses.
func TestTwoEnds(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("127.x.y.z are hosts on Linux only")
	}
	for _, tc := range []struct {
		name    string
		flags   []string
		want    string
		refused bool
	}{
		{"served", nil, "received \"a request\"", false},
		{"refused", []string{"-reject"}, "REQ received", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			serverCtx, stop := context.WithCancel(ctx)
			var server, client lockedBuffer
			done := make(chan error, 1)
			go func() {
				done <- run(serverCtx, append([]string{"-serve", "-bind", "127.1.30.2", "-p", "7502"}, tc.flags...), &server)
			}()
			err := run(ctx, []string{"-bind", "127.1.30.1", "-p", "7502", "127.1.30.2"}, &client)
			for err != nil && strings.Contains(err.Error(), "nobody listens") || err != nil && strings.Contains(err.Error(), "no answer") {
				err = run(ctx, []string{"-bind", "127.1.30.1", "-p", "7502", "127.1.30.2"}, &client) // the server was not up yet
			}
			if tc.refused {
				if err == nil || !strings.Contains(err.Error(), "refused by the program") || !strings.Contains(err.Error(), "nobody today") {
					t.Errorf("client: %v\n%s", err, client.String())
				}
			} else if err != nil {
				t.Errorf("client: %v\n%s", err, client.String())
			}
			stop()
			if err := <-done; err != nil {
				t.Errorf("server: %v", err)
			}
			if !strings.Contains(server.String(), tc.want) {
				t.Errorf("server says %s", server.String())
			}
		})
	}
	var out lockedBuffer
	for _, args := range [][]string{{"-p", "0"}, {"-serve", "host"}, {"nowhere"}, {"-bind", "x", "127.0.0.1"}, {"-nonsense"}} {
		if err := run(t.Context(), args, &out); err == nil {
			t.Errorf("%v was taken", args)
		}
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
