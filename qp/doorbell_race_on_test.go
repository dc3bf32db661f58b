//go:build race

package qp

const underRace = true
