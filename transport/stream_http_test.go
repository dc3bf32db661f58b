package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/link"
	"github.com/doorbell-rdma/doorbell/transport"
)

// TestHTTPUnderLoss: net/http over streams, with one datagram in a hundred lost each way, loses
// nothing: every request is answered, and with the sum of what was posted. With -tags soak it
// goes on for a minute.
func TestHTTPUnderLoss(t *testing.T) {
	const workers, seed = 6, 7
	for i, cfg := range []transport.StreamConfig{{}, {Compression: transport.CompressS2}} {
		t.Run(cfg.Compression.String(), func(t *testing.T) {
			client := open(t, fmt.Sprintf("127.1.61.%d", 2*i+1), transport.Config{})
			server := open(t, fmt.Sprintf("127.1.61.%d", 2*i+2), transport.Config{})
			for j, d := range []*transport.Device{client, server} {
				transport.Interpose(d, func(l link.Link) link.Link {
					return &lossyData{Link: l, rnd: rand.New(rand.NewPCG(seed, uint64(j))), p: 0.01}
				})
			}
			ln, err := cfg.Listen(server, netipPort(streamPort))
			if err != nil {
				t.Fatal(err)
			}
			srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				h := crc32.NewIEEE()
				if _, err := io.Copy(h, r.Body); err != nil {
					http.Error(w, err.Error(), http.StatusBadRequest)
					return
				}
				fmt.Fprintf(w, "%08x", h.Sum32())
			})}
			served := make(chan error, 1)
			go func() { served <- srv.Serve(ln) }()
			tr := &http.Transport{
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return cfg.Dial(ctx, client, addrOf(server, streamPort))
				},
				MaxIdleConnsPerHost: workers,
			}
			ctx, end := deadlineAfter(t), time.Now().Add(httpFor)
			var requests, bodies atomic.Int64
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					rnd := rand.New(rand.NewPCG(seed, uint64(100+w)))
					for n := 0; n == 0 || time.Now().Before(end); n++ {
						body := payload(rnd.IntN(1000), rnd.IntN(1<<rnd.IntN(18)))
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://server/", bytes.NewReader(body))
						if err != nil {
							t.Error(err)
							return
						}
						resp, err := tr.RoundTrip(req)
						if err != nil {
							t.Errorf("seed %d: a request was lost: %v", seed, err)
							return
						}
						got, err := io.ReadAll(resp.Body)
						_ = resp.Body.Close() // read to its end
						if want := fmt.Sprintf("%08x", crc32.ChecksumIEEE(body)); err != nil || string(got) != want {
							t.Errorf("seed %d: %d bytes posted: %q, want %s; %v", seed, len(body), got, want, err)
							return
						}
						requests.Add(1)
						bodies.Add(int64(len(body)))
					}
				})
			}
			wg.Wait()
			tr.CloseIdleConnections()
			if err := srv.Close(); err != nil {
				t.Error(err)
			}
			if err := <-served; !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
			if n := client.Counters()["qp_retransmits"] + server.Counters()["qp_retransmits"]; n == 0 {
				t.Error("nothing was retransmitted: nothing was lost")
			}
			t.Logf("%d requests with %d bytes", requests.Load(), bodies.Load())
		})
	}
}

// deadlineAfter is long enough for the load to end by itself.
func deadlineAfter(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), httpFor+time.Minute)
	t.Cleanup(cancel)
	return ctx
}
