package role

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/doorbell-rdma/doorbell/internal/yield"
)

// ErrClosed is returned by Do when the role was closed before the command ran.
var ErrClosed = errors.New("role: closed")

// maxCommands bounds the commands that wait for an owner; further callers of Do wait for room.
const maxCommands = 64

// command is a function that waits for an owner. Whoever runs or fails it closes done.
type command struct {
	fn   func()
	last bool  // the role ends with it
	err  error // valid once done is closed
	done chan struct{}
}

func (c *command) finish(err error) {
	c.err = err
	close(c.done)
}

// commands is the list of functions that wait for an owner.
type commands struct {
	queued atomic.Bool // the list is not empty; written under mu
	closed atomic.Bool // the last command was run, nothing is taken any more; written under mu
	// running: there is a thread, which will look at the role sooner or later; written under mu.
	running atomic.Bool

	mu   sync.Mutex
	list []*command

	slots  chan struct{} // bounds the list
	dead   chan struct{} // closed when closed is set
	exited chan struct{} // closed when the thread has ended
	gone   chan struct{} // closed when Close is through
}

func (c *commands) init() {
	c.slots = make(chan struct{}, maxCommands)
	c.dead = make(chan struct{})
	c.exited = make(chan struct{})
	c.gone = make(chan struct{})
}

// push adds a command to the list, or says that the role is closed.
func (c *commands) push(cmd *command) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return ErrClosed
	}
	c.list = append(c.list, cmd)
	c.queued.Store(true)
	return nil
}

// take empties the list; the last one also closes it.
func (c *commands) take(last bool) []*command {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := c.list
	c.list = nil
	c.queued.Store(false)
	if last {
		c.closed.Store(true)
		close(c.dead)
	}
	return list
}

// Do runs fn under the role and returns when it has run: on this goroutine if the role is
// free, otherwise on that of the owner. Commands run in the order in which they were left,
// before the owner's next step. fn must not block, and may be followed by a step that sees
// what it did. The error is [ErrClosed] when fn did not and will not run. Any goroutine, but
// not under the role: that would wait for itself.
//
// It is for control operations: it allocates, and whoever runs a command for another pays
// for waking it, 20 to 70 us on a locked thread.
func (r *Role) Do(fn func()) error {
	select {
	case r.commands.slots <- struct{}{}:
	case <-r.commands.dead:
		return ErrClosed
	}
	defer func() { <-r.commands.slots }()
	return r.submit(&command{fn: fn, done: make(chan struct{})})
}

func (r *Role) submit(cmd *command) error {
	if err := r.commands.push(cmd); err != nil {
		return err
	}
	yield.Point()
	if r.word.TryInsist() {
		r.settle(1)
	}
	<-cmd.done
	return cmd.err
}

// runCommands runs what is in the list, by the owner. It is false after the last command;
// whatever else was left is failed then.
func (r *Role) runCommands() bool {
	list := r.commands.take(false)
	for i, cmd := range list {
		cmd.fn()
		r.Counters.Commands.Add(1)
		if !cmd.last {
			cmd.finish(nil)
			continue
		}
		yield.Point()
		for _, late := range append(list[i+1:], r.commands.take(true)...) {
			late.finish(ErrClosed)
		}
		cmd.finish(nil)
		return false
	}
	return true
}

// Close runs last under the role as its last command, fails all commands that come after it
// and ends the thread. last shuts the driver down: it flushes what is left and rings the
// bells of those who wait. When Close returns, neither the driver nor the sleeper is in use
// any more, nor will be, whatever others still call: the role stays owned for ever. A second
// Close waits for the first and returns ErrClosed, its last not run. Any goroutine but the
// thread, and not under the role.
func (r *Role) Close(last func()) error {
	c := &r.commands
	if err := r.submit(&command{fn: last, last: true, done: make(chan struct{})}); err != nil {
		<-c.gone
		return err
	}
	if c.running.Load() { // begin has seen closed, or set this
		r.sleeper.Wake()
		r.sleeper.Rouse()
		<-c.exited
	}
	for r.seat.Load() {
		r.watcher.Wake()
		runtime.Gosched()
	}
	r.bed.Store(awake) // nobody wakes from now on, but some may be about to
	for r.wakers.Load() != 0 {
		runtime.Gosched()
	}
	close(c.gone)
	return nil
}

// Closed reports whether the last command was run. Any goroutine.
func (r *Role) Closed() bool { return r.commands.closed.Load() }

// begin says whether Run may start.
func (r *Role) begin() bool {
	c := &r.commands
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return false
	}
	if c.running.Swap(true) {
		panic("BUG: role: Run called twice")
	}
	return true
}
