package main

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestPrograms builds the program and runs both ends as the package comment says.
func TestPrograms(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("other loopback interfaces have one address")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	bin := filepath.Join(t.TempDir(), "http")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	server := exec.CommandContext(ctx, bin, "-serve", "-bind", "127.4.5.2")
	stdout, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "listening on 127.4.5.2:4791") {
		t.Fatalf("the server says %q, %v", lines.Text(), lines.Err())
	}
	for _, tc := range []struct {
		args string
		want string
		ok   bool
	}{
		{"http://127.4.5.2:7482/hello", "over rdma", true},
		{"-load 300ms http://127.4.5.2:7482", "every answer right", true},
		{"http://127.4.5.2:7482/nothing", "404", false},
		{"http://127.4.5.2:7499/hello", "nobody listens", false},
		{"127.4.5.2", "want one like http://", false},
		{"127.4.5.2:7482/hello", "want one like http://", false},
	} {
		out, err := exec.CommandContext(ctx, bin, append([]string{"-bind", "127.4.5.1"}, strings.Fields(tc.args)...)...).CombinedOutput()
		if (err == nil) != tc.ok || !strings.Contains(string(out), tc.want) {
			t.Errorf("%s: %q, %v", tc.args, out, err)
		}
	}
	if err := server.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := server.Wait(); err != nil {
		t.Errorf("the interrupted server: %v", err)
	}
}

func TestBadUse(t *testing.T) {
	for _, args := range [][]string{
		{}, {"-serve", "http://x"}, {"-p", "0", "-serve"}, {"-bind", "nowhere", "-serve"}, {"a", "b"},
		{"-bind", "127.4.5.3", "http://name.invalid:1/"},
	} {
		if err := run(t.Context(), args, new(bytes.Buffer)); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}
