// Package yield puts scheduling points into lock-free code for tests. Built with the tag
// doorbellyield, Point sometimes lets another goroutine run and sometimes spins, so that
// windows of a few nanoseconds become wide enough for a race test to fall into. Without the
// tag it is an empty function that the compiler inlines away.
//
//	go test -tags doorbellyield -race ./ring ./qp ./internal/park
package yield
