package deferral

import (
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// The strategies' colours and dashes; they differ without colour too.
var strategyColors = [NumStrategies]color.RGBA{
	{0x1b, 0x9e, 0x77, 0xff}, {0xd9, 0x5f, 0x02, 0xff}, {0x75, 0x70, 0xb3, 0xff}, {0xe7, 0x29, 0x8a, 0xff},
}

var strategyDashes = [NumStrategies][]vg.Length{nil, {vg.Points(6), vg.Points(2)}, {vg.Points(2), vg.Points(2)}, {vg.Points(8), vg.Points(2), vg.Points(2), vg.Points(2)}}

const (
	plotWidth  = 16 * vg.Centimeter
	plotHeight = 9 * vg.Centimeter

	legendHeight = 22
)

// WritePlots writes the report's plots into a directory, which it makes if need be, each in
// every format given ("svg", "png"; svg if none is), and returns the files' names. There is
// one for each plotted cell, one for each axis of late RTUs, and one for the costs, as far as
// the report has them.
func (r *Report) WritePlots(dir string, formats ...string) (files []string, err error) {
	if len(formats) == 0 {
		formats = []string{"svg"}
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("deferral: plots: %w", err)
	}
	for _, f := range r.figures() {
		for _, format := range formats {
			name := filepath.Join(dir, f.name+"."+format)
			if err := f.save(name, format); err != nil {
				return files, fmt.Errorf("deferral: plot %s: %w", name, err)
			}
			files = append(files, name)
		}
	}
	return files, nil
}

func (f *figure) save(name, format string) error {
	w, err := draw.NewFormattedCanvas(plotWidth, plotHeight, format)
	if err != nil {
		return err
	}
	c := draw.New(w)
	f.plot.Draw(draw.Crop(c, vg.Points(4), vg.Points(-10), vg.Points(4), -legendHeight))
	// The legend's entries stand side by side above the plot, where no line can meet them.
	for i, l := range f.legend {
		column := c.Rectangle.Size().X / vg.Length(len(f.legend))
		left := vg.Points(8) + column*vg.Length(i)
		l.Draw(draw.Crop(c, left, left+column-c.Rectangle.Size().X, plotHeight-legendHeight, 0))
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	if _, err := w.WriteTo(file); err != nil {
		_ = file.Close()
		return err
	}
	return file.Close()
}

// figure is a plot, its legend, and the name of its file without the format.
type figure struct {
	name   string
	plot   *plot.Plot
	legend []plot.Legend
}

func (r *Report) figures() (list []*figure) {
	for i := range r.Cells {
		if c := &r.Cells[i]; c.Cell.Plot {
			list = append(list, c.cdf())
		}
	}
	for i := 0; i < len(r.Cells); {
		j := i
		for j < len(r.Cells) && r.Cells[j].Cell.Axis == r.Cells[i].Cell.Axis {
			j++
		}
		if axis := r.Cells[i:j]; strings.HasPrefix(axis[0].Cell.Axis, "RTU late") && len(axis) > 1 {
			list = append(list, late(axis))
		}
		i = j
	}
	if r.Costs != nil {
		list = append(list, r.Costs.figure())
	}
	return list
}

// slug makes a file's name of a title.
func slug(s string) string {
	words := strings.FieldsFunc(strings.ToLower(s), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '.'
	})
	return strings.Join(words, "-")
}

// cdf plots the distribution of the time to the first byte.
func (c *CellResult) cdf() *figure {
	title := c.Cell.Axis
	if c.Cell.Value != "-" {
		title += ": " + c.Cell.Value
	}
	f := newFigure("cdf-"+slug(c.Cell.Axis+" "+c.Cell.Value), title, "time from Accept to the first byte", "fraction of connections")
	logTimes(&f.plot.X)
	f.plot.Y.Min, f.plot.Y.Max = 0, 1
	for s := range NumStrategies {
		points := c.Outcomes[s].FirstByte.CDF
		if len(points) == 0 {
			continue
		}
		xys := plotter.XYs{{X: float64(points[0].NS), Y: 0}}
		for _, q := range points {
			xys = append(xys, plotter.XY{X: float64(q.NS), Y: q.Fraction})
		}
		f.line(s.String(), xys, int(s), plotter.PreStep)
	}
	return f
}

// late plots the median time to the first byte against the RTU's delay.
func late(axis []CellResult) *figure {
	f := newFigure(slug(axis[0].Cell.Axis), axis[0].Cell.Axis+": median time to the first byte", "delay of the RTU", "")
	logTimes(&f.plot.X)
	logTimes(&f.plot.Y)
	for s := range NumStrategies {
		var xys plotter.XYs
		for i := range axis {
			if d, y := axis[i].Cell.RTUDelay, axis[i].Outcomes[s].FirstByte.P50; d > 0 && y != nil {
				xys = append(xys, plotter.XY{X: float64(d), Y: float64(*y)})
			}
		}
		if len(xys) > 0 {
			f.line(s.String(), xys, int(s), plotter.NoStep)
		}
	}
	return f
}

// figure plots what waiting WQEs cost on the move to RTS: the least of the runs, which a busy
// machine disturbs least.
func (c *Costs) figure() *figure {
	f := newFigure("cost-by-wqes", "the move from RTR to RTS: processor time, best of the runs", "WQEs that waited", "")
	f.plot.X.Scale, f.plot.X.Tick.Marker = plot.LogScale{}, plot.TickerFunc(powersOfTwo)
	logTimes(&f.plot.Y)
	for i, l := range []struct {
		name string
		of   func(*WaitingCost) Timing
	}{
		{"a publishes", func(w *WaitingCost) Timing { return w.Publish }},
		{"b posts its queue", func(w *WaitingCost) Timing { return w.Flush }},
		{"a, to first packet", func(w *WaitingCost) Timing { return w.FirstPacket }},
		{"b, to first packet", func(w *WaitingCost) Timing { return w.FirstFlushed }},
	} {
		var xys plotter.XYs
		for j := range c.ByWQEs {
			if w := &c.ByWQEs[j]; w.WQEs > 0 {
				xys = append(xys, plotter.XY{X: float64(w.WQEs), Y: max(l.of(w).Min, 1)})
			}
		}
		if len(xys) > 0 {
			f.line(l.name, xys, i, plotter.NoStep)
		}
	}
	return f
}

// newFigure begins a figure. A logarithmic y axis has no label of its own, for the plot would
// make room for it as if the axis were linear: the title says what it is.
func newFigure(name, title, x, y string) *figure {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(4)
	p.BackgroundColor = color.White
	grid := plotter.NewGrid()
	grid.Vertical.Color = color.Gray{0xdd}
	grid.Horizontal.Color = color.Gray{0xdd}
	p.Add(grid)
	return &figure{name: name, plot: p}
}

// line adds a line in the colour and dashes of the strategy with this number.
func (f *figure) line(name string, xys plotter.XYs, i int, step plotter.StepKind) {
	l, err := plotter.NewLine(xys)
	if err != nil {
		panic("BUG: deferral: plot: " + err.Error()) // no points, or not finite
	}
	l.StepStyle = step
	l.Color, l.Width, l.Dashes = strategyColors[i], vg.Points(1.5), strategyDashes[i]
	f.plot.Add(l)
	legend := plot.NewLegend()
	legend.Top, legend.Left = true, true
	legend.TextStyle.Font.Size = vg.Points(10)
	legend.Padding, legend.YOffs = vg.Points(2), vg.Points(-4)
	legend.Add(name, l)
	f.legend = append(f.legend, legend)
}

// logTimes makes an axis logarithmic, with times at its powers of ten.
func logTimes(a *plot.Axis) {
	a.Scale = plot.LogScale{}
	a.Tick.Marker = plot.TickerFunc(func(lo, hi float64) (ticks []plot.Tick) {
		for e := math.Floor(math.Log10(lo)); e <= math.Ceil(math.Log10(hi)); e++ {
			for _, m := range []float64{1, 2, 5} {
				v := m * math.Pow(10, e)
				if v < lo*0.999 || v > hi*1.001 {
					continue
				}
				t := plot.Tick{Value: v}
				if m == 1 || hi/lo < 200 {
					t.Label = inASCII(time.Duration(math.Round(v)))
				}
				ticks = append(ticks, t)
			}
		}
		return ticks
	})
}

func powersOfTwo(lo, hi float64) (ticks []plot.Tick) {
	for v := 1.0; v <= hi*1.001; v *= 2 {
		if v < lo*0.999 {
			continue
		}
		t := plot.Tick{Value: v}
		if e := int(math.Round(math.Log2(v))); e%2 == 0 {
			t.Label = fmt.Sprint(int(v))
		}
		ticks = append(ticks, t)
	}
	return ticks
}
