package pack

import "fmt"

// Method says how a block is packed. The zero value is none: the bytes as they are.
type Method uint8

// The methods. Their numbers travel in block headers and must not change.
const (
	None Method = 0
	S2   Method = 1
	Zstd Method = 2

	methods = 3
)

var methodNames = [methods]string{"none", "s2", "zstd"}

// String returns the name that ParseMethod knows.
func (m Method) String() string {
	if m < methods {
		return methodNames[m]
	}
	return fmt.Sprintf("method %d", uint8(m))
}

// Valid reports whether m is one of the methods.
func (m Method) Valid() bool { return m < methods }

// Set is a set of methods as peers offer it to each other, a bit each; None has none.
type Set uint8

// SetOf returns the set with the methods given.
func SetOf(ms ...Method) (s Set) {
	for _, m := range ms {
		if m != None && m.Valid() {
			s |= 1 << (m - 1)
		}
	}
	return s
}

// Has reports whether the set has m; every set has None.
func (s Set) Has(m Method) bool { return m == None || m.Valid() && s&(1<<(m-1)) != 0 }
