//go:build !soak

package netsim

const mixSeeds, mixOps = 10, 20_000
