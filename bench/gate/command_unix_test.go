//go:build unix

package gate

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestCommandKillsChildren: what a command has started ends with it, and does not hold its
// pipes open.
func TestCommandKillsChildren(t *testing.T) {
	started := filepath.Join(t.TempDir(), "started")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(started); err == nil {
				cancel(errTimeout)
			}
			time.Sleep(time.Millisecond)
		}
	}()
	out, err := command(ctx, "", []string{"STARTED=" + started}, "sh", "-c", `sleep 3600 & echo $!; : > "$STARTED"; wait`)
	if !errors.Is(err, errTimeout) {
		t.Fatalf("%v, want the cause of the end", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || pid <= 1 {
		t.Fatalf("pid %q: %v", out, err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) || strings.Contains(string(stat), ") Z ") { // or nobody has buried it
			return
		}
		if time.Now().After(deadline) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			t.Fatal("the child lives on")
		}
	}
}
