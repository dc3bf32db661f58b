package deferral

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// Machine is where a study ran and how busy it was. What the system does not tell is zero.
type Machine struct {
	GOOS, GOARCH, Go, CPU string
	// Cores is how many the program may use.
	Cores int
	// LoadBefore and LoadAfter are the load averages of one minute, negative if unknown.
	LoadBefore, LoadAfter float64
}

// Busy reports whether others wanted the cores when the study began: then times of the
// processor mean little.
func (m *Machine) Busy() bool { return m.LoadBefore > float64(m.Cores)/2 }

func machine() Machine {
	load := loadAverage()
	return Machine{
		GOOS: runtime.GOOS, GOARCH: runtime.GOARCH, Go: runtime.Version(), CPU: cpuModel(),
		Cores: runtime.GOMAXPROCS(0), LoadBefore: load, LoadAfter: load,
	}
}

// loadAverage reads the load average of the last minute where Linux has it, else -1.
func loadAverage() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return -1
	}
	first, _, _ := strings.Cut(string(b), " ")
	v, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return -1
	}
	return v
}

// cpuModel reads the processor's name where Linux tells it.
func cpuModel() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
