package bench

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// allTests lists the workloads.
func allTests() (all []Test) {
	for t := Test(1); t.Valid(); t++ {
		all = append(all, t)
	}
	return all
}

func TestTestNames(t *testing.T) {
	want := []string{"send_lat", "send_bw", "write_lat", "write_bw", "read_lat", "read_bw", "atomic_lat", "atomic_bw"}
	var got []string
	for _, test := range allTests() {
		got = append(got, test.String())
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := Test(0).String() + " " + Test(9).String(); got != "test 0 test 9" {
		t.Error(got)
	}
}

func TestParamsCheck(t *testing.T) {
	for _, test := range allTests() {
		if p := Defaults(test); p.Check() != nil {
			t.Errorf("defaults of %v: %v", test, p.Check())
		}
	}
	for name, change := range map[string]func(p *Params){
		"iterations":           func(p *Params) { p.Iters = MaxIters + 1 },
		"duration in ns":       func(p *Params) { p.Iters, p.Duration = 0, MaxDuration+1 },
		"tx depth":             func(p *Params) { p.TxDepth = 0 },
		"rx depth":             func(p *Params) { p.RxDepth = MaxDepth + 1 },
		"number of QPs":        func(p *Params) { p.QPs = 0 },
		"CQ moderation":        func(p *Params) { p.CQMod = 0 },
		"post list":            func(p *Params) { p.PostList = MaxPostList + 1 },
		"inline size":          func(p *Params) { p.Inline = -1 },
		"MTU code":             func(p *Params) { p.MTU = 6 },
		"largest message size": func(p *Params) { p.All, p.Size = true, 1 },
		"posted work requests (QPs times both depths)": func(p *Params) { p.QPs, p.TxDepth = MaxQPs, MaxDepth },
		"number of QPs of a latency test":              func(p *Params) { *p = Defaults(SendLat); p.QPs = 2 },
	} {
		p := Defaults(SendBW)
		change(&p)
		var out *RangeError
		if err := p.Check(); !errors.As(err, &out) || out.Name != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, tc := range []struct {
		test   Test
		change func(p *Params)
		want   string
	}{
		{SendBW, func(p *Params) { p.Duration = time.Second }, "one of iterations and duration must be given, not both"},
		{SendBW, func(p *Params) { p.Iters = 0 }, "one of iterations and duration must be given, not both"},
		{SendBW, func(p *Params) { p.Test = 0 }, "unknown test 0"},
		{SendBW, func(p *Params) { p.Test = 9 }, "unknown test 9"},
		{SendLat, func(p *Params) { p.Bidirectional = true }, "a latency test is never bidirectional"},
		{SendBW, func(p *Params) { p.Type = 0 }, "unknown connection type QPT_0, want RC, UC or UD"},
		{SendBW, func(p *Params) { p.Type = verbs.GSI }, "unknown connection type GSI, want RC, UC or UD"},
		{WriteBW, func(p *Params) { p.Type = verbs.UD }, "connection type UD has no WRITEs: write_bw needs RC or UC"},
		{ReadLat, func(p *Params) { p.Type = verbs.UC }, "connection type UC has no READs and atomics: read_lat needs RC"},
		{AtomicBW, func(p *Params) { p.Type = verbs.UD }, "connection type UD has no READs and atomics: atomic_bw needs RC"},
		{SendBW, func(p *Params) { p.Size = MaxSize + 1 }, "message size of send_bw over RC is 1073741825, want 0 to 1073741824"},
		{SendBW, func(p *Params) { p.Size = -1 }, "message size of send_bw over RC is -1, want 0 to 1073741824"},
		{WriteLat, func(p *Params) { p.Size = 0 }, "message size of write_lat over RC is 0, want 1 to 1073741824"},
		{ReadBW, func(p *Params) { p.Size = 0 }, "message size of read_bw over RC is 0, want 1 to 1073741824"},
		{SendLat, func(p *Params) { p.Type, p.Size = verbs.UD, 4097 }, "message size of send_lat over UD is 4097, want 0 to 4096"},
		{SendLat, func(p *Params) { p.Type, p.Size, p.MTU = verbs.UD, 1025, verbs.MTU1024 }, "message size of send_lat over UD is 1025, want 0 to 1024"},
		{AtomicLat, func(p *Params) { p.Size = 4 }, "message size of atomic_lat over RC is 4, want 8 to 8"},
		{AtomicLat, func(p *Params) { p.All = true }, "atomics have one size"},
		{WriteBW, func(p *Params) { p.SRQ = true }, "write_bw takes no receives, so there is nothing to share"},
		{SendBW, func(p *Params) { p.SRQ, p.QPs, p.RxDepth = true, 1000, 66 }, "shared receives (QPs times rx depth) is 66000, want 1 to 65536"},
		{ReadBW, func(p *Params) { p.Inline = 1 }, "read_bw sends nothing that could be inline"},
		{ReadBW, func(p *Params) { p.Outs = 0 }, "outstanding requests of read_bw is 0, want 1 to 128"},
		{ReadBW, func(p *Params) { p.Outs = 129 }, "outstanding requests of read_bw is 129, want 1 to 128"},
		{WriteBW, func(p *Params) { p.Outs = 1 }, "outstanding requests of write_bw is 1, want 0 to 0"},
		{ReadBW, func(p *Params) { p.Swap = true }, "read_bw executes no atomics"},
	} {
		p := Defaults(tc.test)
		tc.change(&p)
		if err := p.Check(); err == nil || err.Error() != tc.want {
			t.Errorf("%v: %v, want %q", tc.test, err, tc.want)
		}
	}
}

// anyParams draws parameters that Check accepts.
func anyParams(t *rapid.T) Params {
	p := Defaults(rapid.SampledFrom(allTests()).Draw(t, "test"))
	p.TxDepth, p.RxDepth = rapid.IntRange(1, 512).Draw(t, "tx"), rapid.IntRange(1, 512).Draw(t, "rx")
	p.CQMod, p.PostList = rapid.IntRange(1, MaxCQMod).Draw(t, "mod"), rapid.IntRange(1, MaxPostList).Draw(t, "list")
	p.MTU = verbs.MTU(rapid.IntRange(0, 5).Draw(t, "mtu"))
	v, types, largest := p.Test.Verb(), []verbs.QPType{verbs.RC, verbs.UC, verbs.UD}, MaxSize
	switch v {
	case VerbWrite:
		types = types[:2]
	case VerbRead, VerbAtomic:
		types = types[:1]
		p.Outs, p.Swap = rapid.IntRange(1, MaxOuts).Draw(t, "outs"), v == VerbAtomic && rapid.Bool().Draw(t, "swap")
	}
	if p.Type = rapid.SampledFrom(types).Draw(t, "type"); p.Type == verbs.UD {
		largest = 256
	}
	if v != VerbAtomic {
		p.Size = rapid.IntRange(1, largest).Draw(t, "size")
		if rapid.Bool().Draw(t, "all") {
			p.All, p.Size = true, max(2, p.Size>>7)
		}
	}
	if !v.fetches() {
		p.Inline = rapid.IntRange(0, MaxInline).Draw(t, "inline")
	}
	if !p.Test.Latency() {
		p.QPs = rapid.IntRange(1, MaxQPs).Draw(t, "qps")
		p.Bidirectional = rapid.Bool().Draw(t, "both")
	}
	p.SRQ = v == VerbSend && p.QPs*p.RxDepth <= maxShared && rapid.Bool().Draw(t, "srq")
	p.Iters = 0
	if rapid.Bool().Draw(t, "timed") {
		p.Duration = time.Duration(rapid.Int64Range(1, int64(MaxDuration)).Draw(t, "duration"))
	} else {
		p.Iters = rapid.Int64Range(1, MaxIters).Draw(t, "iters")
	}
	return p
}

// TestParamsDerived: what is derived from parameters never stalls a run or leaves a buffer.
func TestParamsDerived(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := anyParams(t)
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
		if w := p.window(); w < 1 || w > p.TxDepth || w > p.RxDepth && p.Test.Verb() == VerbSend {
			t.Errorf("window %d", w)
		}
		if n, m := p.localLen(), p.exposedLen(); n < p.Size || m < p.Size+p.head() || p.Test.Verb() != VerbSend && m != n {
			t.Errorf("memory of %d and %d bytes for messages of %d", n, m, p.Size)
		}
		if n := p.repost(); n < 1 || n > p.RxDepth {
			t.Errorf("repost %d", n)
		}
		for _, depth := range []int{p.TxDepth, p.RxDepth} {
			if n := p.slots(depth); n < 1 || n > p.QPs*depth || n > 1 && n*p.Size > 1<<20 {
				t.Errorf("%d slots of %d", n, p.Size)
			}
		}
		sizes := p.Sizes()
		if len(sizes) == 0 || slices.Max(sizes) > p.Size || p.warmup(p.Size) < 1 {
			t.Errorf("sizes %v", sizes)
		}
	})
}

func TestHelloRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// As the peer gets it: padded.
		got := func(h hello) (got hello) {
			b := h.encode()
			if len(b) > transport.MaxDialPrivateData || h.kind == helloData && len(b) > transport.MaxDialPrivateData-16 {
				t.Fatalf("%d bytes, which leave no room for the transport's own", len(b))
			}
			if err := got.decode(append(b, make([]byte, transport.MaxDialPrivateData-len(b))...)); err != nil {
				t.Fatal(err)
			}
			return got
		}
		control := hello{version: Version, kind: helloControl, session: rapid.Uint64().Draw(t, "session"), Params: anyParams(t)}
		data := hello{version: Version, kind: helloData, session: control.session, index: uint16(rapid.IntRange(0, MaxQPs-1).Draw(t, "index"))}
		for _, want := range []hello{control, data} {
			if got := got(want); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		}
	})
}

// FuzzExchange decodes whatever peers may send; what is accepted can be checked and printed.
func FuzzExchange(f *testing.F) {
	h := hello{version: Version, kind: helloControl, Params: Defaults(SendBW)}
	f.Add(h.encode())
	m := message{kind: msgReport, size: 64, count: 10, duration: time.Second, peak: 1e9, lat: Latency{1, 5, 2, 3, 4, 2.5, 1}}
	f.Add(m.encode())
	f.Add(refusal("no"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h hello
		if h.decode(b) == nil && h.Check() == nil {
			if h.memory() < 0 || h.memory() > 2*MaxSize+transport.GRHLen<<20+queueEntry*maxPosted || len(h.Sizes()) > 23 {
				t.Errorf("%+v takes %d bytes", h, h.memory())
			}
		}
		var m message
		if m.decode(b) == nil {
			r := combine(&Params{Test: SendBW, Bidirectional: true}, &m, &m)
			for _, v := range []float64{r.Peak, r.Average, r.Rate} {
				if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
					t.Errorf("%+v gives %+v", m, r)
				}
			}
		}
		for _, c := range refusalText(b) {
			if c < ' ' || c > '~' {
				t.Errorf("refusal contains %q", c)
			}
		}
		_ = checkWelcome(b)
	})
}

func TestMessageRoundTrip(t *testing.T) {
	want := message{
		kind: msgReport, measured: true, interrupted: true, phase: 7, size: 64, count: 1e10, duration: 2 * time.Hour,
		peak: 1e10, lat: Latency{Min: 1, Max: 9, Median: 2, P99: 3, P999: 4, Mean: 2.5, StdDev: 0.5},
		lost: 1e9, queue: queue{qpn: 0xABCDEF, qkey: 0xFEDCBA98, memory: verbs.RemoteMR{Addr: 1 << 63, RKey: 1 << 31, Length: 1<<32 - 1}},
	}
	var got message
	if err := got.decode(want.encode()); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
	for name, change := range map[string]func(m *message){
		"kind": func(m *message) { m.kind = 8 }, "size": func(m *message) { m.size = MaxSize + 1 },
		"time": func(m *message) { m.duration = -1 }, "order": func(m *message) { m.lat.P99 = 1 },
		"NaN": func(m *message) { m.peak = math.NaN() }, "Inf": func(m *message) { m.lat.Mean = math.Inf(1) },
		"negative": func(m *message) { m.lat.StdDev = -1 },
	} {
		m := want
		change(&m)
		if got.decode(m.encode()) == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestWRID(t *testing.T) {
	id := wrid(kindSend, MaxQPs-1, 1<<40+5)
	if id>>56 != kindSend || id>>40&0xFFFF != MaxQPs-1 || id&seqMask != 5 {
		t.Errorf("%#x", id)
	}
	for _, tc := range []struct{ count, seq, want uint64 }{
		{0, 0, 0}, {0, 7, 7}, {7, 7, 7}, {seqMask, 0, 1 << 40}, {1<<40 - 3, 2, 1<<40 + 2}, {5<<40 + 9, 12, 5<<40 + 12},
	} {
		if got := advance(tc.count, tc.seq); got != tc.want {
			t.Errorf("advance(%d, %d) = %d, want %d", tc.count, tc.seq, got, tc.want)
		}
	}
}

// TestLatencyRecorder compares with the sorted samples.
func TestLatencyRecorder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 3, 100, 100000} {
		r := newLatencyRecorder()
		var samples []float64
		for range n {
			v := time.Duration(5000 * math.Exp(rng.NormFloat64()))
			r.record(v)
			samples = append(samples, float64(v))
		}
		slices.Sort(samples)
		mean, dev := 0.0, 0.0
		for _, v := range samples {
			mean += v / float64(n)
		}
		for _, v := range samples {
			dev += (v - mean) * (v - mean) / float64(n)
		}
		got := r.divided(2)
		near := func(name string, got, want float64) {
			if math.Abs(got-want) > 0.002*want+1 {
				t.Errorf("%d samples: %s %v, want %v", n, name, got, want)
			}
		}
		at := func(q float64) float64 { return samples[max(int(math.Ceil(q*float64(n)))-1, 0)] / 2 }
		near("min", float64(got.Min), samples[0]/2)
		near("max", float64(got.Max), samples[n-1]/2)
		near("median", float64(got.Median), at(0.5))
		near("p99", float64(got.P99), at(0.99))
		near("p99.9", float64(got.P999), at(0.999))
		near("mean", got.Mean, mean/2)
		near("deviation", got.StdDev, math.Sqrt(dev)/2)
	}
	if got := newLatencyRecorder().divided(2); got != (Latency{}) {
		t.Errorf("nothing recorded: %+v", got)
	}
	r := newLatencyRecorder()
	r.record(0)
	r.record(time.Hour) // beyond the histogram
	if got := r.divided(2); got.Max != 30*time.Minute || got.P999 > got.Max || got.Min != 0 {
		t.Errorf("extremes: %+v", got)
	}
}

func TestMeter(t *testing.T) {
	var m meter
	m.begin(time.Second, 2000)
	if m.elapsed() != 1 || m.peakRate() != 0 {
		t.Errorf("nothing: %+v", m)
	}
	m.add(time.Second+100*time.Microsecond, 1000) // a burst too short to be a peak
	m.add(time.Second+2*time.Millisecond, 1000)   // a million a second
	m.add(time.Second+4*time.Millisecond, 6000)   // three million a second
	m.add(time.Second+6*time.Millisecond, 1999)   // too few to be a peak
	m.add(time.Second+10*time.Millisecond, 1)
	if m.n != 10000 || m.elapsed() != 10*time.Millisecond || math.Abs(m.peakRate()-3e6) > 1 {
		t.Errorf("%+v: peak %v", m, m.peakRate())
	}
	m.begin(0, 0)
	m.add(100*time.Microsecond, 100) // as a whole too short
	if math.Abs(m.peakRate()-1e6) > 1 {
		t.Errorf("peak %v, want the average", m.peakRate())
	}
}
