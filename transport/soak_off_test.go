//go:build !soak

package transport_test

// TestRush in the plain suite: once.
const (
	defaultRushFor  = 0
	defaultRushSize = 500
)
