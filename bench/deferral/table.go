package deferral

import (
	"bufio"
	"fmt"
	"io"
	"time"
)

// WriteTable writes the report to be read.
func (r *Report) WriteTable(w io.Writer) error {
	b := bufio.NewWriter(w)
	m := &r.Machine
	fmt.Fprintf(b, "Study of the deferred doorbell: seed %d, %d trials, %.1f s", r.Seed, r.Trials, r.Elapsed.Seconds())
	if r.Truncated {
		fmt.Fprint(b, ", cut short by its budget")
	}
	fmt.Fprintf(b, "\n%s/%s, %s, %d cores, %s", m.GOOS, m.GOARCH, m.Go, m.Cores, orUnknown(m.CPU))
	if m.LoadBefore >= 0 {
		fmt.Fprintf(b, ", load %.1f before and %.1f after", m.LoadBefore, m.LoadAfter)
	}
	fmt.Fprintln(b)
	for s := range NumStrategies {
		fmt.Fprintf(b, "  %v\n", s)
	}
	if len(r.Cells) > 0 {
		r.writeCells(b)
	}
	if r.Costs != nil {
		r.writeCosts(b)
	}
	return b.Flush()
}

func orUnknown(s string) string {
	if s == "" {
		return "processor unknown"
	}
	return s
}

// writeCells writes a line for each cell and strategy. Counts are per connection, so that
// cells of different size can be compared.
func (r *Report) writeCells(b *bufio.Writer) {
	fmt.Fprint(b, `
Virtual time. First byte: from Accept until the client sees the first message; last byte: the last one.
To wire: from the server's RTS until its first packet leaves. A percentile is shown where ten values lie beyond it.
Counts are per connection. resent: packets sent again; early: packets that met a queue pair in no state for them;
c_est: COMM_EST; viol: packets that the server sent before RTU and first request; refused: posts. lost: the number of
connections that did not get all messages.
`)
	for i := range r.Cells {
		c := &r.Cells[i]
		if i == 0 || c.Cell.Axis != r.Cells[i-1].Cell.Axis {
			fmt.Fprintf(b, "\n%-30s %6s   %9s %9s %9s %9s  %9s %9s  %6s %6s %6s %6s %7s %5s\n", c.Cell.Axis, "n",
				"first p50", "p99", "p99.9", "max", "last p50", "to wire", "resent", "early", "c_est", "viol", "refused", "lost")
		}
		for s := range NumStrategies {
			o := &c.Outcomes[s]
			label := ""
			if s == 0 {
				label = c.Cell.Value
			}
			n := float64(max(o.Connections, 1))
			fmt.Fprintf(b, "%-28s %s %6d   %9s %9s %9s %9s  %9s %9s  %6s %6s %6s %6s %7s %5d\n", label, s.Letter(), o.Connections,
				short(o.FirstByte.P50), short(o.FirstByte.P99), short(o.FirstByte.P999), short(o.FirstByte.Max),
				short(o.LastByte.P50), short(o.ToWire.P50),
				rate(o.Retransmitted, n), rate(int(o.NotReady), n), rate(o.CommEst, n), rate(o.Violations, n), rate(o.Refused, n),
				o.Undelivered)
			if o.Duplicated+o.Misordered > 0 {
				fmt.Fprintf(b, "  WRONG: %d messages twice, %d out of turn\n", o.Duplicated, o.Misordered)
			}
		}
	}
}

// short prints a time in few digits; what is not known is a dash.
func short(ns *int64) string {
	if ns == nil {
		return "-"
	}
	switch d := time.Duration(*ns); {
	case d < time.Microsecond:
		return fmt.Sprintf("%d ns", d)
	case d < time.Millisecond:
		return fmt.Sprintf("%.1f us", float64(d)/1e3)
	case d < time.Second:
		return fmt.Sprintf("%.2f ms", float64(d)/1e6)
	default:
		return fmt.Sprintf("%.2f s", float64(d)/1e9)
	}
}

// rate prints a count per connection; a dot is none.
func rate(n int, per float64) string {
	switch v := float64(n) / per; {
	case n == 0:
		return "."
	case v < 0.005:
		return "<0.01"
	case v < 100:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.0f", v)
	}
}

func (r *Report) writeCosts(b *bufio.Writer) {
	c := r.Costs
	fmt.Fprintf(b, "\nProcessor time, real: medians of %d runs, and the least and most.\n", c.PostRTS.Runs)
	if r.Machine.Busy() {
		fmt.Fprintf(b, "The machine was busy (load %.1f on %d cores): the least is the better estimate.\n", r.Machine.LoadBefore, r.Machine.Cores)
	}
	line := func(name string, t Timing) {
		fmt.Fprintf(b, "%-52s %9.1f ns %9.1f %11.1f\n", name, t.Median, t.Min, t.Max)
	}
	line("post in RTS, queue pair marked ready", c.PostRTS)
	line("post in RTR", c.PostRTR)
	line("post into a queue without a gate", c.PostPlain)
	line("doorbell: mark a queue pair ready", c.Ring)
	line("message of 64 bytes, both engines, batches of 32", c.Message)
	fmt.Fprintf(b, "\n%-8s %24s %24s %24s %24s\n", "WQEs", "a: move to RTS", "b: move and flush", "a: to the first packet", "b: to the first packet")
	for _, w := range c.ByWQEs {
		fmt.Fprintf(b, "%-8d", w.WQEs)
		for _, t := range []Timing{w.Publish, w.Flush, w.FirstPacket, w.FirstFlushed} {
			fmt.Fprintf(b, " %11.0f ns (%8.0f)", t.Median, t.Min)
		}
		fmt.Fprintln(b)
	}
}
