package arch

import (
	"fmt"
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// unsafeFile matches the names of files that may import unsafe.
var unsafeFile = regexp.MustCompile(`_(unsafe|linux)(_[a-z0-9]+)?\.go$`)

// Check reads the Go files of tree, the root of module, and returns what breaks the table,
// one line each, in the order of the files; a file that is not Go is a fault like others.
// The error is for what cannot be read.
func Check(tree fs.FS, module string, layers []Layer) ([]string, error) {
	c := checker{module: module, layers: layers}
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			if name != "." && skipped(tree, name) {
				return fs.SkipDir
			}
			return nil
		case path.Ext(name) != ".go":
			return nil
		}
		return c.file(tree, name)
	})
	return c.faults, err
}

// skipped says whether a directory holds nothing of the module: as the go command has it,
// and also a module of its own.
func skipped(tree fs.FS, dir string) bool {
	base := path.Base(dir)
	if base[0] == '.' || base[0] == '_' || base == "testdata" || base == "vendor" {
		return true
	}
	_, err := fs.Stat(tree, path.Join(dir, "go.mod"))
	return err == nil
}

// checker collects the faults of one tree.
type checker struct {
	module string
	layers []Layer
	faults []string
	// unknown is the directory last reported as missing from the table.
	unknown string
}

// file checks one file.
func (c *checker) file(tree fs.FS, name string) error {
	src, err := fs.ReadFile(tree, name)
	if err != nil {
		return err
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		c.faults = append(c.faults, err.Error())
		return nil
	}
	if ignored(f) {
		return nil
	}
	dir := path.Dir(name)
	layer := c.find(dir)
	if layer == nil {
		if c.unknown != dir {
			c.unknown = dir
			c.faults = append(c.faults, fmt.Sprintf("%s: no row for package %s; add it to the table in internal/arch", name, dir))
		}
		return nil
	}
	fault := func(n ast.Node, format string, args ...any) {
		pos := fset.Position(n.Pos())
		c.faults = append(c.faults, fmt.Sprintf("%s:%d: %s: %s", name, pos.Line, dir, fmt.Sprintf(format, args...)))
	}
	test := strings.HasSuffix(name, "_test.go")
	for _, spec := range f.Imports {
		imp, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		if complaint := c.imports(layer, imp, path.Base(name), test); complaint != "" {
			fault(spec, "%s", complaint)
		}
	}
	if layer.SansIO && !test {
		sansIO(f, fault)
	}
	return nil
}

// imports returns what is wrong with an import, or nothing.
func (c *checker) imports(layer *Layer, imp, file string, test bool) string {
	if imp == "unsafe" {
		if test || unsafeFile.MatchString(file) {
			return ""
		}
		return "unsafe belongs into *_unsafe.go or *_linux.go files"
	}
	if imp == "C" {
		return "no cgo"
	}
	if ours, ok := c.ours(imp); ok {
		return c.importsOurs(layer, ours, test)
	}
	if first, _, _ := strings.Cut(imp, "/"); strings.Contains(first, ".") {
		modules := layer.Modules
		if test {
			modules = testModules
		}
		if slices.ContainsFunc(modules, func(m string) bool { return within(imp, m+"/...") }) {
			return ""
		}
		return fmt.Sprintf("may not import %s: its module is not on the list for this package", imp)
	}
	matches := func(pattern string) bool { return within(imp, pattern) }
	if layer.SansIO && !test && slices.ContainsFunc(sansIOForbidden, matches) && !slices.ContainsFunc(sansIOAllowed, matches) {
		return fmt.Sprintf("may not import %s: no sockets, files, logs or locks here", imp)
	}
	return ""
}

// importsOurs is imports for a package of this module, given by its directory.
func (c *checker) importsOurs(layer *Layer, dir string, test bool) string {
	target := c.find(dir)
	switch {
	case target == layer:
		return ""
	case slices.ContainsFunc(layer.Imports, func(pattern string) bool { return within(dir, pattern) }):
		return ""
	case target == nil:
		return fmt.Sprintf("may not import %s, which has no row in the table", dir)
	case test && !target.Program:
		return ""
	}
	return fmt.Sprintf("may not import %s: the table does not list it", dir)
}

// ours returns the directory of an import path of this module.
func (c *checker) ours(imp string) (dir string, ok bool) {
	if imp == c.module {
		return ".", true
	}
	return strings.CutPrefix(imp, c.module+"/")
}

// find returns the row that fits dir most closely, or nil.
func (c *checker) find(dir string) *Layer {
	var best *Layer
	for i := range c.layers {
		l := &c.layers[i]
		if within(dir, l.Package) && (best == nil || len(l.Package) > len(best.Package) || l.Package == dir) {
			best = l
		}
	}
	return best
}

// within says whether a path is what a pattern names: itself, or with "/..." also all below.
func within(name, pattern string) bool {
	prefix, below := strings.CutSuffix(pattern, "/...")
	return name == prefix || below && strings.HasPrefix(name, prefix+"/")
}

// ignored says whether a file is kept out of every build by the tag "ignore", as programs
// are that generate code.
func ignored(f *ast.File) bool {
	for _, group := range f.Comments {
		if group.Pos() > f.Package {
			break
		}
		for _, comment := range group.List {
			if !constraint.IsGoBuild(comment.Text) {
				continue
			}
			expr, err := constraint.Parse(comment.Text)
			if err == nil && !expr.Eval(func(tag string) bool { return tag != "ignore" }) {
				return true
			}
		}
	}
	return false
}

// sansIO reports clocks and goroutines. It goes by the name under which the file imports
// package time, so a local variable called time would be taken for the package.
func sansIO(f *ast.File, fault func(ast.Node, string, ...any)) {
	clock := ""
	for _, spec := range f.Imports {
		if spec.Path.Value == `"time"` {
			clock = "time"
			if spec.Name != nil {
				clock = spec.Name.Name
			}
		}
	}
	if clock == "." {
		fault(f.Name, "imports time under the name of a dot, which hides clocks")
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			fault(n, "starts a goroutine")
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && clock != "" && x.Name == clock && clockFuncs[n.Sel.Name] {
				fault(n, "uses time.%s: time comes in as an argument", n.Sel.Name)
			}
		}
		return true
	})
}
