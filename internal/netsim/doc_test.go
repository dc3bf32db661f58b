package netsim

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestTestsExist: what docs/testing.md names is there, in the package that it says.
func TestTestsExist(t *testing.T) {
	doc, err := os.ReadFile("../../docs/testing.md")
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	in := map[string]string{} // what each package declares, between spaces
	pkg, tests := "", 0
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(string(doc), -1) {
		name := m[1]
		if info, err := os.Stat(filepath.Join("../..", name)); err == nil && info.IsDir() {
			pkg = name
			continue
		}
		if !strings.HasPrefix(name, "Test") && !strings.HasPrefix(name, "Fuzz") {
			continue
		}
		tests++
		if in[pkg] == "" {
			files, err := filepath.Glob(filepath.Join("../..", pkg, "*_test.go"))
			if err != nil || len(files) == 0 {
				t.Fatalf("%s has no tests (%v)", pkg, err)
			}
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				for _, d := range declared.FindAllSubmatch(b, -1) {
					in[pkg] += " " + string(d[1]) + " "
				}
			}
		}
		if !strings.Contains(in[pkg], " "+name+" ") {
			t.Errorf("%s has no %s", pkg, name)
		}
	}
	if tests < 100 {
		t.Errorf("only %d tests are named", tests)
	}
}
