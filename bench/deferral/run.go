package deferral

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// Config says how much to study. The zero value is the whole study with its defaults.
type Config struct {
	// Seed decides all cells; 0 means 1.
	Seed uint64
	// Trials is how many trials an ordinary cell gets for each strategy, deep ones ten
	// times as many; 0 means 1000, which is what a 99th percentile takes.
	Trials int
	// Budget is the time after which no more trials are begun, and costs are measured by
	// fewer runs; 0 means 100 s, negative none. A report that it cut short says so.
	Budget time.Duration
	// Workers is how many cells are played at a time; 0 means as many as there are cores.
	Workers int
	// Axis keeps only the cells whose axis or value contains it; "" keeps all.
	Axis string
	// NoCells and NoCosts leave out a half of the study.
	NoCells, NoCosts bool
	// Progress, when not nil, is called when a batch of the cells' trials is done, by one
	// goroutine at a time.
	Progress func(done, total int)
	// Stop, when closed, ends the study as soon as what is being played is over. The report
	// has what was measured until then, and is marked as truncated.
	Stop <-chan struct{}
}

func (c *Config) stopped() bool {
	select {
	case <-c.Stop:
		return true
	default:
		return false
	}
}

func (c *Config) resolve() {
	if c.Seed == 0 {
		c.Seed = 1
	}
	if c.Trials <= 0 {
		c.Trials = 1000
	}
	if c.Budget == 0 {
		c.Budget = 100 * time.Second
	}
	if c.Workers <= 0 {
		c.Workers = runtime.GOMAXPROCS(0)
	}
}

// Run does the study. The costs come first and alone, because they are timed, and may take a
// quarter of the budget; then the cells, over all cores, whose figures depend on the seed and
// the number of trials only. The error says which trial failed, and how to play it again.
func Run(cfg Config) (*Report, error) {
	cfg.resolve()
	began := time.Now()
	r := &Report{Schema: SchemaID, Seed: cfg.Seed, Trials: cfg.Trials, Machine: machine()}
	if !cfg.NoCosts {
		limit := time.Duration(0)
		if cfg.Budget > 0 {
			limit = cfg.Budget / 4
		}
		costs, err := measureCosts(limit, cfg.stopped)
		if err != nil {
			return nil, err
		}
		r.Costs = costs
		r.Truncated = costs == nil
	}
	if !cfg.NoCells {
		var cells []Cell
		for _, c := range Cells() {
			if strings.Contains(c.Axis, cfg.Axis) || strings.Contains(c.Value, cfg.Axis) {
				cells = append(cells, c)
			}
		}
		if len(cells) == 0 {
			return nil, fmt.Errorf("deferral: no cell's axis or value contains %q", cfg.Axis)
		}
		deadline := time.Time{}
		if cfg.Budget > 0 {
			deadline = began.Add(cfg.Budget)
		}
		var truncated bool
		var err error
		if r.Cells, truncated, err = playCells(&cfg, cells, deadline); err != nil {
			return nil, err
		}
		r.Truncated = r.Truncated || truncated
	}
	r.Machine.LoadAfter = loadAverage()
	r.Elapsed = time.Since(began)
	return r, nil
}

// job is a batch of trials of one strategy in one cell.
type job struct {
	cell     int
	strategy Strategy
	first, n int
	tally    *tally
}

// jobs divides the cells' trials: first the first batch of every cell and strategy, so that
// a study which is cut short has something about everything.
func jobs(cells []Cell, trials int) []*job {
	var list []*job
	for round, more := 0, true; more; round++ {
		more = false
		for i := range cells {
			c := &cells[i]
			batch, total := c.batch(), c.trials(trials)
			first := round * batch
			if first >= total {
				continue
			}
			more = more || first+batch < total
			for s := range NumStrategies {
				list = append(list, &job{cell: i, strategy: s, first: first, n: min(batch, total-first)})
			}
		}
	}
	return list
}

// playCells plays all jobs and adds up what they counted, in their order. The first batch of
// every cell is played even after the deadline.
func playCells(cfg *Config, cells []Cell, deadline time.Time) (out []CellResult, truncated bool, err error) {
	list := jobs(cells, cfg.Trials)
	var (
		mu   sync.Mutex
		next int
		done int
		errs []error
		wg   sync.WaitGroup
	)
	take := func() *job {
		mu.Lock()
		defer mu.Unlock()
		if next == len(list) || len(errs) > 0 {
			return nil
		}
		j := list[next]
		if cfg.stopped() || j.first > 0 && !deadline.IsZero() && time.Now().After(deadline) {
			truncated = true
			return nil
		}
		next++
		return j
	}
	for range cfg.Workers {
		wg.Go(func() {
			for j := take(); j != nil; j = take() {
				t, err := play(&cells[j.cell], j.strategy, cfg.Seed, j.first, j.n)
				mu.Lock()
				j.tally = t
				if err != nil {
					errs = append(errs, err)
				}
				if done++; cfg.Progress != nil {
					cfg.Progress(done, len(list))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(errs) > 0 {
		return nil, false, errors.Join(errs...)
	}
	return collect(cells, list), truncated, nil
}

// collect makes the results of the jobs that were played. A cell of which none was is left out.
func collect(cells []Cell, list []*job) []CellResult {
	sums := make([][NumStrategies]tally, len(cells))
	for _, j := range list {
		if j.tally != nil {
			sums[j.cell][j.strategy].add(j.tally)
		}
	}
	var out []CellResult
	for i := range cells {
		if !slices.ContainsFunc(sums[i][:], func(t tally) bool { return t.Trials > 0 }) {
			continue
		}
		c := &cells[i]
		result := CellResult{Cell: *c}
		for s := range NumStrategies {
			t := &sums[i][s]
			result.Outcomes[s] = Outcome{
				Counts:    t.Counts,
				FirstByte: quantilesOf(t.firstByte, c.Plot),
				LastByte:  quantilesOf(t.lastByte, false),
				ToWire:    quantilesOf(t.toWire, false),
			}
		}
		out = append(out, result)
	}
	return out
}
