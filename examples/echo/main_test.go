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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	bin := filepath.Join(t.TempDir(), "echo")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	for _, compress := range []string{"none", "zstd"} {
		server := exec.CommandContext(ctx, bin, "-serve", "-bind", "127.4.1.2", "-compress", compress)
		stdout, err := server.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(stdout)
		if !lines.Scan() || !strings.HasPrefix(lines.Text(), "listening on 127.4.1.2:4791") {
			t.Fatalf("the server says %q, %v", lines.Text(), lines.Err())
		}
		long := strings.Repeat("a long message, ", 3000)
		for _, tc := range []struct {
			args        []string
			stdin, want string
		}{
			{[]string{"hello", "doorbell", ""}, "", "hello\ndoorbell\n\n"},
			{nil, "line one\n" + long + "\n", "line one\n" + long + "\n"},
		} {
			client := exec.CommandContext(ctx, bin, append([]string{"-bind", "127.4.1.1", "-compress", compress, "127.4.1.2"}, tc.args...)...)
			client.Stdin = strings.NewReader(tc.stdin)
			var stderr bytes.Buffer
			client.Stderr = &stderr
			got, err := client.Output()
			if err != nil || string(got) != tc.want {
				t.Errorf("%s, %v: %d bytes of answer, want %d; %v %s", compress, tc.args, len(got), len(tc.want), err, &stderr)
			}
		}
		if err := server.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if err := server.Wait(); err != nil {
			t.Errorf("the interrupted server: %v", err)
		}
	}
}

func TestBadUse(t *testing.T) {
	for _, args := range [][]string{
		{}, {"-serve", "127.0.0.1"}, {"-compress", "gzip", "-serve"}, {"-p", "0", "-serve"}, {"-p", "70000", "-serve"},
		{"-bind", "nowhere", "-serve"}, {"-bind", "127.4.1.3", "nowhere"}, {"-nonsense"},
	} {
		if err := run(t.Context(), args, strings.NewReader(""), new(bytes.Buffer)); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}
