// Command perf measures Doorbell the way perftest measures RDMA devices, shows what the
// deferred doorbell does (perf demo), and prints captured packets (perf dump).
//
// Exit codes: 0 all is well; 1 something failed, one line on stderr says what; 2 the command
// line is wrong; 130 interrupted, after a report of what was measured until then. Those of
// perf gate are 0 for a pass, 1 for a regression, 2 for whatever is neither.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	twoProcessors()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	a := &app{stdout: os.Stdout, stderr: os.Stderr, signals: signals}
	os.Exit(a.run(context.Background(), os.Args[1:]))
}

// twoProcessors has the runtime run goroutines on two threads where it would on one, for want of
// CPUs, unless the environment says how many: see the package transport on machines with one CPU.
func twoProcessors() {
	if os.Getenv("GOMAXPROCS") == "" && runtime.GOMAXPROCS(0) == 1 {
		runtime.GOMAXPROCS(2)
	}
}

// app is what commands share: where they write, and the signals that end them.
type app struct {
	stdout, stderr io.Writer
	signals        <-chan os.Signal
}

// Exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// usageError is a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// errInterrupted ends a command that a signal has ended.
var errInterrupted = errors.New("interrupted")

// run executes a command line and returns the exit code.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	fmt.Fprintln(a.stderr, "perf: "+oneLine(err.Error()))
	var usage usageError
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, errInterrupted):
		return exitInterrupted
	}
	var verdict verdictError
	if errors.As(err, &verdict) {
		return verdict.code
	}
	return exitFailed
}

// oneLine joins the lines of an error that has several.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' }), "; ")
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "perf COMMAND",
		Short: "Measure RDMA over Doorbell, and look at its packets",
		Long: `perf measures RDMA over Doorbell: perftest for ordinary UDP sockets. Options and
columns are perftest's. A test without HOST is the server, with HOST the client,
and the client's options decide. Loopback addresses are hosts.`,
		Example: `  perf serve --bind 127.0.0.2
  perf send_lat 127.0.0.2 --bind 127.0.0.1 -s 64 -n 10000`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q; see perf --help", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			_ = cmd.Help()
			return usageError{errors.New("a command is missing")}
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
	})
	root.AddCommand(a.tests()...)
	root.AddCommand(a.serve(), a.rping(), a.pingpong(), a.demo(), a.deferral(), a.compare(), a.floorEnd(), a.verbsEnd(), a.streamEnd(), a.messageEnd(), a.idleEnd(), a.dump(), a.gate())
	return root
}

// atMost refuses operands beyond n.
func atMost(n int, name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > n {
			return usageError{fmt.Errorf("unexpected operand %q: %s takes %s; see %s --help", args[n], cmd.Name(), name, cmd.CommandPath())}
		}
		return nil
	}
}
