//go:build !soak

package transport_test

import "time"

const httpFor = time.Second
