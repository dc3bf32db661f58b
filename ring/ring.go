package ring

import (
	"math/bits"
	"reflect"
)

// pad keeps fields of different owners on different cache lines; see the package comment.
type pad [128]byte

// RoundUp returns the smallest power of two that is at least n and at least 1. It panics
// when an int cannot hold it.
func RoundUp(n int) int {
	if n <= 1 {
		return 1
	}
	shift := bits.Len(uint(n - 1))
	if shift >= bits.UintSize-1 {
		panic("BUG: ring: capacity too large")
	}
	return 1 << shift
}

// hasPointers reports whether values of type t contain anything the garbage collector follows.
func hasPointers(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Array:
		return t.Len() > 0 && hasPointers(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if hasPointers(t.Field(i).Type) {
				return true
			}
		}
		return false
	case reflect.Bool, reflect.Uintptr,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64, reflect.Complex64, reflect.Complex128:
		return false
	}
	return true
}
