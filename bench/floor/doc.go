// Package floor measures what there is without Doorbell: the least that a message can cost
// on this machine, by bare system calls, and what TCP and plain memory make of the same work.
// Doorbell's figures mean something only beside these, from the same run.
//
//	PingPong    UDP datagrams back and forth, spinning or sleeping
//	Stream      UDP datagrams one way with checksums, copies and acknowledgements
//	Bulk        writes of one size into a TCP connection
//	Echo        framed small messages that a TCP server sends back
//	Ring, Chan  entries from one thread to another, in this process
//
// A floor is not a transport: it repairs no loss, knows no connections, and its window is a
// constant. It does the work that any reliable transport over UDP has to do, by the cheapest
// means known: threads of their own, system calls without the scheduler's bookkeeping where
// they cannot block, segmentation offload, nothing allocated while it runs.
//
// Run measures. The two ends are goroutines of this process, or processes of their own, each
// held to its CPU, when [Params.Exec] says how to start one: a program that calls [End] with
// the arguments that follow. Programs for other transports keep to the same protocol by
// [Transport.End] and are run by [Ends].
//
//	r, err := floor.Run(ctx, floor.Params{Kind: floor.PingPong, Size: 80, Duration: time.Second})
//	fmt.Println(r.P50, r.P99)
//
// [Calibrate] measures how far apart the CPUs are at the moment. In a virtual machine that
// changes from minute to minute, and everything that moves data between cores changes with it
// by a factor of three, so figures are compared only when taken in the same [Mode].
package floor
