package main

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Each tool, both ends in this process.
func TestRun(t *testing.T) {
	for _, tool := range []string{
		"rping", "rdma", "ucmatose", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ib_send_bw", "-c UD ib_send_bw", "-R ib_send_bw", "ib_write_lat", "-R ib_read_bw", "ib_atomic_bw",
	} {
		t.Run(strings.ReplaceAll(tool, " ", "_"), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			args := func(bind, host string) []string {
				return append([]string{"-bind", bind}, strings.Fields(tool+" "+host)...)
			}
			done := make(chan error)
			var server, client strings.Builder
			go func() { done <- run(ctx, args("127.78.0.2", ""), &server) }()
			if err := dial(ctx, args("127.78.0.1", "127.78.0.2"), &client); err != nil {
				t.Errorf("client: %v\n%s", err, &client)
				cancel()
			}
			if err := <-done; err != nil {
				t.Errorf("server: %v\n%s", err, &server)
			}
		})
	}
}

// dial is run for a client whose server may not be there yet.
func dial(ctx context.Context, args []string, out *strings.Builder) error {
	for {
		out.Reset()
		err := run(ctx, args, out)
		var tcp *net.OpError
		var rej *transport.RejectError
		late := errors.As(err, &tcp) || errors.As(err, &rej) && rej.Reason == verbs.RejectInvalidServiceID
		if !late || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}
