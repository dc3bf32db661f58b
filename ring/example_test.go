package ring_test

import (
	"fmt"

	"github.com/doorbell-rdma/doorbell/ring"
)

// A producer fills slots in place and publishes the batch with one store.
func ExampleSPSC() {
	r := ring.NewSPSC[string](4)
	for _, s := range []string{"REQ", "REP", "RTU"} {
		slot := r.Reserve()
		if slot == nil {
			break // full
		}
		*slot = s
	}
	fmt.Println("before Commit:", r.Len())
	r.Commit()
	for s, ok := r.Pop(); ok; s, ok = r.Pop() {
		fmt.Println(s)
	}
	// Output:
	// before Commit: 0
	// REQ
	// REP
	// RTU
}
