package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// comparisonReport is the report, and its JSON.
type comparisonReport struct {
	Machine machine `json:"machine"`
	CPUs    []int   `json:"pinned_to"`
	Procs   int     `json:"gomaxprocs"`
	// Rounds is how many were asked for, Each how long a run measured, Wall the whole.
	Rounds int     `json:"rounds"`
	Each   float64 `json:"each_sec"`
	Wall   float64 `json:"wall_sec"`
	// Modes counts runs by the machine's mode; Noisy those beside which others used more
	// than the limit.
	Modes map[floor.Mode]int `json:"runs_by_mode"`
	Noisy int                `json:"runs_noisy"`
	// Line is the median round trip of a cache line between the CPUs, in nanoseconds.
	Line float64 `json:"cache_line_ns"`
	// Rows are in the order of the table. Failed counts those that something went wrong with.
	Rows        []rowReport      `json:"rows"`
	Runs        map[string][]run `json:"runs"`
	Failed      int              `json:"rows_failed"`
	Interrupted bool             `json:"interrupted,omitempty"`
}

// rowReport is a row with its figures. Product and Reference are medians, and Ratio theirs.
type rowReport struct {
	Group     string     `json:"group"`
	Name      string     `json:"name"`
	Against   string     `json:"reference"`
	Unit      string     `json:"unit"`
	Product   float64    `json:"product_median"`
	Reference float64    `json:"reference_median"`
	Ratio     float64    `json:"ratio"`
	Mark      float64    `json:"mark,omitempty"`
	MarkText  string     `json:"-"`
	Verdict   string     `json:"verdict"`
	Mode      floor.Mode `json:"mode,omitempty"`
	Samples   [2]int     `json:"samples"`
	Notes     []string   `json:"notes,omitempty"`
}

// Verdicts of a row.
const (
	verdictPass  = "pass"
	verdictReach = "pass, reaches"
	verdictMiss  = "MISS"
	verdictNone  = ""
	verdictSkip  = "skipped"
	verdictFail  = "FAILED"
	verdictNoise = "too noisy" // held against the mark it would be chance
)

// report makes the report of what has been measured.
func (e *arena) report(rows []pairing) *comparisonReport {
	r := &comparisonReport{
		Machine: thisMachine(), CPUs: e.cpus, Procs: e.c.procs, Rounds: e.c.rounds, Each: e.c.each.Seconds(),
		Wall: time.Since(e.begin).Seconds(), Modes: map[floor.Mode]int{}, Runs: e.runs,
	}
	var lines []float64
	for _, list := range e.runs {
		for _, one := range list {
			r.Modes[one.Mode]++
			lines = append(lines, float64(one.Line[1]))
			if one.Others >= noisy {
				r.Noisy++
			}
		}
	}
	if len(lines) > 0 {
		r.Line = median(lines)
	}
	for i := range rows {
		one := e.judge(&rows[i])
		if one.Verdict == verdictFail {
			r.Failed++
		}
		r.Rows = append(r.Rows, one)
	}
	return r
}

// judge compares a row's two measurements within one mode of the machine.
func (e *arena) judge(r *pairing) rowReport {
	out := rowReport{Group: r.group, Name: r.name, Against: r.reference.name, Unit: units[r.value], Mark: r.mark, MarkText: r.markText()}
	for _, m := range []measurement{r.product, r.reference} {
		if why := e.failures[m.name]; why != "" {
			out.Verdict = verdictFail
			if rest, ok := strings.CutPrefix(why, errSkip.Error()+": "); ok {
				out.Verdict, why = verdictSkip, rest
			}
			out.Notes = append(out.Notes, fmt.Sprintf("%s: %s", m.name, why))
			return out
		}
	}
	mode := commonMode(e.runs[r.product.name], e.runs[r.reference.name])
	out.Mode = mode
	ours, ourNotes := pick(e.runs[r.product.name], mode, r.value)
	theirs, theirNotes := pick(e.runs[r.reference.name], mode, r.value)
	out.Samples = [2]int{len(ours), len(theirs)}
	if len(ours) == 0 || len(theirs) == 0 {
		out.Verdict = verdictSkip
		out.Notes = append(out.Notes, "not measured")
		return out
	}
	out.Product, out.Reference = median(ours), median(theirs)
	out.Ratio = out.Product / out.Reference
	out.Verdict = verdict(r, out.Ratio)
	if mode != floor.Fast {
		out.Notes = append(out.Notes, "in "+string(mode)+" mode")
	}
	if n := min(len(ours), len(theirs)); n < 5 {
		out.Notes = append(out.Notes, fmt.Sprintf("from %d runs only", n))
	}
	if ourNotes+theirNotes > 0 {
		out.Notes = append(out.Notes, "others used the CPUs")
		if r.mark != 0 {
			out.Verdict = verdictNoise
		}
	}
	if v := e.runs[r.product.name][0].Values; v["idle"] > 0 {
		out.Notes = append(out.Notes, fmt.Sprintf("%.0f connections, made in %.1f s", v["idle"], v["setup_sec"]))
	}
	for _, one := range e.runs[r.reference.name] {
		if one.Values["lost"] > 0 {
			out.Notes = append(out.Notes, "the reference lost datagrams")
			break
		}
	}
	return out
}

// verdict holds a ratio to the mark.
func verdict(r *pairing, ratio float64) string {
	meets := func(mark float64) bool {
		if r.atMost() {
			return ratio <= mark
		}
		return ratio >= mark
	}
	switch {
	case r.mark == 0:
		return verdictNone
	case !meets(r.mark):
		return verdictMiss
	case r.reach != 0 && meets(r.reach):
		return verdictReach
	}
	return verdictPass
}

// commonMode is the mode to compare in: the fast one if both have been seen in it, else one
// that both have been seen in, else mixed, which is all runs together.
func commonMode(a, b []run) floor.Mode {
	count := func(list []run, m floor.Mode) int {
		n := 0
		for _, r := range list {
			if r.Mode == m {
				n++
			}
		}
		return n
	}
	best, most := floor.Mixed, 0
	for _, m := range []floor.Mode{floor.Fast, floor.Slow, floor.Unknown} {
		n := min(count(a, m), count(b, m))
		if n >= 3 { // enough for a median: the fast mode first
			return m
		}
		if n > most {
			best, most = m, n
		}
	}
	return best
}

// pick returns a value of the runs in a mode, and how many of those were noisy. Quiet runs
// are preferred when there are three.
func pick(list []run, mode floor.Mode, value string) (values []float64, noise int) {
	var all, calm []float64
	for _, r := range list {
		v, ok := r.Values[value]
		if !ok || mode != floor.Mixed && r.Mode != mode {
			continue
		}
		all = append(all, v)
		if r.Others < noisy {
			calm = append(calm, v)
		}
	}
	if len(calm) >= 3 {
		return calm, 0
	}
	return all, len(all) - len(calm)
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// writeCompareText prints the table.
func writeCompareText(w io.Writer, r *comparisonReport) error {
	var b bytes.Buffer
	m := r.Machine
	fmt.Fprintf(&b, "%s, %d CPUs, %s %s, %s/%s, %s\n", m.CPU, m.CPUs, m.OS, m.Kernel, m.OS, m.Arch, m.Go)
	if len(r.CPUs) == 2 {
		fmt.Fprintf(&b, "Two processes each, held to CPU %d (serves) and CPU %d (drives)", r.CPUs[0], r.CPUs[1])
	} else {
		fmt.Fprintf(&b, "Two processes each, where the scheduler puts them")
	}
	if r.Procs > 0 {
		fmt.Fprintf(&b, ", GOMAXPROCS=%d", r.Procs)
	}
	fmt.Fprintf(&b, ".\n%d rounds of %.2g s runs in %.0f s; runs by mode:", r.Rounds, r.Each, r.Wall)
	for _, mode := range []floor.Mode{floor.Fast, floor.Slow, floor.Mixed, floor.Unknown} {
		if n := r.Modes[mode]; n > 0 {
			fmt.Fprintf(&b, " %d %s", n, mode)
		}
	}
	fmt.Fprintf(&b, "; a cache line takes %.0f ns there and back; %d disturbed by others.\n", r.Line, r.Noisy)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	group := ""
	for _, row := range r.Rows {
		if row.Group != group {
			group = row.Group
			fmt.Fprintf(t, "\n%s\tDoorbell\tother\tunit\tratio\tmark\t\t\n", strings.ToUpper(group))
		}
		figures := "\t\t\t"
		if row.Ratio > 0 {
			figures = fmt.Sprintf("%s\t%s\t%s\t%.2f", figure(row.Product), figure(row.Reference), row.Unit, row.Ratio)
		}
		notes := append([]string{}, row.Notes...)
		if row.Ratio > 0 {
			notes = append([]string{row.Against}, notes...)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", row.Name, figures, row.MarkText, row.Verdict, strings.Join(notes, "; "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if r.Interrupted {
		b.WriteString("\nInterrupted: the table has what was measured until then.\n")
	}
	_, err := w.Write(b.Bytes())
	return err
}

// figure is a number with three digits that count.
func figure(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

func writeCompareJSON(w io.Writer, r *comparisonReport) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

func writeFile(name string, r *comparisonReport) error {
	var b bytes.Buffer
	if err := writeCompareJSON(&b, r); err != nil {
		return err
	}
	return os.WriteFile(name, b.Bytes(), 0o644)
}
