package roce

import "strconv"

// hexDigits returns v in lower case hexadecimal with at least n digits.
func hexDigits(v uint64, n int) string {
	const zeros = "0000000000000000"
	s := strconv.FormatUint(v, 16)
	if len(s) < n {
		s = zeros[:n-len(s)] + s
	}
	return s
}
