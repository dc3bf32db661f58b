package floor

import (
	"math"
	"slices"
	"time"
)

// warmUp is how many round trips are not counted.
const warmUp = 1000

// maxSamples is how many round trips are remembered one by one; the mean alone goes on.
const maxSamples = 4 << 20

// Samples are times of round trips. The zero value is ready to use.
type Samples struct{ ns []uint32 }

// newSamples makes room for as many as may come, so that adding one costs nothing.
func newSamples(p *Params) Samples {
	n := min(maxSamples, max(p.Iters, int64(p.Duration/time.Microsecond)))
	ns := make([]uint32, n)
	for i := range ns {
		ns[i] = 1 // touch the pages now
	}
	return Samples{ns[:0]}
}

// Add remembers a time, if there is room.
func (s *Samples) Add(d time.Duration) {
	if len(s.ns) < maxSamples {
		s.ns = append(s.ns, uint32(min(d, math.MaxUint32)))
	}
}

// Into sets the result's percentiles and mean; it sorts the samples.
func (s *Samples) Into(r *Result) {
	n := len(s.ns)
	if n == 0 {
		return
	}
	slices.Sort(s.ns)
	r.P50, r.P99, r.Mean = time.Duration(s.ns[n/2]), time.Duration(s.ns[n*99/100]), r.Each()
}
