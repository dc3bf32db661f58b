// Package paths lets test suites run with one fast path of a device switched off: what is
// correct only with it is not correct.
package paths

import (
	"flag"
	"fmt"
	"strings"

	"github.com/doorbell-rdma/doorbell/transport"
)

// off is what a name switches off.
var off = map[string]func(*transport.Config){
	"gso":     func(c *transport.Config) { c.NoGSO = true },
	"gro":     func(c *transport.Config) { c.NoGRO = true },
	"spin":    func(c *transport.Config) { c.Spin = -1 },
	"buffers": func(c *transport.Config) { c.RecvBuffer, c.SendBuffer = stock, stock },
}

// stock is what a system grants whose rmem_max and wmem_max nobody has raised: 212,992 bytes
// after the kernel has doubled it.
const stock = 212_992 / 2

// Flag is the value of the flag -off; its zero value switches nothing off.
type Flag []string

// NewFlag registers the flag -off with the test's flags.
func NewFlag() *Flag {
	f := new(Flag)
	flag.Var(f, "off", "a comma-separated list of what devices do without: gso, gro, spin, buffers")
	return f
}

// String is the list as it was given.
func (f *Flag) String() string { return strings.Join(*f, ",") }

// Set takes a comma-separated list.
func (f *Flag) Set(list string) error {
	*f = nil
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		if off[name] == nil {
			return fmt.Errorf("%q is none of gso, gro, spin and buffers", name)
		}
		*f = append(*f, name)
	}
	return nil
}

// Apply switches off what the flag says.
func (f *Flag) Apply(c *transport.Config) {
	for _, name := range *f {
		off[name](c)
	}
}
