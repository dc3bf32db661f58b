package gate

import (
	_ "embed"
	"encoding/json"
	"io"
	"math"
)

// SchemaID names the form of the JSON document; Schema describes it.
const SchemaID = "https://github.com/doorbell-rdma/doorbell/bench/gate/schema.json"

// Schema is the JSON Schema (2020-12) of what WriteJSON writes, with a description of every
// field.
//
//go:embed schema.json
var Schema []byte

// WriteJSON writes the report as one JSON document. A figure that there is not is null.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", " ")
	return enc.Encode(r.document())
}

// The document's types mirror those of the report, so that a field renamed there does not
// change the form of the document unnoticed.
type document struct {
	Schema    string            `json:"schema"`
	Verdict   Verdict           `json:"verdict"`
	ExitCode  int               `json:"exit_code"`
	Base      *sideDocument     `json:"base"`
	Head      sideDocument      `json:"head"`
	Paired    bool              `json:"paired"`
	Tests     int               `json:"tests"`
	Alpha     float64           `json:"alpha"`
	Threshold float64           `json:"threshold"`
	Problems  []string          `json:"problems"`
	Notes     []string          `json:"notes"`
	Findings  []findingDocument `json:"findings"`
}

type sideDocument struct {
	Name string `json:"name"`
	Runs int    `json:"runs"`
}

type findingDocument struct {
	Verdict    Verdict  `json:"verdict"`
	Limit      string   `json:"limit,omitempty"`
	Bench      string   `json:"bench"`
	Unit       string   `json:"unit,omitempty"`
	Exact      bool     `json:"exact"`
	Base       float64  `json:"base"`
	Head       float64  `json:"head"`
	Ratio      *float64 `json:"ratio"`
	Lo         *float64 `json:"lo"`
	Hi         *float64 `json:"hi"`
	P          float64  `json:"p"`
	N          int      `json:"n"`
	Aside      int      `json:"aside"`
	Detectable *float64 `json:"detectable"`
	Noise      bool     `json:"noise"`
	Note       string   `json:"note,omitempty"`
}

func (r *Report) document() *document {
	d := &document{
		Schema: SchemaID, Verdict: r.Verdict, ExitCode: r.ExitCode(), Head: sideDocument{r.Head, r.HeadRuns},
		Paired: r.Paired, Tests: r.Tests, Alpha: r.Alpha, Threshold: r.Threshold,
		Problems: append([]string{}, r.Problems...), Notes: append([]string{}, r.Notes...),
		Findings: []findingDocument{},
	}
	if r.Base != "" {
		d.Base = &sideDocument{r.Base, r.BaseRuns}
	}
	// known is null for what JSON has no number for, and for what is not known.
	known := func(x float64) *float64 {
		if x == 0 || math.IsInf(x, 0) || math.IsNaN(x) {
			return nil
		}
		return &x
	}
	for _, f := range r.Findings {
		d.Findings = append(d.Findings, findingDocument{
			Verdict: f.Verdict, Limit: f.Limit, Bench: f.Bench, Unit: f.Unit, Exact: f.Exact, Base: f.Base, Head: f.Head,
			Ratio: known(f.Ratio), Lo: known(f.Lo), Hi: known(f.Hi), P: f.P, N: f.N, Aside: f.Aside,
			Detectable: known(f.Detectable), Noise: f.Noise, Note: f.Note,
		})
	}
	return d
}
