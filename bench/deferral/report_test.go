package deferral

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

var update = flag.Bool("update", false, "write testdata anew")

// sampleReport is a report of invented figures, with everything in it that a writer may meet.
func sampleReport() *Report {
	at := func(ns int64) *int64 { return &ns }
	few := Quantiles{N: 30, Min: at(512), P50: at(53_200), Max: at(2_147_500_000)}
	many := Quantiles{
		N: 10000, Min: at(30_000), P50: at(52_700), P99: at(9_999_900), P999: at(10_011_000), Max: at(12_000_000_000),
		CDF: []Point{{30_000, 0.0001}, {52_700, 0.5}, {9_999_900, 0.99}, {12_000_000_000, 1}},
	}
	base := Cells()[0]
	late := Cells()[1:3]
	r := &Report{
		Schema: SchemaID, Seed: 7, Trials: 1000, Truncated: true, Elapsed: 61234 * time.Millisecond,
		Machine: Machine{GOOS: "plan9", GOARCH: "386", Go: "go1.26", Cores: 2, LoadBefore: 3.5, LoadAfter: 1},
		Cells:   []CellResult{{Cell: base}, {Cell: late[0]}, {Cell: late[1]}},
	}
	for s := range NumStrategies {
		n := int(s)
		r.Cells[0].Outcomes[s] = Outcome{
			Counts: Counts{
				Trials: 10000, Connections: 10000, Delivered: 10000 - n, Undelivered: n, Packets: 20000,
				Retransmitted: 10000 * n, NotReady: uint64(n), CommEst: 9000, Violations: 5, Refused: n * 4_000_000,
			},
			FirstByte: many, LastByte: many, ToWire: few,
		}
		for i := range late {
			r.Cells[1+i].Outcomes[s] = Outcome{Counts: Counts{Trials: 30, Connections: 30, Delivered: 30}, FirstByte: few, LastByte: few, ToWire: few}
		}
	}
	r.Cells[2].Outcomes[SideQueue] = Outcome{Counts: Counts{Duplicated: 1, Misordered: 2}}
	timing := func(ns float64) Timing { return Timing{Median: ns, Min: ns / 2, Max: ns * 10, Runs: 5} }
	r.Costs = &Costs{
		PostRTS: timing(21), PostRTR: timing(20.5), PostPlain: timing(16), Ring: timing(14), Message: timing(120),
		ByWQEs: []WaitingCost{
			{WQEs: 0, Publish: timing(95), Flush: timing(96), FirstPacket: timing(250), FirstFlushed: timing(251)},
			{WQEs: 4096, Publish: timing(180), Flush: timing(79_000), FirstPacket: timing(6000), FirstFlushed: timing(90_000)},
		},
	}
	return r
}

// golden compares with a file in testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	name = filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(name, got, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	want = bytes.ReplaceAll(want, []byte("\r\n"), []byte("\n"))
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; run with -update and look at the difference. Got:\n%s", name, got)
	}
}

func TestWriteTable(t *testing.T) {
	var b bytes.Buffer
	if err := sampleReport().WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "table.txt", b.Bytes())
	for i, line := range strings.Split(b.String(), "\n") {
		if strings.TrimRight(line, " ") != line {
			t.Errorf("line %d ends in spaces", i+1)
		}
	}
}

func TestWriteJSON(t *testing.T) {
	var b bytes.Buffer
	if err := sampleReport().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", b.Bytes())
	mustMatchSchema(t, b.Bytes())
	b.Reset()
	if err := (&Report{Schema: SchemaID, Trials: 1, Machine: Machine{Cores: 1}}).WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	mustMatchSchema(t, b.Bytes())
}

// schemaError says what the schema has against a document.
func schemaError(t *testing.T, doc []byte) error {
	t.Helper()
	schema, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(SchemaID, schema); err != nil {
		t.Fatal(err)
	}
	compiled, err := c.Compile(SchemaID)
	if err != nil {
		t.Fatal(err)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	if err != nil {
		t.Fatal(err)
	}
	return compiled.Validate(v)
}

func mustMatchSchema(t *testing.T, doc []byte) {
	t.Helper()
	if err := schemaError(t, doc); err != nil {
		t.Error(err)
	}
}

// TestWritePlots: the files that are promised are written, well-formed, and name the strategies.
func TestWritePlots(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	files, err := sampleReport().WritePlots(dir, "svg", "png")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, f := range []string{"cdf-base", "rtu-late-request-overtakes", "cost-by-wqes"} {
		want = append(want, filepath.Join(dir, f+".svg"), filepath.Join(dir, f+".png"))
	}
	if !slices.Equal(files, want) {
		t.Fatalf("files %v, want %v", files, want)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, ".png") {
			if _, err := png.Decode(bytes.NewReader(b)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		text := svgText(t, name, b)
		label := "a deferred doorbell"
		if strings.Contains(name, "cost") {
			label = "b posts its queue"
		}
		if !strings.Contains(text, label) {
			t.Errorf("%s: no %q in %q", name, label, text)
		}
	}
	if _, err := sampleReport().WritePlots(dir, "gif87"); err == nil {
		t.Error("an unknown format was written")
	}
}

// svgText parses an SVG and returns its text.
func svgText(t *testing.T, name string, b []byte) string {
	t.Helper()
	var text strings.Builder
	for d := xml.NewDecoder(bytes.NewReader(b)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return text.String()
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c, ok := token.(xml.CharData); ok {
			text.Write(c)
		}
	}
}
