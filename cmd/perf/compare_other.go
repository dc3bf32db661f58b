//go:build !linux

package main

import (
	"context"

	"github.com/doorbell-rdma/doorbell/bench/floor"
)

// quiet tells how much of the CPUs others used: unknown on this system, so nothing.
type quiet struct{ pids []int }

func (*quiet) begin() {}

func (*quiet) end() float64 { return 0 }

func resident() int64 { return 0 }

func available() int64 { return 0 }

func kernelAndCPU() (kernel, cpu string) { return "", "" }

// namespaces exist on Linux only.
type namespaces struct{}

func (*namespaces) remove() {}

func (e *arena) floorBetween(context.Context, int, floor.Params) (map[string]float64, error) {
	return nil, skipf("network namespaces are Linux's")
}

func (e *arena) productBetween(context.Context, int, string, ...[]string) (map[string]float64, error) {
	return nil, skipf("network namespaces are Linux's")
}
