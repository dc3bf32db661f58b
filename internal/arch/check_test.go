package arch

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// TestTree checks the repository. The files are opened through package os, so the go
// command counts them as inputs and runs the test again when one of them changes.
func TestTree(t *testing.T) {
	const root = "../.."
	mod, err := os.ReadFile(root + "/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(mod), "module "+Module+"\n") {
		t.Fatalf("%s is not the root of %s", root, Module)
	}
	faults, err := Check(os.DirFS(root), Module, Layers)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		t.Error(f)
	}
}

// TestCheck shows for every rule a file that breaks it and one like it that does not.
func TestCheck(t *testing.T) {
	const (
		ours   = Module + "/"
		fine   = ""
		locked = "no sockets, files, logs or locks here"
	)
	imports := func(path string) string { return fmt.Sprintf("package p\n\nimport _ %q\n", path) }
	body := func(stmt string) string {
		return "package p\n\nimport \"time\"\n\nfunc f(d time.Duration) {\n\t" + stmt + "\n}\n"
	}
	tests := []struct {
		name, file, src string
		want            string // a part of the only fault; nothing when the file is fine
	}{
		{"downwards", "qp/a.go", imports(ours + "ring"), fine},
		{"upwards", "ring/a.go", imports(ours + "qp"), "ring/a.go:3: ring: may not import qp"},
		{"sideways", "cm/a.go", imports(ours + "qp"), "may not import qp"},
		{"the bottom imports nothing", "verbs/a.go", imports(ours + "roce"), "may not import roce"},
		{"past a layer", "transport/a.go", imports(ours + "qp"), fine},
		{"simulation in the product", "transport/a.go", imports(ours + "internal/netsim"), "may not import internal/netsim"},
		{"simulation in a test", "transport/a_test.go", imports(ours + "internal/netsim"), fine},
		{"a test looks upwards", "verbs/example_test.go", imports(ours + "transport"), fine},
		{"a library imports a program", "transport/a.go", imports(ours + "bench"), "may not import bench"},
		{"a test imports a program", "transport/a_test.go", imports(ours + "cmd/perf"), "may not import cmd/perf"},
		{"the command imports the benchmarks", "cmd/perf/a.go", imports(ours + "bench/gate"), fine},
		{"the command reaches down", "cmd/perf/a.go", imports(ours + "internal/wire"), "may not import internal/wire"},
		{"benchmarks reach down", "bench/study/a.go", imports(ours + "internal/wire"), fine},
		{"benchmarks among themselves", "bench/study/a.go", imports(ours + "bench"), fine},
		{"benchmarks import the command", "bench/a.go", imports(ours + "cmd/perf"), "may not import cmd/perf"},
		{"an unknown package", "util/a.go", imports("fmt"), "util/a.go: no row for package util; add it to the table"},
		{"below a known package", "qp/sub/a.go", imports("fmt"), "no row for package qp/sub"},
		{"the root is a package too", "a.go", imports("fmt"), "no row for package ."},
		{"an unknown import", "qp/a.go", imports(ours + "util"), "may not import util, which has no row"},
		{"our name is a prefix", "qp/a.go", imports(Module + "2/x"), "not on the list"},

		{"a listed module", "transport/a.go", imports("golang.org/x/sys/unix"), fine},
		{"a module of the same prefix", "transport/a.go", imports("golang.org/x/system"), "not on the list"},
		{"a module of the programs", "transport/a.go", imports("github.com/spf13/cobra"), "not on the list"},
		{"the same in a program", "cmd/perf/a.go", imports("github.com/spf13/cobra"), fine},
		{"a module of the tests", "qp/a.go", imports("pgregory.net/rapid"), "not on the list"},
		{"the same in a test", "qp/a_test.go", imports("pgregory.net/rapid"), fine},
		{"an unknown module in a test", "qp/a_test.go", imports("github.com/stretchr/testify/assert"), "not on the list"},
		{"system calls in the protocol", "qp/a.go", imports("golang.org/x/sys/unix"), "not on the list"},
		{"processor features in the protocol", "roce/a.go", imports("golang.org/x/sys/cpu"), fine},
		{"a module at the bottom", "verbs/a.go", imports("golang.org/x/sys/cpu"), "not on the list"},

		{"sockets", "internal/wire/a.go", imports("net"), locked},
		{"sockets further down", "cm/a.go", imports("net/http"), locked},
		{"addresses", "internal/wire/a.go", imports("net/netip"), fine},
		{"files", "roce/a.go", imports("os"), locked},
		{"system calls", "qp/a.go", imports("syscall"), locked},
		{"logs", "qp/a.go", imports("log"), locked},
		{"structured logs", "qp/a.go", imports("log/slog"), locked},
		{"locks", "ring/a.go", imports("sync"), locked},
		{"atomics", "ring/a.go", imports("sync/atomic"), fine},
		{"contexts", "cm/a.go", imports("context"), locked},
		{"locks in a test", "ring/a_test.go", imports("sync"), fine},
		{"locks above", "transport/a.go", imports("sync"), fine},
		{"durations", "qp/a.go", body("_ = 3 * d.Seconds()"), fine},
		{"reading a clock", "qp/a.go", body("_ = time.Now()"), "qp/a.go:6: qp: uses time.Now"},
		{"a clock as a value", "cm/a.go", body("_ = time.Since"), "uses time.Since"},
		{"sleeping", "qp/a.go", body("time.Sleep(d)"), "uses time.Sleep"},
		{"a clock renamed", "qp/a.go", "package p\n\nimport clock \"time\"\n\nvar n = clock.Now()\n", "uses time.Now"},
		{"a clock under a dot", "qp/a.go", "package p\n\nimport . \"time\"\n\nvar n = Now()\n", "hides clocks"},
		{"a clock in a test", "qp/a_test.go", body("time.Sleep(d)"), fine},
		{"a clock above", "transport/a.go", body("time.Sleep(d)"), fine},
		{"a goroutine", "internal/wire/a.go", body("go f(d)"), "starts a goroutine"},
		{"a goroutine above", "transport/a.go", body("go f(d)"), fine},

		{"unsafe", "ring/a.go", imports("unsafe"), "unsafe belongs into"},
		{"unsafe where it may be", "ring/slots_unsafe.go", imports("unsafe"), fine},
		{"unsafe on Linux", "internal/udp/send_linux.go", imports("unsafe"), fine},
		{"unsafe on one processor", "internal/park/futex_linux_amd64.go", imports("unsafe"), fine},
		{"unsafe elsewhere", "internal/udp/send_other.go", imports("unsafe"), "unsafe belongs into"},
		{"unsafe by a name alike", "internal/udp/unsafe.go", imports("unsafe"), "unsafe belongs into"},
		{"unsafe in a test", "ring/a_test.go", imports("unsafe"), fine},
		{"cgo", "internal/udp/a.go", imports("C"), "no cgo"},

		{"build tags do not hide", "qp/a_windows.go", "//go:build race && windows\n\n" + imports("net"), locked},
		{"a generator is not built", "roce/gen.go", "//go:build ignore\n\n" + imports("os"), fine},
		{"testdata", "qp/testdata/a.go", imports("net"), fine},
		{"a hidden directory", ".cache/a.go", imports("net"), fine},
		{"no Go", "util/a.txt", "sync", fine},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			tree := fstest.MapFS{test.file: {Data: []byte(test.src)}}
			got, err := Check(tree, Module, Layers)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case test.want == fine && len(got) != 0:
				t.Errorf("got %q, want none", got)
			case test.want != fine && (len(got) != 1 || !strings.Contains(got[0], test.want)):
				t.Errorf("got %q, want one with %q", got, test.want)
			}
		})
	}
}

// TestNestedModule checks that a module of its own is left alone, and only that.
func TestNestedModule(t *testing.T) {
	src := []byte("package p\n\nimport _ \"github.com/quic-go/quic-go\"\n")
	tree := fstest.MapFS{
		"bench/peers/go.mod": {Data: []byte("module peers\n")},
		"bench/peers/a.go":   {Data: src},
	}
	if got, err := Check(tree, Module, Layers); err != nil || len(got) != 0 {
		t.Errorf("nested module: got %q, %v", got, err)
	}
	delete(tree, "bench/peers/go.mod")
	if got, err := Check(tree, Module, Layers); err != nil || len(got) != 1 {
		t.Errorf("without its go.mod: got %q, %v, want one fault", got, err)
	}
}

// TestManyFaults checks that nothing after the first fault is lost, also behind a file that
// is not Go, and that a directory is reported once.
func TestManyFaults(t *testing.T) {
	tree := fstest.MapFS{
		"qp/a.go":   {Data: []byte("package p\n\nimport (\n\t_ \"net\"\n\t_ \"sync\"\n)\n")},
		"qp/b.go":   {Data: []byte("not Go\n")},
		"util/a.go": {Data: []byte("package p\n")},
		"util/b.go": {Data: []byte("package p\n")},
	}
	got, err := Check(tree, Module, Layers)
	if err != nil || len(got) != 4 {
		t.Errorf("got %q, %v, want four faults", got, err)
	}
}

// TestLayers checks the table itself: each package once, and no import of a package that
// stands further down in the table, so that it can be read from the bottom to the top.
func TestLayers(t *testing.T) {
	c := checker{module: Module, layers: Layers}
	for i, l := range Layers {
		same := func(o Layer) bool { return o.Package == l.Package }
		if slices.ContainsFunc(Layers[:i], same) {
			t.Errorf("two rows for %s", l.Package)
		}
		for _, imp := range l.Imports {
			if strings.HasPrefix(imp, "internal/...") {
				continue
			}
			target := c.find(strings.TrimSuffix(imp, "/..."))
			if target == nil || !slices.ContainsFunc(Layers[:i], func(o Layer) bool { return o.Package == target.Package }) {
				t.Errorf("%s imports %s, which is not above it in the table", l.Package, imp)
			}
		}
	}
}
