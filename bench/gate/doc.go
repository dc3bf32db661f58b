// Package gate says whether benchmarks have become slower: of two files, or of two revisions
// that it builds and runs itself, by turns. It judges any Go project's benchmarks; perf gate
// is its command line, and docs/gate.md explains it to those who use it.
//
// It is made for machines that cannot be trusted: shared, noisy, and changing their speed by
// a factor of three from one second to the next. A verdict is Regression only if the change is
// larger than a threshold and larger than what chance brings, for all benchmarks of a run
// together; it is Pass only if there was enough to see a regression by; and everything else,
// what is missing, broken, failed or not comparable, is Inconclusive, which is not green.
//
// It is not a place to browse measurements: benchstat and its like do that, and read the same
// files.
//
//	file or Run --> Read --> Set (base) --+
//	file or Run --> Read --> Set (head) --+--> Judge --> Report --> WriteText, WriteMarkdown, WriteJSON
//	gate.toml ----> LoadRules --> Rules --+
//
// Read turns a file into samples and a list of what is wrong with it. Judge pairs them, tests
// them (paired.go, unpaired.go), corrects for their number (Holm), and adds what the rules say
// of the head alone. Run makes the two files: it builds both revisions in worktrees and runs
// each group of benchmarks of one right after the same of the other, in changing order.
//
//	head, err := gate.Read(file, "head.txt")
//	if err != nil {
//		return err
//	}
//	report := gate.Judge(base, head, gate.DefaultRules())
//	report.WriteText(os.Stdout)
//	os.Exit(report.ExitCode())
package gate
