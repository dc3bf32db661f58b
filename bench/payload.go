package bench

import (
	"bytes"
	"fmt"
	"math/rand/v2"
)

// Payloads are the sorts of data that compression is measured with: what does not compress,
// lines of a program's log, and zeros.
var Payloads = []string{"random", "text", "zero"}

// Payload returns n bytes of a sort of Payloads, always the same; nil for a sort that is not
// one.
func Payload(sort string, n int) []byte {
	switch sort {
	case "random":
		b := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{1}).Read(b) // never fails
		return b
	case "text":
		var b bytes.Buffer
		for i := uint32(0); b.Len() < n; i++ {
			fmt.Fprintf(&b, "ts=%d level=info msg=\"queue pair moved\" qpn=0x%06x from=RTR to=RTS took=%dus\n",
				1700000000+i*17, i*2654435761&0xffffff, i*i%977)
		}
		return b.Bytes()[:n]
	case "zero":
		return make([]byte, n)
	}
	return nil
}
