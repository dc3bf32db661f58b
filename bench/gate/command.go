package gate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

const (
	// cleanupTime bounds what is done after an interruption.
	cleanupTime = 20 * time.Second
	// killTime is how long the pipes of a process that was killed may stay open.
	killTime = 2 * time.Second
	// maxOutput is what one process may print: more is cut off, which Read sees.
	maxOutput = 16 << 20
)

// command runs a program to its end, or until ctx ends, which kills it and its children. It
// returns what was printed on stdout; a failure's error has the end of stderr.
func command(ctx context.Context, dir string, env []string, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	// A hook's or an outer git command's variables would point git at another repository.
	cmd.Env = withoutGit(cmd.Env)
	stdout, stderr := &capped{limit: maxOutput}, &capped{limit: maxOutput}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.WaitDelay = killTime
	ownGroup(cmd)
	err := cmd.Run()
	if err != nil {
		if ctx.Err() != nil {
			return stdout.Bytes(), context.Cause(ctx)
		}
		err = fmt.Errorf("%s: %w", name, err)
		if last := lastLines(stderr.String(), 5); last != "" {
			err = fmt.Errorf("%w: %s", err, last)
		}
	}
	return stdout.Bytes(), err
}

func withoutGit(env []string) []string {
	kept := env[:0]
	for _, e := range env {
		if !strings.HasPrefix(e, "GIT_DIR=") && !strings.HasPrefix(e, "GIT_WORK_TREE=") && !strings.HasPrefix(e, "GIT_INDEX_FILE=") {
			kept = append(kept, e)
		}
	}
	return kept
}

// lastLines are the last n lines of a text, joined.
func lastLines(s string, n int) string {
	lines := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' })
	return strings.Join(lines[max(0, len(lines)-n):], "; ")
}

// capped is a buffer that takes so much and drops the rest, so that a program that never stops
// printing uses up time only.
type capped struct {
	bytes.Buffer
	limit int
}

func (c *capped) Write(p []byte) (int, error) {
	c.Buffer.Write(p[:min(len(p), max(0, c.limit-c.Len()))])
	return len(p), nil
}

// errTimeout ends what takes longer than it may.
var errTimeout = errors.New("the time is used up")
