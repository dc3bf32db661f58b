//go:build !soak

package netsim

const mixSeeds, mixOps = 10, 10_000
