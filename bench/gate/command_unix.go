//go:build unix

package gate

import (
	"os/exec"
	"syscall"
)

// ownGroup makes a process the head of a group, which is killed as one: go build and test
// binaries have children. A terminal's interrupt does not reach the group; the context does.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
