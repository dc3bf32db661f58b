package arch

// Module is the path of the module whose packages the table names.
const Module = "github.com/doorbell-rdma/doorbell"

// Layer is one row of the table: a package and what its files, tests apart, may import.
type Layer struct {
	// Package is the directory below the module's root. "bench/..." is bench and all
	// below it; the row that fits most closely counts. "." is the root itself.
	Package string
	// Imports lists packages of this module, with "..." as in Package. A package may
	// always import what is below the same "..." row as itself.
	Imports []string
	// Modules lists the other modules that it may import, by path.
	Modules []string
	// SansIO says that it runs without sockets, clocks, goroutines, locks and logs.
	SansIO bool
	// Program says that nothing outside the row may import it, tests included.
	Program bool
}

// The modules that DESIGN.md approves of. A library package takes from libraryModules only,
// so that who imports Doorbell downloads little; a sans-IO package has no use for sockets.
var (
	pureModules = []string{
		"github.com/klauspost/compress",
		"github.com/valyala/bytebufferpool",
		"golang.org/x/sys/cpu",
	}
	libraryModules = []string{
		"github.com/klauspost/compress",
		"github.com/valyala/bytebufferpool",
		"golang.org/x/net",
		"golang.org/x/sys",
	}
	programModules = append([]string{
		"github.com/HdrHistogram/hdrhistogram-go",
		"github.com/go-echarts/go-echarts/v2",
		"github.com/gopacket/gopacket",
		"github.com/pelletier/go-toml/v2",
		"github.com/prometheus/client_golang",
		"github.com/santhosh-tekuri/jsonschema/v6",
		"github.com/schollz/progressbar/v3",
		"github.com/spf13/cobra",
		"github.com/vbauerster/mpb/v8",
		"golang.org/x/perf",
		"gonum.org/v1/plot",
	}, libraryModules...)
	testModules = append([]string{
		"go.uber.org/goleak",
		"pgregory.net/rapid",
	}, programModules...)
)

// wireImports is what a wire is made of.
var wireImports = []string{
	"cm", "qp", "roce", "verbs", "ring",
	"internal/link", "internal/mr", "internal/yield",
}

// Layers is the architecture, from the bottom to the top.
var Layers = []Layer{
	{Package: "verbs", SansIO: true},
	{Package: "internal/link", SansIO: true},
	{Package: "internal/yield"},
	{Package: "internal/arch"},

	{Package: "roce", Imports: []string{"verbs"}, Modules: pureModules, SansIO: true},
	{Package: "ring", Imports: []string{"internal/yield"}, Modules: pureModules, SansIO: true},
	{Package: "qp", Imports: []string{"roce", "verbs", "ring", "internal/yield"}, Modules: pureModules, SansIO: true},
	{Package: "cm", Imports: []string{"roce", "verbs"}, Modules: pureModules, SansIO: true},
	{Package: "internal/rsocket", Imports: []string{"verbs"}, Modules: pureModules, SansIO: true},
	{Package: "internal/mr", Imports: []string{"verbs", "qp"}, Modules: pureModules, SansIO: true},
	{Package: "internal/wire", Imports: wireImports, Modules: pureModules, SansIO: true},

	{Package: "internal/netsim", Imports: append([]string{"internal/wire"}, wireImports...), Modules: testModules},
	{Package: "internal/udp", Imports: []string{"internal/link"}, Modules: libraryModules},
	{Package: "internal/park", Imports: []string{"internal/yield"}, Modules: libraryModules},

	{Package: "internal/pack", Modules: pureModules},
	{Package: "internal/role", Imports: []string{"verbs", "internal/yield"}, Modules: libraryModules},

	{
		Package: "transport",
		Imports: append([]string{"internal/wire", "internal/role", "internal/udp", "internal/park", "internal/pack", "internal/rsocket"}, wireImports...),
		Modules: libraryModules,
	},

	{Package: "internal/linuxpeer", Imports: []string{"transport", "verbs"}, Modules: libraryModules},

	{
		Package: "bench/...",
		Imports: []string{"transport", "verbs", "ring", "qp", "roce", "cm", "internal/..."},
		Modules: programModules,
		Program: true,
	},
	{
		Package: "cmd/perf/...",
		Imports: []string{"bench/...", "internal/linuxpeer", "transport", "verbs", "roce"},
		Modules: programModules,
		Program: true,
	},
	{
		Package: "examples/...",
		Imports: []string{"transport", "verbs"},
		Modules: programModules,
		Program: true,
	},
	{Package: "internal/paths", Imports: []string{"transport", "verbs"}},
	{
		Package: "interop/...",
		Imports: []string{"internal/linuxpeer", "transport", "verbs", "roce"},
		Modules: programModules,
		Program: true,
	},
}

// sansIOForbidden lists the packages of the standard library that a sans-IO package may not
// import; "os/..." is os and all below it.
var sansIOForbidden = []string{
	"context", "io/ioutil", "log/...", "net/...", "os/...", "sync", "syscall/...", "testing/...",
}

// sansIOAllowed lists the exceptions to sansIOForbidden.
var sansIOAllowed = []string{"net/netip"}

// clockFuncs are the functions of package time that read a clock or wait for one.
var clockFuncs = map[string]bool{
	"After": true, "AfterFunc": true, "NewTicker": true, "NewTimer": true, "Now": true,
	"Since": true, "Sleep": true, "Tick": true, "Until": true,
}
