package main

import (
	"encoding/json"
	"io"
	"strconv"
	"strings"

	"github.com/doorbell-rdma/doorbell/bench"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// fixed is a number with six digits behind the point, as many as perftest's finest. Results
// are finite, so it always is JSON.
type fixed float64

func (f fixed) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(f), 'f', 6, 64), nil
}

// exact is a time in seconds with all its nanoseconds: a run may have one message.
type exact float64

func (s exact) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(s), 'f', 9, 64), nil
}

// report is the JSON document: perftest's keys, and what their units are. results is an
// object, with -a a list of them, null if nothing was measured.
type report struct {
	Info        testInfo `json:"test_info"`
	Results     any      `json:"results"`
	Interrupted bool     `json:"interrupted,omitempty"`
}

type testInfo struct {
	Test         string `json:"test"`
	Device       string `json:"Device"`
	Remote       string `json:"Remote"`
	QPs          int    `json:"Number_of_qps"`
	Transport    string `json:"Transport_type"`
	Connection   string `json:"Connection_type"`
	SRQ          string `json:"Using_SRQ"`
	Atomic       string `json:"Atomic_type,omitempty"`
	Outs         int    `json:"Outstand_reads,omitempty"`
	TxDepth      int    `json:"TX_depth"`
	PostList     int    `json:"Post_List"`
	RxDepth      int    `json:"RX_depth"`
	CQModeration int    `json:"CQ_Moderation"`
	MTU          int    `json:"Mtu"`
	LinkType     string `json:"Link_type"`
	Inline       int    `json:"Max_inline_data"`
	CM           string `json:"rdma_cm_QPs"`
	Exchange     string `json:"Data_ex_method"`
	BWUnit       string `json:"BW_unit,omitempty"`
	RateUnit     string `json:"MsgRate_unit,omitempty"`
	TimeUnit     string `json:"t_unit,omitempty"`
}

type bwResult struct {
	Size    int    `json:"MsgSize"`
	Iters   uint64 `json:"n_iterations"`
	Peak    fixed  `json:"BW_peak"`
	Average fixed  `json:"BW_average"`
	Rate    fixed  `json:"MsgRate"`
	Elapsed exact  `json:"elapsed_sec"`
	// Lost is there when messages can be.
	Lost *uint64 `json:"n_lost,omitempty"`
}

type latResult struct {
	Size    int    `json:"MsgSize"`
	Iters   uint64 `json:"n_iterations"`
	Min     fixed  `json:"t_min"`
	Max     fixed  `json:"t_max"`
	Typical fixed  `json:"t_typical"`
	Avg     fixed  `json:"t_avg"`
	StdDev  fixed  `json:"t_stdev"`
	P99     fixed  `json:"percentile_99"`
	P999    fixed  `json:"percentile_99.9"`
	Elapsed exact  `json:"elapsed_sec"`
	// Lost is there when messages can be.
	Lost *uint64 `json:"n_lost,omitempty"`
}

// writeJSON writes the document of a session.
func writeJSON(w io.Writer, s *bench.Session, results []bench.Result, u unit, interrupted bool) error {
	p := s.Params()
	doc := report{Interrupted: interrupted, Info: testInfo{
		Test: strings.ReplaceAll(title(p), " ", "_"), Device: s.LocalAddr().String(), Remote: s.RemoteAddr().String(),
		QPs: p.QPs, Transport: "RoCEv2 over UDP", Connection: p.Type.String(), SRQ: onOff(p.SRQ), Atomic: atomicType(p), Outs: p.Outs, TxDepth: p.TxDepth, PostList: p.PostList,
		RxDepth: p.RxDepth, CQModeration: p.CQMod, LinkType: "Ethernet", Inline: p.Inline, CM: onOff(p.Type != verbs.UD), Exchange: "rdma_cm",
	}}
	if conns, err := s.Conns(); err == nil && len(conns) > 0 {
		doc.Info.MTU = conns[0].MTU.Bytes()
	}
	if p.Test.Latency() {
		doc.Info.TimeUnit = "usec"
	} else {
		doc.Info.BWUnit, doc.Info.RateUnit = u.name, "Mpps"
	}
	var list []any
	for _, r := range results {
		list = append(list, jsonResult(&p, r, u))
	}
	switch {
	case p.All:
		doc.Results = list
	case len(list) == 1:
		doc.Results = list[0]
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(doc)
}

func jsonResult(p *bench.Params, r bench.Result, u unit) any {
	var lost *uint64
	if p.Type != verbs.RC {
		lost = &r.Lost
	}
	elapsed := exact(r.Elapsed.Seconds())
	if !r.Test.Latency() {
		return bwResult{
			Size: r.Size, Iters: r.Iters, Peak: fixed(r.Peak / u.bytes), Average: fixed(r.Average / u.bytes),
			Rate: fixed(r.Rate / 1e6), Elapsed: elapsed, Lost: lost,
		}
	}
	l := r.Latency
	return latResult{
		Size: r.Size, Iters: r.Iters, Min: fixed(float64(l.Min) / usec), Max: fixed(float64(l.Max) / usec),
		Typical: fixed(float64(l.Median) / usec), Avg: fixed(l.Mean / usec), StdDev: fixed(l.StdDev / usec),
		P99: fixed(float64(l.P99) / usec), P999: fixed(float64(l.P999) / usec), Elapsed: elapsed, Lost: lost,
	}
}
