package floor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// command prepares an end that is told o.
func (p Place) command(ctx context.Context, argv []string, o order) (*exec.Cmd, *bytes.Buffer, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return nil, nil, err
	}
	argv = append(argv[:len(argv):len(argv)], string(text))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = time.Second
	complaint := &bytes.Buffer{}
	cmd.Stderr = complaint
	return cmd, complaint, nil
}

// Env returns the environment variables that the place asks for, as os/exec takes them.
func (p Place) Env() []string {
	if p.Procs == 0 {
		return nil
	}
	return []string{"GOMAXPROCS=" + strconv.Itoa(p.Procs)}
}

// Ends runs two processes that keep to the protocol of [End] without looking at what the
// parameters say, so that other transports can be measured like the floors.
func Ends(ctx context.Context, p Params) (Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // kills what still runs
	argv := p.Exec
	p.Exec = nil
	server, complaint, err := p.Places[0].command(ctx, argv, order{Params: p})
	if err != nil {
		return Result{}, err
	}
	out, err := server.StdoutPipe()
	if err != nil {
		return Result{}, err
	}
	if err := p.Places[0].Start(server); err != nil {
		return Result{}, fmt.Errorf("floor: %w", err)
	}
	defer func() {
		cancel()
		_ = server.Wait() // killed, or gone already; the driving end has told what there is
	}()
	line, err := bufio.NewReader(out).ReadBytes('\n')
	var h hello
	if err == nil {
		err = json.Unmarshal(line, &h)
	}
	if err != nil {
		cancel()
		_ = server.Wait()
		return Result{}, fmt.Errorf("floor: the end that serves did not start: %w: %s", err, strings.TrimSpace(complaint.String()))
	}
	return p.Places[1].result(ctx, argv, order{Params: p, To: h.Listens})
}

// alone runs a floor that needs only one process in one of its own.
func alone(ctx context.Context, p Params) (Result, error) {
	argv := p.Exec
	p.Exec = nil
	place := p.Places[1]
	place.CPU = 0 // its threads pin themselves
	return place.result(ctx, argv, order{Params: p})
}

// result runs an end that answers with a result.
func (p Place) result(ctx context.Context, argv []string, o order) (Result, error) {
	cmd, complaint, err := p.command(ctx, argv, o)
	if err != nil {
		return Result{}, err
	}
	out := &bytes.Buffer{}
	cmd.Stdout = out
	if err := p.Start(cmd); err != nil {
		return Result{}, fmt.Errorf("floor: %w", err)
	}
	if err := cmd.Wait(); err != nil {
		return Result{}, fmt.Errorf("floor: the end that drives: %w: %s", err, strings.TrimSpace(complaint.String()))
	}
	var r Result
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return Result{}, fmt.Errorf("floor: the end that drives printed %q: %w", out, err)
	}
	return r, nil
}
