package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"text/tabwriter"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// errSkip marks a measurement that this machine or build has no means for.
var errSkip = errors.New("skipped")

// skipf is an error that matches errSkip.
func skipf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errSkip, fmt.Sprintf(format, args...))
}

// The values of a measurement.
const (
	p50  = "p50"  // microseconds of a whole round trip
	p99  = "p99"  // the same
	gbps = "gbps" // gigabits of payload per second
	mps  = "mps"  // million messages per second
	each = "each" // nanoseconds for an entry
	rss  = "rss"  // KiB of memory for a connection's end
)

var units = map[string]string{p50: "us", p99: "us", gbps: "Gb/s", mps: "M/s", each: "ns", rss: "KiB"}

// measurement is something that runs once in each round. Its name is what it is known by.
type measurement struct {
	name string
	run  func(context.Context, *arena) (map[string]float64, error)
	// prepare starts what it needs; nil is nothing. Such measurements have rounds of their
	// own, before the others, and what was started ends after those.
	prepare func(context.Context, *arena)
}

// pairing is a row of the table: it compares two measurements.
type pairing struct {
	group, name        string
	product, reference measurement
	value              string // of both
	// mark is the ratio of product to reference that is wanted, reach the one that would
	// be better still; 0 if there is none. Times and memory have to be at most
	// the mark, rates at least.
	mark, reach float64
	peer        bool // the reference is another transport
}

// atMost reports whether small ratios are good.
func (r *pairing) atMost() bool { return r.value != gbps && r.value != mps }

// Floors. A frame has as many bytes as Doorbell's packet of the same payload.
const frame64 = 64 + floor.Frame

func floorOf(name string, p floor.Params) measurement {
	return measurement{name: name, run: func(ctx context.Context, e *arena) (map[string]float64, error) { return e.floor(ctx, p) }}
}

var (
	udpSpin       = floorOf("raw UDP, spinning", floor.Params{Kind: floor.PingPong, Size: frame64})
	udpSpin64     = floorOf("raw UDP, spinning, 64 B", floor.Params{Kind: floor.PingPong, Size: 64})
	udpSpinConn   = floorOf("raw UDP, spinning, connected", floor.Params{Kind: floor.PingPong, Size: frame64, Connected: true})
	udpBlock      = floorOf("raw UDP, blocking", floor.Params{Kind: floor.PingPong, Size: frame64, Block: true})
	udpBlockOne   = measurement{name: "raw UDP, blocking, one CPU", run: oneCPUFloor(floor.Params{Kind: floor.PingPong, Size: frame64, Block: true})}
	gsoBulk       = floorOf("raw GSO stream", streamParams(4096, 15, 255, false))
	gsoBulkBlock  = floorOf("raw GSO stream, blocking", floor.Params{Kind: floor.Stream, Size: 4096 + floor.Frame, Train: 15, Window: 255, Block: true})
	gsoSmall64    = floorOf("raw GSO train, window 64", streamParams(64, 32, 64, false))
	gsoSmall2048  = floorOf("raw GSO train, window 2048", streamParams(64, 128, 2048, false))
	mmsgBulk      = floorOf("raw sendmmsg stream", streamParams(4096, 16, 256, true))
	mmsgSmall64   = floorOf("raw sendmmsg train, window 64", streamParams(64, 32, 64, true))
	mmsgSmall2048 = floorOf("raw sendmmsg train, window 2048", streamParams(64, 128, 2048, true))
	tcp64K        = floorOf("TCP, 64 KiB writes", floor.Params{Kind: floor.Bulk, Size: 64 << 10})
	tcp256K       = floorOf("TCP, 256 KiB writes", floor.Params{Kind: floor.Bulk, Size: 256 << 10})
	tcp1M         = floorOf("TCP, 1 MiB writes", floor.Params{Kind: floor.Bulk, Size: 1 << 20})
	tcpEcho1      = floorOf("TCP framed echo, window 1", floor.Params{Kind: floor.Echo, Size: 64})
	tcpEcho64     = floorOf("TCP framed echo, window 64", floor.Params{Kind: floor.Echo, Size: 64, Window: 64})
	ringEach      = floorOf("SPSC ring, published one by one", floor.Params{Kind: floor.Ring})
	ring32        = floorOf("SPSC ring, published by 32", floor.Params{Kind: floor.Ring, Train: 32})
	goChan        = floorOf("Go channel", floor.Params{Kind: floor.Chan})
)

func streamParams(payload, train, window int, plain bool) floor.Params {
	return floor.Params{Kind: floor.Stream, Size: payload + floor.Frame, Train: train, Window: window, NoOffload: plain}
}

// Doorbell's own tests, by the command line that runs them.
var (
	poll  = []string{"--wait", "poll"}
	block = []string{"--wait", "block"}
	// Messages of 1 MiB keep 16 under way, those of 64 B as many as the window. Only SENDs
	// have receives, and READs nothing to copy at post time.
	bulk     = []string{"-s", "1048576", "-t", "16", "-Q", "4"}
	bulk64K  = []string{"-s", "65536", "-t", "64", "-r", "256", "-Q", "16"}
	win64    = []string{"-s", "64", "-t", "64", "-Q", "16", "-l", "32"}
	win2048  = []string{"-s", "64", "-t", "2048", "-Q", "128", "-l", "128"}
	inline   = []string{"-I", "64"}
	recvs64  = []string{"-r", "64"}
	recvs512 = []string{"-r", "512"}
	recvs8K  = []string{"-r", "8192"}
	outs16   = []string{"-o", "16"}
	outs64   = []string{"-o", "64"}
	small    = []string{"-s", "64"}
	stock    = []string{"--rcvbuf", "212992", "--sndbuf", "212992"}
	plain    = []string{"--no-gso", "--no-gro"}
	bothWays = []string{"-b"}
)

func product(name, test string, flags ...[]string) measurement {
	return measurement{name: "Doorbell " + name, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		return e.product(ctx, e.places, test, flags...)
	}}
}

var (
	sendLat      = product("send_lat", "send_lat", small, poll)
	writeLat     = product("write_lat", "write_lat", small, poll)
	readLat      = product("read_lat", "read_lat", small, poll)
	sendLatBlock = product("send_lat, blocking", "send_lat", small, block)
	sendLatOne   = measurement{name: "Doorbell send_lat, blocking, one CPU", run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		return e.product(ctx, e.oneCPU(), "send_lat", small, block)
	}}
	send64    = product("send_bw 64 B, window 64", "send_bw", win64, recvs512, inline, poll)
	write64   = product("write_bw 64 B, window 64", "write_bw", win64, inline, poll)
	read64    = product("read_bw 64 B, window 64", "read_bw", win64, outs64, poll)
	send2048  = product("send_bw 64 B, window 2048", "send_bw", win2048, recvs8K, inline, poll)
	write2048 = product("write_bw 64 B, window 2048", "write_bw", win2048, inline, poll)
	sendBulk  = product("send_bw 1 MiB", "send_bw", bulk, recvs64, poll)
	writeBulk = product("write_bw 1 MiB", "write_bw", bulk, poll)
	readBulk  = product("read_bw 1 MiB", "read_bw", bulk, outs16, poll)
	sendBlock = product("send_bw 1 MiB, blocking", "send_bw", bulk, recvs64, block)

	sendLatStock  = product("send_lat, stock buffers", "send_lat", small, poll, stock)
	send64Stock   = product("send_bw 64 B, window 64, stock buffers", "send_bw", win64, recvs512, inline, poll, stock)
	send2048Stock = product("send_bw 64 B, window 2048, stock buffers", "send_bw", win2048, recvs8K, inline, poll, stock)
	sendBulkStock = product("send_bw 1 MiB, stock buffers", "send_bw", bulk, recvs64, poll, stock)
	writeStock    = product("write_bw 1 MiB, stock buffers", "write_bw", bulk, poll, stock)
	readStock     = product("read_bw 1 MiB, stock buffers", "read_bw", bulk, outs16, poll, stock)

	sendBulkPlain = product("send_bw 1 MiB, no offload", "send_bw", bulk, recvs64, poll, plain)
	send64Plain   = product("send_bw 64 B, window 64, no offload", "send_bw", win64, recvs512, inline, poll, plain)
	send2048Plain = product("send_bw 64 B, window 2048, no offload", "send_bw", win2048, recvs8K, inline, poll, plain)

	sendBoth    = product("send_bw 1 MiB, both ways", "send_bw", bulk, recvs64, poll, bothWays)
	send64K     = product("send_bw 64 KiB", "send_bw", bulk64K, poll)
	send16QPs   = product("send_bw 1 MiB, 16 QPs", "send_bw", bulk, recvs64, poll, []string{"-q", "16", "-t", "4", "-r", "16", "-Q", "2"})
	send1000QPs = product("send_bw 64 KiB, 1000 QPs", "send_bw", bulk64K, poll, []string{"-q", "1000", "-t", "8", "-r", "32", "-Q", "4"})
)

// What perftest has no test for; see verbsTransport.
func verbsWorkload(name string, p floor.Params, flags ...string) measurement {
	return workload(name, append([]string{"verbs-end"}, flags...), p)
}

// workload is a measurement by a command of ours that is one end of it.
func workload(name string, command []string, p floor.Params) measurement {
	return measurement{name: "Doorbell " + name, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		return e.ends(ctx, append([]string{e.exe}, command...), p)
	}}
}

var (
	verbsEcho   = verbsWorkload("echo, window 64", floor.Params{Kind: floor.Echo, Size: 64, Window: 64})
	verbsAlone  = verbsWorkload("ping-pong", floor.Params{Kind: floor.PingPong, Size: 64})
	verbsBeside = verbsWorkload("ping-pong beside bulk", floor.Params{Kind: floor.PingPong, Size: 64, Window: 16})
)

// Both ends collect garbage now and then, as programs do, or all the time: see collecting.
var (
	nowAndThen = []string{"--gc", "100ms", "--heap", "50"}
	allTheTime = []string{"--gc", "5ms", "--heap", "100"}
)

// Ping-pongs while the garbage collector runs, ours and the bare socket's.
var (
	verbsCollected  = verbsWorkload("ping-pong, collecting", floor.Params{Kind: floor.PingPong, Size: 64}, nowAndThen...)
	verbsCollecting = verbsWorkload("ping-pong, always collecting", floor.Params{Kind: floor.PingPong, Size: 64}, allTheTime...)
	udpCollecting   = measurement{name: "raw UDP, spinning, always collecting", run: func(ctx context.Context, e *arena) (map[string]float64, error) {
		return e.floor(ctx, floor.Params{Kind: floor.PingPong, Size: frame64}, allTheTime...)
	}}
)

// Ping-pongs beside idle connections, and what may be spent on one of those; see idlePair.
var (
	verbsIdle = measurement{
		name:    "Doorbell ping-pong beside idle",
		prepare: func(ctx context.Context, e *arena) { e.startIdle(ctx, e.c.idle) },
		run:     func(_ context.Context, e *arena) (map[string]float64, error) { return e.beside(e.c.idle) },
	}
	verbsFew = measurement{
		name:    "Doorbell ping-pong beside none",
		prepare: func(ctx context.Context, e *arena) { e.startIdle(ctx, 0) },
		run:     func(_ context.Context, e *arena) (map[string]float64, error) { return e.beside(0) },
	}
	allowance = measurement{name: "16 KiB, what is allowed", run: func(context.Context, *arena) (map[string]float64, error) {
		return map[string]float64{rss: 16}, nil
	}}
)

// Streams and messages; see compare_conns.go.
var (
	write64K   = product("write_bw 64 KiB", "write_bw", []string{"-s", "65536", "-t", "16", "-Q", "4"}, poll)
	stream64K  = workload("stream, 64 KiB writes", []string{"stream-end"}, floor.Params{Kind: floor.Bulk, Size: 64 << 10})
	streamRTT  = workload("stream, round trip", []string{"stream-end"}, floor.Params{Kind: floor.Echo, Size: 64, Window: 1})
	message64K = workload("messages of 64 KiB", []string{"message-end"}, floor.Params{Kind: floor.Bulk, Size: 64 << 10})
	messageRTT = workload("messages, round trip", []string{"message-end"}, floor.Params{Kind: floor.PingPong, Size: 64})
)

// allRows is the table, in the order in which it is printed.
func allRows() []pairing {
	const (
		rtt   = "round trips"
		small = "small messages"
		bulk  = "bulk"
		conns = "streams and messages"
		hard  = "less to work with"
		scale = "many at a time"
		other = "other transports"
		bare  = "floors beside each other"
	)
	rows := []pairing{
		{rtt, "64 B SEND round trip, polling, p50", sendLat, udpSpin, p50, 1.25, 1.12, false},
		{rtt, "64 B SEND round trip, polling, p99", sendLat, udpSpin, p99, 2, 0, false},
		{rtt, "64 B WRITE round trip, polling, p50", writeLat, udpSpin, p50, 1.35, 1.2, false},
		{rtt, "64 B READ round trip, polling, p50", readLat, udpSpin, p50, 1.35, 1.2, false},
		{rtt, "64 B SEND round trip, blocking, p50", sendLatBlock, udpBlock, p50, 1.3, 1.1, false},
		{rtt, "64 B SEND round trip, blocking, one CPU, p50", sendLatOne, udpBlockOne, p50, 1.3, 1.1, false},

		{small, "64 B SEND, window 64", send64, gsoSmall64, mps, 0.5, 0.75, false},
		{small, "64 B SEND echoed, window 64, against TCP", verbsEcho, tcpEcho64, mps, 1, 0, false},
		{small, "64 B WRITE, window 64", write64, gsoSmall64, mps, 0.5, 0.75, false},
		{small, "64 B READ, window 64", read64, gsoSmall64, mps, 0, 0, false},
		{small, "64 B SEND, window 2048", send2048, gsoSmall2048, mps, 0.45, 0.7, false},
		{small, "64 B WRITE, window 2048", write2048, gsoSmall2048, mps, 0.45, 0.7, false},

		{bulk, "1 MiB SEND", sendBulk, gsoBulk, gbps, 0.85, 0.95, false},
		{bulk, "1 MiB WRITE", writeBulk, gsoBulk, gbps, 0.85, 0.95, false},
		{bulk, "1 MiB READ", readBulk, gsoBulk, gbps, 0.8, 0.9, false},
		{bulk, "1 MiB SEND, against TCP 64 KiB", sendBulk, tcp64K, gbps, 1, 0, false},
		{bulk, "1 MiB WRITE, against TCP 64 KiB", writeBulk, tcp64K, gbps, 1, 0, false},
		{bulk, "1 MiB SEND, against TCP 256 KiB", sendBulk, tcp256K, gbps, 0, 0, false},
		{bulk, "1 MiB SEND, against TCP 1 MiB", sendBulk, tcp1M, gbps, 0, 0, false},
		{bulk, "1 MiB SEND, blocking", sendBlock, gsoBulkBlock, gbps, 0.85, 0.95, false},

		{conns, "64 B over a stream there and back, p50", streamRTT, sendLat, p50, 1.3, 1.1, false},
		{conns, "64 B over a stream there and back, against TCP, p50", streamRTT, tcpEcho1, p50, 1, 0, false},
		{conns, "stream, writes of 64 KiB", stream64K, write64K, gbps, 0.85, 0.95, false},
		{conns, "stream, writes of 64 KiB, against TCP", stream64K, tcp64K, gbps, 1, 0, false},
		{conns, "message of 64 B there and back, p50", messageRTT, sendLat, p50, 1.2, 1.1, false},
		{conns, "messages of 64 KiB", message64K, send64K, gbps, 0, 0, false},

		{hard, "64 B SEND round trip, stock buffers, p50", sendLatStock, sendLat, p50, 1 / 0.7, 1 / 0.9, false},
		{hard, "64 B SEND, window 64, stock buffers", send64Stock, send64, mps, 0.7, 0.9, false},
		{hard, "64 B SEND, window 2048, stock buffers", send2048Stock, send2048, mps, 0.7, 0.9, false},
		{hard, "1 MiB SEND, stock buffers", sendBulkStock, sendBulk, gbps, 0.7, 0.9, false},
		{hard, "1 MiB WRITE, stock buffers", writeStock, writeBulk, gbps, 0.7, 0.9, false},
		{hard, "1 MiB READ, stock buffers", readStock, readBulk, gbps, 0.7, 0.9, false},
		{hard, "1 MiB SEND, no offload", sendBulkPlain, mmsgBulk, gbps, 0.85, 0.95, false},
		{hard, "64 B SEND, window 64, no offload", send64Plain, mmsgSmall64, mps, 0.85, 0.95, false},
		{hard, "64 B SEND, window 2048, no offload", send2048Plain, mmsgSmall2048, mps, 0.85, 0.95, false},

		{scale, "1 MiB SEND, both ways in total", sendBoth, sendBulk, gbps, 0.9, 1, false},
		{scale, "1 MiB SEND, 16 QPs", send16QPs, sendBulk, gbps, 0.9, 1, false},
		{scale, "64 KiB SEND, 1000 QPs", send1000QPs, send64K, gbps, 0.8, 1, false},
		{scale, "64 B round trip beside bulk, p99", verbsBeside, verbsAlone, p99, 4, 2, false},
		{scale, "64 B round trip beside bulk, p50", verbsBeside, verbsAlone, p50, 0, 0, false},
		{scale, "64 B round trip beside idle connections, p50", verbsIdle, verbsFew, p50, 1.05, 1.02, false},
		{scale, "64 B round trip beside idle connections, p99", verbsIdle, verbsFew, p99, 0, 0, false},
		{scale, "memory of an idle connection, for each end", verbsIdle, allowance, rss, 1, 0.25, false},
		{scale, "64 B round trip, collections every 100 ms, p99", verbsCollected, verbsAlone, p99, 2, 0, false},
		{scale, "64 B round trip, collections without end, p50", verbsCollecting, udpCollecting, p50, 0, 0, false},
		{scale, "64 B round trip, collections without end, p99", verbsCollecting, udpCollecting, p99, 0, 0, false},
	}
	for _, mtu := range []int{9000, 1500} {
		rows = append(rows, vethRows(fmt.Sprintf("veth, MTU %d", mtu), mtu)...)
	}
	rows = append(rows, peerRows(other)...)
	return append(
		rows,
		pairing{bare, "64 B frames against 80 B, p50", udpSpin64, udpSpin, p50, 0, 0, false},
		pairing{bare, "connected sockets against sendto, p50", udpSpinConn, udpSpin, p50, 0, 0, false},
		pairing{bare, "raw UDP, collections without end, p99", udpCollecting, udpSpin, p99, 0, 0, false},
		pairing{bare, "ring, published by 32 against one by one", ring32, ringEach, each, 0, 0, false},
		pairing{bare, "ring against Go channel", ringEach, goChan, each, 0, 0, false},
	)
}

// vethRows are the main rows between two namespaces, against the floors there.
func vethRows(group string, mtu int) []pairing {
	payload, train := 4096, 15
	if mtu < 4200 {
		payload, train = 1024, 60
	}
	at := func(name string, p floor.Params) measurement {
		return measurement{name: name + ", " + group, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
			return e.floorBetween(ctx, mtu, p)
		}}
	}
	doorbell := func(test string, flags ...[]string) measurement {
		return measurement{name: "Doorbell " + test + ", " + group, run: func(ctx context.Context, e *arena) (map[string]float64, error) {
			return e.productBetween(ctx, mtu, test, flags...)
		}}
	}
	spin := at("raw UDP, spinning", floor.Params{Kind: floor.PingPong, Size: frame64})
	stream := at("raw GSO stream", streamParams(payload, train, 1<<20/payload, false))
	lat := doorbell("send_lat", small, poll)
	bw := doorbell("send_bw", bulk, recvs64, poll)
	return []pairing{
		{group, "64 B SEND round trip, p50, " + group, lat, spin, p50, 1.25, 1.12, false},
		{group, "1 MiB SEND, " + group, bw, stream, gbps, 0.85, 0.95, false},
		{group, "1 MiB WRITE, " + group, doorbell("write_bw", bulk, poll), stream, gbps, 0.85, 0.95, false},
	}
}

// chooseRows returns the rows that match.
func chooseRows(only *regexp.Regexp, noPeers bool) []pairing {
	var rows []pairing
	for _, r := range allRows() {
		if only.MatchString(r.name) && !(noPeers && r.peer) {
			rows = append(rows, r)
		}
	}
	return rows
}

// wanted returns the measurements that rows need, each once, a product's beside its reference.
func wanted(rows []pairing) []measurement {
	var list []measurement
	seen := map[string]bool{}
	for _, r := range rows {
		for _, m := range []measurement{r.reference, r.product} {
			if !seen[m.name] {
				seen[m.name] = true
				list = append(list, m)
			}
		}
	}
	return list
}

// listRows prints what there is to compare.
func listRows(w io.Writer, rows []pairing) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ROW\tPRODUCT\tREFERENCE\tMARK")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", r.name, r.product.name, r.reference.name, r.markText())
	}
	return t.Flush()
}

// markText is the mark with its direction.
func (r *pairing) markText() string {
	switch {
	case r.mark == 0:
		return ""
	case r.atMost():
		return fmt.Sprintf("<= %.2f", r.mark)
	}
	return fmt.Sprintf(">= %.2f", r.mark)
}
