package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const rule = "---------------------------------------------------------------------------------------\n"

// usec converts nanoseconds.
const usec = 1e3

// unit is how bandwidth is reported.
type unit struct {
	name  string
	bytes float64 // of one
}

func bandwidthUnit(gbits bool) unit {
	if gbits {
		return unit{"Gb/sec", 1e9 / 8}
	}
	return unit{"MiB/sec", 1 << 20}
}

// title is the test's name as perftest prints it.
func title(p bench.Params) string {
	words := []string{map[bench.Verb]string{
		bench.VerbSend: "Send", bench.VerbWrite: "RDMA_Write", bench.VerbRead: "RDMA_Read", bench.VerbAtomic: "Atomic",
	}[p.Test.Verb()]}
	if p.Test.Verb() == bench.VerbAtomic {
		words = append(words, atomicType(p))
	}
	if p.Test.Latency() {
		return strings.Join(append(words, "Latency", "Test"), " ")
	}
	if p.Bidirectional {
		words = append(words, "Bidirectional")
	}
	if p.PostList > 1 {
		words = append(words, "Post List")
	}
	return strings.Join(append(words, "BW", "Test"), " ")
}

// atomicType is perftest's name of the atomic, "" for other tests.
func atomicType(p bench.Params) string {
	switch {
	case p.Test.Verb() != bench.VerbAtomic:
		return ""
	case p.Swap:
		return "CMP_AND_SWAP"
	}
	return "FETCH_AND_ADD"
}

// onOff is how perftest says yes and no.
func onOff(on bool) string {
	if on {
		return "ON"
	}
	return "OFF"
}

// printHeader prints what runs, between whom.
func printHeader(w io.Writer, s *bench.Session, u unit) error {
	p := s.Params()
	conns, err := s.Conns()
	if err != nil {
		return err
	}
	b := &strings.Builder{}
	fmt.Fprintf(b, "%s                    %s\n", rule, title(p))
	fmt.Fprintf(b, " Number of qps   : %d\t\tTransport type : RoCEv2 over UDP\n", p.QPs)
	fmt.Fprintf(b, " Connection type : %v\t\tUsing SRQ      : %s\n", p.Type, onOff(p.SRQ))
	fmt.Fprintf(b, " TX depth        : %d\n", p.TxDepth)
	if p.Test.Verb() == bench.VerbSend {
		fmt.Fprintf(b, " RX depth        : %d\n", p.RxDepth)
	}
	if p.Outs > 0 {
		fmt.Fprintf(b, " Outstand reads  : %d\n", p.Outs)
	}
	if p.PostList > 1 {
		fmt.Fprintf(b, " Post List       : %d\n", p.PostList)
	}
	switch {
	case !p.Test.Latency():
		fmt.Fprintf(b, " CQ Moderation   : %d\n", p.CQMod)
	case p.Outs > 0:
		fmt.Fprintf(b, " Times are       : from post to completion\n")
	default:
		fmt.Fprintf(b, " Times are       : half a round trip\n")
	}
	fmt.Fprintf(b, " Mtu             : %d[B]\n", conns[0].MTU.Bytes())
	fmt.Fprintf(b, " Max inline data : %d[B]\n", p.Inline)
	fmt.Fprintf(b, " rdma_cm QPs     : %s\n%s", onOff(p.Type != verbs.UD), rule)
	for i, c := range conns {
		if i == 8 {
			fmt.Fprintf(b, " ... and %d more\n", len(conns)-i)
			break
		}
		fmt.Fprintf(b, " local address:  %v QPN %v PSN 0x%v\n", s.LocalAddr(), c.LocalQPN, c.LocalPSN)
		fmt.Fprintf(b, " remote address: %v QPN %v PSN 0x%v\n", s.RemoteAddr(), c.RemoteQPN, c.RemotePSN)
	}
	b.WriteString(rule)
	b.WriteString(columns(p, u))
	_, err = io.WriteString(w, b.String())
	return err
}

// columns is the head of the table.
func columns(p bench.Params, u unit) string {
	if p.Test.Latency() {
		return " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]\n"
	}
	return fmt.Sprintf(" #bytes     #iterations    BW peak[%s]    BW average[%s]   MsgRate[Mpps]\n", u.name, u.name)
}

// row is one line of the table, and one more if messages were lost.
func row(r bench.Result, u unit) string {
	if r.Lost > 0 {
		n := r.Lost
		r.Lost = 0
		return row(r, u) + fmt.Sprintf(" %-10d messages lost\n", n)
	}
	if !r.Test.Latency() {
		format := " %-10d %-14d %-18.2f %-20.2f  %.6f\n"
		if r.Average/u.bytes < 0.1 {
			format = " %-10d %-14d %-18.6f %-20.6f  %.6f\n"
		}
		return fmt.Sprintf(format, r.Size, r.Iters, r.Peak/u.bytes, r.Average/u.bytes, r.Rate/1e6)
	}
	l := r.Latency
	return fmt.Sprintf(" %-7d %-13d %-14.2f %-12.2f %-18.2f %-14.2f %-15.2f %-22.2f %.2f\n",
		r.Size, r.Iters, float64(l.Min)/usec, float64(l.Max)/usec, float64(l.Median)/usec, l.Mean/usec, l.StdDev/usec,
		float64(l.P99)/usec, float64(l.P999)/usec)
}
