package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/transport"
)

const aboutMessages = `
--compress and --payload measure messages (transport.Conn) instead of verbs: bytes of
the program's a second, and how many went over the wire for them. The other end is
perf serve, or a send_bw with --compress, and -s up to the longest message.
docs/compression.md has figures.`

// compressions are what --compress names.
var compressions = []string{
	transport.CompressNone.String(), transport.CompressS2.String(), transport.CompressZstd.String(),
}

// registerMessages adds the flags that turn send_bw into a test of messages.
func (t *testFlags) registerMessages(cmd *cobra.Command) {
	cmd.Long = strings.Replace(cmd.Long, aboutServer, aboutMessages+"\n"+aboutServer, 1)
	cmd.Flags().Var(choice{&t.compress, compressions}, "compress", "measure messages, compressed so")
	cmd.Flags().Var(choice{&t.payload, bench.Payloads}, "payload", "what messages hold; text if --compress is given")
}

// checkMessages finds what does not go with --compress and --payload.
func (t *testFlags) checkMessages(cmd *cobra.Command) error {
	f := cmd.Flags()
	if f.Lookup("compress") == nil || t.compress == "" && t.payload == "" {
		return nil
	}
	for _, name := range []string{
		"all", "connection", "inline_size", "qp", "cq-mod", "post_list", "bidirectional", "use-srq", "tx-depth", "mtu",
	} {
		if f.Changed(name) {
			return usageError{fmt.Errorf("--%s means nothing with --compress and --payload, which measure messages", name)}
		}
	}
	const longest = 1 << 24
	if t.p.Size < 1 || t.p.Size > longest {
		return usageError{&bench.RangeError{Name: "message size", Value: int64(t.p.Size), Min: 1, Max: longest}}
	}
	if t.compress == "" {
		t.compress = transport.CompressNone.String()
	}
	if t.payload == "" {
		t.payload = "text"
	}
	return nil
}

// messageConfig is the connection's: as many buffers as -r says, within 64 MiB.
func (t *testFlags) messageConfig() transport.MessageConfig {
	c := transport.MessageConfig{MaxMessage: max(t.p.Size, 4096)}
	c.Buffers = max(min(t.p.RxDepth, 64<<20/c.MaxMessage), 2)
	for m, name := range compressions {
		if name == t.compress {
			c.Compression = transport.Compression(m)
		}
	}
	return c
}

// messages runs send_bw of messages, either side.
func (a *app) messages(ctx context.Context, t *testFlags, args []string) error {
	if len(args) == 0 {
		return a.onDevice(ctx, &t.deviceFlags, func(ctx context.Context, dev *device) error { return a.serveMessages(ctx, t, dev) })
	}
	to, err := parseTarget(args[0])
	if err != nil {
		return err
	}
	return a.onDeviceUntil(ctx, &t.deviceFlags, func(ctx context.Context, dev *device, first context.Context, _ func()) error {
		if err := to.resolve(ctx, dev.LocalAddr().Addr()); err != nil {
			return err
		}
		cfg := t.messageConfig()
		cfg.RemotePort = to.udp
		conn, err := cfg.Dial(first, dev.Device, netip.AddrPortFrom(to.addr, t.port))
		if err != nil {
			if first.Err() != nil {
				return errInterrupted
			}
			return explainDial(bench.Refused(err), to, t.port, "perf serve, or perf send_bw --compress "+t.compress+",")
		}
		defer conn.Close()
		return a.sendMessages(ctx, first, t, dev, conn)
	})
}

// serveMessages serves one client.
func (a *app) serveMessages(ctx context.Context, t *testFlags, dev *device) error {
	out := a.stdout
	if t.json {
		out = a.stderr
	}
	ln, err := t.messageConfig().Listen(dev.Device, netip.AddrPortFrom(netip.Addr{}, t.port))
	if err != nil {
		return err
	}
	defer ln.Close()
	fmt.Fprintf(out, "Waiting for a client on %v, service port %d\n", dev.LocalAddr(), t.port)
	conn, err := ln.Accept(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return errInterrupted
		}
		return err
	}
	defer conn.Close()
	n, size, err := bench.ServeMessages(ctx, conn)
	if ctx.Err() != nil {
		return errInterrupted
	}
	if err == nil {
		fmt.Fprintf(out, "Received %d messages, %d bytes, warm-up included\n", n, size)
	}
	return err
}

// messageResult is the JSON document of a test of messages.
type messageResult struct {
	Info struct {
		Test     string `json:"test"`
		Device   string `json:"Device"`
		Remote   string `json:"Remote"`
		Compress string `json:"Compression"`
		Payload  string `json:"Payload"`
		BWUnit   string `json:"BW_unit"`
		RateUnit string `json:"MsgRate_unit"`
	} `json:"test_info"`
	Results struct {
		Size    int    `json:"MsgSize"`
		Iters   uint64 `json:"n_iterations"`
		Average fixed  `json:"BW_average"`
		Rate    fixed  `json:"MsgRate"`
		Elapsed exact  `json:"elapsed_sec"`
		// Wire is how many bytes went out for one of the program's, headers included.
		Wire fixed `json:"wire_bytes_per_byte"`
	} `json:"results"`
	Interrupted bool `json:"interrupted,omitempty"`
}

// sendMessages runs the client's side and reports.
func (a *app) sendMessages(ctx, first context.Context, t *testFlags, dev *device, conn *transport.Conn) error {
	m := bench.MessageTest{Payload: bench.Payload(t.payload, t.p.Size), Iters: t.p.Iters, Duration: t.p.Duration}
	if conn.Compression().String() != t.compress {
		return fmt.Errorf("the other end does not compress: start it with --compress %s", t.compress)
	}
	if err := m.Warm(ctx, first, conn); err != nil && !errors.Is(err, bench.ErrInterrupted) {
		return err
	}
	sent := dev.Counters()["wire_bytes_out"]
	r, err := m.Run(ctx, first, conn)
	sent = dev.Counters()["wire_bytes_out"] - sent
	interrupted := errors.Is(err, bench.ErrInterrupted)
	if err != nil && !interrupted {
		return err
	}
	u := bandwidthUnit(t.gbits)
	var doc messageResult
	doc.Interrupted = interrupted
	doc.Info.Test, doc.Info.Device, doc.Info.Remote = "Send_BW_Test_of_messages", conn.LocalAddr().String(), conn.RemoteAddr().String()
	doc.Info.Compress, doc.Info.Payload, doc.Info.BWUnit, doc.Info.RateUnit = t.compress, t.payload, u.name, "Mpps"
	doc.Results.Size, doc.Results.Iters, doc.Results.Elapsed = r.Size, r.Iters, exact(r.Elapsed.Seconds())
	doc.Results.Average, doc.Results.Rate, doc.Results.Wire = fixed(r.Average/u.bytes), fixed(r.Rate/1e6), fixed(float64(sent)/float64(max(r.Iters, 1))/float64(r.Size))
	err = nil
	if interrupted {
		err = errInterrupted
	}
	if t.json {
		err = errors.Join(err, writeDocument(a.stdout, &doc))
	} else {
		printMessages(a.stdout, &doc)
	}
	if t.jsonFile != "" {
		var b strings.Builder
		err = errors.Join(err, writeDocument(&b, &doc), os.WriteFile(t.jsonFile, []byte(b.String()), 0o644))
	}
	return err
}

func writeDocument(w io.Writer, doc any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(doc)
}

func printMessages(w io.Writer, d *messageResult) {
	fmt.Fprint(w, rule)
	fmt.Fprintf(w, " Send BW Test of messages\n Local  %s\n Remote %s\n Compression : %-8s Payload : %s\n",
		d.Info.Device, d.Info.Remote, d.Info.Compress, d.Info.Payload)
	fmt.Fprint(w, rule)
	fmt.Fprintf(w, " %-10s %-14s %-22s %-16s %s\n", "#bytes", "#iterations", "BW average["+d.Info.BWUnit+"]", "MsgRate[Mpps]", "wire bytes per byte")
	fmt.Fprintf(w, " %-10d %-14d %-22.2f %-16.6f %.3f\n", d.Results.Size, d.Results.Iters, d.Results.Average, d.Results.Rate, d.Results.Wire)
	fmt.Fprint(w, rule)
}
