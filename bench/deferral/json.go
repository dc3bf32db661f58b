package deferral

import (
	_ "embed"
	"encoding/json"
	"io"
	"time"
)

// SchemaID names the form of the JSON document; Schema describes it.
const SchemaID = "https://github.com/doorbell-rdma/doorbell/bench/deferral/schema.json"

// Schema is the JSON Schema (2020-12) of what WriteJSON writes, with a description of every field.
//
//go:embed schema.json
var Schema []byte

// WriteJSON writes the report as one JSON document. Times are in nanoseconds, null where
// there is none or the sample is too small for a percentile.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", " ")
	return enc.Encode(r.document())
}

// The document's types mirror those of the report, so that a field renamed there does not
// change the form of the document unnoticed.
type document struct {
	Schema    string          `json:"schema"`
	Seed      uint64          `json:"seed"`
	Trials    int             `json:"trials"`
	Truncated bool            `json:"truncated"`
	Elapsed   float64         `json:"elapsed_s"`
	Machine   machineDocument `json:"machine"`
	Cells     []cellDocument  `json:"cells"`
	Costs     *Costs          `json:"costs"`
}

type machineDocument struct {
	GOOS       string  `json:"goos"`
	GOARCH     string  `json:"goarch"`
	Go         string  `json:"go"`
	CPU        string  `json:"cpu"`
	Cores      int     `json:"cores"`
	LoadBefore float64 `json:"load_before"`
	LoadAfter  float64 `json:"load_after"`
	Busy       bool    `json:"busy"`
}

type cellDocument struct {
	Axis       string             `json:"axis"`
	Value      string             `json:"value"`
	Parameters parametersDocument `json:"parameters"`
	Outcomes   []outcomeDocument  `json:"outcomes"`
}

type parametersDocument struct {
	Latency       time.Duration `json:"latency_ns"`
	Jitter        time.Duration `json:"jitter_ns"`
	Gap           time.Duration `json:"gap_ns"`
	RTUDelay      time.Duration `json:"rtu_delay_ns"`
	RTULost       int           `json:"rtu_lost"`
	RTULossRate   float64       `json:"rtu_loss_rate"`
	Request       bool          `json:"request"`
	Reply         bool          `json:"reply"`
	WQEs          int           `json:"wqes"`
	Conns         int           `json:"connections"`
	AckTimeout    uint8         `json:"ack_timeout_code"`
	AckOnly       bool          `json:"ack_only"`
	LinuxREP      bool          `json:"linux_rep_timer"`
	ClientWire    bool          `json:"client_wire"`
	ClientWake    time.Duration `json:"client_wake_ns"`
	ServerWake    time.Duration `json:"server_wake_ns"`
	Handle        time.Duration `json:"handle_ns"`
	DeafToCommEst bool          `json:"deaf_to_comm_est"`
	Poll          time.Duration `json:"poll_ns"`
}

type outcomeDocument struct {
	Strategy      string            `json:"strategy"`
	Name          string            `json:"name"`
	Trials        int               `json:"trials"`
	Connections   int               `json:"connections"`
	Delivered     int               `json:"delivered"`
	Undelivered   int               `json:"undelivered"`
	Duplicated    int               `json:"duplicated"`
	Misordered    int               `json:"misordered"`
	Packets       int               `json:"packets"`
	Retransmitted int               `json:"retransmitted"`
	REPs          int               `json:"repeated_reps"`
	NotReady      uint64            `json:"not_ready"`
	CommEst       int               `json:"comm_est"`
	Violations    int               `json:"violations"`
	Refused       int               `json:"refused"`
	FirstByte     quantilesDocument `json:"first_byte"`
	LastByte      quantilesDocument `json:"last_byte"`
	ToWire        quantilesDocument `json:"rts_to_wire"`
}

type quantilesDocument struct {
	N    int             `json:"n"`
	Min  *int64          `json:"min_ns"`
	P50  *int64          `json:"p50_ns"`
	P99  *int64          `json:"p99_ns"`
	P999 *int64          `json:"p999_ns"`
	Max  *int64          `json:"max_ns"`
	CDF  []pointDocument `json:"cdf,omitempty"`
}

// pointDocument is a time in nanoseconds and the fraction of the sample up to it.
type pointDocument [2]float64

func (r *Report) document() *document {
	d := &document{
		Schema: SchemaID, Seed: r.Seed, Trials: r.Trials, Truncated: r.Truncated, Elapsed: r.Elapsed.Seconds(),
		Machine: machineDocument{
			GOOS: r.Machine.GOOS, GOARCH: r.Machine.GOARCH, Go: r.Machine.Go, CPU: r.Machine.CPU, Cores: r.Machine.Cores,
			LoadBefore: r.Machine.LoadBefore, LoadAfter: r.Machine.LoadAfter, Busy: r.Machine.Busy(),
		},
		Cells: []cellDocument{}, Costs: r.Costs,
	}
	for i := range r.Cells {
		d.Cells = append(d.Cells, r.Cells[i].document())
	}
	return d
}

func (c *CellResult) document() cellDocument {
	p := &c.Cell
	d := cellDocument{
		Axis: p.Axis, Value: p.Value,
		Parameters: parametersDocument{
			Latency: p.Latency, Jitter: p.Jitter, Gap: p.Gap, RTUDelay: p.RTUDelay, RTULost: p.RTULost, RTULossRate: p.RTULossRate,
			Request: p.Request, Reply: p.Reply, WQEs: p.WQEs, Conns: p.Conns, AckTimeout: uint8(p.AckTimeout),
			AckOnly: p.AckOnly, LinuxREP: p.LinuxREP, ClientWire: p.ClientWire, ClientWake: p.ClientWake,
			ServerWake: p.ServerWake, Handle: p.Handle, DeafToCommEst: p.DeafToCommEst, Poll: p.Poll,
		},
	}
	for s := range NumStrategies {
		o := &c.Outcomes[s]
		d.Outcomes = append(d.Outcomes, outcomeDocument{
			Strategy: s.Letter(), Name: s.Name(),
			Trials: o.Trials, Connections: o.Connections, Delivered: o.Delivered, Undelivered: o.Undelivered,
			Duplicated: o.Duplicated, Misordered: o.Misordered, Packets: o.Packets, Retransmitted: o.Retransmitted,
			REPs: o.REPs, NotReady: o.NotReady, CommEst: o.CommEst, Violations: o.Violations, Refused: o.Refused,
			FirstByte: o.FirstByte.document(), LastByte: o.LastByte.document(), ToWire: o.ToWire.document(),
		})
	}
	return d
}

func (q *Quantiles) document() quantilesDocument {
	d := quantilesDocument{N: q.N, Min: q.Min, P50: q.P50, P99: q.P99, P999: q.P999, Max: q.Max}
	for _, p := range q.CDF {
		d.CDF = append(d.CDF, pointDocument{float64(p.NS), p.Fraction})
	}
	return d
}
