// Kv is a key-value store in the server's memory that clients read and write with one-sided
// operations: the server's program takes no part in it. In two terminals:
//
//	go run ./examples/kv -serve -bind 127.0.0.2
//	go run ./examples/kv -bind 127.0.0.1 127.0.0.2 put colour blue get colour
//
// Further commands: get KEY, put KEY VALUE, add KEY N (a counter, under the entry's lock),
// hold KEY SECONDS, which keeps the entry's lock, and bench SECONDS, which gets and puts as fast
// as it can and checks what it reads.
//
// # How it works
//
// The server registers a table of entries and offers it in the REP's private data:
//
//	 0  lock      8  0, or who holds it
//	 8  version   8  counts the writes; 0: never used
//	16  checksum  4  CRC-32 of version, lengths, key and value
//	20  lengths   4  of the key and of the value, 2 bytes each
//	24  key and value
//
// A GET is one RDMA READ of the entry. A READ of more than one packet may meet a WRITE, so the
// checksum, over the version too, tells an entry that is whole from one that is torn, and a torn
// one is read again. A PUT takes the lock with an atomic CMP_SWAP, READs the version, WRITEs
// everything behind the lock, and gives the lock back with a second CMP_SWAP. Requests of one
// queue pair are executed in order, so who takes the lock next finds the value written.
//
// A client that dies takes its locks with it. The server gives each client the number to lock
// with, and when the client has gone - it says so, or does not answer within about three seconds
// - closes its queue pair, so that nothing of it arrives any more, and takes its number out of
// every lock. An entry that it has half written gets an empty value: what it was to be is lost.
// There is no lease: a client that lives may hold a lock as long as it likes, since one that came
// back after its time would write what another has locked. A client that locks with another
// number than its own is not guarded against, as little as one that writes without the lock.
//
// The server changes its table too: it counts seconds in the entry "uptime". It must not
// touch the memory itself, which peers read and write at any time: that would be a data race,
// in Go and in fact. So it connects to itself and puts like everybody else; its transport
// executes all operations on the table one after another.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "kv:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("kv", flag.ContinueOnError)
	flags.SetOutput(out)
	var (
		serving = flags.Bool("serve", false, "serve until interrupted")
		bind    = flags.String("bind", "", "our address; all of them by default")
		port    = flags.Uint("p", 7481, "service port")
	)
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if *port == 0 || *port > 65535 {
		return fmt.Errorf("service port %d, want 1 to 65535", *port)
	}
	if *serving == (flags.NArg() > 0) {
		return errors.New("want either -serve or a host")
	}
	dev, err := open(*bind)
	if err != nil {
		return err
	}
	defer dev.Close()
	if *serving {
		return serve(ctx, dev, uint16(*port), out)
	}
	host, err := netip.ParseAddr(flags.Arg(0))
	if err != nil {
		return err
	}
	c, err := dial(ctx, dev, netip.AddrPortFrom(host, uint16(*port)))
	if err != nil {
		return err
	}
	defer c.close()
	return command(ctx, c, flags.Args()[1:], out)
}

// command does what the arguments say, one after another.
func command(ctx context.Context, c *client, args []string, out io.Writer) error {
	for len(args) > 0 {
		need, ok := map[string]int{"get": 2, "put": 3, "add": 3, "hold": 3, "bench": 2}[args[0]]
		if !ok || len(args) < need {
			return fmt.Errorf("%q: want get KEY, put KEY VALUE, add KEY N, hold KEY SECONDS or bench SECONDS", args)
		}
		var err error
		switch args[0] {
		case "get":
			var v []byte
			if v, err = c.get(ctx, args[1]); err == nil {
				fmt.Fprintf(out, "%s\n", v)
			}
		case "put":
			err = c.put(ctx, args[1], []byte(args[2]))
		case "add":
			var n, sum int64
			if n, err = strconv.ParseInt(args[2], 10, 64); err == nil {
				sum, err = c.add(ctx, args[1], n)
			}
			if err == nil {
				fmt.Fprintln(out, sum)
			}
		case "hold":
			var sec float64
			if sec, err = strconv.ParseFloat(args[2], 64); err == nil {
				err = hold(ctx, c, args[1], time.Duration(sec*float64(time.Second)), out)
			}
		case "bench":
			var sec float64
			if sec, err = strconv.ParseFloat(args[1], 64); err == nil {
				err = bench(ctx, c, time.Duration(sec*float64(time.Second)), out)
			}
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", args[0], args[1], err)
		}
		args = args[need:]
	}
	return nil
}

// hold keeps a key's lock for a while and leaves the value as it is.
func hold(ctx context.Context, c *client, key string, d time.Duration, out io.Writer) error {
	return c.update(ctx, key, func(old []byte) ([]byte, error) {
		fmt.Fprintf(out, "holding %s\n", key)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(d):
			return old, nil
		}
	})
}

// bench gets and puts one entry, alternating, and reports how many a second. Several may run at
// once: whatever a get returns is a whole value of one of them.
func bench(ctx context.Context, c *client, d time.Duration, out io.Writer) error {
	value := make([]byte, valueLen-64)
	start, n := time.Now(), 0
	for ; time.Since(start) < d; n++ {
		for i := range value {
			value[i] = byte('a' + n%26)
		}
		if err := c.put(ctx, "bench", value); err != nil {
			return err
		}
		got, err := c.get(ctx, "bench")
		if err != nil {
			return err
		}
		for i := range got {
			if got[i] != got[0] {
				return fmt.Errorf("a torn value was taken for a whole one, at %d of %d", i, len(got))
			}
		}
	}
	took := time.Since(start)
	fmt.Fprintf(out, "%d puts and gets of %d bytes, %.0f pairs a second; read again because torn: %d, waited for a lock: %d\n",
		n, len(value), float64(n)/took.Seconds(), c.torn, c.busy)
	return nil
}
