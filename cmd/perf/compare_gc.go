package main

import (
	"runtime"
	"time"
)

// collecting keeps the garbage collector of a process at work while something is measured.
type collecting struct {
	every time.Duration // from the end of a collection to the next; 0 is never
	heap  int           // MiB of pointers to follow
}

// node is what a heap of pointers is made of.
type node struct {
	left, right, next *node
	number            uint64
}

// nodeBytes is what a node takes on a 64-bit machine.
const nodeBytes = 32

// grow makes a tree of n nodes.
func grow(n int) *node {
	all := []*node{{}}
	for i := range n {
		parent := all[i/2]
		child := &node{next: parent, number: uint64(i)}
		if i%2 == 0 {
			parent.left = child
		} else {
			parent.right = child
		}
		if 2*len(all) <= n+1 {
			all = append(all, child)
		}
	}
	return all[0]
}

// start makes the heap and collects until stop is called, which waits for the last collection.
func (g *collecting) start() (stop func()) {
	if g.every <= 0 {
		return func() {}
	}
	root := grow(g.heap << 20 / nodeBytes)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		timer := time.NewTimer(0)
		defer timer.Stop()
		for {
			select {
			case <-quit:
				runtime.KeepAlive(root)
				return
			case <-timer.C:
			}
			runtime.GC()
			timer.Reset(g.every)
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}
