// Http is net/http over Doorbell: a server and a client that know nothing of RDMA but the two
// calls that make their connections. In two terminals:
//
//	go run ./examples/http -serve -bind 127.0.0.2
//	go run ./examples/http -bind 127.0.0.1 http://127.0.0.2:7482/hello
//
// The URL's port is the service port. /hello greets, /echo sends back what was posted, /sum
// answers with the CRC-32 of it. With -load DURATION the client does not print one answer but
// has 8 goroutines post and check as fast as they can, and reports.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/transport"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "http:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("http", flag.ContinueOnError)
	flags.SetOutput(out)
	var (
		serving = flags.Bool("serve", false, "serve until interrupted")
		bind    = flags.String("bind", "", "our address; all of them by default")
		port    = flags.Uint("p", 7482, "service port, with -serve")
		load    = flags.Duration("load", 0, "how long to post to URL/sum")
	)
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	switch {
	case *port == 0 || *port > 65535:
		return fmt.Errorf("service port %d, want 1 to 65535", *port)
	case *serving != (flags.NArg() == 0) || flags.NArg() > 1:
		return errors.New("want either -serve or a URL")
	}
	var cfg transport.Config
	if *bind != "" {
		addr, err := netip.ParseAddr(*bind)
		if err != nil {
			return err
		}
		cfg.Bind = netip.AddrPortFrom(addr, 0)
	}
	dev, err := transport.Open(cfg)
	if err != nil {
		return err
	}
	defer dev.Close()
	if *serving {
		ln, err := dev.ListenStream(netip.AddrPortFrom(netip.Addr{}, uint16(*port)))
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "listening on %v, service port %d\n", dev.LocalAddr(), *port)
		return serve(ctx, ln)
	}
	u, err := url.Parse(flags.Arg(0))
	if err != nil || u.Host == "" {
		return fmt.Errorf("%q is not a URL: want one like http://127.0.0.2:7482/hello, whose port is the server's service port", flags.Arg(0))
	}
	c := client(dev)
	defer c.CloseIdleConnections()
	if *load > 0 {
		n, size, err := hammer(ctx, c, u.JoinPath("sum").String(), *load)
		fmt.Fprintf(out, "%d requests, %d bytes, every answer right\n", n, size)
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	_, err = io.Copy(out, resp.Body)
	return err
}

// serve serves HTTP on a listener, whatever it is, until ctx ends.
func serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /hello", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello %s, over %s\n", r.RemoteAddr, ln.Addr().Network())
	})
	mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body) // the client notices
	})
	mux.HandleFunc("POST /sum", func(w http.ResponseWriter, r *http.Request) {
		h := crc32.NewIEEE()
		if _, err := io.Copy(h, r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "%08x", h.Sum32())
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if srv.Shutdown(end) != nil {
			_ = srv.Close() // it was told in good time
		}
	})
	defer stop()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// client returns an HTTP client whose connections are streams of a device.
func client(dev *transport.Device) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(addr)
			if err != nil {
				return nil, err // a name: look it up in your own way
			}
			return dev.DialStream(ctx, to)
		},
		MaxIdleConnsPerHost: workers,
	}}
}

const workers = 8

// hammer posts bodies of all sizes and checks the sums that come back, and returns how many
// and how many bytes. The first error, or wrong answer, ends it.
func hammer(ctx context.Context, c *http.Client, to string, d time.Duration) (requests, size int64, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var n, sum atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 0))
			body := make([]byte, 1<<18)
			for i := range body {
				body[i] = byte(rnd.Uint32())
			}
			for time.Now().Before(end) && ctx.Err() == nil {
				p := body[:1<<rnd.IntN(19)]
				p = p[rnd.IntN(len(p)):]
				if err := post(ctx, c, to, p); err != nil {
					cancel(err)
					return
				}
				n.Add(1)
				sum.Add(int64(len(p)))
			}
		})
	}
	wg.Wait()
	return n.Load(), sum.Load(), context.Cause(ctx)
}

func post(ctx context.Context, c *http.Client, to string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if want := fmt.Sprintf("%08x", crc32.ChecksumIEEE(body)); resp.StatusCode != http.StatusOK || string(got) != want {
		return fmt.Errorf("%d bytes posted: %s, %q, want %s", len(body), resp.Status, got, want)
	}
	return nil
}
