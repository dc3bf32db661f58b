package gate

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
)

// title is the verdict in a line.
func (r *Report) title() string {
	n := map[Verdict]int{}
	limits := 0
	for _, f := range r.Findings {
		n[f.Verdict]++
		if f.Limit != "" {
			limits++
		}
	}
	var parts []string
	for _, v := range []Verdict{Regression, Inconclusive, Improved, Pass, New, Removed, Ignored} {
		if n[v] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[v], v))
		}
	}
	if len(r.Problems) > 0 {
		parts = append(parts, plural(len(r.Problems), "problem"))
	}
	return fmt.Sprintf("%s: %s", strings.ToUpper(string(r.Verdict)), strings.Join(parts, ", "))
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// how says what was compared, and how.
func (r *Report) how() string {
	if r.Base == "" {
		return fmt.Sprintf("%s (%s), no base", r.Head, plural(r.HeadRuns, "run"))
	}
	way := "as two files, measured one after the other"
	if r.Paired {
		way = "run by run, measured by turns"
	}
	return fmt.Sprintf("%s (%s) against %s (%s), %s; a regression is more than %s worse, at p ≤ %g for %s together",
		r.Head, plural(r.HeadRuns, "run"), r.Base, plural(r.BaseRuns, "run"), way, percent(r.Threshold), r.Alpha, plural(r.Tests, "test"))
}

// shown splits the findings into those that a reader must see, and the quiet ones.
func (r *Report) shown() (loud, quiet []Finding) {
	for _, f := range r.Findings {
		switch f.Verdict {
		case Pass, Ignored:
			quiet = append(quiet, f)
		default:
			loud = append(loud, f)
		}
	}
	return loud, quiet
}

// cells are a finding's columns after the verdict: what, unit, base, head, change, p, note.
func (f *Finding) cells() []string {
	what := f.Bench
	if f.Limit != "" {
		what = f.Limit + ": " + f.Bench
	}
	c := []string{what, f.Unit, "", "", "", "", f.remark()}
	if f.Unit == "" {
		return c
	}
	if f.Base != 0 || f.Ratio != 0 || f.Exact {
		c[2], c[3] = number(f.Base), number(f.Head)
	}
	if f.Limit != "" {
		c[2] = ""
	}
	switch {
	case f.Limit != "" && f.Ratio != 0:
		c[4] = fmt.Sprintf("%.3g", f.Ratio)
		if f.Hi != 0 {
			c[4] += fmt.Sprintf(" [%.3g, %.3g]", f.Lo, f.Hi)
		}
	case f.Ratio != 0:
		c[4] = percent(f.Ratio - 1)
		if f.Hi != 0 {
			c[4] += fmt.Sprintf(" [%s, %s]", percent(f.Lo-1), percent(f.Hi-1))
		}
	}
	if f.Ratio != 0 && !f.Exact {
		c[5] = fmt.Sprintf("%.2g", f.P)
	}
	return c
}

// remark is the note, and what else a reader should know.
func (f *Finding) remark() string {
	var parts []string
	if f.Note != "" {
		parts = append(parts, f.Note)
	}
	if f.Aside > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d pairs set aside", f.Aside, f.N))
	}
	if f.Verdict == Pass && f.Limit == "" && f.Detectable > 0 && !math.IsInf(f.Detectable, 1) {
		parts = append(parts, "could see "+percent(f.Detectable))
	}
	return strings.Join(parts, "; ")
}

// number writes a measurement with four digits at most.
func number(x float64) string {
	if math.Abs(x) >= 1000 && math.Abs(x) < 1e15 {
		return fmt.Sprintf("%.0f", x)
	}
	return fmt.Sprintf("%.4g", x)
}

var columns = []string{"verdict", "benchmark", "unit", "base", "head", "change", "p", ""}

// WriteText writes the report for a terminal or a log: everything that is not a plain pass,
// and with all the passes too.
func (r *Report) WriteText(w io.Writer, all bool) error {
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "%s\n%s\n", r.title(), r.how())
	for _, p := range r.Problems {
		fmt.Fprintf(b, "problem: %s\n", p)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(b, "note: %s\n", n)
	}
	rows, quiet := r.shown()
	if all {
		rows, quiet = r.Findings, nil
	}
	if len(rows) > 0 {
		fmt.Fprintln(b)
		t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, strings.Join(columns, "\t"))
		for _, f := range rows {
			fmt.Fprintf(t, "%s\t%s\n", f.Verdict, strings.Join(f.cells(), "\t"))
		}
		_ = t.Flush() // b keeps the error
	}
	if len(quiet) > 0 {
		fmt.Fprintf(b, "\n%s passed or ignored without remark; --all lists them\n", plural(len(quiet), "measurement"))
	}
	return b.Flush()
}

// WriteMarkdown writes the report as a comment for a pull request.
func (r *Report) WriteMarkdown(w io.Writer) error {
	b := bufio.NewWriter(w)
	sign := map[Verdict]string{Pass: "✅", Regression: "❌"}[r.Verdict]
	if sign == "" {
		sign = "⚠️"
	}
	fmt.Fprintf(b, "### %s Benchmarks: %s\n\n%s.\n\n", sign, markdown(r.title()), markdown(r.how()))
	for _, p := range r.Problems {
		fmt.Fprintf(b, "- **problem**: %s\n", markdown(p))
	}
	for _, n := range r.Notes {
		fmt.Fprintf(b, "- %s\n", markdown(n))
	}
	loud, quiet := r.shown()
	table := func(rows []Finding) {
		fmt.Fprintf(b, "\n| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
		for _, f := range rows {
			cells := f.cells()
			for i := range cells {
				cells[i] = markdown(cells[i])
			}
			fmt.Fprintf(b, "| %s | %s |\n", f.Verdict, strings.Join(cells, " | "))
		}
	}
	if len(loud) > 0 {
		table(loud)
	}
	if len(quiet) > 0 {
		fmt.Fprintf(b, "\n<details><summary>%s without a finding</summary>\n", plural(len(quiet), "measurement"))
		table(quiet)
		fmt.Fprintf(b, "\n</details>\n")
	}
	return b.Flush()
}

// markdown keeps what a file says from being more than text: benchmark names come from pull
// requests of strangers.
func markdown(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	return strings.NewReplacer(
		"\\", "\\\\", "|", "\\|", "<", "&lt;", ">", "&gt;", "&", "&amp;", "*", "\\*", "_", "\\_",
		"`", "\\`", "[", "\\[", "]", "\\]", "@", "@\u200b", "#", "\\#", "!", "\\!",
	).Replace(s)
}
