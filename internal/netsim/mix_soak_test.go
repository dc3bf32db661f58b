//go:build soak

package netsim

// A hundred seeds, ten thousand operations each.
const mixSeeds, mixOps = 100, 10_000
