package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// whole is a flag that takes a whole number within bounds. It is a pflag.Value.
type whole[T int | int64 | uint16] struct {
	p        *T
	min, max T
}

func (w whole[T]) String() string {
	if w.p == nil {
		return ""
	}
	return strconv.FormatInt(int64(*w.p), 10)
}

func (w whole[T]) Type() string { return "N" }

// Set takes decimal digits only: 0x10, 1e3, 10k and 1.5 are refused rather than guessed at.
func (w whole[T]) Set(s string) error {
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil || v < int64(w.min) || v > int64(w.max) {
		return fmt.Errorf("want a whole number from %d to %d", w.min, w.max)
	}
	*w.p = T(v)
	return nil
}

// seconds is a flag that takes a time in seconds, with a fraction if need be.
type seconds struct {
	p        *time.Duration
	min, max time.Duration
}

func (s seconds) String() string {
	if s.p == nil || *s.p == 0 {
		return ""
	}
	return strconv.FormatFloat(s.p.Seconds(), 'f', -1, 64)
}

func (s seconds) Type() string { return "SECONDS" }

func (s seconds) Set(text string) error {
	v, err := strconv.ParseFloat(text, 64)
	// Digits and a point only: no infinity, no exponent, no hexadecimal.
	if err != nil || strings.Trim(text, "0123456789.") != "" || v < s.min.Seconds() || v > s.max.Seconds() {
		return fmt.Errorf("want seconds from %v to %v", s.min.Seconds(), s.max.Seconds())
	}
	*s.p = time.Duration(math.Round(v * 1e9))
	return nil
}

// choice is a flag that takes one of a few words.
type choice struct {
	p     *string
	words []string
}

func (c choice) String() string {
	if c.p == nil {
		return ""
	}
	return *c.p
}

func (c choice) Type() string { return strings.Join(c.words, "|") }

func (c choice) Set(s string) error {
	if !slices.Contains(c.words, s) {
		return fmt.Errorf("want %s", strings.Join(c.words, " or "))
	}
	*c.p = s
	return nil
}

// mtuFlag is a flag that takes a path MTU in bytes.
type mtuFlag struct{ p *verbs.MTU }

func (m mtuFlag) String() string {
	if m.p == nil || *m.p == 0 {
		return ""
	}
	return m.p.String()
}

func (m mtuFlag) Type() string { return "BYTES" }

func (m mtuFlag) Set(s string) error {
	n, err := strconv.Atoi(s)
	mtu, ok := verbs.MTUForBytes(n)
	if err != nil || !ok {
		return fmt.Errorf("want 256, 512, 1024, 2048 or 4096")
	}
	*m.p = mtu
	return nil
}
