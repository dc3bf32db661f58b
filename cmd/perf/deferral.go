package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/bench/deferral"
)

// study is what the deferral command's flags say.
type study struct {
	cfg      deferral.Config
	seed     int64
	budget   time.Duration
	json     bool
	jsonFile string
	plots    string
	png      bool
	progress bool
}

func (a *app) deferral() *cobra.Command {
	s := &study{seed: 1, budget: 100 * time.Second}
	s.cfg.Trials = 1000
	cmd := &cobra.Command{
		Use:   "deferral",
		Short: "Study what the deferred doorbell costs, and what its alternatives cost",
		Long: `Compares four ways to have something to send before the RTU: the deferred
doorbell, a queue in the program, RTS before REP, and posts that are refused and
retried. Some forty cells run on a simulated network in virtual time, where the
seed decides every figure; costs of the processor are measured in real time. It
opens no sockets, and takes about half a minute of two idle cores.`,
		Example: `  perf deferral
  perf deferral --only "silent client" --trials 200 --no-costs
  perf deferral --out_json_file study.json --plots plots`,
		Args: atMost(0, "no operands"),
	}
	f := cmd.Flags()
	f.Var(whole[int64]{&s.seed, 1, math.MaxInt64}, "seed", "decides all cells")
	f.Var(whole[int]{&s.cfg.Trials, 1, 1_000_000}, "trials", "trials of a cell for each strategy; some cells get more or fewer")
	f.Var(seconds{&s.budget, time.Millisecond, 24 * time.Hour}, "budget", "begin no more trials after this time")
	f.StringVar(&s.cfg.Axis, "only", "", "only the cells whose axis or value contains `TEXT`")
	f.BoolVar(&s.cfg.NoCosts, "no-costs", false, "leave out what is measured in real time")
	f.BoolVar(&s.cfg.NoCells, "no-cells", false, "leave out what runs in virtual time")
	f.BoolVar(&s.json, "out_json", false, "print the report as JSON, and nothing else on stdout")
	f.StringVar(&s.jsonFile, "out_json_file", "", "write the report as JSON to `FILE`")
	f.StringVar(&s.plots, "plots", "", "write plots as SVG into `DIR`")
	f.BoolVar(&s.png, "png", false, "write them as PNG too")
	f.BoolVar(&s.progress, "progress", false, "say on stderr how far it is")
	cmd.RunE = func(*cobra.Command, []string) error {
		if s.png && s.plots == "" {
			return usageError{errors.New("--png is about --plots, which is missing")}
		}
		if s.cfg.NoCells && (s.cfg.NoCosts || s.cfg.Axis != "") {
			return usageError{errors.New("--no-cells leaves nothing to do with --no-costs, and nothing to choose from for --only")}
		}
		return a.runStudy(s)
	}
	return cmd
}

// runStudy runs the study until its end or the first signal, and reports what there is.
func (a *app) runStudy(s *study) error {
	first, stop := a.onSignal(func() {})
	defer stop()
	s.cfg.Seed, s.cfg.Budget, s.cfg.Stop = uint64(s.seed), s.budget, first.Done()
	if s.progress {
		tenths := 0
		s.cfg.Progress = func(done, total int) {
			for ; tenths < 10*done/total; tenths++ {
				fmt.Fprintf(a.stderr, "perf: %d %% of the trials are played\n", 10*(tenths+1))
			}
		}
	}
	r, err := deferral.Run(s.cfg)
	if err != nil {
		return err
	}
	var doc bytes.Buffer
	if err := r.WriteJSON(&doc); err != nil {
		return err
	}
	if s.json {
		_, err = a.stdout.Write(doc.Bytes())
	} else {
		err = r.WriteTable(a.stdout)
	}
	if s.jsonFile != "" {
		err = errors.Join(err, os.WriteFile(s.jsonFile, doc.Bytes(), 0o644))
	}
	if s.plots != "" {
		formats := []string{"svg"}
		if s.png {
			formats = append(formats, "png")
		}
		_, plotErr := r.WritePlots(s.plots, formats...)
		err = errors.Join(err, plotErr)
	}
	if first.Err() != nil {
		err = errors.Join(errInterrupted, err)
	}
	return err
}
