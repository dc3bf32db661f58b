package gate

import (
	"cmp"
	"math"
	"path"
	"slices"
	"strings"
)

// Key names a benchmark: the import path of its package, empty if the file does not say, and
// its name as it is printed, without "Benchmark", with sub-benchmarks and "-GOMAXPROCS".
type Key struct{ Pkg, Name string }

// String is the last element of the package's path and the name: "qp.PostRTS-2".
func (k Key) String() string {
	if k.Pkg == "" {
		return k.Name
	}
	return path.Base(k.Pkg) + "." + k.Name
}

// bare is the key without "-GOMAXPROCS".
func (k Key) bare() Key {
	k.Name, _ = splitProcs(k.Name)
	return k
}

func compareKeys(a, b Key) int {
	return cmp.Or(strings.Compare(a.Pkg, b.Pkg), strings.Compare(a.Name, b.Name))
}

// splitProcs cuts the "-4" off "Name/x-4"; procs is empty if there is none, which is how the
// testing package writes GOMAXPROCS=1.
func splitProcs(name string) (bare, procs string) {
	i := strings.LastIndexByte(name, '-')
	if i < 0 || i+1 == len(name) || strings.Trim(name[i+1:], "0123456789") != "" {
		return name, ""
	}
	return name[:i], name[i+1:]
}

// noPair is the pair of a sample whose file does not number its runs.
const noPair = ""

// Sample is one line of a benchmark file.
type Sample struct {
	// Pair is the value of the file's "pair:" line above it: the name of the run, by which it
	// finds its neighbour in the other file. Empty if there is none.
	Pair string
	// Values are the measurements, with their units as printed, each unit once.
	Values []Value
}

// Value is a measurement and its unit: "ns/op", "B/op", "msgs/s".
type Value struct {
	Unit string
	X    float64
}

// value returns the value of a unit, NaN if there is none.
func (s *Sample) value(unit string) float64 {
	for _, v := range s.Values {
		if v.Unit == unit {
			return v.X
		}
	}
	return math.NaN()
}

// Bench is what a file has of one benchmark.
type Bench struct {
	Key     Key
	Samples []Sample
	// Faults says why the samples cannot be trusted; empty if they can.
	Faults []string
}

// values lists the samples' values of a unit, in the file's order; a sample without it is NaN.
func (b *Bench) values(unit string) []float64 {
	v := make([]float64, len(b.Samples))
	for i := range v {
		v[i] = b.Samples[i].value(unit)
	}
	return v
}

// units lists the units of all samples, in the alphabet's order.
func (b *Bench) units() []string {
	var all []string
	for _, s := range b.Samples {
		for _, v := range s.Values {
			if !slices.Contains(all, v.Unit) {
				all = append(all, v.Unit)
			}
		}
	}
	slices.Sort(all)
	return all
}

// Set is what a benchmark file says. Its zero value is a file without any benchmark.
type Set struct {
	// Name is the file's name, or what a Run calls its side.
	Name string
	// Benches are the benchmarks, sorted by key.
	Benches []*Bench
	// Machine has the distinct values of "goos", "goarch", "cpu" and "procs" (GOMAXPROCS).
	Machine map[string][]string
	// Faults says what is wrong with the file as a whole; empty if nothing is.
	Faults []string
	// Better and Exact hold what the file's "Unit" lines say: whether more is better, and
	// whether a unit's values are exact.
	Better map[string]bool
	Exact  map[string]bool
	// trailers says that the file has the "ok" or "PASS" which ends a package's output, open
	// that the last package has none.
	trailers, open bool
}

// bench returns the benchmark of a key, or nil.
func (s *Set) bench(k Key) *Bench {
	i, ok := slices.BinarySearchFunc(s.Benches, k, func(b *Bench, k Key) int { return compareKeys(b.Key, k) })
	if !ok {
		return nil
	}
	return s.Benches[i]
}

// runs is the largest number of samples of any benchmark.
func (s *Set) runs() int {
	n := 0
	for _, b := range s.Benches {
		n = max(n, len(b.Samples))
	}
	return n
}
