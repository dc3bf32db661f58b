//go:build soak

package transport_test

import "time"

// TestRush in the long form.
const (
	defaultRushFor  = 10 * time.Minute
	defaultRushSize = 10_000
)
