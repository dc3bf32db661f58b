// Package arch keeps the import graph pointing one way. The graph is the architecture: the
// protocol runs without sockets, clocks, goroutines and locks because the packages that
// hold it cannot reach any, and it stays that way because a test reads every import.
//
// [Layers] is the table: one row for every package, with what it may import. [Check] reads
// the Go files of a tree (all of them, whatever their build tags) and returns what breaks
// the table:
//
//   - a package without a row, or an import that its row does not list;
//   - a module that is not on the approved list of its kind of package;
//   - in a [Layer] that is SansIO: packages of the standard library for sockets, files, logs and
//     blocking locks, functions of time that read or wait for a clock, and go statements;
//   - an import of unsafe in a file not named *_unsafe.go, *_linux.go or *_linux_ARCH.go.
//
// Tests may import every package of ours below the programs, the modules for tests and the
// whole standard library. Nested modules, testdata, and files tagged "ignore" are not read.
//
// The test of this package runs Check on the repository and is part of "make test"; "make
// arch" runs it alone. Nothing else imports this package.
package arch
