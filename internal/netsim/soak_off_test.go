//go:build !soak

package netsim

const soak = false
