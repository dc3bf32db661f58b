//go:build soak

package netsim

const soak = true
