package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/transport"
)

func (a *app) serve() *cobra.Command {
	d := &deviceFlags{}
	sessions, memory := 64, int64(1<<30)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve any test of any number of clients until a signal comes",
		Long: `Serves every test with the client's options, several clients at a time, until
Ctrl-C or SIGTERM. It prints a client's report when its test is over.

Clients of send_bw --compress and --payload are served, too: what they send is
unpacked, by whatever method, and counted. rping and pingpong, which follow other
programs, serve themselves.`,
		Example: `  perf serve --bind 127.0.0.2
  perf serve --bind [::1]:4792 -p 20000`,
		Args: atMost(0, "no operands"),
	}
	d.register(cmd)
	cmd.Flags().Var(whole[int]{&sessions, 1, 1024}, "max-sessions", "tests at a time")
	cmd.Flags().Var(whole[int64]{&memory, 1 << 20, 1 << 36}, "max-memory", "bytes of memory of all tests together")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if _, err := d.config(); err != nil {
			return err
		}
		return a.serveAll(cmd.Context(), d, sessions, memory)
	}
	return cmd
}

func (a *app) serveAll(ctx context.Context, d *deviceFlags, sessions int, memory int64) error {
	var count atomic.Int64
	var mu sync.Mutex // one report at a time on stdout
	u := bandwidthUnit(false)
	handle := func(ctx context.Context, s *bench.Session) {
		n, p := count.Add(1), s.Params()
		var b strings.Builder
		fmt.Fprintf(&b, "session %d: %s over %v of %v, %d QPs\n%s", n, title(p), p.Type, s.RemoteAddr(), p.QPs, columns(p, u))
		err := s.Run(ctx, func(r bench.Result) { b.WriteString(row(r, u)) })
		if err != nil {
			fmt.Fprintf(&b, "session %d: %v\n", n, oneLine(err.Error()))
		}
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprint(a.stdout, b.String())
	}
	messages := func(ctx context.Context, conn *transport.Conn) {
		num, peer := count.Add(1), conn.RemoteAddr()
		n, size, err := bench.ServeMessages(ctx, conn)
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(a.stdout, "session %d: messages of %v: %d, with %d bytes, warm-up included\n", num, peer, n, size)
		if err != nil {
			fmt.Fprintf(a.stdout, "session %d: %v\n", num, oneLine(err.Error()))
		}
	}
	return a.onDevice(ctx, d, func(ctx context.Context, dev *device) error {
		srv := &bench.Server{
			Device: dev.Device, Port: d.port, MaxSessions: sessions, MaxMemory: memory, Options: d.options(),
			Handle: handle, Messages: messages,
			Listening: func() {
				fmt.Fprintf(a.stdout, "Serving on %v, service port %d; Ctrl-C ends it\n", dev.LocalAddr(), d.port)
			},
		}
		return srv.Serve(ctx)
	})
}
